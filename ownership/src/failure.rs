//! Final failures of a node that can no longer maintain its ledger: its disk failed, is full, or lost data.

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use consensus::UnsupportedLevel;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::errors::Fatal;
use openraft::raft::AppendEntriesResponse;

use crate::error::LedgerNodeError;
use crate::log_loss::{LOG_LOSS_FILE, LogLoss, log_loss_error};
use crate::node_core::NodeCore;
use crate::node_folder::write_durably_with;
use crate::node_observer::NodeApplyObserver;
use crate::raft::TokioTypeConfig;

/// Returns the cause of a failed start. If the store failed, that is the cause: the missing quorum is only a
/// consequence.
pub(crate) fn start_failure(core: &NodeCore, error: LedgerNodeError) -> LedgerNodeError {
    if let Some(known) = core.known_failure() {
        return known;
    }
    match &core.raft.metrics().borrow_watched().running_state {
        Err(fatal @ Fatal::StorageError(_)) => LedgerNodeError::Failed(fatal.to_string()),
        _ => error,
    }
}

/// Returns an error if this release met an entry or a snapshot that it cannot read.
pub(crate) fn unsupported_level(observer: &NodeApplyObserver) -> Option<LedgerNodeError> {
    let UnsupportedLevel { level, levels } = *observer.unreadable.get()?;
    Some(LedgerNodeError::Level { level, highest: levels.highest })
}

/// How long a node with a lost log may take to record that before it ends.
const NOTED_WITHIN: Duration = Duration::from_secs(1);

impl NodeCore {
    /// Examines the answer to a heartbeat that named the last entry acknowledged by this node.
    pub(crate) fn note_heartbeat(&self, acknowledged: u64, answer: &AppendEntriesResponse<TokioTypeConfig>) {
        match answer {
            AppendEntriesResponse::Conflict => {}
            AppendEntriesResponse::Success => return self.observer.log_loss.clear(),
            _ => return,
        }
        if !self.observer.log_loss.note_contradiction(Instant::now()) {
            return;
        }
        let last = self.raft.metrics().borrow_watched().last_log_index.unwrap_or(0);
        let reverted = LogLoss { last, acknowledged };
        if self.observer.log_loss.loss.set(reverted).is_ok() {
            tracing::error!(
                last,
                acknowledged,
                "this node's log lacks entries that the node acknowledged; the node stops. Replace it (`ownerserve ctl member replace`)"
            );
            let bytes = serde_json::to_vec(&reverted).expect("two numbers encode");
            let (raft, path, shortages) = (self.raft.clone(), self.folder.join(LOG_LOSS_FILE), self.log.shortages());
            tokio::spawn(async move {
                let own = shortages.clone();
                let written = shortages.run_blocking("what is lacking", move || {
                    write_durably_with(&own, &path, |file| file.write_all(&bytes))
                });
                // The node must stop voting even if no file can be opened now.
                let written = tokio::time::timeout(NOTED_WITHIN, written).await;
                if let Err(error) = written.map_err(io::Error::from).and_then(|written| written) {
                    tracing::error!(%error, "the loss of log entries could not be recorded in the data directory; do not start this node again");
                }
                raft.shutdown().await
            });
        }
    }

    /// Leaves the quorum for good: its files are gone, so what it acknowledges is not kept.
    pub(crate) fn leave_quorum(&self, path: PathBuf) {
        let gone = format!("{} is gone from the disk, or was replaced", path.display());
        if self.observer.missing_path.set(path).is_ok() {
            self.log.close_with(&io::Error::new(io::ErrorKind::NotFound, gone));
            let raft = self.raft.clone();
            tokio::spawn(async move { raft.shutdown().await });
        }
    }

    /// Returns an error if a path of the data directory is missing.
    pub(crate) fn folder_gone(&self) -> Option<LedgerNodeError> {
        self.observer.missing_path.get().map(|path| LedgerNodeError::FolderGone { path: path.clone() })
    }

    fn log_loss(&self) -> Option<LedgerNodeError> {
        self.observer.log_loss.loss.get().map(|reverted| log_loss_error(&self.folder, *reverted))
    }

    /// Returns why this node's ledger has failed for good, if it has.
    pub(crate) fn final_error(&self) -> Option<LedgerNodeError> {
        let fatal = self.raft.metrics().borrow_watched().running_state.clone().err()?;
        Some(self.known_failure().unwrap_or_else(|| LedgerNodeError::Failed(fatal.to_string())))
    }

    /// Returns why this node ends or has ended, if more is known than that Raft has stopped.
    fn known_failure(&self) -> Option<LedgerNodeError> {
        unsupported_level(&self.observer).or_else(|| self.log_loss()).or_else(|| self.folder_gone())
    }
}
