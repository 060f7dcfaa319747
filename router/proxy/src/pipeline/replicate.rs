//! Replication: makes a sealed prefix resident at the worker that will serve its step. Afterwards the target serves the
//! real request from its own cache.

use std::sync::Arc;

use futures::FutureExt as _;
use planner::{Handoff, Leg, LegRole};
use vocabulary::Blocks;

use crate::identified_request::IdentifiedRequest;
use crate::legs::Legs;
use crate::prefix_mover::{PrefixMove, PrefixMover, TokenIdsFuture};
use crate::prompts::{RetainedPromptStore, TokenIdsUnavailable};
use crate::receipt::AttemptEvent;
use crate::request_states::ClassifiedStep;
use crate::token_ids::LazyTokenIds;

/// Replicates the first blocks of the prompt as the plan's handoff says. A failure is returned as an event; the step is
/// served all the same.
pub async fn replicate(
    mover: &PrefixMover,
    (step, handoff): (&ClassifiedStep, &Handoff),
    legs: &Legs,
) -> Option<AttemptEvent> {
    let prompt = &step.located.identified.prompt;
    let blocks = handoff.blocks.unwrap_or_default();
    let Some(prefix) = prompt.chain.prefix(blocks) else { return Some(AttemptEvent::ReplicateFailed) };
    let moving = PrefixMove {
        legs: legs.clone(),
        model: step.request.model.0.to_string(),
        ids: first_token_ids(mover.prompts().clone(), &step.located.identified, blocks),
        salt: step.located.identified.request.cache_salt().map(str::to_owned),
        bytes: handoff.bytes,
        source: Leg::new(LegRole::Prefill, handoff.source),
        target: Leg::new(LegRole::Decode, handoff.target),
    };
    mover.run(prefix, moving).await
}

/// Returns the token ids of the first blocks of a step's prompt.
fn first_token_ids(
    prompts: Arc<RetainedPromptStore>,
    identified: &IdentifiedRequest,
    blocks: Blocks,
) -> TokenIdsFuture {
    let chain = identified.prompt.chain.clone();
    let ids = LazyTokenIds::of(identified);
    async move {
        let length = usize::try_from(blocks.tokens(chain.block).0).map_err(|_| TokenIdsUnavailable::Unavailable)?;
        match ids.ok_or(TokenIdsUnavailable::Unavailable)? {
            LazyTokenIds::Known(ids) => ids.get(..length).map(<[u32]>::to_vec).ok_or(TokenIdsUnavailable::Unavailable),
            ids => prompts.read(move || Some(ids.read(&chain)?.get(..length)?.to_vec())).await,
        }
    }
    .boxed()
}
