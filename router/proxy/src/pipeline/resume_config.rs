//! Section `[resume]`: which broken streams go on at another worker.

use serde::Deserialize;
use smart_default::SmartDefault;
use vocabulary::Tokens;

/// What may be done so that a stream can go on elsewhere.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct ResumeConfig {
    /// Whether any goes on; else all end with an error.
    #[default(true)]
    pub enabled: bool,
    /// Longest prompt whose engine is asked for token ids. Its first event holds those of the prompt, 6 bytes each, which costs
    /// first-token time; without them an answer can only be made again.
    #[default(Tokens(1 << 20))]
    pub max_prompt_tokens: Tokens,
}
