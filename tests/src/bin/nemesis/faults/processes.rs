//! Process faults: kill, pause, restart.

use std::time::Duration;

use super::record::NemesisRecord;
use crate::NemesisError;
use crate::history::MemberSlot;
use crate::streams::MAX_PAUSE;
use crate::testbed::TrialEnvironment;

const DOWN_DURATION: Duration = Duration::from_secs(2);
/// From shorter than a heartbeat to longer than an election.
const PAUSES: [Duration; 3] = [Duration::from_millis(150), Duration::from_millis(1200), Duration::from_millis(4500)];

/// kill -9 of the leader; it restarts once another node leads.
pub(super) async fn kill_leader(environment: &mut TrialEnvironment) -> Result<NemesisRecord, NemesisError> {
    let leader = environment.leader().await?;
    let mut fault = NemesisRecord::begin(environment);
    fault.count_leader_loss(environment);
    kill(environment, leader).await?;
    if environment.cluster.seats().len() > 1 {
        environment.leader().await?;
        environment.hold_fault(DOWN_DURATION).await;
    }
    environment.cluster.restart(leader).await?;
    Ok(fault.end(environment))
}

/// kill -9 of the leader and a follower of five voters at once.
pub(super) async fn kill_two(environment: &mut TrialEnvironment) -> Result<NemesisRecord, NemesisError> {
    let two = [environment.leader().await?, environment.follower().await?];
    let mut fault = NemesisRecord::begin(environment);
    fault.count_leader_loss(environment);
    fault.count_fault();
    for seat in two {
        kill(environment, seat).await?;
    }
    environment.leader().await?;
    environment.hold_fault(DOWN_DURATION).await;
    for seat in two {
        environment.cluster.restart(seat).await?;
    }
    Ok(fault.end(environment))
}

/// kill -9 of a follower.
pub(super) async fn kill_follower(environment: &mut TrialEnvironment) -> Result<NemesisRecord, NemesisError> {
    let follower = environment.follower().await?;
    kill_one(environment, follower).await
}

/// kill -9 of a learner.
pub(super) async fn kill_learner(environment: &mut TrialEnvironment) -> Result<NemesisRecord, NemesisError> {
    let learners = environment.learners().await?;
    let nobody = || NemesisError::Answer { who: "the cluster".into(), got: "no learner".into() };
    let learner = environment.rng.pick(&learners).copied().ok_or_else(nobody)?;
    kill_one(environment, learner).await
}

async fn kill_one(environment: &mut TrialEnvironment, slot: MemberSlot) -> Result<NemesisRecord, NemesisError> {
    let mut fault = NemesisRecord::begin(environment);
    fault.count_fault();
    kill(environment, slot).await?;
    environment.hold_fault(DOWN_DURATION).await;
    environment.cluster.restart(slot).await?;
    Ok(fault.end(environment))
}

/// Sends kill -9 to a node and moves the clients to the others.
pub(super) async fn kill(environment: &mut TrialEnvironment, slot: MemberSlot) -> Result<(), NemesisError> {
    let running = environment.cluster.take(slot)?;
    running.kill().await
}

/// Pauses (SIGSTOP) the leader three times, and a follower once.
pub(super) async fn pause(environment: &mut TrialEnvironment) -> Result<NemesisRecord, NemesisError> {
    let mut fault = NemesisRecord::begin(environment);
    for span in PAUSES {
        let leader = environment.leader().await?;
        match span > Duration::from_secs(4) {
            true => fault.count_leader_loss(environment),
            false => fault.count_fault(),
        }
        environment.cluster.running(leader)?.pause().await?;
        let span = environment.fault_duration(span).min(MAX_PAUSE);
        tokio::time::sleep(span).await;
        environment.cluster.running(leader)?.resume().await?;
    }
    if environment.cluster.seats().len() > 1 {
        let follower = environment.follower().await?;
        fault.count_fault();
        environment.cluster.running(follower)?.pause().await?;
        environment.hold_fault(PAUSES[1]).await;
        environment.cluster.running(follower)?.resume().await?;
    }
    Ok(fault.end(environment))
}

/// Each node shuts down gracefully and restarts; the next one follows once all are healthy.
pub(super) async fn rolling_restart(environment: &mut TrialEnvironment) -> Result<NemesisRecord, NemesisError> {
    let mut fault = NemesisRecord::begin(environment);
    for seat in environment.cluster.seats() {
        match environment.leader().await? == seat {
            true => fault.count_leader_loss(environment),
            false => fault.count_fault(),
        }
        let status = environment.cluster.take(seat)?.terminate().await?;
        if !status.success() {
            let detail = format!("SIGTERM ended it with {status}");
            return Err(NemesisError::Answer { who: format!("node {}", seat.0), got: detail });
        }
        environment.cluster.restart(seat).await?;
        let now = environment.history.now();
        environment.await_recovery(now).await?;
    }
    Ok(fault.end(environment))
}
