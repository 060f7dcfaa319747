//! Writer thread of the decision log.

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

use super::files::{self, CURRENT_FILE, LogSizeLimit};
use super::record::{DecisionLogHeader, DecisionRecord};
use crate::receipt::Receipt;
use crate::telemetry::decision_metrics::DecisionMetrics;

/// Maximum number of queued records.
const MAX_QUEUED_RECORDS: usize = 4_096;

/// Maximum number of entries (candidates and workers) in all queued records: with many workers fewer records are
/// queued. About 40 MB.
const MAX_QUEUED_ENTRIES: usize = 40 * MAX_QUEUED_RECORDS;

/// Bytes of the line buffer that are kept for the next record.
const MAX_KEPT_LINE: usize = 64 << 10;

/// How long records collect before they are written.
const COLLECT_INTERVAL: Duration = Duration::from_millis(10);

/// Minimum interval between log lines about a failing disk.
const ERROR_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Maximum wait for queued records at shutdown.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Serialize)]
struct RecordLine<'a> {
    receipt: &'a Receipt,
    #[serde(rename = "planning_inputs", skip_serializing_if = "Option::is_none")]
    case: Option<&'a planner::RecordedPlanningInputs>,
}

/// Handle of the writer thread.
#[derive(Debug)]
pub(super) struct DecisionLogWriter {
    queue: Mutex<Option<SyncSender<DecisionRecord>>>,
    /// Disconnected by the thread when it ends.
    finished: Mutex<Receiver<()>>,
    /// Entries of all queued records.
    queued_entries: Arc<AtomicUsize>,
    metrics: DecisionMetrics,
}

impl DecisionLogWriter {
    /// Starts the thread. Continues the log in `folder`, which is created if missing.
    pub(super) fn open(
        folder: &Path,
        limit: LogSizeLimit,
        (head, metrics): (&DecisionLogHeader, &DecisionMetrics),
    ) -> io::Result<Self> {
        let head = serde_json::to_vec(head)?;
        let log = SegmentedLog::open(folder, limit, head)?;
        let (queue, records) = sync_channel(MAX_QUEUED_RECORDS);
        let (over, done) = sync_channel(0);
        let parts = Arc::new(AtomicUsize::new(0));
        let (counts, waiting) = (metrics.clone(), parts.clone());
        thread::Builder::new().name("decision-log".into()).spawn(move || {
            write_all(log, &records, (&counts, &waiting));
            drop(over);
        })?;
        Ok(Self {
            queue: Mutex::new(Some(queue)),
            finished: Mutex::new(done),
            queued_entries: parts,
            metrics: metrics.clone(),
        })
    }

    /// Queues a record, or drops and counts it if there is no room.
    pub(super) fn write(&self, record: DecisionRecord) {
        let parts = record.entry_count();
        let fits = self.queued_entries.fetch_add(parts, Relaxed) + parts <= MAX_QUEUED_ENTRIES;
        let sent = fits && self.queue.lock().as_ref().is_some_and(|queue| queue.try_send(record).is_ok());
        if !sent {
            self.queued_entries.fetch_sub(parts, Relaxed);
            self.metrics.records.with_label_values(&["queue_full"]).inc();
        }
    }

    /// Lets the thread write all queued records and waits for its end.
    pub(super) fn close(&self) {
        drop(self.queue.lock().take());
        if self.finished.lock().recv_timeout(CLOSE_TIMEOUT) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("the disk is too slow for the decision log; its newest records are lost");
        }
    }
}

fn write_all(
    mut log: SegmentedLog,
    records: &Receiver<DecisionRecord>,
    (metrics, waiting): (&DecisionMetrics, &AtomicUsize),
) {
    let mut last_warned: Option<Instant> = None;
    while let Some(record) = next_record(records, &mut log) {
        let outcome = match log.append(&record) {
            Ok(()) => "written",
            Err(error) => {
                if last_warned.is_none_or(|at| at.elapsed() >= ERROR_LOG_INTERVAL) {
                    last_warned = Some(Instant::now());
                    let folder = log.folder.display();
                    tracing::warn!(%error, %folder, "the decision log cannot be written; steps are served all the same");
                }
                "write_failed"
            }
        };
        waiting.fetch_sub(record.entry_count(), Relaxed);
        metrics.records.with_label_values(&[outcome]).inc();
    }
}

