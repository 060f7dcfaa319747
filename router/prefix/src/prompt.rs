//! What `identify` returns: the prompt's ids or bytes, its chain of blocks, and how far they can be trusted.

use strum::{AsRefStr, Display, IntoStaticStr, VariantArray};
use vocabulary::PrefixChain;

/// A prompt that has been identified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// What the chain was computed over.
    pub content: PromptContent,
    /// The names of its prefixes at block boundaries.
    pub chain: PrefixChain,
    /// Whether the chain is over the engine's own token ids.
    pub identity: PromptIdentity,
    /// What was met, for the log, when the identity is a fallback.
    pub detail: Option<Box<str>>,
}

/// What a chain was computed over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PromptContent {
    /// The token ids the engine will see.
    Tokens(Vec<u32>),
    /// Those of them that follow the last whole block. The others are known by the chain only.
    Tail(Vec<u32>),
    /// Canonical bytes of the request; see the crate's documentation of `canonical`.
    Bytes(Vec<u8>),
}

/// How a prompt is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptIdentity {
    /// By token ids: engine events match exactly.
    Exact,
    /// By canonical bytes: ownership and affinity work, overlap with engine events does not.
    Fallback(FallbackReason),
}

/// Why a prompt is known by its bytes only. Bounded: it labels a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Display, AsRefStr, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum FallbackReason {
    /// No tokenizer was given for the model.
    NoTokenizer,
    /// The model has no chat template that can be rendered here.
    UnsupportedTemplate,
    /// The template refused the conversation or failed.
    TemplateError,
    /// The tokenizer failed.
    TokenizerError,
    /// Images, audio, video or embeddings.
    Multimodal,
    /// A string holds half of a surrogate pair, which is not text.
    LoneSurrogate,
    /// A number that Python and JSON print differently.
    UnsupportedNumber,
    /// An option of the request changes the ids in a way only the engine knows.
    UnsupportedOption,
    /// Over a limit on rendered size, template work or prompts a request.
    TooLarge,
    /// Not the JSON that the endpoint takes; the engine will say so.
    Malformed,
}

/// In what a prompt that was put together is not the whole one. Bounded: it labels a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PromptMismatch {
    /// The whole one has no token ids, for this reason.
    Refused(FallbackReason),
    /// It has more or fewer tokens.
    Length,
    /// It has other tokens.
    Tokens,
}

impl PromptMismatch {
    /// All of them, for metrics that start at zero.
    pub fn all() -> impl Iterator<Item = Self> {
        FallbackReason::VARIANTS.iter().copied().map(Self::Refused).chain([Self::Length, Self::Tokens])
    }

    /// The metric label: why the whole one was refused, or what is different.
    pub fn label(self) -> &'static str {
        match self {
            Self::Refused(reason) => reason.into(),
            Self::Length => "length",
            Self::Tokens => "tokens",
        }
    }
}

impl Prompt {
    /// In what this prompt differs from the same one computed as a whole.
    pub fn mismatch(&self, whole: &Self) -> Option<PromptMismatch> {
        let is_same = self.chain == whole.chain && self.tail() == whole.tail();
        match whole.identity {
            PromptIdentity::Fallback(reason) => Some(PromptMismatch::Refused(reason)),
            PromptIdentity::Exact if self.chain.tokens != whole.chain.tokens => Some(PromptMismatch::Length),
            PromptIdentity::Exact => (!is_same).then_some(PromptMismatch::Tokens),
        }
    }

    /// All token ids, when they are known.
    pub fn token_ids(&self) -> Option<&[u32]> {
        match &self.content {
            PromptContent::Tokens(ids) => Some(ids),
            PromptContent::Tail(ids) if self.chain.ids.is_empty() => Some(ids),
            PromptContent::Tail(_) | PromptContent::Bytes(_) => None,
        }
    }

    /// The token ids after the last whole block.
    pub(crate) fn tail(&self) -> Option<&[u32]> {
        match &self.content {
            PromptContent::Tokens(ids) => ids.get(self.chain.ids.len() * self.chain.block.0 as usize..),
            PromptContent::Tail(ids) => Some(ids),
            PromptContent::Bytes(_) => None,
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
        assert_eq!(tail(&[1, 2, 3, 4, 5, 6], &[5, 7]).mismatch(&whole), Some(PromptMismatch::Tokens));
        assert_eq!(tail(&[1, 2, 9, 4, 5, 6], &[5, 6]).mismatch(&whole), Some(PromptMismatch::Tokens));
        assert_eq!(tail(&[1, 2, 3, 4, 5], &[5]).mismatch(&whole), Some(PromptMismatch::Length));
        let refused = Prompt { identity: PromptIdentity::Fallback(FallbackReason::TooLarge), ..prompt(&[1]) };
        assert_eq!(
            tail(&[1, 2, 3, 4, 5, 6], &[5, 6]).mismatch(&refused),
            Some(PromptMismatch::Refused(FallbackReason::TooLarge))
        );
    }
}
