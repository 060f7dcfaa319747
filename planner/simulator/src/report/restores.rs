//! Restores: how steps got KV that they did not compute, and what their first tokens waited for.

use serde::Serialize;

/// Seconds of a time to first token by cause, without queueing.
#[derive(Clone, Copy, PartialEq, Serialize, Debug, Default)]
pub struct RestoreBreakdown {
    /// Computing what was not restored.
    pub compute: f64,
    /// Loading KV from the host tier.
    pub host: f64,
    /// Loading KV from disk.
    pub disk: f64,
    /// Waiting for KV from another worker before the prompt began.
    pub network: f64,
}

/// Steps that restored KV, with the sum of their times, or their mean at the end.
#[derive(Clone, Copy, PartialEq, Serialize, Debug, Default)]
pub struct RestoreStats {
    /// Number of steps.
    pub steps: usize,
    /// Breakdown of their time.
    #[serde(flatten)]
    pub split: RestoreBreakdown,
}

impl RestoreStats {
    pub(crate) fn add(&mut self, step: &RestoreBreakdown) {
        self.steps += 1;
        self.split.compute += step.compute;
        self.split.host += step.host;
        self.split.disk += step.disk;
        self.split.network += step.network;
    }

    /// Returns the mean over the steps; zeros if there are none.
    pub(crate) fn mean(&self) -> Self {
        let by = self.steps.max(1) as f64;
        let RestoreBreakdown { compute, host, disk, network } = self.split;
        let split = RestoreBreakdown { compute: compute / by, host: host / by, disk: disk / by, network: network / by };
        Self { split, ..*self }
    }
}
