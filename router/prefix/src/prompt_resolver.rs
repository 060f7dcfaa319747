//! From a request's bytes to a [`Prompt`]: by token ids where they can be foreseen, by canonical bytes otherwise.

use std::sync::Arc;

use smart_default::SmartDefault;
use vocabulary::{Bytes, ChainNamespace, HashSeed, PrefixChain, PrefixId, RootKeys, Tokens};

use crate::canonical::canonical_bytes;
use crate::chat::CallFieldOrder;
use crate::completion::{CompletionBody, CompletionPrompt};
use crate::{
    ChatBody, ChatEndpoint, ConvertedRequest, FallbackReason, ModelText, PrefixError, Prompt, PromptContent,
    PromptIdentity, SpecialTokens, TokenCheckpoint, TokenizedPrompt, WallTime,
};

/// Characters of an error's text that are kept for the log.
const MAX_DETAIL_CHARS: usize = 300;

/// Bounds on what one request may cost here.
#[derive(Clone, Copy, Debug, SmartDefault)]
pub struct PromptLimits {
    /// Bytes of a rendered prompt, and of canonical bytes.
    #[default(Bytes(16 << 20))]
    pub rendered_bytes: Bytes,
    /// Instructions of the template engine a rendering.
    #[default(20_000_000)]
    pub template_steps: u64,
    /// Prompts of one completion request.
    #[default(1024)]
    pub prompts: usize,
    /// Memory for token ids of text segments seen before; 0 turns the cache off.
    #[default(Bytes(64 << 20))]
    pub segment_cache: Bytes,
}

/// What an [`PromptResolver`] is made of.
#[derive(Clone, Debug)]
pub struct PromptResolverOptions {
    /// The model; its `tokenizer` is replaced by the digest of `text`, or by nothing.
    pub namespace: ChainNamespace,
    /// The cluster's seed.
    pub seed: HashSeed,
    /// Tokens of a chain block.
    pub block_size: Tokens,
    /// Tokenizer and template, when the operator gave them.
    pub text: Option<Arc<ModelText>>,
    /// Bounds.
    pub limits: PromptLimits,
}

/// The identity side of one served model.
#[derive(Clone, Debug)]
pub struct PromptResolver {
    namespace: ChainNamespace,
    bytes_namespace: ChainNamespace,
    seed: HashSeed,
    block_size: Tokens,
    text: Option<Arc<ModelText>>,
    limits: PromptLimits,
}

/// What a request adds to its body: the keys of its root, and the time for templates that print a date.
#[derive(Clone, Copy, Debug, Default)]
pub struct PromptInputs<'a> {
    /// Adapter, salt and content.
    pub keys: RootKeys<'a>,
    /// Now.
    pub now: WallTime,
}

/// A prompt, and what helps with the next one.
#[derive(Debug)]
pub struct ResolvedPrompt {
    /// The prompt.
    pub prompt: Prompt,
    /// Tokens that a checkpoint knew already.
    pub reused_tokens: Tokens,
    /// The checkpoint for the next prompt of this conversation; none where there can be none.
    pub next_checkpoint: Option<TokenCheckpoint>,
}

impl PromptResolver {
    /// The identifier of one model. A block of 0 tokens counts as 16.
    pub fn new(options: PromptResolverOptions) -> Self {
        let PromptResolverOptions { mut namespace, seed, block_size: block, text, limits } = options;
        let bytes_namespace = ChainNamespace { tokenizer: "".into(), ..namespace.clone() };
        namespace.tokenizer = text.as_ref().map_or_else(|| "".into(), |text| text.digest().clone());
        let block_size = if block == Tokens::ZERO { Tokens(16) } else { block };
        Self { namespace, bytes_namespace, seed, block_size, text, limits }
    }

    /// The namespace of exact chains, which engine events share.
    pub fn namespace(&self) -> &ChainNamespace {
        &self.namespace
    }

    /// Tokens of a chain block.
    pub fn block(&self) -> Tokens {
        self.block_size
    }

    /// The cluster's seed.
    pub fn seed(&self) -> HashSeed {
        self.seed
    }

    /// Tokenizer and template, when there are any.
    pub fn text(&self) -> Option<&Arc<ModelText>> {
        self.text.as_ref()
    }

    /// The root of exact chains with these keys.
    pub fn root(&self, keys: RootKeys<'_>) -> PrefixId {
        self.namespace.root(self.seed, keys)
    }

    /// Identifies a chat request by its whole body.
    pub fn resolve_chat(&self, body: &[u8], asked: PromptInputs<'_>) -> Prompt {
        self.resolve_conversation(ChatEndpoint::Chat, body, (asked, None)).prompt
    }

