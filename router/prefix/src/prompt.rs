//! A resolved prompt: its ids or bytes, its block chain, and whether the engine's token ids are known.

use strum::{AsRefStr, Display, IntoStaticStr, VariantArray};
use vocabulary::PrefixChain;

/// A resolved prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Content that the chain was computed over.
    pub content: PromptContent,
    /// Hashes of its prefixes at block boundaries.
    pub chain: PrefixChain,
    /// Whether the chain is computed over the engine's own token ids.
    pub identity: PromptIdentity,
    /// Details for the log if the identity is a fallback.
    pub detail: Option<Box<str>>,
}

/// Content that a chain was computed over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PromptContent {
    /// Token ids that the engine will see.
    Tokens(Vec<u32>),
    /// Token ids after the last whole block; the blocks before are known only by the chain.
    Tail(Vec<u32>),
    /// No token ids: the chain is over canonical bytes of the request; see the `canonical` module.
    Unknown,
}

/// How a prompt is identified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptIdentity {
    /// By token ids: KV events of engines match exactly.
    Exact,
    /// By canonical bytes: ownership and affinity work, overlap with KV events does not.
    Fallback(FallbackReason),
}

/// Why a prompt is identified only by its bytes. A bounded set: it labels a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Display, AsRefStr, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum FallbackReason {
    /// The model has no tokenizer configured.
    NoTokenizer,
    /// The model has no chat template that can be rendered here.
    UnsupportedTemplate,
    /// The template rejected the conversation or failed.
    TemplateError,
    /// The tokenizer failed.
    TokenizerError,
    /// Images, audio, video or embeddings.
    Multimodal,
    /// A string contains a lone surrogate, which is not text.
    LoneSurrogate,
    /// A number that Python and JSON print differently.
    UnsupportedNumber,
    /// A request option changes the token ids in a way only the engine knows.
    UnsupportedOption,
    /// A limit on rendered size, template steps or prompts per request was exceeded.
    TooLarge,
    /// Not the JSON that the endpoint takes; the engine will reject it.
    Malformed,
}

/// How an incrementally resolved prompt differs from the fully computed one. A bounded set: it labels a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum IncrementalPromptMismatch {
    /// The full computation has no token ids, for this reason.
    Refused(FallbackReason),
    /// The number of tokens differs.
    Length,
    /// The token ids differ.
    Tokens,
}

impl IncrementalPromptMismatch {
    /// Returns all variants, for metrics that start at zero.
    pub fn all() -> impl Iterator<Item = Self> {
        FallbackReason::VARIANTS.iter().copied().map(Self::Refused).chain([Self::Length, Self::Tokens])
    }

    /// Returns the metric label: the reason of the full computation's fallback, or what differs.
    pub fn label(self) -> &'static str {
        match self {
            Self::Refused(reason) => reason.into(),
            Self::Length => "length_mismatch",
            Self::Tokens => "token_mismatch",
        }
    }
}

impl Prompt {
    /// Compares this prompt with the same one computed in full; `None` if they are equal.
    pub fn mismatch(&self, whole: &Self) -> Option<IncrementalPromptMismatch> {
        let is_same = self.chain == whole.chain && self.tail() == whole.tail();
        match whole.identity {
            PromptIdentity::Fallback(reason) => Some(IncrementalPromptMismatch::Refused(reason)),
            PromptIdentity::Exact if self.chain.tokens != whole.chain.tokens => Some(IncrementalPromptMismatch::Length),
            PromptIdentity::Exact => (!is_same).then_some(IncrementalPromptMismatch::Tokens),
        }
    }

    /// Returns all token ids, if they are known.
    pub fn token_ids(&self) -> Option<&[u32]> {
        match &self.content {
            PromptContent::Tokens(ids) => Some(ids),
            PromptContent::Tail(ids) if self.chain.ids.is_empty() => Some(ids),
            PromptContent::Tail(_) | PromptContent::Unknown => None,
        }
    }

    /// Returns the token ids after the last whole block.
    pub(crate) fn tail(&self) -> Option<&[u32]> {
        match &self.content {
            PromptContent::Tokens(ids) => ids.get(self.chain.ids.len() * self.chain.block.0 as usize..),
            PromptContent::Tail(ids) => Some(ids),
            PromptContent::Unknown => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use vocabulary::{HashSeed, PrefixId, Tokens};

    use super::*;

    fn prompt(ids: &[u32]) -> Prompt {
        let chain = PrefixChain::over_tokens(PrefixId(1), HashSeed(0), Tokens(4), ids);
        Prompt { content: PromptContent::Tokens(ids.to_vec()), chain, identity: PromptIdentity::Exact, detail: None }
    }

    #[test]
    fn tail_only_prompt_matches_the_full_prompt_until_tokens_differ() {
        let whole = prompt(&[1, 2, 3, 4, 5, 6]);
        let tail = |ids: &[u32], tail: &[u32]| Prompt { content: PromptContent::Tail(tail.to_vec()), ..prompt(ids) };
        assert_eq!(tail(&[1, 2, 3, 4, 5, 6], &[5, 6]).mismatch(&whole), None);
        assert_eq!(tail(&[1, 2, 3, 4, 5, 6], &[5, 7]).mismatch(&whole), Some(IncrementalPromptMismatch::Tokens));
        assert_eq!(tail(&[1, 2, 9, 4, 5, 6], &[5, 6]).mismatch(&whole), Some(IncrementalPromptMismatch::Tokens));
        assert_eq!(tail(&[1, 2, 3, 4, 5], &[5]).mismatch(&whole), Some(IncrementalPromptMismatch::Length));
        let refused = Prompt { identity: PromptIdentity::Fallback(FallbackReason::TooLarge), ..prompt(&[1]) };
        assert_eq!(
            tail(&[1, 2, 3, 4, 5, 6], &[5, 6]).mismatch(&refused),
            Some(IncrementalPromptMismatch::Refused(FallbackReason::TooLarge))
        );
    }
}
