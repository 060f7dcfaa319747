//! Sessions of a worker that drains, moved to others one after the other, within a bandwidth.
//!
//! The router that was asked to drain a worker moves its sessions; the others only obey the drain. A session with a step on its
//! way is left alone until that is over. What cannot be moved stays where it is, and is told: its next step elsewhere computes
//! what it needs.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ownership::View;
use ownership::ledger::{Draining, Session};
use parking_lot::Mutex;
use planner::BarredLink;
use serde::Serialize;
use utoipa::ToSchema;
use vocabulary::{Bytes, DpRank, Epoch, Health, ModelId, Owner, Role, SessionId, WorkerId, WorkerView};

use super::moves;
use super::problem::{Kind, Problem};
use crate::config::units::paced;
use crate::gateway::Gateway;

/// Between two looks for sessions that can be moved by now.
const AGAIN: Duration = Duration::from_millis(500);
/// How long after the last move something is still tried that failed.
const GRACE: Duration = Duration::from_secs(5);
/// Why a session stays where no worker is able to take it.
const NOBODY: &str = "nobody can take it: no other worker is ready, serves its model and exchanges KV with this one";
/// Workers whose progress is remembered, and upgrades whose sessions are.
const MOST_WORKERS: usize = 1024;
const MOST_UPGRADES: usize = 4;

/// How a worker is to be emptied.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Wanted {
    /// Who gets nothing, because they are to be drained next, in that order. Where there is nobody else, the last of them.
    pub(super) avoid: Vec<WorkerId>,
    /// The upgrade that this is a part of: none of its sessions moves twice.
    pub(super) upgrade: Option<String>,
    /// A second, at most, of KV.
    pub(super) bandwidth: u64,
}

/// How far it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum EmptyingState {
    /// This router was not asked to move the worker's sessions.
    #[default]
    None,
    /// It moves them.
    Moving,
    /// There is nothing more to move: the worker can be stopped.
    Done,
    /// The worker was taken back into service.
    Stopped,
}

/// What became of the worker's sessions.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, ToSchema)]
pub(super) struct EmptyingProgress {
    #[schema(inline)]
    pub(super) state: EmptyingState,
    /// Sessions that it owns now.
    pub(super) owned: usize,
    /// Sessions that were moved.
    pub(super) moved: usize,
    /// KV that was moved for them.
    pub(super) moved_bytes: u64,
    /// Sessions that it owns and that have a step on its way: they are moved after it.
    pub(super) busy: usize,
    /// Sessions that stay, because they cannot be moved.
    pub(super) stuck: usize,
    /// Sessions that stay, because they moved once in this upgrade.
    pub(super) kept: usize,
    /// Why the last one of them cannot be moved.
    pub(super) why: Option<String>,
}

/// The newest run for a worker.
#[derive(Debug)]
struct Entry {
    serial: u64,
    wanted: Wanted,
    progress: EmptyingProgress,
}

/// What this router moves, and has moved.
#[derive(Debug, Default)]
pub(super) struct Emptyings {
    workers: Mutex<BTreeMap<WorkerId, Entry>>,
    begun: AtomicU64,
    /// The newest upgrades, and who moved in them.
    upgrades: Mutex<Vec<(String, HashSet<SessionId>)>>,
}

impl Emptyings {
    pub(super) fn progress(&self, worker: WorkerId) -> EmptyingProgress {
        self.workers.lock().get(&worker).map(|entry| entry.progress.clone()).unwrap_or_default()
    }

    /// Begins to move the worker's sessions, unless that is under way as it is wanted.
    pub(super) fn begin(self: &Arc<Self>, gateway: &Arc<Gateway>, worker: WorkerId, wanted: Wanted) {
        let progress = EmptyingProgress { state: EmptyingState::Moving, ..EmptyingProgress::default() };
        let serial = self.begun.fetch_add(1, Ordering::Relaxed);
        {
            let mut workers = self.workers.lock();
            let known = workers.get(&worker);
            if known.is_some_and(|known| known.wanted == wanted && known.progress.state == EmptyingState::Moving) {
                return;
            }
            if known.is_none() && workers.len() >= MOST_WORKERS {
                workers.retain(|_, entry| entry.progress.state == EmptyingState::Moving);
            }
            workers.insert(worker, Entry { serial, wanted: wanted.clone(), progress: progress.clone() });
        }
        let run = Run {
            all: self.clone(),
            gateway: gateway.clone(),
            worker,
            wanted,
            progress,
            serial,
            since: Instant::now(),
            hopeless: HashMap::new(),
            given: HashMap::new(),
        };
        tokio::spawn(run.run());
    }

