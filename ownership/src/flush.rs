//! Group commit of the log: waiters that share one fdatasync.
//!
//! At most one flush is in progress; records written meanwhile go with the next one. A failed flush is never repeated,
//! because the kernel may have dropped the pages: the log is closed for good ("poisoned") and the node stops.

use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use consensus::is_shortage;
use openraft::storage::IOFlushed;
use raft_log::api::raft_log_writer::RaftLogWriter;
use raft_log::chunked_wal::Config;
use raft_log::{Callback, ChunkId, RaftLog, Segment};
use tokio::sync::oneshot;

use crate::drop_thread::DropThread;
use crate::log_marks::{DurableEnd, LogWatermarksFile};
use crate::raft::TokioTypeConfig;
use crate::resource_shortages::ShortageTracker;
use crate::wal::WalTypes;

pub(crate) enum FlushWaiter {
    /// Raft itself, for an append.
    Raft(IOFlushed<TokioTypeConfig>),
    Call(oneshot::Sender<io::Result<()>>),
}

impl FlushWaiter {
    fn complete(self, result: io::Result<()>) {
        match self {
            FlushWaiter::Raft(flushed) => flushed.io_completed(result),
            // A caller that is gone needs no answer.
            FlushWaiter::Call(caller) => drop(caller.send(result)),
        }
    }
}

/// The log and its waiters.
pub(crate) struct GroupCommitLog {
    pub(crate) wal: RaftLog<WalTypes>,
    marks: Arc<LogWatermarksFile>,
    /// End of the last written record, as an offset in the whole log.
    end: u64,
    waiting: Vec<FlushWaiter>,
    is_flushing: bool,
    poison: Option<String>,
    pub(crate) shortages: Arc<ShortageTracker>,
    drop_thread: DropThread,
    /// Reserved file descriptor, released before the log's writer thread opens a file after the next flush, where an
    /// error is final.
    pub(crate) reserve: Option<File>,
}

impl GroupCommitLog {
    pub(crate) fn new(wal: RaftLog<WalTypes>, marks: Arc<LogWatermarksFile>, drop_thread: DropThread) -> Self {
        let end = marks.current().durable.unwrap_or_default().end;
        let shortages = Arc::default();
        Self {
            wal,
            marks,
            end,
            waiting: Vec::new(),
            is_flushing: false,
            poison: None,
            shortages,
            drop_thread,
            reserve: None,
        }
    }

    /// Writes to the log. A partial write poisons the log, because it must not reach the disk with the next flush.
    pub(crate) fn write(
        &mut self,
        write: impl FnOnce(&mut RaftLog<WalTypes>) -> io::Result<Segment>,
    ) -> io::Result<()> {
        if let Some(cause) = &self.poison {
            return Err(poison_error(cause));
        }
        let before = self.wal.on_disk_size();
        match write(&mut self.wal) {
            Ok(written) => self.end = written.offset + written.size,
            Err(error) if is_shortage(&error) && self.wal.on_disk_size() > before => {
                self.end += self.wal.on_disk_size() - before;
                self.continue_in_same_file(&error)?;
            }
            Err(error) => {
                self.poison_with(&error);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Continues in the current log file after the next one could not be created. The record itself is in the log, and
    /// the next record tries again. A new but unused file is removed; otherwise it would end up in the middle of the
    /// log.
    fn continue_in_same_file(&mut self, error: &io::Error) -> io::Result<()> {
        let next = self.marks.path().with_file_name("log").join(Config::chunk_file_name(ChunkId(self.end)));
        self.shortages.record(&next.display(), error);
        match std::fs::remove_file(&next) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                self.poison_with(&error);
                Err(error)
            }
            _ => Ok(()),
        }
    }

    /// Adds a waiter for what was written, and starts a flush unless one is in progress.
    pub(crate) fn flush(&mut self, store: &Arc<Mutex<Self>>, waiter: FlushWaiter) -> io::Result<()> {
        self.waiting.push(waiter);
        if self.is_flushing { Ok(()) } else { self.start(store) }
    }

    fn start(&mut self, store: &Arc<Mutex<Self>>) -> io::Result<()> {
        self.is_flushing = true;
        let last = self.wal.log_state().last().map_or(0, |last| last.0.index);
        let flushed = FlushCallback {
            store: Arc::downgrade(store),
            marks: self.marks.clone(),
            durable: DurableEnd { end: self.end, last },
            waiters: std::mem::take(&mut self.waiting),
            drop_thread: self.drop_thread.clone(),
            _reserve: self.reserve.take(),
        };
        // If it cannot be sent, it is dropped there, which fails its waiters.
        self.wal.flush(true, Some(flushed)).inspect_err(|error| self.poison_with(error))
    }

    /// Closes the log for writing and fails all waiters with the cause.
    pub(crate) fn poison_with(&mut self, error: &io::Error) {
        if self.poison.is_none() {
            tracing::error!(%error, "the log cannot be written any more; this node stops. {}", repair_advice(error));
        }
        self.poison.get_or_insert_with(|| error.to_string());
        for waiter in std::mem::take(&mut self.waiting) {
            waiter.complete(Err(clone_error(error)));
        }
    }
}

fn repair_advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "Free space on its disk and start it again",
        io::ErrorKind::NotFound => "Do not start it again where nothing is: that founds a second cluster",
        _ => "Check its disk; start it again once that is sound",
    }
}

