//! Snapshot file: replaced atomically, written and read as a stream.
//!
//! There are two layouts. From feature level 2 on: magic `OWNSNAP2` (8 bytes), then frames (`frames`): the first holds
//! the header (MessagePack), the others the ledger. At level 1, for the previous release: magic `OWNSNAP1` (8), length
//! of the body (8, little endian), xxh3-128 of the body (16), body: MessagePack of the metadata, then of the ledger.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::SystemTime;

use consensus::{LedgerView, Snapshot, SnapshotContents, SnapshotStore};
use ledger::Ledger;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::chunks::damage_error;
use crate::drop_thread::DropThread;
use crate::error::LedgerNodeError;
use crate::frames::{FrameReader, FrameWriter, PAYLOAD};
use crate::log_store::LogStore;
use crate::node_folder::{ClusterId, write_durably_with};
use crate::raft::{LogId, SnapshotMeta};
use crate::resource_shortages::ShortageTracker;

const MAGIC: &[u8; 8] = b"OWNSNAP2";
const MAGIC_LAYOUT_1: &[u8; 8] = b"OWNSNAP1";
const HEADER_BYTES_LAYOUT_1: u64 = 32;

/// Feature level from which on the second layout is written.
const FRAMED_FROM_LEVEL: u32 = 2;

/// Maximum bytes of unsynced data. An fdatasync of the log on the same disk may have to wait for all of it.
const MAX_UNSYNCED_BYTES: u64 = 8 << 20;

/// Header of a snapshot.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct SnapshotHeader {
    /// Cluster that wrote it; unknown in the first layout.
    pub(crate) cluster: Option<ClusterId>,
    pub(crate) meta: SnapshotMeta,
    /// When it was written, in seconds since 1970; for operators and for `restore`.
    pub(crate) written: u64,
}

/// A snapshot of which every byte was read.
pub(crate) struct LoadedSnapshot {
    pub(crate) head: SnapshotHeader,
    pub(crate) ledger: Ledger,
    pub(crate) layout: u8,
    pub(crate) bytes: u64,
}

/// Location and cluster of the current snapshot.
#[derive(Clone, Debug)]
pub(crate) struct SnapshotFile {
    path: PathBuf,
    cluster: ClusterId,
    /// Log position of the newest snapshot; locked while it is replaced. Raft may write its own snapshot while it
    /// installs another node's.
    newest: Arc<Mutex<Option<LogId>>>,
    pub(crate) shortages: Arc<ShortageTracker>,
    /// Set only on a running node.
    pub(crate) drop_thread: Option<DropThread>,
}

impl SnapshotFile {
    pub(crate) fn at(path: PathBuf, cluster: ClusterId) -> Self {
        // Removes a half-written file of a killed process, if there is one.
        drop(std::fs::remove_file(path.with_extension("new")));
        Self { path, cluster, newest: Arc::default(), shortages: Arc::default(), drop_thread: None }
    }

    /// Shares the log's record of resource shortages and its drop thread.
    pub(crate) fn with_shortages(self, log: &LogStore) -> Self {
        Self { shortages: log.shortages(), drop_thread: Some(log.drop_thread()), ..self }
    }

    /// Replaces the snapshot, unless a newer one is there: the log may be purged up to that. Durable when this returns.
    pub(crate) fn write(&self, contents: &SnapshotContents) -> io::Result<()> {
        let mut newest = self.lock_newest()?;
        if *newest > contents.meta.last_log_id {
            return Ok(());
        }
        let written = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let head = SnapshotHeader { cluster: Some(self.cluster), meta: contents.meta.clone(), written };
        write_durably_with(&self.shortages, &self.path, |file| write(file, &head, &contents.ledger))?;
        *newest = contents.meta.last_log_id;
        Ok(())
    }

