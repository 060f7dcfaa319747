//! Leadership transfer, and voter changes while a voter is unreachable.

use std::time::Duration;

use super::links::links;
use super::record::FaultRecord;
use crate::NemesisError;
use crate::api_client::MembershipChange;
use crate::test_network::LinkCondition;
use crate::testbed::TrialEnvironment;

const FIVE: usize = 5;
const TRANSFERS: u32 = 3;
const TRANSFER_INTERVAL: Duration = Duration::from_millis(800);

/// Transfers leadership to a follower, several times.
pub(super) async fn transfer(arena: &mut TrialEnvironment) -> Result<FaultRecord, NemesisError> {
    let mut strike = FaultRecord::begin(arena);
    for _ in 0..TRANSFERS {
        let follower = arena.follower().await?;
        let node = arena.cluster.member(follower, arena.leader().await?).await?.node_id;
        strike.count_fault();
        arena.change(MembershipChange::TransferLeader(node)).await?;
        tokio::time::sleep(TRANSFER_INTERVAL).await;
    }
    Ok(strike.end(arena))
}

/// A follower is cut off and replaced by a learner, comes back, and becomes a voter again.
pub(super) async fn change_under_fault(arena: &mut TrialEnvironment) -> Result<FaultRecord, NemesisError> {
    let follower = arena.follower().await?;
    let learners = arena.learners().await?;
    let nobody = || NemesisError::Answer { who: "the cluster".into(), got: "no learner".into() };
    let learner = arena.rng.pick(&learners).copied().ok_or_else(nobody)?;
    let leader = arena.leader().await?;
    let old = arena.cluster.member(follower, leader).await?.node_id;
    let new = arena.cluster.member(learner, leader).await?.node_id;
    let mut strike = FaultRecord::begin(arena);
    strike.count_fault();
    arena.isolate(follower).await?;
    strike.count_fault();
    arena.change(MembershipChange::Replace { old, new }).await?;
    arena.hold_fault(TRANSFER_INTERVAL).await;
    arena.heal_isolation(follower).await?;
    let now = arena.history.now();
    arena.await_recovery(now).await?;
    strike.count_fault();
    arena.change(MembershipChange::Replace { old: new, new: old }).await?;
    if arena.voters().await?.len() == FIVE {
        shrink_and_grow(arena, &mut strike).await?;
    }
    Ok(strike.end(arena))
}

/// Five voters become three and five again while links are slow.
async fn shrink_and_grow(arena: &mut TrialEnvironment, strike: &mut FaultRecord) -> Result<(), NemesisError> {
    let leader = arena.leader().await?;
    let mut nodes = Vec::new();
    for seat in arena.voters().await?.into_iter().filter(|seat| *seat != leader).take(2) {
        nodes.push(arena.cluster.member(seat, leader).await?.node_id);
    }
    let slow = LinkCondition::Slow { delay: Duration::from_millis(20), jitter: Duration::from_millis(20) };
    for (from, to) in links(arena) {
        arena.network.set_condition(from, to, slow);
    }
    for change in [MembershipChange::Demote(nodes.clone()), MembershipChange::Promote(nodes)] {
        strike.count_fault();
        arena.change(change).await?;
        arena.hold_fault(TRANSFER_INTERVAL).await;
    }
    for (from, to) in links(arena) {
        arena.network.set_condition(from, to, LinkCondition::Healthy);
    }
    Ok(())
}
