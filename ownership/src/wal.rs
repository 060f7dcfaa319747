//! The write-ahead log on disk: its contents, and how it is opened.
//!
//! Only a torn tail that was never acknowledged is truncated; any other damage is refused with file and offset.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use ledger::{Command, PrefixPoint};
use openraft::EntryPayload;
use raft_log::api::raft_log_writer::RaftLogWriter;
use raft_log::codeq::{Decode, Encode};
use raft_log::{Config, RaftLog};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::chunks::{LogSurvey, TornEnd, damage_error};
use crate::error::LedgerNodeError;
use crate::flush::FlushCallback;
use crate::log_marks::{DurableEnd, LogWatermarks, LogWatermarksFile};
use crate::node_folder::create_private_folder;
use crate::raft::{LogId, Payload, Vote};

/// Maximum length of a record that is read back, in bytes.
const MAX_RECORD_BYTES: u32 = 256 << 20;

/// Maximum size of one log file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MaxChunkSize(pub(crate) usize);

impl Default for MaxChunkSize {
    /// Small, so that a purge frees disk space.
    fn default() -> Self {
        Self(64 << 20)
    }
}

/// A value in the log: length and MessagePack. The log's own checksum covers it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct WalValue<T>(pub(crate) T);

impl<T: Serialize> Encode for WalValue<T> {
    fn encode<W: Write>(&self, mut to: W) -> Result<usize, io::Error> {
        let bytes = rmp_serde::to_vec(&self.0).map_err(io::Error::other)?;
        let length = u32::try_from(bytes.len()).ok().filter(|length| *length <= MAX_RECORD_BYTES);
        let length = length.ok_or_else(|| io::Error::other("a record is too long for the log"))?;
        to.write_all(&length.to_be_bytes())?;
        to.write_all(&bytes)?;
        Ok(4 + bytes.len())
    }
}

impl<T: DeserializeOwned> Decode for WalValue<T> {
    fn decode<R: Read>(mut from: R) -> Result<Self, io::Error> {
        let mut length = [0u8; 4];
        from.read_exact(&mut length)?;
        let length = u32::from_be_bytes(length);
        if length > MAX_RECORD_BYTES {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a record of {length} bytes")));
        }
        let mut bytes = Vec::new();
        from.take(u64::from(length)).read_to_end(&mut bytes)?;
        if bytes.len() < length as usize {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let value = rmp_serde::from_slice(&bytes).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
        Ok(Self(value))
    }
}

/// Type parameters of the log library.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct WalTypes;

impl raft_log::Types for WalTypes {
    type LogId = WalValue<LogId>;
    type LogPayload = WalValue<Payload>;
    type Vote = WalValue<Vote>;
    type Callback = FlushCallback;
    type UserData = String;

    fn log_index(log_id: &Self::LogId) -> u64 {
        log_id.0.index
    }

