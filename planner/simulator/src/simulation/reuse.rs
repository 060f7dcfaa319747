//! Counts prompt tokens that were found in a cache, and those that were recomputed.

use engine_model::runs::{PrefillStart, RunId, RunTree};
use vocabulary::Tokens;

use crate::report::{RestoreStats, ReuseStats};
use crate::trace::TraceStep;

/// A worker that lacks at most one block of a prefix counts as holding it.
const SLACK_TOKENS: f64 = 64.0;
const MIN_HIT_SHARE: f64 = 0.95;

/// Token counts over all prompts.
#[derive(Default)]
pub(super) struct ReuseCounter {
    /// Runs that any worker has ever computed.
    computed_runs: Vec<bool>,
    prompt: Tokens,
    computed: Tokens,
    recomputed: Tokens,
    local: Tokens,
    fetched: Tokens,
    restored: Tokens,
    /// Steps that found at their worker what was ever computed of them, and all steps of which something was computed.
    owner_hits: (usize, usize),
    /// Steps that found what any worker held of them, and all steps that continue others.
    best_holder_hits: (usize, usize),
}

impl ReuseCounter {
    pub(super) fn new(runs: usize) -> Self {
        Self { computed_runs: vec![false; runs], ..Self::default() }
    }

    /// Counts a prompt that starts. `best` is the longest prefix that any worker held at placement, if the step
    /// continues another one. Returns the prompt's tokens that are recomputed.
    pub(super) fn record_prompt(
        &mut self,
        runs: &RunTree,
        (step, started): (&TraceStep, &PrefillStart),
        best: Option<Tokens>,
    ) -> Tokens {
        self.prompt += step.prompt;
        self.computed += started.computed;
        self.local += started.local;
        self.fetched += started.fetched;
        self.restored += started.restored;
        let known = step.path.iter().take_while(|run| self.computed_runs[run.0 as usize]).count();
        let known = runs.end_depth(&step.path[..known]);
        if let Some(best) = best {
            let holds =
                |most: Tokens| usize::from(started.local.0 as f64 >= MIN_HIT_SHARE * most.0 as f64 - SLACK_TOKENS);
            self.best_holder_hits = (self.best_holder_hits.0 + holds(best), self.best_holder_hits.1 + 1);
            if known > Tokens::ZERO {
                self.owner_hits = (self.owner_hits.0 + holds(known), self.owner_hits.1 + 1);
            }
        }
        self.mark_computed(&step.path);
        let again = known - started.local - started.fetched - started.restored;
        self.recomputed += again;
        again
    }

    pub(super) fn mark_computed(&mut self, path: &[RunId]) {
        path.iter().for_each(|run| self.computed_runs[run.0 as usize] = true);
    }

    pub(super) fn figures(&self) -> ReuseStats {
        let of = |tokens: Tokens| share(tokens.0 as f64, self.prompt.0 as f64);
        let hits = |(found, all): (usize, usize)| share(found as f64, all as f64);
        ReuseStats {
            prefill_tokens: self.computed.0,
            saved_tokens: (self.prompt - self.computed).0,
            recomputed_tokens: self.recomputed.0,
            cache_hit_rate: of(self.local),
            owner_hit_rate: hits(self.owner_hits),
            best_holder_hit_rate: hits(self.best_holder_hits),
            prefetched_share: of(self.fetched),
            restored_tokens: self.restored.0,
            restores: RestoreStats::default(),
        }
    }
}

/// Returns a share; zero of nothing.
pub(super) fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use engine_model::runs::{RestoreTime, RunRequestId};

    use super::*;
    use crate::tests::sessions;

    fn started(step: &TraceStep, local: Tokens) -> PrefillStart {
        let computed = step.prompt - local;
        let (fetched, restored, restoring) = (Tokens::ZERO, Tokens::ZERO, RestoreTime::default());
        PrefillStart { ticket: RunRequestId(1), local, fetched, restored, computed, work: 1.0, restoring }
    }

    #[test]
    fn fully_evicted_prefix_is_not_an_owner_hit() {
        let trace = sessions();
        let (first, next) = (&trace.sessions[0].steps[0], &trace.sessions[0].steps[1]);
        let known = trace.runs.end_depth(&next.path[..first.path.len().min(next.path.len())]);
        assert!(known > Tokens(1_000) && next.path.starts_with(&first.path[..1]));
        let after = |local: Tokens, best: Tokens| {
            let mut reused = ReuseCounter::new(trace.runs.len());
            reused.record_prompt(&trace.runs, (first, &started(first, Tokens::ZERO)), None);
            let shared = first.path.iter().zip(next.path.iter()).take_while(|(a, b)| a == b).count();
            let shared = trace.runs.end_depth(&next.path[..shared]);
            let again =
                reused.record_prompt(&trace.runs, (next, &started(next, local.min(shared))), Some(best.min(shared)));
            assert_eq!(again, shared - local.min(shared), "what was computed before and not found is computed again");
            let figures = reused.figures();
            assert_eq!(figures.recomputed_tokens, again.0);
            (figures.owner_hit_rate, figures.best_holder_hit_rate)
        };
        let all = Tokens(u64::MAX);
        assert_eq!(after(all, all), (1.0, 1.0));
        assert_eq!(after(Tokens::ZERO, all), (0.0, 0.0), "somebody else holds it");
        assert_eq!(after(Tokens::ZERO, Tokens::ZERO), (0.0, 1.0), "nobody holds it any more");
    }

    #[test]
    fn first_seen_prompt_counts_neither_as_hit_nor_as_miss() {
        let trace = sessions();
        let (step, mut reused) = (&trace.sessions[0].steps[0], ReuseCounter::new(trace.runs.len()));
        reused.record_prompt(&trace.runs, (step, &started(step, Tokens::ZERO)), Some(Tokens::ZERO));
        assert_eq!(
            (reused.figures().owner_hit_rate, reused.owner_hits, reused.best_holder_hits),
            (0.0, (0, 0), (1, 1))
        );
    }
}
