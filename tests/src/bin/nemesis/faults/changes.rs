//! The lead is handed on; voters change while one of them cannot be reached.

use std::time::Duration;

use super::Strike;
use super::links::links;
use crate::NemesisError;
use crate::arena::Arena;
use crate::door::Change;
use crate::ground::Weather;

const FIVE: usize = 5;
const TRANSFERS: u32 = 3;
const BETWEEN: Duration = Duration::from_millis(800);

/// To a follower, several times.
pub(super) async fn transfer(arena: &mut Arena) -> Result<Strike, NemesisError> {
    let mut strike = Strike::begin(arena);
    for _ in 0..TRANSFERS {
        let follower = arena.follower().await?;
        let node = arena.cluster.member(follower, arena.leader().await?).await?.node;
        strike.fault();
        arena.change(Change::TransferLeader(node)).await?;
        tokio::time::sleep(BETWEEN).await;
    }
    Ok(strike.end(arena))
}

/// A follower is cut off and replaced by a learner, comes back, and takes its place again.
pub(super) async fn under_fault(arena: &mut Arena) -> Result<Strike, NemesisError> {
    let follower = arena.follower().await?;
    let learners = arena.learners().await?;
    let nobody = || NemesisError::Answer { who: "the cluster".into(), got: "no learner".into() };
    let learner = arena.dice.pick(&learners).copied().ok_or_else(nobody)?;
    let leader = arena.leader().await?;
    let old = arena.cluster.member(follower, leader).await?.node;
    let new = arena.cluster.member(learner, leader).await?.node;
    let mut strike = Strike::begin(arena);
    strike.fault();
    arena.isolate(follower).await?;
    strike.fault();
    arena.change(Change::Replace { old, new }).await?;
    arena.hold(BETWEEN).await;
    arena.rejoin(follower).await?;
    let now = arena.history.now();
    arena.recovered(now).await?;
    strike.fault();
    arena.change(Change::Replace { old: new, new: old }).await?;
    if arena.voters().await?.len() == FIVE {
        shrink_and_grow(arena, &mut strike).await?;
    }
    Ok(strike.end(arena))
}

/// Five voters become three and five again, while links are slow.
async fn shrink_and_grow(arena: &mut Arena, strike: &mut Strike) -> Result<(), NemesisError> {
    let leader = arena.leader().await?;
    let mut nodes = Vec::new();
    for seat in arena.voters().await?.into_iter().filter(|seat| *seat != leader).take(2) {
        nodes.push(arena.cluster.member(seat, leader).await?.node);
    }
    let slow = Weather::Slow { delay: Duration::from_millis(20), jitter: Duration::from_millis(20) };
    for (from, to) in links(arena) {
        arena.ground.weather(from, to, slow);
    }
    for change in [Change::Demote(nodes.clone()), Change::Promote(nodes)] {
        strike.fault();
        arena.change(change).await?;
        arena.hold(BETWEEN).await;
    }
    for (from, to) in links(arena) {
        arena.ground.weather(from, to, Weather::Fair);
    }
    Ok(())
}
