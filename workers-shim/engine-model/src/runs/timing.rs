//! How long an engine takes, as formulas over tokens.

use vocabulary::Tokens;

use crate::Profile;

/// Speeds of one engine, in seconds.
///
/// - A prompt of n new tokens after c cached ones: `token * n + pair * n * (c + n / 2) + chunk_overhead * chunks`.
/// - A decode step of a batch: `step + context_token * context + request * (requests - 1)`.
/// - A chunk with such a batch beside it: the chunk's part of the prompt, and of the decode step all but `step`, of
///   which `step_beside_chunk` is left.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Timing {
    /// A new token of a prompt.
    pub token: f64,
    /// Attention of a new token to one before it.
    pub pair: f64,
    /// Tokens in a chunk.
    pub chunk: Tokens,
    /// What every chunk costs besides.
    pub chunk_overhead: f64,
    /// A decode step.
    pub step: f64,
    /// What of it is left when a chunk is computed in the same step.
    pub step_beside_chunk: f64,
    /// What a token of context in the batch adds to a decode step.
    pub context_token: f64,
    /// What each further request adds to it.
    pub request: f64,
}

impl Timing {
    /// Of an engine whose profile knows no attention: time is linear in tokens and requests.
    pub fn of(profile: &Profile) -> Self {
        let seconds = |micros: vocabulary::Micros| micros.0 as f64 / 1e6;
        Self {
            token: 1.0 / profile.prefill_tokens_per_second,
            pair: 0.0,
            chunk: Tokens(u64::from(profile.step_tokens)),
            chunk_overhead: seconds(profile.step_overhead_us),
            step: seconds(profile.step_overhead_us) + seconds(profile.decode_step_us),
            step_beside_chunk: seconds(profile.decode_step_us),
            context_token: 0.0,
            request: seconds(profile.decode_slowdown_us),
        }
    }

    /// To compute `new` tokens after `cached` ones with nothing beside.
    pub fn prefill(&self, new: Tokens, cached: Tokens) -> f64 {
        let (n, c) = (new.0 as f64, cached.0 as f64);
        let chunks = new.0.div_ceil(self.chunk.0.max(1)) as f64;
        n * self.token + self.pair * n * (c + n * 0.5) + self.chunk_overhead * chunks
    }

    /// What a batch adds to each step.
    pub fn batch(&self, requests: usize, context: u64) -> f64 {
        self.context_token * context as f64 + self.request * requests.saturating_sub(1) as f64
    }
}
