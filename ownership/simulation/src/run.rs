//! One run: found a quorum, let everything go wrong, heal, and look whether all is well.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use openraft::{AsyncRuntime, BasicNode};

use crate::book::{Book, Broken, Checked};
use crate::checks::shortages;
use crate::disk::{Ending, Health};
use crate::ensure;
use crate::faults;
use crate::node::Node;
use crate::onlookers::{self, WATCHERS};
use crate::operator;
use crate::people::{self, GONE_WITHIN, People};
use crate::plan::Plan;
use crate::process;
use crate::releases;
use crate::runtime::{Sim, true_time};
use crate::world::World;

const HEALED: &str = "after healing: one leader, and everybody has everything";
const DEAD_LEASES: &str = "after healing: dead leases are gone within a lease, a fail-over and a tick";
const PANICS: &str = "nothing panics";

/// How long a healed quorum may take to agree.
const HEALS_WITHIN: Duration = Duration::from_secs(30);

/// What became of a seed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Report {
    /// The seed.
    pub seed: u64,
    /// The first property that did not hold.
    pub broken: Option<Broken>,
    /// Digest of every event, in order.
    pub trace: u64,
    /// What was counted.
    pub tally: BTreeMap<&'static str, u64>,
    /// Simulated time.
    pub lasted: Duration,
}

/// Runs a seed.
pub fn run(seed: u64) -> Report {
    run_with(seed, Book::default())
}

/// Runs a seed and tells what happened, line by line.
pub fn tell(seed: u64) -> (Report, Vec<String>) {
    let book = Book::telling();
    (run_with(seed, book.clone()), book.story())
}

fn run_with(seed: u64, book: Book) -> Report {
    process::reset();
    panics::watch();
    let mut runtime = Sim::seeded(seed);
    let report = runtime.block_on(scenario(Plan::of(seed), book));
    drop(runtime);
    process::reset();
    report
}

async fn scenario(plan: Plan, book: Book) -> Report {
    let seed = plan.seed;
    let world = World::new(plan, book);
    let watch = Sim::spawn(watch(world.clone()));
    let played = Sim::spawn(play(world.clone()));
    let (played, watch) = futures::future::select(played, watch).await.factor_first();
    drop((played, watch));
    let digest = world.book.digest();
    world.trace(&[digest as u64, (digest >> 64) as u64]);
    let mut tally = world.book.tally();
    let traffic = world.fabric().traffic();
    tally.extend([("messages", traffic.sent), ("messages lost", traffic.lost), ("messages doubled", traffic.doubled)]);
    Report { seed, broken: world.book.broken(), trace: world.digest(), tally, lasted: true_time() }
}

/// Looks at everything four times a second, restarts what ended by itself, and returns once something is broken.
async fn watch(world: Arc<World>) {
    let mut term = 0;
    while world.book.broken().is_none() {
        Sim::sleep(Duration::from_millis(250)).await;
        world.check();
        if let Some(panic) = panics::take() {
            world.book.note(Err(Broken { check: PANICS, detail: panic }));
        }
        if let Some(leader) = world.leader().and_then(|leader| leader.leadership())
            && leader.term > term
        {
            term = leader.term;
            world.book.count("elections");
            world.book.tell(|| format!("node {} leads in term {term}", leader.node_id));
        }
        for node in world.up() {
            if process::is_running(node.pid) && !node.is_well() {
                world.book.count("nodes that stopped by themselves");
                world.book.tell(|| format!("node {} stopped by itself", node.id));
                world.book.note(node.ended().map_or(Ok(()), |why| shortages::check(node.id, &why)));
                world.end(node.id, Ending::Killed);
            }
        }
    }
}

async fn play(world: Arc<World>) {
    found(&world).await;
    people::prepare(&world).await;
    let people = Arc::new(People::default());
    for n in 1..=world.plan.clients {
        drop(Sim::spawn(people::router(world.clone(), people.clone(), n)));
    }
    for n in 1..=world.plan.workers {
        drop(Sim::spawn(people::worker(world.clone(), people.clone(), n)));
    }
    drop(Sim::spawn(onlookers::reader(world.clone(), people.clone())));
    for n in 1..=WATCHERS {
        drop(Sim::spawn(onlookers::watcher(world.clone(), people.clone(), n)));
    }
    let troubles = process::begin(0);
    process::within(troubles, || {
        drop(Sim::spawn(faults::trouble(world.clone())));
        if world.plan.lacks {
            drop(Sim::spawn(faults::shortages(world.clone())));
        }
        if world.plan.changes.members {
            drop(Sim::spawn(operator::operate(world.clone())));
        }
        if world.plan.changes.releases {
            drop(Sim::spawn(releases::change(world.clone())));
        }
        drop(Sim::spawn(supervise(world.clone())));
    });
    Sim::sleep(world.plan.chaos).await;
    process::kill(troubles);
    people.stop();
    heal(&world);
    let checked = settle(&world, &people).await;
    world.book.note(checked);
    match people.check() {
        Ok(operations) => (0..operations).for_each(|_| world.book.count("operations in histories")),
        Err(broken) => world.book.note(Err(broken)),
    }
}

