//! Speeds and sizes of an engine. Read from a file; call `check` before use.

use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use vocabulary::{Bytes, Micros};

use crate::ModelError;

/// Speeds and capacities of one engine; the default is small and fast. Times are engine time, before any speed-up.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug, SmartDefault)]
#[serde(default, deny_unknown_fields)]
pub struct EngineProfile {
    /// Prompt tokens computed per second.
    #[default(20_000.0)]
    pub prefill_tokens_per_second: f64,
    /// Fixed cost of every step.
    #[default(Micros(500))]
    pub step_overhead_us: Micros,
    /// Duration of a decode step with one request.
    #[default(Micros(10_000))]
    pub decode_step_us: Micros,
    /// Additional time per decode step for each further running request.
    #[default(Micros(200))]
    pub decode_slowdown_us: Micros,
    /// Tokens per block.
    #[default(16)]
    pub block_tokens: u32,
    /// Number of blocks in the pool.
    #[default(4096)]
    pub blocks: u32,
    /// Maximum number of running requests.
    #[default(64)]
    pub max_running: u32,
    /// Maximum number of waiting requests.
    #[default(4096)]
    pub max_waiting: u32,
    /// Token budget of a step; longer prompts are split into chunks.
    #[default(2048)]
    pub step_tokens: u32,
    /// Maximum length of prompt and answer together.
    #[default(32_768)]
    pub context_tokens: u32,
    /// Default answer length of a chat request.
    #[default(128)]
    pub answer_tokens: u32,
    /// KV bytes per token.
    #[default(Bytes(131_072))]
    pub kv_bytes_per_token: Bytes,
    /// Rate of incoming KV transfers.
    #[default(5e9)]
    pub link_bytes_per_second: f64,
    /// Fixed cost of a transfer.
    #[default(Micros(2_000))]
    pub link_latency_us: Micros,
    /// How long blocks are held for a consumer.
    #[default(Micros(30_000_000))]
    pub lease_us: Micros,
    /// How long a consumer holds prompt and answer for the next turn's producer.
    #[default(Micros(480_000_000))]
    pub answer_lease_us: Micros,
    /// How long a consumer tries to reach a producer that does not answer.
    #[default(Micros(18_800_000))]
    pub dead_peer_us: Micros,
}

impl EngineProfile {
    /// Checks that all values are in range.
    pub fn check(&self) -> Result<(), ModelError> {
        let rules = [
            ("prefill_tokens_per_second", self.prefill_tokens_per_second > 0.0, "positive"),
            ("link_bytes_per_second", self.link_bytes_per_second > 0.0, "positive"),
            ("decode_step_us", self.decode_step_us.0 > 0, "positive"),
            ("block_tokens", (1..=4096).contains(&self.block_tokens), "1 to 4096"),
            ("blocks", (2..=1 << 24).contains(&self.blocks), "2 to 16777216"),
            ("max_running", self.max_running > 0, "positive"),
            ("max_waiting", self.max_waiting > 0, "positive"),
            ("step_tokens", self.step_tokens >= self.max_running, "at least max_running"),
            ("context_tokens", self.context_tokens > 1, "at least 2"),
            ("context_tokens", self.context_tokens <= self.capacity(), "at most block_tokens times blocks"),
            ("answer_tokens", self.answer_tokens > 0, "positive"),
        ];
        match rules.into_iter().find(|(_, holds, _)| !holds) {
            Some((field, _, must)) => Err(ModelError::Profile { field, must }),
            None => Ok(()),
        }
    }

    /// Returns how many tokens of KV fit.
    pub fn capacity(&self) -> u32 {
        self.block_tokens.saturating_mul(self.blocks)
    }

    /// Returns the duration of a step that computes `prefill` prompt tokens and one token for each of `decodes`
    /// requests.
    pub fn step_time(&self, prefill: u32, decodes: u32) -> Micros {
        let mut time = self.step_overhead_us + micros(f64::from(prefill) / self.prefill_tokens_per_second);
        if decodes > 0 {
            time += self.decode_step_us + self.decode_slowdown_us * u64::from(decodes - 1);
        }
        time
    }

    /// Returns how long `blocks` blocks occupy the link, without latency.
    pub fn link_time(&self, blocks: u32) -> Micros {
        micros(self.kv_bytes(blocks).0 as f64 / self.link_bytes_per_second)
    }

    /// Returns the KV bytes of `blocks` blocks.
    pub fn kv_bytes(&self, blocks: u32) -> Bytes {
        self.kv_bytes_per_token * u64::from(self.block_tokens) * u64::from(blocks)
    }
}

fn micros(seconds: f64) -> Micros {
    Micros((seconds * 1e6).ceil() as u64)
}
