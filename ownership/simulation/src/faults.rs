//! Fault injection: what fails, when, and for how long. Several faults may overlap; all are drawn from the seed.

use std::sync::Arc;
use std::time::Duration;

use openraft::AsyncRuntime;

use crate::disk::{DiskHealth, ProcessEnd, ProcessResourceShortage};
use crate::network_model::NetworkConditions;
use crate::operator;
use crate::process;
use crate::rng::Rng;
use crate::runtime::SimulatedRuntime;
use crate::world::SimWorld;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FaultKind {
    Kill,
    PowerLoss,
    /// Power loss of all machines.
    Blackout,
    /// A process pauses for a while without noticing.
    Pause,
    /// Some nodes cannot talk to the rest.
    Partition,
    /// One node's messages are all lost in one direction.
    OneWay,
    /// A link goes down and up repeatedly.
    Flapping,
    /// Messages are lost, duplicated and late.
    Storm,
    SlowDisk,
    FailedFlush,
    FullDisk,
    /// The leadership is transferred to an unreachable node; nothing is written until that is over.
    FailedHandover,
}

impl FaultKind {
    /// All faults with their weight in the draw and their name in reports.
    const ALL: [(FaultKind, u64, &str); 12] = [
        (FaultKind::Kill, 5, "kills"),
        (FaultKind::PowerLoss, 5, "power losses"),
        (FaultKind::Blackout, 1, "blackouts"),
        (FaultKind::Pause, 4, "pauses"),
        (FaultKind::Partition, 4, "partitions"),
        (FaultKind::OneWay, 3, "one-way partitions"),
        (FaultKind::Flapping, 2, "flapping links"),
        (FaultKind::Storm, 3, "storms"),
        (FaultKind::SlowDisk, 2, "slow disks"),
        (FaultKind::FailedFlush, 2, "failed flushes"),
        (FaultKind::FullDisk, 1, "full disks"),
        (FaultKind::FailedHandover, 4, "failed handovers"),
    ];

    pub(crate) fn names() -> impl Iterator<Item = &'static str> {
        Self::ALL.into_iter().map(|(.., name)| name).chain([SHORTAGES])
    }

    fn draw(rng: &mut Rng) -> (FaultKind, &'static str) {
        let total = Self::ALL.iter().map(|(_, weight, _)| weight).sum();
        let mut at = rng.below(total);
        for (fault, weight, name) in Self::ALL {
            if at < weight {
                return (fault, name);
            }
            at -= weight;
        }
        unreachable!("less than the sum of the weights was drawn")
    }
}

/// Name of resource shortages in reports.
const SHORTAGES: &str = "shortages";

/// Makes processes run out of file descriptors, memory or threads, one after the other, until it is stopped. Without
/// file descriptors a process cannot accept connections either, so a broken one stays broken.
pub(crate) async fn inject_shortages(world: Arc<SimWorld>) {
    let mut rng = Rng::stream(world.plan.seed, SHORTAGES);
    loop {
        SimulatedRuntime::sleep(rng.millis(500, 8_000)).await;
        let (Some(node), Some(short)) = (victim(&world, &mut rng), rng.pick(&ProcessResourceShortage::ALL).copied())
        else {
            continue;
        };
        let Some(disk) = world.disk(node) else { continue };
        world.recorder.count(SHORTAGES);
        world.recorder.log(|| format!("{short:?} run short at node {node}"));
        let others: Vec<u64> = world.ids().into_iter().filter(|other| *other != node).collect();
        let broken = rng.pick(&others).copied().filter(|_| short == ProcessResourceShortage::Files);
        disk.set_shortage(Some(short));
        broken.into_iter().for_each(|other| world.fabric().cut(other, node));
        SimulatedRuntime::sleep(rng.millis(500, 12_000)).await;
        disk.set_shortage(None);
        broken.into_iter().for_each(|other| world.fabric().restore(other, node));
    }
}

/// Injects faults until it is stopped.
pub(crate) async fn inject_faults(world: Arc<SimWorld>) {
    let mut rng = Rng::stream(world.plan.seed, "faults");
    loop {
        let (low, high) = world.plan.calm_millis;
        SimulatedRuntime::sleep(rng.millis(low, high)).await;
        let (fault, name) = FaultKind::draw(&mut rng);
        world.recorder.count(name);
        world.add_to_digest(&[fault as u64]);
        drop(SimulatedRuntime::spawn(inject(world.clone(), fault, rng.fork())));
    }
}

/// Picks a node; the leader is more likely than others.
fn victim(world: &SimWorld, rng: &mut Rng) -> Option<u64> {
    let leader = world.leader().map(|leader| leader.id).filter(|_| rng.chance(400));
    leader.or_else(|| rng.pick(&world.ids()).copied())
}

