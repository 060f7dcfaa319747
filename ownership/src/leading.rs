//! Asking the leader, from whatever node.

use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, timeout_at};
use vocabulary::NodeId;

use crate::core::{Core, Known};
use crate::members::{self, CHANGE_WITHIN, MemberChange, MemberError};
use crate::peers::{self, Lane, Method, PeerError};

/// The wait for a leader to be chosen, or to be ready.
const PAUSE: Duration = Duration::from_millis(50);

/// The leader, once there is one; none when there is none in time, or Raft has stopped here.
pub(crate) async fn await_leader(core: &Core, deadline: Instant) -> Option<NodeId> {
    let mut leaders = core.leader.subscribe();
    let known = timeout_at(deadline, leaders.wait_for(|known| *known != Known::Nobody)).await.ok()?.ok()?;
    known.leader()
}

/// Asks the leader once, should it be another node; `None` when this node leads.
pub(crate) async fn ask<A: DeserializeOwned>(
    core: &Core,
    (method, question): (Method, &impl Serialize),
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
    Some(answer.and_then(|answer| peers::read(&answer)))
}

/// A pause that a change of the leader ends.
pub(crate) async fn pause(core: &Core) {
    let mut leaders = core.leader.subscribe();
    drop(tokio::time::timeout(PAUSE, leaders.changed()).await);
}

/// Carries out a change of the membership, here or at whoever leads.
pub(crate) async fn change(core: &Core, change: MemberChange) -> Result<(), MemberError> {
    let deadline = Instant::now() + CHANGE_WITHIN;
    loop {
        let done = match ask(core, (Method::Change, &change), deadline).await {
            None => members::carry_out(core, change.clone()).await,
            Some(Ok(done)) => done,
            Some(Err(PeerError::Busy | PeerError::Unreachable { .. } | PeerError::Unknown(_))) => {
                Err(MemberError::NoLeader)
            }
            Some(Err(error)) => return Err(MemberError::Unknowable(error.to_string())),
        };
        // Nothing was done then; a new leader may be there soon.
        if done != Err(MemberError::NoLeader) || Instant::now() + PAUSE > deadline {
            return done;
        }
        pause(core).await;
    }
}
