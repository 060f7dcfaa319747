//! A node's disk: writes stay in a cache until a flush, and a power loss drops a suffix of them.
//!
//! Writes keep their order, as in a log file. Flushes complete in order and take time. After a failed flush the disk's
//! state is unknown, and nothing more is written by that process.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::RangeBounds;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use consensus::{LogEntry, LogId, RetryBackoff, SnapshotMeta, Vote};
use openraft::AsyncRuntime;

use crate::rng::Rng;
use crate::runtime::{SimulatedRuntime, true_time};

/// How a process ended, as far as its disk is concerned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ProcessEnd {
    /// Only the process ended: its writes are kept.
    Killed,
    /// Power loss: unflushed writes may be lost, from some write on.
    PowerLoss,
}

/// One write to the log's file.
#[derive(Clone, Debug)]
pub(crate) enum LogWrite {
    Vote(Vote),
    Append(Vec<LogEntry>),
    /// Removes everything after this entry.
    Truncate(Option<LogId>),
    /// Removes everything up to this entry.
    Purge(LogId),
    Commit(LogId),
}

/// Contents of the log's file.
#[derive(Clone, Debug, Default)]
pub(crate) struct LogContents {
    pub(crate) vote: Option<Vote>,
    pub(crate) entries: BTreeMap<u64, LogEntry>,
    pub(crate) purged: Option<LogId>,
    pub(crate) committed: Option<LogId>,
}

impl LogContents {
    pub(crate) fn last(&self) -> Option<LogId> {
        self.entries.last_key_value().map(|(_, entry)| entry.log_id).or(self.purged)
    }