    fn moved_before(&self, upgrade: Option<&String>, session: SessionId) -> bool {
        let upgrades = self.upgrades.lock();
        upgrades.iter().any(|(name, moved)| Some(name) == upgrade && moved.contains(&session))
    }

    fn moved(&self, upgrade: Option<&String>, session: SessionId) {
        let Some(upgrade) = upgrade else { return };
        let mut upgrades = self.upgrades.lock();
        if let Some((_, moved)) = upgrades.iter_mut().find(|(name, _)| name == upgrade) {
            moved.insert(session);
            return;
        }
        if upgrades.len() == MOST_UPGRADES {
            upgrades.remove(0);
        }
        upgrades.push((upgrade.clone(), HashSet::from([session])));
    }
}

/// One worker, while it is emptied.
struct Run {
    all: Arc<Emptyings>,
    gateway: Arc<Gateway>,
    worker: WorkerId,
    wanted: Wanted,
    progress: EmptyingProgress,
    /// Tells it from other runs for this worker.
    serial: u64,
    /// When it began, or moved something.
    since: Instant,
    /// Sessions that cannot be moved as they are.
    hopeless: HashMap<SessionId, Epoch>,
    /// What others got, so that it is spread.
    given: HashMap<WorkerId, Given>,
}

/// What a worker got.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Given {
    sessions: u64,
    bytes: u64,
}