    /// Reads a snapshot, and stores it byte for byte if another node wrote it.
    pub(crate) fn store(&self, mut from: File) -> Result<SnapshotContents, LedgerNodeError> {
        let is_own = self.is_own(&from).map_err(LedgerNodeError::io(&self.path))?;
        let path = if is_own { self.path.clone() } else { self.path.with_extension("incoming") };
        let LoadedSnapshot { head, ledger, .. } = read(&mut from, &path)?;
        if let Some(found) = head.cluster.filter(|cluster| *cluster != self.cluster) {
            return Err(LedgerNodeError::OtherCluster { path, found, expected: self.cluster });
        }
        let mut newest = self.lock_newest().map_err(LedgerNodeError::io(&self.path))?;
        if !is_own {
            let copied = from.seek(SeekFrom::Start(0)).and_then(|_| {
                write_durably_with(&self.shortages, &self.path, |to| {
                    io::copy(&mut from, &mut SyncPacedFile { to, unsynced: 0 }).map(drop)
                })
            });
            copied.map_err(LedgerNodeError::io(&self.path))?;
        }
        *newest = (*newest).max(head.meta.last_log_id);
        Ok(SnapshotContents { meta: head.meta, ledger })
    }

    fn lock_newest(&self) -> io::Result<MutexGuard<'_, Option<LogId>>> {
        self.newest.lock().map_err(|_| io::Error::other("a panic left the snapshot in doubt"))
    }

    fn is_own(&self, file: &File) -> io::Result<bool> {
        let Some(own) = self.open()? else { return Ok(false) };
        let (own, other) = (own.metadata()?, file.metadata()?);
        Ok((own.dev(), own.ino()) == (other.dev(), other.ino()))
    }

    /// Opens the snapshot's file, if there is one.
    pub(crate) fn open(&self) -> io::Result<Option<File>> {
        match self.shortages.open_retrying(self.path.display(), || File::open(&self.path)) {
            Ok(file) => Ok(Some(file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns what is wrong with the current snapshot, as this crate's error; Raft reports it only in its own words.
    pub(crate) fn find_damage(&self) -> Option<LedgerNodeError> {
        match self.open() {
            Ok(file) => read(&mut file?, &self.path).err(),
            Err(error) => Some(LedgerNodeError::io(&self.path)(error)),
        }
    }

    /// Reads only the metadata of the current snapshot; whoever installs it verifies the rest.
    pub(crate) fn meta(&self) -> Result<Option<SnapshotMeta>, LedgerNodeError> {
        Ok(self.open_with_meta()?.map(|(meta, _)| meta))
    }

    /// Returns the snapshot's metadata and the same file at its start, because another snapshot may replace it at any
    /// time.
    pub(crate) fn open_with_meta(&self) -> Result<Option<(SnapshotMeta, File)>, LedgerNodeError> {
        let Some(mut file) = self.open().map_err(LedgerNodeError::io(&self.path))? else { return Ok(None) };
        let meta = read_header(&mut file, &self.path)?.meta;
        file.rewind().map_err(LedgerNodeError::io(&self.path))?;
        Ok(Some((meta, file)))
    }
}

pub(crate) fn read_header(file: &mut File, path: &Path) -> Result<SnapshotHeader, LedgerNodeError> {
    match read_layout(file, path)? {
        1 => {
            file.seek(SeekFrom::Start(HEADER_BYTES_LAYOUT_1)).map_err(LedgerNodeError::io(path))?;
            let meta = decode_meta(&mut BufReader::new(&mut *file));
            let wrong = |error| {
                damage_error(path, format!("at offset {HEADER_BYTES_LAYOUT_1}: no metadata is there ({error})"))
            };
            Ok(SnapshotHeader { cluster: None, meta: meta.map_err(wrong)?, written: modified_unix_secs(file) })
        }
        _ => read_framed_header(&mut FrameReader::new(BufReader::new(file), MAGIC.len() as u64), path),
    }
}

/// Verifies all checksums of a snapshot without decoding the ledger, and returns its header.
pub(crate) fn check(file: &mut File, path: &Path) -> Result<SnapshotHeader, LedgerNodeError> {
    let bytes = file.metadata().map_err(LedgerNodeError::io(path))?.len();
    let found = read_header(file, path)?;
    match read_layout(file, path)? {
        1 => layout_1_body(file, path, bytes)?.finish(path, bytes).map(drop)?,
        _ => {
            let mut frames = FrameReader::new(BufReader::with_capacity(PAYLOAD, file), MAGIC.len() as u64);
            let read = io::copy(&mut frames, &mut io::sink()).and_then(|_| frames.finish());
            read.map_err(|error| damage_error(path, frames.take_damage().unwrap_or_else(|| error.to_string())))?;
        }
    }
    Ok(found)
}

/// Reads and verifies a whole snapshot, from this node's disk or from another node.
pub(crate) fn read(file: &mut File, path: &Path) -> Result<LoadedSnapshot, LedgerNodeError> {
    let bytes = file.metadata().map_err(LedgerNodeError::io(path))?.len();
    let layout = read_layout(file, path)?;
    let (head, ledger) = if layout == 1 { read_layout_1(file, path, bytes)? } else { read_framed(file, path)? };
    Ok(LoadedSnapshot { head, ledger, layout, bytes })
}

fn read_framed(file: &File, path: &Path) -> Result<(SnapshotHeader, Ledger), LedgerNodeError> {
    let mut frames = FrameReader::new(BufReader::with_capacity(PAYLOAD, file), MAGIC.len() as u64);
    let head = read_framed_header(&mut frames, path)?;
    let decoded = Ledger::decode(&mut frames);
    let wrong = |frames: &mut FrameReader<_>, error: &dyn std::fmt::Display| {
        let (found, at) = (frames.take_damage(), frames.at());
        let undecodable = || format!("before offset {at}: it holds no ledger that is known here ({error})");
        damage_error(path, found.unwrap_or_else(undecodable))
    };
    let ledger = decoded.map_err(|error| wrong(&mut frames, &error))?;
    frames.finish().map_err(|error| wrong(&mut frames, &error))?;
    Ok((head, ledger))
}

fn read_framed_header(frames: &mut FrameReader<impl Read>, path: &Path) -> Result<SnapshotHeader, LedgerNodeError> {
    let at = frames.at();
    let first = match frames.frame() {
        Ok(first) => {
            rmp_serde::from_slice(first).map_err(|error| format!("at offset {at}: no head is there ({error})"))
        }
        Err(error) => Err(frames.take_damage().unwrap_or_else(|| error.to_string())),
    };
    first.map_err(|detail| damage_error(path, detail))
}

fn read_layout_1(file: &mut File, path: &Path, bytes: u64) -> Result<(SnapshotHeader, Ledger), LedgerNodeError> {
    let written = modified_unix_secs(file);
    let mut body = layout_1_body(file, path, bytes)?;
    let decoded = decode_meta(&mut body.bytes).and_then(|meta| Ok((meta, Ledger::decode(&mut body.bytes)?)));
    let rest = body.finish(path, bytes)?;
    match decoded {
        Ok((meta, ledger)) if rest == 0 => Ok((SnapshotHeader { cluster: None, meta, written }, ledger)),
        Ok(_) => Err(damage_error(path, format!("{rest} bytes follow its ledger, before offset {bytes}"))),
        Err(error) => Err(damage_error(
            path,
            format!("after offset {HEADER_BYTES_LAYOUT_1}: it holds no ledger that is known here ({error})"),
        )),
    }
}

fn decode_meta(from: &mut dyn Read) -> io::Result<SnapshotMeta> {
    rmp_serde::from_read(from).map_err(io::Error::other)
}

/// Body of the first layout, with its expected hash.
struct LayoutOneBody<R> {
    bytes: HashingStream<R>,
    sum: [u8; 16],
}

fn layout_1_body<'a>(
    file: &'a mut File,
    path: &Path,
    bytes: u64,
) -> Result<LayoutOneBody<BufReader<&'a mut File>>, LedgerNodeError> {
    let mut header = [0u8; HEADER_BYTES_LAYOUT_1 as usize];
    file.seek(SeekFrom::Start(0)).map_err(LedgerNodeError::io(path))?;
    file.read_exact(&mut header).map_err(|_| damage_error(path, "at offset 8: it ends inside its header"))?;
    let found = bytes - HEADER_BYTES_LAYOUT_1;
    if found.to_le_bytes() != header[8..16] {
        let detail = format!("at offset {bytes}: its body has {found} bytes there, not as many as were written");
        return Err(damage_error(path, detail));
    }
    let bytes = HashingStream { with: BufReader::with_capacity(PAYLOAD, file), hasher: Xxh3::new() };
    Ok(LayoutOneBody { bytes, sum: header[16..].try_into().expect("sixteen bytes") })
}

impl<R: Read> LayoutOneBody<R> {
    /// Reads the rest and verifies the checksum; returns the length of the rest in bytes.
    fn finish(mut self, path: &Path, bytes: u64) -> Result<u64, LedgerNodeError> {
        let rest = io::copy(&mut self.bytes, &mut io::sink()).map_err(LedgerNodeError::io(path))?;
        if self.bytes.hasher.digest128().to_le_bytes() == self.sum {
            return Ok(rest);
        }
        let detail =
            format!("at offset 16: the checksum of its body, offset {HEADER_BYTES_LAYOUT_1} to {bytes}, is wrong");
        Err(damage_error(path, detail))
    }
}

/// Returns the layout of a file; fails if it is no snapshot.
fn read_layout(file: &mut File, path: &Path) -> Result<u8, LedgerNodeError> {
    let mut magic = [0; 8];
    file.seek(SeekFrom::Start(0)).map_err(LedgerNodeError::io(path))?;
    file.read_exact(&mut magic).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => damage_error(path, "at offset 0: it is too short for a snapshot"),
        _ => LedgerNodeError::io(path)(error),
    })?;
    match &magic {
        MAGIC_LAYOUT_1 => Ok(1),
        MAGIC => Ok(2),
        [b'O', b'W', b'N', b'S', b'N', b'A', b'P', other] => {
            let detail =
                format!("at offset 7: its layout is {:?}; a newer release wrote it, so start that one", *other as char);
            Err(damage_error(path, detail))
        }
        _ => Err(damage_error(path, "at offset 0: it does not start as a snapshot does")),
    }
}

