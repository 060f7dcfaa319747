//! A snapshot on its way from another node: its head, then its bytes, straight into a file that nobody else can see.

use std::fs::File;
use std::io;
use std::path::Path;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncSeekExt, AsyncWriteExt};
use tokio::sync::mpsc;

use crate::peers::PeerError;
use crate::raft::{SnapshotMeta, Vote};

/// Bytes of a snapshot in one frame.
pub(crate) const CHUNK: usize = 1 << 20;

/// What is said before the bytes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct SnapshotHead {
    pub(crate) vote: Vote,
    pub(crate) meta: SnapshotMeta,
    pub(crate) bytes: u64,
}

/// Writes what arrives into a file in `folder`; nothing is left of it when it is closed or the process dies.
pub(crate) async fn receive(folder: &Path, bytes: u64, mut chunks: mpsc::Receiver<Bytes>) -> Result<File, PeerError> {
    let disk = |error: io::Error| PeerError::Failed(format!("the snapshot could not be written: {error}"));
    let mut file = tokio::fs::File::from_std(nameless(folder).map_err(disk)?);
    let mut received = 0u64;
    while let Some(chunk) = chunks.recv().await {
        received += chunk.len() as u64;
        if received > bytes || chunk.len() > CHUNK {
            return Err(PeerError::Garbled(format!("{received} bytes of a snapshot of {bytes}")));
        }
        file.write_all(&chunk).await.map_err(disk)?;
    }
    if received < bytes {
        return Err(PeerError::Garbled(format!("the snapshot broke off after {received} of {bytes} bytes")));
    }
    file.flush().await.map_err(disk)?;
    file.rewind().await.map_err(disk)?;
    Ok(file.into_std().await)
}

/// A file without a name: opened, then unlinked.
fn nameless(folder: &Path) -> io::Result<File> {
    let path = folder.join(format!("snapshot.incoming-{:032x}", crate::node_folder::random()));
    let file = File::options().create_new(true).read(true).write(true).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    async fn check(bytes: u64, chunks: &[&'static [u8]]) -> Result<Vec<u8>, PeerError> {
        let folder = tempfile::tempdir().unwrap();
        let (sender, receiver) = mpsc::channel(8);
        for chunk in chunks {
            sender.send(Bytes::from_static(chunk)).await.unwrap();
        }
        drop(sender);
        let mut file = receive(folder.path(), bytes, receiver).await?;
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left behind");
        let mut whole = Vec::new();
        file.read_to_end(&mut whole).unwrap();
        Ok(whole)
    }

    #[tokio::test]
    async fn a_snapshot_arrives_as_it_was_sent() {
        assert_eq!(check(9, &[b"snap", b"shot!"]).await.unwrap(), b"snapshot!");
        assert_eq!(check(0, &[]).await.unwrap(), b"");
    }

    #[tokio::test]
    async fn too_little_and_too_much_are_refused() {
        let short = check(9, &[b"snap"]).await.unwrap_err();
        assert!(short.to_string().contains("broke off after 4 of 9"), "{short}");
        assert!(check(3, &[b"snap"]).await.is_err());
    }
}
