//! Text to tokens and back, as the worker needs it. Implemented by whoever has a tokenizer.

use serde_json::Value;

/// A chat to be rendered. Borrowed from the request's body.
#[derive(Clone, Copy, Debug)]
pub struct ChatPrompt<'a> {
    /// OpenAI's message objects.
    pub messages: &'a [Value],
    /// OpenAI's tool objects.
    pub tools: Option<&'a [Value]>,
    /// How the prompt ends.
    pub ending: ChatEnding,
}

/// How a rendered chat ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ChatEnding {
    /// With the opening of an assistant's turn.
    #[default]
    Generate,
    /// In the middle of the last message, which is to be continued.
    Continue,
    /// After the last message.
    Closed,
}

/// Why a text cannot be made into tokens. The client's fault.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct CodecError(pub String);

/// A model's tokenizer and chat template.
pub trait TextCodec: Send + Sync {
    /// A chat's tokens.
    fn encode_chat(&self, chat: ChatPrompt<'_>) -> Result<Vec<u32>, CodecError>;
    /// A text's tokens; special tokens in it are recognised.
    fn encode(&self, text: &str) -> Result<Vec<u32>, CodecError>;
    /// The text of tokens, special ones left out. Bytes that are no character yet become U+FFFD.
    fn decode(&self, tokens: &[u32]) -> String;
    /// Tokens in the vocabulary.
    fn vocabulary_size(&self) -> u32;
    /// The token that ends an answer.
    fn eos(&self) -> u32;
    /// Tokens that structure text and are never said, the ending one included or not.
    fn specials(&self) -> Vec<u32>;
}