    fn payload_size(payload: &Self::LogPayload) -> u64 {
        match &payload.0 {
            EntryPayload::Normal(proposal) => {
                64 + proposal.0.submissions.iter().map(|submission| weight(&submission.command)).sum::<u64>()
            }
            _ => 256,
        }
    }
}

/// Estimates a command's size in memory, in bytes, for the cache limit.
fn weight(command: &Command) -> u64 {
    const COMMAND_BYTES: u64 = 256;
    match command {
        Command::Batch(commands) => COMMAND_BYTES + commands.iter().map(weight).sum::<u64>(),
        Command::Seal(seal) => COMMAND_BYTES + (size_of::<PrefixPoint>() * seal.run.points.len()) as u64,
        _ => COMMAND_BYTES,
    }
}

/// Opens the log and raises the marks to its end.
pub(crate) fn open(
    folder: &Path,
    marks: &LogWatermarksFile,
    chunk: MaxChunkSize,
) -> Result<RaftLog<WalTypes>, LedgerNodeError> {
    let io = |error| LedgerNodeError::io(folder)(error);
    create_private_folder(folder).map_err(io)?;
    let survey = LogSurvey::of(folder)?;
    check_survey(folder, &survey, marks)?;
    cut_torn_tail(folder, &survey)?;
    rewrite_tail(folder, &survey, marks.current())?;
    let last = survey.replay.last.map_or(0, |last| last.index);
    marks.advance_durable(DurableEnd { end: survey.end, last }).map_err(LedgerNodeError::io(marks.path()))?;
    let mut wal: RaftLog<WalTypes> = RaftLog::open(config(folder, chunk)).map_err(io)?;
    if survey.replay.note.is_none() {
        let noted = wal.save_user_data(Some(marks.owner_note())).map_err(io)?;
        wal.flush(true, None).and_then(|()| wal.wait_worker_idle()).map_err(io)?;
        let durable = DurableEnd { end: noted.offset + noted.size, last };
        marks.advance_durable(durable).map_err(LedgerNodeError::io(marks.path()))?;
    }
    marks.sync()?;
    Ok(wal)
}

/// Refuses a log that lacks something below the marks, or that belongs to another node.
fn check_survey(folder: &Path, survey: &LogSurvey, marks: &LogWatermarksFile) -> Result<(), LedgerNodeError> {
    let marked = marks.current();
    match &survey.replay.note {
        Some(note) if *note != marks.owner_note() => {
            return Err(damage_error(
                folder,
                format!("it is the log of another node ({note}, not {})", marks.owner_note()),
            ));
        }
        Some(_) if marked.durable.is_none() => {
            return Err(damage_error(
                marks.path(),
                "it ends at offset 16, but this log was written with the longer form",
            ));
        }
        _ => {}
    }
    let durable = marked.durable.unwrap_or_default();
    if survey.end < durable.end {
        let (path, at) = match (&survey.torn, survey.unbegun.first(), survey.chunks.last()) {
            (Some(torn), ..) => (torn.path.as_path(), torn.at),
            (None, Some(unborn), _) => (unborn.path.as_path(), 0),
            (None, None, Some(chunk)) => (chunk.path.as_path(), survey.end - chunk.start),
            (None, None, None) => (folder, 0),
        };
        let cause = survey.torn.as_ref().map_or("nothing follows", |torn| torn.cause.as_str());
        let (missing, last) = (durable.end - survey.end, durable.last);
        let detail = format!(
            "its whole records end at offset {at} ({cause}), but {missing} bytes more, up to entry {last}, were on disk \
             and acknowledged"
        );
        return Err(damage_error(path, detail));
    }
    survey.replay.check_whole().map_err(|misfit| damage_error(folder, misfit.to_string()))?;
    let last = survey.replay.last.map_or(0, |last| last.index);
    if last < marked.committed {
        return Err(LedgerNodeError::EntriesMissing { path: folder.to_owned(), last, committed: marked.committed });
    }
    Ok(())
}

/// Truncates a torn tail that was never acknowledged. The truncated bytes are saved beside the log.
fn cut_torn_tail(folder: &Path, survey: &LogSurvey) -> Result<(), LedgerNodeError> {
    for chunk in &survey.unbegun {
        tracing::warn!(chunk = %chunk.path.display(), "a chunk of the log was never begun and is removed");
        std::fs::remove_file(&chunk.path).map_err(LedgerNodeError::io(&chunk.path))?;
    }
    if let Some(TornEnd { path, at, bytes, cause }) = &survey.torn {
        tracing::warn!(chunk = %path.display(), at, bytes, reason = cause, "the log's torn end was never acknowledged: cut off");
        if let Err(error) = save_torn_tail(folder, path, *at) {
            // For example on a full disk; truncating frees space.
            tracing::warn!(%error, "the end that is cut off could not be kept");
        }
        let file = File::options().write(true).open(path).map_err(LedgerNodeError::io(path))?;
        file.set_len(*at).and_then(|()| file.sync_all()).map_err(LedgerNodeError::io(path))?;
    }
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(LedgerNodeError::io(folder))
}

fn save_torn_tail(folder: &Path, chunk: &Path, at: u64) -> io::Result<()> {
    let mut from = File::open(chunk)?;
    from.seek(SeekFrom::Start(at))?;
    let torn_end = folder.parent().unwrap_or(folder).join("torn-log-end");
    let copied = File::create(&torn_end).and_then(|mut to| io::copy(&mut from, &mut to));
    copied.map(drop).inspect_err(|_| drop(std::fs::remove_file(&torn_end)))
}

/// Writes everything behind the durable mark again, and makes it durable.
///
/// Raft will acknowledge all that it finds in the log. Bytes that a killed process wrote may be only in memory, and
/// after a failed fdatasync the kernel considers them clean, so another fdatasync alone would not write them.
fn rewrite_tail(folder: &Path, survey: &LogSurvey, marked: LogWatermarks) -> Result<(), LedgerNodeError> {
    let newest = survey.chunks.last().map_or(0, |chunk| chunk.start);
    let from = marked.durable.map_or(newest, |durable| durable.end);
    let Some(newest) = survey.chunks.last() else { return Ok(()) };
    for chunk in survey.chunks.iter().filter(|chunk| from < chunk.start + chunk.length) {
        let end = if chunk == newest { survey.end - chunk.start } else { chunk.length };
        let mut at = from.saturating_sub(chunk.start);
        let file =
            File::options().read(true).write(true).open(&chunk.path).map_err(LedgerNodeError::io(&chunk.path))?;
        let mut again = || {
            let mut bytes = vec![0; 1 << 20];
            while at < end {
                let piece = &mut bytes[..(end - at).min(1 << 20) as usize];
                file.read_exact_at(piece, at)?;
                file.write_all_at(piece, at)?;
                at += piece.len() as u64;
            }
            file.sync_all()
        };
        again().map_err(LedgerNodeError::io(&chunk.path))?;
    }
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(LedgerNodeError::io(folder))
}

fn config(folder: &Path, chunk: MaxChunkSize) -> Arc<Config> {
    let mut config = Config::new(folder.display());
    config.wal.chunk_max_size = Some(chunk.0);
    config.wal.chunk_max_records = Some(128 << 10);
    config.wal.read_buffer_size = Some(4 << 20);
    config.wal.truncate_incomplete_record = Some(false);
    // The log store batches flushes itself, and bounds what waits for one.
    config.wal.flush_batch_wait = Some(std::time::Duration::ZERO);
    config.wal.flush_queue_max_bytes = Some(usize::MAX / 2);
    // A small cache, because the state machine already holds the data.
    config.log_cache_max_items = Some(16 << 10);
    config.log_cache_capacity = Some(64 << 20);
    Arc::new(config)
}

#[cfg(test)]
mod tests {
    use vocabulary::SessionId;

    use super::*;

    #[test]
    fn a_batch_weighs_as_much_as_its_commands() {
        let close = |n| Command::CloseSession(SessionId(n));
        let batch = Command::Batch((0..1_000).map(close).collect());
        assert!(weight(&batch) >= 1_000 * weight(&close(1)));
        let encoded = rmp_serde::to_vec(&batch).unwrap().len() as u64;
        assert!(weight(&batch) >= encoded && weight(&batch) < 20 * encoded);
    }
}
