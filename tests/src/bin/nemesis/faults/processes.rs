//! Processes that are killed, stopped, restarted.

use std::time::Duration;

use super::Strike;
use crate::NemesisError;
use crate::arena::Arena;
use crate::history::Seat;

const DEAD: Duration = Duration::from_secs(2);
/// From shorter than a heartbeat to longer than an election.
const PAUSES: [Duration; 3] = [Duration::from_millis(150), Duration::from_millis(1200), Duration::from_millis(4500)];
/// Longer than every time-out between nodes.
pub(crate) const LONGEST_PAUSE: Duration = Duration::from_secs(20);

/// kill -9 of the leader; it comes back once another leads.
pub(super) async fn kill_leader(arena: &mut Arena) -> Result<Strike, NemesisError> {
    let leader = arena.leader().await?;
    let mut strike = Strike::begin(arena);
    strike.takes_leader(arena);
    kill(arena, leader).await?;
    if arena.cluster.seats().len() > 1 {
        arena.leader().await?;
        arena.hold(DEAD).await;
    }
    arena.cluster.restart(leader).await?;
    Ok(strike.end(arena))
}

/// kill -9 of the leader and a follower of five voters at once.
pub(super) async fn kill_two(arena: &mut Arena) -> Result<Strike, NemesisError> {
    let two = [arena.leader().await?, arena.follower().await?];
    let mut strike = Strike::begin(arena);
    strike.takes_leader(arena);
    strike.fault();
    for seat in two {
        kill(arena, seat).await?;
    }
    arena.leader().await?;
    arena.hold(DEAD).await;
    for seat in two {
        arena.cluster.restart(seat).await?;
    }
    Ok(strike.end(arena))
}

/// kill -9 of a follower.
pub(super) async fn kill_follower(arena: &mut Arena) -> Result<Strike, NemesisError> {
    let follower = arena.follower().await?;
    kill_one(arena, follower).await
}

/// kill -9 of a learner.
pub(super) async fn kill_learner(arena: &mut Arena) -> Result<Strike, NemesisError> {
    let learners = arena.learners().await?;
    let nobody = || NemesisError::Answer { who: "the cluster".into(), got: "no learner".into() };
    let learner = arena.dice.pick(&learners).copied().ok_or_else(nobody)?;
    kill_one(arena, learner).await
}

async fn kill_one(arena: &mut Arena, seat: Seat) -> Result<Strike, NemesisError> {
    let mut strike = Strike::begin(arena);
    strike.fault();
    kill(arena, seat).await?;
    arena.hold(DEAD).await;
    arena.cluster.restart(seat).await?;
    Ok(strike.end(arena))
}

/// kill -9, and clients turn to the others.
pub(super) async fn kill(arena: &mut Arena, seat: Seat) -> Result<(), NemesisError> {
    let running = arena.cluster.take(seat)?;
    running.kill().await
}

/// SIGSTOP of the leader, three times, and of a follower.
pub(super) async fn pause(arena: &mut Arena) -> Result<Strike, NemesisError> {
    let mut strike = Strike::begin(arena);
    for span in PAUSES {
        let leader = arena.leader().await?;
        match span > Duration::from_secs(4) {
            true => strike.takes_leader(arena),
            false => strike.fault(),
        }
        arena.cluster.running(leader)?.pause().await?;
        let span = arena.span(span).min(LONGEST_PAUSE);
        tokio::time::sleep(span).await;
        arena.cluster.running(leader)?.resume().await?;
    }
    if arena.cluster.seats().len() > 1 {
        let follower = arena.follower().await?;
        strike.fault();
        arena.cluster.running(follower)?.pause().await?;
        arena.hold(PAUSES[1]).await;
        arena.cluster.running(follower)?.resume().await?;
    }
    Ok(strike.end(arena))
}

/// Each node ends in order and starts again, the next one once all are well.
pub(super) async fn rolling_restart(arena: &mut Arena) -> Result<Strike, NemesisError> {
    let mut strike = Strike::begin(arena);
    for seat in arena.cluster.seats() {
        match arena.leader().await? == seat {
            true => strike.takes_leader(arena),
            false => strike.fault(),
        }
        let status = arena.cluster.take(seat)?.terminate().await?;
        if !status.success() {
            let got = format!("SIGTERM ended it with {status}");
            return Err(NemesisError::Answer { who: format!("node {}", seat.0), got });
        }
        arena.cluster.restart(seat).await?;
        let now = arena.history.now();
        arena.recovered(now).await?;
    }
    Ok(strike.end(arena))
}
