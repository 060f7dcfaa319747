//! How steps got KV back that they did not compute, and what their first tokens waited for meanwhile.

use serde::Serialize;

/// Seconds of the time to a first token by what they were spent on, besides waiting for others.
#[derive(Clone, Copy, PartialEq, Serialize, Debug, Default)]
pub struct RestoreBreakdown {
    /// What was not brought was computed.
    pub compute: f64,
    /// KV came back from the host tier.
    pub host: f64,
    /// KV came back from disk.
    pub disk: f64,
    /// KV was on its way from another worker before the prompt began.
    pub network: f64,
}

/// Steps that were brought KV, and their mean or, while they are counted, their sum.
#[derive(Clone, Copy, PartialEq, Serialize, Debug, Default)]
pub struct RestoreFigures {
    /// How many.
    pub steps: usize,
    /// Where their time went.
    #[serde(flatten)]
    pub split: RestoreBreakdown,
}

impl RestoreFigures {
    pub(crate) fn add(&mut self, step: &RestoreBreakdown) {
        self.steps += 1;
        self.split.compute += step.compute;
        self.split.host += step.host;
        self.split.disk += step.disk;
        self.split.network += step.network;
    }

    /// Of a sum, the mean step; zeros of none.
    pub(crate) fn mean(&self) -> Self {
        let by = self.steps.max(1) as f64;
        let RestoreBreakdown { compute, host, disk, network } = self.split;
        let split = RestoreBreakdown { compute: compute / by, host: host / by, disk: disk / by, network: network / by };
        Self { split, ..*self }
    }
}
