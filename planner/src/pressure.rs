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
pub(crate) enum CopyKind {
    /// The session stays at the worker, and grows.
    Stays,
    /// A copy made for a transfer.
    Passes,
}

impl CostModel<'_> {
    /// `T_eviction` of tokens that are stored at a worker. Each victim counts
    /// `chance to return soon x time to restore its KV x (1 + answers delayed by that)`; the sum is weighted by the
    /// policy's `eviction_weight`. KV is restored by recomputation, or from the host tier if it is still there. Zero when the
    /// tokens fit, and when the memory's size is unknown.
    ///
    /// A session that is new at the worker is expected to grow as others did, by at most the policy's `max_session_growth_tokens` and an
    /// eighth of the memory. Half of the active sessions count as delayed answers. The session's own stale KV is a
    /// victim that never returns. Tokens for which no victim can make room cost `UNEVICTABLE_WAIT_FACTOR` x their
    /// compute time.
    pub(crate) fn eviction_cost(&self, at: &WorkerCandidate<'_>, stored: Tokens, guest: CopyKind) -> Micros {
        if at.view.capacity.kv == Tokens::ZERO || self.eviction == 0.0 {
            return Micros::ZERO;
        }
        let growth = if guest == CopyKind::Stays { at.expected_growth(self.inputs) } else { Tokens::ZERO };
        match stored + growth - at.headroom.free {
            Tokens::ZERO => Micros::ZERO,
            missing => self.shortfall_cost(at, stored, missing),
        }
    }

    /// A separate function that is not inlined, so that the common case (the tokens fit) touches nothing else.
    #[inline(never)]
    fn shortfall_cost(&self, at: &WorkerCandidate<'_>, stored: Tokens, missing: Tokens) -> Micros {
        let room = &at.headroom;
        let held_up = (f64::from(room.active) / 2.0).min(MAX_STALLED_ANSWERS);
        let again = self.victims_recompute_time(at, missing.min(room.evictable())) * (1.0 + held_up);
        let unplaced = stored - room.free - room.evictable();
        let waiting = at.speed.rate.span(Tokens::ZERO, unplaced).0 as f64 * UNEVICTABLE_WAIT_FACTOR;
        micros(self.eviction * (again + waiting))
    }

    /// Returns the microseconds that victims are expected to spend on restoring these tokens. KV is evicted from its
    /// end; victims beyond those examined count as the average of these.
    fn victims_recompute_time(&self, at: &WorkerCandidate<'_>, tokens: Tokens) -> f64 {
        let beyond = |all: &ExaminedVictimTotals| all.again * tokens.0 as f64 / all.tokens.0 as f64;
        if let Some(all) = at.victim_totals.get().filter(|all| all.tokens < tokens) {
            return beyond(all);
        }
        let (mut left, mut again) = (tokens, 0.0);
        for EvictionVictim { tokens: all, return_probability: chance } in self.session_lookup.victims(&at.headroom) {
            if all >= left {
                return again + at.eviction_cost.span(all - left, all) * chance;
            }
            again += at.eviction_cost.first(all) * chance;
            left -= all;
        }
        match tokens - left {
            Tokens::ZERO => 0.0,
            seen => beyond(at.victim_totals.get_or_init(|| ExaminedVictimTotals { tokens: seen, again })),
        }
    }
}

/// Sums over all examined victims of a rank, cached once a request went beyond them.
pub(crate) struct ExaminedVictimTotals {
    tokens: Tokens,
    /// Microseconds that the victims are expected to spend on restoring these tokens.
    again: f64,
}
