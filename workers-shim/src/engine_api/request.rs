//! A client's request body, and the bodies of the legs that serve it.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use vocabulary::Tokens;

use super::answer::HandoffParams;
use super::json::JsonError;
use super::kv::{self, KvTransfer, ReturnsKv, SourceAnswerLength};
use super::reverse_pull::ReversePullParams;
use super::splice::{JsonFields, JsonSplice};

/// Fields that legs change or that decide something here; they may stand only once.
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

/// Which engine endpoint a body is for; they bound answers by fields of different names.
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
    /// The field that bounds the answer.
    fn length_field(self) -> &'static str {
        match self {
            Api::Chat | Api::Completions | Api::Messages => "max_tokens",
            Api::Responses => "max_output_tokens",
        }
    }
}

/// Whether a streamed answer ends with a usage event.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum UsageEventMode {
    /// As the client asked.
    #[default]
    AsRequested,
    /// Always; the caller hides it from a client that did not ask.
    Always,
}

/// What is the same for all legs of a request.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LegOptions {
    /// Whose fields.
    pub api: Api,
    /// The tenant's cache salt, in place of any that the client sent; without one the client's stays. Where there is one,
    /// tenants share the engines, and the fields in `CROSS_TENANT_FIELDS` are left out too.
    pub salt: Option<Arc<str>>,
    /// Whether to ask for usage.
    pub usage: UsageEventMode,
    /// Whether to ask for token ids.
    pub ids: TokenIdsMode,
}

/// Whether an answer's events hold token ids: `return_token_ids` of vLLM.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TokenIdsMode {
    /// As the client asked.
    #[default]
    AsRequested,
    /// Always; the caller hides them from a client that did not ask.
    Always,
}

/// Where an answer goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AnswerContinuation<'a> {
    /// The prompt's token ids.
    pub prompt: &'a [u32],
    /// Those of the answer so far.
    pub answer: &'a [u32],
    /// The most that prompt and answer may have, for an answer that the client did not bound.
    pub context: Option<Tokens>,
}

/// Fields that say how a prompt is made, or what is made of the answer's text; a completion of token ids has none of them.
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
/// What vLLM gives a completion that does not bound its answer.
const DEFAULT_COMPLETION_TOKENS: u64 = 16;

/// Fields by which a request can reach those of other tenants at the same engine: it names itself, and with that what the
/// engine stores (vLLM, SGLang), or it is served before them.
const CROSS_TENANT_FIELDS: [&str; 3] = ["request_id", "rid", "priority"];

/// What a client sent that only routers may send, and which is left out of every leg.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StrippedFields {
    /// What means a transfer in any dialect, at the top or in `vllm_xargs`.
    pub transfer_parameters: u32,
    /// `kv_cache_report_mode` in `vllm_xargs`.
    pub report_mode: u32,
    /// `cache_salt`, where the tenant has one.
    pub salt: u32,
    /// `request_id` and `rid`, where tenants share the engines.
    pub request_ids: u32,
    /// `priority`, where tenants share the engines.
    pub priority: u32,
}

/// A client's body: an object, strictly read. The bytes stay as they are until a leg is made of them.
#[derive(Clone, Debug)]
pub struct RequestBody {
    fields: JsonFields,
    /// `vllm_xargs` without what clients may not send; none when it stays as it is.
    xargs: Option<Bytes>,
    stripped: StrippedFields,
}

