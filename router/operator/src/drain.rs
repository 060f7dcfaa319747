//! Drains a worker: moves its sessions to other workers one after the other, within a bandwidth limit.
//!
//! The router that received the request moves the sessions; the others only respect the drain flag. A session with a
//! running step is skipped until the step is finished. Sessions that cannot be moved stay where they are and are
//! reported: their next step elsewhere recomputes what it needs.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ownership::LedgerView;
use ownership::ledger::{DrainFlag, Session};
use parking_lot::Mutex;
use planner::DirectedLink;
use serde::Serialize;
use utoipa::ToSchema;
use vocabulary::{
    Bytes, DpRank, Epoch, ModelId, Owner, SessionId, WorkerHealth, WorkerId, WorkerRole, WorkerView, transfer_time,
};

use super::migration;
use super::problem::{Problem, ProblemKind};
use super::sources::SessionMover;

/// Interval between two searches for movable sessions.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// How long after the last successful move a failing one is retried.
const RETRY_WINDOW: Duration = Duration::from_secs(5);
/// Reason reported if no worker can take a session.
const NO_TARGET: &str = "nobody can take it: no other worker is ready, serves its model and exchanges KV with this one";
/// Maximum number of workers with remembered progress, and of upgrades with remembered sessions.
const MAX_WORKERS: usize = 1024;
const MAX_UPGRADES: usize = 4;

/// Options of a drain.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct DrainOptions {
    /// Workers to avoid because they will be drained next, in that order. If there are no others, the last of them is
    /// used.
    pub(super) avoid_workers: Vec<WorkerId>,
    /// Upgrade that this drain belongs to: none of its sessions moves twice.
    pub(super) upgrade_id: Option<String>,
    /// Maximum KV bytes moved per second.
    pub(super) bandwidth: u64,
}

/// State of a drain at this router.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum DrainPhase {
    /// This router was not asked to move the worker's sessions.
    #[default]
    NotStarted,
    /// It moves them.
    Moving,
    /// There is nothing more to move: the worker can be stopped.
    Done,
    /// The worker was taken back into service.
    Canceled,
}

/// Progress of a drain.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, ToSchema)]
pub(super) struct DrainProgress {
    #[schema(inline)]
    pub(super) state: DrainPhase,
    /// Sessions that it owns now.
    pub(super) owned_sessions: usize,
    /// Sessions that were moved.
    pub(super) moved_sessions: usize,
    /// Bytes of KV that were moved for them.
    pub(super) moved_bytes: u64,
    /// Sessions that it owns and that have a step in flight: they are moved after it.
    pub(super) in_flight_sessions: usize,
    /// Sessions that stay, because they cannot be moved.
    pub(super) unmovable_sessions: usize,
    /// Sessions that stay, because they moved once in this upgrade.
    pub(super) already_moved_sessions: usize,
    /// Why the last of the unmovable ones cannot be moved.
    pub(super) reason: Option<String>,
}

/// The latest drain of a worker.
#[derive(Debug)]
struct DrainRecord {
    serial: u64,
    options: DrainOptions,
    progress: DrainProgress,
}

/// Drains executed by this router.
#[derive(Debug, Default)]
pub(super) struct DrainRegistry {
    workers: Mutex<BTreeMap<WorkerId, DrainRecord>>,
    next_serial: AtomicU64,
    /// The latest upgrades and the sessions moved in them.
    moved_by_upgrade: Mutex<Vec<(String, HashSet<SessionId>)>>,
}

impl DrainRegistry {
    pub(super) fn progress(&self, worker: WorkerId) -> DrainProgress {
        self.workers.lock().get(&worker).map(|entry| entry.progress.clone()).unwrap_or_default()
    }

