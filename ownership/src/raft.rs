//! Raft's types as a server runs them: on tokio, with snapshots in a file.

pub(crate) use consensus::{LogEntry, LogId, Payload, SnapshotMeta, Vote};

use crate::counters::Counters;
use crate::snapshots::SnapshotFile;

pub(crate) type Types = consensus::Types<openraft::impls::TokioRuntime>;
pub(crate) type Machine = consensus::Machine<SnapshotFile, Counters>;
