//! Receives a snapshot from another node: its header, then its bytes, into an unnamed file.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncSeekExt, AsyncWriteExt};
use tokio::sync::mpsc;

use crate::peers::PeerError;
use crate::raft::{SnapshotMeta, Vote};
use crate::snapshot_file;

/// Bytes of a snapshot per frame.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;

/// Header that precedes the bytes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct SnapshotStreamHeader {
    pub(crate) vote: Vote,
    pub(crate) meta: SnapshotMeta,
    pub(crate) bytes: u64,
}

/// Reservations of disk space for incoming snapshots: each alone may fit, but not all of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct DiskReservations(Arc<Mutex<u64>>);

/// Disk space reserved for one snapshot until it is installed or given up.
#[derive(Debug)]
pub(crate) struct DiskReservation {
    space: DiskReservations,
    bytes: u64,
}

impl DiskReservations {
    /// Reserves space for a snapshot of `bytes` bytes in `folder`.
    pub(crate) fn reserve(&self, folder: &Path, bytes: u64) -> Result<DiskReservation, PeerError> {
        self.reserve_with(|| free_bytes(folder), bytes)
    }

    /// Reserves space if `free` is sufficient: once for receiving and once for installing, while the old snapshot still
    /// exists.
    fn reserve_with(&self, free: impl FnOnce() -> io::Result<u64>, bytes: u64) -> Result<DiskReservation, PeerError> {
        let needed = bytes.saturating_mul(2);
        let mut snapshot = self.0.lock();
        // Read while the reservations are locked: otherwise bytes that another snapshot writes in between could count
        // as free and as no longer reserved.
        let (free, others) = (free().map_err(disk_error)?, *snapshot);
        if needed > free.saturating_sub(others) {
            return Err(PeerError::Failed(format!(
                "a snapshot of {bytes} bytes needs {needed} on the disk of the node that is to take it, and {free} are \
                 free there, {others} of them for others that are on their way: free space in its data directory"
            )));
        }
        *snapshot += needed;
        drop(snapshot);
        Ok(DiskReservation { space: self.clone(), bytes: needed })
    }
}

impl DiskReservation {
    /// Records that `bytes` are on disk now and no longer need a reservation.
    fn consume(&mut self, bytes: u64) {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        *self.space.0.lock() -= bytes;
    }
}

impl Drop for DiskReservation {
    fn drop(&mut self) {
        self.consume(self.bytes);
    }
}

fn disk_error(error: io::Error) -> PeerError {
    PeerError::Failed(format!("the snapshot could not be written: {error}"))
}

fn free_bytes(folder: &Path) -> io::Result<u64> {
    let disk = rustix::fs::statvfs(folder)?;
    Ok(disk.f_bavail.saturating_mul(disk.f_frsize))
}

/// Writes an incoming snapshot to an unnamed file in `folder`, which disappears when it is closed or the process dies.
/// Each chunk must arrive within a timeout.
pub(crate) async fn receive(
    (folder, reserved): (&Path, &mut DiskReservation),
    bytes: u64,
    (mut chunks, within): (mpsc::Receiver<Bytes>, Duration),
) -> Result<File, PeerError> {
    let mut file = tokio::fs::File::from_std(unnamed_file(folder).map_err(disk_error)?);
    let mut received = 0u64;
    // A sender that gave up may be silent.
    let late = |_| PeerError::TimedOut { millis: within.as_millis() as u64 };
    while let Some(chunk) = tokio::time::timeout(within, chunks.recv()).await.map_err(late)? {
        received += chunk.len() as u64;
        if received > bytes || chunk.len() > CHUNK_BYTES {
            return Err(PeerError::Garbled(format!("{received} bytes of a snapshot of {bytes}")));
        }
        file.write_all(&chunk).await.map_err(disk_error)?;
        reserved.consume(chunk.len() as u64);
    }
    if received < bytes {
        return Err(PeerError::Garbled(format!("the snapshot broke off after {received} of {bytes} bytes")));
    }
    file.flush().await.map_err(disk_error)?;
    file.rewind().await.map_err(disk_error)?;
    Ok(file.into_std().await)
}

/// Verifies every byte of a received snapshot: another node's damaged snapshot must not stop this node.
pub(crate) async fn verify_received(mut file: File, meta: &SnapshotMeta) -> Result<File, PeerError> {
    let check = move || {
        let head = snapshot_file::check(&mut file, Path::new("snapshot.incoming"));
        head.map(|head| (file, head))
    };
    let checked = tokio::task::spawn_blocking(check).await.map_err(|error| PeerError::Failed(error.to_string()))?;
    match checked {
        Ok((file, head)) if head.meta == *meta => Ok(file),
        Ok(_) => Err(PeerError::Garbled("the snapshot is not the one that was announced".into())),
        Err(error) => Err(PeerError::Garbled(format!("the snapshot on the node that sent it, or on its way: {error}"))),
    }
}

