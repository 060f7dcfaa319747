//! What goes wrong, when, and for how long. Several things at once, all from the seed.

use std::sync::Arc;
use std::time::Duration;

use openraft::AsyncRuntime;

use crate::disk::{Ending, Health, Shortage};
use crate::fabric::Weather;
use crate::operator;
use crate::process;
use crate::rng::Rng;
use crate::runtime::Sim;
use crate::world::World;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    Kill,
    PowerLoss,
    /// All machines lose their power.
    Blackout,
    /// A process stops for a while and knows nothing of it.
    Pause,
    /// A part of the nodes cannot talk to the rest.
    Partition,
    /// One node is heard by nobody, or hears nobody.
    OneWay,
    /// A link comes and goes.
    Flapping,
    /// Messages are lost, doubled, and late.
    Storm,
    SlowDisk,
    FailedFlush,
    FullDisk,
    /// Leadership is handed to a node that hears nothing of it; nothing is written until that is over.
    FailedHandover,
}

impl Fault {
    /// Each with how often it is drawn beside the others, and the word for reports.
    const ALL: [(Fault, u64, &str); 12] = [
        (Fault::Kill, 5, "kills"),
        (Fault::PowerLoss, 5, "power losses"),
        (Fault::Blackout, 1, "blackouts"),
        (Fault::Pause, 4, "pauses"),
        (Fault::Partition, 4, "partitions"),
        (Fault::OneWay, 3, "one-way partitions"),
        (Fault::Flapping, 2, "flapping links"),
        (Fault::Storm, 3, "storms"),
        (Fault::SlowDisk, 2, "slow disks"),
        (Fault::FailedFlush, 2, "failed flushes"),
        (Fault::FullDisk, 1, "full disks"),
        (Fault::FailedHandover, 4, "failed handovers"),
    ];

