//! The snapshot file as the state machine's store. Disk work runs beside the runtime.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use consensus::{Body, Snapshot, SnapshotStore, View};

use crate::snapshots::SnapshotFile;

impl SnapshotStore for SnapshotFile {
    type Handle = File;

    async fn write(&self, body: Body) -> io::Result<Snapshot<File>> {
        let snapshots = self.clone();
        blocking(move || {
            SnapshotFile::write(&snapshots, &body)?;
            let snapshot = snapshots.open()?.ok_or(io::ErrorKind::NotFound)?;
            Ok(Snapshot { meta: body.meta, snapshot })
        })
        .await
    }

    async fn install(&self, snapshot: File) -> io::Result<Body> {
        let snapshots = self.clone();
        blocking(move || snapshots.keep(snapshot).map_err(io::Error::other)).await
    }

    /// Frees it where nobody waits, and not before the last reader has let go of it.
    fn discard(&self, old: Arc<View>) {
        std::thread::spawn(move || {
            let mut old = old;
            while let Err(still_read) = Arc::try_unwrap(old) {
                std::thread::sleep(Duration::from_millis(20));
                old = still_read;
            }
        });
    }

    async fn current(&self) -> io::Result<Option<Snapshot<File>>> {
        let snapshots = self.clone();
        blocking(move || {
            let Some(meta) = snapshots.meta().map_err(io::Error::other)? else { return Ok(None) };
            Ok(snapshots.open()?.map(|snapshot| Snapshot { meta, snapshot }))
        })
        .await
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}
