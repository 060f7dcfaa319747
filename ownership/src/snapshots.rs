//! Snapshots: one file, replaced as a whole, checked as a whole.
//!
//! Layout: magic (8 bytes), length of the body (8, little endian), xxh3-128 of the body (16), body: MessagePack of the
//! metadata, then of the ledger.

use std::fs::File;
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use consensus::Body;
use ledger::Ledger;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use crate::error::OwnershipError;
use crate::node_folder::write_durably;
use crate::raft::SnapshotMeta;

const MAGIC: &[u8; 8] = b"OWNSNAP1";
const HEADER: u64 = 32;

/// Where the current snapshot lies.
#[derive(Clone, Debug)]
pub(crate) struct SnapshotFile {
    path: PathBuf,
}

impl SnapshotFile {
    pub(crate) fn at(path: PathBuf) -> Self {
        Self { path }
    }

    /// Replaces the snapshot; durable when this returns.
    pub(crate) fn write(&self, meta: &SnapshotMeta, ledger: &Ledger) -> io::Result<()> {
        write_durably(&self.path, |file| {
            file.write_all(&[0; HEADER as usize])?;
            let mut body = Hashed { to: BufWriter::new(&mut *file), hash: Xxh3::new(), length: 0 };
            rmp_serde::encode::write(&mut body, meta).map_err(io::Error::other)?;
            rmp_serde::encode::write(&mut body, ledger).map_err(io::Error::other)?;
            body.flush()?;
            let (length, sum) = (body.length, body.hash.digest128());
            drop(body);
            file.seek(SeekFrom::Start(0))?;
            file.write_all(MAGIC)?;
            file.write_all(&length.to_le_bytes())?;
            file.write_all(&sum.to_le_bytes())
        })
    }

    /// The snapshot's file, if there is one.
    pub(crate) fn open(&self) -> io::Result<Option<File>> {
        match File::open(&self.path) {
            Ok(file) => Ok(Some(file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reads the current snapshot's metadata only; whoever installs it checks the whole.
    pub(crate) fn meta(&self) -> Result<Option<SnapshotMeta>, OwnershipError> {
        let Some(mut file) = self.open().map_err(OwnershipError::io(&self.path))? else { return Ok(None) };
        file.seek(SeekFrom::Start(HEADER)).map_err(OwnershipError::io(&self.path))?;
        let meta = rmp_serde::decode::from_read(io::BufReader::new(file));
        let detail = |error| format!("its body at offset {HEADER} does not start with metadata: {error}");
        meta.map(Some).map_err(|error| OwnershipError::Damaged { path: self.path.clone(), detail: detail(error) })
    }
}

/// Reads and checks a snapshot, from this node's disk or from another node.
pub(crate) fn read(mut file: File, path: &Path) -> Result<Body, OwnershipError> {
    let damaged = |detail: String| OwnershipError::Damaged { path: path.to_owned(), detail };
    let mut header = [0u8; HEADER as usize];
    file.seek(SeekFrom::Start(0)).map_err(OwnershipError::io(path))?;
    file.read_exact(&mut header).map_err(|_| damaged("it ends inside its header".into()))?;
    let (magic, rest) = header.split_at(8);
    let (length, sum) = rest.split_at(8);
    if magic != MAGIC {
        return Err(damaged("it does not start as a snapshot does (offset 0)".into()));
    }
    let mut body = Vec::new();
    file.read_to_end(&mut body).map_err(OwnershipError::io(path))?;
    if (body.len() as u64).to_le_bytes() != *length {
        return Err(damaged(format!(
            "its body at offset {HEADER} has {} bytes, not as many as were written",
            body.len()
        )));
    }
    if xxh3_128(&body).to_le_bytes() != *sum {
        return Err(damaged(format!("the checksum of its body at offset {HEADER} is wrong")));
    }
    decode(&body).map_err(|error| damaged(format!("its body at offset {HEADER} is no snapshot: {error}")))
}

fn decode(mut body: &[u8]) -> Result<Body, rmp_serde::decode::Error> {
    let meta = rmp_serde::decode::from_read(&mut body)?;
    let ledger = rmp_serde::decode::from_read(&mut body)?;
    Ok(Body { meta, ledger })
}

/// A writer that hashes and counts what goes through.
struct Hashed<W> {
    to: W,
    hash: Xxh3,
    length: u64,
}

impl<W: Write> Write for Hashed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.to.write(bytes)?;
        self.hash.update(&bytes[..written]);
        self.length += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(snapshots: &SnapshotFile) -> Result<Body, OwnershipError> {
        read(snapshots.open().unwrap().unwrap(), &snapshots.path)
    }

    fn written() -> (tempfile::TempDir, SnapshotFile) {
        let folder = tempfile::tempdir().unwrap();
        let snapshots = SnapshotFile::at(folder.path().join("snapshot"));
        assert!(snapshots.meta().unwrap().is_none());
        snapshots.write(&SnapshotMeta::default(), &Ledger::default()).unwrap();
        (folder, snapshots)
    }

    #[test]
    fn a_snapshot_reads_back_what_was_written() {
        let (_folder, snapshots) = written();
        let body = whole(&snapshots).unwrap();
        assert_eq!(snapshots.meta().unwrap().as_ref(), Some(&body.meta));
        assert_eq!(body.ledger, Ledger::default());
        assert_eq!(body.meta, SnapshotMeta::default());
    }

    #[test]
    fn every_flipped_byte_and_every_cut_is_found() {
        let (_folder, snapshots) = written();
        let good = std::fs::read(&snapshots.path).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            std::fs::write(&snapshots.path, &bad).unwrap();
            let error = whole(&snapshots).err().unwrap_or_else(|| panic!("byte {at} is not checked"));
            assert!(error.to_string().contains("snapshot"), "{error}");
            std::fs::write(&snapshots.path, &good[..at]).unwrap();
            assert!(whole(&snapshots).is_err(), "cut at {at}");
        }
    }
}
