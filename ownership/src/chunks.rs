//! Survey of the log's files: reads and verifies every byte before anything may write to them.
//!
//! The log library truncates whatever looks like a torn tail, and a corrupted length looks like one. Therefore this
//! survey decides what is torn, and reports file and offset of any other damage.

use std::fs::{self, File};
use std::io::{self, BufReader, ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use raft_log::chunked_wal::Config;
use raft_log::codeq::Decode;
use raft_log::codeq::config::CodeqConfig;
use raft_log::types::Checksum;
use raft_log::{ChunkId, RaftLogRecord};

use crate::error::LedgerNodeError;
use crate::replayed_log::{PositionInChunk, ReplayedLog};
use crate::wal::WalTypes;

/// Smallest unit that a disk writes atomically, in bytes.
const SECTOR: u64 = 512;

pub(crate) type WalRecord = RaftLogRecord<WalTypes>;

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct WalChunk {
    pub(crate) path: PathBuf,
    /// Offset of the file's start in the whole log; part of its name.
    pub(crate) start: u64,
    pub(crate) length: u64,
}

/// Torn tail that a crash may have left: the file ends, or turns into zeros, inside a record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct TornEnd {
    pub(crate) path: PathBuf,
    /// Offset of the incomplete record in the file.
    pub(crate) at: u64,
    pub(crate) bytes: u64,
    pub(crate) cause: String,
}

/// Contents of the log's files.
#[derive(Debug, Default)]
pub(crate) struct LogSurvey {
    /// Files with at least one whole record, in order.
    pub(crate) chunks: Vec<WalChunk>,
    /// Files after them, whose first record was never completely written.
    pub(crate) unbegun: Vec<WalChunk>,
    /// Torn tail of the last chunk, if it does not end with a whole record.
    pub(crate) torn: Option<TornEnd>,
    /// Offset in the whole log at which the last whole record ends.
    pub(crate) end: u64,
    /// State that results from the records.
    pub(crate) replay: ReplayedLog,
}

impl LogSurvey {
    /// Reads the whole log.
    pub(crate) fn of(folder: &Path) -> Result<Self, LedgerNodeError> {
        let mut survey = Self::default();
        let files = list(folder)?;
        for (place, chunk) in files.iter().enumerate() {
            let later = &files[place + 1..];
            let Some(stop) = survey.read(chunk)? else { continue };
            survey.classify_stop(chunk, stop, later)?;
            break;
        }
        Ok(survey)
    }

    /// Reads a chunk's records. Returns where it stopped if the chunk does not end with a whole record.
    fn read(&mut self, chunk: &WalChunk) -> Result<Option<ScanStop>, LedgerNodeError> {
        if !self.chunks.is_empty() && chunk.start != self.end {
            let missing = Config::chunk_file_name(ChunkId(self.end));
            let detail =
                format!("it begins at offset {} of the log, not at {}: {missing} is missing", chunk.start, self.end);
            return Err(damage_error(&chunk.path, detail));
        }
        let file = File::open(&chunk.path).map_err(LedgerNodeError::io(&chunk.path))?;
        let mut reader = CountingReader { from: BufReader::with_capacity(1 << 20, file), at: 0 };
        while reader.at < chunk.length {
            let at = reader.at;
            let record = match WalRecord::decode(&mut reader) {
                Ok(record) => record,
                Err(error) if is_damage(&error) => return Ok(Some(ScanStop { at, error })),
                Err(error) => return Err(read_error(&chunk.path, at, &error)),
            };
            let applied = self
                .replay
                .apply_record(&record, if at == 0 { PositionInChunk::First } else { PositionInChunk::Later });
            applied.map_err(|detail| {
                damage_error(&chunk.path, format!("the record at offset {at} does not fit: {detail}"))
            })?;
            if at == 0 {
                self.chunks.push(chunk.clone());
            }
            self.end = chunk.start + reader.at;
        }
        let empty = || ScanStop { at: 0, error: ErrorKind::UnexpectedEof.into() };
        Ok((chunk.length == 0).then(empty))
    }

    /// Distinguishes a torn tail from damage: after a torn tail there must be no whole record.
    fn classify_stop(&mut self, chunk: &WalChunk, stop: ScanStop, later: &[WalChunk]) -> Result<(), LedgerNodeError> {
        let ScanStop { at, error } = stop;
        let cause = match error.kind() {
            ErrorKind::UnexpectedEof => "the file ends in it".to_owned(),
            _ => error.to_string(),
        };
        let detail = |why: &str| format!("the record at offset {at} cannot be read ({cause}), {why}");
        for next in later {
            if has_whole_first_record(next)? {
                return Err(damage_error(&chunk.path, detail("and a later chunk of the log is there")));
            }
        }
        let rest = read_tail(chunk, at)?;
        if is_unknown_entry(&rest) {
            let why = "but its checksum is right: a newer release wrote it, so start that one";
            return Err(damage_error(&chunk.path, detail(why)));
        }
        if !looks_torn(&rest, at, &error) {
            return Err(damage_error(&chunk.path, detail("and it is no end that a crash leaves")));
        }
        if let Some(after) = find_whole_record(&rest) {
            let why = format!("but the one at offset {} is whole", at + after);
            return Err(damage_error(&chunk.path, detail(&why)));
        }
        self.unbegun = if at == 0 { std::slice::from_ref(chunk) } else { &[] }.iter().chain(later).cloned().collect();
        if at > 0 {
            let (path, bytes) = (chunk.path.clone(), chunk.length - at);
            self.torn = Some(TornEnd { path, at, bytes, cause });
        }
        Ok(())
    }
}

