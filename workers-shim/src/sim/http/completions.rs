//! `/v1/completions`: texts, token ids, and batches of either.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use engine_model::Reading;
use serde::Serialize;
use serde_json::{Value, json};

use super::App;
use super::ask::{Ask, Delivery};
use super::choice::Part;
use super::errors::Fault;
use super::fields::Fields;
use super::generate::{Answer, begin, whole};
use super::sse::{Script, data, stream_answer};
use super::totals::Totals;

/// Answer length where a completion names none: OpenAI's.
const DEFAULT_TOKENS: u32 = 16;

pub(crate) async fn completions(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, Fault> {
    let fields = Fields::parse(&body)?;
    let mut ask = Ask::read(&app, (&headers, &fields), &["max_tokens"], "cmpl-")?;
    ask.bound(DEFAULT_TOKENS);
    // What is echoed has log probabilities where the answer has.
    if fields.get("prompt_logprobs").is_some() || fields.flag("echo")? && fields.get("logprobs").is_some() {
        ask.cache.reading = Reading::Nothing;
    }
    let prompts = prompts_of(&app, &fields)?;
    let choices = begin(&app, &mut ask, &prompts).await?;
    if ask.delivery == Delivery::Whole {
        let answer = whole(&app, &ask, choices).await?;
        return Ok(Json(answer_body(&app, (&ask, &prompts), answer)).into_response());
    }
    let (totals, per_prompt) = (Totals::new(ask.remote_cached), ask.choices);
    let first = vec![true; choices.len()];
    let script = CompletionScript { created: app.unix_seconds(), prompts, ask, first };
    Ok(stream_answer(choices, per_prompt, totals, script))
}

/// The prompts of a body with `prompt`, all of tokens that the model has.
pub(crate) fn prompts_of(app: &App, fields: &Fields) -> Result<Vec<Vec<u32>>, Fault> {
    fields.required("prompt")?;
    app.codec.encode_completion(fields.body())?.into_iter().map(|prompt| app.known(prompt)).collect()
}

fn answer_body(app: &App, (ask, prompts): (&Ask, &[Vec<u32>]), answer: Answer) -> Value {
    let prompt_ids = |index: usize| ask.with_ids.then(|| &prompts[index / ask.choices as usize]);
    let choices: Vec<Value> = answer
        .choices
        .iter()
        .enumerate()
        .map(|(index, (part, end))| {
            json!({
                "index": index,
                "text": part.text,
                "logprobs": null,
                "finish_reason": end.reason,
                "stop_reason": end.stop,
                "token_ids": ask.with_ids.then_some(&part.ids),
                "prompt_logprobs": null,
                "prompt_token_ids": prompt_ids(index),
            })
        })
        .collect();
    json!({
        "id": ask.id,
        "object": "text_completion",
        "created": app.unix_seconds(),
        "model": ask.model,
        "choices": choices,
        "service_tier": null,
        "system_fingerprint": app.fingerprint(),
        "usage": answer.totals.openai(),
        "kv_transfer_params": answer.params,
    })
}

struct CompletionScript {
    ask: Ask,
    prompts: Vec<Vec<u32>>,
    created: u64,
    /// Choices of which nothing was told yet.
    first: Vec<bool>,
}

impl CompletionScript {
    fn chunk<'a>(&'a self, choices: &'a [Choice<'a>]) -> Chunk<'a> {
        let Ask { id, model, .. } = &self.ask;
        Chunk { id, object: "text_completion", created: self.created, model, choices }
    }
}

/// An event. Written as it is: the ids of a prompt are many.
#[derive(Serialize)]
struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [Choice<'a>],
}

#[derive(Serialize)]
struct Choice<'a> {
    index: u32,
    text: &'a str,
    logprobs: (),
    finish_reason: Option<&'static str>,
    stop_reason: Option<&'a Value>,
    prompt_token_ids: Option<&'a [u32]>,
    token_ids: Option<&'a [u32]>,
}

impl Script for CompletionScript {
    fn open(&mut self) -> String {
        String::new()
    }

    fn part(&mut self, index: u32, part: &Part) -> String {
        if part.text.is_empty() && part.end.is_none() && !self.ask.with_ids {
            return String::new();
        }
        let first = std::mem::replace(&mut self.first[index as usize], false);
        let prompt = (first && self.ask.with_ids).then(|| &self.prompts[(index / self.ask.choices) as usize]);
        let choice = Choice {
            index,
            text: &part.text,
            logprobs: (),
            finish_reason: part.end.as_ref().map(|end| end.reason),
            stop_reason: part.end.as_ref().map(|end| &end.stop),
            prompt_token_ids: prompt.map(Vec::as_slice),
            token_ids: self.ask.with_ids.then_some(&part.ids),
        };
        data(&self.chunk(&[choice]))
    }

    fn close(&mut self, totals: &Totals) -> String {
        let mut text = String::new();
        if self.ask.delivery == Delivery::StreamWithUsage {
            let mut chunk = json!(self.chunk(&[]));
            chunk["usage"] = totals.openai();
            text += &data(&chunk);
        }
        text + "data: [DONE]\n\n"
    }
}
