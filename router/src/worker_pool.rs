//! Who could serve a request when nothing but its model is known: the least loaded worker that is up.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arc_swap::ArcSwap;
use planner::ParallelShape;
use vocabulary::{DpRank, ModelId, Tokens, WorkerHealth, WorkerId, WorkerRole, WorkerView};
use workers_shim::fleet::{Fleet, InFlightRequest};

use crate::config::WorkerConfig;
use crate::discovery::WorkerSource;
use crate::error::{ApiError, truncated};

/// How workers are reached, those that are leaving included, and whose turn it is among equals.
#[derive(Debug, Default)]
pub struct WorkerPool {
    table: ArcSwap<PoolSnapshot>,
    round_robin: AtomicUsize,
}

#[derive(Debug, Default)]
struct PoolSnapshot {
    members: HashMap<WorkerId, Arc<WorkerEntry>>,
    /// Of those whose parallel shape is known, ordered by worker.
    shapes: Arc<[(WorkerId, ParallelShape)]>,
}

/// One worker as it is listed.
#[derive(Debug)]
pub struct WorkerEntry {
    /// Its id.
    pub id: WorkerId,
    /// Who lists it.
    pub source: WorkerSource,
    /// How it is reached.
    pub config: WorkerConfig,
}

/// A request at a worker; dropping it is its end.
#[derive(Debug)]
pub struct DispatchGuard {
    /// At whom.
    pub member: Arc<WorkerEntry>,
    _in_flight: InFlightRequest,
}

impl WorkerPool {
    /// Takes these over, beside whom it knows. Not to be called by two at once, nor while [`Self::retain`] is.
    pub(crate) fn add(&self, workers: Vec<(WorkerSource, WorkerConfig)>) {
        let mut members = self.table.load().members.clone();
        for (source, config) in workers {
            let id = WorkerId::of_endpoint(config.endpoint());
            members.insert(id, Arc::new(WorkerEntry { id, source, config }));
        }
        self.table.store(Arc::new(PoolSnapshot::of(members)));
    }

    /// Forgets all others.
    pub(crate) fn retain(&self, is_here: impl Fn(WorkerId) -> bool) {
        let mut members = self.table.load().members.clone();
        members.retain(|id, _| is_here(*id));
        self.table.store(Arc::new(PoolSnapshot::of(members)));
    }

    /// The worker of this id.
    pub fn member(&self, id: WorkerId) -> Option<Arc<WorkerEntry>> {
        self.table.load().members.get(&id).cloned()
    }

    /// Workers' shapes where they are known, in the order of their ids.
    pub fn shapes(&self) -> Arc<[(WorkerId, ParallelShape)]> {
        self.table.load().shapes.clone()
    }

    /// Those that take new sessions.
    pub fn ready(&self, fleet: &Fleet) -> Vec<Arc<WorkerEntry>> {
        self.members_with_health(fleet, |health| health == WorkerHealth::Ready)
    }

    /// Those that answer: a draining worker keeps what it has, and serves what nobody else can.
    pub fn answering(&self, fleet: &Fleet) -> Vec<Arc<WorkerEntry>> {
        self.members_with_health(fleet, |health| health != WorkerHealth::Unreachable)
    }

    fn members_with_health(&self, fleet: &Fleet, wanted: impl Fn(WorkerHealth) -> bool) -> Vec<Arc<WorkerEntry>> {
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
    ) -> Result<DispatchGuard, ApiError> {
        let workers = fleet.snapshot();
        let serves = |worker: &WorkerView| model.is_none_or(|model| worker.models.contains(&ModelId::from(model)));
        let all_known = workers.iter().all(|worker| !worker.models.is_empty());
        if let Some(model) = model
            && !workers.is_empty()
            && all_known
            && !workers.iter().any(serves)
        {
            return Err(ApiError::UnknownModel { model: truncated(model) });
        }
        let (turn, count) = (self.round_robin.fetch_add(1, Ordering::Relaxed), workers.len().max(1));
        let able = |worker: &WorkerView| {
            worker.health != WorkerHealth::Unreachable && !tried.contains(&worker.id) && serves(worker)
        };
        let chosen = workers.iter().enumerate().filter(|(_, worker)| able(worker)).min_by_key(|(index, worker)| {
            let load = worker.load.running.saturating_add(worker.load.waiting);
            let is_last = (ejected.contains(&worker.id), worker.health == WorkerHealth::Draining);
            (is_last, worker.role == WorkerRole::Prefill, load, (index + count - turn % count) % count)
        });
        chosen
            .and_then(|(_, worker)| self.dispatch(fleet, worker.id))
            .ok_or_else(|| ApiError::NoWorker { model: truncated(model.unwrap_or("any")) })
    }

    /// A request for this worker, unless it has left.
    pub fn dispatch(&self, fleet: &Fleet, id: WorkerId) -> Option<DispatchGuard> {
        let member = self.member(id).filter(|_| fleet.is_listed(id))?;
        Some(DispatchGuard { member, _in_flight: fleet.dispatch(id, DpRank(0), Tokens::ZERO) })
    }
}

impl PoolSnapshot {
    fn of(members: HashMap<WorkerId, Arc<WorkerEntry>>) -> Self {
        let shape = |member: &Arc<WorkerEntry>| Some((member.id, member.config.shape?));
        let mut shapes: Vec<_> = members.values().filter_map(shape).collect();
        shapes.sort_unstable_by_key(|(worker, _)| *worker);
        Self { members, shapes: shapes.into() }
    }
}
