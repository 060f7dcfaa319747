//! Conversion of requests and text to tokens and back. Implemented by the caller, who has a tokenizer and a chat
//! template: the worker never parses a conversation itself, so two implementations cannot drift apart.

/// The API whose format a conversation has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ConversationApi {
    /// `/v1/chat/completions`, and the part of it that `/tokenize` accepts.
    Chat,
    /// `/v1/messages`.
    Messages,
    /// `/v1/responses`, with an earlier response already resolved: its items are part of the input.
    Responses,
}

/// Whether a text gets the special tokens that the tokenizer adds to plain prompts, such as begin-of-text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AddSpecialTokens {
    /// With special tokens.
    Framed,
    /// Without them.
    Bare,
}

/// Why a request cannot be converted to tokens. The client's fault.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct TextCodecError(pub String);

/// A model's tokenizer and chat template.
pub trait TextCodec: Send + Sync {
    /// Returns the tokens of a conversation's prompt, from the whole request body as the client sent it.
    fn encode_chat(&self, api: ConversationApi, body: &[u8]) -> Result<Vec<u32>, TextCodecError>;
    /// Returns the tokens of each prompt of a completion, from the whole request body: one prompt, or several in a
    /// batch.
    fn encode_completion(&self, body: &[u8]) -> Result<Vec<Vec<u32>>, TextCodecError>;
    /// Returns the tokens of a text; special tokens in it are recognised.
    fn encode(&self, text: &str, framing: AddSpecialTokens) -> Result<Vec<u32>, TextCodecError>;
    /// Returns the text of tokens without special ones. Bytes of incomplete characters become U+FFFD.
    fn decode(&self, tokens: &[u32]) -> String;
    /// Returns the number of tokens in the vocabulary.
    fn vocabulary_size(&self) -> u32;
    /// Returns the token that ends an answer.
    fn eos(&self) -> u32;
    /// Returns the special tokens, which are never generated as text. They may include the one that ends an answer.
    fn specials(&self) -> Vec<u32>;
}
