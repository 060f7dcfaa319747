//! One run: found a quorum, inject faults, heal, and check that everything is well.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use openraft::{AsyncRuntime, BasicNode};

use crate::checks::shortages;
use crate::disk::{DiskHealth, ProcessEnd};
use crate::ensure;
use crate::faults;
use crate::operator;
use crate::process;
use crate::property::{PropertyResult, PropertyViolation};
use crate::releases;
use crate::run_plan::SimPlan;
use crate::run_recorder::RunRecorder;
use crate::runtime::{SimulatedRuntime, true_time};
use crate::sim_node::SimNode;
use crate::watchers::{self, WATCHERS};
use crate::workload::{self, LockHistories, MAX_DEAD_LEASE_TIME};
use crate::world::SimWorld;

const HEALED: &str = "after healing: one leader, and everybody has everything";
const DEAD_LEASES: &str = "after healing: dead leases are gone within a lease, a fail-over and a tick";
const PANICS: &str = "nothing panics";

/// How long a healed quorum may take to converge.
const HEAL_TIMEOUT: Duration = Duration::from_secs(30);

/// Result of a seed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SeedReport {
    /// Seed.
    pub seed: u64,
    /// First property that was violated.
    pub violation: Option<PropertyViolation>,
    /// Digest of every event, in order.
    pub trace: u64,
    /// Counters by name.
    pub counts: BTreeMap<&'static str, u64>,
    /// Simulated time.
    pub simulated: Duration,
}

/// Runs a seed.
pub fn run(seed: u64) -> SeedReport {
    run_recorded(seed, RunRecorder::default())
}

/// Runs a seed and logs its events, line by line.
pub fn run_with_log(seed: u64) -> (SeedReport, Vec<String>) {
    let book = RunRecorder::with_log();
    (run_recorded(seed, book.clone()), book.log_lines())
}

fn run_recorded(seed: u64, recorder: RunRecorder) -> SeedReport {
    process::reset();
    panics::install_hook();
    let mut runtime = SimulatedRuntime::with_seed(seed);
    let report = runtime.block_on(scenario(SimPlan::of(seed), recorder));
    drop(runtime);
    process::reset();
    report
}

async fn scenario(plan: SimPlan, recorder: RunRecorder) -> SeedReport {
    let seed = plan.seed;
    let world = SimWorld::new(plan, recorder);
    let watch = SimulatedRuntime::spawn(monitor(world.clone()));
    let played = SimulatedRuntime::spawn(run_workload(world.clone()));
    let (played, watch) = futures::future::select(played, watch).await.factor_first();
    drop((played, watch));
    let digest = world.recorder.digest();
    world.add_to_digest(&[digest as u64, (digest >> 64) as u64]);
    let mut tally = world.recorder.tally();
    let traffic = world.fabric().traffic();
    tally.extend([
        ("messages", traffic.sent),
        ("messages lost", traffic.lost),
        ("messages doubled", traffic.duplicated),
    ]);
    SeedReport {
        seed,
        violation: world.recorder.first_violation(),
        trace: world.digest(),
        counts: tally,
        simulated: true_time(),
    }
}

/// Checks everything four times a second, restarts nodes that ended by themselves, and returns on a violation.
async fn monitor(world: Arc<SimWorld>) {
    let mut term = 0;
    while world.recorder.first_violation().is_none() {
        SimulatedRuntime::sleep(Duration::from_millis(250)).await;
        world.check();
        if let Some(panic) = panics::take_panic() {
            world.recorder.record_result(Err(PropertyViolation { check: PANICS, detail: panic }));
        }
        if let Some(leader) = world.leader().and_then(|leader| leader.leadership())
            && leader.term > term
        {
            term = leader.term;
            world.recorder.count("elections");
            world.recorder.log(|| format!("node {} leads in term {term}", leader.node_id));
        }
        for node in world.running_nodes() {
            if process::is_running(node.pid) && !node.is_running() {
                world.recorder.count("nodes that stopped by themselves");
                world.recorder.log(|| format!("node {} stopped by itself", node.id));
                world.recorder.record_result(node.end_cause().map_or(Ok(()), |why| shortages::check(node.id, &why)));
                world.end_process(node.id, ProcessEnd::Killed);
            }
        }
    }
}

async fn run_workload(world: Arc<SimWorld>) {
    found_cluster(&world).await;
    workload::prepare(&world).await;
    let histories = Arc::new(LockHistories::default());
    for n in 1..=world.plan.clients {
        drop(SimulatedRuntime::spawn(workload::run_router(world.clone(), histories.clone(), n)));
    }
    for n in 1..=world.plan.workers {
        drop(SimulatedRuntime::spawn(workload::run_worker(world.clone(), histories.clone(), n)));
    }
    drop(SimulatedRuntime::spawn(watchers::run_reader(world.clone(), histories.clone())));
    for n in 1..=WATCHERS {
        drop(SimulatedRuntime::spawn(watchers::run_watcher(world.clone(), histories.clone(), n)));
    }
    let troubles = process::begin(0);
    process::run_in(troubles, || {
        drop(SimulatedRuntime::spawn(faults::inject_faults(world.clone())));
        if world.plan.has_shortages {
            drop(SimulatedRuntime::spawn(faults::inject_shortages(world.clone())));
        }
        if world.plan.changes.members {
            drop(SimulatedRuntime::spawn(operator::run_operator(world.clone())));
        }
        if world.plan.changes.releases {
            drop(SimulatedRuntime::spawn(releases::run_upgrades(world.clone())));
        }
        drop(SimulatedRuntime::spawn(supervise(world.clone())));
    });
    SimulatedRuntime::sleep(world.plan.fault_duration).await;
    process::kill(troubles);
    histories.stop();
    heal(&world);
    let checked = await_convergence(&world, &histories).await;
    world.recorder.record_result(checked);
    match histories.check() {
        Ok(operations) => (0..operations).for_each(|_| world.recorder.count("operations in histories")),
        Err(broken) => world.recorder.record_result(Err(broken)),
    }
}

