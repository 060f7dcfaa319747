//! The end of a node that cannot keep its ledger: its disk failed or is full, or lost what was on it.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use consensus::Unreadable;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::errors::Fatal;
use openraft::raft::AppendEntriesResponse;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::core::Core;
use crate::directory::Directory;
use crate::error::OwnershipError;
use crate::in_place::KNOWN_WITHIN;
use crate::node_folder::{read_note, write_in_time};
use crate::raft::Types;
use crate::watch::Observer;

/// What went wrong while a node came up. Where its store failed under it, that: all that then follows is that the
/// quorum is not there.
pub(crate) fn cause(core: &Core, error: OwnershipError) -> OwnershipError {
    if let Some(known) = core.known_end() {
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

/// How long a node that lacks entries may take to write that down before it ends.
const NOTED_WITHIN: Duration = Duration::from_secs(1);

/// Whether this node's log lacks what it has acknowledged. The leader does not send that again, so nothing new comes.
#[derive(Debug, Default)]
pub(crate) struct Reversion {
    since: Mutex<Option<Instant>>,
    found: OnceLock<Reverted>,
}

/// What a log lacks. Written down, since such a node must not vote again: it may have forgotten votes as well.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Reverted {
    last: u64,
    /// The last one that the leader knew to be there.
    acknowledged: u64,
}

const FILE: &str = "reverted.json";

/// Refuses a folder of which was written down that it lacks what was acknowledged.
pub(crate) fn refuse_reverted(folder: &Path) -> Result<(), OwnershipError> {
    read_note(&folder.join(FILE))?.map_or(Ok(()), |reverted| Err(of_folder(folder, reverted)))
}

fn of_folder(folder: &Path, Reverted { last, acknowledged }: Reverted) -> OwnershipError {
    OwnershipError::Reverted { path: folder.to_owned(), last, acknowledged }
}

impl Reversion {
    /// Notes that what a heartbeat says of this node is not so. True when that has been so for too long.
    fn contradicted(&self, at: Instant) -> bool {
        at.duration_since(*self.since.lock().get_or_insert(at)) >= CONTRADICTED
    }

    fn confirmed(&self) {
        *self.since.lock() = None;
    }
}

impl Core {
    /// Looks at the answer to a heartbeat that named the last entry that is known to be here.
    pub(crate) fn note_heartbeat(&self, acknowledged: u64, answer: &AppendEntriesResponse<Types>) {
        match answer {
            AppendEntriesResponse::Conflict => {}
            AppendEntriesResponse::Success => return self.observer.reversion.confirmed(),
            _ => return,
        }
        if !self.observer.reversion.contradicted(Instant::now()) {
            return;
        }
        let last = self.raft.metrics().borrow_watched().last_log_index.unwrap_or(0);
        let reverted = Reverted { last, acknowledged };
        if self.observer.reversion.found.set(reverted).is_ok() {
            tracing::error!(last, acknowledged, "this node lacks entries that it has acknowledged, and ends");
            let bytes = serde_json::to_vec(&reverted).expect("two numbers encode");
            let (raft, path, shortages) = (self.raft.clone(), self.folder.join(FILE), self.log.shortages());
            tokio::spawn(async move {
                let own = shortages.clone();
                let written = shortages
                    .beside("what is lacking", move || write_in_time(&own, &path, |file| file.write_all(&bytes)));
                // It must vote no longer, also where no file can be had now.
                let written = tokio::time::timeout(NOTED_WITHIN, written).await;
                if let Err(error) = written.map_err(io::Error::from).and_then(|written| written) {
                    tracing::error!(%error, "that could not be written down; do not start this node again");
                }
                raft.shutdown().await
            });
        }
    }

    /// Leaves the quorum for good, as what it acknowledges is kept nowhere: its files are gone.
    pub(crate) fn leave_without(&self, path: PathBuf) {
        let gone = format!("{} is gone from the disk, or something else lies there now", path.display());
        if self.observer.gone.set(path).is_ok() {
            self.log.close_for(&io::Error::new(io::ErrorKind::NotFound, gone));
            let raft = self.raft.clone();
            tokio::spawn(async move { raft.shutdown().await });
        }
    }

    /// What of the data directory is gone.
    fn gone(&self) -> Option<OwnershipError> {
        self.observer.gone.get().map(|path| OwnershipError::FolderGone { path: path.clone() })
    }

    fn reverted(&self) -> Option<OwnershipError> {
        self.observer.reversion.found.get().map(|reverted| of_folder(&self.folder, *reverted))
    }

    /// Why this node's ledger has failed for good, once it has.
    pub(crate) fn ended(&self) -> Option<OwnershipError> {
        let fatal = self.raft.metrics().borrow_watched().running_state.clone().err()?;
        Some(self.known_end().unwrap_or_else(|| OwnershipError::Failed(fatal.to_string())))
    }

    /// Why this node ends or has ended, where more is known of it than that Raft has stopped.
    fn known_end(&self) -> Option<OwnershipError> {
        too_old(&self.observer).or_else(|| self.reverted()).or_else(|| self.gone())
    }
}

impl Directory {
    /// Returns once this node's ledger has failed for good, with the cause. Nothing is retried: the process should end,
    /// and be started again when the cause is gone. What was acknowledged is on disk, unless its files were taken away.
    pub async fn failed(&self) -> OwnershipError {
        let (mut metrics, mut is_looked_at) = (self.raft().metrics(), false);
        loop {
            match self.core().ended() {
                // A write may have met a folder that is gone before a look at it did.
                Some(OwnershipError::Failed(_)) if !is_looked_at => {
                    is_looked_at = true;
                    tokio::time::sleep(KNOWN_WITHIN).await;
                    continue;
                }
                Some(failed) => return failed,
                None => {}
            }
            if metrics.changed().await.is_err() {
                return OwnershipError::Failed("its task is gone".into());
            }
        }
    }

    /// Whether the data directory, or the log in it, was moved or removed from under this node: it has left the quorum.
    pub fn is_folder_gone(&self) -> bool {
        self.core().gone().is_some()
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