    /// Starts to move the worker's sessions, unless a drain with the same options is running.
    pub(super) fn begin(self: &Arc<Self>, mover: &SessionMover, worker: WorkerId, options: DrainOptions) {
        let progress = DrainProgress { state: DrainPhase::Moving, ..DrainProgress::default() };
        let serial = self.next_serial.fetch_add(1, Ordering::Relaxed);
        {
            let mut workers = self.workers.lock();
            let known = workers.get(&worker);
            if known.is_some_and(|known| known.options == options && known.progress.state == DrainPhase::Moving) {
                return;
            }
            if known.is_none() && workers.len() >= MAX_WORKERS {
                workers.retain(|_, entry| entry.progress.state == DrainPhase::Moving);
            }
            workers.insert(worker, DrainRecord { serial, options: options.clone(), progress: progress.clone() });
        }
        let run = DrainRun {
            registry: self.clone(),
            mover: mover.clone(),
            worker,
            options,
            progress,
            serial,
            last_progress: Instant::now(),
            unmovable: HashMap::new(),
            received: HashMap::new(),
        };
        tokio::spawn(run.run());
    }

    fn was_moved(&self, upgrade: Option<&String>, session: SessionId) -> bool {
        let upgrades = self.moved_by_upgrade.lock();
        upgrades.iter().any(|(name, moved)| Some(name) == upgrade && moved.contains(&session))
    }

    fn record_move(&self, upgrade: Option<&String>, session: SessionId) {
        let Some(upgrade) = upgrade else { return };
        let mut upgrades = self.moved_by_upgrade.lock();
        if let Some((_, moved)) = upgrades.iter_mut().find(|(name, _)| name == upgrade) {
            moved.insert(session);
            return;
        }
        if upgrades.len() == MAX_UPGRADES {
            upgrades.remove(0);
        }
        upgrades.push((upgrade.clone(), HashSet::from([session])));
    }
}

/// A running drain of one worker.
struct DrainRun {
    registry: Arc<DrainRegistry>,
    mover: SessionMover,
    worker: WorkerId,
    options: DrainOptions,
    progress: DrainProgress,
    /// Distinguishes it from other drains of this worker.
    serial: u64,
    /// When the drain started or last moved a session.
    last_progress: Instant,
    /// Sessions that could not be moved at this epoch.
    unmovable: HashMap<SessionId, Epoch>,
    /// What each other worker received, to spread the load.
    received: HashMap<WorkerId, ReceivedLoad>,
}

/// Sessions and bytes that a worker received.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct ReceivedLoad {
    sessions: u64,
    bytes: u64,
}

impl DrainRun {
    async fn run(mut self) {
        loop {
            let round = self.move_round().await;
            self.progress.state = round;
            if !self.publish_progress() || round != DrainPhase::Moving {
                return;
            }
            tokio::time::sleep(RETRY_INTERVAL).await;
        }
    }

    /// Moves every session that can be moved now.
    async fn move_round(&mut self) -> DrainPhase {
        let worker = self.worker;
        let view = self.mover.ledger.directory().view();
        let owned = move || -> Vec<Session> {
            view.sessions().filter(|it| it.owner.is_some_and(|owner| owner.worker == worker)).collect()
        };
        // Scans all sessions.
        let Ok(owned) = tokio::task::spawn_blocking(owned).await else { return DrainPhase::Canceled };
        (self.progress.owned_sessions, self.progress.in_flight_sessions, self.progress.already_moved_sessions) =
            (owned.len(), 0, 0);
        let grants: HashSet<(SessionId, Epoch)> = owned.iter().map(|it| (it.id, it.epoch)).collect();
        self.unmovable.retain(|id, epoch| grants.contains(&(*id, *epoch)));
        for session in owned {
            if !self.is_wanted() || !self.publish_progress() {
                return DrainPhase::Canceled;
            }
            self.try_move(session.id).await;
        }
        let progress = &mut self.progress;
        progress.unmovable_sessions = self.unmovable.len();
        let settled = progress.in_flight_sessions == 0
            && progress.owned_sessions == progress.unmovable_sessions + progress.already_moved_sessions;
        if settled { DrainPhase::Done } else { DrainPhase::Moving }
    }