fn modified_unix_secs(file: &File) -> u64 {
    let modified = file.metadata().and_then(|found| found.modified()).ok();
    modified.and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok()).map_or(0, |since| since.as_secs())
}

fn write(file: &mut File, head: &SnapshotHeader, ledger: &Ledger) -> io::Result<()> {
    if ledger.level() < FRAMED_FROM_LEVEL {
        return write_layout_1(file, &head.meta, ledger);
    }
    let mut paced = SyncPacedFile { to: file, unsynced: 0 };
    paced.write_all(MAGIC)?;
    let mut frames = FrameWriter::new(paced);
    frames.write_all(&rmp_serde::to_vec(head).map_err(io::Error::other)?)?;
    frames.end_frame()?;
    ledger.encode(&mut frames)?;
    frames.end().map(drop)
}

fn write_layout_1(file: &mut File, meta: &SnapshotMeta, ledger: &Ledger) -> io::Result<()> {
    file.write_all(&[0; HEADER_BYTES_LAYOUT_1 as usize])?;
    let to = io::BufWriter::with_capacity(PAYLOAD, SyncPacedFile { to: &mut *file, unsynced: 0 });
    let mut body = HashingStream { with: to, hasher: Xxh3::new() };
    body.write_all(&rmp_serde::to_vec(meta).map_err(io::Error::other)?)?;
    ledger.encode(&mut body)?;
    body.flush()?;
    let sum = body.hasher.digest128();
    drop(body);
    let length = file.stream_position()? - HEADER_BYTES_LAYOUT_1;
    file.seek(SeekFrom::Start(0))?;
    file.write_all(MAGIC_LAYOUT_1)?;
    file.write_all(&length.to_le_bytes())?;
    file.write_all(&sum.to_le_bytes())
}

