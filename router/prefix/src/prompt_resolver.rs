//! Resolves a request's bytes to a [`Prompt`]: by token ids if they can be predicted, otherwise by canonical bytes.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use vocabulary::{HashSeed, ModelNamespace, PrefixChain, PrefixId, RequestNamespace, Tokens};

use crate::canonical::{CanonicalFields, LayoutOf, canonical_bytes};
use crate::chat::CallFieldOrder;
use crate::completion::{CompletionBody, CompletionPrompt};
use crate::conversion;
use crate::{
    ChatBody, ChatEndpoint, ConvertedRequest, FallbackReason, ModelTokenizer, PrefixError, Prompt, PromptContent,
    PromptIdentity, PromptWorkLimits, SpecialTokens, TokenCheckpoint, TokenizedPrompt, WallTime,
};

/// Maximum characters of an error's text kept for the log.
const MAX_DETAIL_CHARS: usize = 300;
const NO_TOKENIZER: PrefixError = PrefixError::Unresolvable {
    reason: FallbackReason::NoTokenizer,
    detail: "no tokenizer is configured for this model",
};

/// Parts of a [`PromptResolver`].
#[derive(Clone, Debug)]
pub struct PromptResolverOptions {
    /// Namespace of the model; its `tokenizer` is replaced by the digest of `text`, or by the empty string.
    pub namespace: ModelNamespace,
    /// The cluster's hash seed.
    pub seed: HashSeed,
    /// Tokens per chain block.
    pub block_size: Tokens,
    /// Tokenizer and template, if configured.
    pub text: Option<Arc<ModelTokenizer>>,
    /// Bounds.
    pub limits: PromptWorkLimits,
}

/// Resolves the prompts of one served model.
#[derive(Clone, Debug)]
pub struct PromptResolver {
    namespace: ModelNamespace,
    bytes_namespace: ModelNamespace,
    seed: HashSeed,
    block_size: Tokens,
    text: Option<Arc<ModelTokenizer>>,
    limits: PromptWorkLimits,
}

/// Inputs of a prompt besides the body: the request's namespace, and the time for templates that print a date.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExtraPromptInputs<'a> {
    /// Adapter, salt and content hash of the root.
    pub keys: RequestNamespace<'a>,
    /// Current time.
    pub now: WallTime,
}

/// A resolved prompt, and what speeds up the next one.
#[derive(Debug)]
pub struct ResolvedPrompt {
    /// The prompt.
    pub prompt: Prompt,
    /// Tokens reused from a checkpoint.
    pub reused_tokens: Tokens,
    /// Checkpoint for the conversation's next prompt; `None` if there can be none.
    pub next_checkpoint: Option<TokenCheckpoint>,
}

impl PromptResolver {
    /// Creates the resolver of one model. A block size of 0 counts as 16 tokens.
    pub fn new(options: PromptResolverOptions) -> Self {
        let PromptResolverOptions { mut namespace, seed, block_size: block, text, limits } = options;
        let bytes_namespace = ModelNamespace { tokenizer: "".into(), ..namespace.clone() };
        namespace.tokenizer = text.as_ref().map_or_else(|| "".into(), |text| text.digest().clone());
        let block_size = if block == Tokens::ZERO { Tokens(16) } else { block };
        Self { namespace, bytes_namespace, seed, block_size, text, limits }
    }

    /// Returns the namespace of exact chains, which KV events of engines share.
    pub fn namespace(&self) -> &ModelNamespace {
        &self.namespace
    }

    /// Returns the tokens per chain block.
    pub fn block(&self) -> Tokens {
        self.block_size
    }

    /// Returns the cluster's hash seed.
    pub fn seed(&self) -> HashSeed {
        self.seed
    }

    /// Returns tokenizer and template, if configured.
    pub fn text(&self) -> Option<&Arc<ModelTokenizer>> {
        self.text.as_ref()
    }

    /// Returns the root of exact chains in this request namespace.
    pub fn root(&self, keys: RequestNamespace<'_>) -> PrefixId {
        self.namespace.root(self.seed, keys)
    }

