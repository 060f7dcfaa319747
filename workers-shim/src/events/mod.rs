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
pub(crate) use follower::{FollowerEnvironment, follow};
pub(crate) use imprints::SnapshotExporters;
pub use imprints::{EncodedSnapshot, SnapshotProvider, SnapshotRequest};
pub use log::EventCounts;
pub(crate) use log::WorkerEventStatus;
pub use shared::{ChainBasis, ServedPrompts, SharedIndex};
pub use sources::{EventSourceCount, InexactReason};
