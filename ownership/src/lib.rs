//! The quorum that runs the ledger, and this node's read view of it.
//!
//! Nothing here decides who owns what; the ledger does. Nothing here waits on a client's request path.

mod access;
mod backup;
mod chunks;
mod command_queue;
mod command_writer;
mod counters;
mod data_dir_watch;
mod delivery;
mod directory;
mod drop_thread;
mod error;
mod exchange_handler;
mod flush;
mod frames;
#[doc(hidden)]
pub mod fuzz_entry;
mod joining;
mod leader_call;
mod liveness_reports;
mod log_loss;
mod log_marks;
mod log_store;
mod maintenance_task;
mod members;
mod node_core;
mod node_folder;
mod node_observer;
mod node_options;
mod peers;
mod proposal;
mod proposer;
mod quorum_notices;
mod raft;
mod raft_follower;
mod raft_network;
mod read;
mod remote_members;
mod replayed_log;
mod resource_shortages;
mod snapshot_file;
mod snapshot_stream;
mod startup;
mod supervision;
mod terms;
mod wal;

pub use backup::{OpenSnapshotFile, RestoredCluster, SnapshotReport, StateHash, load, restore, verify};
pub use command_queue::CommandTicket;
pub use consensus::{
    ChangeEvent, ChangeStream, CompactedRevision, Consistency, LedgerView, QuorumStatus, RequestedLedgerLimits,
    SupportedLevels,
};
pub use counters::LedgerNodeStats;
pub use directory::OwnershipDirectory;
pub use error::{LedgerNodeError, SubmitError};
pub use ledger;
pub use members::{ClusterMember, MemberChange, MemberError, MemberRole};
pub use node_folder::ClusterId;
pub use node_options::{ClusterOptions, ElectionTimers, Options};
pub use peers::{
    CALL_TIMEOUT, ClusterPeers, HandshakeRefusal, MAX_CALL_BYTES, PeerError, PeerService, RouterTopic, TlsFiles,
};
pub use read::ReadError;
pub use supervision::SupervisedTasks;

#[cfg(test)]
mod damage_tests;
#[cfg(test)]
mod joining_tests;
#[cfg(test)]
mod pending_voter_change_tests;
#[cfg(test)]
mod retry_tests;
