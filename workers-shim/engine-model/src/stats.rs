//! What an engine counts, all since its start unless said otherwise.

use vocabulary::Bytes;

/// Counters and gauges.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct EngineStats {
    /// Requests in the batch now.
    pub running: u32,
    /// Requests that wait for memory or a place now.
    pub waiting: u32,
    /// Requests that wait for KV now.
    pub pulling: u32,
    /// Blocks in use now.
    pub blocks_used: u32,
    /// Prompt tokens by where their KV came from.
    pub prompt: PromptTokensBySource,
    /// Tokens generated.
    pub generated: u64,
    /// Requests by how they ended.
    pub finishes: FinishCounts,
    /// Requests thrown out of the batch for want of memory.
    pub preemptions: u64,
    /// KV that came in.
    pub transfers: TransferStats,
    /// Producer's leases that ended before a consumer came.
    pub expired_holds: u64,
    /// Steps.
    pub steps: u64,
}

/// Prompt tokens by where their KV came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PromptTokensBySource {
    /// Computed here.
    pub computed: u64,
    /// Found in the prefix cache.
    pub cached: u64,
    /// Pulled from a producer.
    pub external: u64,
}

/// Requests by how they ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FinishCounts {
    /// By the model or a stop token.
    pub stop: u64,
    /// By length.
    pub length: u64,
    /// By the client.
    pub abort: u64,
    /// By a failure.
    pub error: u64,
}

/// KV that came in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TransferStats {
    /// Transfers that were completed.
    pub done: u64,
    /// Their bytes.
    pub bytes: Bytes,
    /// Microseconds they took, together.
    pub micros: u64,
    /// Transfers that failed.
    pub failed: u64,
}