    async fn try_move(&mut self, id: SessionId) {
        let view = self.mover.ledger.directory().view();
        // Sessions may have moved since the round began, which may take long.
        let owned = view.session(id).filter(|it| it.owner.is_some_and(|owner| owner.worker == self.worker));
        let Some(session) = &owned else { return };
        let upgrade = self.options.upgrade_id.clone();
        if self.registry.was_moved(upgrade.as_ref(), session.id) {
            self.progress.already_moved_sessions += 1;
        } else if view.intents(session.id).next().is_some() {
            self.progress.in_flight_sessions += 1;
        } else if self.unmovable.get(&session.id) != Some(&session.epoch) {
            let begun = Instant::now();
            match self.move_session(&view, session).await {
                Ok((to, bytes)) => {
                    self.unmovable.remove(&session.id);
                    self.registry.record_move(upgrade.as_ref(), session.id);
                    let received = self.received.entry(to).or_default();
                    (received.sessions, received.bytes) = (received.sessions + 1, received.bytes + bytes.0);
                    self.record_outcome("moved", bytes);
                    self.progress.moved_sessions += 1;
                    self.progress.owned_sessions = self.progress.owned_sessions.saturating_sub(1);
                    self.progress.moved_bytes += bytes.0;
                    self.last_progress = Instant::now();
                    self.publish_progress();
                    self.wait_until(begun + transfer_time(bytes, self.options.bandwidth)).await;
                }
                Err(MoveFailure::Retryable) => self.progress.in_flight_sessions += 1,
                // The target may still be starting.
                Err(MoveFailure::Permanent(why)) if self.last_progress.elapsed() < RETRY_WINDOW => {
                    self.progress.reason = Some(why);
                    self.progress.in_flight_sessions += 1;
                }
                Err(MoveFailure::Permanent(why)) => {
                    self.record_outcome("failed", Bytes::ZERO);
                    self.progress.reason = Some(why);
                    self.unmovable.insert(session.id, session.epoch);
                }
            }
        }
    }

    /// Moves a session; returns the target and the bytes moved.
    async fn move_session(&self, view: &LedgerView, session: &Session) -> Result<(WorkerId, Bytes), MoveFailure> {
        let fleet = self.mover.fleet.snapshot();
        let barred = self.mover.transfer_checks.disabled_links();
        let from = fleet.iter().find(|view| view.id == self.worker).ok_or("it is not listed to this router")?;
        let choice = MigrationTargetSelector {
            fleet: &fleet,
            from,
            model: &session.model,
            disabled_links: &barred,
            received: &self.received,
        };
        let target = choice.target(&self.options.avoid_workers).ok_or(NO_TARGET)?;
        let record = view.worker(target.id).ok_or("the ledger does not know who could take it")?;
        let received = self.received.get(&target.id).copied().unwrap_or_default();
        let rank = DpRank((received.sessions % u64::from(record.spec.ranks.max(1))) as u16);
        let to = Owner { worker: target.id, incarnation: record.incarnation, rank };
        let moved = migration::ensure_head_present(&self.mover, view, (session, to)).await?;
        let now = self.mover.ledger.directory().view();
        let is_as_it_was = now.session(session.id).is_some_and(|it| {
            it.epoch == session.epoch && it.head().map(|head| head.point.id) == session.head().map(|head| head.point.id)
        });
        if !is_as_it_was || now.intents(session.id).next().is_some() {
            // A new step has run here since; its blocks must be moved, too.
            return Err(MoveFailure::Retryable);
        }
        migration::record_move(&self.mover.ledger, (session, session.epoch), to).await?;
        Ok((target.id, moved.map(|moved| moved.bytes).unwrap_or_default()))
    }

    /// Waits until this time, or until the drain is cancelled.
    async fn wait_until(&self, until: Instant) {
        while Instant::now() < until && self.is_wanted() && self.publish_progress() {
            tokio::time::sleep(RETRY_INTERVAL.min(until.saturating_duration_since(Instant::now()))).await;
        }
    }

