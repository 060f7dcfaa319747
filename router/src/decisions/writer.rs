//! The thread that writes the log.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, BufWriter, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::Serialize;

use super::files::{self, Bound, CURRENT};
use super::{Head, Record};
use crate::pipeline::receipt::Receipt;
use crate::telemetry::decisions::DecisionMetrics;

/// Records that may wait for the disk.
const WAITING: usize = 4_096;

/// Candidates and workers that these may hold together: of many workers fewer records wait. About 40 MB.
const WAITING_PARTS: usize = 40 * WAITING;

/// How often a broken disk is told of.
const TELL: Duration = Duration::from_secs(60);

/// Longest wait at the end for what waits to be written.
const LAST_WAIT: Duration = Duration::from_secs(2);

#[derive(Serialize)]
struct Line<'a> {
    receipt: &'a Receipt,
    #[serde(skip_serializing_if = "Option::is_none")]
    case: Option<&'a planner::Case>,
}

/// The way to the thread.
#[derive(Debug)]
pub(super) struct Writer {
    queue: Mutex<Option<SyncSender<Record>>>,
    /// Closed by the thread when it ends.
    done: Mutex<Receiver<()>>,
    /// Candidates and workers of the records that wait.
    parts: Arc<AtomicUsize>,
    metrics: DecisionMetrics,
}

impl Writer {
    /// Goes on behind what is in `folder`, which is made if missing.
    pub(super) fn open(folder: &Path, bound: Bound, (head, metrics): (&Head, &DecisionMetrics)) -> io::Result<Self> {
        let head = serde_json::to_vec(head)?;
        let log = Log::open(folder, bound, head)?;
        let (queue, records) = sync_channel(WAITING);
        let (over, done) = sync_channel(0);
        let parts = Arc::new(AtomicUsize::new(0));
        let (counts, waiting) = (metrics.clone(), parts.clone());
        thread::Builder::new().name("decision-log".into()).spawn(move || {
            write_all(log, &records, (&counts, &waiting));
            drop(over);
        })?;
        Ok(Self { queue: Mutex::new(Some(queue)), done: Mutex::new(done), parts, metrics: metrics.clone() })
    }

    /// Hands a record over, unless there is no room for it.
    pub(super) fn write(&self, record: Record) {
        let parts = record.parts();
        let fits = self.parts.fetch_add(parts, Relaxed) + parts <= WAITING_PARTS;
        let sent = fits && self.queue.lock().as_ref().is_some_and(|queue| queue.try_send(record).is_ok());
        if !sent {
            self.parts.fetch_sub(parts, Relaxed);
            self.metrics.records.with_label_values(&["no_room"]).inc();
        }
    }

    /// Lets the thread write what waits, and end.
    pub(super) fn close(&self) {
        drop(self.queue.lock().take());
        if self.done.lock().recv_timeout(LAST_WAIT) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("the disk is too slow for the decision log; its newest records are lost");
        }
    }
}

fn write_all(mut log: Log, records: &Receiver<Record>, (metrics, waiting): (&DecisionMetrics, &AtomicUsize)) {
    let mut told: Option<Instant> = None;
    while let Some(record) = next(records, &mut log) {
        let outcome = match log.append(&record) {
            Ok(()) => "written",
            Err(error) => {
                if told.is_none_or(|at| at.elapsed() >= TELL) {
                    told = Some(Instant::now());
                    let folder = log.folder.display();
                    tracing::warn!(%error, %folder, "the decision log cannot be written; steps are served all the same");
                }
                "disk"
            }
        };
        waiting.fetch_sub(record.parts(), Relaxed);
        metrics.records.with_label_values(&[outcome]).inc();
    }
}

/// The next record; what was written is handed to the system before it is waited for.
fn next(records: &Receiver<Record>, log: &mut Log) -> Option<Record> {
    match records.try_recv() {
        Ok(record) => Some(record),
        Err(TryRecvError::Empty) => {
            log.flush();
            records.recv().ok()
        }
        Err(TryRecvError::Disconnected) => {
            log.flush();
            None
        }
    }
}

#[derive(Debug)]
struct Log {
    folder: PathBuf,
    bound: Bound,
    head: Vec<u8>,
    file: Option<Open>,
}

#[derive(Debug)]
struct Open {
    file: BufWriter<File>,
    size: u64,
    /// When its first and last record arrived.
    times: Option<(u64, u64)>,
}

impl Log {
    fn open(folder: &Path, bound: Bound, head: Vec<u8>) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let mut log = Self { folder: folder.to_owned(), bound, head, file: None };
        // Another policy may be in force than when the file that is there was written.
        let times = super::reading::times(&folder.join(CURRENT));
        let set_aside = times.map_or(Ok(()), |times| files::set_aside(folder, times));
        // A disk that is full now may not be later, and no router waits for it.
        if let Err(error) = set_aside.and_then(|()| log.renew().map(drop)) {
            tracing::warn!(%error, folder = %folder.display(), "the decision log cannot be written yet; it is tried again with each step");
        }
        Ok(log)
    }

    /// A new file to write to.
    fn renew(&mut self) -> io::Result<&mut Open> {
        files::tidy(&self.folder)?;
        files::make_room(&self.folder, self.bound)?;
        let path = self.folder.join(CURRENT);
        let file = OpenOptions::new().create(true).write(true).truncate(true).mode(0o600).open(path)?;
        let mut file = BufWriter::with_capacity(64 << 10, file);
        file.write_all(&self.head)?;
        file.write_all(b"\n")?;
        Ok(self.file.insert(Open { file, size: self.head.len() as u64 + 1, times: None }))
    }

    fn append(&mut self, record: &Record) -> io::Result<()> {
        let mut line = serde_json::to_vec(&Line { receipt: &record.receipt, case: record.case.as_ref() })?;
        line.push(b'\n');
        let is_full = |open: &Open| open.size + line.len() as u64 > self.bound.current;
        if let Some(times) = self.file.as_ref().filter(|open| is_full(open)).and_then(|open| open.times) {
            self.flush();
            self.file = None;
            files::set_aside(&self.folder, times)?;
        }
        let at = record.receipt.at_unix_ms;
        let open = match &mut self.file {
            Some(open) => open,
            None => self.renew()?,
        };
        open.size += line.len() as u64;
        open.times = Some(open.times.map_or((at, at), |(first, last)| (first.min(at), last.max(at))));
        let (written, times) = (open.file.write_all(&line), open.times);
        if written.is_err() {
            self.leave(times);
        }
        written
    }

    /// What stands in a file after an error is not known: the next record begins another one.
    fn leave(&mut self, times: Option<(u64, u64)>) {
        self.file = None;
        if let Some(times) = times
            && let Err(error) = files::set_aside(&self.folder, times)
        {
            tracing::debug!(%error, "what was written of the decision log is not kept");
        }
    }

    fn flush(&mut self) {
        if let Some(open) = &mut self.file
            && open.file.flush().is_err()
        {
            let times = open.times;
            self.leave(times);
        }
    }
}
