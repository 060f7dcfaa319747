//! Link faults: partitions, delay, loss.

use std::time::Duration;

use super::record::NemesisRecord;
use crate::NemesisError;
use crate::check::GuaranteeViolation;
use crate::history::MemberSlot;
use crate::test_network::LinkCondition;
use crate::testbed::TrialEnvironment;

/// Longer than the longest election timeout.
const PARTITION_DURATION: Duration = Duration::from_secs(5);
const FLAPS: u32 = 6;
const DEGRADED_DURATION: Duration = Duration::from_secs(4);

/// The leader is alone on one side.
pub(super) async fn symmetric(environment: &mut TrialEnvironment) -> Result<NemesisRecord, NemesisError> {
    let leader = environment.leader().await?;
    let mut fault = NemesisRecord::begin(environment);
    fault.count_leader_loss(environment);
    environment.isolate(leader).await?;
    environment.hold_fault(PARTITION_DURATION).await;
    check_replaced(environment, &mut fault, leader).await?;
    environment.heal_isolation(leader).await?;
    Ok(fault.end(environment))
}

/// Of five voters, the leader and one follower are on one side.
pub(super) async fn minority(environment: &mut TrialEnvironment) -> Result<NemesisRecord, NemesisError> {
    let (leader, follower) = (environment.leader().await?, environment.follower().await?);
    let few = [leader, follower];
    let many: Vec<MemberSlot> = environment.cluster.seats().into_iter().filter(|seat| !few.contains(seat)).collect();
    let across: Vec<(MemberSlot, MemberSlot)> =
        few.iter().flat_map(|one| many.iter().map(|other| (*one, *other))).collect();
    let mut fault = NemesisRecord::begin(environment);
    fault.count_leader_loss(environment);
    for (one, other) in &across {
        environment.network.sever(*one, *other).await?;
        environment.network.sever(*other, *one).await?;
    }
    environment.hold_fault(PARTITION_DURATION).await;
    check_replaced(environment, &mut fault, leader).await?;
    for (one, other) in &across {
        environment.network.restore(*one, *other).await?;
        environment.network.restore(*other, *one).await?;
    }
    Ok(fault.end(environment))
}

/// The leader's messages are dropped; then another leader receives nothing.
pub(super) async fn one_way(environment: &mut TrialEnvironment) -> Result<NemesisRecord, NemesisError> {
    let leader = environment.leader().await?;
    let mut fault = NemesisRecord::begin(environment);
    fault.count_leader_loss(environment);
    for other in environment.others(leader) {
        environment.network.sever(leader, other).await?;
    }
    environment.hold_fault(PARTITION_DURATION).await;
    check_replaced(environment, &mut fault, leader).await?;
    for other in environment.others(leader) {
        environment.network.restore(leader, other).await?;
    }
    // A leader that receives nothing cannot commit, so it loses leadership, too.
    let deaf = environment.leader().await?;
    fault.count_leader_loss(environment);
    for other in environment.others(deaf) {
        environment.network.sever(other, deaf).await?;
    }
    environment.hold_fault(PARTITION_DURATION).await;
    for other in environment.others(deaf) {
        environment.network.restore(other, deaf).await?;
    }
    Ok(fault.end(environment))
}

/// Checks that a leader whose messages are dropped was replaced; otherwise the fault had no effect.
async fn check_replaced(
    environment: &TrialEnvironment,
    fault: &mut NemesisRecord,
    old: MemberSlot,
) -> Result<(), NemesisError> {
    if environment.leader().await? == old {
        let detail = format!("node {} still leads after {PARTITION_DURATION:?}", old.0);
        fault.broken.push(GuaranteeViolation { guarantee: "a leader that nobody hears is replaced", detail });
    }
    Ok(())
}

/// The leader's links go down and up repeatedly.
pub(super) async fn flapping(environment: &mut TrialEnvironment) -> Result<NemesisRecord, NemesisError> {
    let leader = environment.leader().await?;
    let mut fault = NemesisRecord::begin(environment);
    for _ in 0..FLAPS {
        fault.count_fault();
        environment.isolate(leader).await?;
        let cut = Duration::from_millis(200 + environment.rng.below(700));
        tokio::time::sleep(cut).await;
        environment.heal_isolation(leader).await?;
        let mended = Duration::from_millis(100 + environment.rng.below(400));
        tokio::time::sleep(mended).await;
    }
    Ok(fault.end(environment))
}

/// All traffic between nodes is delayed.
pub(super) async fn slow(environment: &mut TrialEnvironment) -> Result<NemesisRecord, NemesisError> {
    let conditions = LinkCondition::Slow { delay: Duration::from_millis(30), jitter: Duration::from_millis(30) };
    degrade_links(environment, conditions).await
}

/// Retransmissions and connection resets between nodes.
pub(super) async fn lossy(environment: &mut TrialEnvironment) -> Result<NemesisRecord, NemesisError> {
    let before = environment.network.relay_counts().1;
    let mut fault = degrade_links(environment, LinkCondition::Lossy { stalled: 30, reset: 3 }).await?;
    fault.note = format!("{} connections reset", environment.network.relay_counts().1 - before);
    Ok(fault)
}

async fn degrade_links(
    environment: &mut TrialEnvironment,
    condition: LinkCondition,
) -> Result<NemesisRecord, NemesisError> {
    let mut fault = NemesisRecord::begin(environment);
    for (from, to) in links(environment) {
        fault.count_fault();
        environment.network.set_condition(from, to, condition);
    }
    environment.hold_fault(DEGRADED_DURATION).await;
    for (from, to) in links(environment) {
        environment.network.set_condition(from, to, LinkCondition::Healthy);
    }
    Ok(fault.end(environment))
}

/// Returns every direction between two nodes.
pub(super) fn links(environment: &TrialEnvironment) -> Vec<(MemberSlot, MemberSlot)> {
    let seats = environment.cluster.seats();
    let pairs = seats.iter().flat_map(|from| seats.iter().map(move |to| (*from, *to)));
    pairs.filter(|(from, to)| from != to).collect()
}
