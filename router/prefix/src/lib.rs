//! Prompt identity: renders chat templates, tokenizes, and names every prefix of a prompt by a rolling block hash.
//!
//! Pure except for [`ModelTokenizer::load`], which reads the model's files: no clock (time is an argument), no network,
//! no randomness. It never guesses: if the token ids cannot be predicted with certainty, the prompt is identified by its
//! canonical bytes, together with the reason. It never panics on client input.

mod block_segments;
mod canonical;
mod chat;
mod chat_body_layout;
mod completion;
mod content_format;
mod conversation_cache;
mod conversation_checkpoint;
mod conversion;
mod conversion_traits;
mod decoder;
mod error;
mod extend;
mod fair_lru;
mod incremental_rendering;
mod message_scan;
mod model_files;
mod model_tokenizer;
mod prefix_stability;
mod prompt;
mod prompt_limits;
mod prompt_resolver;
mod python;
mod strftime;
mod template;
mod template_fault;
mod template_literals;
mod template_value;
mod to_json;
mod token_checkpoint;
mod tokenizer;

pub use canonical::{FieldLayout, LayoutOf};
pub use chat::{ChatBody, ChatEndpoint};
pub use chat_body_layout::ChatBodyLayout;
pub use conversation_cache::{ConversationCache, LookupTier};
pub use conversion::ConvertedRequest;
pub use decoder::TextDecoder;
pub use error::PrefixError;
pub use extend::{ConversationQuery, ExtendedPrompt};
pub use fair_lru::FairLru;
pub use model_files::{ModelFiles, ModelTokenizerSource};
pub use model_tokenizer::ModelTokenizer;
pub use prefix_stability::PrefixStability;
pub use prompt::{FallbackReason, IncrementalPromptMismatch, Prompt, PromptContent, PromptIdentity};
pub use prompt_limits::PromptWorkLimits;
pub use prompt_resolver::{
    BytesCheckpoint, ExtraPromptInputs, KnownConversation, PromptResolver, PromptResolverOptions, ResolvedPrompt,
};
pub use strftime::WallTime;
pub use template_fault::TemplateFault;
pub use token_checkpoint::{TokenCheckpoint, TokenizedPrompt};
pub use tokenizer::SpecialTokens;
