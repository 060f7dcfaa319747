//! A node's disk: what was written lies in a cache until it is flushed, and a loss of power takes an end of it.
//!
//! Writes keep their order, as in a log file. Flushes complete in order and take time; one that fails leaves the disk in
//! doubt, and nothing more is written in that life.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::RangeBounds;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use consensus::{LogEntry, LogId, SnapshotMeta, Vote, Waits};
use openraft::AsyncRuntime;

use crate::rng::Rng;
use crate::runtime::{Sim, true_time};

/// How a process ended, for its disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ending {
    /// The process only: what it wrote is kept.
    Killed,
    /// The power: what was not flushed may be lost, from some write on.
    PowerLoss,
}

/// One write to the log's file.
#[derive(Clone, Debug)]
pub(crate) enum Write {
    Vote(Vote),
    Append(Vec<LogEntry>),
    /// Everything after this entry goes.
    Truncate(Option<LogId>),
    /// Everything up to this entry goes.
    Purge(LogId),
    Commit(LogId),
}

/// What the log's file says.
#[derive(Clone, Debug, Default)]
pub(crate) struct Log {
    pub(crate) vote: Option<Vote>,
    pub(crate) entries: BTreeMap<u64, LogEntry>,
    pub(crate) purged: Option<LogId>,
    pub(crate) committed: Option<LogId>,
}

impl Log {
    pub(crate) fn last(&self) -> Option<LogId> {
        self.entries.last_key_value().map(|(_, entry)| entry.log_id).or(self.purged)
    }

