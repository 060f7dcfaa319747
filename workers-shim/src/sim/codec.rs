//! Requests and text to tokens and back, as the worker needs it. Implemented by whoever has a tokenizer and a chat
//! template: the worker never looks into a conversation, so that there is one reading of it and no second to drift.

/// Whose words a conversation comes in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ConversationApi {
    /// `/v1/chat/completions`, and what `/tokenize` takes of it.
    Chat,
    /// `/v1/messages`.
    Messages,
    /// `/v1/responses`, without a response to be followed: its items stand in the input.
    Responses,
}

/// Whether a text gets what the tokenizer puts around plain prompts, as begin-of-text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AddSpecialTokens {
    /// It does.
    Framed,
    /// Its own tokens only.
    Bare,
}

/// Why a request cannot be made into tokens. The client's fault.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct CodecError(pub String);

/// A model's tokenizer and chat template.
pub trait TextCodec: Send + Sync {
    /// The tokens of a conversation's prompt, by the request's whole body as the client sent it.
    fn encode_chat(&self, words: ConversationApi, body: &[u8]) -> Result<Vec<u32>, CodecError>;
    /// The tokens of each prompt of a completion's whole body: one, but for a batch.
    fn encode_completion(&self, body: &[u8]) -> Result<Vec<Vec<u32>>, CodecError>;
    /// A text's tokens; special tokens in it are recognised.
    fn encode(&self, text: &str, framing: AddSpecialTokens) -> Result<Vec<u32>, CodecError>;
    /// The text of tokens, special ones left out. Bytes that are no character yet become U+FFFD.
    fn decode(&self, tokens: &[u32]) -> String;
    /// Tokens in the vocabulary.
    fn vocabulary_size(&self) -> u32;
    /// The token that ends an answer.
    fn eos(&self) -> u32;
    /// Tokens that structure text and are never said, the ending one included or not.
    fn specials(&self) -> Vec<u32>;
}
