//! Users of the quorum: routers that write steps, clients that contend for a few locks, and workers that start and die.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ledger::{ClaimOwner, Command, LEVEL, Outcome, OwnershipSubject, Refusal, ReleaseOwner};
use openraft::AsyncRuntime;
use vocabulary::{Epoch, Incarnation, Micros, Owner, SessionId, WorkerId};

use crate::checks::lock::{self, LockOperation, LockReply, LockRequest, MAX_OPERATIONS};
use crate::client::SimClient;
use crate::property::PropertyViolation;
use crate::run_plan::LEASE;
use crate::runtime::{SimulatedRuntime, true_time};
use crate::script;
use crate::sim_node::SimNode;
use crate::world::SimWorld;

/// Number of locks that clients contend for.
const LOCKS: u64 = 3;
/// First session id of the locks.
const FIRST_LOCK: u64 = 9_000;
/// First id of the workers that hold them; these never die.
const FIRST_HOLDER: u64 = 900;

/// What clients saw of each lock, and whether they should stop.
#[derive(Debug, Default)]
pub(crate) struct LockHistories {
    histories: Mutex<BTreeMap<u64, Vec<LockOperation>>>,
    stopping: AtomicBool,
    finished: Mutex<u64>,
}

impl LockHistories {
    /// Asks all of them to stop.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Relaxed);
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Relaxed)
    }

    pub(crate) fn finished_clients(&self) -> u64 {
        *self.finished.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn finish_client(&self) {
        *self.finished.lock().unwrap_or_else(PoisonError::into_inner) += 1;
    }

    /// Checks every history; returns the first violation.
    pub(crate) fn check(&self) -> Result<usize, PropertyViolation> {
        let histories = self.histories.lock().unwrap_or_else(PoisonError::into_inner);
        histories.iter().try_for_each(|(lock, history)| lock::check(&format!("session {lock}"), history))?;
        Ok(histories.values().map(Vec::len).sum())
    }

    fn record_call(&self, lock: u64, request: LockRequest) -> Option<usize> {
        let mut histories = self.histories.lock().unwrap_or_else(PoisonError::into_inner);
        let history = histories.entry(lock).or_default();
        // Operations beyond the maximum are not recorded or executed.
        (history.len() < MAX_OPERATIONS).then(|| {
            history.push(LockOperation { request, called_at: true_time(), returned: None });
            history.len() - 1
        })
    }

    fn record_return(&self, lock: u64, call: usize, reply: LockReply) {
        let mut histories = self.histories.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(operation) = histories.get_mut(&lock).and_then(|history| history.get_mut(call)) {
            operation.returned = Some((true_time(), reply));
        }
    }
}

/// Prepares the locks, before anything else begins.
pub(crate) async fn prepare(world: &Arc<SimWorld>) {
    let mut client = SimClient::new(world, 0);
    client.open().await;
    if !world.plan.changes.releases {
        // A new cluster starts at its founder's level.
        while client.execute(Command::RaiseLevel(LEVEL)).await.is_none() {}
    }
    let hours = Micros(36_000_000_000);
    let holders = (0..LOCKS).map(|n| script::register(FIRST_HOLDER + n, 1, hours));
    let things = (0..LOCKS).map(|n| script::open(u128::from(FIRST_LOCK + n)));
    for command in holders.chain(things).collect::<Vec<_>>() {
        while client.execute(command.clone()).await.is_none() {}
    }
}

/// Simulates a router: writes steps, and sometimes contends for a lock.
pub(crate) async fn run_router(world: Arc<SimWorld>, histories: Arc<LockHistories>, n: u64) {
    let mut client = SimClient::new(&world, n);
    client.open().await;
    let mut owned = BTreeMap::new();
    while !histories.is_stopping() {
        let (low, high) = world.plan.think_millis;
        SimulatedRuntime::sleep(client.rng.millis(low, high)).await;
        match client.rng.below(10) {
            0..=3 => contend_for_lock(&mut client, &histories, &mut owned).await,
            4 => client.resend_last().await,
            _ => {
                let Some(view) = client.pick_view() else { continue };
                let command = script::next_command(&mut client.rng, &view, world.plan.workers);
                drop(client.execute(command).await);
            }
        }
    }
    histories.finish_client();
}