/// Starts the first nodes as one quorum.
async fn found_cluster(world: &Arc<SimWorld>) {
    let (voters, learners) = (world.plan.voters.clone(), world.plan.learners.clone());
    for id in voters.union(&learners) {
        world.add(*id, world.newest_level());
        world.start(*id);
    }
    let first = loop {
        SimulatedRuntime::sleep(Duration::from_millis(50)).await;
        if world.running_nodes().len() == voters.len() + learners.len()
            && let Some(node) = world.running_node(1)
        {
            break node;
        }
    };
    let members: BTreeMap<u64, BasicNode> = voters.iter().map(|id| (*id, BasicNode::default())).collect();
    let pid = first.pid;
    drop(
        process::run_in(pid, || SimulatedRuntime::spawn(async move { first.raft.initialize(members).await.is_ok() }))
            .await,
    );
    while world.leader().is_none() {
        SimulatedRuntime::sleep(Duration::from_millis(100)).await;
    }
    for id in learners {
        while let Some(leader) = world.leader() {
            let pid = leader.pid;
            let add = async move { leader.raft.add_learner(id, BasicNode::default(), false).await.is_ok() };
            if matches!(process::run_in(pid, || SimulatedRuntime::spawn(add)).await, Ok(true)) {
                break;
            }
        }
    }
}

/// Restarts nodes that are down, sooner or later.
async fn supervise(world: Arc<SimWorld>) {
    loop {
        SimulatedRuntime::sleep(Duration::from_secs(5)).await;
        world.ids().into_iter().for_each(|id| world.start(id));
    }
}

/// Ends every fault.
fn heal(world: &Arc<SimWorld>) {
    world.fabric().heal();
    for id in world.ids() {
        if let Some(disk) = world.disk(id) {
            disk.set_health(DiskHealth::Fine);
            disk.set_shortage(None);
        }
        if let Some(pid) = world.pid(id) {
            process::resume(pid);
        }
        world.start(id);
    }
}

/// Waits until the cluster has converged; on a timeout, returns what has not.
async fn await_convergence(world: &Arc<SimWorld>, histories: &LockHistories) -> PropertyResult {
    let healed = true_time();
    let everybody = world.plan.clients + world.plan.workers + WATCHERS + 1;
    let target = loop {
        SimulatedRuntime::sleep(Duration::from_millis(250)).await;
        world.ids().into_iter().for_each(|id| world.start(id));
        if histories.finished_clients() == everybody && world.leader().is_some() {
            break world.recorder.last_acknowledged().max(world.recorder.last_applied());
        }
        ensure!(
            true_time() < healed + 2 * HEAL_TIMEOUT,
            HEALED,
            "{} of {everybody} clients have stopped",
            histories.finished_clients()
        )?;
    };
    let quiet = true_time();
    loop {
        let (members, behind) = lagging_members(world, target);
        if !members.is_empty() && behind.is_empty() {
            break;
        }
        ensure!(true_time() < quiet + HEAL_TIMEOUT, HEALED, "of {members:?}, {behind:?} at {target}")?;
        SimulatedRuntime::sleep(Duration::from_millis(250)).await;
    }
    while true_time() < quiet + MAX_DEAD_LEASE_TIME {
        SimulatedRuntime::sleep(Duration::from_millis(250)).await;
    }
    let Some(leader) = world.leader() else { return ensure!(false, HEALED, "the leader is gone again") };
    let view = leader.view();
    let leases: Vec<_> = view.workers().filter(|w| w.is_live() && w.id.0 < 100).map(|w| (w.id, w.lease)).collect();
    ensure!(leases.is_empty(), DEAD_LEASES, "at {} on the ledger's clock: {leases:?}", view.now())
}

/// Returns the members, and those of them that have not applied everything up to `target` or follow another leader.
fn lagging_members(world: &SimWorld, target: u64) -> (Vec<u64>, Vec<u64>) {
    let Some((leader, (_, members))) = world.leader().zip(operator::members(world)) else { return Default::default() };
    let is_fine = |node: &Arc<SimNode>| node.view().applied() >= target && node.leader() == Some(leader.id);
    let behind = members.iter().copied().filter(|id| !world.running_node(*id).as_ref().is_some_and(is_fine)).collect();
    (members.into_iter().collect(), behind)
}

/// Collects panics of simulated tasks, which the runtime would hide.
mod panics {
    use std::cell::RefCell;
    use std::sync::Once;

    thread_local! {
        static LAST: RefCell<Option<String>> = const { RefCell::new(None) };
    }

    static HOOK: Once = Once::new();

    pub(super) fn install_hook() {
        LAST.set(None);
        HOOK.call_once(|| {
            let usual = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                LAST.with_borrow_mut(|last| last.get_or_insert(panic.to_string()).len());
                if std::thread::current().name().is_none_or(|name| !name.starts_with("seeds")) {
                    usual(panic);
                }
            }));
        });
    }

    /// Returns the first panic since the last call.
    pub(super) fn take_panic() -> Option<String> {
        LAST.take()
    }
}
