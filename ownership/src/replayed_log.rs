//! Replays the records of a log and checks that they are consistent with each other.

use raft_log::{RaftLogAction, WALRecord};

use crate::chunks::WalRecord;
use crate::raft::{LogId, Vote};
use crate::wal::WalValue;

/// Why a record cannot follow those before it, or why a log cannot end where it does.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum RecordOrderError {
    #[error("a chunk begins with a checkpoint, and this one does not")]
    NoCheckpoint,
    #[error("its checkpoint is not what the chunks before it add up to")]
    CheckpointMismatch,
    #[error("entry {next} follows entry {last}")]
    IndexGap { last: u64, next: u64 },
    #[error("entries {wanted} to {last} should be there, but only {present:?} are")]
    MissingEntries { wanted: u64, last: u64, present: Option<(u64, u64)> },
}

/// Position of a record in its chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PositionInChunk {
    First,
    Later,
}

/// State of a log after some of its records.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct ReplayedLog {
    vote: Option<Vote>,
    pub(crate) last: Option<LogId>,
    committed: Option<LogId>,
    purged: Option<LogId>,
    /// Owner note that the log contains.
    pub(crate) note: Option<String>,
    /// First and last of the entries that are present, without gaps.
    present: Option<(u64, u64)>,
    records: u64,
}

impl ReplayedLog {
    pub(crate) fn apply_record(
        &mut self,
        record: &WalRecord,
        position: PositionInChunk,
    ) -> Result<(), RecordOrderError> {
        let leads = position == PositionInChunk::First;
        if leads && !matches!(record, WALRecord::Checkpoint(_)) {
            return Err(RecordOrderError::NoCheckpoint);
        }
        match record {
            WALRecord::Checkpoint(state) => {
                let (before, records) = (self.clone(), self.records);
                self.vote = state.vote().map(|vote| vote.0);
                self.last = state.last().map(|id| id.0);
                self.committed = state.committed().map(|id| id.0);
                self.purged = state.purged().map(|id| id.0);
                self.note.clone_from(&state.user_data);
                if leads && records > 0 && *self != before {
                    return Err(RecordOrderError::CheckpointMismatch);
                }
            }
            WALRecord::Action(RaftLogAction::SaveVote(vote)) => self.vote = Some(vote.0),
            WALRecord::Action(RaftLogAction::Append(id, _)) => self.append(id.0)?,
            WALRecord::Action(RaftLogAction::Commit(id)) => self.committed = Some(id.0),
            WALRecord::Action(RaftLogAction::TruncateAfter(keep)) => {
                self.truncate(keep.as_ref().map(|WalValue(id)| *id))
            }
            WALRecord::Action(RaftLogAction::PurgeUpto(id)) => self.purge(id.0),
        }
        self.records += 1;
        Ok(())
    }

    /// Checks that every entry after the purged ones is present.
    pub(crate) fn check_whole(&self) -> Result<(), RecordOrderError> {
        let next_index = self.purged.map_or(0, |id| id.index + 1);
        let Some(last) = self.last.map(|last| last.index).filter(|last| *last >= next_index) else { return Ok(()) };
        let is_whole = self.present.is_some_and(|(first, to)| first <= next_index && to == last);
        if is_whole {
            Ok(())
        } else {
            Err(RecordOrderError::MissingEntries { wanted: next_index, last, present: self.present })
        }
    }

    fn append(&mut self, id: LogId) -> Result<(), RecordOrderError> {
        if let Some(last) = self.last.filter(|last| last.index + 1 != id.index) {
            return Err(RecordOrderError::IndexGap { last: last.index, next: id.index });
        }
        self.last = Some(id);
        let first = self.present.filter(|(_, last)| last + 1 == id.index).map_or(id.index, |(first, _)| first);
        self.present = Some((first, id.index));
        Ok(())
    }

    fn truncate(&mut self, keep: Option<LogId>) {
        if self.last > keep {
            self.last = keep;
        }
        let upto = keep.map(|id| id.index);
        self.present = self.present.filter(|(first, _)| upto >= Some(*first));
        self.present = self.present.map(|(first, last)| (first, upto.map_or(last, |upto| last.min(upto))));
    }

    fn purge(&mut self, upto: LogId) {
        self.purged = self.purged.max(Some(upto));
        self.last = self.last.max(Some(upto));
        self.present = self.present.filter(|(_, last)| *last > upto.index);
    }
}
