//! The high-water mark: how far the log had been committed, kept outside the log.
//!
//! A log that lost its end looks like one that never had it. This mark tells them apart. It is written after the log
//! is durable, so it never runs ahead of it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_64;

use crate::error::OwnershipError;

/// Index and checksum, little endian; one sector, so that it is never torn.
const SIZE: usize = 16;

/// The file that holds the mark.
#[derive(Debug)]
pub(crate) struct CommittedMark {
    file: File,
    path: PathBuf,
    index: u64,
}

impl CommittedMark {
    /// Opens the mark; a new one is 0.
    pub(crate) fn open(path: &Path) -> Result<Self, OwnershipError> {
        let file = File::options().create(true).truncate(false).read(true).write(true).open(path);
        let file = file.map_err(OwnershipError::io(path))?;
        let mut bytes = [0u8; SIZE];
        let length = file.metadata().map_err(OwnershipError::io(path))?.len();
        if length == 0 {
            return Ok(Self { file, path: path.to_owned(), index: 0 });
        }
        let damaged = |detail: &str| OwnershipError::Damaged { path: path.to_owned(), detail: detail.to_owned() };
        file.read_exact_at(&mut bytes, 0).map_err(|_| damaged("it is too short"))?;
        let (index, sum) = bytes.split_at(8);
        if xxh3_64(index).to_le_bytes() != *sum {
            return Err(damaged("its checksum at offset 8 is wrong"));
        }
        let index = u64::from_le_bytes(index.try_into().expect("split at 8"));
        Ok(Self { file, path: path.to_owned(), index })
    }

    /// The last index known to be committed.
    pub(crate) fn index(&self) -> u64 {
        self.index
    }

    /// Raises the mark. It reaches the disk with the next `sync` at the latest.
    pub(crate) fn raise(&mut self, index: u64) -> std::io::Result<()> {
        if index <= self.index {
            return Ok(());
        }
        let mut bytes = [0u8; SIZE];
        bytes[..8].copy_from_slice(&index.to_le_bytes());
        let sum = xxh3_64(&bytes[..8]);
        bytes[8..].copy_from_slice(&sum.to_le_bytes());
        self.file.write_all_at(&bytes, 0)?;
        self.index = index;
        Ok(())
    }

    /// A handle for making it durable without holding anything.
    pub(crate) fn handle(&self) -> Result<File, OwnershipError> {
        self.file.try_clone().map_err(OwnershipError::io(&self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mark_is_kept_and_never_falls() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("committed");
        let mut mark = CommittedMark::open(&path).unwrap();
        assert_eq!(mark.index(), 0);
        mark.raise(7).unwrap();
        mark.raise(5).unwrap();
        assert_eq!(CommittedMark::open(&path).unwrap().index(), 7);
    }

    #[test]
    fn a_damaged_mark_is_an_error_that_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("committed");
        CommittedMark::open(&path).unwrap().raise(7).unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[0] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        let error = CommittedMark::open(&path).unwrap_err().to_string();
        assert!(error.contains("committed") && error.contains("offset"), "{error}");
        std::fs::write(&path, &bytes[..9]).unwrap();
        assert!(CommittedMark::open(&path).is_err());
    }
}
