//! Snapshot file as the state machine's snapshot store. Disk work runs off the runtime's threads.

use std::fs::File;
use std::io;
use std::sync::Arc;

use consensus::{LedgerView, Snapshot, SnapshotContents, SnapshotStore};

use crate::snapshot_file::SnapshotFile;

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
