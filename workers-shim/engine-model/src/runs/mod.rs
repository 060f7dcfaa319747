//! The engine by runs: what the engine by blocks does, at the cost of a prompt's runs instead of its tokens, and in
//! continuous time: a prompt's chunks and an answer's tokens are rates. For traces of millions of long prompts.
//!
//! It has no text and no events. `tests` hold its times and its cache against the engine by blocks.

mod disk;
mod engine;
mod lower;
mod memory;
mod pool;
mod prompt;
mod recency;
mod restore;
mod seconds;
mod shape;
mod shared;
mod tier;
mod timing;

pub use engine::{EngineBusyTime, OutboundTransfer, OutstandingLoad, PrefillStart, RunEngine, RunEngineEvent};
pub use lower::RestoreTime;
pub use memory::{DiskSpeed, DiskTraffic, MemorySizes, TierDepths};
pub use prompt::{DecodeLocation, PrefilledRequest, RunRequest, RunRequestId};
pub use restore::{RestoreChoice, RestoreRule, StoredPrefix};
pub use seconds::Seconds;
pub use shape::{KvSize, RunId, RunTree};
pub use shared::{EngineEnvironment, SharedPool};
pub use timing::EngineTiming;

#[cfg(test)]
mod tests;