/// Performs one operation on one of the locks.
async fn contend_for_lock(client: &mut SimClient, histories: &LockHistories, held: &mut BTreeMap<u64, (Owner, Epoch)>) {
    let lock = FIRST_LOCK + client.rng.below(LOCKS);
    let subject = OwnershipSubject::Session(SessionId(u128::from(lock)));
    let kind = client.rng.below(3);
    if kind == 0 {
        return read_lock(client, histories, lock).await;
    }
    let (request, command) = match held.get(&lock).copied().filter(|_| kind == 1) {
        Some((owner, seen)) => {
            (LockRequest::Release(owner, seen), Command::Release(ReleaseOwner { subject, owner, seen }))
        }
        None => {
            let owner = script::owner(FIRST_HOLDER + client.rng.below(LOCKS), 1);
            (LockRequest::Claim(owner), Command::ClaimOwner(ClaimOwner { subject, owner }))
        }
    };
    let Some(call) = histories.record_call(lock, request) else { return };
    let Some(execution) = client.execute(command).await else { return };
    let reply = match execution.outcome {
        Outcome::Granted { epoch } => LockReply::Granted(epoch),
        Outcome::Done => LockReply::Released,
        Outcome::Refused(Refusal::AlreadyOwned { by, epoch }) => LockReply::Owned(by, epoch),
        Outcome::Refused(Refusal::StaleEpoch { current }) => LockReply::Stale(current),
        other => return client.world.recorder.record_result(Err(unexpected_outcome(lock, &other))),
    };
    match (request, reply) {
        (LockRequest::Claim(owner), LockReply::Granted(epoch)) => drop(held.insert(lock, (owner, epoch))),
        (LockRequest::Claim(_), LockReply::Owned(by, epoch)) => drop(held.insert(lock, (by, epoch))),
        _ => drop(held.remove(&lock)),
    }
    histories.record_return(lock, call, reply);
}

fn unexpected_outcome(lock: u64, outcome: &Outcome) -> PropertyViolation {
    PropertyViolation {
        check: "claims, releases and reads are linearizable",
        detail: format!("session {lock}: {outcome:?}"),
    }
}

async fn read_lock(client: &mut SimClient, histories: &LockHistories, lock: u64) {
    let Some(call) = histories.record_call(lock, LockRequest::Read) else { return };
    let last_acknowledged = client.world.recorder.last_acknowledged();
    let Some(view) = client.read().await else { return };
    client.world.recorder.count("linearizable reads");
    client.world.recorder.record_result(match last_acknowledged <= view.applied() {
        true => Ok(()),
        false => Err(PropertyViolation {
            check: "a linearizable read shows all that was acknowledged before",
            detail: format!("entry {last_acknowledged} was acknowledged, the read shows {}", view.applied()),
        }),
    });
    match view.session(SessionId(u128::from(lock))) {
        Some(session) => histories.record_return(lock, call, LockReply::Held(session.owner, session.epoch)),
        None => client.world.recorder.record_result(Err(PropertyViolation {
            check: "no acknowledged write is lost",
            detail: format!("session {lock} was opened, and is not there at {}", view.applied()),
        })),
    }
}

/// Simulates a worker's incarnations, as a router that probes it reports them.
pub(crate) async fn run_worker(world: Arc<SimWorld>, histories: Arc<LockHistories>, n: u64) {
    let mut client = SimClient::new(&world, 100 + n);
    client.open().await;
    let mut incarnation = 1;
    while !histories.is_stopping() {
        drop(client.execute(script::register(n, incarnation, Micros::of(LEASE))).await);
        let dies = true_time() + client.rng.millis(3_000, 60_000);
        while true_time() < dies && !histories.is_stopping() {
            SimulatedRuntime::sleep(client.rng.millis(700, 1_300)).await;
            // Sometimes the router is busy elsewhere for almost a lease.
            if client.rng.chance(80) {
                SimulatedRuntime::sleep(client.rng.millis(9_000, 15_500)).await;
            }
            let (worker, life) = (WorkerId(n), Incarnation(incarnation));
            let _lost = client.send(move |node: Arc<SimNode>| node.report_liveness(worker, life)).await;
        }
        if client.rng.chance(500) {
            SimulatedRuntime::sleep(client.rng.millis(1_000, 25_000)).await;
        }
        incarnation += client.rng.below(2);
    }
    histories.finish_client();
}

/// Maximum time until dead leases are expired in a healthy cluster: a lease, a fail-over, a tick, and slack.
pub(crate) const MAX_DEAD_LEASE_TIME: Duration = Duration::from_secs(15 + 10 + 1 + 3);
