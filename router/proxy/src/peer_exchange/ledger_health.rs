//! Health of this node's ledger, while steps continue to be served on its last view.

use std::sync::OnceLock;

use ownership::{LedgerNodeError, OwnershipDirectory, QuorumStatus};
use serde::Deserialize;
use strum::{AsRefStr, IntoStaticStr, VariantArray};

/// What a router does when its ledger has failed for good.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize, Debug, Default)]
#[serde(rename_all = "snake_case")]
pub enum LedgerFailurePolicy {
    /// Continues to serve on the last view, and reports that.
    #[default]
    Serve,
    /// Exits with the error, for a supervisor that restarts it.
    Stop,
}

/// A fault of the ledger.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error, AsRefStr, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum LedgerFault {
    /// This node knows of no quorum: ownership cannot change.
    #[error("no quorum, so that ownership stands still and steps are served on the last view")]
    NoQuorum,
    /// This node was removed from the cluster.
    #[error(
        "this node was removed from the cluster and only serves its last view; stop it, or start it with an empty \
         data directory and --join"
    )]
    RemovedFromCluster,
    /// The log could not be written: this node does not take part in the quorum until it is restarted.
    #[error("it could not be written and has stopped; start this node again")]
    LogWriteFailed,
    /// Its data directory lacks what this node had acknowledged: it must not be started with it again.
    #[error(
        "its folder lacks what this node had acknowledged, and it has stopped; let a learner take its place, \
         remove it, empty the folder, and start it with --join"
    )]
    LogEntriesLost,
    /// Its data directory, or the log in it, is gone from the disk: it has left the quorum, and must not found a
    /// cluster.
    #[error(
        "its folder, or the log in it, is gone from the disk, and it has stopped. If it was moved, stop this node, \
         put it back, and start it. Else, where a cluster has other nodes, never start this one by its own \
         configuration with an empty folder, which founds a second cluster: start it with an empty folder and \
         --join, let it take the old one's place (`ownerserve ctl member replace OLD NEW`), and remove the old one"
    )]
    DataDirMissing,
}

/// Whether a node belongs to its cluster.
#[derive(Clone, Copy)]
enum MemberStatus {
    Member,
    Removed,
}

impl LedgerFault {
    /// Returns the fault of a node's quorum. For a removed node that is the removal, whatever the quorum.
    fn of_quorum(state: MemberStatus, view: &QuorumStatus) -> Option<Self> {
        match state {
            MemberStatus::Removed => Some(Self::RemovedFromCluster),
            MemberStatus::Member => view.stale.then_some(Self::NoQuorum),
        }
    }
}

/// Why this node's ledger has stopped, if it has.
#[derive(Debug, Default)]
pub struct LocalLedgerHealth(OnceLock<LedgerFault>);

impl LocalLedgerHealth {
    /// Returns the current faults.
    pub fn active_faults(&self, directory: &OwnershipDirectory) -> impl Iterator<Item = LedgerFault> {
        let membership = if directory.is_removed() { MemberStatus::Removed } else { MemberStatus::Member };
        let quorum = LedgerFault::of_quorum(membership, &directory.view().quorum());
        // A log whose directory is gone may have failed first; then restarting this node is no remedy.
        let gone = directory.is_folder_gone().then_some(LedgerFault::DataDirMissing);
        [quorum, gone.or(self.0.get().copied())].into_iter().flatten()
    }

    /// Records that the ledger has stopped for good.
    pub fn record_failure(&self, error: &LedgerNodeError) {
        let trouble = match error {
            LedgerNodeError::Reverted { .. } => LedgerFault::LogEntriesLost,
            LedgerNodeError::FolderGone { .. } => LedgerFault::DataDirMissing,
            _ => LedgerFault::LogWriteFailed,
        };
        if self.0.set(trouble).is_ok() {
            tracing::error!(%error, "steps go on being served on the last view of the ledger");
        }
    }
}

