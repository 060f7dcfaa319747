//! The outlier detector as the request path shares it: records the results of requests for the workers that got them.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};
use vocabulary::{WorkerId, WorkerView};
use workers_shim::fleet::Fleet;

use super::{OutlierConfig, OutlierDetector};
use crate::telemetry::decision_metrics::OutlierMetrics;

/// The outlier detector, with the fleet whose workers it judges. Clones share it.
#[derive(Clone, Debug)]
pub struct SharedOutlierDetector {
    outliers: Arc<Mutex<OutlierDetector>>,
    fleet: Arc<Fleet>,
    metrics: OutlierMetrics,
}

impl SharedOutlierDetector {
    /// Returns a detector without statistics.
    pub fn new(config: OutlierConfig, fleet: Arc<Fleet>, metrics: OutlierMetrics) -> Self {
        Self { outliers: Arc::new(Mutex::new(OutlierDetector::new(config))), fleet, metrics }
    }

    /// Locks the detector. Hold it briefly, never across an await.
    pub fn lock(&self) -> MutexGuard<'_, OutlierDetector> {
        self.outliers.lock()
    }

    /// Counts the failure of a request that was sent to `worker` at `asked`, before or inside its answer. `step` is the
    /// fleet that its step was planned with.
    pub fn record_failure(&self, step: &[WorkerView], (worker, asked): (WorkerId, Instant)) {
        if !self.is_alive(step, worker) {
            return;
        }
        let workers = self.fleet.snapshot();
        let ejected = self.lock().record_failure(&workers, worker, (asked, Instant::now()));
        let Some((cause, pause)) = ejected else { return };
        let endpoint =
            workers.iter().find(|view| view.id == worker).map(|view| tracing::field::display(&view.endpoint));
        let (cause, seconds) = (cause.as_ref(), pause.as_secs_f64());
        tracing::warn!(
            worker = endpoint,
            reason = cause,
            seconds,
            "a worker is ejected: requests fail there, so that only trials go there for a while"
        );
        self.metrics.ejections.with_label_values(&[cause]).inc();
    }

    /// Counts the complete answer to a request that was sent at `asked` for the workers `served`.
    pub fn record_success(&self, step: &[WorkerView], (served, asked): (&[WorkerId], Instant)) {
        let served = step.iter().filter(|view| served.contains(&view.id) && self.is_alive(step, view.id));
        for view in served {
            if self.lock().record_success((view.id, view.incarnation), (asked, Instant::now())) {
                tracing::info!(worker = %view.endpoint, "a worker that was ejected answers again");
            }
        }
    }

    /// Whether the incarnation that got the request is still there: results of another one do not count, and an
    /// unreachable worker is excluded by that alone.
    fn is_alive(&self, step: &[WorkerView], worker: WorkerId) -> bool {
        let incarnation = step.iter().find(|view| view.id == worker).map(|view| view.incarnation);
        incarnation.is_some() && self.fleet.incarnation(worker) == incarnation
    }
}
