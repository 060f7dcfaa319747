//! Placement when all workers share one cache: the least work.

use super::{Dispatch, FleetView, PlacementRequest, RoutingPolicy, argmin};

/// Worker with the least work, then the fewest running answers.
pub(super) struct LeastWork;

impl RoutingPolicy for LeastWork {
    fn place(&mut self, _ask: &PlacementRequest<'_>, fleet: &FleetView<'_>) -> Dispatch {
        let key = |worker: usize| (fleet.workers[worker].load().work, fleet.workers[worker].batch().0);
        Dispatch::at(argmin(fleet.all(), key))
    }
}
