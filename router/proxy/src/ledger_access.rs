//! Access to the ledger: its view, the steps that the view does not show yet, and the ways to write to it.

use std::sync::Arc;
use std::time::Instant;

use ownership::ledger::{Command, Outcome};
use ownership::{LedgerNodeError, OwnershipDirectory};
use parking_lot::{Mutex, MutexGuard};
use prometheus::Histogram;
use vocabulary::NodeId;

use crate::peer_exchange::ledger_health::{LedgerFault, LocalLedgerHealth};
use crate::peer_exchange::pending_commits::{PendingCommits, QuorumReachability};

/// A handle to the ledger of this node. Clones share it.
#[derive(Clone, Debug)]
pub struct LedgerAccess {
    directory: Arc<OwnershipDirectory>,
    pending_commits: Arc<Mutex<PendingCommits>>,
    health: Arc<LocalLedgerHealth>,
    commit_seconds: Histogram,
}

impl LedgerAccess {
    /// Returns a handle to this ledger, without pending commits. `commit_seconds` observes how long commits take.
    pub fn new(directory: Arc<OwnershipDirectory>, commit_seconds: Histogram) -> Self {
        Self { directory, pending_commits: Arc::default(), health: Arc::default(), commit_seconds }
    }

    /// Returns the ledger with sessions, owners and leases: its view, and the way to write to it.
    pub fn directory(&self) -> &OwnershipDirectory {
        &self.directory
    }

    /// Locks the steps that were served and that the ledger's view does not show yet. Hold it briefly, never across an
    /// await.
    pub fn pending_commits(&self) -> MutexGuard<'_, PendingCommits> {
        self.pending_commits.lock()
    }

    /// Returns the faults of the ledger. Steps are served all the same.
    pub fn ledger_problems(&self) -> Vec<LedgerFault> {
        self.health.active_faults(&self.directory).collect()
    }

    /// Records that the ledger has stopped for good.
    pub fn ledger_failed(&self, error: &LedgerNodeError) {
        self.health.record_failure(error);
    }

    /// Returns this router's node id in the ledger.
    pub fn node_id(&self) -> NodeId {
        self.directory.node()
    }

    /// Whether the ledger accepts commits, as far as this node knows.
    pub fn ledger_reach(&self) -> QuorumReachability {
        if self.directory.view().quorum().stale { QuorumReachability::NoQuorum } else { QuorumReachability::Quorum }
    }

    /// Submits advice to the ledger without waiting; the ledger counts the outcomes. Without a quorum advice is
    /// useless, and would only delay commands that must not be lost.
    pub fn submit_advice(&self, command: Command) {
        if self.ledger_reach() == QuorumReachability::Quorum {
            self.directory.submit_in_background(command, drop);
        }
    }

    /// Queues a command before it returns, so that commands stay in order. Calls `answer` with its outcome; with `None`
    /// when it was not accepted, or the outcome is unknown.
    pub fn commit(&self, command: Command, answer: impl FnOnce(Option<Outcome>) + Send + Sync + 'static) {
        let begun = Instant::now();
        let seconds = self.commit_seconds.clone();
        self.directory.submit_in_background(command, move |outcome| {
            if outcome.is_ok() {
                seconds.observe(begun.elapsed().as_secs_f64());
            }
            answer(outcome.ok());
        });
    }
}
