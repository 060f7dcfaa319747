//! Reads the log: searches backwards from the newest record, or iterates over all records in order.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use planner::{Decision, RecordedPlanningInputs};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use vocabulary::{Micros, RequestId};

use super::files::{self, CURRENT_FILE, LogSegment};
use super::filter::{DecisionFilter, ReceiptFields};
use super::record::{DecisionLogHeader, FORMAT_VERSION, ReplayAttempt, ReplayLookup};
use super::version_1;
use crate::receipt::{RequestOutcome, rfc3339};
use vocabulary::RoutingMode;

/// Maximum duration of a search on disk.
const MAX_SEARCH_TIME: Duration = Duration::from_secs(4);

#[derive(Deserialize)]
struct ReceiptLine<T> {
    receipt: T,
}

/// When a record's request arrived.
#[derive(Deserialize)]
struct ArrivalTime {
    #[serde(with = "rfc3339")]
    arrived_at: u64,
}

#[derive(Deserialize)]
struct FormatVersion {
    version: u32,
}

/// Returns the version in the first line of a file; the current one where it cannot be read.
fn version_of(text: &str) -> u32 {
    let head = text.lines().next().and_then(|line| serde_json::from_str(line).ok());
    head.map_or(FORMAT_VERSION, |FormatVersion { version }| version)
}

/// Parses a line in the format of `version`.
fn parse_line<T: DeserializeOwned>(line: &str, version: u32) -> serde_json::Result<T> {
    match version {
        version_1::VERSION => serde_json::from_value(version_1::upgraded(serde_json::from_str(line)?)),
        _ => serde_json::from_str(line),
    }
}

/// Appends matching receipts that are not in `search` yet, newest first, until there are `limit`. Returns whether
/// everything relevant was searched.
pub(super) fn search(folder: &Path, (wanted, limit): (&DecisionFilter, usize), search: &mut DecisionMatches) -> bool {
    let begun = Instant::now();
    // Read before listing the other files: a file rotated meanwhile is found twice instead of missed.
    let current = files::read_text(&folder.join(CURRENT_FILE)).unwrap_or_default();
    if search.search_text(&String::from_utf8_lossy(&current), (wanted, limit)) {
        return true;
    }
    let Ok(segments) = files::segments(folder) else { return false };
    let mut complete = true;
    let older = |segment: &&LogSegment| segment.first != u64::MAX && wanted.may_match(segment.first, segment.last);
    for segment in segments.iter().rev().filter(older) {
        if begun.elapsed() > MAX_SEARCH_TIME {
            return false;
        }
        match read_segment(segment) {
            Some(text) if search.search_text(&text, (wanted, limit)) => return true,
            Some(_) => {}
            None => complete = false,
        }
    }
    complete
}

#[derive(Debug, Default)]
pub(super) struct DecisionMatches {
    pub(super) receipts: Vec<Box<RawValue>>,
    pub(super) requests: HashSet<RequestId>,
}

impl DecisionMatches {
    /// Appends matching receipts of a file, from its end. Returns whether there are enough.
    fn search_text(&mut self, text: &str, (wanted, limit): (&DecisionFilter, usize)) -> bool {
        // A text search rejects most lines faster than parsing them would.
        let words = [wanted.request.map(|id| id.to_string()), wanted.session.map(|id| id.to_string())];
        let version = version_of(text);
        let has = |line: &str| words.iter().flatten().all(|word| line.contains(word.as_str()));
        for line in text.lines().rev().filter(|line| has(line)) {
            let Ok(ReceiptLine::<ReceiptFields> { receipt: facts }) = parse_line(line, version) else { continue };
            if wanted.matches(&facts) && !self.requests.contains(&facts.request_id) {
                let Ok(ReceiptLine::<Box<RawValue>> { receipt }) = parse_line(line, version) else { continue };
                self.requests.insert(facts.request_id);
                self.receipts.push(receipt);
            }
            if self.receipts.len() >= limit {
                return true;
            }
        }
        false
    }
}

fn read_segment(segment: &LogSegment) -> Option<String> {
    // A file that was compressed meanwhile has another name.
    let bytes = match files::read_text(&segment.path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            files::read_text(&segment.path.with_extension("jsonl.gz"))
        }
        read => read,
    };
    bytes.ok().map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns the arrival of a file's first and last record; `None` without records.
pub(super) fn arrival_range(path: &Path) -> Option<(u64, u64)> {
    let text = String::from_utf8_lossy(&files::read_text(path).ok()?).into_owned();
    let version = version_of(&text);
    let at =
        |line: &str| parse_line::<ReceiptLine<ArrivalTime>>(line, version).ok().map(|line| line.receipt.arrived_at);
    text.lines().filter_map(at).fold(None, |times, at| {
        let (first, last) = times.unwrap_or((at, at));
        Some((at.min(first), at.max(last)))
    })
}

/// Part of a record that `what-if` needs.
#[derive(Debug)]
pub struct ReplayRecord {
    /// Header of its file.
    pub head: Arc<DecisionLogHeader>,
    /// The decision and its result.
    pub receipt: ReplayReceipt,
    /// Inputs of the planner; `None` if it was not asked.
    pub case: Option<RecordedPlanningInputs>,
}

