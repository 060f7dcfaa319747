//! Engines' KV events: one follower a worker finds its streams, hears them, asks for what was missed, and keeps the
//! residency index true to them.

mod discovery;
mod follower;
mod imprints;
mod log;
mod replay;
mod shared;
mod sources;

pub use discovery::EventSource;
pub(crate) use discovery::host_of;
pub(crate) use follower::{Following, follow};
pub(crate) use imprints::Exports;
pub use imprints::{Exported, Imprints, Wanted};
pub use log::EventCounts;
pub(crate) use log::EventLog;
pub use shared::{KnownBy, Served, SharedIndex};
pub use sources::{Doubt, SourceCount};
