//! Trials of one plan, which end with it.

use std::time::Instant;

use vocabulary::WorkerId;

use super::OutlierTracker;

/// The workers of one plan for which its requests are trials. Dropping it lets the next trial begin where this one had
/// no result: the client left, or the worker had no capacity.
#[derive(Debug)]
pub struct EjectionTrials {
    outliers: OutlierTracker,
    workers: Vec<WorkerId>,
    sent_at: Instant,
}

impl EjectionTrials {
    /// Records requests to these workers; `None` where none of them is a trial.
    pub fn begin(outliers: &OutlierTracker, workers: impl Iterator<Item = WorkerId>) -> Option<Self> {
        let asked = Instant::now();
        let mut known = outliers.lock();
        let workers: Vec<_> = workers.filter(|worker| known.record_sent(*worker, asked)).collect();
        drop(known);
        (!workers.is_empty()).then(|| Self { outliers: outliers.clone(), workers, sent_at: asked })
    }

    /// Records that the answer has begun.
    pub fn record_answer_started(&self) {
        let mut known = self.outliers.lock();
        self.workers.iter().for_each(|worker| known.record_answer_started(*worker));
    }
}

impl Drop for EjectionTrials {
    fn drop(&mut self) {
        let mut known = self.outliers.lock();
        self.workers.iter().for_each(|worker| known.release_trial(*worker, (self.sent_at, Instant::now())));
    }
}
