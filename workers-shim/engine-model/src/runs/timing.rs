//! Durations of an engine's work, as formulas over tokens.

use vocabulary::Tokens;

use crate::EngineProfile;

/// Timing parameters of one engine, in seconds.
///
/// - A prompt of n new tokens after c cached ones:
///   `prefill_token * n + attention_pair * n * (c + n / 2) + chunk_overhead * chunks`.
/// - A decode step of a batch: `decode_step + context_token * context + decode_request * (requests - 1)`.
/// - A step with a chunk and a batch: the chunk's share of the prompt, and the decode step with `step_beside_chunk` in
///   place of `decode_step`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct EngineTiming {
    /// Each new token of a prompt.
    pub prefill_token: f64,
    /// Attention between a new token and one before it.
    pub attention_pair: f64,
    /// Tokens per chunk.
    pub chunk_tokens: Tokens,
    /// Overhead of each chunk.
    pub chunk_overhead: f64,
    /// A decode step.
    pub decode_step: f64,
    /// The part of `decode_step` that remains when a chunk is computed in the same step.
    pub step_beside_chunk: f64,
    /// Additional time per decode step for each token of context in the batch.
    pub context_token: f64,
    /// Additional time per decode step for each further request.
    pub decode_request: f64,
}

impl EngineTiming {
    /// Derives the parameters from a profile without attention costs: time is linear in tokens and requests.
    pub fn of(profile: &EngineProfile) -> Self {
        let seconds = |micros: vocabulary::Micros| micros.0 as f64 / 1e6;
        Self {
            prefill_token: 1.0 / profile.prefill_tokens_per_second,
            attention_pair: 0.0,
            chunk_tokens: Tokens(u64::from(profile.max_num_batched_tokens)),
            chunk_overhead: seconds(profile.step_overhead),
            decode_step: seconds(profile.step_overhead) + seconds(profile.decode_step),
            step_beside_chunk: seconds(profile.decode_step),
            context_token: 0.0,
            decode_request: seconds(profile.decode_step_per_request),
        }
    }

    /// Returns the time to compute `new` tokens after `cached` ones, if nothing else runs.
    pub fn prefill_time(&self, new: Tokens, cached: Tokens) -> f64 {
        let (n, c) = (new.0 as f64, cached.0 as f64);
        let chunks = new.0.div_ceil(self.chunk_tokens.0.max(1)) as f64;
        n * self.prefill_token + self.attention_pair * n * (c + n * 0.5) + self.chunk_overhead * chunks
    }

    /// Returns the time that a batch adds to each step.
    pub fn batch_time(&self, requests: usize, context: u64) -> f64 {
        self.context_token * context as f64 + self.decode_request * requests.saturating_sub(1) as f64
    }
}
