//! `/v1/responses`: complete responses are kept for a while, so that a later request can continue one.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::engine_api::{JsonSplice, ScannedJson, items};
use crate::sim::codec::ConversationApi;

use super::SimState;
use super::choice::AnswerDelta;
use super::errors::ErrorResponse;
use super::generate::{collect_answer, submit_choices};
use super::generation_params::{GenerationParams, ResponseMode};
use super::request_fields::{RequestFields, wrong};
use super::sse_writer::{StreamFormatter, named, stream_answer};
use super::usage::UsageTotals;

/// A response that can be continued.
#[derive(Clone)]
pub(crate) struct StoredResponse {
    id: String,
    /// All input and output so far, as items of an input without the enclosing brackets.
    history: Bytes,
    body: Value,
}

/// The kept responses, oldest first.
pub(crate) type ResponseStore = std::collections::VecDeque<StoredResponse>;
const MAX_STORED_RESPONSES: usize = 256;

pub(crate) async fn responses(
    State(app): State<Arc<SimState>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ErrorResponse> {
    let fields = RequestFields::parse(&body)?;
    let mut ask = GenerationParams::read(&app, (&headers, &fields), &["max_output_tokens"], "resp_")?;
    let step = ResolvedInput::read(&app, &fields)?;
    let choices =
        submit_choices(&app, &mut ask, &[app.codec.encode_chat(ConversationApi::Responses, &step.body)?]).await?;
    let draft = draft_response(&app, &ask, &fields)?;
    if ask.delivery != ResponseMode::Whole {
        let totals = UsageTotals::new(ask.remote_cached);
        let script =
            ResponsesStreamFormatter { id: ask.id, draft, text: String::new(), reason: "stop", next_sequence: 0 };
        return Ok(stream_answer(choices, 1, totals, script));
    }
    let answer = collect_answer(&app, &ask, choices).await?;
    let (part, end) = &answer.choices[0];
    let mut body = complete(draft, (&ask.id, &part.text, end.reason), answer.usage.responses());
    body["kv_transfer_params"] = answer.params;
    if fields.get("store").and_then(Value::as_bool).unwrap_or(true) {
        let item = output_item(&ask.id, &part.text).to_string();
        let items = items::joined([&step.items[..], item.as_bytes()]).into();
        store_response(&app, StoredResponse { id: ask.id, history: items, body: body.clone() });
    }
    Ok(Json(body).into_response())
}

pub(crate) async fn retrieve_response(
    State(app): State<Arc<SimState>>,
    Path(id): Path<String>,
) -> Result<Response, ErrorResponse> {
    Ok(Json(find_response(&app, &id)?.body).into_response())
}

fn store_response(state: &SimState, response: StoredResponse) {
    let mut store = state.state.responses.lock();
    if store.len() == MAX_STORED_RESPONSES {
        store.pop_front();
    }
    store.push_back(response);
}

fn find_response(state: &SimState, id: &str) -> Result<StoredResponse, ErrorResponse> {
    let found = state.state.responses.lock().iter().find(|kept| kept.id == id).cloned();
    found.ok_or_else(|| ErrorResponse::not_found(format!("Response with id '{id}' not found."), Some("response_id")))
}

/// A request whose previous response was resolved into its input.
struct ResolvedInput {
    body: Bytes,
    /// The items of its input without the enclosing brackets.
    items: Bytes,
}

impl ResolvedInput {
    fn read(state: &SimState, fields: &RequestFields) -> Result<Self, ErrorResponse> {
        fields.required("input")?;
        let body = fields.body();
        let scanned = ScannedJson::scan(body.clone(), &["input", "previous_response_id"])
            .map_err(|error| ErrorResponse::bad_request(format!("JSON decode error: {error}"), None))?;
        let items = scanned.get("input").and_then(items::input_items);
        let items = items.ok_or_else(|| wrong("input", "Input should be a valid string or list"))?;
        let Some(id) = fields.text("previous_response_id")? else { return Ok(Self { body: body.clone(), items }) };
        let items: Bytes = items::joined([&find_response(state, id)?.history[..], &items[..]]).into();
        let mut splice = JsonSplice::new(&scanned);
        splice.set("input", [b"[", &items[..], b"]"].concat());
        splice.remove("previous_response_id");
        Ok(Self { body: splice.finish(), items })
    }
}

/// Creates a response without its output.
fn draft_response(state: &SimState, params: &GenerationParams, fields: &RequestFields) -> Result<Value, ErrorResponse> {
    let tools = fields.list("tools")?.unwrap_or_default();
    let choice = fields.get("tool_choice").cloned();
    Ok(json!({
        "id": params.id,
        "created_at": state.unix_seconds(),
        "incomplete_details": null,
        "instructions": fields.text("instructions")?,
        "metadata": fields.get("metadata"),
        "model": params.model,
        "object": "response",
        "output": [],
        "parallel_tool_calls": true,
        "temperature": fields.number("temperature")?.unwrap_or(1.0),
        "tool_choice": choice.unwrap_or_else(|| if tools.is_empty() { "none".into() } else { "auto".into() }),
        "tools": tools,
        "top_p": 1.0,
        "background": false,
        "max_output_tokens": fields.whole("max_output_tokens")?,
        "previous_response_id": fields.text("previous_response_id")?,
        "service_tier": "auto",
        "status": "in_progress",
        "truncation": "disabled",
        "usage": null,
        "user": null,
    }))
}

fn output_item(id: &str, text: &str) -> Value {
    let content = json!({"annotations": [], "text": text, "type": "output_text", "logprobs": null});
    json!({
        "id": id.replace("resp_", "msg_"), "content": [content], "role": "assistant", "status": "completed",
        "type": "message", "phase": null,
    })
}

fn complete(mut draft: Value, (id, text, reason): (&str, &str, &str), usage: Value) -> Value {
    draft["output"] = json!([output_item(id, text)]);
    draft["usage"] = usage;
    draft["status"] = if reason == "length" { "incomplete".into() } else { "completed".into() };
    if reason == "length" {
        draft["incomplete_details"] = json!({"reason": "max_output_tokens"});
    }
    draft
}

struct ResponsesStreamFormatter {
    id: String,
    draft: Value,
    text: String,
    reason: &'static str,
    next_sequence: u64,
}

impl ResponsesStreamFormatter {
    fn event(&mut self, kind: &str, mut fields: Value) -> String {
        fields["type"] = kind.into();
        fields["sequence_number"] = self.next_sequence.into();
        self.next_sequence += 1;
        named(kind, &fields)
    }

    fn item(&mut self, kind: &str, item: Value) -> String {
        self.event(kind, json!({"output_index": 0, "item": item}))
    }

    fn inside(&mut self, kind: &str, mut fields: Value) -> String {
        fields["item_id"] = self.id.replace("resp_", "msg_").into();
        fields["output_index"] = 0.into();
        fields["content_index"] = 0.into();
        self.event(kind, fields)
    }
}

impl StreamFormatter for ResponsesStreamFormatter {
    fn open(&mut self) -> String {
        let response = json!({"response": self.draft});
        let mut item = output_item(&self.id, "");
        item["content"] = json!([]);
        item["status"] = "in_progress".into();
        let empty = json!({"part": {"annotations": [], "text": "", "type": "output_text", "logprobs": []}});
        self.event("response.created", response.clone())
            + &self.event("response.in_progress", response)
            + &self.item("response.output_item.added", item)
            + &self.inside("response.content_part.added", empty)
    }

    fn part(&mut self, _: u32, part: &AnswerDelta) -> String {
        self.reason = part.end.as_ref().map_or(self.reason, |end| end.reason);
        self.text += &part.text;
        match part.text.is_empty() {
            true => String::new(),
            false => self.inside("response.output_text.delta", json!({"delta": part.text, "logprobs": []})),
        }
    }

    fn close(&mut self, totals: &UsageTotals) -> String {
        let text = std::mem::take(&mut self.text);
        let item = output_item(&self.id, &text);
        let body = complete(self.draft.take(), (&self.id, &text, self.reason), totals.responses());
        let last = if self.reason == "length" { "response.incomplete" } else { "response.completed" };
        self.inside("response.output_text.done", json!({"text": text, "logprobs": []}))
            + &self.inside("response.content_part.done", json!({"part": item["content"][0]}))
            + &self.item("response.output_item.done", item)
            + &self.event(last, json!({"response": body}))
    }

    fn fail(&mut self, error: &ErrorResponse) -> String {
        named("error", &error.body())
    }
}
