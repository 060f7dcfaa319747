//! The router's view of a worker: observed by the fleet, used by the planner for its cost estimates.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{Blocks, Bytes, DpRank, Incarnation, Micros, ModelId, Tokens, WorkerId};

/// Role of a worker in disaggregated serving.
#[derive(
    Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug, Default, strum::IntoStaticStr,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum WorkerRole {
    /// Computes prompts for other workers.
    Prefill,
    /// Generates answers, and pulls KV from prefill workers where that is cheaper.
    Decode,
    /// Prefill and decode.
    #[default]
    Hybrid,
}

impl WorkerRole {
    /// Returns whether this role generates answers for clients.
    pub fn decodes(self) -> bool {
        self != WorkerRole::Prefill
    }

    /// Returns the name used in logs, metrics and the API.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// How reliable the index of a worker's blocks is.
#[derive(
    Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug, Default, strum::IntoStaticStr,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum KvIndexState {
    /// Inferred from the requests that were routed to the worker.
    #[default]
    Approximate,
    /// KV events were lost and the index is not yet resynchronized.
    Degraded,
    /// Every KV event of this incarnation was received.
    Exact,
}

impl KvIndexState {
    /// Returns the name used in logs, metrics and the API.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Memory tier of a worker in which blocks are stored.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// Device memory (HBM).
    Hbm,
    /// Host memory.
    Host,
    /// Local disk or a shared store.
    Disk,
}

/// Leading blocks of one prompt that one rank holds without a gap.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Overlap {
    /// Worker that holds them.
    pub worker: WorkerId,
    /// Rank of that worker.
    pub rank: DpRank,
    /// Memory tier. Blocks of a faster tier also count for the slower ones.
    pub tier: Tier,
    /// Number of chain blocks from the start.
    pub blocks: Blocks,
}

/// Whether a worker accepts work.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug, Default, strum::IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum WorkerHealth {
    /// Not reached yet, or not recently.
    #[default]
    Unreachable,
    /// Answers its health probes.
    Ready,
    /// Accepts no new sessions.
    Draining,
}

impl WorkerHealth {
    /// Returns the name used in logs, metrics and the API.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Current load of a worker: the last scrape, plus what this router has dispatched and seen finish since then.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize, Debug, Default)]
pub struct WorkerLoad {
    /// Requests in the running batch.
    pub running: u32,
    /// Requests that wait for a place in the batch.
    pub waiting: u32,
    /// Prompt tokens not computed yet, including those of waiting requests.
    pub backlog: Tokens,
    /// Fraction of KV blocks in use, 0 to 1.
    pub kv_usage: f64,
}

impl WorkerLoad {
    /// Returns the number of all its requests. The sum of what an engine reports cannot wrap.
    pub fn requests(&self) -> u64 {
        u64::from(self.running) + u64::from(self.waiting)
    }
}

/// Capacity limits of a worker.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug, Default)]
pub struct WorkerCapacity {
    /// KV capacity of device memory, in tokens; 0 if unknown.
    pub kv: Tokens,
    /// Tokens per engine block; 0 if unknown.
    pub block: Tokens,
    /// Maximum length of prompt and answer together; 0 if unknown.
    pub context: Tokens,
}

/// Speed of a worker: measured where possible, otherwise from its profile.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize, Debug)]
pub struct EngineSpeed {
    /// Prompt tokens computed per second on an otherwise idle worker.
    pub prefill_tokens_per_second: f64,
    /// Duration of one decode step of a small batch.
    pub decode_step: Micros,
    /// Increase of every request's decode step per additional running request.
    pub decode_slowdown: Micros,
}

/// How a worker receives KV from other workers.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct KvLink {
    /// Compatibility key (connector, engine version, precision, block size). Workers exchange KV only if it is equal.
    pub fabric: Arc<str>,
    /// Fixed time of any transfer.
    pub fixed: Micros,
    /// Transfer rate after the fixed time.
    pub bytes_per_second: f64,
    /// Which KV the link can transfer.
    #[serde(default)]
    pub carries: KvLinkCapability,
}

/// Which KV a link can transfer.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug, Default)]
#[serde(rename_all = "snake_case")]
pub enum KvLinkCapability {
    /// The leading part of any prompt, before its request or with it.
    #[default]
    Prefixes,
    /// Only a whole prompt together with its request, and the worker serves no other requests: SGLang's decode workers.
    Prompts,
    /// Prefixes into the worker but nothing out of it: Mooncake consumers, which other workers cannot connect to.
    PrefixesIn,
}

impl KvLinkCapability {
    /// Returns whether the worker answers prompts that it computed itself.
    pub fn computes_prompts(self) -> bool {
        self != Self::Prompts
    }

    /// Returns whether other workers can fetch KV from this worker.
    pub fn exports_kv(self) -> bool {
        self != Self::PrefixesIn
    }
}

/// One worker as the planner sees it.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct WorkerView {
    /// Id of the worker.
    pub id: WorkerId,
    /// Base URL.
    pub endpoint: Arc<str>,
    /// Current incarnation.
    pub incarnation: Incarnation,
    /// Role in disaggregated serving.
    pub role: WorkerRole,
    /// Models and adapters that it serves.
    pub models: Arc<[ModelId]>,
    /// Data-parallel ranks, at least 1.
    pub ranks: u16,
    /// Whether it accepts work.
    pub health: WorkerHealth,
    /// How reliable the index of its blocks is.
    #[serde(rename = "knowledge")]
    pub kv_index_state: KvIndexState,
    /// Current load.
    pub load: WorkerLoad,
    /// Capacity limits.
    pub capacity: WorkerCapacity,
    /// Speed.
    pub speeds: EngineSpeed,
    /// Bytes of KV per token on this worker.
    pub kv_bytes_per_token: Bytes,
    /// How it receives KV; `None` if it cannot.
    pub link: Option<KvLink>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_that_claims_the_most_requests_is_the_busiest() {
        let absurd = WorkerLoad { running: u32::MAX, waiting: 16, ..WorkerLoad::default() };
        let busy = WorkerLoad { running: 1_000, waiting: 1_000, ..WorkerLoad::default() };
        assert!(absurd.requests() > busy.requests());
    }
}
