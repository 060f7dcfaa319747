//! When a step passed which stage, and what its time was spent on.

use engine_model::runs::{Seconds, Started};
use vocabulary::Tokens;

use crate::report::{Restore, Spent};

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
    pub(super) computed: Seconds,
    pub(super) first_token: Seconds,
    /// Shares of the prompt's time: loading from the host tier, from disk.
    from_host: f64,
    from_disk: f64,
    /// Share of the rest: computing again.
    again: f64,
    /// Tokens that were loaded or sent rather than computed.
    restored: Tokens,
}

impl Stages {
    pub(super) fn placed((arrived, placed): (Seconds, Seconds), fetched: Seconds) -> Self {
        Self { arrived, placed, fetched, ..Self::default() }
    }

    /// The prompt begins, of which so many tokens were computed before and are again.
    pub(super) fn begin(&mut self, now: Seconds, started: &Started, again: Tokens) {
        self.begun = now;
        let share = |part: f64| if started.work > 0.0 { part / started.work } else { 0.0 };
        (self.from_host, self.from_disk) = (share(started.restoring.host), share(started.restoring.disk));
        self.restored = started.restored + started.fetched;
        self.again = again.0 as f64 / started.computed.0.max(1) as f64;
    }

    /// Where the time until `now`, when the answer is whole, went.
    pub(super) fn spent(&self, now: Seconds) -> Spent {
        let waited = span(self.placed, self.begun);
        let fetch = self.fetch();
        let prompt = span(self.begun, self.computed);
        let restore = prompt * (self.from_host + self.from_disk);
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

    /// What of the time to the first token brought KV here, and what computed the rest; none where nothing was brought.
    pub(super) fn restore(&self) -> Option<Restore> {
        let prompt = span(self.begun, self.computed);
        let (host, disk) = (prompt * self.from_host, prompt * self.from_disk);
        let restore = Restore { compute: prompt - host - disk, host, disk, network: self.fetch() };
        (self.restored > Tokens::ZERO).then_some(restore)
    }

    /// Waiting for what another worker sends.
    fn fetch(&self) -> f64 {
        span(self.placed, self.fetched).min(span(self.placed, self.begun))
    }
}

fn span(from: Seconds, to: Seconds) -> f64 {
    (to - from).0.max(0.0)
}
