//! `/v1/completions`: prompts as text or token ids, single or in batches.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use engine_model::CacheReadPolicy;
use serde::Serialize;
use serde_json::{Value, json};

use super::SimState;
use super::choice::AnswerDelta;
use super::errors::ErrorResponse;
use super::generate::{CompletedAnswer, collect_answer, submit_choices};
use super::generation_params::{GenerationParams, ResponseMode};
use super::request_fields::RequestFields;
use super::sse_writer::{StreamFormatter, data, stream_answer};
use super::usage::UsageTotals;

/// OpenAI's default for `max_tokens`.
const DEFAULT_TOKENS: u32 = 16;

pub(crate) async fn completions(
    State(app): State<Arc<SimState>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ErrorResponse> {
    let fields = RequestFields::parse(&body)?;
    let mut ask = GenerationParams::read(&app, (&headers, &fields), &["max_tokens"], "cmpl-")?;
    ask.set_default_length(DEFAULT_TOKENS);
    // If the prompt is echoed with log probabilities, all of it has to be computed.
    if fields.get("prompt_logprobs").is_some() || fields.flag("echo")? && fields.get("logprobs").is_some() {
        ask.cache.cache_reads = CacheReadPolicy::Ignored;
    }
    let prompts = prompts_of(&app, &fields)?;
    let choices = submit_choices(&app, &mut ask, &prompts).await?;
    if ask.delivery == ResponseMode::Whole {
        let answer = collect_answer(&app, &ask, choices).await?;
        return Ok(Json(answer_body(&app, (&ask, &prompts), answer)).into_response());
    }
    let (totals, per_prompt) = (UsageTotals::new(ask.remote_cached), ask.choices);
    let first = vec![true; choices.len()];
    let script = CompletionsStreamFormatter { created: app.unix_seconds(), prompts, params: ask, first };
    Ok(stream_answer(choices, per_prompt, totals, script))
}

/// Returns the prompts of a body with `prompt`, checked against the vocabulary.
pub(crate) fn prompts_of(state: &SimState, fields: &RequestFields) -> Result<Vec<Vec<u32>>, ErrorResponse> {
    fields.required("prompt")?;
    state.codec.encode_completion(fields.body())?.into_iter().map(|prompt| state.check_vocabulary(prompt)).collect()
}

fn answer_body(state: &SimState, (ask, prompts): (&GenerationParams, &[Vec<u32>]), answer: CompletedAnswer) -> Value {
    let prompt_ids = |index: usize| ask.return_token_ids.then(|| &prompts[index / ask.choices as usize]);
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
                "token_ids": ask.return_token_ids.then_some(&part.ids),
                "prompt_logprobs": null,
                "prompt_token_ids": prompt_ids(index),
            })
        })
        .collect();
    json!({
        "id": ask.id,
        "object": "text_completion",
        "created": state.unix_seconds(),
        "model": ask.model,
        "choices": choices,
        "service_tier": null,
        "system_fingerprint": state.system_fingerprint(),
        "usage": answer.usage.openai(),
        "kv_transfer_params": answer.params,
    })
}

struct CompletionsStreamFormatter {
    params: GenerationParams,
    prompts: Vec<Vec<u32>>,
    created: u64,
    /// Whether each choice is still without events.
    first: Vec<bool>,
}

impl CompletionsStreamFormatter {
    fn chunk<'a>(&'a self, choices: &'a [CompletionChoice<'a>]) -> CompletionChunk<'a> {
        let GenerationParams { id, model, .. } = &self.params;
        CompletionChunk { id, object: "text_completion", created: self.created, model, choices }
    }
}

/// An event. The prompt's ids are serialised directly because there are many.
#[derive(Serialize)]
struct CompletionChunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [CompletionChoice<'a>],
}

#[derive(Serialize)]
struct CompletionChoice<'a> {
    index: u32,
    text: &'a str,
    logprobs: (),
    finish_reason: Option<&'static str>,
    stop_reason: Option<&'a Value>,
    prompt_token_ids: Option<&'a [u32]>,
    token_ids: Option<&'a [u32]>,
}

impl StreamFormatter for CompletionsStreamFormatter {
    fn open(&mut self) -> String {
        String::new()
    }

    fn part(&mut self, index: u32, part: &AnswerDelta) -> String {
        if part.text.is_empty() && part.end.is_none() && !self.params.return_token_ids {
            return String::new();
        }
        let first = std::mem::replace(&mut self.first[index as usize], false);
        let prompt =
            (first && self.params.return_token_ids).then(|| &self.prompts[(index / self.params.choices) as usize]);
        let choice = CompletionChoice {
            index,
            text: &part.text,
            logprobs: (),
            finish_reason: part.end.as_ref().map(|end| end.reason),
            stop_reason: part.end.as_ref().map(|end| &end.stop),
            prompt_token_ids: prompt.map(Vec::as_slice),
            token_ids: self.params.return_token_ids.then_some(&part.ids),
        };
        data(&self.chunk(&[choice]))
    }

    fn close(&mut self, totals: &UsageTotals) -> String {
        let mut text = String::new();
        if self.params.delivery == ResponseMode::StreamWithUsage {
            let mut chunk = json!(self.chunk(&[]));
            chunk["usage"] = totals.openai();
            text += &data(&chunk);
        }
        text + "data: [DONE]\n\n"
    }
}