/// File writer that syncs often, so that little unsynced data accumulates.
struct SyncPacedFile<'a> {
    to: &'a mut File,
    unsynced: u64,
}

impl Write for SyncPacedFile<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.to.write(bytes)?;
        self.unsynced += written as u64;
        if self.unsynced >= MAX_UNSYNCED_BYTES {
            self.to.sync_data()?;
            self.unsynced = 0;
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// Hashes all bytes that pass through.
struct HashingStream<T> {
    with: T,
    hasher: Xxh3,
}

impl<W: Write> Write for HashingStream<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.with.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.with.flush()
    }
}

impl<R: Read> Read for HashingStream<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let read = self.with.read(to)?;
        self.hasher.update(&to[..read]);
        Ok(read)
    }
}

impl SnapshotStore for SnapshotFile {
    type Handle = File;

    async fn write(&self, contents: SnapshotContents) -> io::Result<Snapshot<File>> {
        let snapshots = self.clone();
        let work = move || {
            SnapshotFile::write(&snapshots, &contents)?;
            // Frees the ledger before the caller is answered.
            drop(contents);
            current_snapshot(&snapshots)?.ok_or_else(|| io::ErrorKind::NotFound.into())
        };
        self.shortages.run_blocking("a snapshot", work).await
    }

    async fn install(&self, snapshot: File) -> io::Result<SnapshotContents> {
        let snapshots = self.clone();
        let work = move || snapshots.store(snapshot).map_err(io::Error::other);
        self.shortages.run_blocking("a snapshot", work).await
    }

