//! From a request's bytes to a [`Prompt`]: by token ids where they can be foreseen, by canonical bytes otherwise.

use std::sync::Arc;

use smart_default::SmartDefault;
use vocabulary::{Bytes, Chain, Namespace, PrefixId, RootKeys, Seed, Tokens};

use crate::canonical::canonical;
use crate::chat::CallOrder;
use crate::completion::{CompletionBody, OnePrompt};
use crate::{
    ChatBody, ChatForm, Checkpoint, Content, Converted, FallbackReason, Identity, ModelText, PrefixError, Prompt,
    SpecialTokens, Tokenized, WallTime,
};

/// Characters of an error's text that are kept for the log.
const DETAIL_CHARS: usize = 300;

/// Bounds on what one request may cost here.
#[derive(Clone, Copy, Debug, SmartDefault)]
pub struct Limits {
    /// Bytes of a rendered prompt, and of canonical bytes.
    #[default(Bytes(16 << 20))]
    pub rendered: Bytes,
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

/// What an [`Identifier`] is made of.
#[derive(Clone, Debug)]
pub struct IdentifierOptions {
    /// The model; its `tokenizer` is replaced by the digest of `text`, or by nothing.
    pub namespace: Namespace,
    /// The cluster's seed.
    pub seed: Seed,
    /// Tokens of a chain block.
    pub block: Tokens,
    /// Tokenizer and template, when the operator gave them.
    pub text: Option<Arc<ModelText>>,
    /// Bounds.
    pub limits: Limits,
}

/// The identity side of one served model.
#[derive(Clone, Debug)]
pub struct Identifier {
    namespace: Namespace,
    bytes_namespace: Namespace,
    seed: Seed,
    block: Tokens,
    text: Option<Arc<ModelText>>,
    limits: Limits,
}

/// What a request adds to its body: the keys of its root, and the time for templates that print a date.
#[derive(Clone, Copy, Debug, Default)]
pub struct Asked<'a> {
    /// Adapter, salt and content.
    pub keys: RootKeys<'a>,
    /// Now.
    pub now: WallTime,
}

/// A prompt, and what helps with the next one.
#[derive(Debug)]
pub struct Identified {
    /// The prompt.
    pub prompt: Prompt,
    /// Tokens that a checkpoint knew already.
    pub known: Tokens,
    /// The checkpoint for the next prompt of this conversation; none where there can be none.
    pub next: Option<Checkpoint>,
}

impl Identifier {
    /// The identifier of one model. A block of 0 tokens counts as 16.
    pub fn new(options: IdentifierOptions) -> Self {
        let IdentifierOptions { mut namespace, seed, block, text, limits } = options;
        let bytes_namespace = Namespace { tokenizer: "".into(), ..namespace.clone() };
        namespace.tokenizer = text.as_ref().map_or_else(|| "".into(), |text| text.digest().clone());
        let block = if block == Tokens::ZERO { Tokens(16) } else { block };
        Self { namespace, bytes_namespace, seed, block, text, limits }
    }

    /// The namespace of exact chains, which engine events share.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Tokens of a chain block.
    pub fn block(&self) -> Tokens {
        self.block
    }

