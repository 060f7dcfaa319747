//! Disaggregated policies: the first half of the workers computes prompts, the rest generates answers.

use std::ops::Range;

use vocabulary::Tokens;

use super::{Dispatch, FleetView, PlacementRequest, RoutingPolicy, TransferScope, argmin, dynamo};

fn halves(fleet: &FleetView<'_>) -> (Range<usize>, Range<usize>) {
    let all = fleet.workers.len();
    (0..all / 2, all / 2..all)
}

/// Returns the worker with the fewest prompt tokens to compute.
fn prefiller(ask: &PlacementRequest<'_>, fleet: &FleetView<'_>, among: Range<usize>) -> usize {
    argmin(among, |worker| fleet.workers[worker].load().prompt + ask.uncached_tokens(worker))
}

/// Every prompt is computed in one half and sent completely to the other.
pub(super) struct StaticPd;

impl RoutingPolicy for StaticPd {
    fn place(&mut self, ask: &PlacementRequest<'_>, fleet: &FleetView<'_>) -> Dispatch {
        let (prefill, decode) = halves(fleet);
        let decode = argmin(decode, |worker| (fleet.workers[worker].load().context, fleet.requests(worker)));
        Dispatch { prefill: prefiller(ask, fleet, prefill), decode, ship: TransferScope::Whole, ..Dispatch::at(decode) }
    }
}

/// The decode worker itself computes prompts that are short or mostly cached there.
pub(super) struct ConditionalPd;

impl ConditionalPd {
    const MAX_LOCAL_PROMPT: Tokens = Tokens(2_048);
    const MAX_LOCAL_NEW_SHARE: f64 = 0.7;
}

impl RoutingPolicy for ConditionalPd {
    fn place(&mut self, ask: &PlacementRequest<'_>, fleet: &FleetView<'_>) -> Dispatch {
        let (prefill, decode) = halves(fleet);
        let decode = argmin(decode, |worker| dynamo::dynamo(ask, fleet, worker));
        let missing = ask.uncached_tokens(decode);
        let local = missing <= Self::MAX_LOCAL_PROMPT
            && missing.0 as f64 <= Self::MAX_LOCAL_NEW_SHARE * ask.step.prompt.0 as f64;
        let prefill = if local { decode } else { prefiller(ask, fleet, prefill) };
        Dispatch { prefill, decode, ..Dispatch::at(decode) }
    }
}
