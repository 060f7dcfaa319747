//! Raft's log storage over the write-ahead log. An append is acknowledged only after its fdatasync.

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::ops::{Bound, RangeBounds};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use openraft::entry::RaftEntry;
use openraft::storage::{IOFlushed, LogState, RaftLogStorage};
use openraft::type_config::alias::{EntryOf, LogIdOf, VoteOf};
use openraft::{OptionalSend, RaftLogReader};
use raft_log::RaftLog;
use raft_log::api::raft_log_writer::RaftLogWriter;
use tokio::sync::oneshot;

use crate::committed::CommittedMark;
use crate::error::OwnershipError;
use crate::raft::{LogEntry, LogId, Types, Vote};
use crate::wal::{self, Coded, Flushed, WalTypes};

/// The log. Clones are handles of the same log.
#[derive(Clone, Debug)]
pub(crate) struct LogStore {
    shared: Arc<Mutex<Shared>>,
}

#[derive(Debug)]
struct Shared {
    wal: RaftLog<WalTypes>,
    mark: CommittedMark,
}

impl LogStore {
    pub(crate) fn open(folder: &Path, mark: &Path) -> Result<Self, OwnershipError> {
        let mark = CommittedMark::open(mark)?;
        let wal = wal::open(folder, mark.index())?;
        Ok(Self { shared: Arc::new(Mutex::new(Shared { wal, mark })) })
    }

    /// The last purged and the last entry's index.
    pub(crate) fn bounds(&self) -> io::Result<(u64, u64)> {
        let shared = self.lock()?;
        let state = shared.wal.log_state();
        let index = |id: Option<&Coded<LogId>>| id.map_or(0, |id| id.0.index);
        Ok((index(state.purged()), index(state.last())))
    }

    /// Bytes of log on disk.
    pub(crate) fn bytes(&self) -> u64 {
        self.lock().map_or(0, |shared| {
            let stat = shared.wal.stat();
            stat.closed_chunks.iter().map(|chunk| chunk.size).sum::<u64>() + stat.open_chunk.size
        })
    }

    /// The committed mark's file, to be made durable.
    pub(crate) fn mark(&self) -> Result<File, OwnershipError> {
        self.lock().map_err(OwnershipError::io("committed"))?.mark.handle()
    }

    /// A lock that is never held across an await. A panic while it was held leaves the log in doubt: fail.
    fn lock(&self) -> io::Result<MutexGuard<'_, Shared>> {
        self.shared.lock().map_err(|_| io::Error::other("a panic left the log in doubt"))
    }

    /// Writes to the log and waits until it is durable.
    async fn durably(
        &self,
        write: impl FnOnce(&mut RaftLog<WalTypes>) -> io::Result<raft_log::Segment>,
    ) -> io::Result<()> {
        let (flushed, done) = oneshot::channel();
        {
            let mut shared = self.lock()?;
            write(&mut shared.wal)?;
            shared.wal.flush(true, Some(Flushed::Call(flushed)))?;
        }
        done.await.map_err(|_| io::Error::other("the log's writer is gone"))?
    }
}

impl RaftLogReader<Types> for LogStore {
    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: RB,
    ) -> Result<Vec<LogEntry>, io::Error> {
        let from = match range.start_bound() {
            Bound::Included(start) => *start,
            Bound::Excluded(before) => before.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let to = match range.end_bound() {
            Bound::Included(last) => last.saturating_add(1),
            Bound::Excluded(end) => *end,
            Bound::Unbounded => u64::MAX,
        };
        if from >= to {
            return Ok(Vec::new());
        }
        let shared = self.lock()?;
        shared.wal.read(from, to).map(|read| read.map(|(id, payload)| LogEntry::new(id.0, payload.0))).collect()
    }

    async fn read_vote(&mut self) -> Result<Option<VoteOf<Types>>, io::Error> {
        Ok(self.lock()?.wal.log_state().vote().map(|vote| vote.0))
    }
}

impl RaftLogStorage<Types> for LogStore {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> Result<LogState<Types>, io::Error> {
        let shared = self.lock()?;
        let state = shared.wal.log_state();
        let id = |id: Option<&Coded<LogId>>| id.map(|id| id.0);
        Ok(LogState { last_purged_log_id: id(state.purged()), last_log_id: id(state.last()) })
    }

    async fn get_log_reader(&mut self) -> Self::LogReader {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> Result<(), io::Error> {
        let vote = Coded(*vote);
        self.durably(|wal| wal.save_vote(vote)).await
    }

    async fn save_committed(&mut self, committed: Option<LogIdOf<Types>>) -> Result<(), io::Error> {
        let Some(committed) = committed else { return Ok(()) };
        let mut shared = self.lock()?;
        shared.wal.commit(Coded(committed))?;
        // The next append's fdatasync covers it; after a power loss an older value only means more to apply again.
        shared.wal.flush(false, None)?;
        shared.mark.raise(committed.index)
    }

    async fn read_committed(&mut self) -> Result<Option<LogIdOf<Types>>, io::Error> {
        Ok(self.lock()?.wal.log_state().committed().map(|id| id.0))
    }

    async fn append<I>(&mut self, entries: I, callback: IOFlushed<Types>) -> Result<(), io::Error>
    where
        I: IntoIterator<Item = EntryOf<Types>> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let mut shared = self.lock()?;
        shared.wal.append(entries.into_iter().map(|entry| (Coded(entry.log_id), Coded(entry.payload))))?;
        shared.wal.flush(true, Some(Flushed::Raft(callback)))
    }

    async fn truncate_after(&mut self, last: Option<LogIdOf<Types>>) -> Result<(), io::Error> {
        self.durably(|wal| wal.truncate(last.map_or(0, |last| last.index + 1))).await
    }

    async fn purge(&mut self, upto: LogIdOf<Types>) -> Result<(), io::Error> {
        self.durably(|wal| wal.purge(Coded(upto))).await
    }
}
