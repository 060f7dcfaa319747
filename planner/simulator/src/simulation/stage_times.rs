//! Times at which a step passes its stages, and the breakdown of its time.

use engine_model::runs::{PrefillStart, Seconds};
use vocabulary::Tokens;

use crate::report::{StepBreakdown, TtftBreakdown};

/// Times at which a step passed each stage; zero for later ones.
#[derive(Clone, Copy, Default)]
pub(super) struct StageTimestamps {
    /// The step arrived.
    pub(super) arrived: Seconds,
    /// A worker was chosen.
    pub(super) placed: Seconds,
    /// KV sent to that worker first has arrived; zero if none was sent.
    pub(super) fetched: Seconds,
    /// The prefill started.
    prefill_started: Seconds,
    pub(super) computed: Seconds,
    pub(super) first_token: Seconds,
    /// Shares of the prefill time spent on loading from the host tier and from disk.
    from_host: f64,
    from_disk: f64,
    /// Share of the remaining prefill time spent on recomputation.
    recomputed_share: f64,
    /// Tokens that were loaded or received instead of computed.
    restored: Tokens,
}

impl StageTimestamps {
    pub(super) fn at_placement((arrived, placed): (Seconds, Seconds), fetched: Seconds) -> Self {
        Self { arrived, placed, fetched, ..Self::default() }
    }

    /// Records the start of the prefill, of which `again` tokens are recomputed.
    pub(super) fn prompt_started(&mut self, now: Seconds, started: &PrefillStart, again: Tokens) {
        self.prefill_started = now;
        let share = |part: f64| if started.work > 0.0 { part / started.work } else { 0.0 };
        (self.from_host, self.from_disk) = (share(started.restoring.host), share(started.restoring.disk));
        self.restored = started.restored + started.fetched;
        self.recomputed_share = again.0 as f64 / started.computed.0.max(1) as f64;
    }

    /// Returns the breakdown of the step's time; `now` is the end of the answer.
    pub(super) fn step_breakdown(&self, now: Seconds) -> StepBreakdown {
        let waited = span(self.placed, self.prefill_started);
        let fetch = self.fetch();
        let prompt = span(self.prefill_started, self.computed);
        let restore = prompt * (self.from_host + self.from_disk);
        let recompute = (prompt - restore) * self.recomputed_share;
        StepBreakdown {
            admission_wait: span(self.arrived, self.placed),
            fetch,
            queue: waited - fetch,
            restore,
            recompute,
            compute: prompt - restore - recompute,
            handoff: span(self.computed, self.first_token),
            decode: span(self.first_token, now),
        }
    }

    /// Returns the breakdown of the restore and the computation before the first token; none if nothing was restored.
    pub(super) fn restore_breakdown(&self) -> Option<TtftBreakdown> {
        let prompt = span(self.prefill_started, self.computed);
        let (host, disk) = (prompt * self.from_host, prompt * self.from_disk);
        let restore = TtftBreakdown { compute: prompt - host - disk, host, disk, network: self.fetch() };
        (self.restored > Tokens::ZERO).then_some(restore)
    }

    /// Returns the seconds spent waiting for KV from another worker.
    fn fetch(&self) -> f64 {
        span(self.placed, self.fetched).min(span(self.placed, self.prefill_started))
    }
}

fn span(from: Seconds, to: Seconds) -> f64 {
    (to - from).0.max(0.0)
}
