//! Engines' KV events: one follower a worker finds its streams, hears them, asks for what was missed, and keeps the
//! residency index true to them.

mod discovery;
mod follower;
mod replay;
mod shared_index;
mod snapshots;
mod sources;
mod status;

pub use discovery::EventSource;
pub(crate) use discovery::host_of;
pub(crate) use follower::{FollowerEnvironment, follow};
pub use shared_index::{ChainBasis, ServedPrompts, SharedIndex};
pub(crate) use snapshots::SnapshotExporters;
pub use snapshots::{EncodedSnapshot, SnapshotProvider, SnapshotRequest};
pub use sources::{EventSourceCount, InexactReason};
pub use status::EventCounts;
pub(crate) use status::WorkerEventStatus;