    fn apply(&mut self, write: &LogWrite) {
        match write {
            LogWrite::Vote(vote) => self.vote = Some(*vote),
            LogWrite::Append(entries) => {
                self.entries.extend(entries.iter().map(|entry| (entry.log_id.index, entry.clone())));
            }
            LogWrite::Truncate(last) => drop(self.entries.split_off(&last.map_or(0, |last| last.index + 1))),
            LogWrite::Purge(upto) => {
                self.entries = self.entries.split_off(&(upto.index + 1));
                self.purged = self.purged.max(Some(*upto));
            }
            LogWrite::Commit(upto) => self.committed = self.committed.max(Some(*upto)),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum DiskHealth {
    Fine,
    /// Flushes take up to this long.
    Slow(Duration),
    /// The next flush fails.
    FailsNextFlush,
    /// All writes fail.
    Full,
}

/// A resource that a process temporarily lacks. What it has already opened continues to work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ProcessResourceShortage {
    Files,
    Memory,
    Threads,
}

impl ProcessResourceShortage {
    pub(crate) const ALL: [ProcessResourceShortage; 3] =
        [ProcessResourceShortage::Files, ProcessResourceShortage::Memory, ProcessResourceShortage::Threads];

    /// Returns the error that Linux reports: EMFILE, ENOMEM or EAGAIN.
    fn error(self) -> io::Error {
        io::Error::from_raw_os_error(match self {
            ProcessResourceShortage::Files => 24,
            ProcessResourceShortage::Memory => 12,
            ProcessResourceShortage::Threads => 11,
        })
    }
}

pub(crate) type StoredSnapshot = (SnapshotMeta, Arc<Vec<u8>>);

#[derive(Debug)]
struct DiskState {
    rng: Rng,
    durable: LogContents,
    cached: LogContents,
    pending: VecDeque<LogWrite>,
    /// Number of writes so far.
    written: u64,
    flushed: u64,
    /// When the last requested flush begins.
    next_flush: Duration,
    busy_until: Duration,
    health: DiskHealth,
    has_failed_flush: bool,
    /// Resource that the process lacks.
    shortage: Option<ProcessResourceShortage>,
    snapshot: Option<StoredSnapshot>,
    mark: CommitMark,
}

/// The committed mark outside the log.
#[derive(Clone, Copy, Debug, Default)]
struct CommitMark {
    /// What the quorum committed; it may not be durable here yet.
    committed: u64,
    /// Mark that was written.
    written: u64,
    /// Mark that is durable.
    durable: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct SimDisk(Arc<Mutex<DiskState>>);

impl SimDisk {
    pub(crate) fn new(rng: Rng) -> Self {
        Self(Arc::new(Mutex::new(DiskState {
            rng,
            durable: LogContents::default(),
            cached: LogContents::default(),
            pending: VecDeque::new(),
            written: 0,
            flushed: 0,
            next_flush: Duration::ZERO,
            busy_until: Duration::ZERO,
            health: DiskHealth::Fine,
            has_failed_flush: false,
            shortage: None,
            snapshot: None,
            mark: CommitMark::default(),
        })))
    }

    fn lock(&self) -> MutexGuard<'_, DiskState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn read<T>(&self, look: impl FnOnce(&LogContents) -> T) -> T {
        look(&self.lock().cached)
    }

    pub(crate) fn entries(&self, range: impl RangeBounds<u64>) -> Vec<LogEntry> {
        self.lock().cached.entries.range(range).map(|(_, entry)| entry.clone()).collect()
    }

    /// Writes to the cache; durable once a flush that begins later is complete.
    pub(crate) fn write(&self, write: LogWrite) -> io::Result<()> {
        let mut platter = self.lock();
        platter.check()?;
        platter.cached.apply(&write);
        platter.pending.push_back(write);
        platter.written += 1;
        Ok(())
    }

    /// Begins a flush; returns when it completes and how many writes it covers.
    pub(crate) fn flush(&self) -> (Duration, u64) {
        let mut platter = self.lock();
        let now = true_time();
        // Callers that come while the disk is busy share the next flush.
        if platter.next_flush <= now {
            let start = platter.busy_until.max(now);
            let takes = platter.latency();
            (platter.next_flush, platter.busy_until) = (start, start + takes);
        }
        (platter.busy_until, platter.written)
    }

    /// Completes a flush.
    pub(crate) fn flushed(&self, upto: u64) -> io::Result<()> {
        let mut platter = self.lock();
        if platter.health == DiskHealth::FailsNextFlush {
            platter.health = DiskHealth::Fine;
            platter.has_failed_flush = true;
        }
        if platter.has_failed_flush {
            return Err(io::Error::other("the log could not be flushed"));
        }
        platter.make_durable(upto);
        let durable = platter.durable.last().map_or(0, |last| last.index);
        platter.mark.written = platter.mark.committed.min(durable).max(platter.mark.written);
        Ok(())
    }

    /// Returns how long a write outside the log takes.
    pub(crate) fn latency(&self) -> Duration {
        self.lock().latency()
    }

    /// Returns how long it takes to write a whole state; a large one takes seconds.
    pub(crate) fn snapshot_latency(&self) -> Duration {
        let mut platter = self.lock();
        if platter.rng.chance(300) { platter.rng.millis(200, 6_000) } else { platter.rng.millis(1, 50) }
    }

    /// Returns the index up to which the log is durable.
    pub(crate) fn durable_upto(&self) -> u64 {
        self.lock().durable.last().map_or(0, |last| last.index)
    }

    /// Records what the quorum committed. The mark is raised to it once it is durable here, and is itself durable after
    /// `sync_commit_mark`.
    pub(crate) fn commit(&self, index: u64) {
        let mut platter = self.lock();
        platter.mark.committed = platter.mark.committed.max(index);
    }

    /// Makes the mark durable.
    pub(crate) fn sync_commit_mark(&self) {
        let mut platter = self.lock();
        platter.mark.durable = platter.mark.written;
    }

    pub(crate) fn mark(&self) -> u64 {
        self.lock().mark.written
    }

    /// Replaces the snapshot, unless a newer one is there: the log may be purged up to that.
    pub(crate) fn store_snapshot(&self, snapshot: StoredSnapshot) -> io::Result<()> {
        let mut platter = self.lock();
        platter.check()?;
        let is_newer = |(there, _): &StoredSnapshot| there.last_log_id > snapshot.0.last_log_id;
        if !platter.snapshot.as_ref().is_some_and(is_newer) {
            platter.snapshot = Some(snapshot);
        }
        Ok(())
    }

    pub(crate) fn snapshot(&self) -> Option<StoredSnapshot> {
        self.lock().snapshot.clone()
    }

    /// Opens a file for the next write.
    pub(crate) fn open(&self) -> io::Result<()> {
        match self.lock().shortage {
            Some(short @ (ProcessResourceShortage::Files | ProcessResourceShortage::Memory)) => Err(short.error()),
            Some(ProcessResourceShortage::Threads) | None => Ok(()),
        }
    }

    /// Opens or starts something, retrying while its process lacks resources, as servers do.
    pub(crate) async fn in_time(&self, begin: impl Fn(&Self) -> io::Result<()>) -> io::Result<()> {
        let mut waits = RetryBackoff::default();
        loop {
            let begun = begin(self);
            let Some(wait) = begun.as_ref().err().and_then(|error| waits.after(error)) else { return begun };
            SimulatedRuntime::sleep(wait).await;
        }
    }

    /// Starts a thread for disk work.
    pub(crate) fn begin_thread(&self) -> io::Result<()> {
        match self.lock().shortage {
            Some(short @ (ProcessResourceShortage::Threads | ProcessResourceShortage::Memory)) => Err(short.error()),
            Some(ProcessResourceShortage::Files) | None => Ok(()),
        }
    }

    /// Sets or clears the resource that its process lacks.
    pub(crate) fn set_shortage(&self, short_of: Option<ProcessResourceShortage>) {
        self.lock().shortage = short_of;
    }

    /// Sets the health of the disk.
    pub(crate) fn set_health(&self, health: DiskHealth) {
        self.lock().health = health;
    }

    /// Applies the end of the process that wrote to the disk.
    pub(crate) fn end_process(&self, ending: ProcessEnd) {
        let mut platter = self.lock();
        let durable = match ending {
            ProcessEnd::Killed if !platter.has_failed_flush => platter.written,
            _ => {
                let (low, high) = (platter.flushed, platter.written);
                platter.rng.within(low, high)
            }
        };
        platter.make_durable(durable);
        platter.cached = platter.durable.clone();
        platter.pending.clear();
        platter.written = platter.flushed;
        platter.has_failed_flush = false;
        platter.shortage = None;
        (platter.next_flush, platter.busy_until) = (Duration::ZERO, Duration::ZERO);
        if ending == ProcessEnd::PowerLoss && platter.rng.chance(500) {
            platter.mark.written = platter.mark.durable;
        }
        platter.mark.durable = platter.mark.written;
        platter.mark.committed = platter.mark.written;
    }
}

impl DiskState {
    fn check(&self) -> io::Result<()> {
        match self.health {
            _ if self.has_failed_flush => Err(io::Error::other("an earlier flush failed")),
            DiskHealth::Full => Err(io::ErrorKind::StorageFull.into()),
            _ => Ok(()),
        }
    }

    fn make_durable(&mut self, upto: u64) {
        while self.flushed < upto {
            let Some(write) = self.pending.pop_front() else { return };
            self.durable.apply(&write);
            self.flushed += 1;
        }
    }

    fn latency(&mut self) -> Duration {
        match self.health {
            DiskHealth::Slow(worst) => self.rng.micros(1_000, worst.as_micros() as u64),
            _ if self.rng.chance(10) => self.rng.micros(5_000, 60_000),
            _ => self.rng.micros(100, 2_500),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vote(term: u64) -> LogWrite {
        LogWrite::Vote(Vote::new(term, 1))
    }

    fn term(disk: &SimDisk) -> u64 {
        disk.read(|log| log.vote.map_or(0, |vote| vote.leader_id.term))
    }

    #[test]
    fn power_loss_discards_only_unflushed_writes() {
        let mut least = u64::MAX;
        let mut most = 0;
        for seed in 0..50 {
            let disk = SimDisk::new(Rng::stream(seed, "disk"));
            (1..=3).for_each(|n| disk.write(vote(n)).unwrap());
            disk.flushed(3).unwrap();
            (4..=6).for_each(|n| disk.write(vote(n)).unwrap());
            disk.end_process(ProcessEnd::PowerLoss);
            least = least.min(term(&disk));
            most = most.max(term(&disk));
        }
        assert_eq!((least, most), (3, 6));
    }

    #[test]
    fn a_killed_process_loses_no_writes() {
        let disk = SimDisk::new(Rng::stream(1, "disk"));
        disk.write(vote(9)).unwrap();
        disk.end_process(ProcessEnd::Killed);
        assert_eq!(term(&disk), 9);
    }

    #[test]
    fn a_failed_flush_stops_all_writes_until_restart() {
        let disk = SimDisk::new(Rng::stream(1, "disk"));
        disk.write(vote(1)).unwrap();
        disk.set_health(DiskHealth::FailsNextFlush);
        assert!(disk.flushed(1).is_err());
        assert!(disk.flushed(1).is_err());
        assert!(disk.write(vote(2)).is_err());
        disk.end_process(ProcessEnd::Killed);
        disk.write(vote(3)).unwrap();
        assert_eq!(term(&disk), 3);
    }

    #[test]
    fn a_process_shortage_ends_with_the_process_and_spares_open_files() {
        let disk = SimDisk::new(Rng::stream(1, "disk"));
        for (short, opens, begins) in [
            (ProcessResourceShortage::Files, false, true),
            (ProcessResourceShortage::Memory, false, false),
            (ProcessResourceShortage::Threads, true, false),
        ] {
            disk.set_shortage(Some(short));
            assert_eq!((disk.open().is_ok(), disk.begin_thread().is_ok()), (opens, begins), "{short:?}");
            disk.write(vote(1)).unwrap();
        }
        disk.end_process(ProcessEnd::Killed);
        assert!(disk.open().is_ok() && disk.begin_thread().is_ok());
    }

    #[test]
    fn a_full_disk_accepts_nothing_until_space_is_freed() {
        let disk = SimDisk::new(Rng::stream(1, "disk"));
        disk.set_health(DiskHealth::Full);
        assert_eq!(disk.write(vote(1)).unwrap_err().kind(), io::ErrorKind::StorageFull);
        disk.set_health(DiskHealth::Fine);
        disk.write(vote(1)).unwrap();
    }
}
