//! `/v1/chat/completions`.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use engine_model::CacheReadPolicy;
use serde::Serialize;
use serde_json::{Value, json};

use crate::sim::codec::ConversationApi;

use super::SimState;
use super::choice::AnswerDelta;
use super::errors::ErrorResponse;
use super::generate::{CompletedAnswer, collect_answer, submit_choices};
use super::generation_params::{GenerationParams, ResponseMode};
use super::request_fields::{RequestFields, wrong};
use super::sse_writer::{StreamFormatter, data, stream_answer};
use super::usage::UsageTotals;

pub(crate) async fn chat(
    State(app): State<Arc<SimState>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ErrorResponse> {
    let fields = RequestFields::parse(&body)?;
    let limits = ["max_completion_tokens", "max_tokens"];
    let mut ask = GenerationParams::read(&app, (&headers, &fields), &limits, "chatcmpl-")?;
    if fields.get("prompt_logprobs").is_some() || fields.flag("echo")? {
        ask.cache.cache_reads = CacheReadPolicy::Ignored;
    }
    let prompt = prompt_of(&app, &fields)?;
    let choices = submit_choices(&app, &mut ask, std::slice::from_ref(&prompt)).await?;
    if ask.delivery == ResponseMode::Whole {
        let answer = collect_answer(&app, &ask, choices).await?;
        return Ok(Json(answer_body(&app, (&ask, &prompt), answer)).into_response());
    }
    let totals = UsageTotals::new(ask.remote_cached);
    let per_prompt = ask.choices;
    let script =
        ChatStreamFormatter { created: app.unix_seconds(), fingerprint: app.system_fingerprint(), prompt, params: ask };
    Ok(stream_answer(choices, per_prompt, totals, script))
}

/// Returns the tokens of a body with `messages`.
pub(crate) fn prompt_of(state: &SimState, fields: &RequestFields) -> Result<Vec<u32>, ErrorResponse> {
    check_messages(fields)?;
    if fields.flag("continue_final_message")? && fields.flag("add_generation_prompt")? {
        let message = "Cannot set both `continue_final_message` and `add_generation_prompt` to True.";
        return Err(ErrorResponse::bad_request(message, None));
    }
    Ok(state.codec.encode_chat(ConversationApi::Chat, fields.body())?)
}

/// Rejects message lists that are no valid chat.
pub(crate) fn check_messages(fields: &RequestFields) -> Result<(), ErrorResponse> {
    let messages = fields.list("messages")?.ok_or_else(|| wrong("messages", "Field required"))?;
    let shaped = |message: &Value| message.get("role").is_some_and(Value::is_string);
    match !messages.is_empty() && messages.iter().all(shaped) {
        true => Ok(()),
        false => Err(wrong("messages", "Input should be a list of messages with a role")),
    }
}

fn answer_body(state: &SimState, (ask, prompt): (&GenerationParams, &[u32]), answer: CompletedAnswer) -> Value {
    let choices: Vec<Value> = (0u32..)
        .zip(&answer.choices)
        .map(|(index, (part, end))| {
            json!({
                "index": index,
                "message": {
                    "role": "assistant", "content": part.text, "refusal": null, "annotations": null, "audio": null,
                    "function_call": null, "reasoning": null,
                },
                "logprobs": null,
                "finish_reason": end.reason,
                "stop_reason": end.stop,
                "token_ids": ask.return_token_ids.then_some(&part.ids),
                "routed_experts": null,
            })
        })
        .collect();
    json!({
        "id": ask.id,
        "object": "chat.completion",
        "created": state.unix_seconds(),
        "model": ask.model,
        "choices": choices,
        "service_tier": null,
        "system_fingerprint": state.system_fingerprint(),
        "usage": answer.usage.openai(),
        "prompt_logprobs": null,
        "prompt_token_ids": ask.return_token_ids.then_some(prompt),
        "prompt_text": null,
        "kv_transfer_params": answer.params,
        "ec_transfer_params": null,
        "metrics": null,
    })
}

struct ChatStreamFormatter {
    params: GenerationParams,
    prompt: Vec<u32>,
    created: u64,
    fingerprint: String,
}

/// The first event. The prompt's ids are serialised directly because there are many.
#[derive(Serialize)]
struct FirstChatChunk<'a> {
    #[serde(flatten)]
    chunk: Value,
    prompt_token_ids: Option<&'a [u32]>,
    prompt_text: (),
}

impl ChatStreamFormatter {
    fn chunk(&self, choices: Value) -> Value {
        json!({
            "id": self.params.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.params.model,
            "choices": choices,
        })
    }
}

impl StreamFormatter for ChatStreamFormatter {
    fn open(&mut self) -> String {
        let opening = |index: u32| {
            let delta = json!({"role": "assistant", "content": ""});
            let choice = json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null});
            let prompt_token_ids = self.params.return_token_ids.then_some(&*self.prompt);
            data(&FirstChatChunk { chunk: self.chunk(json!([choice])), prompt_token_ids, prompt_text: () })
        };
        (0..self.params.choices).map(opening).collect()
    }

    fn part(&mut self, index: u32, part: &AnswerDelta) -> String {
        if part.text.is_empty() && part.end.is_none() && !self.params.return_token_ids {
            return String::new();
        }
        let mut choice = json!({
            "index": index,
            "delta": {"content": part.text},
            "logprobs": null,
            "finish_reason": part.end.as_ref().map(|end| end.reason),
            "token_ids": self.params.return_token_ids.then_some(&part.ids),
        });
        if let Some(end) = &part.end {
            choice["stop_reason"] = end.stop.clone();
        }
        let mut chunk = self.chunk(json!([choice]));
        if part.end.is_some() && self.params.delivery == ResponseMode::Stream {
            chunk["system_fingerprint"] = json!(self.fingerprint);
        }
        data(&chunk)
    }

    fn close(&mut self, totals: &UsageTotals) -> String {
        let mut text = String::new();
        if self.params.delivery == ResponseMode::StreamWithUsage {
            let mut chunk = self.chunk(json!([]));
            chunk["usage"] = totals.openai();
            chunk["system_fingerprint"] = json!(self.fingerprint);
            text += &data(&chunk);
        }
        text + "data: [DONE]\n\n"
    }
}
