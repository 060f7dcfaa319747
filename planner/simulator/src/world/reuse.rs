//! What of prompts was found, and what had been computed before and was not.

use engine_model::runs::{RunId, Runs, Started};
use vocabulary::Tokens;

use super::tally::share;
use crate::report::{Restores, Reuse};
use crate::trace::Step;

/// A worker that lacks no more than this of what it should hold holds it: a block.
const SLACK: f64 = 64.0;
const NEARLY: f64 = 0.95;

/// The counts of prompts.
#[derive(Default)]
pub(super) struct Reused {
    /// Runs that somebody has computed, wherever they are now.
    known: Vec<bool>,
    prompt: Tokens,
    computed: Tokens,
    again: Tokens,
    local: Tokens,
    fetched: Tokens,
    restored: Tokens,
    /// Steps that found what was ever computed of them at their worker, of those of which something was.
    owner: (usize, usize),
    /// Steps that found what anybody held of them, of those that go on from others.
    best: (usize, usize),
}

impl Reused {
    pub(super) fn new(runs: usize) -> Self {
        Self { known: vec![false; runs], ..Self::default() }
    }

    /// A prompt begins, of which some worker held as much as `best` when it was placed, if it goes on from another step.
    /// Gives how many of its tokens were computed before and are computed again.
    pub(super) fn started(&mut self, runs: &Runs, (step, started): (&Step, &Started), best: Option<Tokens>) -> Tokens {
        self.prompt += step.prompt;
        self.computed += started.computed;
        self.local += started.local;
        self.fetched += started.fetched;
        self.restored += started.restored;
        let known = step.path.iter().take_while(|run| self.known[run.0 as usize]).count();
        let known = runs.end(&step.path[..known]);
        if let Some(best) = best {
            let holds = |most: Tokens| usize::from(started.local.0 as f64 >= NEARLY * most.0 as f64 - SLACK);
            self.best = (self.best.0 + holds(best), self.best.1 + 1);
            if known > Tokens::ZERO {
                self.owner = (self.owner.0 + holds(known), self.owner.1 + 1);
            }
        }
        self.computes(&step.path);
        let again = known - started.local - started.fetched - started.restored;
        self.again += again;
        again
    }

    pub(super) fn computes(&mut self, path: &[RunId]) {
        path.iter().for_each(|run| self.known[run.0 as usize] = true);
    }

    pub(super) fn figures(&self) -> Reuse {
        let of = |tokens: Tokens| share(tokens.0 as f64, self.prompt.0 as f64);
        let hits = |(found, all): (usize, usize)| share(found as f64, all as f64);
        Reuse {
            prefill_tokens: self.computed.0,
            saved_tokens: (self.prompt - self.computed).0,
            recomputed_tokens: self.again.0,
            hit_rate: of(self.local),
            owner_hit_rate: hits(self.owner),
            best_holder_rate: hits(self.best),
            fetched_rate: of(self.fetched),
            restored_tokens: self.restored.0,
            restores: Restores::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use engine_model::runs::{Restoring, Ticket};

    use super::*;
    use crate::tests::sessions;

    fn started(step: &Step, local: Tokens) -> Started {
        let computed = step.prompt - local;
        let (fetched, restored, restoring) = (Tokens::ZERO, Tokens::ZERO, Restoring::default());
        Started { ticket: Ticket(1), local, fetched, restored, computed, work: 1.0, restoring }
    }

    #[test]
    fn a_prefix_that_everybody_has_evicted_is_no_hit_of_its_owner() {
        let trace = sessions();
        let (first, next) = (&trace.sessions[0].steps[0], &trace.sessions[0].steps[1]);
        let known = trace.runs.end(&next.path[..first.path.len().min(next.path.len())]);
        assert!(known > Tokens(1_000) && next.path.starts_with(&first.path[..1]));
        let after = |local: Tokens, best: Tokens| {
            let mut reused = Reused::new(trace.runs.len());
            reused.started(&trace.runs, (first, &started(first, Tokens::ZERO)), None);
            let shared = first.path.iter().zip(next.path.iter()).take_while(|(a, b)| a == b).count();
            let shared = trace.runs.end(&next.path[..shared]);
            let again = reused.started(&trace.runs, (next, &started(next, local.min(shared))), Some(best.min(shared)));
            assert_eq!(again, shared - local.min(shared), "what was computed before and not found is computed again");
            let figures = reused.figures();
            assert_eq!(figures.recomputed_tokens, again.0);
            (figures.owner_hit_rate, figures.best_holder_rate)
        };
        let all = Tokens(u64::MAX);
        assert_eq!(after(all, all), (1.0, 1.0));
        assert_eq!(after(Tokens::ZERO, all), (0.0, 0.0), "somebody else holds it");
        assert_eq!(after(Tokens::ZERO, Tokens::ZERO), (0.0, 1.0), "nobody holds it any more");
    }

    #[test]
    fn a_step_of_which_nothing_was_ever_computed_neither_hits_nor_misses() {
        let trace = sessions();
        let (step, mut reused) = (&trace.sessions[0].steps[0], Reused::new(trace.runs.len()));
        reused.started(&trace.runs, (step, &started(step, Tokens::ZERO)), Some(Tokens::ZERO));
        assert_eq!((reused.figures().owner_hit_rate, reused.owner, reused.best), (0.0, (0, 0), (1, 1)));
    }
}
