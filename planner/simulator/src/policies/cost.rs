//! Dynamo's cost of a worker: what it would compute and what it decodes.

use vocabulary::Tokens;

use super::{Ask, Dispatch, Fleet, Policy, least};

/// Prompt tokens to compute, this one's included, plus the contexts that are decoded, with overlap weight 1.
pub(super) fn dynamo(ask: &Ask<'_>, fleet: &Fleet<'_>, worker: usize) -> Tokens {
    let load = fleet.workers[worker].load();
    load.prompt + ask.missing(worker) + load.context + ask.step.prompt
}

pub(super) struct Dynamo;

impl Policy for Dynamo {
    fn place(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>) -> Dispatch {
        Dispatch::at(least(fleet.all(), |worker| dynamo(ask, fleet, worker)))
    }
}
