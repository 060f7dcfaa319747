//! The end of a node that cannot keep its ledger: its disk failed or is full, or lost what was on it.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use consensus::Unreadable;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::errors::Fatal;
use openraft::raft::AppendEntriesResponse;

use crate::core::Core;
use crate::directory::Directory;
use crate::error::OwnershipError;
use crate::raft::Types;
use crate::watch::Observer;

/// What went wrong while a node came up. Where its store failed under it, that: all that then follows is that the
/// quorum is not there.
pub(crate) fn cause(core: &Core, error: OwnershipError) -> OwnershipError {
    if let Some(known) = too_old(&core.observer).or_else(|| core.reverted()) {
        return known;
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

/// How long a leader must be contradicted before this node believes that it lost entries.
const CONTRADICTED: Duration = Duration::from_secs(3);

/// Whether this node's log lacks what it has acknowledged. The leader does not send that again, so nothing new comes.
#[derive(Debug, Default)]
pub(crate) struct Reversion {
    since: Mutex<Option<Instant>>,
    /// The last entry that is here, and the last one that should be.
    found: OnceLock<(u64, u64)>,
}

impl Reversion {
    fn since(&self) -> MutexGuard<'_, Option<Instant>> {
        self.since.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that what a heartbeat says of this node is not so. True when that has been so for too long.
    fn contradicted(&self, at: Instant) -> bool {
        at.duration_since(*self.since().get_or_insert(at)) >= CONTRADICTED
    }

    /// Notes that it is so.
    fn confirmed(&self) {
        *self.since() = None;
    }
}

impl Core {
    /// Looks at the answer to a heartbeat that named the last entry that is known to be here.
    pub(crate) fn note_heartbeat(&self, acknowledged: u64, answer: &AppendEntriesResponse<Types>) {
        if !matches!(answer, AppendEntriesResponse::Conflict) {
            return self.observer.reversion.confirmed();
        }
        if !self.observer.reversion.contradicted(Instant::now()) {
            return;
        }
        let last = self.raft.metrics().borrow_watched().last_log_index.unwrap_or(0);
        if self.observer.reversion.found.set((last, acknowledged)).is_ok() {
            tracing::error!(last, acknowledged, "this node lacks entries that it has acknowledged, and ends");
            let raft = self.raft.clone();
            tokio::spawn(async move { raft.shutdown().await });
        }
    }

    fn reverted(&self) -> Option<OwnershipError> {
        let (last, acknowledged) = *self.observer.reversion.found.get()?;
        Some(OwnershipError::Reverted { path: self.folder.clone(), last, acknowledged })
    }
}

impl Directory {
    /// Returns once this node's ledger has failed for good, with the cause. Nothing is retried: the process should end,
    /// and be started again when the cause is gone. What was acknowledged is on disk.
    pub async fn failed(&self) -> OwnershipError {
        let mut metrics = self.raft().metrics();
        loop {
            if let Err(fatal) = &metrics.borrow_watched().running_state {
                let failed = || OwnershipError::Failed(fatal.to_string());
                let known = too_old(self.observer()).or_else(|| self.core().reverted());
                return known.unwrap_or_else(failed);
            }
            if metrics.changed().await.is_err() {
                return OwnershipError::Failed("its task is gone".into());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_contradiction_that_lasts_is_believed() {
        let (reversion, start) = (Reversion::default(), Instant::now());
        let after = |millis| start + Duration::from_millis(millis);
        assert!(!reversion.contradicted(after(0)));
        assert!(!reversion.contradicted(after(2_900)));
        reversion.confirmed();
        assert!(!reversion.contradicted(after(3_500)));
        assert!(reversion.contradicted(after(6_500)));
    }
}
