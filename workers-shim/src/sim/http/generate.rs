//! Submits a request's choices to the engine and collects them, for all APIs.

use futures::future::try_join_all;
use serde_json::Value;

use super::SimState;
use super::choice::{AnswerDelta, ChoiceEnd, ChoiceStream};
use super::errors::ErrorResponse;
use super::generation_params::GenerationParams;
use super::usage::UsageTotals;

/// Submits all choices of all prompts to the engine, prompt by prompt.
pub(crate) async fn submit_choices(
    state: &SimState,
    params: &mut GenerationParams,
    prompts: &[Vec<u32>],
) -> Result<Vec<ChoiceStream>, ErrorResponse> {
    state.check_awake()?;
    params.wait_for_other_leg(state).await?;
    let params = &*params;
    let each = prompts.iter().flat_map(|prompt| (0..params.choices).map(move |choice| (prompt, choice)));
    each.map(|(prompt, choice)| {
        let ticket = state.driver.submit(params.engine_request(state, prompt, choice)?)?;
        Ok(ChoiceStream::new(ticket, state.codec.clone(), params.stops.clone()))
    })
    .collect()
}

pub(crate) struct CompletedAnswer {
    pub(crate) choices: Vec<(AnswerDelta, ChoiceEnd)>,
    pub(crate) usage: UsageTotals,
    /// `kv_transfer_params`, or null.
    pub(crate) params: Value,
}

pub(crate) async fn collect_answer(
    state: &SimState,
    ask: &GenerationParams,
    choices: Vec<ChoiceStream>,
) -> Result<CompletedAnswer, ErrorResponse> {
    let choices = try_join_all(choices.into_iter().map(ChoiceStream::collect)).await?;
    let mut totals = UsageTotals::new(ask.remote_cached);
    for (index, (_, end)) in (0u32..).zip(&choices) {
        totals.add(index % ask.choices, end);
    }
    let handoff = choices.iter().find_map(|(_, end)| end.finish.handoff.as_ref());
    let params = state.transfers.answer_params(&ask.transfer_leg.side, (handoff, &state.identity)).await?;
    Ok(CompletedAnswer { choices, usage: totals, params })
}
