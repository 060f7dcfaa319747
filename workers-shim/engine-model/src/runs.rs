//! Run-level engine model: behaves like the block-level engine, but its cost depends on the number of runs in a prompt
//! instead of its tokens. Time is continuous: the chunks of a prompt and the tokens of an answer progress at rates. For
//! traces of millions of long prompts.
//!
//! It generates no text and no events. The tests compare its times and its cache with the block-level engine.

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