impl RequestBody {
    /// Scans a body.
    pub fn read(body: Bytes) -> Result<Self, JsonError> {
        static ONCE: LazyLock<Vec<&str>> =
            LazyLock::new(|| UNIQUE_FIELDS.into_iter().chain(kv::reserved_fields()).collect());
        let fields = JsonFields::scan(body, &ONCE)?;
        let mut stripped = StrippedFields::default();
        stripped.transfer_parameters += router_only_fields().filter(|name| fields.get(name).is_some()).count() as u32;
        let xargs = match fields.get("vllm_xargs") {
            Some(xargs) if xargs.starts_with(b"{") => {
                let inner = JsonFields::scan(fields.body().slice_ref(xargs), &[])?;
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

    /// How many bytes a tree of all its values and its prompt as text may take beside the body itself.
    pub fn derived_bytes(&self) -> usize {
        // A template's value, and the text once more for what is rendered of it.
        const VALUE: usize = 48;
        // What a list or an object takes for itself, and for the name of its first value.
        const CONTAINER: usize = 256;
        self.fields.body().len() + VALUE * self.fields.values() + CONTAINER * self.fields.containers()
    }

    /// The fields, for whoever has to look at more of them.
    pub fn json_fields(&self) -> &JsonFields {
        &self.fields
    }

    /// What is left out of every leg.
    pub fn stripped(&self, options: &LegOptions) -> StrippedFields {
        if options.salt.is_none() {
            return self.stripped;
        }
        let stands = |name: &str| u32::from(self.fields.get(name).is_some());
        StrippedFields {
            salt: u32::from(self.fields.has("cache_salt")),
            request_ids: stands("request_id") + stands("rid"),
            priority: stands("priority"),
            ..self.stripped
        }
    }

    /// Whether the client wants a stream.
    pub fn streams(&self) -> bool {
        self.fields.read("stream").unwrap_or(false)
    }

    /// One leg that does it all: the client's body, less what clients may not send.
    pub fn plain(&self, options: &LegOptions) -> Bytes {
        let mut splice = self.without_reserved(options);
        self.request_extras(&mut splice, options);
        splice.finish()
    }

    /// The request for the rest of an answer of which a part was said: a completion of token ids. None where nobody says
    /// how long it may be.
    pub fn continuation(&self, api: Api, at: AnswerContinuation<'_>) -> Option<Self> {
        let mut splice = JsonSplice::new(&self.fields);
        for name in TEXT_FIELDS {
            splice.remove(name);
        }
        let count = |name| self.fields.read::<u64>(name);
        let (prompt, said) = (at.prompt.len() as u64, at.answer.len() as u64);
        let most = match api {
            Api::Completions => count("max_tokens").unwrap_or(DEFAULT_COMPLETION_TOKENS),
            _ => {
                let room = at.context.map(|context| context.0.saturating_sub(prompt));
                count("max_completion_tokens").or(count("max_tokens")).or(room)?
            }
        };
        // An engine takes no bound of 0; who reached it has told that the answer is over.
        splice.set("max_tokens", most.saturating_sub(said).max(1).to_string().into_bytes());
        if let Some(least) = count("min_tokens") {
            splice.set("min_tokens", least.saturating_sub(said).to_string().into_bytes());
        }
        let ids: Vec<_> = at.prompt.iter().chain(at.answer).collect();
        splice.set("prompt", serde_json::to_vec(&ids).expect("numbers are always JSON"));
        Self::read(splice.finish()).ok()
    }

    /// The leg that computes the prompt for another worker: never streamed (a streaming vLLM does not return the
    /// parameters), and one token where the dialect does not want more.
    pub fn prefill(
        &self,
        options: &LegOptions,
        (transfer, readback): (&KvTransfer, Option<ReversePullParams>),
    ) -> Bytes {
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
        splice.finish()
    }

    fn limit_to_one_token(&self, splice: &mut JsonSplice<'_>, options: &LegOptions) {
        splice.set(options.api.length_field(), b"1".as_slice());
        if options.api == Api::Chat || self.fields.has("max_completion_tokens") {
            splice.set("max_completion_tokens", b"1".as_slice());
        }
        splice.remove("min_tokens");
        if options.api == Api::Responses {
            // Nobody will ever ask for this one.
            splice.set("store", b"false".as_slice());
        }
        // Only a leg that ends by its length hands its blocks over, and engines look for a stop first.
        splice.remove("stop_token_ids");
        splice.set("ignore_eos", b"true".as_slice());
    }

    /// The leg that answers from what the prefill leg has computed. The handoff is used up: engines give wrong text for
    /// one that was used before.
    pub fn decode(&self, options: &LegOptions, (transfer, handoff): (&KvTransfer, Option<HandoffParams>)) -> Bytes {
        let mut splice = self.without_reserved(options);
        self.request_extras(&mut splice, options);
        let tells = matches!(options.api, Api::Chat | Api::Completions) && !self.streams();
        if transfer.returns_kv() == ReturnsKv::WithWholeAnswers && tells {
            // What is handed back is good only where these go on.
            splice.set("return_token_ids", b"true".as_slice());
        }
        set_fields(&mut splice, transfer.connector.dialect().target_fields(&transfer.handshake, handoff));
        splice.finish()
    }

    /// The decode leg when nobody waits for the answer any more: one token, so that what the prefill leg computed is
    /// fetched and its blocks are freed.
    pub fn decode_abandoned(&self, options: &LegOptions, (transfer, handoff): (&KvTransfer, HandoffParams)) -> Bytes {
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
        splice.finish()
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
        if options.ids == TokenIdsMode::Always {
            splice.set("return_token_ids", b"true".as_slice());
        }
        self.request_usage(splice, options);
    }

    fn request_usage(&self, splice: &mut JsonSplice<'_>, options: &LegOptions) {
        if options.usage == UsageEventMode::AsRequested || !self.streams() {
            return;
        }
        let asked = self.fields.get("stream_options").filter(|asked| asked.starts_with(b"{"));
        let scanned = asked.and_then(|asked| JsonFields::scan(self.fields.body().slice_ref(asked), &[]).ok());
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

/// Fields that only routers may send, each once.
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
