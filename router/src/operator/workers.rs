//! `/ownerserve/v1/workers`: each worker as the planner sees it, with its lease and what came of its events.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use ownership::View;
use ownership::ledger::{Lease, Worker};
use serde::Serialize;
use vocabulary::{Epoch, WorkerView};
use workers_shim::events::EventCounts;

use super::ledger::Fresh;
use crate::gateway::Gateway;

/// The answer.
#[derive(Serialize)]
pub(super) struct WorkerLines {
    workers: Vec<WorkerLine>,
}

#[derive(Serialize)]
struct WorkerLine {
    #[serde(flatten)]
    seen: WorkerView,
    lease: Option<LeaseLine>,
    events: Option<EventLine>,
}

/// What the ledger says of the worker's present life.
#[derive(Serialize)]
struct LeaseLine {
    state: &'static str,
    epoch: Epoch,
    /// Until it may be ended, on the ledger's clock.
    left_ms: Option<u64>,
}

impl LeaseLine {
    fn new(view: &View, worker: &Worker) -> Self {
        let (state, left_ms) = match worker.lease {
            Lease::Held { until } => ("held", Some(until.0.saturating_sub(view.now().0) / 1000)),
            Lease::Expired { .. } => ("expired", None),
            Lease::Retired { .. } => ("retired", None),
        };
        Self { state, epoch: worker.epoch, left_ms }
    }
}

#[derive(Serialize)]
struct EventLine {
    batches: u64,
    events: u64,
    gaps: u64,
    replays: u64,
    undecodable: u64,
    unplaced: u64,
    restarts: u64,
    adopted: u64,
    engine_blocks: u64,
    lag_ms: u64,
}

impl From<EventCounts> for EventLine {
    fn from(counts: EventCounts) -> Self {
        let EventCounts { batches, events, gaps, replays, undecodable, unplaced, restarts, adopted, blocks, lag } =
            counts;
        let (engine_blocks, lag_ms) = (blocks, lag.0 / 1000);
        Self { batches, events, gaps, replays, undecodable, unplaced, restarts, adopted, engine_blocks, lag_ms }
    }
}

/// `GET /ownerserve/v1/workers`.
pub(super) async fn workers(State(gateway): State<Arc<Gateway>>) -> Json<Fresh<WorkerLines>> {
    let view = gateway.directory().view();
    let line = |seen: &WorkerView| WorkerLine {
        lease: view.worker(seen.id).map(|worker| LeaseLine::new(&view, worker)),
        events: gateway.fleet().events(seen.id).map(EventLine::from),
        seen: seen.clone(),
    };
    let workers = gateway.fleet().snapshot().iter().map(line).collect();
    Fresh::new(&view, WorkerLines { workers })
}
