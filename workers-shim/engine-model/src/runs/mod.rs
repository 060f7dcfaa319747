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

pub use engine::{Happening, Lent, Load, RunEngine, Started, Usage};
pub use lower::Restoring;
pub use memory::{DiskSpeed, DiskUse, Memory, Sizes};
pub use prompt::{Prefilled, Prompt, Ticket, Where};
pub use restore::{RestoreRule, Stored, Way};
pub use seconds::Seconds;
pub use shape::{Room, RunId, Runs};
pub use shared::{Around, SharedPool};
pub use timing::Timing;

#[cfg(test)]
mod tests;