fn poison_error(cause: &str) -> io::Error {
    io::Error::other(format!("the log stopped after an error: {cause}"))
}

fn clone_error(error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), error.to_string())
}

/// Callback that runs on the log's writer thread after a flush.
pub(crate) struct FlushCallback {
    store: Weak<Mutex<GroupCommitLog>>,
    marks: Arc<LogWatermarksFile>,
    durable: DurableEnd,
    waiters: Vec<FlushWaiter>,
    drop_thread: DropThread,
    /// Closed last, because the writer opens a file next.
    _reserve: Option<File>,
}

impl FlushCallback {
    fn notify_waiters(&mut self, result: &io::Result<()>) {
        for waiter in std::mem::take(&mut self.waiters) {
            waiter.complete(match result {
                Ok(()) => Ok(()),
                Err(error) => Err(clone_error(error)),
            });
        }
    }

    /// Returns why the log was poisoned, if it was.
    fn close_cause(&self, store: &Weak<Mutex<GroupCommitLog>>) -> Option<String> {
        let store = store.upgrade()?;
        let cause = lock(&store).ok().and_then(|flushing| flushing.poison.clone());
        self.release(store);
        cause
    }

    /// Drops a log from its writer thread. Closing it joins that thread, so another thread must do that.
    fn release(&self, store: Arc<Mutex<GroupCommitLog>>) {
        if let Some(last) = Arc::into_inner(store) {
            self.drop_thread.run(move || drop(last));
        }
    }
}

impl Callback for FlushCallback {
    fn send(mut self, result: Result<(), io::Error>) {
        let store = std::mem::take(&mut self.store);
        let result = match self.close_cause(&store) {
            // What was flushed after the log was poisoned may not be kept.
            Some(cause) => Err(poison_error(&cause)),
            None => result.and_then(|()| self.marks.advance_durable(self.durable)),
        };
        self.notify_waiters(&result);
        // A notified waiter may have closed the log by now.
        let Some(store) = store.upgrade() else { return };
        match (lock(&store), result) {
            (Ok(mut flushing), Err(error)) => flushing.poison_with(&error),
            (Ok(mut flushing), Ok(())) if flushing.waiting.is_empty() => flushing.is_flushing = false,
            // An error has already poisoned the log and failed all waiters.
            (Ok(mut flushing), Ok(())) => drop(flushing.start(&store)),
            (Err(_), _) => {}
        }
        self.release(store);
    }
}

impl Drop for FlushCallback {
    /// Handles a flush that the writer never executed because it stopped after an error.
    fn drop(&mut self) {
        let Some(store) = std::mem::take(&mut self.store).upgrade() else { return };
        let gone = || io::Error::other("the log's writer stopped after an error");
        self.notify_waiters(&Err(gone()));
        // Runs on another thread, because the dropping thread may hold the lock.
        self.drop_thread.run(move || {
            if let Ok(mut flushing) = lock(&store) {
                flushing.poison_with(&gone());
            }
        });
    }
}

