//! The write-ahead log on disk: what is in it, and how it is opened.
//!
//! An end that was torn by a crash is cut off; an end that had been committed is missed and refused.

use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;

use openraft::storage::IOFlushed;
use raft_log::codeq::{Decode, Encode};
use raft_log::{Callback, Config, RaftLog};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::oneshot;

use crate::error::OwnershipError;
use crate::raft::{LogId, Payload, Types, Vote};

/// The longest record that is read back.
const MAX_RECORD: u32 = 256 << 20;

/// A value in the log: length and MessagePack. The log's own checksum covers it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Coded<T>(pub(crate) T);

impl<T: Serialize> Encode for Coded<T> {
    fn encode<W: Write>(&self, mut to: W) -> Result<usize, io::Error> {
        let bytes = rmp_serde::to_vec(&self.0).map_err(io::Error::other)?;
        let length = u32::try_from(bytes.len()).ok().filter(|length| *length <= MAX_RECORD);
        let length = length.ok_or_else(|| io::Error::other("a record is too long for the log"))?;
        to.write_all(&length.to_be_bytes())?;
        to.write_all(&bytes)?;
        Ok(4 + bytes.len())
    }
}

impl<T: DeserializeOwned> Decode for Coded<T> {
    fn decode<R: Read>(mut from: R) -> Result<Self, io::Error> {
        let mut length = [0u8; 4];
        from.read_exact(&mut length)?;
        let length = u32::from_be_bytes(length);
        if length > MAX_RECORD {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a record of {length} bytes")));
        }
        let mut bytes = Vec::new();
        from.take(u64::from(length)).read_to_end(&mut bytes)?;
        if bytes.len() < length as usize {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let value = rmp_serde::from_slice(&bytes).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
        Ok(Self(value))
    }
}

/// Who waits for a flush.
pub(crate) enum Flushed {
    /// Raft itself, for an append.
    Raft(IOFlushed<Types>),
    /// One of its calls.
    Call(oneshot::Sender<io::Result<()>>),
}

impl Callback for Flushed {
    fn send(self, result: Result<(), io::Error>) {
        match self {
            Flushed::Raft(flushed) => flushed.io_completed(result),
            // A caller that is gone needs no answer.
            Flushed::Call(caller) => drop(caller.send(result)),
        }
    }
}

/// What the log is made of.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct WalTypes;

impl raft_log::Types for WalTypes {
    type LogId = Coded<LogId>;
    type LogPayload = Coded<Payload>;
    type Vote = Coded<Vote>;
    type Callback = Flushed;
    type UserData = String;

    fn log_index(log_id: &Self::LogId) -> u64 {
        log_id.0.index
    }

    fn payload_size(payload: &Self::LogPayload) -> u64 {
        use openraft::EntryPayload::Normal;
        // Close enough for the cache's bound: a command with its points is a few hundred bytes.
        match &payload.0 {
            Normal(proposal) => 64 + 512 * proposal.0.submissions.len() as u64,
            _ => 256,
        }
    }
}

/// Opens the log, cutting off an end that was never completely written.
///
/// Fails closed when a record in the middle is damaged, or when the log ends before `committed`.
pub(crate) fn open(folder: &Path, committed: u64) -> Result<RaftLog<WalTypes>, OwnershipError> {
    std::fs::create_dir_all(folder).map_err(OwnershipError::io(folder))?;
    let wal: RaftLog<WalTypes> = match RaftLog::open(config(folder, TornEnd::Refuse)) {
        Ok(wal) => wal,
        Err(strict) => {
            keep_evidence(folder)?;
            let damaged = |_| OwnershipError::Damaged { path: folder.to_owned(), detail: strict.to_string() };
            let wal = RaftLog::open(config(folder, TornEnd::Cut)).map_err(damaged)?;
            tracing::warn!(log = %folder.display(), error = %strict, "the log's end was torn and is cut off");
            wal
        }
    };
    let last = wal.log_state().last().map_or(0, |last| last.0.index);
    if last < committed {
        return Err(OwnershipError::EntriesMissing { path: folder.to_owned(), last, committed });
    }
    Ok(wal)
}

/// What to do with a last record that was not completely written.
#[derive(PartialEq)]
enum TornEnd {
    Refuse,
    Cut,
}

fn config(folder: &Path, torn: TornEnd) -> Arc<Config> {
    let mut config = Config::new(folder.display());
    // Small chunks, so that a purge frees disk; a small cache, because the state machine is the cache.
    config.wal.chunk_max_size = Some(64 << 20);
    config.wal.chunk_max_records = Some(128 << 10);
    config.wal.read_buffer_size = Some(4 << 20);
    config.wal.truncate_incomplete_record = Some(torn == TornEnd::Cut);
    config.wal.flush_batch_wait = Some(std::time::Duration::ZERO);
    config.log_cache_max_items = Some(16 << 10);
    config.log_cache_capacity = Some(64 << 20);
    Arc::new(config)
}

/// Copies the newest chunk aside before anything is cut off it.
fn keep_evidence(folder: &Path) -> Result<(), OwnershipError> {
    let entries = std::fs::read_dir(folder).map_err(OwnershipError::io(folder))?;
    let chunks = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let newest = chunks.filter(|path| path.extension().is_some_and(|extension| extension == "wal")).max();
    let Some((newest, parent)) = newest.zip(folder.parent()) else { return Ok(()) };
    std::fs::copy(&newest, parent.join("torn-log-chunk")).map_err(OwnershipError::io(&newest))?;
    Ok(())
}
