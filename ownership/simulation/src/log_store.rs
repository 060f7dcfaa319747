//! Raft's log on a simulated disk, with the same order of writes and flushes as on a real one.

use std::fmt::Debug;
use std::io;
use std::ops::{Bound, RangeBounds};

use consensus::{LogEntry, LogId, TypeConfig, Vote, is_shortage};
use openraft::storage::{IOFlushed, LogState, RaftLogStorage};
use openraft::{AsyncRuntime, OptionalSend, RaftLogReader};

use crate::disk::{LogWrite, SimDisk};
use crate::runtime::{SimulatedRuntime, true_time};

type LogTypeConfig = TypeConfig<SimulatedRuntime>;

/// The log. Clones are handles of the same log.
#[derive(Clone, Debug)]
pub(crate) struct SimLogStore {
    disk: SimDisk,
}

impl SimLogStore {
    pub(crate) fn on_disk(disk: SimDisk) -> Self {
        Self { disk }
    }

    /// Waits until everything written so far is durable.
    async fn flush(&self) -> io::Result<()> {
        let (done_at, upto) = self.disk.flush();
        SimulatedRuntime::sleep(done_at.saturating_sub(true_time())).await;
        self.disk.flushed(upto)
    }

    async fn write_durably(&self, write: LogWrite) -> io::Result<()> {
        self.disk.write(write)?;
        self.flush().await
    }
}

impl RaftLogReader<LogTypeConfig> for SimLogStore {
    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: RB,
    ) -> Result<Vec<LogEntry>, io::Error> {
        let (start, end) = (range.start_bound().cloned(), range.end_bound().cloned());
        let is_empty = match (start, end) {
            (Bound::Included(from), Bound::Excluded(to)) => from >= to,
            _ => false,
        };
        if is_empty { Ok(Vec::new()) } else { Ok(self.disk.entries((start, end))) }
    }

    async fn read_vote(&mut self) -> Result<Option<Vote>, io::Error> {
        Ok(self.disk.read(|log| log.vote))
    }
}

impl RaftLogStorage<LogTypeConfig> for SimLogStore {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> Result<LogState<LogTypeConfig>, io::Error> {
        Ok(self.disk.read(|log| LogState { last_purged_log_id: log.purged, last_log_id: log.last() }))
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> Result<(), io::Error> {
        self.write_durably(LogWrite::Vote(*vote)).await
    }

    async fn save_committed(&mut self, committed: Option<LogId>) -> Result<(), io::Error> {
        let Some(committed) = committed else { return Ok(()) };
        // A snapshot that is being installed is ahead of the log, which is then purged up to it.
        let is_known = self.disk.read(|log| log.last().is_some_and(|last| committed <= last));
        if is_known {
            self.disk.write(LogWrite::Commit(committed))?;
            self.disk.commit(committed.index);
        }
        Ok(())
    }

    async fn read_committed(&mut self) -> Result<Option<LogId>, io::Error> {
        Ok(self.disk.read(|log| log.committed))
    }

    async fn append<I>(&mut self, entries: I, callback: IOFlushed<LogTypeConfig>) -> Result<(), io::Error>
    where
        I: IntoIterator<Item = LogEntry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let entries: Vec<LogEntry> = entries.into_iter().collect();
        // Files are as small as one append. If the next one cannot be created, the log continues in the current one.
        let begun = self.disk.open();
        begun.or_else(|error| if is_shortage(&error) { Ok(()) } else { Err(error) })?;
        self.disk.write(LogWrite::Append(entries))?;
        let store = self.clone();
        let (done_at, upto) = self.disk.flush();
        drop(SimulatedRuntime::spawn(async move {
            SimulatedRuntime::sleep(done_at.saturating_sub(true_time())).await;
            callback.io_completed(store.disk.flushed(upto));
        }));
        Ok(())
    }

    async fn truncate_after(&mut self, last: Option<LogId>) -> Result<(), io::Error> {
        self.write_durably(LogWrite::Truncate(last)).await
    }

    async fn purge(&mut self, upto: LogId) -> Result<(), io::Error> {
        // The log's writer opens its folder to remove files.
        self.disk.in_time(SimDisk::open).await?;
        self.write_durably(LogWrite::Purge(upto)).await
    }
}
