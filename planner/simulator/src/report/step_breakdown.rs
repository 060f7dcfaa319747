//! Breakdown of step time.

use serde::Serialize;

/// Seconds of a step by cause, or the sum over several steps.
#[derive(Clone, Copy, PartialEq, Serialize, Debug, Default)]
pub struct StepBreakdown {
    /// Held in the policy's admission queue.
    pub admission_wait: f64,
    /// Waiting for KV of the prompt from another worker.
    pub fetch: f64,
    /// Queued behind other requests, or waiting for memory.
    pub queue: f64,
    /// Loading KV from slower tiers.
    pub restore: f64,
    /// Computing tokens that had been computed before.
    pub recompute: f64,
    /// Computing tokens for the first time.
    pub compute: f64,
    /// Sending the prompt's KV to the decode worker, or waiting for memory there.
    pub handoff: f64,
    /// Generating the answer.
    pub decode: f64,
}

impl StepBreakdown {
    /// Names of the parts, in the order of `parts`.
    pub const PARTS: [&str; 8] =
        ["admission wait", "fetch", "queue", "restore", "recompute", "compute", "handoff", "decode"];

    /// Returns all parts, in chronological order.
    pub fn parts(&self) -> [f64; 8] {
        let Self { admission_wait, fetch, queue, restore, recompute, compute, handoff, decode } = *self;
        [admission_wait, fetch, queue, restore, recompute, compute, handoff, decode]
    }

    fn of(parts: [f64; 8]) -> Self {
        let [admission_wait, fetch, queue, restore, recompute, compute, handoff, decode] = parts;
        Self { admission_wait, fetch, queue, restore, recompute, compute, handoff, decode }
    }

    /// Adds another breakdown.
    pub(crate) fn add(&mut self, other: &Self) {
        let (mut sum, more) = (self.parts(), other.parts());
        sum.iter_mut().zip(more).for_each(|(part, more)| *part += more);
        *self = Self::of(sum);
    }

    /// Returns the mean over `steps` steps; zeros for none.
    pub(crate) fn mean_over(&self, steps: usize) -> Self {
        Self::of(self.parts().map(|part| part / steps.max(1) as f64))
    }
}
