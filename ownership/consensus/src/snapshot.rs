//! Storage interface for the state machine's snapshot.

use std::future::Future;
use std::io;
use std::sync::Arc;

use ledger::Ledger;

use crate::types::{Snapshot, SnapshotMeta};
use crate::view::LedgerView;

/// Contents of a snapshot.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct SnapshotContents {
    /// Log position and membership of the snapshot.
    pub meta: SnapshotMeta,
    /// State of the ledger at that position.
    pub ledger: Ledger,
}

/// Stores the newest snapshot only. A write is durable when its call returns.
pub trait SnapshotStore: Clone + Send + Sync + 'static {
    /// Handle through which a snapshot's bytes can be read.
    type Handle: Send + 'static;

    /// Replaces the stored snapshot by this state.
    fn write(&self, contents: SnapshotContents) -> impl Future<Output = io::Result<Snapshot<Self::Handle>>> + Send;

    /// Verifies a snapshot that this or another node wrote, and stores it unless it is the stored one already.
    fn install(&self, snapshot: Self::Handle) -> impl Future<Output = io::Result<SnapshotContents>> + Send;

    /// Drops a view that a snapshot replaced. Dropping a large view takes time, so implementations may move it
    /// elsewhere.
    fn discard(&self, old: Arc<LedgerView>) {
        drop(old);
    }

    /// Returns the stored snapshot, if there is one.
    fn current(&self) -> impl Future<Output = io::Result<Option<Snapshot<Self::Handle>>>> + Send;
}
