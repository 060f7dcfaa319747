//! Raft's types for a server: on tokio, with snapshots in a file.

pub(crate) use consensus::{LogEntry, LogId, Payload, SnapshotMeta, Vote};

use crate::node_observer::NodeObserver;
use crate::snapshots::SnapshotFile;

pub(crate) type TokioTypeConfig = consensus::TypeConfig<openraft::impls::TokioRuntime>;
pub(crate) type NodeStateMachine = consensus::StateMachine<SnapshotFile, NodeObserver>;
