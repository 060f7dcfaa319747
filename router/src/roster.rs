//! Who could serve a request when nothing but its model is known: the least loaded worker that is up.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use vocabulary::{DpRank, Health, ModelId, Role, Tokens, WorkerId, WorkerView};
use workers_shim::fleet::{Fleet, InFlight};

use crate::config::WorkerConfig;
use crate::error::{ApiError, shortened};

/// The configured workers, and whose turn it is among equals.
#[derive(Debug)]
pub struct Roster {
    members: Vec<Arc<Member>>,
    turn: AtomicUsize,
}

/// One worker as configured.
#[derive(Debug)]
pub struct Member {
    /// Its id.
    pub id: WorkerId,
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
    /// Of the configured workers.
    pub fn new(workers: &[WorkerConfig]) -> Self {
        let member = |config: &WorkerConfig| {
            Arc::new(Member { id: WorkerId::of_endpoint(config.endpoint()), config: config.clone() })
        };
        Self { members: workers.iter().map(member).collect(), turn: AtomicUsize::new(0) }
    }

    /// The worker of this id.
    pub fn member(&self, id: WorkerId) -> Option<&Arc<Member>> {
        self.members.iter().find(|member| member.id == id)
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
        those.filter_map(|worker| self.member(worker.id).cloned()).collect()
    }

    /// The least loaded worker that is up, serves `model` (any when none was named) and is not in `tried`; equals take
    /// turns. Draining workers, and then prefill workers, only where there is nobody else.
    pub fn pick(&self, fleet: &Fleet, model: Option<&str>, tried: &[WorkerId]) -> Result<Sent, ApiError> {
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
            let load = worker.load.running + worker.load.waiting;
            let is_last = worker.health == Health::Draining;
            (is_last, worker.role == Role::Prefill, load, (index + count - turn % count) % count)
        });
        chosen
            .and_then(|(_, worker)| self.send_to(fleet, worker.id))
            .ok_or_else(|| ApiError::NoWorker { model: shortened(model.unwrap_or("any")) })
    }

    /// A request for this worker.
    pub fn send_to(&self, fleet: &Fleet, id: WorkerId) -> Option<Sent> {
        let member = self.member(id)?.clone();
        Some(Sent { member, _in_flight: fleet.dispatch(id, DpRank(0), Tokens::ZERO) })
    }
}
