//! How a worker looks from outside: what the fleet observes and the planner prices.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{Blocks, Bytes, DpRank, Incarnation, Micros, ModelId, Tokens, WorkerId};

/// What a worker is for.
#[derive(
    Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug, Default, strum::IntoStaticStr,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum WorkerRole {
    /// Computes prompts for others.
    Prefill,
    /// Generates answers, pulling prompts from prefill workers where that pays.
    Decode,
    /// Both.
    #[default]
    Hybrid,
}

impl WorkerRole {
    /// Whether clients' answers may be generated here.
    pub fn decodes(self) -> bool {
        self != WorkerRole::Prefill
    }

    /// The word for logs, metrics and the API.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// What is known of the blocks that a worker holds.
#[derive(
    Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug, Default, strum::IntoStaticStr,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum KvIndexState {
    /// Guessed from what was routed where.
    #[default]
    Fallback,
    /// Events were lost and not yet made good.
    Degraded,
    /// Every event of this process was seen.
    Exact,
}

impl KvIndexState {
    /// The word for logs, metrics and the API.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Where in a worker blocks lie.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// Device memory.
    Hbm,
    /// Host memory.
    Host,
    /// Local disk or a shared store.
    Disk,
}

/// The leading blocks of one prompt that one rank holds without a hole.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Overlap {
    /// Who holds them.
    pub worker: WorkerId,
    /// Which rank of it.
    pub rank: DpRank,
    /// In which memory. Blocks of a faster tier count for the slower one too.
    pub tier: Tier,
    /// How many chain blocks from the start.
    pub blocks: Blocks,
}

/// Whether a worker may be sent work.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug, Default, strum::IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum WorkerHealth {
    /// Not reached yet, or not lately.
    #[default]
    Unreachable,
    /// Answers its probes.
    Ready,
    /// Takes no new sessions.
    Draining,
}

impl WorkerHealth {
    /// The word for logs, metrics and the API.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// What a worker is doing now: the last scrape plus what this router dispatched and saw finished since.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize, Debug, Default)]
pub struct WorkerLoad {
    /// Requests in the batch.
    pub running: u32,
    /// Requests that wait for a place in it.
    pub waiting: u32,
    /// Prompt tokens that are still to be computed, waiting ones included.
    pub backlog: Tokens,
    /// KV blocks in use, 0 to 1.
    pub kv_usage: f64,
}

/// What a worker can hold.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug, Default)]
pub struct WorkerCapacity {
    /// Tokens of KV that fit into device memory; 0 when unknown.
    pub kv: Tokens,
    /// Tokens in one of the engine's own blocks; 0 when unknown.
    pub block: Tokens,
    /// Longest prompt and answer together; 0 when unknown.
    pub context: Tokens,
}

/// How fast a worker is, measured where it could be and from its profile otherwise.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize, Debug)]
pub struct EngineSpeed {
    /// Prompt tokens computed a second when nothing else runs.
    pub prefill_tokens_per_second: f64,
    /// Time of one decode step of a small batch.
    pub decode_step: Micros,
    /// What one more running request adds to everybody's decode step.
    pub decode_slowdown: Micros,
}

/// How KV comes to a worker from others.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct KvLink {
    /// Workers can exchange KV only when these are equal: connector, engine version, precision, block size.
    pub fabric: Arc<str>,
    /// Cost of any transfer, however small.
    pub fixed: Micros,
    /// Rate after that.
    pub bytes_per_second: f64,
    /// What it can bring.
    #[serde(default)]
    pub carries: KvLinkMode,
}

/// What can come over a link.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug, Default)]
#[serde(rename_all = "snake_case")]
pub enum KvLinkMode {
    /// The leading part of any prompt, ahead of its request or with it.
    #[default]
    Prefixes,
    /// A whole prompt with its request only, and the worker answers no other requests: SGLang's decode workers.
    Prompts,
    /// Prefixes, and nothing goes from there: Mooncake's consumers, which cannot be met.
    PrefixesIn,
}

impl KvLinkMode {
    /// Whether the worker answers prompts that it computed itself.
    pub fn computes_prompts(self) -> bool {
        self != Self::Prompts
    }

    /// Whether others can fetch from the worker.
    pub fn exports_kv(self) -> bool {
        self != Self::PrefixesIn
    }
}

/// One worker as the planner sees it.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct WorkerView {
    /// Its id.
    pub id: WorkerId,
    /// Its base URL.
    pub endpoint: Arc<str>,
    /// Which life of it.
    pub incarnation: Incarnation,
    /// What it is for.
    pub role: WorkerRole,
    /// The models and adapters it serves.
    pub models: Arc<[ModelId]>,
    /// Data-parallel ranks, at least 1.
    pub ranks: u16,
    /// Whether it takes work.
    pub health: WorkerHealth,
    /// What is known of its blocks.
    pub knowledge: KvIndexState,
    /// What it does now.
    pub load: WorkerLoad,
    /// What it can hold.
    pub capacity: WorkerCapacity,
    /// How fast it is.
    pub speeds: EngineSpeed,
    /// Bytes of KV a token takes there.
    pub kv_bytes_per_token: Bytes,
    /// How it receives KV; none when it cannot.
    pub link: Option<KvLink>,
}
