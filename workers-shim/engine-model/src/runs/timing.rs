//! How long an engine takes, as formulas over tokens.

use vocabulary::Tokens;

use crate::EngineProfile;

/// Speeds of one engine, in seconds.
///
/// - A prompt of n new tokens after c cached ones: `prefill_token * n + attention_pair * n * (c + n / 2) + chunk_overhead * chunks`.
/// - A decode step of a batch: `decode_step + context_token * context + decode_request * (requests - 1)`.
/// - A chunk with such a batch beside it: the chunk's part of the prompt, and of the decode step all but `step`, of
///   which `step_beside_chunk` is left.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct EngineTiming {
    /// A new token of a prompt.
    pub prefill_token: f64,
    /// Attention of a new token to one before it.
    pub attention_pair: f64,
    /// Tokens in a chunk.
    pub chunk_tokens: Tokens,
    /// What every chunk costs besides.
    pub chunk_overhead: f64,
    /// A decode step.
    pub decode_step: f64,
    /// What of it is left when a chunk is computed in the same step.
    pub step_beside_chunk: f64,
    /// What a token of context in the batch adds to a decode step.
    pub context_token: f64,
    /// What each further request adds to it.
    pub decode_request: f64,
}

impl EngineTiming {
    /// Of an engine whose profile knows no attention: time is linear in tokens and requests.
    pub fn of(profile: &EngineProfile) -> Self {
        let seconds = |micros: vocabulary::Micros| micros.0 as f64 / 1e6;
        Self {
            prefill_token: 1.0 / profile.prefill_tokens_per_second,
            attention_pair: 0.0,
            chunk_tokens: Tokens(u64::from(profile.step_tokens)),
            chunk_overhead: seconds(profile.step_overhead_us),
            decode_step: seconds(profile.step_overhead_us) + seconds(profile.decode_step_us),
            step_beside_chunk: seconds(profile.decode_step_us),
            context_token: 0.0,
            decode_request: seconds(profile.decode_slowdown_us),
        }
    }

    /// To compute `new` tokens after `cached` ones with nothing beside.
    pub fn prefill_time(&self, new: Tokens, cached: Tokens) -> f64 {
        let (n, c) = (new.0 as f64, cached.0 as f64);
        let chunks = new.0.div_ceil(self.chunk_tokens.0.max(1)) as f64;
        n * self.prefill_token + self.attention_pair * n * (c + n * 0.5) + self.chunk_overhead * chunks
    }

    /// What a batch adds to each step.
    pub fn batch_time(&self, requests: usize, context: u64) -> f64 {
        self.context_token * context as f64 + self.decode_request * requests.saturating_sub(1) as f64
    }
}
