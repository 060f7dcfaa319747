//! Several at once.

use std::time::Duration;

use super::Strike;
use super::links::links;
use super::processes::kill;
use crate::NemesisError;
use crate::arena::Arena;
use crate::ground::Weather;

const STOPPED: Duration = Duration::from_secs(4);

/// Slow links, a killed follower, and a stopped leader: of three voters, one moves.
pub(super) async fn three(arena: &mut Arena) -> Result<Strike, NemesisError> {
    let (leader, follower) = (arena.leader().await?, arena.follower().await?);
    let slow = Weather::Slow { delay: Duration::from_millis(10), jitter: Duration::from_millis(20) };
    let mut strike = Strike::begin(arena);
    strike.fault();
    for (from, to) in links(arena) {
        arena.ground.weather(from, to, slow);
    }
    strike.fault();
    kill(arena, follower).await?;
    // Without a quorum nobody can take over: this is no fail-over to be measured.
    strike.fault();
    arena.cluster.running(leader)?.pause().await?;
    arena.hold(STOPPED).await;
    arena.cluster.restart(follower).await?;
    arena.cluster.running(leader)?.resume().await?;
    for (from, to) in links(arena) {
        arena.ground.weather(from, to, Weather::Fair);
    }
    Ok(strike.end(arena))
}