    /// The cluster's seed.
    pub fn seed(&self) -> Seed {
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
    pub fn chat(&self, body: &[u8], asked: Asked<'_>) -> Prompt {
        self.conversation(ChatForm::Chat, body, (asked, None)).prompt
    }

    /// Identifies a conversation's request by its whole body, as far as possible from what is `known` of an earlier
    /// prompt that began like it.
    pub fn conversation(
        &self,
        form: ChatForm,
        body: &[u8],
        (asked, known): (Asked<'_>, Option<&Checkpoint>),
    ) -> Identified {
        match self.converted(form, body).transpose() {
            Ok(None) => self.rendered_chat((form.call_order(), body), (asked, known)),
            Ok(Some(converted)) => self.converted_conversation(&converted, (asked, known)),
            Err(error) => self.refused(body, &error, asked),
        }
    }

    /// Identifies a conversation's request that has been converted already, likewise.
    pub fn converted_conversation(
        &self,
        converted: &Converted,
        (asked, known): (Asked<'_>, Option<&Checkpoint>),
    ) -> Identified {
        self.rendered_chat((converted.call_order(), converted.body()), (asked, known))
    }

    /// A request whose prompt cannot be foreseen, by its whole body.
    pub fn refused(&self, body: &[u8], error: &PrefixError, asked: Asked<'_>) -> Identified {
        Identified { prompt: self.fallback(body, error, asked.keys), known: Tokens::ZERO, next: None }
    }

    fn rendered_chat(
        &self,
        (order, body): (CallOrder, &[u8]),
        (asked, known): (Asked<'_>, Option<&Checkpoint>),
    ) -> Identified {
        match self.chat_ids((order, body), asked.now, known) {
            Ok(Tokenized { ids, known, next }) => Identified { prompt: self.exact(ids, asked.keys), known, next },
            Err(error) => self.refused(body, &error, asked),
        }
    }

    /// Identifies a completion request by its whole body: one prompt, or one for each of a batch; never none.
    pub fn completion(&self, body: &[u8], asked: Asked<'_>) -> Vec<Prompt> {
        match self.completion_ids(body) {
            Ok(batch) => batch.into_iter().map(|ids| self.exact(ids, asked.keys)).collect(),
            Err(error) => vec![self.fallback(body, &error, asked.keys)],
        }
    }

    /// A prompt whose token ids are already known.
    pub fn exact(&self, ids: Vec<u32>, keys: RootKeys<'_>) -> Prompt {
        let chain = Chain::over_tokens(self.root(keys), self.seed, self.block, &ids);
        Prompt { content: Content::Tokens(ids), chain, identity: Identity::Exact, detail: None }
    }

    /// A prompt known by the canonical bytes of its request.
    pub fn fallback(&self, body: &[u8], error: &PrefixError, keys: RootKeys<'_>) -> Prompt {
        let bytes = canonical(body, usize::try_from(self.limits.rendered.0).unwrap_or(usize::MAX));
        let root = self.bytes_namespace.root(self.seed, keys);
        let chain = Chain::over_bytes(root, self.seed, self.block, &bytes);
        let detail: String = error.to_string().chars().take(DETAIL_CHARS).collect();
        Prompt {
            content: Content::Bytes(bytes),
            chain,
            identity: Identity::Fallback(reason(error, body)),
            detail: Some(detail.into()),
        }
    }

    pub(crate) fn model_text(&self) -> Result<&ModelText, PrefixError> {
        self.text.as_deref().ok_or(PrefixError::Unforeseeable {
            reason: FallbackReason::NoTokenizer,
            detail: "no tokenizer is configured for this model",
        })
    }

    fn chat_ids(
        &self,
        (order, body): (CallOrder, &[u8]),
        now: WallTime,
        known: Option<&Checkpoint>,
    ) -> Result<Tokenized, PrefixError> {
        let text = self.model_text()?;
        text.encode_chat_from(&ChatBody::parse(body)?.with_call_order(order), now, known)
    }

    /// The token ids of each prompt of a completion request: one, or as many as its batch has.
    pub fn completion_ids(&self, body: &[u8]) -> Result<Vec<Vec<u32>>, PrefixError> {
        let body = CompletionBody::parse(body)?;
        let special = if body.adds_special_tokens() { SpecialTokens::With } else { SpecialTokens::Without };
        let prompts = body.prompts(self.limits.prompts)?.into_iter();
        prompts
            .map(|prompt| match prompt {
                OnePrompt::Ids(ids) => Ok(ids),
                OnePrompt::Text(text) => self.model_text()?.encode(&text, special),
            })
            .collect()
    }
}

/// The error's label; parse errors are looked at more closely, since serde keeps only their text.
fn reason(error: &PrefixError, body: &[u8]) -> FallbackReason {
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