/// Starts the first nodes as one quorum.
async fn found(world: &Arc<World>) {
    let (voters, learners) = (world.plan.voters.clone(), world.plan.learners.clone());
    for id in voters.union(&learners) {
        world.add(*id, world.newest());
        world.start(*id);
    }
    let first = loop {
        Sim::sleep(Duration::from_millis(50)).await;
        if world.up().len() == voters.len() + learners.len()
            && let Some(node) = world.life(1)
        {
            break node;
        }
    };
    let members: BTreeMap<u64, BasicNode> = voters.iter().map(|id| (*id, BasicNode::default())).collect();
    let pid = first.pid;
    drop(process::within(pid, || Sim::spawn(async move { first.raft.initialize(members).await.is_ok() })).await);
    while world.leader().is_none() {
        Sim::sleep(Duration::from_millis(100)).await;
    }
    for id in learners {
        while let Some(leader) = world.leader() {
            let pid = leader.pid;
            let add = async move { leader.raft.add_learner(id, BasicNode::default(), false).await.is_ok() };
            if matches!(process::within(pid, || Sim::spawn(add)).await, Ok(true)) {
                break;
            }
        }
    }
}

/// Starts what is down, sooner or later.
async fn supervise(world: Arc<World>) {
    loop {
        Sim::sleep(Duration::from_secs(5)).await;
        world.ids().into_iter().for_each(|id| world.start(id));
    }
}

/// Ends every fault.
fn heal(world: &Arc<World>) {
    world.fabric().heal();
    for id in world.ids() {
        if let Some(disk) = world.disk(id) {
            disk.set(Health::Fine);
            disk.lacks(None);
        }
        if let Some(pid) = world.pid(id) {
            process::resume(pid);
        }
        world.start(id);
    }
}

/// Waits until all is well, and says what is not when it takes too long.
async fn settle(world: &Arc<World>, people: &People) -> Checked {
    let healed = true_time();
    let everybody = world.plan.clients + world.plan.workers + WATCHERS + 1;
    let target = loop {
        Sim::sleep(Duration::from_millis(250)).await;
        world.ids().into_iter().for_each(|id| world.start(id));
        if people.gone() == everybody && world.leader().is_some() {
            break world.book.last_acknowledged().max(world.book.last_applied());
        }
        ensure!(
            true_time() < healed + 2 * HEALS_WITHIN,
            HEALED,
            "{} of {everybody} clients have stopped",
            people.gone()
        )?;
    };
    let quiet = true_time();
    loop {
        let (members, behind) = behind(world, target);
        if !members.is_empty() && behind.is_empty() {
            break;
        }
        ensure!(true_time() < quiet + HEALS_WITHIN, HEALED, "of {members:?}, {behind:?} at {target}")?;
        Sim::sleep(Duration::from_millis(250)).await;
    }
    while true_time() < quiet + GONE_WITHIN {
        Sim::sleep(Duration::from_millis(250)).await;
    }
    let Some(leader) = world.leader() else { return ensure!(false, HEALED, "the leader is gone again") };
    let view = leader.view();
    let held: Vec<_> = view.workers().filter(|w| w.is_live() && w.id.0 < 100).map(|w| (w.id, w.lease)).collect();
    ensure!(held.is_empty(), DEAD_LEASES, "at {} on the ledger's clock: {held:?}", view.now())
}

/// The members, and those of them that do not have everything up to `target` or follow another leader.
fn behind(world: &World, target: u64) -> (Vec<u64>, Vec<u64>) {
    let Some((leader, (_, members))) = world.leader().zip(operator::members(world)) else { return Default::default() };
    let is_fine = |node: &Arc<Node>| node.view().applied() >= target && node.leader() == Some(leader.id);
    let behind = members.iter().copied().filter(|id| !world.life(*id).as_ref().is_some_and(is_fine)).collect();
    (members.into_iter().collect(), behind)
}

/// Panics of simulated tasks, which the runtime would keep to itself.
mod panics {
    use std::cell::RefCell;
    use std::sync::Once;

    thread_local! {
        static LAST: RefCell<Option<String>> = const { RefCell::new(None) };
    }

    static HOOK: Once = Once::new();

    pub(super) fn watch() {
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

    /// The first panic since the last call.
    pub(super) fn take() -> Option<String> {
        LAST.take()
    }
}
