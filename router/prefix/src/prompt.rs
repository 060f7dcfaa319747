//! What `identify` returns: the prompt's ids or bytes, its chain of blocks, and how far they can be trusted.

use strum::{AsRefStr, Display, IntoStaticStr, VariantArray};
use vocabulary::Chain;

/// A prompt that has been identified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// What the chain was computed over.
    pub content: Content,
    /// The names of its prefixes at block boundaries.
    pub chain: Chain,
    /// Whether the chain is over the engine's own token ids.
    pub identity: Identity,
    /// What was met, for the log, when the identity is a fallback.
    pub detail: Option<Box<str>>,
}

/// What a chain was computed over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// The token ids the engine will see.
    Tokens(Vec<u32>),
    /// Those of them that follow the last whole block. The others are known by the chain only.
    Tail(Vec<u32>),
    /// Canonical bytes of the request; see the crate's documentation of `canonical`.
    Bytes(Vec<u8>),
}

/// How a prompt is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Identity {
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
pub enum Difference {
    /// The whole one has no token ids, for this reason.
    Refused(FallbackReason),
    /// It has more or fewer tokens.
    Length,
    /// It has other tokens.
    Tokens,
}

impl Difference {
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
    pub fn difference(&self, whole: &Self) -> Option<Difference> {
        let is_same = self.chain == whole.chain && self.tail() == whole.tail();
        match whole.identity {
            Identity::Fallback(reason) => Some(Difference::Refused(reason)),
            Identity::Exact if self.chain.tokens != whole.chain.tokens => Some(Difference::Length),
            Identity::Exact => (!is_same).then_some(Difference::Tokens),
        }
    }

    /// All token ids, when they are known.
    pub fn tokens(&self) -> Option<&[u32]> {
        match &self.content {
            Content::Tokens(ids) => Some(ids),
            Content::Tail(ids) if self.chain.ids.is_empty() => Some(ids),
            Content::Tail(_) | Content::Bytes(_) => None,
        }
    }

    /// The token ids after the last whole block.
    pub(crate) fn tail(&self) -> Option<&[u32]> {
        match &self.content {
            Content::Tokens(ids) => ids.get(self.chain.ids.len() * self.chain.block.0 as usize..),
            Content::Tail(ids) => Some(ids),
            Content::Bytes(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use vocabulary::{PrefixId, Seed, Tokens};

    use super::*;

    fn prompt(ids: &[u32]) -> Prompt {
        let chain = Chain::over_tokens(PrefixId(1), Seed(0), Tokens(4), ids);
        Prompt { content: Content::Tokens(ids.to_vec()), chain, identity: Identity::Exact, detail: None }
    }

    #[test]
    fn a_prompt_known_by_its_tail_is_the_whole_one_until_something_differs() {
        let whole = prompt(&[1, 2, 3, 4, 5, 6]);
        let tail = |ids: &[u32], tail: &[u32]| Prompt { content: Content::Tail(tail.to_vec()), ..prompt(ids) };
        assert_eq!(tail(&[1, 2, 3, 4, 5, 6], &[5, 6]).difference(&whole), None);
        assert_eq!(tail(&[1, 2, 3, 4, 5, 6], &[5, 7]).difference(&whole), Some(Difference::Tokens));
        assert_eq!(tail(&[1, 2, 9, 4, 5, 6], &[5, 6]).difference(&whole), Some(Difference::Tokens));
        assert_eq!(tail(&[1, 2, 3, 4, 5], &[5]).difference(&whole), Some(Difference::Length));
        let refused = Prompt { identity: Identity::Fallback(FallbackReason::TooLarge), ..prompt(&[1]) };
        assert_eq!(
            tail(&[1, 2, 3, 4, 5, 6], &[5, 6]).difference(&refused),
            Some(Difference::Refused(FallbackReason::TooLarge))
        );
    }
}