impl Run {
    async fn run(mut self) {
        loop {
            let round = self.round().await;
            self.progress.state = round;
            if !self.tell() || round != EmptyingState::Moving {
                return;
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Moves whatever can be moved now.
    async fn round(&mut self) -> EmptyingState {
        let (gateway, worker) = (self.gateway.clone(), self.worker);
        let view = gateway.directory().view();
        let owned = move || -> Vec<Session> {
            view.sessions().filter(|it| it.owner.is_some_and(|owner| owner.worker == worker)).collect()
        };
        // It looks at every session.
        let Ok(owned) = tokio::task::spawn_blocking(owned).await else { return EmptyingState::Stopped };
        (self.progress.owned, self.progress.busy, self.progress.kept) = (owned.len(), 0, 0);
        let grants: HashSet<(SessionId, Epoch)> = owned.iter().map(|it| (it.id, it.epoch)).collect();
        self.hopeless.retain(|id, epoch| grants.contains(&(*id, *epoch)));
        for session in owned {
            if !self.drains() || !self.tell() {
                return EmptyingState::Stopped;
            }
            self.one(session.id).await;
        }
        self.progress.stuck = self.hopeless.len();
        let settled = self.progress.busy == 0 && self.progress.owned == self.progress.stuck + self.progress.kept;
        if settled { EmptyingState::Done } else { EmptyingState::Moving }
    }

    async fn one(&mut self, id: SessionId) {
        let view = self.gateway.directory().view();
        // Others were moved since the round began, which may have taken long.
        let owned = view.session(id).filter(|it| it.owner.is_some_and(|owner| owner.worker == self.worker));
        let Some(session) = &owned else { return };
        let upgrade = self.wanted.upgrade.clone();
        if self.all.moved_before(upgrade.as_ref(), session.id) {
            self.progress.kept += 1;
        } else if view.intents(session.id).next().is_some() {
            self.progress.busy += 1;
        } else if self.hopeless.get(&session.id) != Some(&session.epoch) {
            let begun = Instant::now();
            match self.shift(&view, session).await {
                Ok((to, bytes)) => {
                    self.hopeless.remove(&session.id);
                    self.all.moved(upgrade.as_ref(), session.id);
                    let given = self.given.entry(to).or_default();
                    (given.sessions, given.bytes) = (given.sessions + 1, given.bytes + bytes.0);
                    self.count("moved", bytes);
                    self.progress.moved += 1;
                    self.progress.owned = self.progress.owned.saturating_sub(1);
                    self.progress.moved_bytes += bytes.0;
                    self.since = Instant::now();
                    self.tell();
                    self.rest(begun + paced(bytes, self.wanted.bandwidth)).await;
                }
                Err(Miss::Later) => self.progress.busy += 1,
                // Who takes it may only be starting.
                Err(Miss::Never(why)) if self.since.elapsed() < GRACE => {
                    self.progress.why = Some(why);
                    self.progress.busy += 1;
                }
                Err(Miss::Never(why)) => {
                    self.count("stuck", Bytes::ZERO);
                    self.progress.why = Some(why);
                    self.hopeless.insert(session.id, session.epoch);
                }
            }
        }
    }

    /// Moves a session; to whom, and how much.
    async fn shift(&self, view: &View, session: &Session) -> Result<(WorkerId, Bytes), Miss> {
        let fleet = self.gateway.fleet().snapshot();
        let barred = self.gateway.decisions.correctness.links();
        let from = fleet.iter().find(|view| view.id == self.worker).ok_or("it is not listed to this router")?;
        let choice = Choice { fleet: &fleet, from, model: &session.model, barred: &barred, given: &self.given };
        let target = choice.target(&self.wanted.avoid).ok_or(NOBODY)?;
        let record = view.worker(target.id).ok_or("the ledger does not know who could take it")?;
        let given = self.given.get(&target.id).copied().unwrap_or_default();
        let rank = DpRank((given.sessions % u64::from(record.spec.ranks.max(1))) as u16);
        let to = Owner { worker: target.id, incarnation: record.incarnation, rank };
        let moved = moves::bring_head(&self.gateway, view, (session, to)).await?;
        let now = self.gateway.directory().view();
        let is_as_it_was = now.session(session.id).is_some_and(|it| {
            it.epoch == session.epoch && it.head().map(|head| head.point.id) == session.head().map(|head| head.point.id)
        });
        if !is_as_it_was || now.intents(session.id).next().is_some() {
            // What its newest step left here is what is to be moved.
            return Err(Miss::Later);
        }
        moves::record_move(&self.gateway, (session, session.epoch), to).await?;
        Ok((target.id, moved.map(|moved| moved.bytes).unwrap_or_default()))
    }

    /// Waits until then, or until the worker is not to be emptied any more.
    async fn rest(&self, until: Instant) {
        while Instant::now() < until && self.drains() && self.tell() {
            tokio::time::sleep(AGAIN.min(until.saturating_duration_since(Instant::now()))).await;
        }
    }

    fn count(&self, outcome: &str, bytes: Bytes) {
        let metrics = &self.gateway.metrics.process.discovery;
        metrics.drained.with_label_values(&[outcome]).inc();
        metrics.drained_bytes.inc_by(bytes.0);
    }

    fn drains(&self) -> bool {
        let view = self.gateway.directory().view();
        view.worker(self.worker).is_some_and(|worker| worker.draining == Draining::Yes)
    }

    /// Says how far it is; whether nobody wants it otherwise by now.
    fn tell(&self) -> bool {
        let mut workers = self.all.workers.lock();
        let known = workers.get_mut(&self.worker).filter(|entry| entry.serial == self.serial);
        known.map(|entry| entry.progress = self.progress.clone()).is_some()
    }
}

/// Why a session was not moved.
enum Miss {
    /// It changed meanwhile, or the ledger could not be told: it is looked at again.
    Later,
    /// It cannot be moved as it is.
    Never(String),
}

impl From<&str> for Miss {
    fn from(why: &str) -> Self {
        Self::Never(why.to_owned())
    }
}

impl From<Problem> for Miss {
    fn from(problem: Problem) -> Self {
        match problem.kind() {
            Kind::Stale | Kind::NotFound | Kind::NoQuorum | Kind::UnknownOutcome => Self::Later,
            _ => Self::Never(problem.detail().to_owned()),
        }
    }
}

/// Who could take a session.
struct Choice<'a> {
    fleet: &'a [WorkerView],
    from: &'a WorkerView,
    model: &'a ModelId,
    barred: &'a [BarredLink],
    given: &'a HashMap<WorkerId, Given>,
}

impl<'a> Choice<'a> {
    /// The one who would be the least full, of those who are not to be drained next; where there is none, the one who is to be
    /// drained last.
    fn target(&self, avoid: &[WorkerId]) -> Option<&'a WorkerView> {
        let able = || self.fleet.iter().filter(|view| self.can(view));
        let others = able().filter(|view| !avoid.contains(&view.id));
        let least = others.min_by(|a, b| self.fill(a).total_cmp(&self.fill(b)).then(a.id.cmp(&b.id)));
        least.or_else(|| avoid.iter().rev().find_map(|id| able().find(|view| view.id == *id)))
    }

    fn can(&self, view: &WorkerView) -> bool {
        let fabric = |view: &WorkerView| view.link.as_ref().map(|link| link.fabric.clone());
        view.id != self.from.id
            && view.health == Health::Ready
            && view.role != Role::Prefill
            && view.models.contains(self.model)
            && fabric(view).is_some()
            && fabric(view) == fabric(self.from)
            && !self.barred.contains(&BarredLink { from: self.from.id, to: view.id })
    }

    /// What it holds and is given, as a share of what it can hold.
    fn fill(&self, view: &WorkerView) -> f64 {
        let room = (view.capacity.kv.0.max(1) * view.kv_bytes_per_token.0.max(1)) as f64;
        let given = self.given.get(&view.id).copied().unwrap_or_default();
        view.load.kv_usage + given.bytes as f64 / room
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use vocabulary::{Capacity, Incarnation, Knowledge, Link, Load, Micros, Speeds, Tokens};

    use super::*;

    fn worker(id: u64, fabric: &str, kv_usage: f64) -> WorkerView {
        let link = Link {
            fabric: fabric.into(),
            fixed: Micros(0),
            bytes_per_second: 1e9,
            carries: vocabulary::Carries::Prefixes,
        };
        WorkerView {
            id: WorkerId(id),
            endpoint: format!("http://w{id}").into(),
            incarnation: Incarnation(1),
            role: Role::Hybrid,
            models: Arc::from([ModelId::from("tiny")]),
            ranks: 1,
            health: Health::Ready,
            knowledge: Knowledge::Exact,
            load: Load { kv_usage, ..Load::default() },
            capacity: Capacity { kv: Tokens(1000), ..Capacity::default() },
            speeds: Speeds { prefill_tokens_per_second: 1.0, decode_step: Micros(1), decode_slowdown: Micros(1) },
            kv_bytes_per_token: Bytes(10),
            link: Some(link),
        }
    }

    fn target(fleet: &[WorkerView], avoid: &[u64], given: &[(u64, u64)]) -> Option<u64> {
        let given = given.iter().map(|(id, bytes)| (WorkerId(*id), Given { sessions: 1, bytes: *bytes })).collect();
        let barred = [BarredLink { from: WorkerId(0), to: WorkerId(9) }];
        let model = ModelId::from("tiny");
        let choice = Choice { fleet, from: &fleet[0], model: &model, barred: &barred, given: &given };
        let avoid: Vec<WorkerId> = avoid.iter().copied().map(WorkerId).collect();
        choice.target(&avoid).map(|view| view.id.0)
    }

    #[test]
    fn sessions_go_to_who_would_be_the_least_full() {
        let fleet = [worker(0, "f", 0.0), worker(1, "f", 0.5), worker(2, "f", 0.4)];
        assert_eq!(target(&fleet, &[], &[]), Some(2));
        assert_eq!(target(&fleet, &[], &[(2, 2_000)]), Some(1), "2,000 of 10,000 bytes more");
    }

    #[test]
    fn nobody_who_is_drained_next_gets_any_but_the_last_one_where_there_is_nobody_else() {
        let fleet = [worker(0, "f", 0.0), worker(1, "f", 0.0), worker(2, "f", 0.9), worker(3, "f", 0.0)];
        assert_eq!(target(&fleet, &[1, 3], &[]), Some(2));
        assert_eq!(target(&fleet, &[1, 3, 2], &[]), Some(2));
        assert_eq!(target(&fleet, &[3, 2, 1], &[]), Some(1));
    }

    #[test]
    fn only_who_takes_work_and_can_read_its_kv_gets_any() {
        let drains = WorkerView { health: Health::Draining, ..worker(1, "f", 0.0) };
        let prefill = WorkerView { role: Role::Prefill, ..worker(2, "f", 0.0) };
        let other = WorkerView { models: Arc::from([ModelId::from("other")]), ..worker(3, "f", 0.0) };
        let apart = WorkerView { link: None, ..worker(5, "f", 0.0) };
        let fleet = [worker(0, "f", 0.0), drains, prefill, other, worker(4, "g", 0.0), apart, worker(9, "f", 0.0)];
        assert_eq!(target(&fleet, &[], &[]), None);
        assert_eq!(target(&fleet, &[9, 1], &[]), None);
    }

    #[test]
    fn a_session_moves_once_in_an_upgrade_and_old_upgrades_are_forgotten() {
        let all = Emptyings::default();
        let name = |number: usize| format!("upgrade {number}");
        all.moved(Some(&name(0)), SessionId(7));
        assert!(all.moved_before(Some(&name(0)), SessionId(7)) && !all.moved_before(Some(&name(1)), SessionId(7)));
        all.moved(None, SessionId(8));
        assert!(!all.moved_before(None, SessionId(8)), "a drain of its own moves whatever is there");
        (1..=MOST_UPGRADES).for_each(|number| all.moved(Some(&name(number)), SessionId(7)));
        assert!(!all.moved_before(Some(&name(0)), SessionId(7)) && all.moved_before(Some(&name(1)), SessionId(7)));
    }
}