/// Offset at which reading stopped, and why.
struct ScanStop {
    at: u64,
    error: io::Error,
}

pub(crate) fn damage_error(path: &Path, detail: impl Into<String>) -> LedgerNodeError {
    LedgerNodeError::Damaged { path: path.to_owned(), detail: detail.into() }
}

fn read_error(path: &Path, at: u64, error: &io::Error) -> LedgerNodeError {
    let source = io::Error::new(error.kind(), format!("it cannot be read at offset {at}: {error}"));
    LedgerNodeError::Io { path: path.to_owned(), source }
}

/// Returns whether a decoder's error is about the bytes; any other error comes from the disk.
fn is_damage(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::InvalidData | ErrorKind::InvalidInput)
}

/// Lists the chunks of a folder, in order. Refuses any other file, because it may be a renamed chunk.
fn list(folder: &Path) -> Result<Vec<WalChunk>, LedgerNodeError> {
    let mut chunks = Vec::new();
    for entry in fs::read_dir(folder).map_err(LedgerNodeError::io(folder))? {
        let path = entry.map_err(LedgerNodeError::io(folder))?.path();
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if name == "LOCK" {
            continue;
        }
        let Some(start) = start_of(&name) else {
            return Err(damage_error(
                &path,
                "it is no file of the log: move it out of this folder, or give a chunk its name back",
            ));
        };
        let found = fs::metadata(&path).map_err(LedgerNodeError::io(&path))?;
        if !found.is_file() {
            return Err(damage_error(&path, "it stands where a chunk of the log should be and is no file"));
        }
        chunks.push(WalChunk { path, start, length: found.len() });
    }
    chunks.sort_by_key(|chunk| chunk.start);
    Ok(chunks)
}

/// Returns the offset in the whole log of the chunk with this name; `None` if it is not a chunk's name.
pub(crate) fn start_of(name: &str) -> Option<u64> {
    let start = Config::parse_chunk_file_name(name).ok();
    start.filter(|start| Config::chunk_file_name(ChunkId(*start)) == name)
}

/// Returns whether a chunk's first record was completely written.
fn has_whole_first_record(chunk: &WalChunk) -> Result<bool, LedgerNodeError> {
    let file = File::open(&chunk.path).map_err(LedgerNodeError::io(&chunk.path))?;
    match WalRecord::decode(BufReader::new(file)) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(false),
        Err(error) if is_damage(&error) => Ok(!read_tail(chunk, 0)?.iter().all(|byte| *byte == 0)),
        Err(error) => Err(read_error(&chunk.path, 0, &error)),
    }
}

fn read_tail(chunk: &WalChunk, at: u64) -> Result<Vec<u8>, LedgerNodeError> {
    let file = File::open(&chunk.path).map_err(LedgerNodeError::io(&chunk.path))?;
    let mut rest = vec![0; usize::try_from(chunk.length - at).unwrap_or(usize::MAX)];
    file.read_exact_at(&mut rest, at).map_err(|error| read_error(&chunk.path, at, &error))?;
    Ok(rest)
}

/// Returns whether a crash during a write can leave this: the file ends inside the record, or it contains only zeros
/// from some sector on, because its length reached the disk before its data.
fn looks_torn(rest: &[u8], at: u64, error: &io::Error) -> bool {
    let written = rest.iter().rposition(|byte| *byte != 0).map_or(0, |last| last as u64 + 1);
    let zeros_from = if written == 0 { at } else { (at + written).next_multiple_of(SECTOR) };
    error.kind() == ErrorKind::UnexpectedEof || zeros_from < at + rest.len() as u64
}

/// Returns whether `rest` begins with an entry whose checksum is right but which cannot be decoded.
fn is_unknown_entry(rest: &[u8]) -> bool {
    let number = |at: usize| Some(u32::from_be_bytes(rest.get(at..at + 4)?.try_into().ok()?) as usize);
    let after = |at: usize| Some(at + 4 + number(at)?);
    let sum_at = |kind| match kind {
        // An entry: its id and its payload, each preceded by its length.
        1 => after(after(4)?),
        _ => None,
    };
    let found = || {
        let at = sum_at(number(0)?)?;
        Some((rest.get(..at)?, u64::from_be_bytes(rest.get(at..at + 8)?.try_into().ok()?)))
    };
    found().is_some_and(|(covered, sum)| Checksum::hash(covered) == sum)
}

/// Returns the offset in `rest`, beyond its first byte, at which a whole record begins.
fn find_whole_record(rest: &[u8]) -> Option<u64> {
    let written = rest.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    let begins = |at: &usize| rest[*at..].starts_with(&[0, 0, 0]) && rest.get(at + 3).is_some_and(|kind| *kind <= 5);
    let whole = |at: &usize| WalRecord::decode(&rest[*at..]).is_ok();
    (1..written).filter(begins).find(whole).map(|at| at as u64)
}

/// Reader that counts the bytes it has read.
struct CountingReader<R> {
    from: R,
    at: u64,
}

impl<R: Read> Read for CountingReader<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let read = self.from.read(to)?;
        self.at += read as u64;
        Ok(read)
    }
}
