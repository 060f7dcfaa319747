//! Decision summary: a response header for clients that ask with `x-ownerserve-explain: 1`.

use axum::response::Response;
use http::{HeaderName, HeaderValue};
use vocabulary::TimeSpan;

use super::streaming::Streaming;

const EXPLAIN_HEADER: HeaderName = HeaderName::from_static("x-ownerserve-explain");
const SUMMARY_HEADER: HeaderName = HeaderName::from_static("x-ownerserve-decision");

/// Returns the decision in the receipt's words; `None` for a client that did not ask. The receipt has the rest.
pub fn summary(streaming: &Streaming) -> Option<HeaderValue> {
    let located = &streaming.step.located;
    let explain_header = located.identified.request.incoming.headers.get(EXPLAIN_HEADER)?;
    if !matches!(explain_header.as_bytes(), b"1" | b"true") {
        return None;
    }
    let (plan, attempt) = (&streaming.planned.plan, streaming.attempt()?);
    // In shadow mode the planner's price belongs to another plan than the executed one.
    let price = streaming.planned.decision.as_ref().filter(|decision| decision.plan == *plan);
    let price = price.map(|decision| decision.plan.rationale.total_cost);
    let known = located.identified.fallback_reason().map_or("token_ids", Into::into);
    let words = [
        ("step_kind", streaming.step.kind.as_str().to_owned()),
        ("mode", streaming.step.mode.as_ref().to_owned()),
        ("action", plan.action.as_str().to_owned()),
        ("prefill_worker", plan.prompt_leg().worker.to_string()),
        ("decode_worker", plan.target().to_string()),
        ("prompt_tokens", streaming.step.request.prompt_tokens.to_string()),
        ("cached_tokens", plan.answer_leg().cached_tokens.to_string()),
        ("identified_by", known.to_owned()),
        ("kv_index_state", attempt.kv_index_state.as_str().to_owned()),
        ("predicted_cost", price.map_or_else(|| "none".to_owned(), |price| TimeSpan(price.duration()).to_string())),
    ];
    HeaderValue::try_from(words.map(|(name, word)| format!("{name}={word}")).join("; ")).ok()
}

/// Adds the summary to the answer. A header of that name from the worker is removed.
pub fn with_summary(mut response: Response, summary: Option<HeaderValue>) -> Response {
    response.headers_mut().remove(SUMMARY_HEADER);
    if let Some(summary) = summary {
        response.headers_mut().insert(SUMMARY_HEADER, summary);
    }
    response
}
