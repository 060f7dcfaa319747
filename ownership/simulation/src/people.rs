//! Who uses the quorum: routers that write steps, clients that fight for a few owned things, and workers that live and
//! die.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ledger::{ClaimOwner, Command, LEVEL, Outcome, Refusal, Release, Subject};
use openraft::AsyncRuntime;
use vocabulary::{Epoch, Incarnation, Micros, Owner, SessionId, WorkerId};

use crate::book::Broken;
use crate::checks::lock::{self, Asked, MAX_OPERATIONS, Operation, Said};
use crate::client::Client;
use crate::node::{LEASE, Node};
use crate::runtime::{Sim, true_time};
use crate::script;
use crate::world::World;

/// Things that clients fight for.
const LOCKS: u64 = 3;
/// Their ids begin here.
const FIRST_LOCK: u64 = 9_000;
/// Workers that own them begin here, and never die.
const FIRST_HOLDER: u64 = 900;

/// What clients saw of each thing, and whether they should stop.
#[derive(Debug, Default)]
pub(crate) struct People {
    histories: Mutex<BTreeMap<u64, Vec<Operation>>>,
    stopping: AtomicBool,
    gone: Mutex<u64>,
}

impl People {
    /// Asks all of them to stop.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Relaxed);
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Relaxed)
    }

    pub(crate) fn gone(&self) -> u64 {
        *self.gone.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn leave(&self) {
        *self.gone.lock().unwrap_or_else(PoisonError::into_inner) += 1;
    }

    /// Checks every history; the first that nothing explains.
    pub(crate) fn check(&self) -> Result<usize, Broken> {
        let histories = self.histories.lock().unwrap_or_else(PoisonError::into_inner);
        histories.iter().try_for_each(|(thing, history)| lock::check(&format!("session {thing}"), history))?;
        Ok(histories.values().map(Vec::len).sum())
    }

    fn called(&self, thing: u64, asked: Asked) -> Option<usize> {
        let mut histories = self.histories.lock().unwrap_or_else(PoisonError::into_inner);
        let history = histories.entry(thing).or_default();
        // Whoever comes later only looks on.
        (history.len() < MAX_OPERATIONS).then(|| {
            history.push(Operation { asked, called: true_time(), returned: None });
            history.len() - 1
        })
    }

    fn returned(&self, thing: u64, call: usize, said: Said) {
        let mut histories = self.histories.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(operation) = histories.get_mut(&thing).and_then(|history| history.get_mut(call)) {
            operation.returned = Some((true_time(), said));
        }
    }
}

/// Prepares what is fought for. Nothing else begins before.
pub(crate) async fn prepare(world: &Arc<World>) {
    let mut client = Client::new(world, 0);
    client.open().await;
    if !world.plan.changes.releases {
        // A new cluster works at its founder's level.
        while client.perform(Command::RaiseLevel(LEVEL)).await.is_none() {}
    }
    let hours = Micros(36_000_000_000);
    let holders = (0..LOCKS).map(|n| script::register(FIRST_HOLDER + n, 1, hours));
    let things = (0..LOCKS).map(|n| script::open(u128::from(FIRST_LOCK + n)));
    for command in holders.chain(things).collect::<Vec<_>>() {
        while client.perform(command.clone()).await.is_none() {}
    }
}

/// A router: writes steps, and fights now and then.
pub(crate) async fn router(world: Arc<World>, people: Arc<People>, n: u64) {
    let mut client = Client::new(&world, n);
    client.open().await;
    let mut held = BTreeMap::new();
    while !people.is_stopping() {
        let (low, high) = world.plan.think;
        Sim::sleep(client.rng.millis(low, high)).await;
        match client.rng.below(10) {
            0..=3 => fight(&mut client, &people, &mut held).await,
            4 => client.repeat().await,
            _ => {
                let Some(view) = client.look() else { continue };
                let command = script::next(&mut client.rng, &view, world.plan.workers);
                drop(client.perform(command).await);
            }
        }
    }
    people.leave();
}

