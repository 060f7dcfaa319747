//! Run-level engine model: behaves like the block-level engine, but its cost depends on the number of runs in a prompt
//! instead of its tokens. Time is continuous: the chunks of a prompt and the tokens of an answer progress at rates. For
//! traces of millions of long prompts.
//!
//! It generates no text and no events. The tests compare its times and its cache with the block-level engine.

mod disk_tier;
mod ideal_shared_cache;
mod lru_list;
mod memory;
mod offload_tiers;
mod run_engine;
mod run_pool;
mod run_request;
mod run_tree;
mod seconds;
mod tier;
mod timing;

use vocabulary::Tokens;

pub use ideal_shared_cache::{IdealSharedCache, SharedEngineState};
pub use memory::{DiskSpeed, DiskTraffic, MemorySizes, PromptTierDepths};
pub use offload_tiers::RestoreTime;
pub use run_engine::{EngineBusyTime, OutgoingTransfer, OutstandingRequests, PrefillStart, RunEngine, RunRequestEvent};
pub use run_request::{DecodeLocation, PrefillHandoff, RunRequest, RunRequestId};
pub use run_tree::{KvSize, RunId, RunTree};
pub use seconds::Seconds;
pub use timing::EngineTiming;

/// A prefix in slower tiers, and the cost of loading it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct OffloadedPrefix {
    /// Leading tokens that are available, windows included.
    pub cached_until: Tokens,
    /// Leading tokens that are available or stored.
    pub stored_until: Tokens,
    /// Seconds until loading can start.
    pub wait_seconds: f64,
    /// Seconds per token of KV.
    pub seconds_per_token: f64,
}

/// One way to restore it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RestoreChoice {
    /// Leading tokens that are available after loading.
    pub loaded_until: Tokens,
    /// Size of the windows that are loaded with them, in token equivalents.
    pub windows: Tokens,
    /// Where computing starts; before `loaded_until` if windows are recomputed.
    pub compute_from: Tokens,
}

/// Chooses how a model restores prefixes.
pub trait RestoreRule: std::fmt::Debug + Send + Sync {
    /// Returns how to restore this prefix.
    fn choose(&self, stored: &OffloadedPrefix) -> RestoreChoice;
}

/// Loads everything that is stored, for models in which every token has its own KV.
#[derive(Clone, Copy, Debug)]
struct FullRestore;

impl RestoreRule for FullRestore {
    fn choose(&self, stored: &OffloadedPrefix) -> RestoreChoice {
        RestoreChoice { loaded_until: stored.stored_until, windows: Tokens::ZERO, compute_from: stored.stored_until }
    }
}

#[cfg(test)]
mod tests;
