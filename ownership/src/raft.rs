//! Raft's types for a server: on tokio.

pub(crate) use consensus::{LogEntry, LogId, Payload, SnapshotMeta, Vote};

pub(crate) type TokioTypeConfig = consensus::TypeConfig<openraft::impls::TokioRuntime>;