    fn record_outcome(&self, outcome: &str, bytes: Bytes) {
        let metrics = &self.mover.discovery_metrics;
        metrics.drained.with_label_values(&[outcome]).inc();
        metrics.drained_bytes.inc_by(bytes.0);
    }

    fn is_wanted(&self) -> bool {
        let view = self.mover.ledger.directory().view();
        view.worker(self.worker).is_some_and(|worker| worker.draining == DrainFlag::Yes)
    }

    /// Publishes the progress; returns `false` if a newer drain has replaced this one.
    fn publish_progress(&self) -> bool {
        let mut workers = self.registry.workers.lock();
        let known = workers.get_mut(&self.worker).filter(|entry| entry.serial == self.serial);
        known.map(|entry| entry.progress = self.progress.clone()).is_some()
    }
}

/// Why a session was not moved.
enum MoveFailure {
    /// It changed meanwhile, or the ledger was not available; retried later.
    Retryable,
    /// It cannot be moved as it is.
    Permanent(String),
}

impl From<&str> for MoveFailure {
    fn from(why: &str) -> Self {
        Self::Permanent(why.to_owned())
    }
}

impl From<Problem> for MoveFailure {
    fn from(problem: Problem) -> Self {
        match problem.kind() {
            ProblemKind::PreconditionFailed
            | ProblemKind::NotFound
            | ProblemKind::NoQuorum
            | ProblemKind::UnknownOutcome => Self::Retryable,
            _ => Self::Permanent(problem.detail().to_owned()),
        }
    }
}

/// Chooses a worker to take a session.
struct MigrationTargetSelector<'a> {
    fleet: &'a [WorkerView],
    from: &'a WorkerView,
    model: &'a ModelId,
    disabled_links: &'a [DirectedLink],
    received: &'a HashMap<WorkerId, ReceivedLoad>,
}

