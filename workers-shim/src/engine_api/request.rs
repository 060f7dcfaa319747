//! A client's request body, and the request bodies of the legs that serve it.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use vocabulary::Tokens;

use super::answer::HandoffParams;
use super::json::JsonError;
use super::kv::{self, KvTransfer, ReturnsKv, SourceAnswerLength};
use super::reverse_pull::ReversePullParams;
use super::splice::{BodyGrowth, JsonSplice, LegBody, ScannedJson};

/// Fields that the router reads or that legs change; a body may contain each only once.
const UNIQUE_FIELDS: [&str; 12] = [
    "model",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "min_tokens",
    "n",
    "vllm_xargs",
    "cache_salt",
    "messages",
    "prompt",
];

/// The engine API of a request. The APIs limit the answer length by different fields.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Api {
    /// `/v1/chat/completions`
    #[default]
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/v1/responses`
    Responses,
    /// `/v1/messages`
    Messages,
}

impl Api {
    /// Returns the field that limits the answer length.
    fn length_field(self) -> &'static str {
        match self {
            Api::Chat | Api::Completions | Api::Messages => "max_tokens",
            Api::Responses => "max_output_tokens",
        }
    }
}

/// Whether a stream ends with a usage event.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum UsageEventMode {
    /// If the client requested it.
    #[default]
    AsRequested,
    /// Always; the caller removes it for a client that did not request it.
    Always,
}

/// Options that apply to all legs of a request.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LegOptions {
    /// The API of the request.
    pub api: Api,
    /// The tenant's cache salt, which replaces the client's; without one the client's is kept. A salt means that
    /// tenants share the engines, so the fields in `CROSS_TENANT_FIELDS` are removed, too.
    pub salt: Option<Arc<str>>,
    /// Whether to request usage.
    pub usage: UsageEventMode,
    /// Whether to request token ids.
    pub ids: AnswerTokenIdsMode,
}

/// Whether an answer's events contain token ids (vLLM's `return_token_ids`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum AnswerTokenIdsMode {
    /// If the client requested them.
    #[default]
    AsRequested,
    /// Always; the caller removes them for a client that did not request them.
    Always,
}

/// The point at which a partial answer is continued.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AnswerContinuation<'a> {
    /// The prompt's token ids.
    pub prompt: &'a [u32],
    /// The token ids of the answer so far.
    pub answer: &'a [u32],
    /// The maximum length of prompt and answer, for an answer whose length the client did not limit.
    pub context: Option<Tokens>,
}

/// Fields that define how a prompt is rendered or how the answer's text is parsed; a completion of token ids has none
/// of them.
const TEXT_FIELDS: [&str; 25] = [
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "functions",
    "function_call",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "documents",
    "reasoning_effort",
    "include_reasoning",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "return_prompt_text",
    "max_completion_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
    "response_format",
    "logprobs",
    "top_logprobs",
    "echo",
    "n",
];
/// vLLM's default `max_tokens` of a completion.
const DEFAULT_COMPLETION_TOKENS: u64 = 16;

/// Fields by which a request can affect other tenants at the same engine: ids, which also name what the engine stores
/// (vLLM, SGLang), and priority.
const CROSS_TENANT_FIELDS: [&str; 3] = ["request_id", "rid", "priority"];

/// Fields that only the router may send and that were removed from a client's body, counted by kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StrippedFieldCounts {
    /// Transfer fields of any connector, at the top level or in `vllm_xargs`.
    pub transfer_parameters: u32,
    /// `kv_cache_report_mode` in `vllm_xargs`.
    pub report_mode: u32,
    /// `cache_salt`, where the tenant has its own.
    pub salt: u32,
    /// `request_id` and `rid`, where tenants share the engines.
    pub request_ids: u32,
    /// `priority`, where tenants share the engines.
    pub priority: u32,
}

/// A client's request body: a JSON object, strictly validated. Its bytes are kept unchanged until a leg is built.
#[derive(Clone, Debug)]
pub struct ClientRequestBody {
    fields: Arc<ScannedJson>,
    /// `vllm_xargs` without the fields that clients may not send; None if nothing was removed.
    xargs: Option<Bytes>,
    stripped: StrippedFieldCounts,
}

impl ClientRequestBody {
    /// Validates a body and locates its fields.
    pub fn read(body: Bytes) -> Result<Self, JsonError> {
        Self::read_grown(body, None)
    }

    /// Validates a body and locates its fields, from where it has grown on.
    pub fn read_grown(body: Bytes, growth: Option<&BodyGrowth>) -> Result<Self, JsonError> {
        static ONCE: LazyLock<Vec<&str>> =
            LazyLock::new(|| UNIQUE_FIELDS.into_iter().chain(kv::reserved_fields()).collect());
        let fields = match growth {
            Some(growth) => ScannedJson::scan_growth(body, growth, &ONCE)?,
            None => ScannedJson::scan(body, &ONCE)?,
        };
        let fields = Arc::new(fields);
        let mut stripped = StrippedFieldCounts::default();
        stripped.transfer_parameters += router_only_fields().filter(|name| fields.get(name).is_some()).count() as u32;
        let xargs = match fields.get("vllm_xargs") {
            Some(xargs) if xargs.starts_with(b"{") => {
                let inner = ScannedJson::scan(fields.body().slice_ref(xargs), &[])?;
                let mut splice = JsonSplice::new(&inner);
                let transfer = splice.remove("kv_transfer_params");
                let report = splice.remove("kv_cache_report_mode");
                stripped.transfer_parameters += u32::from(transfer);
                stripped.report_mode += u32::from(report);
                (transfer || report).then(|| splice.finish())
            }
            _ => None,
        };
        Ok(Self { fields, xargs, stripped })
    }

    /// Returns an upper bound in bytes for a parsed tree of all values and the prompt as text, beside the body itself.
    pub fn derived_bytes(&self) -> usize {
        // One template value, and its text once more in the rendered prompt.
        const VALUE: usize = 48;
        // A list or object itself, and the name of its first value.
        const CONTAINER: usize = 256;
        self.fields.body().len() + VALUE * self.fields.values() + CONTAINER * self.fields.containers()
    }

    /// Returns the located fields.
    pub fn scanned_json(&self) -> &Arc<ScannedJson> {
        &self.fields
    }

    /// Counts the fields that are removed from every leg.
    pub fn stripped(&self, options: &LegOptions) -> StrippedFieldCounts {
        if options.salt.is_none() {
            return self.stripped;
        }
        let is_set = |name: &str| u32::from(self.fields.get(name).is_some());
        StrippedFieldCounts {
            salt: u32::from(self.fields.has("cache_salt")),
            request_ids: is_set("request_id") + is_set("rid"),
            priority: is_set("priority"),
            ..self.stripped
        }
    }

    /// Returns whether the client requested a stream.
    pub fn streams(&self) -> bool {
        self.fields.read("stream").unwrap_or(false)
    }

    /// Builds the only leg of a request that is not split: the client's body without the fields that clients may not
    /// send.
    pub fn plain(&self, options: &LegOptions) -> LegBody {
        let mut splice = self.without_reserved(options);
        self.request_extras(&mut splice, options);
        splice.chunks()
    }

    /// Builds the request for the rest of a partial answer, as a completion of token ids. None where the answer length
    /// has no limit.
    pub fn continuation(&self, api: Api, at: AnswerContinuation<'_>) -> Option<Self> {
        let mut splice = JsonSplice::new(&self.fields);
        for name in TEXT_FIELDS {
            splice.remove(name);
        }
        let count = |name| self.fields.read::<u64>(name);
        let (prompt, answered) = (at.prompt.len() as u64, at.answer.len() as u64);
        let max_tokens = match api {
            Api::Completions => count("max_tokens").unwrap_or(DEFAULT_COMPLETION_TOKENS),
            _ => {
                let remaining_context = at.context.map(|context| context.0.saturating_sub(prompt));
                count("max_completion_tokens").or(count("max_tokens")).or(remaining_context)?
            }
        };
        // Engines reject a limit of 0; an answer that reached its limit has already reported its end.
        splice.set("max_tokens", max_tokens.saturating_sub(answered).max(1).to_string().into_bytes());
        if let Some(min_tokens) = count("min_tokens") {
            splice.set("min_tokens", min_tokens.saturating_sub(answered).to_string().into_bytes());
        }
        let ids: Vec<_> = at.prompt.iter().chain(at.answer).collect();
        splice.set("prompt", serde_json::to_vec(&ids).expect("numbers are always JSON"));
        Self::read(splice.finish()).ok()
    }

    /// Builds the leg that computes the prompt for another worker. Never streamed (a streaming vLLM does not return the
    /// parameters), and limited to one token unless the connector needs the client's limit.
    pub fn prefill(
        &self,
        options: &LegOptions,
        (transfer, readback): (&KvTransfer, Option<ReversePullParams>),
    ) -> LegBody {
        let (mut splice, dialect) = (self.without_reserved(options), transfer.connector.dialect());
        if dialect.source_answer_length() == SourceAnswerLength::OneToken {
            self.limit_to_one_token(&mut splice, options);
        }
        splice.remove("stream_options");
        splice.set("stream", b"false".as_slice());
        set_fields(&mut splice, dialect.source_fields(&transfer.handshake));
        if let Some(readback) = readback {
            set_fields(&mut splice, dialect.reverse_pull_fields(readback));
        }
        splice.chunks()
    }

    fn limit_to_one_token(&self, splice: &mut JsonSplice<'_>, options: &LegOptions) {
        splice.set(options.api.length_field(), b"1".as_slice());
        if options.api == Api::Chat || self.fields.has("max_completion_tokens") {
            splice.set("max_completion_tokens", b"1".as_slice());
        }
        splice.remove("min_tokens");
        if options.api == Api::Responses {
            // Nobody will ever request this response by its id.
            splice.set("store", b"false".as_slice());
        }
        // Engines offer KV only where the answer ended by its length limit, and they check for stop tokens first.
        splice.remove("stop_token_ids");
        splice.set("ignore_eos", b"true".as_slice());
    }

    /// Builds the leg that answers from the KV of the prefill leg. The handoff is consumed: engines generate wrong text
    /// from one that was already used.
    pub fn decode(&self, options: &LegOptions, (transfer, handoff): (&KvTransfer, Option<HandoffParams>)) -> LegBody {
        let mut splice = self.without_reserved(options);
        self.request_extras(&mut splice, options);
        let wants_token_ids = matches!(options.api, Api::Chat | Api::Completions) && !self.streams();
        if transfer.returns_kv() == ReturnsKv::WithWholeAnswers && wants_token_ids {
            // KV returned for the next step is usable only if its prompt continues exactly these tokens.
            splice.set("return_token_ids", b"true".as_slice());
        }
        set_fields(&mut splice, transfer.connector.dialect().target_fields(&transfer.handshake, handoff));
        splice.chunks()
    }

    /// Builds the decode leg for an answer that nobody waits for any more: one token, so that the KV of the prefill leg
    /// is fetched and its blocks are freed.
    pub fn decode_abandoned(&self, options: &LegOptions, (transfer, handoff): (&KvTransfer, HandoffParams)) -> LegBody {
        let mut splice = self.without_reserved(options);
        splice.set(options.api.length_field(), b"1".as_slice());
        if self.fields.has("max_completion_tokens") {
            splice.set("max_completion_tokens", b"1".as_slice());
        }
        splice.remove("min_tokens");
        splice.remove("stream_options");
        splice.set("stream", b"false".as_slice());
        if options.api == Api::Responses {
            splice.set("store", b"false".as_slice());
        }
        set_fields(&mut splice, transfer.connector.dialect().target_fields(&transfer.handshake, Some(handoff)));
        splice.chunks()
    }

    fn without_reserved(&self, options: &LegOptions) -> JsonSplice<'_> {
        let mut splice = JsonSplice::new(&self.fields);
        for name in router_only_fields() {
            splice.remove(name);
        }
        if let Some(xargs) = &self.xargs {
            splice.set("vllm_xargs", &**xargs);
        }
        if let Some(salt) = &options.salt {
            splice.set("cache_salt", text(salt));
            for name in CROSS_TENANT_FIELDS {
                splice.remove(name);
            }
        }
        splice
    }

    fn request_extras(&self, splice: &mut JsonSplice<'_>, options: &LegOptions) {
        if options.ids == AnswerTokenIdsMode::Always {
            splice.set("return_token_ids", b"true".as_slice());
        }
        self.request_usage(splice, options);
    }

    fn request_usage(&self, splice: &mut JsonSplice<'_>, options: &LegOptions) {
        if options.usage == UsageEventMode::AsRequested || !self.streams() {
            return;
        }
        let options = self.fields.get("stream_options").filter(|asked| asked.starts_with(b"{"));
        let scanned = options.and_then(|options| ScannedJson::scan(self.fields.body().slice_ref(options), &[]).ok());
        let with_usage = match &scanned {
            None => USAGE.to_vec(),
            Some(inner) => {
                let mut inner = JsonSplice::new(inner);
                inner.set("include_usage", b"true".as_slice());
                inner.finish().to_vec()
            }
        };
        splice.set("stream_options", with_usage);
    }
}

/// Returns the fields that only the router may send, each once.
fn router_only_fields() -> impl Iterator<Item = &'static str> {
    static NAMES: LazyLock<BTreeSet<&str>> = LazyLock::new(|| kv::reserved_fields().collect());
    NAMES.iter().copied()
}

fn set_fields(splice: &mut JsonSplice<'_>, fields: kv::LegFields) {
    for (name, value) in fields {
        splice.set(name, value);
    }
}

const USAGE: &[u8] = br#"{"include_usage":true}"#;

pub(super) fn text(text: &str) -> Cow<'static, [u8]> {
    Cow::Owned(serde_json::to_vec(text).expect("a text is always JSON"))
}

#[cfg(test)]
mod tests;
