//! Loss of log entries that this node acknowledged: its detection, and the note that keeps such a node from voting.

use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::error::LedgerNodeError;
use crate::node_folder::read_json;

/// How long the leader's claims must contradict this node's log before the log counts as lost.
const LOG_LOSS_TIMEOUT: Duration = Duration::from_secs(3);

/// Detects that this node's log lacks entries that it acknowledged. The leader does not send those again, so the node
/// would never catch up.
#[derive(Debug, Default)]
pub(crate) struct LogLossDetector {
    contradicted_since: Mutex<Option<Instant>>,
    pub(crate) loss: OnceLock<LogLoss>,
}

/// The missing entries of a log. Persisted, because such a node must not vote again: it may have lost votes, too.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct LogLoss {
    pub(crate) last: u64,
    /// Last entry that the leader knew to be on this node.
    pub(crate) acknowledged: u64,
}

pub(crate) const LOG_LOSS_FILE: &str = "reverted.json";

/// Refuses a data directory that is recorded as lacking acknowledged entries.
pub(crate) fn refuse_log_loss(folder: &Path) -> Result<(), LedgerNodeError> {
    read_json(&folder.join(LOG_LOSS_FILE))?.map_or(Ok(()), |reverted| Err(log_loss_error(folder, reverted)))
}

pub(crate) fn log_loss_error(folder: &Path, LogLoss { last, acknowledged }: LogLoss) -> LedgerNodeError {
    LedgerNodeError::Reverted { path: folder.to_owned(), last, acknowledged }
}

impl LogLossDetector {
    /// Records that a heartbeat contradicts this node's log. Returns true once that has lasted too long.
    pub(crate) fn note_contradiction(&self, at: Instant) -> bool {
        at.duration_since(*self.contradicted_since.lock().get_or_insert(at)) >= LOG_LOSS_TIMEOUT
    }

    pub(crate) fn clear(&self) {
        *self.contradicted_since.lock() = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_lasting_contradiction_counts_as_log_loss() {
        let (reversion, start) = (LogLossDetector::default(), Instant::now());
        let after = |millis| start + Duration::from_millis(millis);
        assert!(!reversion.note_contradiction(after(0)));
        assert!(!reversion.note_contradiction(after(2_900)));
        reversion.clear();
        assert!(!reversion.note_contradiction(after(3_500)));
        assert!(reversion.note_contradiction(after(6_500)));
    }
}
