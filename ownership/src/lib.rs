//! The quorum that runs the ledger, and the view of it that this node reads.
//!
//! Nothing here decides who owns what; the ledger does. Nothing here waits on a client's request path.

mod backup;
mod chunks;
mod committed;
mod counters;
mod directory;
mod error;
mod failure;
mod flush;
mod frames;
mod log_store;
mod network;
mod node_folder;
mod raft;
mod replay;
mod snapshot_store;
mod snapshots;
mod ticker;
mod wal;
mod writer;

pub use backup::{Restored, SavedSnapshot, SnapshotReport, StateHash, restore, verify};
pub use consensus::{Quorum, View};
pub use counters::Readings;
pub use directory::{Directory, Options};
pub use error::{OwnershipError, SubmitError};
pub use ledger;
pub use node_folder::ClusterId;
pub use writer::Ticket;

#[cfg(test)]
mod damage_tests;
