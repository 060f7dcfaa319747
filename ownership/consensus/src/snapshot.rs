//! Where a state machine keeps its snapshot.

use std::future::Future;
use std::io;
use std::sync::Arc;

use ledger::Ledger;

use crate::types::{Snapshot, SnapshotMeta};
use crate::view::LedgerView;

/// What a snapshot holds.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct SnapshotContents {
    /// How far it goes.
    pub meta: SnapshotMeta,
    /// The state there.
    pub ledger: Ledger,
}

/// Keeps one snapshot, the newest. What a call wrote is durable when it returns.
pub trait SnapshotStore: Clone + Send + Sync + 'static {
    /// How a snapshot is handed around: something that its bytes can be read from.
    type Handle: Send + 'static;

    /// Replaces the snapshot by this state.
    fn write(&self, body: SnapshotContents) -> impl Future<Output = io::Result<Snapshot<Self::Handle>>> + Send;

    /// Checks a snapshot that this node or another one wrote, and keeps it if it is not the one that is kept already.
    fn install(&self, snapshot: Self::Handle) -> impl Future<Output = io::Result<SnapshotContents>> + Send;

    /// Lets go of a view that a snapshot replaced: it may be large, and whoever frees it has to wait for that.
    fn discard(&self, old: Arc<LedgerView>) {
        drop(old);
    }

    /// The snapshot, if there is one.
    fn current(&self) -> impl Future<Output = io::Result<Option<Snapshot<Self::Handle>>>> + Send;
}
