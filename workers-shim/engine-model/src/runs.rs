//! The engine by runs: what the engine by blocks does, at the cost of a prompt's runs instead of its tokens, and in
//! continuous time: a prompt's chunks and an answer's tokens are rates. For traces of millions of long prompts.
//!
//! It has no text and no events. `tests` hold its times and its cache against the engine by blocks.

mod disk;
mod engine;
mod lru_list;
mod memory;
mod offload_tiers;
mod pool;
mod request;
mod restore;
mod run_tree;
mod seconds;
mod shared_pool;
mod tier;
mod timing;

pub use engine::{EngineBusyTime, OutboundTransfer, OutstandingLoad, PrefillStart, RunEngine, RunEngineEvent};
pub use memory::{DiskSpeed, DiskTraffic, MemorySizes, TierDepths};
pub use offload_tiers::RestoreTime;
pub use request::{DecodeLocation, PrefilledRequest, RunRequest, RunRequestId};
pub use restore::{RestoreChoice, RestoreRule, StoredPrefix};
pub use run_tree::{KvSize, RunId, RunTree};
pub use seconds::Seconds;
pub use shared_pool::{EngineEnvironment, SharedPool};
pub use timing::EngineTiming;

#[cfg(test)]
mod tests;
