//! Raft's log storage on top of the write-ahead log. An append is acknowledged only after its fdatasync.

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::{Bound, RangeBounds};
use std::sync::{Arc, Mutex, MutexGuard};

use openraft::entry::RaftEntry;
use openraft::storage::{IOFlushed, LogState, RaftLogStorage};
use openraft::type_config::alias::{EntryOf, LogIdOf, VoteOf};
use openraft::{OptionalSend, RaftLogReader};
use raft_log::RaftLog;
use raft_log::api::raft_log_writer::RaftLogWriter;
use tokio::sync::oneshot;

use crate::drop_thread::DropThread;
use crate::error::LedgerNodeError;
use crate::flush::{self, FlushWaiter, GroupCommitLog};
use crate::log_marks::LogWatermarksFile;
use crate::node_folder::NodeFolder;
use crate::raft::{LogEntry, LogId, TokioTypeConfig, Vote};
use crate::resource_shortages::ShortageTracker;
use crate::wal::{self, MaxChunkSize, WalTypes, WalValue};

/// The log. Clones are handles of the same log.
#[derive(Clone)]
pub(crate) struct LogStore {
    shared: Arc<Mutex<GroupCommitLog>>,
    marks: Arc<LogWatermarksFile>,
    shortages: Arc<ShortageTracker>,
    drop_thread: DropThread,
}

impl fmt::Debug for LogStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LogStore").field("marks", &self.marks).finish_non_exhaustive()
    }
}

impl LogStore {
    /// Opens a node's log, or creates it.
    pub(crate) fn open(node: &NodeFolder) -> Result<Self, LedgerNodeError> {
        Self::open_in(node, MaxChunkSize::default())
    }

    /// Opens a log with files of the given size.
    pub(crate) fn open_in(node: &NodeFolder, chunk: MaxChunkSize) -> Result<Self, LedgerNodeError> {
        let marks = Arc::new(LogWatermarksFile::open(&node.path("committed"), node.identity, node.contents()?)?);
        let wal = wal::open(&node.path("log"), &marks, chunk)?;
        let drop_thread = DropThread::begin().map_err(LedgerNodeError::io(node.path("log")))?;
        let flushing = GroupCommitLog::new(wal, marks.clone(), drop_thread.clone());
        let shortages = flushing.shortages.clone();
        Ok(Self { shared: Arc::new(Mutex::new(flushing)), marks, shortages, drop_thread })
    }

    /// Returns the indexes of the last purged and of the last entry.
    pub(crate) fn bounds(&self) -> io::Result<(u64, u64)> {
        let shared = self.lock()?;
        let state = shared.wal.log_state();
        let index = |id: Option<&WalValue<LogId>>| id.map_or(0, |id| id.0.index);
        Ok((index(state.purged()), index(state.last())))
    }

    /// Returns whether nothing was ever written to the log: no vote and no entry.
    pub(crate) fn is_new(&self) -> bool {
        self.lock().is_ok_and(|shared| {
            let state = shared.wal.log_state();
            state.vote().is_none() && state.last().is_none() && state.purged().is_none()
        })
    }

    /// Returns the resource shortages that the log met.
    pub(crate) fn shortages(&self) -> Arc<ShortageTracker> {
        self.shortages.clone()
    }

    /// Returns the thread that closes the log and frees other slow objects.
    pub(crate) fn drop_thread(&self) -> DropThread {
        self.drop_thread.clone()
    }

    /// Returns the term of the last vote; 0 before the first.
    pub(crate) fn term(&self) -> io::Result<u64> {
        Ok(self.lock()?.wal.log_state().vote().map_or(0, |vote| vote.0.leader_id.term))
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.lock().map_or(0, |shared| shared.wal.on_disk_size())
    }

    /// Returns how far the log is known to be on disk, as an offset in the whole log.
    pub(crate) fn durable_end(&self) -> u64 {
        self.marks.current().durable.unwrap_or_default().end
    }

    /// Rejects all further writes, because they would not be kept.
    pub(crate) fn close_with(&self, error: &io::Error) {
        // If a lock holder panicked, the log is already closed.
        drop(self.lock().map(|mut shared| shared.poison_with(error)));
    }

