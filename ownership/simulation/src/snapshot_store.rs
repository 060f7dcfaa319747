//! Snapshots on a simulated disk, as the bytes of a file.

use std::io;
use std::sync::Arc;

use consensus::{Snapshot, SnapshotContents, SnapshotMeta, SnapshotStore};
use ledger::Ledger;
use openraft::AsyncRuntime;

use crate::disk::SimDisk;
use crate::runtime::SimulatedRuntime;

#[derive(Clone, Debug)]
pub(crate) struct SimSnapshotStore(SimDisk);

impl SimSnapshotStore {
    pub(crate) fn on_disk(disk: SimDisk) -> Self {
        Self(disk)
    }

    /// Starts a thread for a snapshot and opens its file, retrying while the process lacks resources.
    async fn await_thread_and_file(&self) -> io::Result<()> {
        self.0.in_time(SimDisk::begin_thread).await?;
        self.0.in_time(SimDisk::open).await
    }

    async fn store(&self, meta: SnapshotMeta, bytes: Arc<Vec<u8>>) -> io::Result<()> {
        SimulatedRuntime::sleep(self.0.latency()).await;
        self.0.store_snapshot((meta, bytes))
    }
}

impl SnapshotStore for SimSnapshotStore {
    type Handle = Arc<Vec<u8>>;

    async fn write(&self, contents: SnapshotContents) -> io::Result<Snapshot<Self::Handle>> {
        let mut bytes = rmp_serde::to_vec(&contents.meta).map_err(io::Error::other)?;
        contents.ledger.encode(&mut bytes)?;
        let bytes = Arc::new(bytes);
        self.await_thread_and_file().await?;
        SimulatedRuntime::sleep(self.0.snapshot_latency()).await;
        self.store(contents.meta, bytes).await?;
        self.current().await?.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    async fn install(&self, snapshot: Self::Handle) -> io::Result<SnapshotContents> {
        let mut from: &[u8] = &snapshot;
        let meta: SnapshotMeta = rmp_serde::from_read(&mut from).map_err(io::Error::other)?;
        let ledger = Ledger::decode(&mut from)?;
        let is_kept = self.0.snapshot().is_some_and(|(kept, _)| kept == meta);
        if !is_kept {
            self.await_thread_and_file().await?;
            self.store(meta.clone(), snapshot).await?;
        }
        Ok(SnapshotContents { meta, ledger })
    }

    async fn current(&self) -> io::Result<Option<Snapshot<Self::Handle>>> {
        Ok(self.0.snapshot().map(|(meta, snapshot)| Snapshot { meta, snapshot }))
    }
}
