//! Who is this prompt? Renders chat templates, tokenizes, and names every prefix by a rolling hash, in blocks.
//!
//! Pure but for [`ModelText::load`], which reads the model's files: no clock (the time is an argument), no network, no
//! randomness. It never guesses: where the token ids cannot be foreseen with certainty the prompt is identified by its
//! canonical bytes instead, and says why. It never panics on what a client sent.

mod canonical;
mod chat;
mod checkpoint;
mod completion;
mod content_format;
mod converted;
mod decoder;
mod error;
mod fair_lru;
mod folder;
mod grow;
mod heeded;
mod identify;
mod json_value;
mod kind;
mod layout;
mod model_text;
mod pieces;
mod prompt;
mod python;
mod scan;
mod strftime;
mod template;
mod template_fault;
mod to_json;
mod tokenizer;
mod trail;
mod trails;
mod window;

pub use chat::ChatBody;
pub use checkpoint::{TokenCheckpoint, TokenizedPrompt};
pub use converted::{ChatEndpoint, ConvertedRequest};
pub use decoder::TextDecoder;
pub use error::PrefixError;
pub use fair_lru::FairLru;
pub use folder::{ModelFiles, ModelTextSource};
pub use grow::{ConversationLookup, ExtendedPrompt};
pub use identify::{PromptInputs, PromptLimits, PromptResolver, PromptResolverOptions, ResolvedPrompt};
pub use kind::TemplateKind;
pub use layout::ChatLayout;
pub use model_text::ModelText;
pub use prompt::{FallbackReason, Prompt, PromptContent, PromptIdentity, PromptMismatch};
pub use strftime::WallTime;
pub use template_fault::TemplateFault;
pub use tokenizer::SpecialTokens;
pub use trails::{ConversationCache, LookupTier};