impl LedgerFailurePolicy {
    /// Whether requests are still served after this error. A node whose directory is gone is never stopped: a
    /// supervisor would restart it with an empty directory, and it would found a second cluster.
    pub fn keeps_serving(self, error: &LedgerNodeError) -> bool {
        self == Self::Serve || matches!(error, LedgerNodeError::FolderGone { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{StubWorker, get, post, start_router_at, wait_until};

    #[test]
    fn removed_node_reports_removal_instead_of_a_missing_quorum() {
        let (stale, fresh) = (QuorumStatus { stale: true, ..QuorumStatus::default() }, QuorumStatus::default());
        assert_eq!(LedgerFault::of_quorum(MemberStatus::Removed, &stale), Some(LedgerFault::RemovedFromCluster));
        assert_eq!(LedgerFault::of_quorum(MemberStatus::Member, &stale), Some(LedgerFault::NoQuorum));
        assert_eq!(LedgerFault::of_quorum(MemberStatus::Member, &fresh), None);
        assert!(LedgerFault::RemovedFromCluster.to_string().contains("empty data directory and --join"));
    }

    #[test]
    fn missing_data_folder_never_stops_the_process() {
        let (gone, full) = (LedgerNodeError::FolderGone { path: "log".into() }, LedgerNodeError::Failed("full".into()));
        let goes_on = |on: LedgerFailurePolicy| (on.keeps_serving(&gone), on.keeps_serving(&full));
        assert_eq!(
            (goes_on(LedgerFailurePolicy::Serve), goes_on(LedgerFailurePolicy::Stop)),
            ((true, true), (true, false))
        );
    }

    #[tokio::test]
    async fn requests_are_served_while_the_ledger_folder_is_missing() {
        let worker = StubWorker::start("one", "tiny").await;
        let data = tempfile::tempdir().unwrap();
        let folder = format!("ledger.data_dir={:?}", data.path().join("ledger"));
        let router = start_router_at(&[worker.url()], &[&folder]).await;
        let ready = get(router.operator_address(), "/readyz").await.json();
        assert_eq!((ready["ready"].as_bool(), ready["role"].as_str()), (Some(true), Some("leader")), "{ready}");
        assert_eq!(
            (ready["stale"].as_bool(), ready["degraded"].as_array().unwrap().len()),
            (Some(false), 0),
            "{ready}"
        );
        std::fs::remove_dir_all(data.path().join("ledger")).unwrap();
        let gone = || router.gateway.ledger.ledger_problems() == [LedgerFault::NoQuorum, LedgerFault::DataDirMissing];
        wait_until("it is noticed", gone).await;
        for step in 0..20 {
            let body = format!("{{\"model\":\"tiny\",\"prompt\":{:?}}}", "a long history ".repeat(40 + step));
            assert_eq!(post(router.proxy_address(), "/v1/completions", body).await.status, 200);
        }
        let ready = get(router.operator_address(), "/readyz").await;
        assert_eq!(ready.status, 200, "traffic is not taken away from who serves it");
        let ready = ready.json();
        assert_eq!((&ready["leader"], ready["stale"].as_bool()), (&serde_json::Value::Null, Some(true)), "{ready}");
        let degraded = &ready["degraded"][1];
        assert_eq!(
            (degraded["component"].as_str(), degraded["reason"].as_str()),
            (Some("ledger"), Some("data_dir_missing"))
        );
        let detail = degraded["detail"].as_str().unwrap();
        for what in
            ["is gone from the disk", "founds a second cluster", "an empty folder and --join", "member replace OLD NEW"]
        {
            assert!(detail.contains(what), "{degraded}");
        }
        let metrics = get(router.operator_address(), "/metrics").await.body;
        let metrics = String::from_utf8_lossy(&metrics);
        assert!(metrics.contains("ownerserve_ledger_degraded{reason=\"data_dir_missing\"} 1"), "{metrics}");
        assert!(metrics.contains("ownerserve_ledger_degraded{reason=\"no_quorum\"} 1"), "{metrics}");
    }
}