    /// Frees a view on the drop thread, once its last reader has released it.
    fn discard(&self, old: Arc<LedgerView>) {
        if let Some(drop_thread) = &self.drop_thread {
            drop_thread.free(old);
        }
    }

    async fn current(&self) -> io::Result<Option<Snapshot<File>>> {
        let snapshots = self.clone();
        self.shortages.run_blocking("a snapshot", move || current_snapshot(&snapshots)).await
    }
}

/// Returns the current snapshot with the metadata that it contains.
fn current_snapshot(snapshots: &SnapshotFile) -> io::Result<Option<Snapshot<File>>> {
    let found = snapshots.open_with_meta().map_err(io::Error::other)?;
    Ok(found.map(|(meta, snapshot)| Snapshot { meta, snapshot }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node_folder::write_durably;

    fn at(folder: &Path) -> SnapshotFile {
        SnapshotFile::at(folder.join("snapshot"), ClusterId(7))
    }

    fn ledger(level: u32) -> Ledger {
        use ledger::{Command, LedgerEntry, Submission};
        use vocabulary::{ClientId, ClientSerial, LedgerTime, NodeId};

        let mut ledger = Ledger::default();
        let commands = [Command::OpenClient(NodeId(1)), Command::RaiseLevel(level)];
        let submission = |(n, command)| Submission { client: ClientId(1), serial: ClientSerial(n), command };
        let submissions = (1..).zip(commands).map(submission).collect();
        ledger.apply(12, &LedgerEntry { time: LedgerTime(5), submissions });
        assert_eq!(ledger.level(), level);
        ledger
    }

    fn read_current(snapshots: &SnapshotFile) -> Result<LoadedSnapshot, LedgerNodeError> {
        read(&mut snapshots.open().unwrap().unwrap(), &snapshots.path)
    }

    fn snapshot_at_level(level: u32) -> (tempfile::TempDir, SnapshotFile) {
        let folder = tempfile::tempdir().unwrap();
        let snapshots = at(folder.path());
        assert!(snapshots.meta().unwrap().is_none());
        snapshots.write(&SnapshotContents { meta: SnapshotMeta::default(), ledger: ledger(level) }).unwrap();
        (folder, snapshots)
    }

    #[test]
    fn a_snapshot_round_trips_in_the_layout_of_its_level() {
        for (level, cluster) in [(1, None), (2, Some(ClusterId(7)))] {
            let (_folder, snapshots) = snapshot_at_level(level);
            let found = read_current(&snapshots).unwrap();
            assert_eq!(snapshots.meta().unwrap().as_ref(), Some(&found.head.meta));
            assert_eq!((found.layout, found.head.cluster), (level as u8, cluster));
            assert_eq!(found.ledger, ledger(level));
            assert_eq!(check(&mut snapshots.open().unwrap().unwrap(), &snapshots.path).unwrap(), found.head);
            assert_eq!(found.head.meta, SnapshotMeta::default());
            assert!(found.head.written > 1_700_000_000);
        }
    }

    #[test]
    fn every_flipped_byte_or_truncation_is_reported_with_file_and_offset() {
        for level in [1, 2] {
            let (_folder, snapshots) = snapshot_at_level(level);
            let good = std::fs::read(&snapshots.path).unwrap();
            let check = |bad: &[u8], what: String| {
                std::fs::write(&snapshots.path, bad).unwrap();
                let mut file = snapshots.open().unwrap().unwrap();
                assert!(super::check(&mut file, &snapshots.path).is_err(), "{what}, without reading the ledger");
                let error = read_current(&snapshots).err().unwrap_or_else(|| panic!("{what}")).to_string();
                assert!(error.contains("snapshot") && error.contains("offset"), "{what}: {error}");
            };
            for at in 0..good.len() {
                let mut bad = good.clone();
                bad[at] ^= 0x10;
                check(&bad, format!("level {level}: byte {at} is not checked"));
                check(&good[..at], format!("level {level}: cut at {at}"));
            }
            check(&[&good[..], b"?"].concat(), format!("level {level}: more follows"));
        }
    }

    #[test]
    fn a_newer_layout_and_a_non_file_are_refused_with_the_reason() {
        let (_folder, snapshots) = snapshot_at_level(2);
        let mut bytes = std::fs::read(&snapshots.path).unwrap();
        bytes[7] = b'3';
        std::fs::write(&snapshots.path, &bytes).unwrap();
        let error = snapshots.meta().unwrap_err().to_string();
        assert!(error.contains("newer release") && error.contains("offset 7"), "{error}");
        std::fs::remove_file(&snapshots.path).unwrap();
        std::fs::create_dir(&snapshots.path).unwrap();
        let error = snapshots.meta().unwrap_err().to_string();
        assert!(error.contains("snapshot"), "{error}");
    }

    #[test]
    fn a_foreign_snapshot_is_stored_verbatim_unless_of_another_cluster() {
        let (_folder, theirs) = snapshot_at_level(2);
        let folder = tempfile::tempdir().unwrap();
        let own = at(folder.path());
        let body = own.store(File::open(&theirs.path).unwrap()).unwrap();
        assert_eq!(body.ledger, ledger(2));
        assert_eq!(std::fs::read(&own.path).unwrap(), std::fs::read(&theirs.path).unwrap());
        let other = SnapshotFile::at(folder.path().join("other"), ClusterId(8));
        let error = other.store(File::open(&theirs.path).unwrap()).unwrap_err();
        assert!(matches!(error, LedgerNodeError::OtherCluster { .. }), "{error}");
        assert!(!folder.path().join("other").exists());
    }

    fn meta(upto: u64) -> SnapshotMeta {
        use openraft::type_config::alias::LeaderIdOf;
        use openraft::vote::RaftLeaderIdExt;

        let leader = <LeaderIdOf<crate::raft::TokioTypeConfig> as RaftLeaderIdExt>::new_committed(1, 1);
        SnapshotMeta { last_log_id: Some(LogId::new(leader, upto)), ..SnapshotMeta::default() }
    }

    #[test]
    fn a_snapshot_begun_before_a_newer_one_does_not_replace_it() {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let [own, theirs] = folders.each_ref().map(|folder| at(folder.path()));
        theirs.write(&SnapshotContents { meta: meta(40), ledger: ledger(2) }).unwrap();
        own.store(File::open(&theirs.path).unwrap()).unwrap();
        own.write(&SnapshotContents { meta: meta(12), ledger: ledger(2) }).unwrap();
        assert_eq!(own.meta().unwrap(), Some(meta(40)), "the log may be purged up to it");
        own.write(&SnapshotContents { meta: meta(50), ledger: ledger(2) }).unwrap();
        assert_eq!(own.meta().unwrap(), Some(meta(50)));
    }

    #[test]
    fn concurrent_snapshot_writes_are_both_complete() {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let [own, theirs] = folders.each_ref().map(|folder| at(folder.path()));
        theirs.write(&SnapshotContents { meta: meta(40), ledger: ledger(2) }).unwrap();
        std::thread::scope(|threads| {
            for _ in 0..2 {
                threads.spawn(|| (0..50).for_each(|_| drop(own.store(File::open(&theirs.path).unwrap()).unwrap())));
                threads.spawn(|| {
                    (0..50).for_each(|_| own.write(&SnapshotContents { meta: meta(41), ledger: ledger(2) }).unwrap());
                });
            }
        });
        read_current(&own).unwrap();
    }

    #[test]
    fn a_failed_snapshot_write_leaves_the_old_snapshot_and_no_remainder() {
        let (folder, snapshots) = snapshot_at_level(2);
        let before = std::fs::read(&snapshots.path).unwrap();
        let failed = write_durably(&snapshots.path, |file| {
            file.write_all(b"half")?;
            Err(io::ErrorKind::StorageFull.into())
        });
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(std::fs::read(&snapshots.path).unwrap(), before);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