    /// Resolves a chat request from its whole body.
    pub fn resolve_chat(&self, body: &[u8], inputs: ExtraPromptInputs<'_>) -> Prompt {
        self.resolve_conversation(ChatEndpoint::Chat, body, (inputs, None)).prompt
    }

    /// Resolves a `/v1/messages` request from its whole body.
    pub fn resolve_messages(&self, body: &[u8], inputs: ExtraPromptInputs<'_>) -> Prompt {
        self.resolve_conversation(ChatEndpoint::Messages, body, (inputs, None)).prompt
    }

    /// Resolves a `/v1/responses` request from its whole body.
    pub fn resolve_responses(&self, body: &[u8], inputs: ExtraPromptInputs<'_>) -> Prompt {
        self.resolve_conversation(ChatEndpoint::Responses, body, (inputs, None)).prompt
    }

    /// Converts a request to this model's chat request. Returns `None` if it already is a chat request.
    pub fn convert(&self, endpoint: ChatEndpoint, body: &[u8]) -> Option<Result<ConvertedRequest, PrefixError>> {
        let traits = self.text().map(|text| text.template_traits()).unwrap_or_default();
        conversion::convert(endpoint, body, traits)
    }

    /// Converts a request to this model's chat request and parses it.
    pub fn chat_request(&self, endpoint: ChatEndpoint, body: &[u8]) -> Result<ChatBody, PrefixError> {
        self.convert(endpoint, body).map_or_else(|| ChatBody::parse(body), |converted| converted?.chat())
    }

