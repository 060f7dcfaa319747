//! Placement where every worker finds the same: the least work.

use super::{Ask, Dispatch, Fleet, Policy, least};

/// The least work, then the fewest answers.
pub(super) struct Bound;

impl Policy for Bound {
    fn place(&mut self, _ask: &Ask<'_>, fleet: &Fleet<'_>) -> Dispatch {
        let key = |worker: usize| (fleet.workers[worker].load().work, fleet.workers[worker].batch().0);
        Dispatch::at(least(fleet.all(), key))
    }
}