/// Locks the log; never held across an await. Fails if a holder panicked, because the log's state is then unknown.
pub(crate) fn lock(store: &Mutex<GroupCommitLog>) -> io::Result<MutexGuard<'_, GroupCommitLog>> {
    store.lock().map_err(|_| io::Error::other("a panic left the log in doubt"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node_folder::NodeFolder;
    use crate::raft::Vote;
    use crate::wal::{self, MaxChunkSize, WalValue};

    fn opened() -> (tempfile::TempDir, Arc<Mutex<GroupCommitLog>>, Arc<LogWatermarksFile>) {
        let folder = tempfile::tempdir().unwrap();
        let node = NodeFolder::open(folder.path(), None).unwrap();
        let marks = Arc::new(
            LogWatermarksFile::open(&node.path("committed"), node.identity, node.contents().unwrap()).unwrap(),
        );
        let wal = wal::open(&node.path("log"), &marks, MaxChunkSize::default()).unwrap();
        let store = Arc::new(Mutex::new(GroupCommitLog::new(wal, marks.clone(), DropThread::begin().unwrap())));
        (folder, store, marks)
    }

    #[test]
    fn a_flush_after_the_log_closed_is_not_acknowledged() {
        let (_folder, store, marks) = opened();
        let before = marks.current();
        let (waiter, mut answer) = oneshot::channel();
        let durable = DurableEnd { end: before.durable.unwrap().end + 1, last: 1 };
        let waiters = vec![FlushWaiter::Call(waiter)];
        let flushed = FlushCallback {
            store: Arc::downgrade(&store),
            marks: marks.clone(),
            durable,
            waiters,
            drop_thread: DropThread::begin().unwrap(),
            _reserve: None,
        };
        lock(&store).unwrap().poison_with(&io::Error::other("its folder is gone"));
        flushed.send(Ok(()));
        let error = answer.try_recv().unwrap().unwrap_err().to_string();
        assert!(error.contains("its folder is gone"), "{error}");
        assert_eq!(marks.current(), before);
    }

    #[test]
    fn a_reserved_file_handle_is_held_until_the_next_flush_is_through() {
        let (_folder, store, _) = opened();
        let (mut held, reserve) = io::pipe().unwrap();
        let (waiter, answer) = oneshot::channel();
        let mut flushing = lock(&store).unwrap();
        flushing.reserve = Some(File::from(std::os::fd::OwnedFd::from(reserve)));
        flushing.is_flushing = true;
        flushing.flush(&store, FlushWaiter::Call(waiter)).unwrap();
        assert!(flushing.reserve.is_some(), "the flush on its way does not take it");
        flushing.start(&store).unwrap();
        assert!(flushing.reserve.is_none());
        drop(flushing);
        answer.blocking_recv().unwrap().unwrap();
        assert_eq!(io::Read::read(&mut held, &mut [0]).unwrap(), 0, "it is closed");
    }

    #[test]
    fn a_failed_flush_fails_all_waiters_and_stops_writes() {
        let (_folder, store, marks) = opened();
        let before = marks.current();
        let vote = |term| move |wal: &mut RaftLog<WalTypes>| wal.save_vote(WalValue(Vote::new(term, 1)));

        let (on_its_way, behind_it) = (oneshot::channel(), oneshot::channel());
        {
            let mut flushing = lock(&store).unwrap();
            flushing.is_flushing = true;
            flushing.write(vote(1)).unwrap();
            flushing.flush(&store, FlushWaiter::Call(behind_it.0)).unwrap();
        }
        let (waiters, durable) =
            (vec![FlushWaiter::Call(on_its_way.0)], DurableEnd { end: before.durable.unwrap().end, last: 0 });
        let flushed = FlushCallback {
            store: Arc::downgrade(&store),
            marks: marks.clone(),
            durable,
            waiters,
            drop_thread: DropThread::begin().unwrap(),
            _reserve: None,
        };
        flushed.send(Err(io::Error::from_raw_os_error(5)));

        for mut answer in [on_its_way.1, behind_it.1] {
            let error = answer.try_recv().unwrap().unwrap_err().to_string();
            assert!(error.contains("os error 5"), "{error}");
        }
        let error = lock(&store).unwrap().write(vote(2)).unwrap_err().to_string();
        assert!(error.contains("stopped after an error") && error.contains("os error 5"), "{error}");
        assert_eq!(marks.current(), before, "nothing more is vouched for");
    }
}
