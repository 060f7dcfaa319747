//! Process faults: kill, pause, restart.

use std::time::Duration;

use super::record::FaultRecord;
use crate::NemesisError;
use crate::history::MemberSlot;
use crate::streams::MAX_PAUSE;
use crate::testbed::TrialEnvironment;

const DOWN_DURATION: Duration = Duration::from_secs(2);
/// From shorter than a heartbeat to longer than an election.
const PAUSES: [Duration; 3] = [Duration::from_millis(150), Duration::from_millis(1200), Duration::from_millis(4500)];

/// kill -9 of the leader; it restarts once another node leads.
pub(super) async fn kill_leader(arena: &mut TrialEnvironment) -> Result<FaultRecord, NemesisError> {
    let leader = arena.leader().await?;
    let mut strike = FaultRecord::begin(arena);
    strike.count_leader_loss(arena);
    kill(arena, leader).await?;
    if arena.cluster.seats().len() > 1 {
        arena.leader().await?;
        arena.hold_fault(DOWN_DURATION).await;
    }
    arena.cluster.restart(leader).await?;
    Ok(strike.end(arena))
}

/// kill -9 of the leader and a follower of five voters at once.
pub(super) async fn kill_two(arena: &mut TrialEnvironment) -> Result<FaultRecord, NemesisError> {
    let two = [arena.leader().await?, arena.follower().await?];
    let mut strike = FaultRecord::begin(arena);
    strike.count_leader_loss(arena);
    strike.count_fault();
    for seat in two {
        kill(arena, seat).await?;
    }
    arena.leader().await?;
    arena.hold_fault(DOWN_DURATION).await;
    for seat in two {
        arena.cluster.restart(seat).await?;
    }
    Ok(strike.end(arena))
}

/// kill -9 of a follower.
pub(super) async fn kill_follower(arena: &mut TrialEnvironment) -> Result<FaultRecord, NemesisError> {
    let follower = arena.follower().await?;
    kill_one(arena, follower).await
}

/// kill -9 of a learner.
pub(super) async fn kill_learner(arena: &mut TrialEnvironment) -> Result<FaultRecord, NemesisError> {
    let learners = arena.learners().await?;
    let nobody = || NemesisError::Answer { who: "the cluster".into(), got: "no learner".into() };
    let learner = arena.rng.pick(&learners).copied().ok_or_else(nobody)?;
    kill_one(arena, learner).await
}

async fn kill_one(arena: &mut TrialEnvironment, seat: MemberSlot) -> Result<FaultRecord, NemesisError> {
    let mut strike = FaultRecord::begin(arena);
    strike.count_fault();
    kill(arena, seat).await?;
    arena.hold_fault(DOWN_DURATION).await;
    arena.cluster.restart(seat).await?;
    Ok(strike.end(arena))
}

/// Sends kill -9 to a node and moves the clients to the others.
pub(super) async fn kill(arena: &mut TrialEnvironment, seat: MemberSlot) -> Result<(), NemesisError> {
    let running = arena.cluster.take(seat)?;
    running.kill().await
}

/// Pauses (SIGSTOP) the leader three times, and a follower once.
pub(super) async fn pause(arena: &mut TrialEnvironment) -> Result<FaultRecord, NemesisError> {
    let mut strike = FaultRecord::begin(arena);
    for span in PAUSES {
        let leader = arena.leader().await?;
        match span > Duration::from_secs(4) {
            true => strike.count_leader_loss(arena),
            false => strike.count_fault(),
        }
        arena.cluster.running(leader)?.pause().await?;
        let span = arena.fault_duration(span).min(MAX_PAUSE);
        tokio::time::sleep(span).await;
        arena.cluster.running(leader)?.resume().await?;
    }
    if arena.cluster.seats().len() > 1 {
        let follower = arena.follower().await?;
        strike.count_fault();
        arena.cluster.running(follower)?.pause().await?;
        arena.hold_fault(PAUSES[1]).await;
        arena.cluster.running(follower)?.resume().await?;
    }
    Ok(strike.end(arena))
}

/// Each node shuts down gracefully and restarts; the next one follows once all are healthy.
pub(super) async fn rolling_restart(arena: &mut TrialEnvironment) -> Result<FaultRecord, NemesisError> {
    let mut strike = FaultRecord::begin(arena);
    for seat in arena.cluster.seats() {
        match arena.leader().await? == seat {
            true => strike.count_leader_loss(arena),
            false => strike.count_fault(),
        }
        let status = arena.cluster.take(seat)?.terminate().await?;
        if !status.success() {
            let detail = format!("SIGTERM ended it with {status}");
            return Err(NemesisError::Answer { who: format!("node {}", seat.0), got: detail });
        }
        arena.cluster.restart(seat).await?;
        let now = arena.history.now();
        arena.await_recovery(now).await?;
    }
    Ok(strike.end(arena))
}
