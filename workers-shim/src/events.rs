//! KV events of engines. One follower per worker finds the worker's event streams, subscribes, requests replays of
//! missed events, and keeps the residency index up to date.

mod discovery;
mod follower;
mod replay;
mod shared_index;
mod snapshot_provider;
mod sources;

pub use discovery::EventSource;
pub(crate) use discovery::host_of;
pub use follower::BlockMappingResolver;
pub(crate) use follower::{FollowerEnvironment, follow};
pub use shared_index::{HashInputKind, SharedIndex, StepPromptChains};
pub(crate) use snapshot_provider::SnapshotExporters;
pub use snapshot_provider::{EncodedSnapshot, SnapshotProvider, SnapshotRequest};
pub(crate) use sources::WorkerEventStatus;
pub use sources::{EventCounts, EventSourceCount, InexactReason};
