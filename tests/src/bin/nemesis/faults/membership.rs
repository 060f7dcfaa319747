//! Leadership transfer, and voter changes while a voter is unreachable.

use std::time::Duration;

use super::links::links;
use super::record::NemesisRecord;
use crate::NemesisError;
use crate::api_client::MembershipChange;
use crate::test_network::LinkCondition;
use crate::testbed::TrialEnvironment;

const FIVE: usize = 5;
const TRANSFERS: u32 = 3;
const TRANSFER_INTERVAL: Duration = Duration::from_millis(800);

/// Transfers leadership to a follower, several times.
pub(super) async fn transfer(environment: &mut TrialEnvironment) -> Result<NemesisRecord, NemesisError> {
    let mut fault = NemesisRecord::begin(environment);
    for _ in 0..TRANSFERS {
        let follower = environment.follower().await?;
        let node = environment.cluster.member(follower, environment.leader().await?).await?.node_id;
        fault.count_fault();
        environment.change(MembershipChange::TransferLeader(node)).await?;
        tokio::time::sleep(TRANSFER_INTERVAL).await;
    }
    Ok(fault.end(environment))
}

/// A follower is cut off and replaced by a learner, comes back, and becomes a voter again.
pub(super) async fn change_under_fault(environment: &mut TrialEnvironment) -> Result<NemesisRecord, NemesisError> {
    let follower = environment.follower().await?;
    let learners = environment.learners().await?;
    let nobody = || NemesisError::Answer { who: "the cluster".into(), got: "no learner".into() };
    let learner = environment.rng.pick(&learners).copied().ok_or_else(nobody)?;
    let leader = environment.leader().await?;
    let old = environment.cluster.member(follower, leader).await?.node_id;
    let new = environment.cluster.member(learner, leader).await?.node_id;
    let mut fault = NemesisRecord::begin(environment);
    fault.count_fault();
    environment.isolate(follower).await?;
    fault.count_fault();
    environment.change(MembershipChange::Replace { old, new }).await?;
    environment.hold_fault(TRANSFER_INTERVAL).await;
    environment.heal_isolation(follower).await?;
    let now = environment.history.now();
    environment.await_recovery(now).await?;
    fault.count_fault();
    environment.change(MembershipChange::Replace { old: new, new: old }).await?;
    if environment.voters().await?.len() == FIVE {
        shrink_and_grow(environment, &mut fault).await?;
    }
    Ok(fault.end(environment))
}

/// Five voters become three and five again while links are slow.
async fn shrink_and_grow(environment: &mut TrialEnvironment, fault: &mut NemesisRecord) -> Result<(), NemesisError> {
    let leader = environment.leader().await?;
    let mut nodes = Vec::new();
    for seat in environment.voters().await?.into_iter().filter(|seat| *seat != leader).take(2) {
        nodes.push(environment.cluster.member(seat, leader).await?.node_id);
    }
    let slow = LinkCondition::Slow { delay: Duration::from_millis(20), jitter: Duration::from_millis(20) };
    for (from, to) in links(environment) {
        environment.network.set_condition(from, to, slow);
    }
    for change in [MembershipChange::Demote(nodes.clone()), MembershipChange::Promote(nodes)] {
        fault.count_fault();
        environment.change(change).await?;
        environment.hold_fault(TRANSFER_INTERVAL).await;
    }
    for (from, to) in links(environment) {
        environment.network.set_condition(from, to, LinkCondition::Healthy);
    }
    Ok(())
}
