//! Eviction cost: storing KV evicts other sessions' KV, which they recompute, and that delays others again.

use vocabulary::{Micros, Tokens};

use crate::cost::CostModel;
use crate::kv_occupancy::EvictionVictim;
use crate::micros::micros;
use crate::worker_candidate::WorkerCandidate;

/// When nothing can be evicted, the step waits for running answers to end: this many times the compute time of what
/// does not fit.
const UNEVICTABLE_WAIT_FACTOR: f64 = 20.0;
/// Most running answers that one recomputation is assumed to delay.
const MAX_STALLED_ANSWERS: f64 = 4.0;

/// Whether stored KV will grow.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoredKvKind {
    /// The session stays at the worker, and grows.
    Resident,
    /// A copy made for a transfer.
    Transfer,
}

impl CostModel<'_> {
    /// `T_eviction` of tokens that are stored at a worker. Each victim counts `chance to return soon x time to restore
    /// its KV x (1 + answers delayed by that)`; the sum is weighted by the policy's `eviction_weight`. KV is restored
    /// by recomputation, or from the host tier if it is still there. Zero when the tokens fit, and when the memory's
    /// size is unknown.
    ///
    /// A session that is new at the worker is expected to grow as others did, by at most the policy's
    /// `max_session_growth_tokens` and an eighth of the memory. Half of the active sessions count as delayed answers.
    /// The session's own stale KV is a victim that never returns. Tokens for which no victim can make room cost
    /// `UNEVICTABLE_WAIT_FACTOR` x their compute time.
    pub(crate) fn eviction_cost(&self, at: &WorkerCandidate<'_>, stored: Tokens, kind: StoredKvKind) -> Micros {
        if at.view.capacity.kv == Tokens::ZERO || self.eviction == 0.0 {
            return Micros::ZERO;
        }
        let growth = if kind == StoredKvKind::Resident { at.expected_growth(self.inputs) } else { Tokens::ZERO };
        match stored + growth - at.headroom.free {
            Tokens::ZERO => Micros::ZERO,
            missing => self.shortfall_cost(at, stored, missing),
        }
    }

    /// A separate function that is not inlined, so that the common case (the tokens fit) touches nothing else.
    #[inline(never)]
    fn shortfall_cost(&self, at: &WorkerCandidate<'_>, stored: Tokens, missing: Tokens) -> Micros {
        let headroom = &at.headroom;
        let stalled_answers = (f64::from(headroom.active) / 2.0).min(MAX_STALLED_ANSWERS);
        let recovery = self.victims_recovery_time(at, missing.min(headroom.evictable())) * (1.0 + stalled_answers);
        let unevictable = stored - headroom.free - headroom.evictable();
        let wait = at.speed.rate.span(Tokens::ZERO, unevictable).0 as f64 * UNEVICTABLE_WAIT_FACTOR;
        micros(self.eviction * (recovery + wait))
    }

    /// Returns the microseconds that victims are expected to spend on getting these tokens back. KV is evicted from its
    /// end; victims beyond those examined count as the average of these.
    fn victims_recovery_time(&self, at: &WorkerCandidate<'_>, tokens: Tokens) -> f64 {
        let extrapolate = |totals: &ExaminedVictimTotals| totals.recovery * tokens.0 as f64 / totals.tokens.0 as f64;
        if let Some(totals) = at.victim_totals.get().filter(|totals| totals.tokens < tokens) {
            return extrapolate(totals);
        }
        let (mut remaining, mut recovery) = (tokens, 0.0);
        for EvictionVictim { tokens: held, return_probability } in self.session_lookup.victims(&at.headroom) {
            if held >= remaining {
                return recovery + at.recovery_cost.span(held - remaining, held) * return_probability;
            }
            recovery += at.recovery_cost.first(held) * return_probability;
            remaining -= held;
        }
        match tokens - remaining {
            Tokens::ZERO => 0.0,
            examined => {
                extrapolate(at.victim_totals.get_or_init(|| ExaminedVictimTotals { tokens: examined, recovery }))
            }
        }
    }
}

/// Sums over all examined victims of a rank, cached once a request went beyond them.
pub(crate) struct ExaminedVictimTotals {
    tokens: Tokens,
    /// Microseconds that the victims are expected to spend on getting these tokens back.
    recovery: f64,
}
