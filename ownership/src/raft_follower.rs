//! The task that follows Raft, and keeps the node's state up to date with it.

use std::sync::Arc;
use std::time::Duration;

use consensus::QuorumStatus;
use openraft::ServerState;
use openraft::async_runtime::watch::{RecvError, WatchReceiver};

use crate::node_core::{KnownLeader, NodeCore};
use crate::quorum_notices::LoggedQuorumState;
use crate::raft::{LogId, TokioTypeConfig};

/// How often the quorum status is checked when no change is reported.
const QUORUM_CHECK_INTERVAL: Duration = Duration::from_millis(250);

type Metrics = openraft::RaftMetrics<TokioTypeConfig>;

/// The part of Raft's metrics whose changes are handled at once. The rest changes with every entry; it is handled
/// periodically, or at once while this node waits for its leader term or for its quorum.
#[derive(PartialEq)]
struct RaftStatus {
    is_running: bool,
    term: u64,
    state: ServerState,
    leader: Option<u64>,
    members: Option<LogId>,
}

impl RaftStatus {
    fn of(metrics: &Metrics) -> Self {
        Self {
            is_running: metrics.running_state.is_ok(),
            term: metrics.current_term,
            state: metrics.state,
            leader: metrics.current_leader,
            members: *metrics.membership_config.log_id(),
        }
    }
}

/// Follows Raft until it stops, and keeps the leader term, the address book and the view's quorum status up to date.
pub(crate) async fn follow(core: Arc<NodeCore>) {
    let mut metrics = core.raft.metrics();
    let mut news = LoggedQuorumState::default();
    loop {
        let before = RaftStatus::of(&metrics.borrow_and_update());
        let quorum = core.update_quorum();
        news.log_changes(&core, &quorum);
        let is_settled = !quorum.stale && core.is_leading() == (quorum.leader == Some(core.node()));
        let changed = async {
            loop {
                metrics.changed().await?;
                if !is_settled || RaftStatus::of(&metrics.borrow_and_update()) != before {
                    return Ok::<_, RecvError>(());
                }
            }
        };
        match tokio::time::timeout(QUORUM_CHECK_INTERVAL, changed).await {
            Ok(Ok(())) | Err(_) => {}
            Ok(Err(_)) => {
                core.registry.publisher.publish_quorum(QuorumStatus { leader: None, stale: true, ..quorum });
                core.leader.send_replace(KnownLeader::Stopped);
                return;
            }
        }
    }
}
