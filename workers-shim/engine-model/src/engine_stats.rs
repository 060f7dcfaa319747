//! Counters of an engine, since its start unless stated otherwise.

use vocabulary::Bytes;

/// Counters and gauges.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct EngineStats {
    /// Running requests now.
    pub running: u32,
    /// Requests waiting for memory or a slot now.
    pub waiting: u32,
    /// Requests waiting for KV now.
    pub pulling: u32,
    /// Blocks in use now.
    pub blocks_used: u32,
    /// Prompt tokens by the origin of their KV.
    pub prompt: PromptTokensBySource,
    /// Generated tokens.
    pub generated: u64,
    /// Finished requests by reason.
    pub finishes: FinishCounts,
    /// Requests preempted for lack of memory.
    pub preemptions: u64,
    /// Incoming KV.
    pub transfers: TransferStats,
    /// Leases of a producer that expired before a consumer came.
    pub expired_holds: u64,
    /// Steps.
    pub steps: u64,
}

/// Prompt tokens by the origin of their KV.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PromptTokensBySource {
    /// Computed here.
    pub computed: u64,
    /// Found in the prefix cache.
    pub cached: u64,
    /// Pulled from a producer.
    pub external: u64,
}

/// Finished requests by reason.
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

/// Incoming KV.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TransferStats {
    /// Completed transfers.
    pub done: u64,
    /// Their bytes.
    pub bytes: Bytes,
    /// Their total duration in microseconds.
    pub micros: u64,
    /// Failed transfers.
    pub failed: u64,
}
