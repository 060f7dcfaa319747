//! Raft's types as a server runs them: on tokio, with snapshots in a file.

pub(crate) use consensus::{LogEntry, LogId, Payload, SnapshotMeta, Vote};

use crate::snapshots::SnapshotFile;
use crate::watch::Observer;

pub(crate) type Types = consensus::Types<openraft::impls::TokioRuntime>;
pub(crate) type Machine = consensus::Machine<SnapshotFile, Observer>;
