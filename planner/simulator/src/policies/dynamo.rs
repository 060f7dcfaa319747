//! Dynamo's cost of a worker: the tokens it would prefill and decode.

use vocabulary::Tokens;

use super::{Dispatch, FleetView, PlacementRequest, RoutingPolicy, argmin};

/// Returns the prompt tokens to compute, including this request's, plus the contexts being decoded; overlap weight 1.
pub(super) fn dynamo(ask: &PlacementRequest<'_>, fleet: &FleetView<'_>, worker: usize) -> Tokens {
    let load = fleet.workers[worker].load();
    load.prompt + ask.uncached_tokens(worker) + load.context + ask.step.prompt
}

pub(super) struct Dynamo;

impl RoutingPolicy for Dynamo {
    fn place(&mut self, ask: &PlacementRequest<'_>, fleet: &FleetView<'_>) -> Dispatch {
        Dispatch::at(argmin(fleet.all(), |worker| dynamo(ask, fleet, worker)))
    }
}