    /// Returns a file handle to make the marks durable.
    pub(crate) fn marks_sync_handle(&self) -> Result<File, LedgerNodeError> {
        self.marks.sync_handle()
    }

    fn lock(&self) -> io::Result<MutexGuard<'_, GroupCommitLog>> {
        flush::lock(&self.shared)
    }

    /// Writes to the log and waits until the write is durable.
    async fn write_durably(
        &self,
        write: impl FnOnce(&mut RaftLog<WalTypes>) -> io::Result<raft_log::Segment>,
    ) -> io::Result<()> {
        let (flushed, done) = oneshot::channel();
        {
            let mut shared = self.lock()?;
            shared.write(write)?;
            shared.flush(&self.shared, FlushWaiter::Call(flushed))?;
        }
        done.await.map_err(|_| io::Error::other("the log's writer is gone"))?
    }
}

impl RaftLogReader<TokioTypeConfig> for LogStore {
    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + fmt::Debug + OptionalSend>(
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

    async fn read_vote(&mut self) -> Result<Option<VoteOf<TokioTypeConfig>>, io::Error> {
        Ok(self.lock()?.wal.log_state().vote().map(|vote| vote.0))
    }
}

impl RaftLogStorage<TokioTypeConfig> for LogStore {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> Result<LogState<TokioTypeConfig>, io::Error> {
        let shared = self.lock()?;
        let state = shared.wal.log_state();
        let id = |id: Option<&WalValue<LogId>>| id.map(|id| id.0);
        Ok(LogState { last_purged_log_id: id(state.purged()), last_log_id: id(state.last()) })
    }

    async fn get_log_reader(&mut self) -> Self::LogReader {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> Result<(), io::Error> {
        let vote = WalValue(*vote);
        self.write_durably(|wal| wal.save_vote(vote)).await
    }

    async fn save_committed(&mut self, committed: Option<LogIdOf<TokioTypeConfig>>) -> Result<(), io::Error> {
        let Some(committed) = committed else { return Ok(()) };
        let mut shared = self.lock()?;
        let state = shared.wal.log_state();
        // A snapshot that is being installed is ahead of the log, which is then purged up to it.
        let is_known = state.last().is_some_and(|last| committed <= last.0);
        if is_known && state.committed().is_none_or(|before| before.0 < committed) {
            // Covered by the next append's fdatasync; an older value only means that more entries are applied again
            // after a restart.
            shared.write(|wal| wal.commit(WalValue(committed)))?;
            self.marks.commit(committed.index);
        }
        Ok(())
    }

    async fn read_committed(&mut self) -> Result<Option<LogIdOf<TokioTypeConfig>>, io::Error> {
        Ok(self.lock()?.wal.log_state().committed().map(|id| id.0))
    }

    async fn append<I>(&mut self, entries: I, callback: IOFlushed<TokioTypeConfig>) -> Result<(), io::Error>
    where
        I: IntoIterator<Item = EntryOf<TokioTypeConfig>> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let entries = entries.into_iter().map(|entry| (WalValue(entry.log_id), WalValue(entry.payload)));
        let mut shared = self.lock()?;
        // Appended individually: if the next file cannot be created now, the following entries must still be written.
        for entry in entries {
            shared.write(|wal| wal.append([entry]))?;
        }
        shared.flush(&self.shared, FlushWaiter::Raft(callback))
    }

    async fn truncate_after(&mut self, last: Option<LogIdOf<TokioTypeConfig>>) -> Result<(), io::Error> {
        self.write_durably(|wal| wal.truncate(last.map_or(0, |last| last.index + 1))).await
    }

    async fn purge(&mut self, upto: LogIdOf<TokioTypeConfig>) -> Result<(), io::Error> {
        // The log's writer opens its folder to remove files, and an error there is final, so a file descriptor is
        // reserved for it.
        let folder = self.marks.path().with_file_name("log");
        let reserve = self.shortages.open_retrying_async(folder.display().to_string(), || File::open(&folder)).await?;
        self.lock()?.reserve = Some(reserve);
        self.write_durably(|wal| wal.purge(WalValue(upto))).await
    }
}
