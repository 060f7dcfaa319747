//! The snapshot file as the state machine's store. Disk work runs beside the runtime.

use std::fs::File;
use std::io;
use std::path::Path;

use consensus::{Body, Snapshot, SnapshotStore};

use crate::snapshots::{self, SnapshotFile};

impl SnapshotStore for SnapshotFile {
    type Handle = File;

    async fn write(&self, body: Body) -> io::Result<Snapshot<File>> {
        let snapshots = self.clone();
        blocking(move || {
            SnapshotFile::write(&snapshots, &body.meta, &body.ledger)?;
            let snapshot = snapshots.open()?.ok_or(io::ErrorKind::NotFound)?;
            Ok(Snapshot { meta: body.meta, snapshot })
        })
        .await
    }

    async fn install(&self, snapshot: File) -> io::Result<Body> {
        let snapshots = self.clone();
        blocking(move || {
            let body = snapshots::read(snapshot, Path::new("snapshot")).map_err(io::Error::other)?;
            let current = snapshots.meta().map_err(io::Error::other)?;
            if current.as_ref() != Some(&body.meta) {
                SnapshotFile::write(&snapshots, &body.meta, &body.ledger)?;
            }
            Ok(body)
        })
        .await
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