impl<'a> MigrationTargetSelector<'a> {
    /// Returns the eligible worker with the lowest fill ratio that is not to be drained next; otherwise the one to be
    /// drained last.
    fn target(&self, avoid: &[WorkerId]) -> Option<&'a WorkerView> {
        let able = || self.fleet.iter().filter(|view| self.is_eligible(view));
        let others = able().filter(|view| !avoid.contains(&view.id));
        let least = others.min_by(|a, b| self.fill_ratio(a).total_cmp(&self.fill_ratio(b)).then(a.id.cmp(&b.id)));
        least.or_else(|| avoid.iter().rev().find_map(|id| able().find(|view| view.id == *id)))
    }

    fn is_eligible(&self, view: &WorkerView) -> bool {
        let fabric = |view: &WorkerView| view.link.as_ref().map(|link| link.fabric.clone());
        view.id != self.from.id
            && view.health == WorkerHealth::Ready
            && view.role != WorkerRole::Prefill
            && view.models.contains(self.model)
            && fabric(view).is_some()
            && fabric(view) == fabric(self.from)
            && !self.disabled_links.contains(&DirectedLink { from: self.from.id, to: view.id })
    }

    /// KV usage plus the bytes received in this drain, as a share of the capacity.
    fn fill_ratio(&self, view: &WorkerView) -> f64 {
        let room = (view.capacity.kv.0.max(1) * view.kv_bytes_per_token.0.max(1)) as f64;
        let received = self.received.get(&view.id).copied().unwrap_or_default();
        view.load.kv_usage + received.bytes as f64 / room
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use vocabulary::{EngineSpeed, Incarnation, KvIndexState, KvLink, Micros, Tokens, WorkerCapacity, WorkerLoad};

    use super::*;

    fn worker(id: u64, fabric: &str, kv_usage: f64) -> WorkerView {
        let link = KvLink {
            fabric: fabric.into(),
            fixed: Micros(0),
            bytes_per_second: 1e9,
            carries: vocabulary::KvLinkCapability::Prefixes,
        };
        WorkerView {
            id: WorkerId(id),
            endpoint: format!("http://w{id}").into(),
            incarnation: Incarnation(1),
            role: WorkerRole::Hybrid,
            models: Arc::from([ModelId::from("tiny")]),
            ranks: 1,
            health: WorkerHealth::Ready,
            kv_index_state: KvIndexState::Exact,
            load: WorkerLoad { kv_usage, ..WorkerLoad::default() },
            capacity: WorkerCapacity { kv: Tokens(1000), ..WorkerCapacity::default() },
            speeds: EngineSpeed { prefill_tokens_per_second: 1.0, decode_step: Micros(1), decode_slowdown: Micros(1) },
            kv_bytes_per_token: Bytes(10),
            link: Some(link),
        }
    }

    fn target(fleet: &[WorkerView], avoid: &[u64], given: &[(u64, u64)]) -> Option<u64> {
        let given =
            given.iter().map(|(id, bytes)| (WorkerId(*id), ReceivedLoad { sessions: 1, bytes: *bytes })).collect();
        let barred = [DirectedLink { from: WorkerId(0), to: WorkerId(9) }];
        let model = ModelId::from("tiny");
        let choice = MigrationTargetSelector {
            fleet,
            from: &fleet[0],
            model: &model,
            disabled_links: &barred,
            received: &given,
        };
        let avoid: Vec<WorkerId> = avoid.iter().copied().map(WorkerId).collect();
        choice.target(&avoid).map(|view| view.id.0)
    }

    #[test]
    fn sessions_move_to_the_least_full_worker() {
        let fleet = [worker(0, "f", 0.0), worker(1, "f", 0.5), worker(2, "f", 0.4)];
        assert_eq!(target(&fleet, &[], &[]), Some(2));
        assert_eq!(target(&fleet, &[], &[(2, 2_000)]), Some(1), "2,000 of 10,000 bytes more");
    }

    #[test]
    fn workers_drained_next_are_avoided_except_the_last_in_line() {
        let fleet = [worker(0, "f", 0.0), worker(1, "f", 0.0), worker(2, "f", 0.9), worker(3, "f", 0.0)];
        assert_eq!(target(&fleet, &[1, 3], &[]), Some(2));
        assert_eq!(target(&fleet, &[1, 3, 2], &[]), Some(2));
        assert_eq!(target(&fleet, &[3, 2, 1], &[]), Some(1));
    }

    #[test]
    fn only_ready_workers_that_can_read_the_kv_are_targets() {
        let drains = WorkerView { health: WorkerHealth::Draining, ..worker(1, "f", 0.0) };
        let prefill = WorkerView { role: WorkerRole::Prefill, ..worker(2, "f", 0.0) };
        let other = WorkerView { models: Arc::from([ModelId::from("other")]), ..worker(3, "f", 0.0) };
        let apart = WorkerView { link: None, ..worker(5, "f", 0.0) };
        let fleet = [worker(0, "f", 0.0), drains, prefill, other, worker(4, "g", 0.0), apart, worker(9, "f", 0.0)];
        assert_eq!(target(&fleet, &[], &[]), None);
        assert_eq!(target(&fleet, &[9, 1], &[]), None);
    }

    #[test]
    fn session_moves_once_per_upgrade_and_old_upgrades_expire() {
        let all = DrainRegistry::default();
        let name = |number: usize| format!("upgrade {number}");
        all.record_move(Some(&name(0)), SessionId(7));
        assert!(all.was_moved(Some(&name(0)), SessionId(7)) && !all.was_moved(Some(&name(1)), SessionId(7)));
        all.record_move(None, SessionId(8));
        assert!(!all.was_moved(None, SessionId(8)), "a drain of its own moves whatever is there");
        (1..=MAX_UPGRADES).for_each(|number| all.record_move(Some(&name(number)), SessionId(7)));
        assert!(!all.was_moved(Some(&name(0)), SessionId(7)) && all.was_moved(Some(&name(1)), SessionId(7)));
    }
}
