//! When a step passed which stage, and what its time was spent on.

use engine_model::runs::{Seconds, Started};
use vocabulary::Tokens;

use crate::report::Spent;

/// When a step passed each stage; those that are not passed yet are at zero.
#[derive(Clone, Copy, Default)]
pub(super) struct Stages {
    /// It wanted to be served.
    pub(super) arrived: Seconds,
    /// A worker was chosen.
    pub(super) placed: Seconds,
    /// What was sent to that worker first is there; zero without.
    pub(super) fetched: Seconds,
    /// The prompt began.
    begun: Seconds,
    /// The prompt was computed.
    pub(super) computed: Seconds,
    /// The first token was there.
    pub(super) first_token: Seconds,
    /// Shares of the prompt's time: loading from the host tier, computing again.
    restore: f64,
    again: f64,
}

impl Stages {
    pub(super) fn placed((arrived, placed): (Seconds, Seconds), fetched: Seconds) -> Self {
        Self { arrived, placed, fetched, ..Self::default() }
    }

    /// The prompt begins, of which so many tokens were computed before and are again.
    pub(super) fn begin(&mut self, now: Seconds, started: &Started, again: Tokens) {
        self.begun = now;
        self.restore = if started.work > 0.0 { started.restoring / started.work } else { 0.0 };
        self.again = again.0 as f64 / started.computed.0.max(1) as f64;
    }

    /// Where the time until `now`, when the answer is whole, went.
    pub(super) fn spent(&self, now: Seconds) -> Spent {
        let span = |from: Seconds, to: Seconds| (to - from).0.max(0.0);
        let waited = span(self.placed, self.begun);
        let fetch = span(self.placed, self.fetched).min(waited);
        let prompt = span(self.begun, self.computed);
        let restore = prompt * self.restore;
        let recompute = (prompt - restore) * self.again;
        Spent {
            held_back: span(self.arrived, self.placed),
            fetch,
            queue: waited - fetch,
            restore,
            recompute,
            compute: prompt - restore - recompute,
            handoff: span(self.computed, self.first_token),
            answer: span(self.first_token, now),
        }
    }
}
