//! Reads an engine's complete (not streamed) answer: token usage and KV-transfer parameters.

use std::borrow::Cow;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;
use vocabulary::Tokens;

use super::reverse_pull::ReversePullParams;

/// An answer that is not valid JSON of the expected shape.
#[derive(Debug, thiserror::Error)]
#[error("the engine's answer cannot be read: {0}")]
pub struct AnswerParseError(#[from] serde_json::Error);

/// Token counts of one request, as the engine reported them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TokenUsage {
    /// Prompt tokens, cached ones included.
    pub prompt: Tokens,
    /// Generated tokens.
    pub completion: Tokens,
    /// Prompt tokens that were served from a cache. None where the engine does not report them; vLLM also omits the
    /// field when the count is zero.
    pub cached: Option<Tokens>,
}

/// Transfer parameters that one prefill leg returned, for exactly one decode leg with the same prompt.
///
/// Not `Clone`, and consumed by the leg that sends it: engines generate wrong text from parameters that were already
/// used.
#[derive(PartialEq, Eq, Debug)]
pub struct HandoffParams {
    params: Bytes,
    tokens: Option<Tokens>,
    source_cached: Option<Tokens>,
}

impl HandoffParams {
    /// Returns how many prompt tokens can be fetched.
    pub fn tokens(&self) -> Option<Tokens> {
        self.tokens
    }

    /// Returns how many of those tokens the source found in its cache; it computed the rest.
    pub fn source_cached(&self) -> Option<Tokens> {
        self.source_cached
    }

    /// Returns the JSON object exactly as the engine wrote it.
    pub(super) fn into_parameters(self) -> Bytes {
        self.params
    }

    /// Parses transfer parameters. Returns None unless the engine holds the KV for a fetch and names the request: the
    /// fetching engine hangs on parameters that lack these.
    fn of(answer: &Bytes, raw: &RawValue) -> Option<Self> {
        let named: HandoffFields = serde_json::from_str(raw.get()).ok()?;
        if !named.do_remote_prefill.unwrap_or(false) || named.remote_request_id.is_none_or(|id| id.is_empty()) {
            return None;
        }
        Some(Self {
            params: answer.slice_ref(raw.get().as_bytes()),
            tokens: named.remote_num_tokens.map(Tokens),
            source_cached: named.remote_prefill_cached_tokens.map(Tokens),
        })
    }
}

/// A complete answer of `/v1/chat/completions`, `/v1/completions`, `/v1/responses` or `/v1/messages`.
#[derive(PartialEq, Eq, Debug, Default)]
pub struct AnswerSummary {
    /// The engine's id of the answer.
    pub id: Option<String>,
    /// Token usage, where reported.
    pub usage: Option<TokenUsage>,
    /// The finish reason of the first choice.
    pub finish: Option<String>,
    /// Parameters for fetching the prompt's KV from this engine, where it offers them.
    pub handoff: Option<HandoffParams>,
    /// Parameters for fetching the KV of prompt and answer from this engine in the next step, where it offers them.
    pub reverse_pull: Option<ReversePullParams>,
}

impl AnswerSummary {
    /// Parses a complete answer.
    pub fn read(body: &Bytes) -> Result<Self, AnswerParseError> {
        let answer: EngineResponseBody<'_> = serde_json::from_slice(body)?;
        Ok(Self {
            id: answer.id.map(Into::into),
            usage: answer.usage.map(UsageFields::usage),
            finish: answer.choices.into_iter().flatten().next().and_then(|choice| choice.finish_reason),
            handoff: answer.kv_transfer_params.and_then(|raw| HandoffParams::of(body, raw)),
            reverse_pull: answer.kv_transfer_params.and_then(ReversePullParams::of),
        })
    }
}

/// Parses the usage object near the end of a complete answer: all engines write it after the generated content. Returns
/// None if there is none.
pub fn usage_at_end(end: &[u8]) -> Option<TokenUsage> {
    const NAME: &[u8] = b"\"usage\":";
    let at = end.windows(NAME.len()).rposition(|window| window == NAME)?;
    let mut reader = serde_json::Deserializer::from_slice(&end[at + NAME.len()..]);
    Option::<UsageFields>::deserialize(&mut reader).ok().flatten().map(UsageFields::usage)
}

#[derive(Deserialize)]
struct EngineResponseBody<'a> {
    #[serde(borrow)]
    id: Option<Cow<'a, str>>,
    usage: Option<UsageFields>,
    choices: Option<Vec<ChoiceFinishReason>>,
    kv_transfer_params: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct ChoiceFinishReason {
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct HandoffFields<'a> {
    do_remote_prefill: Option<bool>,
    #[serde(borrow)]
    remote_request_id: Option<Cow<'a, str>>,
    remote_num_tokens: Option<u64>,
    remote_prefill_cached_tokens: Option<u64>,
}

/// Usage fields of all four APIs.
#[derive(Clone, Copy, Deserialize, Default)]
#[serde(default)]
pub(super) struct UsageFields {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    prompt_tokens_details: Option<TokenDetails>,
    input_tokens: Option<u64>,
    output_tokens: Option<u64>,
    input_tokens_details: Option<TokenDetails>,
    cache_creation_input_tokens: Option<u64>,
    cache_read_input_tokens: Option<u64>,
}

#[derive(Clone, Copy, Deserialize, Default)]
#[serde(default)]
struct TokenDetails {
    cached_tokens: Option<u64>,
}

impl UsageFields {
    pub(super) fn usage(self) -> TokenUsage {
        self.merged_after(TokenUsage::default())
    }

    /// Combines these counts with those of an earlier event: a `/v1/messages` stream reports the prompt in its first
    /// event.
    pub(super) fn merged_after(self, before: TokenUsage) -> TokenUsage {
        let details = self.prompt_tokens_details.or(self.input_tokens_details);
        let cached = details.and_then(|details| details.cached_tokens).or(self.cache_read_input_tokens);
        // `/v1/messages` reports cached tokens separately from the other prompt tokens.
        let apart =
            self.cache_creation_input_tokens.unwrap_or(0).saturating_add(self.cache_read_input_tokens.unwrap_or(0));
        let prompt = self.prompt_tokens.or(self.input_tokens).map(|tokens| Tokens(tokens.saturating_add(apart)));
        TokenUsage {
            prompt: prompt.unwrap_or(before.prompt),
            completion: self.completion_tokens.or(self.output_tokens).map_or(before.completion, Tokens),
            cached: cached.map(Tokens).or(before.cached),
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
