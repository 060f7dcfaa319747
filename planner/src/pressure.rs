//! What storing something costs those whose KV it pushes out: they will compute it again, and hold others up with that.

use vocabulary::{Micros, Tokens};

use crate::cost::CostModel;
use crate::kv_occupancy::Victim;
use crate::micros::micros;
use crate::worker_candidate::WorkerCandidate;

/// Where nobody is left to push out, the step waits for answers to end: as long as this many times the computing of what
/// does not fit.
const UNEVICTABLE_WAIT_FACTOR: f64 = 20.0;
/// So many answers are held up at most by somebody else's computing.
const MAX_STALLED_ANSWERS: f64 = 4.0;

/// Whether what is stored is the beginning of a stay.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyKind {
    /// The session goes on there, and grows.
    Stays,
    /// A copy that was made on the way.
    Passes,
}

impl CostModel<'_> {
    /// `T_eviction` of tokens that are stored at a worker: for each victim `chance to come back soon x time to have it
    /// again x (1 + answers held up by that)`, in all times the policy's `eviction`: it is computed, or loaded from the
    /// host tier that it fell into. Zero where there is room, and where the memory's size is unknown.
    ///
    /// A session that is new there is expected to grow as others did, by the policy's `growth` and an eighth of the memory at most. Half of
    /// the active sessions count as answers that are held up. What its own session has there and does not find again is a
    /// victim that never comes back. What is stored and no victim makes room for waits: `UNEVICTABLE_WAIT_FACTOR` x its computing.
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

    /// Apart, so that where there is room nothing but that is looked at.
    #[inline(never)]
    fn shortfall_cost(&self, at: &WorkerCandidate<'_>, stored: Tokens, missing: Tokens) -> Micros {
        let room = &at.headroom;
        let held_up = (f64::from(room.active) / 2.0).min(MAX_STALLED_ANSWERS);
        let again = self.victims_recompute_time(at, missing.min(room.evictable())) * (1.0 + held_up);
        let unplaced = stored - room.free - room.evictable();
        let waiting = at.speed.rate.span(Tokens::ZERO, unplaced).0 as f64 * UNEVICTABLE_WAIT_FACTOR;
        micros(self.eviction * (again + waiting))
    }

    /// Microseconds that victims are expected to spend on having these tokens again. They are evicted from their end, and
    /// those after the last one that is looked at count as all before do on average.
    fn victims_recompute_time(&self, at: &WorkerCandidate<'_>, tokens: Tokens) -> f64 {
        let beyond = |all: &VictimTotals| all.again * tokens.0 as f64 / all.tokens.0 as f64;
        if let Some(all) = at.victim_totals.get().filter(|all| all.tokens < tokens) {
            return beyond(all);
        }
        let (mut left, mut again) = (tokens, 0.0);
        for Victim { tokens: all, chance } in self.session_lookup.victims(&at.headroom) {
            if all >= left {
                return again + at.eviction_cost.span(all - left, all) * chance;
            }
            again += at.eviction_cost.first(all) * chance;
            left -= all;
        }
        match tokens - left {
            Tokens::ZERO => 0.0,
            seen => beyond(at.victim_totals.get_or_init(|| VictimTotals { tokens: seen, again })),
        }
    }
}

/// All victims of a rank that are looked at, once a need went beyond them.
pub(crate) struct VictimTotals {
    tokens: Tokens,
    /// Microseconds that they are expected to spend on having these again.
    again: f64,
}
