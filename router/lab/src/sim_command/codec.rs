//! Text codec of a simulated engine: converts requests as the router does, so that the router predicts exactly the
//! tokens that the worker computes.

use std::path::PathBuf;
use std::sync::Arc;

use prefix::{
    ChatEndpoint, FallbackReason, ModelTokenizer, ModelTokenizerSource, PrefixError, PromptResolver,
    PromptResolverOptions, PromptWorkLimits, SpecialTokens, WallTime,
};
use vocabulary::{HashSeed, ModelId, ModelNamespace, Tokens};
use workers_shim::sim::{AddSpecialTokens, ConversationApi, TextCodec, TextCodecError};

use proxy::catalog::built_in_text;

/// A model's tokenizer and template behind the conversions of all endpoints.
#[derive(Debug)]
pub struct ModelTextCodec {
    text: Arc<ModelTokenizer>,
    /// Converts requests; the prompt ids that it computes are not used here.
    identifier: PromptResolver,
    eos: u32,
}

impl ModelTextCodec {
    /// Loads the codec of a model folder; without one, of the built-in small model.
    pub fn load(folder: Option<PathBuf>) -> Result<Self, PrefixError> {
        let text = match folder {
            Some(folder) => ModelTokenizer::load(ModelTokenizerSource::Folder(folder))?,
            None => built_in_text()?,
        };
        let text = Arc::new(text);
        let namespace = ModelNamespace { model: ModelId::from("simulated"), revision: "".into(), tokenizer: "".into() };
        let identifier = PromptResolver::new(PromptResolverOptions {
            namespace,
            seed: HashSeed::default(),
            block_size: Tokens::ZERO,
            text: Some(text.clone()),
            limits: PromptWorkLimits::default(),
        });
        let eos = text.end_token_ids().first().copied().or_else(|| text.special_ids().next()).unwrap_or_default();
        Ok(Self { text, identifier, eos })
    }
}

impl TextCodec for ModelTextCodec {
    fn encode_chat(&self, api: ConversationApi, body: &[u8]) -> Result<Vec<u32>, TextCodecError> {
        let form = match api {
            ConversationApi::Chat => ChatEndpoint::Chat,
            ConversationApi::Messages => ChatEndpoint::Messages,
            ConversationApi::Responses => ChatEndpoint::Responses,
        };
        let now = WallTime { unix_seconds: unix_seconds() };
        let chat = self.identifier.chat_request(form, body);
        chat.and_then(|chat| self.text.encode_chat(&chat, now)).map_err(text_codec_error)
    }

    fn encode_completion(&self, body: &[u8]) -> Result<Vec<Vec<u32>>, TextCodecError> {
        self.identifier.completion_ids(body).map_err(text_codec_error)
    }

    fn encode(&self, text: &str, framing: AddSpecialTokens) -> Result<Vec<u32>, TextCodecError> {
        let special = match framing {
            AddSpecialTokens::Framed => SpecialTokens::With,
            AddSpecialTokens::Bare => SpecialTokens::Without,
        };
        self.text.encode(text, special).map_err(text_codec_error)
    }

    fn decode(&self, tokens: &[u32]) -> String {
        // Ids come from the engine itself, which generates only tokens of this vocabulary.
        self.text.decode(tokens, SpecialTokens::Without).unwrap_or_default()
    }

    fn vocabulary_size(&self) -> u32 {
        u32::try_from(self.text.vocab_size()).unwrap_or(u32::MAX)
    }

    fn eos(&self) -> u32 {
        self.eos
    }

    fn specials(&self) -> Vec<u32> {
        self.text.special_ids().collect()
    }
}

/// Returns the client's error for a request whose tokens cannot be predicted; a real engine may serve some of them.
fn text_codec_error(error: PrefixError) -> TextCodecError {
    let advice = match error.reason() {
        FallbackReason::Multimodal => "a simulated worker takes text only: send the text without it",
        FallbackReason::UnsupportedOption => "a simulated worker does not do that: leave it out",
        FallbackReason::UnsupportedNumber => "a simulated worker reads 64-bit numbers: send a smaller one, or text",
        FallbackReason::UnsupportedTemplate => {
            "start the worker with a --tokenizer-dir that contains a chat_template.jinja"
        }
        FallbackReason::TooLarge => "a simulated worker renders prompts of at most 16 MiB: send less",
        _ => return TextCodecError(error.to_string()),
    };
    TextCodecError(format!("{error}; {advice}"))
}

fn unix_seconds() -> i64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_secs()).unwrap_or_default()
}

#[cfg(test)]
mod tests;
