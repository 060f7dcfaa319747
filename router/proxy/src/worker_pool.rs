//! Worker pool: how workers are reached, and the choice of the least loaded one for requests without a plan.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arc_swap::ArcSwap;
use planner::ParallelShape;
use vocabulary::{DpRank, ModelId, Tokens, WorkerHealth, WorkerId, WorkerRole, WorkerView};
use workers_shim::fleet::{Fleet, InFlightGuard};

use crate::discovery::WorkerConfig;
use crate::discovery::WorkerSource;
use crate::error::ApiError;
use vocabulary::truncated;

/// All workers, including those that are leaving, with how they are reached; and a counter for turns among equals.
#[derive(Debug, Default)]
pub struct WorkerPool {
    table: ArcSwap<PoolSnapshot>,
    round_robin: AtomicUsize,
}

#[derive(Debug, Default)]
struct PoolSnapshot {
    members: HashMap<WorkerId, Arc<PoolMember>>,
    /// Parallel shapes of the workers where they are known, ordered by worker.
    shapes: Arc<[(WorkerId, ParallelShape)]>,
}

/// A worker, listed or leaving.
#[derive(Debug)]
pub struct PoolMember {
    /// Its id.
    pub id: WorkerId,
    /// The source that lists it.
    pub source: WorkerSource,
    /// Its configuration.
    pub config: WorkerConfig,
}

/// A request at a worker; dropping it ends the request.
#[derive(Debug)]
pub struct DispatchGuard {
    /// The worker.
    pub member: Arc<PoolMember>,
    _in_flight: InFlightGuard,
}

impl WorkerPool {
    /// Adds or replaces workers. Must not run concurrently, nor together with [`Self::retain`].
    pub(crate) fn add(&self, workers: Vec<(WorkerSource, WorkerConfig)>) {
        let mut members = self.table.load().members.clone();
        for (source, config) in workers {
            let id = WorkerId::of_endpoint(config.endpoint());
            members.insert(id, Arc::new(PoolMember { id, source, config }));
        }
        self.table.store(Arc::new(PoolSnapshot::of(members)));
    }

    /// Removes all other workers.
    pub(crate) fn retain(&self, is_here: impl Fn(WorkerId) -> bool) {
        let mut members = self.table.load().members.clone();
        members.retain(|id, _| is_here(*id));
        self.table.store(Arc::new(PoolSnapshot::of(members)));
    }

    /// Returns the worker of this id.
    pub fn member(&self, id: WorkerId) -> Option<Arc<PoolMember>> {
        self.table.load().members.get(&id).cloned()
    }

    /// Returns the workers' known parallel shapes, ordered by id.
    pub fn shapes(&self) -> Arc<[(WorkerId, ParallelShape)]> {
        self.table.load().shapes.clone()
    }

    /// Returns the workers that take new sessions.
    pub fn ready(&self, fleet: &Fleet) -> Vec<Arc<PoolMember>> {
        self.members_with_health(fleet, |health| health == WorkerHealth::Ready)
    }

    /// Returns the workers that answer: a draining worker keeps its sessions, and serves what no other worker can.
    pub fn answering(&self, fleet: &Fleet) -> Vec<Arc<PoolMember>> {
        self.members_with_health(fleet, |health| health != WorkerHealth::Unreachable)
    }

    fn members_with_health(&self, fleet: &Fleet, wanted: impl Fn(WorkerHealth) -> bool) -> Vec<Arc<PoolMember>> {
        let workers = fleet.snapshot();
        let those = workers.iter().filter(|worker| wanted(worker.health));
        those.filter_map(|worker| self.member(worker.id)).collect()
    }

    /// Picks the least loaded worker that is up, serves `model` (any, when none was named) and is not in `tried`;
    /// equals take turns. Ejected workers, draining workers, and then prefill workers are picked only where there is no
    /// other.
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
            let is_last = (ejected.contains(&worker.id), worker.health == WorkerHealth::Draining);
            (
                is_last,
                worker.role == WorkerRole::Prefill,
                worker.load.requests(),
                (index + count - turn % count) % count,
            )
        });
        chosen
            .and_then(|(_, worker)| self.dispatch(fleet, worker.id))
            .ok_or_else(|| ApiError::NoWorker { model: truncated(model.unwrap_or("any")) })
    }

    /// Counts a request at this worker; `None` if it has left.
    pub fn dispatch(&self, fleet: &Fleet, id: WorkerId) -> Option<DispatchGuard> {
        let member = self.member(id).filter(|_| fleet.is_listed(id))?;
        Some(DispatchGuard { member, _in_flight: fleet.dispatch(id, DpRank(0), Tokens::ZERO) })
    }
}

impl PoolSnapshot {
    fn of(members: HashMap<WorkerId, Arc<PoolMember>>) -> Self {
        let shape = |member: &Arc<PoolMember>| Some((member.id, member.config.parallelism?));
        let mut shapes: Vec<_> = members.values().filter_map(shape).collect();
        shapes.sort_unstable_by_key(|(worker, _)| *worker);
        Self { members, shapes: shapes.into() }
    }
}
