//! Who could serve a request when nothing but its model is known: the least loaded worker that is up.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arc_swap::ArcSwap;
use planner::ParallelShape;
use vocabulary::{DpRank, Health, ModelId, Role, Tokens, WorkerId, WorkerView};
use workers_shim::fleet::{Fleet, InFlight};

use crate::config::WorkerConfig;
use crate::error::{ApiError, shortened};
use crate::membership::Source;

/// How workers are reached, those that are leaving included, and whose turn it is among equals.
#[derive(Debug, Default)]
pub struct Roster {
    table: ArcSwap<Table>,
    turn: AtomicUsize,
}

#[derive(Debug, Default)]
struct Table {
    members: HashMap<WorkerId, Arc<Member>>,
    /// Of those whose parallel shape is known, ordered by worker.
    shapes: Arc<[(WorkerId, ParallelShape)]>,
}

/// One worker as it is listed.
#[derive(Debug)]
pub struct Member {
    /// Its id.
    pub id: WorkerId,
    /// Who lists it.
    pub source: Source,
    /// How it is reached.
    pub config: WorkerConfig,
}

/// A request at a worker; dropping it is its end.
#[derive(Debug)]
pub struct Sent {
    /// At whom.
    pub member: Arc<Member>,
    _in_flight: InFlight,
}

impl Roster {
    /// Takes these over, beside whom it knows. Not to be called by two at once, nor while [`Self::retain`] is.
    pub(crate) fn add(&self, workers: Vec<(Source, WorkerConfig)>) {
        let mut members = self.table.load().members.clone();
        for (source, config) in workers {
            let id = WorkerId::of_endpoint(config.endpoint());
            members.insert(id, Arc::new(Member { id, source, config }));
        }
        self.table.store(Arc::new(Table::of(members)));
    }

    /// Forgets all others.
    pub(crate) fn retain(&self, is_here: impl Fn(WorkerId) -> bool) {
        let mut members = self.table.load().members.clone();
        members.retain(|id, _| is_here(*id));
        self.table.store(Arc::new(Table::of(members)));
    }

    /// The worker of this id.
    pub fn member(&self, id: WorkerId) -> Option<Arc<Member>> {
        self.table.load().members.get(&id).cloned()
    }

    /// Workers' shapes where they are known, in the order of their ids.
    pub fn shapes(&self) -> Arc<[(WorkerId, ParallelShape)]> {
        self.table.load().shapes.clone()
    }

    /// Those that take new sessions.
    pub fn ready(&self, fleet: &Fleet) -> Vec<Arc<Member>> {
        self.those(fleet, |health| health == Health::Ready)
    }

    /// Those that answer: a draining worker keeps what it has, and serves what nobody else can.
    pub fn answering(&self, fleet: &Fleet) -> Vec<Arc<Member>> {
        self.those(fleet, |health| health != Health::Unreachable)
    }

    fn those(&self, fleet: &Fleet, wanted: impl Fn(Health) -> bool) -> Vec<Arc<Member>> {
        let workers = fleet.snapshot();
        let those = workers.iter().filter(|worker| wanted(worker.health));
        those.filter_map(|worker| self.member(worker.id)).collect()
    }

    /// The least loaded worker that is up, serves `model` (any when none was named) and is not in `tried`; equals take
    /// turns. Those that are `ejected`, draining workers, and then prefill workers, only where there is nobody else.
    pub fn pick(
        &self,
        fleet: &Fleet,
        model: Option<&str>,
        (tried, ejected): (&[WorkerId], &[WorkerId]),
    ) -> Result<Sent, ApiError> {
        let workers = fleet.snapshot();
        let serves = |worker: &WorkerView| model.is_none_or(|model| worker.models.contains(&ModelId::from(model)));
        let all_known = workers.iter().all(|worker| !worker.models.is_empty());
        if let Some(model) = model
            && !workers.is_empty()
            && all_known
            && !workers.iter().any(serves)
        {
            return Err(ApiError::UnknownModel { model: shortened(model) });
        }
        let (turn, count) = (self.turn.fetch_add(1, Ordering::Relaxed), workers.len().max(1));
        let able =
            |worker: &WorkerView| worker.health != Health::Unreachable && !tried.contains(&worker.id) && serves(worker);
        let chosen = workers.iter().enumerate().filter(|(_, worker)| able(worker)).min_by_key(|(index, worker)| {
            let load = worker.load.running.saturating_add(worker.load.waiting);
            let is_last = (ejected.contains(&worker.id), worker.health == Health::Draining);
            (is_last, worker.role == Role::Prefill, load, (index + count - turn % count) % count)
        });
        chosen
            .and_then(|(_, worker)| self.send_to(fleet, worker.id))
            .ok_or_else(|| ApiError::NoWorker { model: shortened(model.unwrap_or("any")) })
    }

    /// A request for this worker, unless it has left.
    pub fn send_to(&self, fleet: &Fleet, id: WorkerId) -> Option<Sent> {
        let member = self.member(id).filter(|_| fleet.lists(id))?;
        Some(Sent { member, _in_flight: fleet.dispatch(id, DpRank(0), Tokens::ZERO) })
    }
}

impl Table {
    fn of(members: HashMap<WorkerId, Arc<Member>>) -> Self {
        let shape = |member: &Arc<Member>| Some((member.id, member.config.shape?));
        let mut shapes: Vec<_> = members.values().filter_map(shape).collect();
        shapes.sort_unstable_by_key(|(worker, _)| *worker);
        Self { members, shapes: shapes.into() }
    }
}
