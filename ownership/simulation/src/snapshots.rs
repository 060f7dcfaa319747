//! Snapshots on a simulated disk, as the bytes that a file would hold.

use std::io;
use std::sync::Arc;

use consensus::{Body, Snapshot, SnapshotMeta, SnapshotStore};
use openraft::AsyncRuntime;

use crate::disk::Disk;
use crate::runtime::Sim;

#[derive(Clone, Debug)]
pub(crate) struct Snapshots(Disk);

impl Snapshots {
    pub(crate) fn on(disk: Disk) -> Self {
        Self(disk)
    }

    /// Begins a thread for a snapshot, and opens its file, as soon as the process can.
    async fn begun(&self) -> io::Result<()> {
        self.0.in_time(Disk::begin_thread).await?;
        self.0.in_time(Disk::open).await
    }

    async fn keep(&self, meta: SnapshotMeta, bytes: Arc<Vec<u8>>) -> io::Result<()> {
        Sim::sleep(self.0.latency()).await;
        self.0.keep((meta, bytes))
    }
}

impl SnapshotStore for Snapshots {
    type Handle = Arc<Vec<u8>>;

    async fn write(&self, body: Body) -> io::Result<Snapshot<Self::Handle>> {
        let bytes = Arc::new(rmp_serde::to_vec(&(&body.meta, &body.ledger)).map_err(io::Error::other)?);
        self.begun().await?;
        Sim::sleep(self.0.snapshot_latency()).await;
        self.keep(body.meta, bytes).await?;
        self.current().await?.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    async fn install(&self, snapshot: Self::Handle) -> io::Result<Body> {
        let (meta, ledger): (SnapshotMeta, _) = rmp_serde::from_slice(&snapshot).map_err(io::Error::other)?;
        let is_kept = self.0.snapshot().is_some_and(|(kept, _)| kept == meta);
        if !is_kept {
            self.begun().await?;
            self.keep(meta.clone(), snapshot).await?;
        }
        Ok(Body { meta, ledger })
    }

    async fn current(&self) -> io::Result<Option<Snapshot<Self::Handle>>> {
        Ok(self.0.snapshot().map(|(meta, snapshot)| Snapshot { meta, snapshot }))
    }
}
