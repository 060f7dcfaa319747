//! Where the time of steps went.

use serde::Serialize;

/// Seconds of a step by what they were spent on, or the sum of several.
#[derive(Clone, Copy, PartialEq, Serialize, Debug, Default)]
pub struct StepBreakdown {
    /// The policy let it wait.
    pub held_back: f64,
    /// KV of its prompt was on its way from another worker.
    pub fetch: f64,
    /// It waited behind others, or for memory.
    pub queue: f64,
    /// KV came back from the host tier.
    pub restore: f64,
    /// Tokens were computed that had been computed before.
    pub recompute: f64,
    /// Tokens were computed for the first time.
    pub compute: f64,
    /// The prompt's KV went to the worker that answers, or waited for room there.
    pub handoff: f64,
    /// The answer was generated.
    pub answer: f64,
}

impl StepBreakdown {
    /// The parts' names, in the order of `parts`.
    pub const PARTS: [&str; 8] =
        ["held back", "fetch", "queue", "restore", "recompute", "compute", "handoff", "answer"];

    /// All of it, in the order in which it is spent.
    pub fn parts(&self) -> [f64; 8] {
        let Self { held_back, fetch, queue, restore, recompute, compute, handoff, answer } = *self;
        [held_back, fetch, queue, restore, recompute, compute, handoff, answer]
    }

    fn of(parts: [f64; 8]) -> Self {
        let [held_back, fetch, queue, restore, recompute, compute, handoff, answer] = parts;
        Self { held_back, fetch, queue, restore, recompute, compute, handoff, answer }
    }

    /// Another step's beside it.
    pub(crate) fn add(&mut self, other: &Self) {
        let (mut sum, more) = (self.parts(), other.parts());
        sum.iter_mut().zip(more).for_each(|(part, more)| *part += more);
        *self = Self::of(sum);
    }

    /// The mean of so many; zeros of none.
    pub(crate) fn mean_over(&self, steps: usize) -> Self {
        Self::of(self.parts().map(|part| part / steps.max(1) as f64))
    }
}
