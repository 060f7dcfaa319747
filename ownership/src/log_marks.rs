//! The marks file: how far the log was durable and committed, and which node it belongs to, stored outside the log.
//!
//! A log that lost its end looks like one that never had it. The marks tell them apart: they are raised after an
//! fdatasync and before the write is acknowledged. So every byte below them may have been acknowledged, and a missing
//! one was lost.
//!
//! Layout, little endian: committed index (8 bytes), xxh3-64 of it (8); then durable end as an offset in the log (8),
//! last durable index (8), digest of the identity (8), xxh3-64 of these 24 (8). It fits in one sector, so writes are
//! atomic. Releases before feature level 2 wrote only the first part.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64;

use crate::error::LedgerNodeError;
use crate::node_folder::{FolderContents, NodeIdentity, write_durably};

const COMMITTED_OFFSET: usize = 16;
const FILE_BYTES: usize = 48;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct LogWatermarks {
    /// Last entry that was committed and durable on this node.
    pub(crate) committed: u64,
    /// Durable end of the log; `None` until this release has opened the log.
    pub(crate) durable: Option<DurableEnd>,
}

/// How far the log is known to be on disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct DurableEnd {
    /// Offset in the whole log.
    pub(crate) end: u64,
    /// Index of the last entry before it.
    pub(crate) last: u64,
}

/// The file that holds the marks.
#[derive(Debug)]
pub(crate) struct LogWatermarksFile {
    file: File,
    path: PathBuf,
    owner: u64,
    state: Mutex<LogMarksState>,
}

#[derive(Debug)]
struct LogMarksState {
    marked: LogWatermarks,
    /// Last entry that the quorum committed; it may not be durable here yet.
    committed: u64,
}

impl LogWatermarksFile {
    /// Opens the marks of a log, or creates them durably if there is no log yet.
    pub(crate) fn open(path: &Path, identity: NodeIdentity, found: FolderContents) -> Result<Self, LedgerNodeError> {
        let owner = xxh3_64(&serde_json::to_vec(&identity).expect("an identity encodes"));
        if !path.exists() {
            if found == FolderContents::Ledger {
                let detail = "it is missing, but there is a log: nothing tells whether that log is complete";
                return Err(damaged(path, detail));
            }
            let bytes = encode(LogWatermarks { committed: 0, durable: Some(DurableEnd::default()) }, owner);
            write_durably(path, |file| file.write_all(&bytes)).map_err(LedgerNodeError::io(path))?;
        }
        let file = File::options().read(true).write(true).open(path).map_err(LedgerNodeError::io(path))?;
        let marked = read(&file, path, owner)?;
        let now = Mutex::new(LogMarksState { marked, committed: marked.committed });
        Ok(Self { file, path: path.to_owned(), owner, state: now })
    }

    pub(crate) fn current(&self) -> LogWatermarks {
        self.state.lock().marked
    }

    /// Records what the quorum committed; written with the next [`Self::advance_durable`] once it is durable here.
    pub(crate) fn commit(&self, index: u64) {
        let mut now = self.state.lock();
        now.committed = now.committed.max(index);
    }

    /// Raises the marks to what an fdatasync just covered. The marks themselves reach the disk with the next `sync`.
    pub(crate) fn advance_durable(&self, durable: DurableEnd) -> io::Result<()> {
        let mut now = self.state.lock();
        if now.marked.durable.is_some_and(|before| before.end > durable.end) {
            return Err(io::Error::other("the log's durable end went backwards"));
        }
        let committed = now.committed.min(durable.last).max(now.marked.committed);
        let marked = LogWatermarks { committed, durable: Some(durable) };
        if marked != now.marked {
            self.file.write_all_at(&encode(marked, self.owner), 0)?;
            now.marked = marked;
        }
        Ok(())
    }

    /// Makes the marks durable.
    pub(crate) fn sync(&self) -> Result<(), LedgerNodeError> {
        self.file.sync_all().map_err(LedgerNodeError::io(&self.path))
    }

    /// Returns a file handle to make the marks durable without holding a lock.
    pub(crate) fn sync_handle(&self) -> Result<File, LedgerNodeError> {
        self.file.try_clone().map_err(LedgerNodeError::io(&self.path))
    }

