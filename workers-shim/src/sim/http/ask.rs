//! What every generating request has in common: model, sampling, cache keys, transfer, streaming.

use std::sync::Arc;

use axum::http::HeaderMap;
use engine_model::{CacheKeys, Ending, Reading, Report, Request, Sampling, Transfer};
use xxhash_rust::xxh3::xxh3_64;

use super::App;
use super::errors::Fault;
use super::fields::{Fields, token_ids, wrong};
use super::meeting::Part;
use super::transfer_fields::producer_cached;

/// A generating request without its prompt.
pub(crate) struct Ask {
    /// As the client named it.
    pub(crate) model: String,
    pub(crate) id: String,
    /// Answers to one prompt.
    pub(crate) choices: u32,
    pub(crate) delivery: Delivery,
    /// Whether token ids are answered too.
    pub(crate) with_ids: bool,
    /// Texts that end an answer.
    pub(crate) stops: Vec<String>,
    /// Tokens that the producer of a consumer found cached.
    pub(crate) remote_cached: Option<u32>,
    longest: Option<u32>,
    sampling: Sampling,
    pub(crate) cache: CacheUse,
    pub(crate) leg: Leg,
    report: Report,
}

/// What it has to do with another worker.
pub(crate) struct Leg {
    pub(crate) part: Part,
    /// As the engine takes it, once the other leg is as far.
    transfer: Transfer,
}

/// What its prompts have to do with the prefix cache.
pub(crate) struct CacheUse {
    keys: CacheKeys,
    /// What of them may come from it.
    pub(crate) reading: Reading,
}

/// How an answer is delivered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Delivery {
    /// At once, when it is whole.
    Whole,
    Stream,
    /// As events, usage last.
    StreamWithUsage,
}