/// Creates a file without a name: opened, then unlinked.
fn unnamed_file(folder: &Path) -> io::Result<File> {
    let path = folder.join(format!("snapshot.incoming-{:032x}", crate::node_folder::random_u128()));
    let file = File::options().create_new(true).read(true).write(true).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use openraft::type_config::alias::LeaderIdOf;
    use openraft::vote::RaftLeaderIdExt;

    use super::*;
    use crate::raft::TokioTypeConfig;

    fn of(space: &DiskReservations, free: u64, bytes: u64) -> Result<DiskReservation, PeerError> {
        space.reserve_with(|| Ok(free), bytes)
    }

    async fn check(bytes: u64, chunks: &[&'static [u8]]) -> Result<Vec<u8>, PeerError> {
        let folder = tempfile::tempdir().unwrap();
        let (sender, receiver) = mpsc::channel(8);
        for chunk in chunks {
            sender.send(Bytes::from_static(chunk)).await.unwrap();
        }
        drop(sender);
        let mut reserved = DiskReservations::default().reserve(folder.path(), bytes)?;
        let mut file = receive((folder.path(), &mut reserved), bytes, (receiver, Duration::from_secs(60))).await?;
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left behind");
        let mut whole = Vec::new();
        file.read_to_end(&mut whole).unwrap();
        Ok(whole)
    }

    #[tokio::test]
    async fn a_snapshot_arrives_as_sent() {
        assert_eq!(check(9, &[b"snap", b"shot!"]).await.unwrap(), b"snapshot!");
        assert_eq!(check(0, &[]).await.unwrap(), b"");
    }

    #[tokio::test]
    async fn a_snapshot_stream_of_the_wrong_length_is_refused() {
        let short = check(9, &[b"snap"]).await.unwrap_err();
        assert!(short.to_string().contains("broke off after 4 of 9"), "{short}");
        assert!(check(3, &[b"snap"]).await.is_err());
    }

    #[tokio::test]
    async fn a_snapshot_stream_is_abandoned_when_its_sender_goes_silent() {
        let folder = tempfile::tempdir().unwrap();
        let (sender, receiver) = mpsc::channel(8);
        sender.send(Bytes::from_static(b"snap")).await.unwrap();
        let mut reserved = DiskReservations::default().reserve(folder.path(), 9).unwrap();
        let place = (folder.path(), &mut reserved);
        let given_up = receive(place, 9, (receiver, Duration::from_millis(20))).await.unwrap_err();
        assert!(matches!(given_up, PeerError::TimedOut { millis: 20 }), "{given_up}");
        assert!(sender.is_closed());
    }

    #[tokio::test]
    async fn a_snapshot_too_large_for_the_disk_is_refused_before_writing() {
        let error = check(u64::MAX / 4, &[b"snap"]).await.unwrap_err().to_string();
        assert!(error.contains("free space in its data directory"), "{error}");
        assert!(
            of(&DiskReservations::default(), 100, 50).is_ok() && of(&DiskReservations::default(), 100, 51).is_err()
        );
    }

    #[test]
    fn two_snapshots_that_fit_only_separately_are_not_received_together() {
        let space = DiskReservations::default();
        let mut first = of(&space, 100, 30).unwrap();
        let message = of(&space, 100, 30).unwrap_err().to_string();
        assert!(message.contains("60 of them for others"), "{message}");
        // Received bytes are used on disk and no longer reserved.
        first.consume(30);
        assert!(of(&space, 70, 20).is_ok() && of(&space, 70, 21).is_err());
        drop(first);
        assert!(of(&space, 70, 35).is_ok());
        assert_eq!(*space.0.lock(), 0);
    }

    #[test]
    fn free_space_is_read_while_no_reservation_changes() {
        let space = DiskReservations::default();
        let mut first = of(&space, 100, 30).unwrap();
        let second = space.reserve_with(
            || {
                assert!(space.0.try_lock().is_none(), "the first could write and give back after this look");
                Ok(100)
            },
            20,
        );
        first.consume(30);
        assert_eq!(second.unwrap().bytes, 40);
        assert!(space.reserve_with(|| Err(io::ErrorKind::NotFound.into()), 1).is_err());
        assert_eq!(*space.0.lock(), 30);
    }

    #[tokio::test]
    async fn a_damaged_or_unexpected_snapshot_is_refused_before_installation() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("snapshot");
        let body = consensus::SnapshotContents::default();
        crate::snapshot_file::SnapshotFile::at(path.clone(), crate::ClusterId(1)).write(&body).unwrap();
        assert!(verify_received(File::open(&path).unwrap(), &body.meta).await.is_ok());
        let last = crate::raft::LogId::new(<LeaderIdOf<TokioTypeConfig> as RaftLeaderIdExt>::new_committed(1, 1), 7);
        let other = SnapshotMeta { last_log_id: Some(last), ..body.meta.clone() };
        assert!(matches!(verify_received(File::open(&path).unwrap(), &other).await, Err(PeerError::Garbled(_))));
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        let error = verify_received(File::open(&path).unwrap(), &body.meta).await.unwrap_err();
        assert!(error.to_string().contains("offset"), "{error}");
    }
}
