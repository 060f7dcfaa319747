//! What a client that asks with `x-ownerserve-explain: 1` is told of its decision: one header beside its answer.

use axum::response::Response;
use http::{HeaderName, HeaderValue};

use super::request_end::RequestEnd;

const EXPLAIN_HEADER: HeaderName = HeaderName::from_static("x-ownerserve-explain");
const SUMMARY_HEADER: HeaderName = HeaderName::from_static("x-ownerserve-decision");

/// The decision in words of the receipt, which has the rest; none for a client that did not ask.
pub fn summary(finish: &RequestEnd) -> Option<HeaderValue> {
    let located = &finish.step.located;
    let asked = located.identified.request.incoming.headers.get(EXPLAIN_HEADER)?;
    if !matches!(asked.as_bytes(), b"1" | b"true") {
        return None;
    }
    let (plan, attempt) = (&finish.planned.plan, finish.attempts.last()?);
    // In the shadow the planner's price is that of another plan than this one.
    let price = finish.planned.decision.as_ref().filter(|decision| decision.plan == *plan);
    let price = price.map(|decision| decision.plan.because.total);
    let known = located.identified.fallback_reason().map_or("token_ids", Into::into);
    let words = [
        ("step", finish.step.kind.as_str().to_owned()),
        ("mode", finish.step.mode.as_ref().to_owned()),
        ("action", plan.action.as_str().to_owned()),
        ("prefill", plan.prefill.worker.to_string()),
        ("decode", plan.decode.worker.to_string()),
        ("prompt", finish.step.ask.prompt.to_string()),
        ("cached", plan.decode.tokens_cached.to_string()),
        ("known_by", known.to_owned()),
        ("knowledge", attempt.knowledge.as_str().to_owned()),
        ("price_us", price.map_or_else(|| "none".to_owned(), |price| price.to_string())),
    ];
    HeaderValue::try_from(words.map(|(name, word)| format!("{name}={word}")).join("; ")).ok()
}

/// The answer with it. What a worker says under that name is not ours and does not pass.
pub fn with_summary(mut response: Response, summary: Option<HeaderValue>) -> Response {
    response.headers_mut().remove(SUMMARY_HEADER);
    if let Some(summary) = summary {
        response.headers_mut().insert(SUMMARY_HEADER, summary);
    }
    response
}
