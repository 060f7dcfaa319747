//! Parameters that all generating requests share: model, sampling, cache keys, transfer, streaming.

use std::sync::Arc;

use axum::http::HeaderMap;
use engine_model::{CacheKeys, CacheReadPolicy, EngineRequest, EosPolicy, KvEventMode, SamplingParams, TransferRole};
use xxhash_rust::xxh3::xxh3_64;

use super::SimState;
use super::errors::ErrorResponse;
use super::request_fields::{RequestFields, token_ids, wrong};
use super::transfer_fields::producer_cached;
use super::transfer_service::TransferSide;

/// A generating request without its prompt.
pub(crate) struct GenerationParams {
    /// The model name that the client used.
    pub(crate) model: String,
    pub(crate) id: String,
    /// Number of answers per prompt.
    pub(crate) choices: u32,
    pub(crate) delivery: ResponseMode,
    /// Whether the answer contains token ids.
    pub(crate) return_token_ids: bool,
    /// Stop strings.
    pub(crate) stops: Vec<String>,
    /// For a consumer, how many tokens its producer found cached.
    pub(crate) remote_cached: Option<u32>,
    max_tokens: Option<u32>,
    sampling: SamplingParams,
    pub(crate) cache: CacheParams,
    pub(crate) transfer_leg: TransferLeg,
    report: KvEventMode,
}

/// The request's part in a KV transfer.
pub(crate) struct TransferLeg {
    pub(crate) side: TransferSide,
    /// The engine's parameters, known once the other leg has progressed far enough.
    transfer: TransferRole,
}

/// How prompts use the prefix cache.
pub(crate) struct CacheParams {
    keys: CacheKeys,
    /// What may be read from it.
    pub(crate) cache_reads: CacheReadPolicy,
}

/// How an answer is delivered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ResponseMode {
    /// In one response.
    Whole,
    Stream,
    /// As events, with a usage event at the end.
    StreamWithUsage,
}

