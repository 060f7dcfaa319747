//! `/v1/messages` and its token count: Anthropic's chat format.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::sim::codec::ConversationApi;

use super::SimState;
use super::chat::check_messages;
use super::choice::{AnswerDelta, ChoiceEnd};
use super::errors::ErrorResponse;
use super::generate::{collect_answer, submit_choices};
use super::generation_params::{GenerationParams, ResponseMode};
use super::request_fields::RequestFields;
use super::sse_writer::{StreamFormatter, named, stream_answer};
use super::usage::UsageTotals;

pub(crate) async fn messages(app: State<Arc<SimState>>, headers: HeaderMap, body: Bytes) -> Response {
    match answer(&app, &headers, &body).await {
        Ok(response) => response,
        Err(fault) => (fault.status, Json(fault.anthropic())).into_response(),
    }
}

/// Counts the tokens of a request.
pub(crate) async fn count_tokens(app: State<Arc<SimState>>, body: Bytes) -> Response {
    let counted = RequestFields::parse(&body).and_then(|fields| {
        app.adapter_of(fields.text("model")?.unwrap_or(&app.model))?;
        prompt_of(&app, &fields)
    });
    match counted {
        Ok(prompt) => Json(json!({"input_tokens": prompt.len()})).into_response(),
        Err(fault) => (fault.status, Json(fault.anthropic())).into_response(),
    }
}

async fn answer(state: &SimState, headers: &HeaderMap, body: &Bytes) -> Result<Response, ErrorResponse> {
    let fields = RequestFields::parse(body)?;
    fields.required("max_tokens")?;
    let mut ask = GenerationParams::read(state, (headers, &fields), &["max_tokens"], "chatcmpl-")?;
    let prompt = prompt_of(state, &fields)?;
    let choices = submit_choices(state, &mut ask, &[prompt]).await?;
    if ask.delivery != ResponseMode::Whole {
        let totals = UsageTotals::new(ask.remote_cached);
        return Ok(stream_answer(choices, 1, totals, MessagesStreamFormatter { params: ask, end: None }));
    }
    let answer = collect_answer(state, &ask, choices).await?;
    let (part, end) = &answer.choices[0];
    let mut body = message(&ask, answer.usage.anthropic());
    body["content"] = json!([{"type": "text", "text": part.text}]);
    body["stop_reason"] = stop_reason(end).into();
    if !answer.params.is_null() {
        body["kv_transfer_params"] = answer.params;
    }
    Ok(Json(body).into_response())
}

fn message(params: &GenerationParams, usage: Value) -> Value {
    json!({
        "id": params.id, "type": "message", "role": "assistant", "content": [], "model": params.model,
        "stop_reason": null, "usage": usage,
    })
}

fn stop_reason(end: &ChoiceEnd) -> &'static str {
    match (end.reason, &end.stop) {
        ("length", _) => "max_tokens",
        (_, Value::Null) => "end_turn",
        _ => "stop_sequence",
    }
}

fn prompt_of(state: &SimState, fields: &RequestFields) -> Result<Vec<u32>, ErrorResponse> {
    check_messages(fields)?;
    Ok(state.codec.encode_chat(ConversationApi::Messages, fields.body())?)
}

struct MessagesStreamFormatter {
    params: GenerationParams,
    end: Option<&'static str>,
}

impl StreamFormatter for MessagesStreamFormatter {
    fn open(&mut self) -> String {
        let start = message(&self.params, json!({"input_tokens": 0, "output_tokens": 0}));
        let block = json!({"type": "text", "text": ""});
        named("message_start", &json!({"type": "message_start", "message": start}))
            + &named("content_block_start", &json!({"type": "content_block_start", "index": 0, "content_block": block}))
    }

    fn part(&mut self, _: u32, part: &AnswerDelta) -> String {
        self.end = part.end.as_ref().map(stop_reason).or(self.end);
        if part.text.is_empty() {
            return String::new();
        }
        let delta = json!({"type": "text_delta", "text": part.text});
        named("content_block_delta", &json!({"type": "content_block_delta", "index": 0, "delta": delta}))
    }

    fn close(&mut self, totals: &UsageTotals) -> String {
        let delta = json!({"stop_reason": self.end, "stop_sequence": null});
        named("content_block_stop", &json!({"type": "content_block_stop", "index": 0}))
            + &named("message_delta", &json!({"type": "message_delta", "delta": delta, "usage": totals.anthropic()}))
            + &named("message_stop", &json!({"type": "message_stop"}))
    }

    fn fail(&mut self, error: &ErrorResponse) -> String {
        named("error", &error.anthropic())
    }
}
