//! The end of a node that cannot keep its ledger: its disk failed or is full.

use consensus::Unreadable;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::errors::Fatal;

use crate::core::Core;
use crate::directory::Directory;
use crate::error::OwnershipError;
use crate::watch::Observer;

/// What went wrong while a node came up. Where its store failed under it, that: all that then follows is that the
/// quorum is not there.
pub(crate) fn cause(core: &Core, error: OwnershipError) -> OwnershipError {
    if let Some(too_old) = too_old(&core.observer) {
        return too_old;
    }
    match &core.raft.metrics().borrow_watched().running_state {
        Err(fatal @ Fatal::StorageError(_)) => OwnershipError::Failed(fatal.to_string()),
        _ => error,
    }
}

/// That this release cannot read what is in the ledger, if it met such a thing.
pub(crate) fn too_old(observer: &Observer) -> Option<OwnershipError> {
    let Unreadable { level, levels } = *observer.unreadable.get()?;
    Some(OwnershipError::Level { level, highest: levels.highest })
}

impl Directory {
    /// Returns once this node's ledger has failed for good, with the cause. Nothing is retried: the process should end,
    /// and be started again when the cause is gone. What was acknowledged is on disk.
    pub async fn failed(&self) -> OwnershipError {
        let mut metrics = self.raft().metrics();
        loop {
            if let Err(fatal) = &metrics.borrow_watched().running_state {
                let failed = || OwnershipError::Failed(fatal.to_string());
                return too_old(self.observer()).unwrap_or_else(failed);
            }
            if metrics.changed().await.is_err() {
                return OwnershipError::Failed("its task is gone".into());
            }
        }
    }
}
