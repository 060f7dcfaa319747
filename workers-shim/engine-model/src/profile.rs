//! Speeds and sizes of an engine. Read from a file; call `check` before use.

use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use vocabulary::{Bytes, Micros};

use crate::EngineBuildError;

/// Speeds and capacities of one engine; the default is small and fast. Times are engine time, before any speed-up.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug, SmartDefault)]
#[serde(default, deny_unknown_fields)]
pub struct EngineProfile {
    /// Prompt tokens computed per second.
    #[default(20_000.0)]
    pub prefill_tokens_per_second: f64,
    /// Fixed cost of every step.
    #[serde(with = "vocabulary::micros_with_unit")]
    #[default(Micros(500))]
    pub step_overhead: Micros,
    /// Duration of a decode step with one request.
    #[serde(with = "vocabulary::micros_with_unit")]
    #[default(Micros(10_000))]
    pub decode_step: Micros,
    /// Additional time per decode step for each further running request.
    #[serde(with = "vocabulary::micros_with_unit")]
    #[default(Micros(200))]
    pub decode_step_per_request: Micros,
    /// Tokens per block.
    #[default(16)]
    pub block_size: u32,
    /// Number of blocks in the pool.
    #[default(4096)]
    pub num_gpu_blocks: u32,
    /// Maximum number of running requests.
    #[default(64)]
    pub max_num_seqs: u32,
    /// Maximum number of waiting requests.
    #[default(4096)]
    pub max_queue: u32,
    /// Token budget of a step; longer prompts are split into chunks.
    #[default(2048)]
    pub max_num_batched_tokens: u32,
    /// Maximum length of prompt and answer together.
    #[default(32_768)]
    pub max_model_len: u32,
    /// Default answer length of a chat request.
    #[default(128)]
    pub default_max_tokens: u32,
    /// KV bytes per token.
    #[serde(with = "vocabulary::bytes_with_unit")]
    #[default(Bytes(131_072))]
    pub kv_size_per_token: Bytes,
    /// Bytes per second of incoming KV transfers.
    #[serde(with = "vocabulary::bandwidth_with_unit")]
    #[default(5e9)]
    pub link_bandwidth: f64,
    /// Fixed cost of a transfer.
    #[serde(with = "vocabulary::micros_with_unit")]
    #[default(Micros(2_000))]
    pub link_latency: Micros,
    /// How long blocks are held for a consumer.
    #[serde(with = "vocabulary::micros_with_unit")]
    #[default(Micros(30_000_000))]
    pub kv_lease_duration: Micros,
    /// How long a consumer holds prompt and answer for the next turn's producer.
    #[serde(with = "vocabulary::micros_with_unit")]
    #[default(Micros(480_000_000))]
    pub reverse_pull_lease_duration: Micros,
    /// How long a consumer tries to reach a producer that does not answer.
    #[serde(with = "vocabulary::micros_with_unit")]
    #[default(Micros(18_800_000))]
    pub peer_timeout: Micros,
}

impl EngineProfile {
    /// Checks that all values are in range.
    pub fn check(&self) -> Result<(), EngineBuildError> {
        let rules = [
            ("prefill_tokens_per_second", self.prefill_tokens_per_second > 0.0, "positive"),
            ("link_bandwidth", self.link_bandwidth > 0.0, "positive"),
            ("decode_step", self.decode_step.0 > 0, "positive"),
            ("block_size", (1..=4096).contains(&self.block_size), "1 to 4096"),
            ("num_gpu_blocks", (2..=1 << 24).contains(&self.num_gpu_blocks), "2 to 16777216"),
            ("max_num_seqs", self.max_num_seqs > 0, "positive"),
            ("max_queue", self.max_queue > 0, "positive"),
            ("max_num_batched_tokens", self.max_num_batched_tokens >= self.max_num_seqs, "at least max_num_seqs"),
            ("max_model_len", self.max_model_len > 1, "at least 2"),
            ("max_model_len", self.max_model_len <= self.capacity(), "at most block_size times num_gpu_blocks"),
            ("default_max_tokens", self.default_max_tokens > 0, "positive"),
        ];
        match rules.into_iter().find(|(_, holds, _)| !holds) {
            Some((field, _, must)) => Err(EngineBuildError::Profile { field, must }),
            None => Ok(()),
        }
    }

    /// Returns how many tokens of KV fit.
    pub fn capacity(&self) -> u32 {
        self.block_size.saturating_mul(self.num_gpu_blocks)
    }

    /// Returns the duration of a step that computes `prefill` prompt tokens and one token for each of `decodes`
    /// requests.
    pub fn step_time(&self, prefill: u32, decodes: u32) -> Micros {
        let mut time = self.step_overhead + micros(f64::from(prefill) / self.prefill_tokens_per_second);
        if decodes > 0 {
            time += self.decode_step + self.decode_step_per_request * u64::from(decodes - 1);
        }
        time
    }

    /// Returns how long `blocks` blocks occupy the link, without latency.
    pub fn link_time(&self, blocks: u32) -> Micros {
        micros(self.kv_bytes(blocks).0 as f64 / self.link_bandwidth)
    }

    /// Returns the KV bytes of `blocks` blocks.
    pub fn kv_bytes(&self, blocks: u32) -> Bytes {
        self.kv_size_per_token * u64::from(self.block_size) * u64::from(blocks)
    }
}

fn micros(seconds: f64) -> Micros {
    Micros((seconds * 1e6).ceil() as u64)
}