    /// Returns the owner note for the log, so that log and marks are not mistaken for another node's or an earlier
    /// release's.
    pub(crate) fn owner_note(&self) -> String {
        format!("marks of {:016x}", self.owner)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

fn damaged(path: &Path, detail: impl Into<String>) -> LedgerNodeError {
    LedgerNodeError::Damaged { path: path.to_owned(), detail: detail.into() }
}

fn encode(marked: LogWatermarks, owner: u64) -> [u8; FILE_BYTES] {
    let mut bytes = [0u8; FILE_BYTES];
    let durable = marked.durable.unwrap_or_default();
    bytes[..8].copy_from_slice(&marked.committed.to_le_bytes());
    bytes[8..16].copy_from_slice(&xxh3_64(&marked.committed.to_le_bytes()).to_le_bytes());
    bytes[16..24].copy_from_slice(&durable.end.to_le_bytes());
    bytes[24..32].copy_from_slice(&durable.last.to_le_bytes());
    bytes[32..40].copy_from_slice(&owner.to_le_bytes());
    let sum = xxh3_64(&bytes[16..40]);
    bytes[40..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

fn read(file: &File, path: &Path, owner: u64) -> Result<LogWatermarks, LedgerNodeError> {
    let length = file.metadata().map_err(LedgerNodeError::io(path))?.len() as usize;
    let mut bytes = [0u8; FILE_BYTES];
    match length {
        // An earlier release had created the file but not written it yet.
        0 => return Ok(LogWatermarks::default()),
        COMMITTED_OFFSET | FILE_BYTES => {}
        _ => return Err(damaged(path, format!("it has {length} bytes, not {COMMITTED_OFFSET} or {FILE_BYTES}"))),
    }
    file.read_exact_at(&mut bytes[..length], 0).map_err(LedgerNodeError::io(path))?;
    let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    if xxh3_64(&bytes[..8]) != number(8) {
        return Err(damaged(path, "the checksum at offset 8 is wrong"));
    }
    if length == COMMITTED_OFFSET {
        return Ok(LogWatermarks { committed: number(0), durable: None });
    }
    if xxh3_64(&bytes[16..40]) != number(40) {
        return Err(damaged(path, "the checksum at offset 40 is wrong"));
    }
    if number(32) != owner {
        let detail = "its identity at offset 32 is not that of identity.json: one of the two files is of another node";
        return Err(damaged(path, detail));
    }
    Ok(LogWatermarks { committed: number(0), durable: Some(DurableEnd { end: number(16), last: number(24) }) })
}

#[cfg(test)]
mod tests {
    use vocabulary::NodeId;

    use super::*;
    use crate::node_folder::ClusterId;

    const OWN: NodeIdentity = NodeIdentity { cluster: ClusterId(1), node: NodeId(1) };

    fn new_marks_file() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("committed");
        LogWatermarksFile::open(&path, OWN, FolderContents::Empty).unwrap();
        (folder, path)
    }

    #[test]
    fn log_watermarks_persist_and_never_decrease() {
        let (_folder, path) = new_marks_file();
        let marks = LogWatermarksFile::open(&path, OWN, FolderContents::Ledger).unwrap();
        marks.commit(7);
        marks.advance_durable(DurableEnd { end: 900, last: 8 }).unwrap();
        marks.commit(5);
        assert!(marks.advance_durable(DurableEnd { end: 899, last: 8 }).is_err());
        let kept = LogWatermarks { committed: 7, durable: Some(DurableEnd { end: 900, last: 8 }) };
        assert_eq!(LogWatermarksFile::open(&path, OWN, FolderContents::Ledger).unwrap().current(), kept);
    }

    #[test]
    fn a_commit_index_counts_once_it_is_locally_durable() {
        let (_folder, path) = new_marks_file();
        let marks = LogWatermarksFile::open(&path, OWN, FolderContents::Ledger).unwrap();
        marks.commit(9);
        marks.advance_durable(DurableEnd { end: 100, last: 6 }).unwrap();
        assert_eq!(LogWatermarksFile::open(&path, OWN, FolderContents::Ledger).unwrap().current().committed, 6);
        marks.advance_durable(DurableEnd { end: 200, last: 12 }).unwrap();
        assert_eq!(LogWatermarksFile::open(&path, OWN, FolderContents::Ledger).unwrap().current().committed, 9);
    }

    #[test]
    fn every_flipped_byte_or_truncation_is_reported_with_its_offset() {
        let (_folder, path) = new_marks_file();
        LogWatermarksFile::open(&path, OWN, FolderContents::Ledger)
            .unwrap()
            .advance_durable(DurableEnd { end: 4_711, last: 12 })
            .unwrap();
        let good = std::fs::read(&path).unwrap();
        assert_eq!(good.len(), FILE_BYTES);
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            std::fs::write(&path, &bad).unwrap();
            let error = LogWatermarksFile::open(&path, OWN, FolderContents::Ledger).unwrap_err().to_string();
            assert!(error.contains("committed") && error.contains("offset"), "{error}");
            // A file cut to zero or to its first part looks like an earlier release's; the log itself tells them apart
            // (`wal`).
            if at != 0 && at != COMMITTED_OFFSET {
                std::fs::write(&path, &good[..at]).unwrap();
                assert!(LogWatermarksFile::open(&path, OWN, FolderContents::Ledger).is_err(), "cut at {at}");
            }
        }
    }

    #[test]
    fn a_missing_or_foreign_marks_file_is_refused() {
        let (_folder, path) = new_marks_file();
        let other = NodeIdentity { node: NodeId(2), ..OWN };
        let error = LogWatermarksFile::open(&path, other, FolderContents::Ledger).unwrap_err().to_string();
        assert!(error.contains("offset 32"), "{error}");
        std::fs::remove_file(&path).unwrap();
        let error = LogWatermarksFile::open(&path, OWN, FolderContents::Ledger).unwrap_err().to_string();
        assert!(error.contains("missing"), "{error}");
    }

    #[test]
    fn log_marks_of_an_earlier_release_are_read_and_extended() {
        let (_folder, path) = new_marks_file();
        let mut bytes = 42u64.to_le_bytes().to_vec();
        bytes.extend(xxh3_64(&bytes).to_le_bytes());
        std::fs::write(&path, &bytes).unwrap();
        let marks = LogWatermarksFile::open(&path, OWN, FolderContents::Ledger).unwrap();
        assert_eq!(marks.current(), LogWatermarks { committed: 42, durable: None });
        marks.advance_durable(DurableEnd { end: 5, last: 60 }).unwrap();
        // That release reads only the first part.
        assert_eq!(&std::fs::read(&path).unwrap()[..COMMITTED_OFFSET], &bytes);
    }
}
