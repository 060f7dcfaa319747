//! `/v1/chat/completions`.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use engine_model::Reading;
use serde::Serialize;
use serde_json::{Value, json};

use crate::sim::codec::ChatWords;

use super::App;
use super::ask::{Ask, Delivery};
use super::choice::Part;
use super::errors::Fault;
use super::fields::{Fields, wrong};
use super::generate::{Answer, begin, whole};
use super::sse::{Script, data, stream_answer};
use super::totals::Totals;

pub(crate) async fn chat(State(app): State<Arc<App>>, headers: HeaderMap, body: Bytes) -> Result<Response, Fault> {
    let fields = Fields::parse(&body)?;
    let limits = ["max_completion_tokens", "max_tokens"];
    let mut ask = Ask::read(&app, (&headers, &fields), &limits, "chatcmpl-")?;
    if fields.get("prompt_logprobs").is_some() || fields.flag("echo")? {
        ask.cache.reading = Reading::Nothing;
    }
    let prompt = prompt_of(&app, &fields)?;
    let choices = begin(&app, &mut ask, std::slice::from_ref(&prompt)).await?;
    if ask.delivery == Delivery::Whole {
        let answer = whole(&app, &ask, choices).await?;
        return Ok(Json(answer_body(&app, (&ask, &prompt), answer)).into_response());
    }
    let totals = Totals::new(ask.remote_cached);
    let per_prompt = ask.choices;
    let script = ChatScript { created: app.unix_seconds(), fingerprint: app.fingerprint(), prompt, ask };
    Ok(stream_answer(choices, per_prompt, totals, script))
}

/// The tokens of a body with `messages`.
pub(crate) fn prompt_of(app: &App, fields: &Fields) -> Result<Vec<u32>, Fault> {
    check_messages(fields)?;
    if fields.flag("continue_final_message")? && fields.flag("add_generation_prompt")? {
        let message = "Cannot set both `continue_final_message` and `add_generation_prompt` to True.";
        return Err(Fault::bad_request(message, None));
    }
    Ok(app.codec.encode_chat(ChatWords::Chat, fields.body())?)
}

/// Refuses what no chat begins with.
pub(crate) fn check_messages(fields: &Fields) -> Result<(), Fault> {
    let messages = fields.list("messages")?.ok_or_else(|| wrong("messages", "Field required"))?;
    let shaped = |message: &Value| message.get("role").is_some_and(Value::is_string);
    match !messages.is_empty() && messages.iter().all(shaped) {
        true => Ok(()),
        false => Err(wrong("messages", "Input should be a list of messages with a role")),
    }
}

fn answer_body(app: &App, (ask, prompt): (&Ask, &[u32]), answer: Answer) -> Value {
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
                "token_ids": ask.with_ids.then_some(&part.ids),
                "routed_experts": null,
            })
        })
        .collect();
    json!({
        "id": ask.id,
        "object": "chat.completion",
        "created": app.unix_seconds(),
        "model": ask.model,
        "choices": choices,
        "service_tier": null,
        "system_fingerprint": app.fingerprint(),
        "usage": answer.totals.openai(),
        "prompt_logprobs": null,
        "prompt_token_ids": ask.with_ids.then_some(prompt),
        "prompt_text": null,
        "kv_transfer_params": answer.params,
        "ec_transfer_params": null,
        "metrics": null,
    })
}

struct ChatScript {
    ask: Ask,
    prompt: Vec<u32>,
    created: u64,
    fingerprint: String,
}

/// The first event. Its ids are written as they are: there are many.
#[derive(Serialize)]
struct Opening<'a> {
    #[serde(flatten)]
    chunk: Value,
    prompt_token_ids: Option<&'a [u32]>,
    prompt_text: (),
}

impl ChatScript {
    fn chunk(&self, choices: Value) -> Value {
        json!({
            "id": self.ask.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.ask.model,
            "choices": choices,
        })
    }
}

impl Script for ChatScript {
    fn open(&mut self) -> String {
        let opening = |index: u32| {
            let delta = json!({"role": "assistant", "content": ""});
            let choice = json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null});
            let prompt_token_ids = self.ask.with_ids.then_some(&*self.prompt);
            data(&Opening { chunk: self.chunk(json!([choice])), prompt_token_ids, prompt_text: () })
        };
        (0..self.ask.choices).map(opening).collect()
    }

    fn part(&mut self, index: u32, part: &Part) -> String {
        if part.text.is_empty() && part.end.is_none() && !self.ask.with_ids {
            return String::new();
        }
        let mut choice = json!({
            "index": index,
            "delta": {"content": part.text},
            "logprobs": null,
            "finish_reason": part.end.as_ref().map(|end| end.reason),
            "token_ids": self.ask.with_ids.then_some(&part.ids),
        });
        if let Some(end) = &part.end {
            choice["stop_reason"] = end.stop.clone();
        }
        let mut chunk = self.chunk(json!([choice]));
        if part.end.is_some() && self.ask.delivery == Delivery::Stream {
            chunk["system_fingerprint"] = json!(self.fingerprint);
        }
        data(&chunk)
    }

    fn close(&mut self, totals: &Totals) -> String {
        let mut text = String::new();
        if self.ask.delivery == Delivery::StreamWithUsage {
            let mut chunk = self.chunk(json!([]));
            chunk["usage"] = totals.openai();
            chunk["system_fingerprint"] = json!(self.fingerprint);
            text += &data(&chunk);
        }
        text + "data: [DONE]\n\n"
    }
}
