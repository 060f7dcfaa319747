//! When a step passed which stage, and what its time was spent on.

use engine_model::runs::{PrefillStart, Seconds};
use vocabulary::Tokens;

use crate::report::{RestoreBreakdown, StepBreakdown};

/// When a step passed each stage; those that are not passed yet are at zero.
#[derive(Clone, Copy, Default)]
pub(super) struct StageTimes {
    /// It wanted to be served.
    pub(super) arrived: Seconds,
    /// A worker was chosen.
    pub(super) placed: Seconds,
    /// What was sent to that worker first is there; zero without.
    pub(super) fetched: Seconds,
    /// The prompt began.
    prefill_started: Seconds,
    pub(super) computed: Seconds,
    pub(super) first_token: Seconds,
    /// Shares of the prompt's time: loading from the host tier, from disk.
    from_host: f64,
    from_disk: f64,
    /// Share of the rest: computing again.
    recomputed_share: f64,
    /// Tokens that were loaded or sent rather than computed.
    restored: Tokens,
}

impl StageTimes {
    pub(super) fn at_placement((arrived, placed): (Seconds, Seconds), fetched: Seconds) -> Self {
        Self { arrived, placed, fetched, ..Self::default() }
    }

    /// The prompt begins, of which so many tokens were computed before and are again.
    pub(super) fn prompt_started(&mut self, now: Seconds, started: &PrefillStart, again: Tokens) {
        self.prefill_started = now;
        let share = |part: f64| if started.work > 0.0 { part / started.work } else { 0.0 };
        (self.from_host, self.from_disk) = (share(started.restoring.host), share(started.restoring.disk));
        self.restored = started.restored + started.fetched;
        self.recomputed_share = again.0 as f64 / started.computed.0.max(1) as f64;
    }

    /// Where the time until `now`, when the answer is whole, went.
    pub(super) fn step_breakdown(&self, now: Seconds) -> StepBreakdown {
        let waited = span(self.placed, self.prefill_started);
        let fetch = self.fetch();
        let prompt = span(self.prefill_started, self.computed);
        let restore = prompt * (self.from_host + self.from_disk);
        let recompute = (prompt - restore) * self.recomputed_share;
        StepBreakdown {
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

    /// What of the time to the first token brought KV here, and what computed the rest; none where nothing was brought.
    pub(super) fn restore_breakdown(&self) -> Option<RestoreBreakdown> {
        let prompt = span(self.prefill_started, self.computed);
        let (host, disk) = (prompt * self.from_host, prompt * self.from_disk);
        let restore = RestoreBreakdown { compute: prompt - host - disk, host, disk, network: self.fetch() };
        (self.restored > Tokens::ZERO).then_some(restore)
    }

    /// Waiting for what another worker sends.
    fn fetch(&self) -> f64 {
        span(self.placed, self.fetched).min(span(self.placed, self.prefill_started))
    }
}

fn span(from: Seconds, to: Seconds) -> f64 {
    (to - from).0.max(0.0)
}