async fn inject(world: Arc<SimWorld>, fault: FaultKind, mut rng: Rng) {
    let Some(node) = victim(&world, &mut rng) else { return };
    let lasts = rng.millis(500, 15_000);
    world.recorder.log(|| format!("{fault:?} at node {node}"));
    match fault {
        FaultKind::Kill => restart(&world, &mut rng, &[node], ProcessEnd::Killed).await,
        FaultKind::PowerLoss => restart(&world, &mut rng, &[node], ProcessEnd::PowerLoss).await,
        FaultKind::Blackout => {
            let all = world.ids();
            restart(&world, &mut rng, &all, ProcessEnd::PowerLoss).await;
        }
        FaultKind::Pause => {
            let Some(pid) = world.pid(node) else { return };
            process::pause(pid);
            SimulatedRuntime::sleep(rng.millis(100, 20_000)).await;
            process::resume(pid);
        }
        FaultKind::Partition => {
            let cut = partition(&world, &mut rng);
            SimulatedRuntime::sleep(lasts).await;
            restore_links(&world, &cut);
        }
        FaultKind::OneWay => {
            let hears = rng.chance(500);
            let others = world.ids().into_iter().filter(|other| *other != node);
            let cut: Vec<_> = others.map(|other| if hears { (node, other) } else { (other, node) }).collect();
            cut.iter().for_each(|(from, to)| world.fabric().cut(*from, *to));
            SimulatedRuntime::sleep(lasts).await;
            restore_links(&world, &cut);
        }
        FaultKind::Flapping => flap(&world, &mut rng, node).await,
        FaultKind::Storm => {
            let delay = *rng.pick(&[(500, 20_000), (1_000, 120_000), (20_000, 600_000)]).unwrap_or(&(500, 20_000));
            world.fabric().set(NetworkConditions { loss: rng.below(250), duplication: rng.below(200), delay });
            SimulatedRuntime::sleep(lasts).await;
            world.fabric().set(NetworkConditions::HEALTHY);
        }
        FaultKind::SlowDisk => {
            let worst = rng.millis(50, 2_000);
            degrade_disk(&world, node, (DiskHealth::Slow(worst), lasts)).await;
        }
        FaultKind::FailedFlush => degrade_disk(&world, node, (DiskHealth::FailsNextFlush, lasts)).await,
        FaultKind::FullDisk => degrade_disk(&world, node, (DiskHealth::Full, lasts)).await,
        FaultKind::FailedHandover => transfer_to_unreachable(&world, &mut rng).await,
    }
}

async fn restart(world: &Arc<SimWorld>, rng: &mut Rng, nodes: &[u64], ending: ProcessEnd) {
    for node in nodes {
        world.end_process(*node, ending);
    }
    for node in nodes {
        SimulatedRuntime::sleep(rng.millis(0, 8_000 / nodes.len() as u64)).await;
        world.start(*node);
    }
}

/// Cuts all links between two random groups of nodes. Returns the cut links.
fn partition(world: &SimWorld, rng: &mut Rng) -> Vec<(u64, u64)> {
    let ids = world.ids();
    let side: Vec<bool> = ids.iter().map(|_| rng.chance(400)).collect();
    let mut cut = Vec::new();
    for (a, here) in ids.iter().zip(&side) {
        cut.extend(ids.iter().zip(&side).filter(|(_, there)| here != *there).map(|(b, _)| (*a, *b)));
    }
    cut.iter().for_each(|(from, to)| world.fabric().cut(*from, *to));
    cut
}

fn restore_links(world: &SimWorld, cut: &[(u64, u64)]) {
    cut.iter().for_each(|(from, to)| world.fabric().restore(*from, *to));
}

async fn flap(world: &SimWorld, rng: &mut Rng, node: u64) {
    let others: Vec<u64> = world.ids().into_iter().filter(|other| *other != node).collect();
    for _ in 0..rng.within(3, 12) {
        let Some(other) = rng.pick(&others).copied() else { return };
        let cut = [(node, other), (other, node)];
        cut.iter().for_each(|(from, to)| world.fabric().cut(*from, *to));
        SimulatedRuntime::sleep(rng.millis(50, 1_500)).await;
        restore_links(world, &cut);
        SimulatedRuntime::sleep(rng.millis(50, 1_000)).await;
    }
}

/// Lets the leader transfer the leadership, possibly several times, to a voter that it cannot reach.
async fn transfer_to_unreachable(world: &Arc<SimWorld>, rng: &mut Rng) {
    let Some((leader, (voters, _))) = world.leader().zip(operator::members(world)) else { return };
    let others: Vec<u64> = voters.into_iter().filter(|other| *other != leader.id).collect();
    let Some(to) = rng.pick(&others).copied() else { return };
    let cut = [(leader.id, to), (to, leader.id)];
    cut.iter().for_each(|(from, to)| world.fabric().cut(*from, *to));
    for _ in 0..rng.within(1, 4) {
        let leader = leader.clone();
        let pid = leader.pid;
        let transfer = async move { leader.raft.trigger().transfer_leader(to).await.is_ok() };
        process::run_in(pid, || drop(SimulatedRuntime::spawn(transfer)));
        SimulatedRuntime::sleep(rng.millis(500, 2_500)).await;
    }
    restore_links(world, &cut);
}

async fn degrade_disk(world: &SimWorld, node: u64, (health, lasts): (DiskHealth, Duration)) {
    let Some(disk) = world.disk(node) else { return };
    disk.set_health(health);
    SimulatedRuntime::sleep(lasts).await;
    disk.set_health(DiskHealth::Fine);
}