/// Receives the next record; flushes before it blocks. After a wait it lets further records collect, because waking
/// this thread and writing to the file for each record would cost every request more than its record does.
fn next_record(records: &Receiver<DecisionRecord>, log: &mut SegmentedLog) -> Option<DecisionRecord> {
    match records.try_recv() {
        Ok(record) => Some(record),
        Err(TryRecvError::Empty) => {
            log.flush();
            let record = records.recv().ok()?;
            thread::sleep(COLLECT_INTERVAL);
            Some(record)
        }
        Err(TryRecvError::Disconnected) => {
            log.flush();
            None
        }
    }
}

#[derive(Debug)]
struct SegmentedLog {
    folder: PathBuf,
    limit: LogSizeLimit,
    head: Vec<u8>,
    file: Option<OpenSegment>,
    /// Buffer of the line that is written.
    line: Vec<u8>,
}

#[derive(Debug)]
struct OpenSegment {
    file: BufWriter<File>,
    size: u64,
    /// Arrival of the first and last record.
    arrival_range: Option<(u64, u64)>,
}

impl SegmentedLog {
    fn open(folder: &Path, limit: LogSizeLimit, head: Vec<u8>) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let mut log = Self { folder: folder.to_owned(), limit, head, file: None, line: Vec::new() };
        // The policy may have changed since the existing file was written.
        let times = super::reader::arrival_range(&folder.join(CURRENT_FILE));
        let set_aside = times.map_or(Ok(()), |times| files::rotate(folder, times));
        // A full disk may have space later, and the router must not wait for it.
        if let Err(error) = set_aside.and_then(|()| log.create_segment().map(drop)) {
            tracing::warn!(%error, folder = %folder.display(), "the decision log cannot be written yet; it is tried again with each step");
        }
        Ok(log)
    }

    /// Creates a new current file.
    fn create_segment(&mut self) -> io::Result<&mut OpenSegment> {
        files::clean_up(&self.folder)?;
        files::delete_oldest(&self.folder, self.limit)?;
        let path = self.folder.join(CURRENT_FILE);
        let file = OpenOptions::new().create(true).write(true).truncate(true).mode(0o600).open(path)?;
        let mut file = BufWriter::with_capacity(64 << 10, file);
        file.write_all(&self.head)?;
        file.write_all(b"\n")?;
        Ok(self.file.insert(OpenSegment { file, size: self.head.len() as u64 + 1, arrival_range: None }))
    }

    fn append(&mut self, record: &DecisionRecord) -> io::Result<()> {
        let mut line = std::mem::take(&mut self.line);
        line.clear();
        serde_json::to_writer(&mut line, &RecordLine { receipt: &record.receipt, case: record.case.as_ref() })?;
        line.push(b'\n');
        let written = self.append_line(&line, record.receipt.arrived_at);
        line.shrink_to(MAX_KEPT_LINE);
        self.line = line;
        written
    }

    fn append_line(&mut self, line: &[u8], at: u64) -> io::Result<()> {
        let is_full = |open: &OpenSegment| open.size + line.len() as u64 > self.limit.current_file;
        if let Some(times) = self.file.as_ref().filter(|open| is_full(open)).and_then(|open| open.arrival_range) {
            self.flush();
            self.file = None;
            files::rotate(&self.folder, times)?;
        }
        let open = match &mut self.file {
            Some(open) => open,
            None => self.create_segment()?,
        };
        open.size += line.len() as u64;
        open.arrival_range = Some(open.arrival_range.map_or((at, at), |(first, last)| (first.min(at), last.max(at))));
        let (written, times) = (open.file.write_all(line), open.arrival_range);
        if written.is_err() {
            self.abandon_segment(times);
        }
        written
    }

    /// After an error the file's contents are unknown, so the next record starts a new file.
    fn abandon_segment(&mut self, times: Option<(u64, u64)>) {
        self.file = None;
        if let Some(times) = times
            && let Err(error) = files::rotate(&self.folder, times)
        {
            tracing::debug!(%error, "what was written of the decision log is not kept");
        }
    }

    fn flush(&mut self) {
        if let Some(open) = &mut self.file
            && open.file.flush().is_err()
        {
            let times = open.arrival_range;
            self.abandon_segment(times);
        }
    }
}
