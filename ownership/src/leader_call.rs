//! Calls to the leader from any node.

use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, timeout_at};
use vocabulary::NodeId;

use crate::members::{self, CHANGE_TIMEOUT, MemberChange, MemberError};
use crate::node_core::{KnownLeader, NodeCore};
use crate::peers::{self, Lane, PeerError, PeerMethod};

/// Wait for a leader to be elected or to be ready.
const RETRY_DELAY: Duration = Duration::from_millis(50);

/// Returns the leader once there is one; `None` if there is none in time, or if Raft has stopped here.
pub(crate) async fn await_leader(core: &NodeCore, deadline: Instant) -> Option<NodeId> {
    let mut leaders = core.leader.subscribe();
    let known = timeout_at(deadline, leaders.wait_for(|known| *known != KnownLeader::Unknown)).await.ok()?.ok()?;
    known.leader()
}

/// Asks the leader once if it is another node; returns `None` if this node leads.
pub(crate) async fn ask_leader<A: DeserializeOwned>(
    core: &NodeCore,
    (method, question): (PeerMethod, &impl Serialize),
    deadline: Instant,
) -> Option<Result<A, PeerError>> {
    let Some(leader) = await_leader(core, deadline).await else {
        return Some(Err(PeerError::Busy));
    };
    if leader == core.node() {
        return None;
    }
    let link = core.registry.link(leader, Lane::Call);
    let question = match rmp_serde::to_vec(question) {
        Ok(question) => Bytes::from(question),
        Err(error) => return Some(Err(PeerError::Failed(error.to_string()))),
    };
    let answer = link.call(method, question, deadline.saturating_duration_since(Instant::now())).await;
    Some(answer.and_then(|answer| peers::decode(&answer)))
}

/// Waits for a pause, or until the leader changes.
pub(crate) async fn pause_until_leader_change(core: &NodeCore) {
    let mut leaders = core.leader.subscribe();
    drop(tokio::time::timeout(RETRY_DELAY, leaders.changed()).await);
}

/// Carries out a membership change, here or at the leader.
pub(crate) async fn change_members(core: &NodeCore, change: MemberChange) -> Result<(), MemberError> {
    let deadline = Instant::now() + CHANGE_TIMEOUT;
    loop {
        let done = match ask_leader(core, (PeerMethod::Change, &change), deadline).await {
            None => members::carry_out(core, change.clone()).await,
            Some(Ok(done)) => done,
            Some(Err(PeerError::Busy | PeerError::Unreachable { .. } | PeerError::Unknown(_))) => {
                Err(MemberError::NoLeader)
            }
            Some(Err(error)) => return Err(MemberError::Unknowable(error.to_string())),
        };
        // Nothing was done; a new leader may be elected soon.
        if done != Err(MemberError::NoLeader) || Instant::now() + RETRY_DELAY > deadline {
            return done;
        }
        pause_until_leader_change(core).await;
    }
}