    /// Resolves a conversation's request from its whole body, reusing the checkpoint `known` of an earlier prompt
    /// with the same beginning as far as it applies.
    pub fn resolve_conversation(
        &self,
        endpoint: ChatEndpoint,
        body: &[u8],
        (asked, known): (ExtraPromptInputs<'_>, Option<&TokenCheckpoint>),
    ) -> ResolvedPrompt {
        match self.convert(endpoint, body).transpose() {
            Ok(None) => self.resolve_body((endpoint.call_order(), body), (asked, known)),
            Ok(Some(converted)) => self.resolve_converted(&converted, (asked, known)),
            Err(error) => self.resolve_rejected(body, &error, asked),
        }
    }

    /// Resolves a converted request of a conversation, reusing the checkpoint as far as it applies.
    pub fn resolve_converted(
        &self,
        converted: &ConvertedRequest,
        (asked, known): (ExtraPromptInputs<'_>, Option<&TokenCheckpoint>),
    ) -> ResolvedPrompt {
        self.resolve_body((converted.call_order(), converted.body()), (asked, known))
    }

    /// Resolves a request whose token ids cannot be predicted, by its whole body.
    pub fn resolve_rejected(&self, body: &[u8], error: &PrefixError, inputs: ExtraPromptInputs<'_>) -> ResolvedPrompt {
        ResolvedPrompt {
            prompt: self.fallback_prompt(body, error, inputs.keys),
            reused_tokens: Tokens::ZERO,
            next_checkpoint: None,
        }
    }

    fn resolve_body(
        &self,
        (order, body): (CallFieldOrder, &[u8]),
        (asked, known): (ExtraPromptInputs<'_>, Option<&TokenCheckpoint>),
    ) -> ResolvedPrompt {
        match self.tokenize_chat((order, body), asked.now, known) {
            Ok(TokenizedPrompt { ids, reused_tokens: known, next_checkpoint: next }) => ResolvedPrompt {
                prompt: self.exact_prompt(ids, asked.keys),
                reused_tokens: known,
                next_checkpoint: next,
            },
            Err(error) => self.resolve_rejected(body, &error, asked),
        }
    }

    /// Resolves a completion request from its whole body: one prompt, or one per item of a batch; never none.
    pub fn resolve_completion(&self, body: &[u8], inputs: ExtraPromptInputs<'_>) -> Vec<Prompt> {
        match self.completion_ids(body) {
            Ok(batch) => batch.into_iter().map(|ids| self.exact_prompt(ids, inputs.keys)).collect(),
            Err(error) => vec![self.fallback_prompt(body, &error, inputs.keys)],
        }
    }

    /// Builds a prompt from known token ids.
    pub fn exact_prompt(&self, ids: Vec<u32>, keys: RequestNamespace<'_>) -> Prompt {
        let chain = PrefixChain::over_tokens(self.root(keys), self.seed, self.block_size, &ids);
        Prompt { content: PromptContent::Tokens(ids), chain, identity: PromptIdentity::Exact, detail: None }
    }

    /// Builds a prompt from the canonical bytes of its request.
    pub fn fallback_prompt(&self, body: &[u8], error: &PrefixError, keys: RequestNamespace<'_>) -> Prompt {
        let detail: String = error.to_string().chars().take(MAX_DETAIL_CHARS).collect();
        let bytes = canonical_bytes(body, self.max_canonical_bytes());
        self.prompt_of_bytes(&bytes, (fallback_reason(error, body), detail.into()), keys)
    }

    /// Builds the prompt of a chat request for a model without a tokenizer from the request's top-level fields: their
    /// names and the byte ranges of their values; `layout` says what is known of the white space in them. `body` must be
    /// valid JSON. Hashes only what is new since `known`, where the request continues it. The second value serves the
    /// request that continues this one.
    pub fn prompt_without_tokenizer<'n>(
        &self,
        body: &[u8],
        fields: impl Iterator<Item = (Cow<'n, str>, Range<usize>)>,
        (keys, known, layout): (RequestNamespace<'_>, Option<KnownConversation<'_>>, LayoutOf<'_, '_>),
    ) -> (Prompt, Option<BytesCheckpoint>) {
        let (limit, reason) = (self.max_canonical_bytes(), FallbackReason::NoTokenizer);
        let detail = || NO_TOKENIZER.to_string().into();
        let Some(fields) = CanonicalFields::find(body, fields) else {
            return (self.prompt_of_bytes(&canonical_bytes(body, limit), (reason, detail()), keys), None);
        };
        let root = self.bytes_namespace.root(self.seed, keys);
        let known = known.filter(|known| known.is_continued(root, (&fields, body)));
        // The canonical bytes after the last whole block that is known.
        let (ids, (bytes, end)) = match known {
            Some(KnownConversation { checkpoint, end, .. }) => {
                let hashed = checkpoint.ids.len() * self.bytes_per_block();
                let rest = limit.saturating_sub(hashed);
                (&checkpoint.ids[..], fields.canonical_after(body, (checkpoint.tail.clone(), end), (layout, rest)))
            }
            None => (&[][..], fields.canonical(body, layout, limit)),
        };
        let chain = PrefixChain::over_more_bytes((root, ids), self.seed, self.block_size, &bytes);
        let checkpoint = end.map(|end| {
            let (blocks, block) = (end / self.bytes_per_block(), self.bytes_per_block());
            let ids = chain.ids[..ids.len() + blocks].into();
            BytesCheckpoint { root, ids, tail: bytes[blocks * block..end].to_vec(), fields }
        });
        let identity = PromptIdentity::Fallback(reason);
        (Prompt { content: PromptContent::Unknown, chain, identity, detail: Some(detail()) }, checkpoint)
    }

    /// Returns whether [`Self::prompt_without_tokenizer`] would hash only what is new since `known`. Compares the fields
    /// before the conversation.
    pub fn continues<'n>(
        &self,
        (body, fields): (&[u8], impl Iterator<Item = (Cow<'n, str>, Range<usize>)>),
        keys: RequestNamespace<'_>,
        known: KnownConversation<'_>,
    ) -> bool {
        let root = self.bytes_namespace.root(self.seed, keys);
        CanonicalFields::find(body, fields).is_some_and(|fields| known.is_continued(root, (&fields, body)))
    }

    fn bytes_per_block(&self) -> usize {
        (self.block_size.0 * PrefixChain::BYTES_PER_TOKEN) as usize
    }

    fn max_canonical_bytes(&self) -> usize {
        usize::try_from(self.limits.rendered_bytes.0).unwrap_or(usize::MAX)
    }

    fn prompt_of_bytes(
        &self,
        bytes: &[u8],
        (reason, detail): (FallbackReason, Box<str>),
        keys: RequestNamespace<'_>,
    ) -> Prompt {
        let root = self.bytes_namespace.root(self.seed, keys);
        let chain = PrefixChain::over_bytes(root, self.seed, self.block_size, bytes);
        Prompt {
            content: PromptContent::Unknown,
            chain,
            identity: PromptIdentity::Fallback(reason),
            detail: Some(detail),
        }
    }

    pub(crate) fn model_tokenizer(&self) -> Result<&ModelTokenizer, PrefixError> {
        self.text.as_deref().ok_or(NO_TOKENIZER)
    }

    fn tokenize_chat(
        &self,
        (order, body): (CallFieldOrder, &[u8]),
        now: WallTime,
        checkpoint: Option<&TokenCheckpoint>,
    ) -> Result<TokenizedPrompt, PrefixError> {
        let text = self.model_tokenizer()?;
        text.encode_chat_from_checkpoint(&ChatBody::parse(body)?.with_call_order(order), now, checkpoint)
    }

    /// Returns the token ids of each prompt of a completion request: one, or one per item of a batch.
    pub fn completion_ids(&self, body: &[u8]) -> Result<Vec<Vec<u32>>, PrefixError> {
        let body = CompletionBody::parse(body)?;
        let special = if body.adds_special_tokens() { SpecialTokens::With } else { SpecialTokens::Without };
        let prompts = body.prompts(self.limits.prompts)?.into_iter();
        prompts
            .map(|prompt| match prompt {
                CompletionPrompt::Ids(ids) => Ok(ids),
                CompletionPrompt::Text(text) => self.model_tokenizer()?.encode(&text, special),
            })
            .collect()
    }
}

/// What the canonical bytes of a request leave for the request that continues it: their blocks up to the last message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BytesCheckpoint {
    root: PrefixId,
    ids: Vec<PrefixId>,
    /// Canonical bytes after the last whole block.
    tail: Vec<u8>,
    fields: CanonicalFields,
}

impl BytesCheckpoint {
    /// Returns the memory that it takes, in bytes.
    pub fn memory_bytes(&self) -> usize {
        size_of::<Self>() + size_of_val(&self.ids[..]) + self.tail.len()
    }
}

/// An earlier request of the conversation, whose body has the same bytes up to the end of its last message.
#[derive(Clone, Copy, Debug)]
pub struct KnownConversation<'a> {
    /// Its body.
    pub body: &'a [u8],
    /// What its canonical bytes left.
    pub checkpoint: &'a BytesCheckpoint,
    /// Offset after its last message.
    pub end: usize,
}

impl KnownConversation<'_> {
    fn is_continued(&self, root: PrefixId, (fields, body): (&CanonicalFields, &[u8])) -> bool {
        self.checkpoint.root == root && fields.continues(body, (&self.checkpoint.fields, self.body), self.end)
    }
}

/// Returns the error's label. JSON errors are inspected further, because serde keeps only their text.
fn fallback_reason(error: &PrefixError, body: &[u8]) -> FallbackReason {
    match error {
        PrefixError::Body(error) if error.to_string().contains(crate::template_value::UNSUPPORTED_NUMBER) => {
            FallbackReason::UnsupportedNumber
        }
        PrefixError::Body(_) if has_lone_surrogate(body) => FallbackReason::LoneSurrogate,
        other => other.reason(),
    }
}

/// Returns whether some `\uXXXX` escape is a lone surrogate.
fn has_lone_surrogate(body: &[u8]) -> bool {
    let unit = |at: usize| -> Option<u16> {
        let digits = body.get(at..at + 6)?.strip_prefix(b"\\u")?;
        u16::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
    };
    let mut at = 0;
    while at + 1 < body.len() {
        if body[at] != b'\\' {
            at += 1;
            continue;
        }
        match (unit(at), unit(at + 6)) {
            (Some(0xd800..=0xdbff), Some(0xdc00..=0xdfff)) => at += 12,
            (Some(0xd800..=0xdfff), _) => return true,
            _ => at += 2,
        }
    }
    false
}

#[cfg(test)]
mod tests;
