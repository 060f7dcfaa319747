//! Link faults: partitions, delay, loss.

use std::time::Duration;

use super::record::FaultRecord;
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
pub(super) async fn symmetric(arena: &mut TrialEnvironment) -> Result<FaultRecord, NemesisError> {
    let leader = arena.leader().await?;
    let mut strike = FaultRecord::begin(arena);
    strike.count_leader_loss(arena);
    arena.isolate(leader).await?;
    arena.hold_fault(PARTITION_DURATION).await;
    check_replaced(arena, &mut strike, leader).await?;
    arena.heal_isolation(leader).await?;
    Ok(strike.end(arena))
}

/// Of five voters, the leader and one follower are on one side.
pub(super) async fn minority(arena: &mut TrialEnvironment) -> Result<FaultRecord, NemesisError> {
    let (leader, follower) = (arena.leader().await?, arena.follower().await?);
    let few = [leader, follower];
    let many: Vec<MemberSlot> = arena.cluster.seats().into_iter().filter(|seat| !few.contains(seat)).collect();
    let across: Vec<(MemberSlot, MemberSlot)> =
        few.iter().flat_map(|one| many.iter().map(|other| (*one, *other))).collect();
    let mut strike = FaultRecord::begin(arena);
    strike.count_leader_loss(arena);
    for (one, other) in &across {
        arena.network.sever(*one, *other).await?;
        arena.network.sever(*other, *one).await?;
    }
    arena.hold_fault(PARTITION_DURATION).await;
    check_replaced(arena, &mut strike, leader).await?;
    for (one, other) in &across {
        arena.network.restore(*one, *other).await?;
        arena.network.restore(*other, *one).await?;
    }
    Ok(strike.end(arena))
}

/// The leader's messages are dropped; then another leader receives nothing.
pub(super) async fn one_way(arena: &mut TrialEnvironment) -> Result<FaultRecord, NemesisError> {
    let leader = arena.leader().await?;
    let mut strike = FaultRecord::begin(arena);
    strike.count_leader_loss(arena);
    for other in arena.others(leader) {
        arena.network.sever(leader, other).await?;
    }
    arena.hold_fault(PARTITION_DURATION).await;
    check_replaced(arena, &mut strike, leader).await?;
    for other in arena.others(leader) {
        arena.network.restore(leader, other).await?;
    }
    // A leader that receives nothing cannot commit, so it loses leadership, too.
    let deaf = arena.leader().await?;
    strike.count_leader_loss(arena);
    for other in arena.others(deaf) {
        arena.network.sever(other, deaf).await?;
    }
    arena.hold_fault(PARTITION_DURATION).await;
    for other in arena.others(deaf) {
        arena.network.restore(other, deaf).await?;
    }
    Ok(strike.end(arena))
}

/// Checks that a leader whose messages are dropped was replaced; otherwise the fault had no effect.
async fn check_replaced(
    arena: &TrialEnvironment,
    strike: &mut FaultRecord,
    old: MemberSlot,
) -> Result<(), NemesisError> {
    if arena.leader().await? == old {
        let detail = format!("node {} still leads after {PARTITION_DURATION:?}", old.0);
        strike.broken.push(GuaranteeViolation { guarantee: "a leader that nobody hears is replaced", detail });
    }
    Ok(())
}

/// The leader's links go down and up repeatedly.
pub(super) async fn flapping(arena: &mut TrialEnvironment) -> Result<FaultRecord, NemesisError> {
    let leader = arena.leader().await?;
    let mut strike = FaultRecord::begin(arena);
    for _ in 0..FLAPS {
        strike.count_fault();
        arena.isolate(leader).await?;
        let cut = Duration::from_millis(200 + arena.rng.below(700));
        tokio::time::sleep(cut).await;
        arena.heal_isolation(leader).await?;
        let mended = Duration::from_millis(100 + arena.rng.below(400));
        tokio::time::sleep(mended).await;
    }
    Ok(strike.end(arena))
}

/// All traffic between nodes is delayed.
pub(super) async fn slow(arena: &mut TrialEnvironment) -> Result<FaultRecord, NemesisError> {
    let weather = LinkCondition::Slow { delay: Duration::from_millis(30), jitter: Duration::from_millis(30) };
    degrade_links(arena, weather).await
}

/// Retransmissions and connection resets between nodes.
pub(super) async fn lossy(arena: &mut TrialEnvironment) -> Result<FaultRecord, NemesisError> {
    let before = arena.network.relay_counts().1;
    let mut strike = degrade_links(arena, LinkCondition::Lossy { stalled: 30, reset: 3 }).await?;
    strike.note = format!("{} connections reset", arena.network.relay_counts().1 - before);
    Ok(strike)
}

async fn degrade_links(arena: &mut TrialEnvironment, weather: LinkCondition) -> Result<FaultRecord, NemesisError> {
    let mut strike = FaultRecord::begin(arena);
    for (from, to) in links(arena) {
        strike.count_fault();
        arena.network.set_condition(from, to, weather);
    }
    arena.hold_fault(DEGRADED_DURATION).await;
    for (from, to) in links(arena) {
        arena.network.set_condition(from, to, LinkCondition::Healthy);
    }
    Ok(strike.end(arena))
}

/// Returns every direction between two nodes.
pub(super) fn links(arena: &TrialEnvironment) -> Vec<(MemberSlot, MemberSlot)> {
    let seats = arena.cluster.seats();
    let pairs = seats.iter().flat_map(|from| seats.iter().map(move |to| (*from, *to)));
    pairs.filter(|(from, to)| from != to).collect()
}
