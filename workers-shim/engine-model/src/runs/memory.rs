//! What an engine can be told of its memory from outside.

use vocabulary::Tokens;

/// How much fits.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sizes {
    /// Tokens of KV in device memory.
    pub device: Tokens,
    /// Tokens of KV in the host tier; 0 for none.
    pub host: Tokens,
    /// Tokens a second that come back from the host tier.
    pub host_tokens_per_second: f64,
}

/// What of a prompt lies where, when it is asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Memory {
    /// Leading tokens in device memory.
    pub device: Tokens,
    /// Leading tokens in device memory or the host tier.
    pub with_host: Tokens,
}