impl Ask {
    /// Read one; `limit` names the field that bounds the answer, `prefix` begins its id.
    pub(crate) fn read(
        app: &App,
        (headers, fields): (&HeaderMap, &Fields),
        limits: &[&'static str],
        prefix: &str,
    ) -> Result<Self, Fault> {
        let model = fields.text("model")?.unwrap_or(&app.model).to_owned();
        let adapter = app.adapter_of(&model)?;
        no_priority(fields)?;
        let part = app.handing.part(fields)?;
        let longest = limits.iter().map(|name| fields.count(name, 1)).collect::<Result<Vec<_>, _>>()?;
        let keys = CacheKeys { salt: cache_salt(fields)?.filter(|_| !app.ignores_salts), adapter };
        Ok(Self {
            id: answer_id(app, headers, prefix),
            choices: fields.count("n", 1)?.unwrap_or(1).min(128),
            delivery: delivery(fields)?,
            with_ids: fields.flag("return_token_ids")?,
            stops: stops(fields)?,
            remote_cached: match &part {
                Part::Own(Transfer::Consume(_) | Transfer::Exchange(_)) => {
                    producer_cached(fields.object("kv_transfer_params")?)
                }
                _ => None,
            },
            longest: longest.into_iter().flatten().next(),
            sampling: sampling(fields)?,
            leg: Leg { part, transfer: Transfer::None },
            cache: CacheUse { keys, reading: Reading::Cached },
            report: report(fields)?,
            model,
        })
    }

    /// Waits until the other leg is as far as this one needs it.
    pub(crate) async fn meet(&mut self, app: &App) -> Result<(), Fault> {
        self.leg.transfer = app.handing.transfer(&self.leg.part).await?;
        if matches!(self.leg.part, Part::Source { .. }) {
            // Whatever its client asks for, a source computes the prompt and one token.
            self.longest = Some(1);
            (self.sampling.min_tokens, self.sampling.ending) = (0, Ending::Ignored);
        }
        Ok(())
    }

    /// The answer's length where the client named none.
    pub(crate) fn bound(&mut self, tokens: u32) {
        self.longest.get_or_insert(tokens);
    }

    /// The engine's request for one of the choices.
    pub(crate) fn request(&self, app: &App, prompt: &[u32], choice: u32) -> Result<Request, Fault> {
        let (length, context) = (prompt.len() as u32, app.profile.context_tokens);
        let room = context.saturating_sub(length);
        if let Some(asked) = self.longest.filter(|asked| *asked > room && room > 0) {
            let message = format!(
                "'max_tokens' or 'max_completion_tokens' is too large: {asked}. This model's maximum context length \
                 is {context} tokens and your request has {length} input tokens ({asked} > {context} - {length})."
            );
            return Err(Fault::bad_request(message, Some("max_tokens")));
        }
        let mut sampling = self.sampling.clone();
        sampling.max_tokens = self.longest.unwrap_or(app.profile.answer_tokens).min(room.max(1));
        if choice > 0 {
            sampling.salt = Some(sampling.salt.unwrap_or(0) ^ xxh3_64(&choice.to_le_bytes()));
        }
        Ok(Request {
            name: Arc::from(format!("{}-{:08x}", self.id, app.next_number() as u32)),
            prompt: prompt.to_vec(),
            sampling,
            keys: self.cache.keys.clone(),
            transfer: self.leg.transfer.clone(),
            reading: self.cache.reading,
            report: self.report,
        })
    }
}

fn answer_id(app: &App, headers: &HeaderMap, prefix: &str) -> String {
    const LONGEST: usize = 128;
    let given = headers.get("x-request-id").and_then(|value| value.to_str().ok());
    match given.filter(|id| !id.is_empty() && id.len() <= LONGEST) {
        Some(id) => format!("{prefix}{id}"),
        None => format!("{prefix}{:016x}", app.next_number()),
    }
}

fn delivery(fields: &Fields) -> Result<Delivery, Fault> {
    let options = fields.object("stream_options")?;
    match (fields.flag("stream")?, options) {
        (false, Some(_)) => {
            let message = "Stream options can only be defined when `stream=True`.";
            Err(Fault::bad_request(message, Some("stream_options")))
        }
        (false, None) => Ok(Delivery::Whole),
        (true, options) => {
            let usage = options.and_then(|o| o.get("include_usage")).and_then(|usage| usage.as_bool());
            Ok(if usage == Some(true) { Delivery::StreamWithUsage } else { Delivery::Stream })
        }
    }
}

fn sampling(fields: &Fields) -> Result<Sampling, Fault> {
    let temperature = fields.number("temperature")?.unwrap_or(1.0);
    if !(0.0..=2.0).contains(&temperature) {
        let message = format!("temperature must be in [0, 2], got {temperature}.");
        return Err(Fault::bad_request(message, Some("temperature")));
    }
    // Without a seed even a warm model is predictable here: tests compare texts.
    let seed = fields.whole("seed")?.filter(|_| temperature > 0.0);
    Ok(Sampling {
        max_tokens: 0,
        min_tokens: fields.count("min_tokens", 0)?.unwrap_or(0),
        ending: if fields.flag("ignore_eos")? { Ending::Ignored } else { Ending::Natural },
        salt: seed.map(|seed| xxh3_64(&seed.to_le_bytes())),
        stop: token_ids(fields.list("stop_token_ids")?.unwrap_or_default(), "stop_token_ids")?,
    })
}

fn no_priority(fields: &Fields) -> Result<(), Fault> {
    match fields.whole("priority")? {
        None | Some(0) => Ok(()),
        Some(priority) => {
            let message = format!("Got priority {priority} but priority scheduling is not enabled.");
            Err(Fault::bad_request(message, Some("priority")))
        }
    }
}

fn report(fields: &Fields) -> Result<Report, Fault> {
    let mode = fields.object("vllm_xargs")?.and_then(|args| args.get("kv_cache_report_mode"));
    Ok(if mode.is_some_and(|mode| mode == "full") { Report::Full } else { Report::Added })
}

fn stops(fields: &Fields) -> Result<Vec<String>, Fault> {
    const MOST: usize = 16;
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
    match texts.len() <= MOST && texts.iter().all(|text| !text.is_empty()) {
        true => Ok(texts),
        false => Err(wrong("stop", "Input should be at most 16 strings, none of them empty")),
    }
}

fn cache_salt(fields: &Fields) -> Result<Option<Arc<str>>, Fault> {
    let salt = fields.text("cache_salt")?;
    match salt {
        Some(salt) if salt.is_empty() || salt.chars().count() > 1024 => {
            Err(wrong("cache_salt", "Parameter 'cache_salt' must be a non-empty string of at most 1024 characters"))
        }
        salt => Ok(salt.map(Arc::from)),
    }
}