    /// Identifies a conversation's request by its whole body, as far as possible from what is `known` of an earlier
    /// prompt that began like it.
    pub fn resolve_conversation(
        &self,
        form: ChatEndpoint,
        body: &[u8],
        (asked, known): (PromptInputs<'_>, Option<&TokenCheckpoint>),
    ) -> ResolvedPrompt {
        match self.convert(form, body).transpose() {
            Ok(None) => self.resolve_body((form.call_order(), body), (asked, known)),
            Ok(Some(converted)) => self.resolve_converted(&converted, (asked, known)),
            Err(error) => self.resolve_rejected(body, &error, asked),
        }
    }

    /// Identifies a conversation's request that has been converted already, likewise.
    pub fn resolve_converted(
        &self,
        converted: &ConvertedRequest,
        (asked, known): (PromptInputs<'_>, Option<&TokenCheckpoint>),
    ) -> ResolvedPrompt {
        self.resolve_body((converted.call_order(), converted.body()), (asked, known))
    }

    /// A request whose prompt cannot be foreseen, by its whole body.
    pub fn resolve_rejected(&self, body: &[u8], error: &PrefixError, asked: PromptInputs<'_>) -> ResolvedPrompt {
        ResolvedPrompt {
            prompt: self.fallback_prompt(body, error, asked.keys),
            reused_tokens: Tokens::ZERO,
            next_checkpoint: None,
        }
    }

    fn resolve_body(
        &self,
        (order, body): (CallFieldOrder, &[u8]),
        (asked, known): (PromptInputs<'_>, Option<&TokenCheckpoint>),
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

    /// Identifies a completion request by its whole body: one prompt, or one for each of a batch; never none.
    pub fn resolve_completion(&self, body: &[u8], asked: PromptInputs<'_>) -> Vec<Prompt> {
        match self.completion_ids(body) {
            Ok(batch) => batch.into_iter().map(|ids| self.exact_prompt(ids, asked.keys)).collect(),
            Err(error) => vec![self.fallback_prompt(body, &error, asked.keys)],
        }
    }

    /// A prompt whose token ids are already known.
    pub fn exact_prompt(&self, ids: Vec<u32>, keys: RootKeys<'_>) -> Prompt {
        let chain = PrefixChain::over_tokens(self.root(keys), self.seed, self.block_size, &ids);
        Prompt { content: PromptContent::Tokens(ids), chain, identity: PromptIdentity::Exact, detail: None }
    }

    /// A prompt known by the canonical bytes of its request.
    pub fn fallback_prompt(&self, body: &[u8], error: &PrefixError, keys: RootKeys<'_>) -> Prompt {
        let bytes = canonical_bytes(body, usize::try_from(self.limits.rendered_bytes.0).unwrap_or(usize::MAX));
        let root = self.bytes_namespace.root(self.seed, keys);
        let chain = PrefixChain::over_bytes(root, self.seed, self.block_size, &bytes);
        let detail: String = error.to_string().chars().take(MAX_DETAIL_CHARS).collect();
        Prompt {
            content: PromptContent::Bytes(bytes),
            chain,
            identity: PromptIdentity::Fallback(fallback_reason(error, body)),
            detail: Some(detail.into()),
        }
    }

    pub(crate) fn model_text(&self) -> Result<&ModelText, PrefixError> {
        self.text.as_deref().ok_or(PrefixError::Unresolvable {
            reason: FallbackReason::NoTokenizer,
            detail: "no tokenizer is configured for this model",
        })
    }

    fn tokenize_chat(
        &self,
        (order, body): (CallFieldOrder, &[u8]),
        now: WallTime,
        known: Option<&TokenCheckpoint>,
    ) -> Result<TokenizedPrompt, PrefixError> {
        let text = self.model_text()?;
        text.encode_chat_from_checkpoint(&ChatBody::parse(body)?.with_call_order(order), now, known)
    }

    /// The token ids of each prompt of a completion request: one, or as many as its batch has.
    pub fn completion_ids(&self, body: &[u8]) -> Result<Vec<Vec<u32>>, PrefixError> {
        let body = CompletionBody::parse(body)?;
        let special = if body.adds_special_tokens() { SpecialTokens::With } else { SpecialTokens::Without };
        let prompts = body.prompts(self.limits.prompts)?.into_iter();
        prompts
            .map(|prompt| match prompt {
                CompletionPrompt::Ids(ids) => Ok(ids),
                CompletionPrompt::Text(text) => self.model_text()?.encode(&text, special),
            })
            .collect()
    }
}

/// The error's label; parse errors are looked at more closely, since serde keeps only their text.
fn fallback_reason(error: &PrefixError, body: &[u8]) -> FallbackReason {
    match error {
        PrefixError::Body(error) if error.to_string().contains(crate::json_value::UNSUPPORTED_NUMBER) => {
            FallbackReason::UnsupportedNumber
        }
        PrefixError::Body(_) if has_lone_surrogate(body) => FallbackReason::LoneSurrogate,
        other => other.reason(),
    }
}

/// Whether some `\uXXXX` is half of a surrogate pair without its other half.
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
