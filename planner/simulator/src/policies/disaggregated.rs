//! Policies that keep prompts and answers apart: the first half of the workers computes prompts, the rest answers.

use std::ops::Range;

use vocabulary::Tokens;

use super::{Ask, Dispatch, Fleet, Policy, Ship, cost, least};

fn halves(fleet: &Fleet<'_>) -> (Range<usize>, Range<usize>) {
    let all = fleet.workers.len();
    (0..all / 2, all / 2..all)
}

/// Where the fewest prompt tokens would be computed.
fn prefiller(ask: &Ask<'_>, fleet: &Fleet<'_>, among: Range<usize>) -> usize {
    least(among, |worker| fleet.workers[worker].load().prompt + ask.missing(worker))
}

/// Every prompt is computed by one half and sent to the other, all of it.
pub(super) struct StaticPd;

impl Policy for StaticPd {
    fn place(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>) -> Dispatch {
        let (prefill, decode) = halves(fleet);
        let decode = least(decode, |worker| (fleet.workers[worker].load().context, fleet.requests(worker)));
        Dispatch { prefill: prefiller(ask, fleet, prefill), decode, ship: Ship::Whole, ..Dispatch::at(decode) }
    }
}

/// The decode worker computes what is short or mostly cached there itself.
pub(super) struct ConditionalPd;

impl ConditionalPd {
    const SHORT: Tokens = Tokens(2_048);
    const MOSTLY_NEW: f64 = 0.7;
}

impl Policy for ConditionalPd {
    fn place(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>) -> Dispatch {
        let (prefill, decode) = halves(fleet);
        let decode = least(decode, |worker| cost::dynamo(ask, fleet, worker));
        let missing = ask.missing(decode);
        let local = missing <= Self::SHORT && missing.0 as f64 <= Self::MOSTLY_NEW * ask.step.prompt.0 as f64;
        let prefill = if local { decode } else { prefiller(ask, fleet, prefill) };
        Dispatch { prefill, decode, ..Dispatch::at(decode) }
    }
}