impl GenerationParams {
    /// Parses a request. `limits` names the fields that limit the answer length, `prefix` starts the answer's id.
    pub(crate) fn read(
        state: &SimState,
        (headers, fields): (&HeaderMap, &RequestFields),
        limits: &[&'static str],
        prefix: &str,
    ) -> Result<Self, ErrorResponse> {
        let model = fields.text("model")?.unwrap_or(&state.model).to_owned();
        let adapter = state.adapter_of(&model)?;
        refuse_priority(fields)?;
        let part = state.transfers.side_of(fields)?;
        let longest = limits.iter().map(|name| fields.count(name, 1)).collect::<Result<Vec<_>, _>>()?;
        let keys = CacheKeys { salt: cache_salt(fields)?.filter(|_| !state.ignores_salts), adapter };
        Ok(Self {
            id: answer_id(state, headers, prefix),
            choices: fields.count("n", 1)?.unwrap_or(1).min(128),
            delivery: delivery(fields)?,
            return_token_ids: fields.flag("return_token_ids")?,
            stops: stop_strings(fields)?,
            remote_cached: match &part {
                TransferSide::Standalone(TransferRole::Consume(_) | TransferRole::Exchange(_)) => {
                    producer_cached(fields.object("kv_transfer_params")?)
                }
                _ => None,
            },
            max_tokens: longest.into_iter().flatten().next(),
            sampling: sampling(fields)?,
            transfer_leg: TransferLeg { side: part, transfer: TransferRole::None },
            cache: CacheParams { keys, cache_reads: CacheReadPolicy::Cached },
            report: kv_report_mode(fields)?,
            model,
        })
    }

    /// Waits until the other leg has progressed far enough for this one to start.
    pub(crate) async fn wait_for_other_leg(&mut self, state: &SimState) -> Result<(), ErrorResponse> {
        self.transfer_leg.transfer = state.transfers.resolve_transfer(&self.transfer_leg.side).await?;
        if matches!(self.transfer_leg.side, TransferSide::Source { .. }) {
            // A source computes the prompt and one token, whatever its client requests.
            self.max_tokens = Some(1);
            (self.sampling.min_tokens, self.sampling.eos_policy) = (0, EosPolicy::Ignored);
        }
        Ok(())
    }

    /// Sets the answer length for a client that gave none.
    pub(crate) fn set_default_length(&mut self, tokens: u32) {
        self.max_tokens.get_or_insert(tokens);
    }

    /// Creates the engine's request for one of the choices.
    pub(crate) fn engine_request(
        &self,
        state: &SimState,
        prompt: &[u32],
        choice: u32,
    ) -> Result<EngineRequest, ErrorResponse> {
        let (length, context) = (prompt.len() as u32, state.profile.max_model_len);
        let room = context.saturating_sub(length);
        if let Some(max_tokens) = self.max_tokens.filter(|asked| *asked > room && room > 0) {
            let message = format!(
                "'max_tokens' or 'max_completion_tokens' is too large: {max_tokens}. This model's maximum context length \
                 is {context} tokens and your request has {length} input tokens ({max_tokens} > {context} - {length})."
            );
            return Err(ErrorResponse::bad_request(message, Some("max_tokens")));
        }
        let mut sampling = self.sampling.clone();
        sampling.max_tokens = self.max_tokens.unwrap_or(state.profile.default_max_tokens).min(room.max(1));
        if choice > 0 {
            sampling.salt = Some(sampling.salt.unwrap_or(0) ^ xxh3_64(&choice.to_le_bytes()));
        }
        Ok(EngineRequest {
            name: Arc::from(format!("{}-{:08x}", self.id, state.next_number() as u32)),
            prompt: prompt.to_vec(),
            sampling,
            keys: self.cache.keys.clone(),
            transfer: self.transfer_leg.transfer.clone(),
            cache_reads: self.cache.cache_reads,
            kv_report: self.report,
        })
    }
}

fn answer_id(state: &SimState, headers: &HeaderMap, prefix: &str) -> String {
    const MAX_ID_BYTES: usize = 128;
    let request_id = headers.get("x-request-id").and_then(|value| value.to_str().ok());
    match request_id.filter(|id| !id.is_empty() && id.len() <= MAX_ID_BYTES) {
        Some(id) => format!("{prefix}{id}"),
        None => format!("{prefix}{:016x}", state.next_number()),
    }
}

fn delivery(fields: &RequestFields) -> Result<ResponseMode, ErrorResponse> {
    let options = fields.object("stream_options")?;
    match (fields.flag("stream")?, options) {
        (false, Some(_)) => {
            let message = "Stream options can only be defined when `stream=True`.";
            Err(ErrorResponse::bad_request(message, Some("stream_options")))
        }
        (false, None) => Ok(ResponseMode::Whole),
        (true, options) => {
            let usage = options.and_then(|o| o.get("include_usage")).and_then(|usage| usage.as_bool());
            Ok(if usage == Some(true) { ResponseMode::StreamWithUsage } else { ResponseMode::Stream })
        }
    }
}

fn sampling(fields: &RequestFields) -> Result<SamplingParams, ErrorResponse> {
    let temperature = fields.number("temperature")?.unwrap_or(1.0);
    if !(0.0..=2.0).contains(&temperature) {
        let message = format!("temperature must be in [0, 2], got {temperature}.");
        return Err(ErrorResponse::bad_request(message, Some("temperature")));
    }
    // Without a seed, sampling is deterministic here at any temperature, because tests compare texts.
    let seed = fields.whole("seed")?.filter(|_| temperature > 0.0);
    Ok(SamplingParams {
        max_tokens: 0,
        min_tokens: fields.count("min_tokens", 0)?.unwrap_or(0),
        eos_policy: if fields.flag("ignore_eos")? { EosPolicy::Ignored } else { EosPolicy::Natural },
        salt: seed.map(|seed| xxh3_64(&seed.to_le_bytes())),
        stop: token_ids(fields.list("stop_token_ids")?.unwrap_or_default(), "stop_token_ids")?,
    })
}

fn refuse_priority(fields: &RequestFields) -> Result<(), ErrorResponse> {
    match fields.whole("priority")? {
        None | Some(0) => Ok(()),
        Some(priority) => {
            let message = format!("Got priority {priority} but priority scheduling is not enabled.");
            Err(ErrorResponse::bad_request(message, Some("priority")))
        }
    }
}

fn kv_report_mode(fields: &RequestFields) -> Result<KvEventMode, ErrorResponse> {
    let mode = fields.object("vllm_xargs")?.and_then(|args| args.get("kv_cache_report_mode"));
    Ok(if mode.is_some_and(|mode| mode == "full") { KvEventMode::Full } else { KvEventMode::New })
}

fn stop_strings(fields: &RequestFields) -> Result<Vec<String>, ErrorResponse> {
    const MAX_STOPS: usize = 16;
    let texts = match fields.get("stop") {
        None => Vec::new(),
        Some(serde_json::Value::String(text)) => vec![text.clone()],
        Some(value) => {
            let list = value.as_array().ok_or_else(|| wrong("stop", "Input should be a valid string or list"))?;
            let text = |item: &serde_json::Value| item.as_str().map(str::to_owned);
            let texts: Option<Vec<String>> = list.iter().map(text).collect();
            texts.ok_or_else(|| wrong("stop", "Input should be a valid string"))?
        }
    };
    match texts.len() <= MAX_STOPS && texts.iter().all(|text| !text.is_empty()) {
        true => Ok(texts),
        false => Err(wrong("stop", "Input should be at most 16 strings, none of them empty")),
    }
}

fn cache_salt(fields: &RequestFields) -> Result<Option<Arc<str>>, ErrorResponse> {
    let salt = fields.text("cache_salt")?;
    match salt {
        Some(salt) if salt.is_empty() || salt.chars().count() > 1024 => {
            Err(wrong("cache_salt", "Parameter 'cache_salt' must be a non-empty string of at most 1024 characters"))
        }
        salt => Ok(salt.map(Arc::from)),
    }
}
