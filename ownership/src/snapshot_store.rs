//! The snapshot file as the state machine's store. Disk work runs beside the runtime.

use std::fs::File;
use std::io;
use std::sync::Arc;

use consensus::{Body, Snapshot, SnapshotStore, View};

use crate::snapshots::SnapshotFile;

impl SnapshotStore for SnapshotFile {
    type Handle = File;

    async fn write(&self, body: Body) -> io::Result<Snapshot<File>> {
        let snapshots = self.clone();
        let work = move || {
            SnapshotFile::write(&snapshots, &body)?;
            // What is left of the ledger is freed before anybody is told.
            drop(body);
            kept(&snapshots)?.ok_or_else(|| io::ErrorKind::NotFound.into())
        };
        self.shortages.beside("a snapshot", work).await
    }

    async fn install(&self, snapshot: File) -> io::Result<Body> {
        let snapshots = self.clone();
        let work = move || snapshots.keep(snapshot).map_err(io::Error::other);
        self.shortages.beside("a snapshot", work).await
    }

    /// Frees it where nobody waits, and not before the last reader has let go of it.
    fn discard(&self, old: Arc<View>) {
        if let Some(reaper) = &self.reaper {
            reaper.free(old);
        }
    }

    async fn current(&self) -> io::Result<Option<Snapshot<File>>> {
        let snapshots = self.clone();
        self.shortages.beside("a snapshot", move || kept(&snapshots)).await
    }
}

/// The snapshot that is there, and its own word on how far it goes.
fn kept(snapshots: &SnapshotFile) -> io::Result<Option<Snapshot<File>>> {
    let found = snapshots.found().map_err(io::Error::other)?;
    Ok(found.map(|(meta, snapshot)| Snapshot { meta, snapshot }))
}
