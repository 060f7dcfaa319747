//! Settles the tenant's token reservation.

use vocabulary::Tokens;
use workers_shim::engine_api::TokenUsage;

use super::RequestEnd;
use crate::identified_request::ResponseDelivery;
use crate::quotas::RequestCompletion;
use crate::receipt::RequestOutcome;

/// Charges the tokens that were used.
#[derive(Debug)]
pub(in crate::pipeline) struct QuotaSink;

impl QuotaSink {
    pub(in crate::pipeline) fn record(&self, end: &RequestEnd) {
        let Some(reservation) = &end.step.located.identified.request.incoming.token_reservation else { return };
        // The client may have been disconnected by something in between, or by our own shutdown.
        let completion = if end.outcome == RequestOutcome::Complete {
            RequestCompletion::Complete
        } else {
            RequestCompletion::Interrupted
        };
        let mut charged = charged_tokens(end);
        if is_unseen(end) {
            charged = charged.max(reservation.reserved_tokens());
        }
        reservation.settle(charged, completion);
    }
}

/// Returns whether a worker was at an answer of which nothing can be seen until its end, when the client left.
fn is_unseen(end: &RequestEnd) -> bool {
    let is_whole = end.step.located.identified.request.delivery == ResponseDelivery::Whole;
    end.outcome == RequestOutcome::ClientDisconnected && is_whole && end.answer.usage.is_none()
}

/// Tokens charged to the tenant's quota: what the engine counted, and for an answer whose end was not reported at least
/// the prompt and what was delivered.
fn charged_tokens(end: &RequestEnd) -> Tokens {
    match (end.outcome, end.answer.usage) {
        (RequestOutcome::Complete | RequestOutcome::Rejected | RequestOutcome::Failed, Some(usage)) => {
            usage.prompt + usage.completion
        }
        (RequestOutcome::Rejected | RequestOutcome::Failed, None) => Tokens::ZERO,
        (_, usage) => {
            let TokenUsage { prompt, completion, .. } = usage.unwrap_or_default();
            prompt.max(end.step.request.prompt_tokens) + completion.max(end.answer.delivered)
        }
    }
}
