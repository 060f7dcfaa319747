//! Placement where every worker finds the same: the least work.

use super::{Dispatch, FleetView, PlacementRequest, RoutingPolicy, argmin};

/// The least work, then the fewest answers.
pub(super) struct LeastWork;

impl RoutingPolicy for LeastWork {
    fn place(&mut self, _ask: &PlacementRequest<'_>, fleet: &FleetView<'_>) -> Dispatch {
        let key = |worker: usize| (fleet.workers[worker].load().work, fleet.workers[worker].batch().0);
        Dispatch::at(argmin(fleet.all(), key))
    }
}