    pub(crate) fn names() -> impl Iterator<Item = &'static str> {
        Self::ALL.into_iter().map(|(.., name)| name).chain([SHORTAGES])
    }

    fn draw(rng: &mut Rng) -> (Fault, &'static str) {
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

/// The word for reports of processes that lack something.
const SHORTAGES: &str = "shortages";

/// Lets processes run out of file handles, memory or threads, one after the other, until it is stopped. Without a file handle
/// a process accepts no connection either: one that breaks meanwhile stays broken.
pub(crate) async fn shortages(world: Arc<World>) {
    let mut rng = Rng::stream(world.plan.seed, SHORTAGES);
    loop {
        Sim::sleep(rng.millis(500, 8_000)).await;
        let (Some(node), Some(short)) = (victim(&world, &mut rng), rng.pick(&Shortage::ALL).copied()) else { continue };
        let Some(disk) = world.disk(node) else { continue };
        world.book.count(SHORTAGES);
        world.book.tell(|| format!("{short:?} run short at node {node}"));
        let others: Vec<u64> = world.ids().into_iter().filter(|other| *other != node).collect();
        let broken = rng.pick(&others).copied().filter(|_| short == Shortage::Files);
        disk.lacks(Some(short));
        broken.into_iter().for_each(|other| world.fabric().cut(other, node));
        Sim::sleep(rng.millis(500, 12_000)).await;
        disk.lacks(None);
        broken.into_iter().for_each(|other| world.fabric().mend(other, node));
    }
}

/// Injects faults until it is stopped.
pub(crate) async fn trouble(world: Arc<World>) {
    let mut rng = Rng::stream(world.plan.seed, "faults");
    loop {
        let (low, high) = world.plan.calm;
        Sim::sleep(rng.millis(low, high)).await;
        let (fault, name) = Fault::draw(&mut rng);
        world.book.count(name);
        world.trace(&[fault as u64]);
        drop(Sim::spawn(inject(world.clone(), fault, rng.fork())));
    }
}

/// A node, the leader more often than its share.
fn victim(world: &World, rng: &mut Rng) -> Option<u64> {
    let leader = world.leader().map(|leader| leader.id).filter(|_| rng.chance(400));
    leader.or_else(|| rng.pick(&world.ids()).copied())
}

async fn inject(world: Arc<World>, fault: Fault, mut rng: Rng) {
    let Some(node) = victim(&world, &mut rng) else { return };
    let lasts = rng.millis(500, 15_000);
    world.book.tell(|| format!("{fault:?} at node {node}"));
    match fault {
        Fault::Kill => restart(&world, &mut rng, &[node], Ending::Killed).await,
        Fault::PowerLoss => restart(&world, &mut rng, &[node], Ending::PowerLoss).await,
        Fault::Blackout => {
            let all = world.ids();
            restart(&world, &mut rng, &all, Ending::PowerLoss).await;
        }
        Fault::Pause => {
            let Some(pid) = world.pid(node) else { return };
            process::pause(pid);
            Sim::sleep(rng.millis(100, 20_000)).await;
            process::resume(pid);
        }
        Fault::Partition => {
            let cut = partition(&world, &mut rng);
            Sim::sleep(lasts).await;
            mend(&world, &cut);
        }
        Fault::OneWay => {
            let hears = rng.chance(500);
            let others = world.ids().into_iter().filter(|other| *other != node);
            let cut: Vec<_> = others.map(|other| if hears { (node, other) } else { (other, node) }).collect();
            cut.iter().for_each(|(from, to)| world.fabric().cut(*from, *to));
            Sim::sleep(lasts).await;
            mend(&world, &cut);
        }
        Fault::Flapping => flap(&world, &mut rng, node).await,
        Fault::Storm => {
            let delay = *rng.pick(&[(500, 20_000), (1_000, 120_000), (20_000, 600_000)]).unwrap_or(&(500, 20_000));
            world.fabric().set(Weather { loss: rng.below(250), duplication: rng.below(200), delay });
            Sim::sleep(lasts).await;
            world.fabric().set(Weather::FAIR);
        }
        Fault::SlowDisk => {
            let worst = rng.millis(50, 2_000);
            spoil(&world, node, (Health::Slow(worst), lasts)).await;
        }
        Fault::FailedFlush => spoil(&world, node, (Health::FailsToFlush, lasts)).await,
        Fault::FullDisk => spoil(&world, node, (Health::Full, lasts)).await,
        Fault::FailedHandover => hand_over(&world, &mut rng).await,
    }
}

async fn restart(world: &Arc<World>, rng: &mut Rng, nodes: &[u64], ending: Ending) {
    for node in nodes {
        world.end(*node, ending);
    }
    for node in nodes {
        Sim::sleep(rng.millis(0, 8_000 / nodes.len() as u64)).await;
        world.start(*node);
    }
}

/// Cuts the nodes in two, and some clients off one part.
fn partition(world: &World, rng: &mut Rng) -> Vec<(u64, u64)> {
    let ids = world.ids();
    let side: Vec<bool> = ids.iter().map(|_| rng.chance(400)).collect();
    let mut cut = Vec::new();
    for (a, here) in ids.iter().zip(&side) {
        cut.extend(ids.iter().zip(&side).filter(|(_, there)| here != *there).map(|(b, _)| (*a, *b)));
    }
    cut.iter().for_each(|(from, to)| world.fabric().cut(*from, *to));
    cut
}

fn mend(world: &World, cut: &[(u64, u64)]) {
    cut.iter().for_each(|(from, to)| world.fabric().mend(*from, *to));
}

async fn flap(world: &World, rng: &mut Rng, node: u64) {
    let others: Vec<u64> = world.ids().into_iter().filter(|other| *other != node).collect();
    for _ in 0..rng.within(3, 12) {
        let Some(other) = rng.pick(&others).copied() else { return };
        let cut = [(node, other), (other, node)];
        cut.iter().for_each(|(from, to)| world.fabric().cut(*from, *to));
        Sim::sleep(rng.millis(50, 1_500)).await;
        mend(world, &cut);
        Sim::sleep(rng.millis(50, 1_000)).await;
    }
}

/// Lets the leader hand over to a voter that it cannot reach, more than once.
async fn hand_over(world: &Arc<World>, rng: &mut Rng) {
    let Some((leader, (voters, _))) = world.leader().zip(operator::members(world)) else { return };
    let others: Vec<u64> = voters.into_iter().filter(|other| *other != leader.id).collect();
    let Some(to) = rng.pick(&others).copied() else { return };
    let cut = [(leader.id, to), (to, leader.id)];
    cut.iter().for_each(|(from, to)| world.fabric().cut(*from, *to));
    for _ in 0..rng.within(1, 4) {
        let leader = leader.clone();
        let pid = leader.pid;
        let ask = async move { leader.raft.trigger().transfer_leader(to).await.is_ok() };
        process::within(pid, || drop(Sim::spawn(ask)));
        Sim::sleep(rng.millis(500, 2_500)).await;
    }
    mend(world, &cut);
}

async fn spoil(world: &World, node: u64, (health, lasts): (Health, Duration)) {
    let Some(disk) = world.disk(node) else { return };
    disk.set(health);
    Sim::sleep(lasts).await;
    disk.set(Health::Fine);
}