/// Part of a receipt that is compared.
#[derive(Deserialize, Debug)]
pub struct ReplayReceipt {
    pub lookup: ReplayLookup,
    pub mode: RoutingMode,
    pub decision: Option<Decision>,
    pub admission_wait: Option<ReplayAdmissionWait>,
    pub attempts: Vec<ReplayAttempt>,
    pub observed: Option<ReplayObservation>,
}

/// Time the step waited in the admission queue.
#[derive(Clone, Copy, Deserialize, Debug)]
pub struct ReplayAdmissionWait {
    #[serde(with = "vocabulary::micros_with_unit")]
    pub duration: Micros,
}

#[derive(Clone, Copy, Deserialize, Debug)]
pub struct ReplayObservation {
    pub outcome: RequestOutcome,
    #[serde(with = "vocabulary::optional_micros_with_unit")]
    pub ttft: Option<Micros>,
}

#[derive(Deserialize)]
struct ReplayRecordLine {
    receipt: ReplayReceipt,
    #[serde(rename = "planning_inputs")]
    case: Option<RecordedPlanningInputs>,
}

/// A log cannot be read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what each is")]
pub enum DecisionRecordsError {
    #[error("cannot read {}: {source}", .path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{} holds no decision log; accepted: a router's data directory, its folder `decisions`, or a file of it", .0.display())]
    None(PathBuf),
    #[error("{}: its first line is not that of a decision log of version 1 or {FORMAT_VERSION}: {problem}", .path.display())]
    Head { path: PathBuf, problem: String },
    #[error("{}:{line}: {problem}; accepted: a record of a decision on each line, whole but for the last one", .path.display())]
    Damaged { path: PathBuf, line: usize, problem: String },
}

/// Iterator over all records of a log, oldest first, file by file.
#[derive(Debug)]
pub struct DecisionRecords {
    files: std::vec::IntoIter<PathBuf>,
    /// Number of files.
    pub count: usize,
    /// Files whose last line was cut off, as a killed router leaves it.
    pub truncated: Vec<String>,
}

impl DecisionRecords {
    /// Opens a data directory, the log's folder, or one file.
    pub fn open(path: &Path) -> Result<Self, DecisionRecordsError> {
        let inner = path.join("decisions");
        let folder = if inner.is_dir() { &inner } else { path };
        let unreadable = |source| DecisionRecordsError::Unreadable { path: path.to_owned(), source };
        let files: Vec<_> = if folder.is_dir() {
            files::segments(folder).map_err(unreadable)?.into_iter().map(|segment| segment.path).collect()
        } else {
            std::fs::metadata(folder).map_err(unreadable)?;
            vec![folder.to_owned()]
        };
        if files.is_empty() {
            return Err(DecisionRecordsError::None(path.to_owned()));
        }
        Ok(Self { count: files.len(), files: files.into_iter(), truncated: Vec::new() })
    }

    /// Returns the records of the next file; `None` after the last one.
    pub fn next_file(&mut self) -> Option<Result<Vec<ReplayRecord>, DecisionRecordsError>> {
        let path = self.files.next()?;
        Some(self.parse_records(&path))
    }

    fn parse_records(&mut self, path: &Path) -> Result<Vec<ReplayRecord>, DecisionRecordsError> {
        let unreadable = |source| DecisionRecordsError::Unreadable { path: path.to_owned(), source };
        let text = String::from_utf8_lossy(&files::read_text(path).map_err(unreadable)?).into_owned();
        let mut lines = text.lines().zip(1..).filter(|(line, _)| !line.trim().is_empty()).peekable();
        let Some((first, _)) = lines.next() else { return Ok(Vec::new()) };
        let wrong = |problem| DecisionRecordsError::Head { path: path.to_owned(), problem };
        let unread = |error: serde_json::Error| wrong(error.to_string());
        let FormatVersion { version } = serde_json::from_str(first).map_err(unread)?;
        if ![version_1::VERSION, FORMAT_VERSION].contains(&version) {
            return Err(wrong(format!("it says version {version}")));
        }
        let head: Arc<DecisionLogHeader> = Arc::new(parse_line(first, version).map_err(unread)?);
        let mut entries = Vec::new();
        while let Some((text, line)) = lines.next() {
            match parse_line(text, version) {
                Ok(ReplayRecordLine { receipt: told, case }) => {
                    entries.push(ReplayRecord { head: head.clone(), receipt: told, case })
                }
                Err(_) if lines.peek().is_none() && is_truncated(text) => {
                    self.truncated.push(format!("{}:{line}", path.display()));
                }
                Err(error) => {
                    return Err(DecisionRecordsError::Damaged {
                        path: path.to_owned(),
                        line,
                        problem: error.to_string(),
                    });
                }
            }
        }
        Ok(entries)
    }
}

/// Returns whether the last line of a file is truncated: a whole line is always valid JSON.
fn is_truncated(line: &str) -> bool {
    serde_json::from_str::<serde::de::IgnoredAny>(line).is_err()
}