/// One operation on one of the things that are fought for.
async fn fight(client: &mut Client, people: &People, held: &mut BTreeMap<u64, (Owner, Epoch)>) {
    let thing = FIRST_LOCK + client.rng.below(LOCKS);
    let subject = Subject::Session(SessionId(u128::from(thing)));
    let kind = client.rng.below(3);
    if kind == 0 {
        return look(client, people, thing).await;
    }
    let (asked, command) = match held.get(&thing).copied().filter(|_| kind == 1) {
        Some((owner, seen)) => (Asked::Release(owner, seen), Command::Release(Release { subject, owner, seen })),
        None => {
            let owner = script::owner(FIRST_HOLDER + client.rng.below(LOCKS), 1);
            (Asked::Claim(owner), Command::ClaimOwner(ClaimOwner { subject, owner }))
        }
    };
    let Some(call) = people.called(thing, asked) else { return };
    let Some(done) = client.perform(command).await else { return };
    let said = match done.outcome {
        Outcome::Granted { epoch } => Said::Granted(epoch),
        Outcome::Done => Said::Done,
        Outcome::Refused(Refusal::Owned { by, epoch }) => Said::Owned(by, epoch),
        Outcome::Refused(Refusal::Stale { current }) => Said::Stale(current),
        other => return client.world.book.note(Err(odd(thing, &other))),
    };
    match (asked, said) {
        (Asked::Claim(owner), Said::Granted(epoch)) => drop(held.insert(thing, (owner, epoch))),
        (Asked::Claim(_), Said::Owned(by, epoch)) => drop(held.insert(thing, (by, epoch))),
        _ => drop(held.remove(&thing)),
    }
    people.returned(thing, call, said);
}

fn odd(thing: u64, outcome: &Outcome) -> Broken {
    Broken { check: "claims, releases and reads are linearizable", detail: format!("session {thing}: {outcome:?}") }
}

async fn look(client: &mut Client, people: &People, thing: u64) {
    let Some(call) = people.called(thing, Asked::Read) else { return };
    let told = client.world.book.last_acknowledged();
    let Some(view) = client.read().await else { return };
    client.world.book.count("linearizable reads");
    client.world.book.note(match told <= view.applied() {
        true => Ok(()),
        false => Err(Broken {
            check: "a linearizable read shows all that was acknowledged before",
            detail: format!("entry {told} was acknowledged, the read shows {}", view.applied()),
        }),
    });
    match view.session(SessionId(u128::from(thing))) {
        Some(session) => people.returned(thing, call, Said::Holds(session.owner, session.epoch)),
        None => client.world.book.note(Err(Broken {
            check: "no acknowledged write is lost",
            detail: format!("session {thing} was opened, and is not there at {}", view.applied()),
        })),
    }
}

/// A worker's lives, as a router that probes it reports them.
pub(crate) async fn worker(world: Arc<World>, people: Arc<People>, n: u64) {
    let mut client = Client::new(&world, 100 + n);
    client.open().await;
    let mut incarnation = 1;
    while !people.is_stopping() {
        drop(client.perform(script::register(n, incarnation, Micros::of(LEASE))).await);
        let dies = true_time() + client.rng.millis(3_000, 60_000);
        while true_time() < dies && !people.is_stopping() {
            Sim::sleep(client.rng.millis(700, 1_300)).await;
            // Now and then the router is busy elsewhere for almost a lease.
            if client.rng.chance(80) {
                Sim::sleep(client.rng.millis(9_000, 15_500)).await;
            }
            let (worker, life) = (WorkerId(n), Incarnation(incarnation));
            let _lost = client.send(move |node: Arc<Node>| node.report(worker, life)).await;
        }
        if client.rng.chance(500) {
            Sim::sleep(client.rng.millis(1_000, 25_000)).await;
        }
        incarnation += client.rng.below(2);
    }
    people.leave();
}

/// The longest time in which dead leases must be gone once all is well: a lease, a fail-over, a tick, and their slack.
pub(crate) const GONE_WITHIN: Duration = Duration::from_secs(15 + 10 + 1 + 3);