    fn take(&mut self, write: &Write) {
        match write {
            Write::Vote(vote) => self.vote = Some(*vote),
            Write::Append(entries) => {
                self.entries.extend(entries.iter().map(|entry| (entry.log_id.index, entry.clone())));
            }
            Write::Truncate(last) => drop(self.entries.split_off(&last.map_or(0, |last| last.index + 1))),
            Write::Purge(upto) => {
                self.entries = self.entries.split_off(&(upto.index + 1));
                self.purged = self.purged.max(Some(*upto));
            }
            Write::Commit(upto) => self.committed = self.committed.max(Some(*upto)),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Health {
    Fine,
    /// Flushes take so long at most.
    Slow(Duration),
    /// The next flush fails.
    FailsToFlush,
    /// Nothing more can be written.
    Full,
}

/// What a process runs out of for a while. What it has open already goes on working.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Shortage {
    Files,
    Memory,
    Threads,
}

impl Shortage {
    pub(crate) const ALL: [Shortage; 3] = [Shortage::Files, Shortage::Memory, Shortage::Threads];

    /// As Linux says it: EMFILE, ENOMEM, EAGAIN.
    fn error(self) -> io::Error {
        io::Error::from_raw_os_error(match self {
            Shortage::Files => 24,
            Shortage::Memory => 12,
            Shortage::Threads => 11,
        })
    }
}

pub(crate) type Kept = (SnapshotMeta, Arc<Vec<u8>>);

#[derive(Debug)]
struct Platter {
    rng: Rng,
    durable: Log,
    cached: Log,
    pending: VecDeque<Write>,
    /// Writes so far, and how many of them are durable.
    written: u64,
    flushed: u64,
    /// When the flush that was asked for last begins, and when it ends.
    next_flush: Duration,
    busy_until: Duration,
    health: Health,
    in_doubt: bool,
    /// What the process that uses it lacks.
    short_of: Option<Shortage>,
    snapshot: Option<Kept>,
    mark: Mark,
}

/// The committed mark outside the log.
#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    /// What the quorum committed, perhaps before it was durable here.
    committed: u64,
    /// The mark as it was written.
    written: u64,
    /// The mark as it is surely kept.
    kept: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Disk(Arc<Mutex<Platter>>);

impl Disk {
    pub(crate) fn new(rng: Rng) -> Self {
        Self(Arc::new(Mutex::new(Platter {
            rng,
            durable: Log::default(),
            cached: Log::default(),
            pending: VecDeque::new(),
            written: 0,
            flushed: 0,
            next_flush: Duration::ZERO,
            busy_until: Duration::ZERO,
            health: Health::Fine,
            in_doubt: false,
            short_of: None,
            snapshot: None,
            mark: Mark::default(),
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Platter> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn read<T>(&self, look: impl FnOnce(&Log) -> T) -> T {
        look(&self.lock().cached)
    }

    pub(crate) fn entries(&self, range: impl RangeBounds<u64>) -> Vec<LogEntry> {
        self.lock().cached.entries.range(range).map(|(_, entry)| entry.clone()).collect()
    }

    /// Writes; durable once a flush that began later is done.
    pub(crate) fn write(&self, write: Write) -> io::Result<()> {
        let mut platter = self.lock();
        platter.check()?;
        platter.cached.take(&write);
        platter.pending.push_back(write);
        platter.written += 1;
        Ok(())
    }

    /// Begins a flush: when it will be done, and what it covers.
    pub(crate) fn flush(&self) -> (Duration, u64) {
        let mut platter = self.lock();
        let now = true_time();
        // Whoever comes while the disk is busy shares the next flush.
        if platter.next_flush <= now {
            let start = platter.busy_until.max(now);
            let takes = platter.latency();
            (platter.next_flush, platter.busy_until) = (start, start + takes);
        }
        (platter.busy_until, platter.written)
    }

    /// Ends a flush.
    pub(crate) fn flushed(&self, upto: u64) -> io::Result<()> {
        let mut platter = self.lock();
        if platter.health == Health::FailsToFlush {
            platter.health = Health::Fine;
            platter.in_doubt = true;
        }
        if platter.in_doubt {
            return Err(io::Error::other("the log could not be flushed"));
        }
        platter.settle(upto);
        let durable = platter.durable.last().map_or(0, |last| last.index);
        platter.mark.written = platter.mark.committed.min(durable).max(platter.mark.written);
        Ok(())
    }

    /// How long a write beside the log takes.
    pub(crate) fn latency(&self) -> Duration {
        self.lock().latency()
    }

    /// How long it takes to write a whole state out; a large one takes seconds.
    pub(crate) fn snapshot_latency(&self) -> Duration {
        let mut platter = self.lock();
        if platter.rng.chance(300) { platter.rng.millis(200, 6_000) } else { platter.rng.millis(1, 50) }
    }

    /// The index up to which the log is surely kept.
    pub(crate) fn durable_upto(&self) -> u64 {
        self.lock().durable.last().map_or(0, |last| last.index)
    }

    /// Notes what the quorum committed; the mark is raised to it once it is durable here, and kept for sure after
    /// `sync_mark`.
    pub(crate) fn commit(&self, index: u64) {
        let mut platter = self.lock();
        platter.mark.committed = platter.mark.committed.max(index);
    }

    /// Keeps the mark for sure.
    pub(crate) fn sync_mark(&self) {
        let mut platter = self.lock();
        platter.mark.kept = platter.mark.written;
    }

    pub(crate) fn mark(&self) -> u64 {
        self.lock().mark.written
    }

    /// Replaces the snapshot as a whole, unless a newer one is there by now: the log may be purged up to that.
    pub(crate) fn keep(&self, kept: Kept) -> io::Result<()> {
        let mut platter = self.lock();
        platter.check()?;
        let is_newer = |(there, _): &Kept| there.last_log_id > kept.0.last_log_id;
        if !platter.snapshot.as_ref().is_some_and(is_newer) {
            platter.snapshot = Some(kept);
        }
        Ok(())
    }

    pub(crate) fn snapshot(&self) -> Option<Kept> {
        self.lock().snapshot.clone()
    }

    /// Opens a file, for what is written next.
    pub(crate) fn open(&self) -> io::Result<()> {
        match self.lock().short_of {
            Some(short @ (Shortage::Files | Shortage::Memory)) => Err(short.error()),
            Some(Shortage::Threads) | None => Ok(()),
        }
    }

    /// Opens or begins something as soon as its process can, as servers do.
    pub(crate) async fn in_time(&self, begin: impl Fn(&Self) -> io::Result<()>) -> io::Result<()> {
        let mut waits = Waits::default();
        loop {
            let begun = begin(self);
            let Some(wait) = begun.as_ref().err().and_then(|error| waits.after(error)) else { return begun };
            Sim::sleep(wait).await;
        }
    }

    /// Begins a thread for work on it.
    pub(crate) fn begin_thread(&self) -> io::Result<()> {
        match self.lock().short_of {
            Some(short @ (Shortage::Threads | Shortage::Memory)) => Err(short.error()),
            Some(Shortage::Files) | None => Ok(()),
        }
    }

    /// Lets its process lack something, or nothing any more.
    pub(crate) fn lacks(&self, short_of: Option<Shortage>) {
        self.lock().short_of = short_of;
    }

    /// Makes it behave otherwise.
    pub(crate) fn set(&self, health: Health) {
        self.lock().health = health;
    }

    /// The life that wrote is over.
    pub(crate) fn end(&self, ending: Ending) {
        let mut platter = self.lock();
        let kept = match ending {
            Ending::Killed if !platter.in_doubt => platter.written,
            _ => {
                let (low, high) = (platter.flushed, platter.written);
                platter.rng.within(low, high)
            }
        };
        platter.settle(kept);
        platter.cached = platter.durable.clone();
        platter.pending.clear();
        platter.written = platter.flushed;
        platter.in_doubt = false;
        platter.short_of = None;
        (platter.next_flush, platter.busy_until) = (Duration::ZERO, Duration::ZERO);
        if ending == Ending::PowerLoss && platter.rng.chance(500) {
            platter.mark.written = platter.mark.kept;
        }
        platter.mark.kept = platter.mark.written;
        platter.mark.committed = platter.mark.written;
    }
}

impl Platter {
    fn check(&self) -> io::Result<()> {
        match self.health {
            _ if self.in_doubt => Err(io::Error::other("an earlier flush failed")),
            Health::Full => Err(io::ErrorKind::StorageFull.into()),
            _ => Ok(()),
        }
    }

    fn settle(&mut self, upto: u64) {
        while self.flushed < upto {
            let Some(write) = self.pending.pop_front() else { return };
            self.durable.take(&write);
            self.flushed += 1;
        }
    }

    fn latency(&mut self) -> Duration {
        match self.health {
            Health::Slow(worst) => self.rng.micros(1_000, worst.as_micros() as u64),
            _ if self.rng.chance(10) => self.rng.micros(5_000, 60_000),
            _ => self.rng.micros(100, 2_500),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vote(term: u64) -> Write {
        Write::Vote(Vote::new(term, 1))
    }

    fn term(disk: &Disk) -> u64 {
        disk.read(|log| log.vote.map_or(0, |vote| vote.leader_id.term))
    }

    #[test]
    fn a_loss_of_power_takes_only_what_was_not_flushed() {
        let mut least = u64::MAX;
        let mut most = 0;
        for seed in 0..50 {
            let disk = Disk::new(Rng::stream(seed, "disk"));
            (1..=3).for_each(|n| disk.write(vote(n)).unwrap());
            disk.flushed(3).unwrap();
            (4..=6).for_each(|n| disk.write(vote(n)).unwrap());
            disk.end(Ending::PowerLoss);
            least = least.min(term(&disk));
            most = most.max(term(&disk));
        }
        assert_eq!((least, most), (3, 6));
    }

    #[test]
    fn a_killed_process_leaves_all_that_it_wrote() {
        let disk = Disk::new(Rng::stream(1, "disk"));
        disk.write(vote(9)).unwrap();
        disk.end(Ending::Killed);
        assert_eq!(term(&disk), 9);
    }

    #[test]
    fn after_a_failed_flush_nothing_is_written_until_the_next_life() {
        let disk = Disk::new(Rng::stream(1, "disk"));
        disk.write(vote(1)).unwrap();
        disk.set(Health::FailsToFlush);
        assert!(disk.flushed(1).is_err());
        assert!(disk.flushed(1).is_err());
        assert!(disk.write(vote(2)).is_err());
        disk.end(Ending::Killed);
        disk.write(vote(3)).unwrap();
        assert_eq!(term(&disk), 3);
    }

    #[test]
    fn what_a_process_lacks_ends_with_it_and_spoils_nothing_that_is_open() {
        let disk = Disk::new(Rng::stream(1, "disk"));
        for (short, opens, begins) in
            [(Shortage::Files, false, true), (Shortage::Memory, false, false), (Shortage::Threads, true, false)]
        {
            disk.lacks(Some(short));
            assert_eq!((disk.open().is_ok(), disk.begin_thread().is_ok()), (opens, begins), "{short:?}");
            disk.write(vote(1)).unwrap();
        }
        disk.end(Ending::Killed);
        assert!(disk.open().is_ok() && disk.begin_thread().is_ok());
    }

    #[test]
    fn a_full_disk_takes_nothing_until_it_is_freed() {
        let disk = Disk::new(Rng::stream(1, "disk"));
        disk.set(Health::Full);
        assert_eq!(disk.write(vote(1)).unwrap_err().kind(), io::ErrorKind::StorageFull);
        disk.set(Health::Fine);
        disk.write(vote(1)).unwrap();
    }
}
