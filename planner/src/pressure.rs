//! What storing something costs those whose KV it pushes out: they will compute it again, and hold others up with that.

use vocabulary::{Micros, Tokens};

use crate::cost::Prices;
use crate::micros::{micros, weight};
use crate::standing::Standing;

/// So many victims are looked at one by one; those after them count as these do on average.
const MOST_VICTIMS: usize = 16;
/// Where nobody is left to push out, the step waits for answers to end: as long as this many times the computing of what
/// does not fit.
const NO_ROOM: f64 = 20.0;
/// So many answers are held up at most by somebody else's computing.
const MOST_HELD_UP: f64 = 4.0;

/// Whether what is stored is the beginning of a stay.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Guest {
    /// The session goes on there, and grows.
    Stays,
    /// A copy that was made on the way.
    Passes,
}

impl Prices<'_> {
    /// `T_eviction` of tokens that are stored at a worker: for each victim `chance to come back soon x time to compute it
    /// again x (1 + mu x answers held up by that)`, in all times the policy's `eviction`. Zero where there is room, and
    /// where the memory's size is unknown.
    ///
    /// A session that is new there is expected to grow by the policy's `growth`, an eighth of the memory at most. Half of
    /// the active sessions count as answers that are held up. What is stored and no victim makes room for waits:
    /// `NO_ROOM` x its computing.
    pub(crate) fn eviction(&self, at: &Standing<'_>, stored: Tokens, guest: Guest) -> Micros {
        let policy = self.inputs.policy;
        let (price, room) = (weight(policy.eviction), &at.room);
        if at.view.capacity.kv == Tokens::ZERO || price == 0.0 {
            return Micros::ZERO;
        }
        let is_new = guest == Guest::Stays && room.own == Tokens::ZERO;
        let growth = if is_new { policy.growth.min(Tokens(at.view.capacity.kv.0 / 8)) } else { Tokens::ZERO };
        let missing = stored + growth - room.free;
        if missing == Tokens::ZERO {
            return Micros::ZERO;
        }
        let evicted = missing.min(room.others_idle);
        let held_up = (f64::from(room.active) / 2.0).min(MOST_HELD_UP);
        let again = self.computed_again(at, evicted) * (1.0 + self.mu * held_up);
        let unplaced = stored - room.free - room.others_idle;
        let waiting = self.compute(at, Tokens::ZERO, unplaced).0 as f64 * NO_ROOM;
        micros(price * (again + waiting))
    }

    /// Microseconds that victims are expected to spend on computing these tokens again. They are evicted from their end.
    fn computed_again(&self, at: &Standing<'_>, tokens: Tokens) -> f64 {
        let tenancy = self.inputs.tenancy;
        let (mut left, mut seen, mut again) = (tokens, Tokens::ZERO, 0.0);
        for victim in at.room.victims(self.inputs.session.id, self.inputs.now).take(MOST_VICTIMS) {
            let part = victim.tokens.min(left);
            again += self.compute(at, victim.tokens - part, victim.tokens).0 as f64 * tenancy.chance(&victim);
            (left, seen) = (left - part, seen + part);
            if left == Tokens::ZERO {
                return again;
            }
        }
        if seen == Tokens::ZERO { 0.0 } else { again * tokens.0 as f64 / seen.0 as f64 }
    }
}
