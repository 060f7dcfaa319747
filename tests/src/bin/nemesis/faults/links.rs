//! Partitions, late bytes, lost ones.

use std::time::Duration;

use super::Strike;
use crate::NemesisError;
use crate::arena::Arena;
use crate::check::Broken;
use crate::ground::Weather;
use crate::history::Seat;

/// Longer than the longest election time-out.
const PARTED: Duration = Duration::from_secs(5);
const FLAPS: u32 = 6;
const BAD_WEATHER: Duration = Duration::from_secs(4);

/// The leader alone on one side.
pub(super) async fn symmetric(arena: &mut Arena) -> Result<Strike, NemesisError> {
    let leader = arena.leader().await?;
    let mut strike = Strike::begin(arena);
    strike.takes_leader(arena);
    arena.isolate(leader).await?;
    arena.hold(PARTED).await;
    replaced(arena, &mut strike, leader).await?;
    arena.rejoin(leader).await?;
    Ok(strike.end(arena))
}

/// Of five voters the leader and one follower on one side.
pub(super) async fn minority(arena: &mut Arena) -> Result<Strike, NemesisError> {
    let (leader, follower) = (arena.leader().await?, arena.follower().await?);
    let few = [leader, follower];
    let many: Vec<Seat> = arena.cluster.seats().into_iter().filter(|seat| !few.contains(seat)).collect();
    let across: Vec<(Seat, Seat)> = few.iter().flat_map(|one| many.iter().map(|other| (*one, *other))).collect();
    let mut strike = Strike::begin(arena);
    strike.takes_leader(arena);
    for (one, other) in &across {
        arena.ground.sever(*one, *other).await?;
        arena.ground.sever(*other, *one).await?;
    }
    arena.hold(PARTED).await;
    replaced(arena, &mut strike, leader).await?;
    for (one, other) in &across {
        arena.ground.mend(*one, *other).await?;
        arena.ground.mend(*other, *one).await?;
    }
    Ok(strike.end(arena))
}

/// The leader is not heard, and then another one does not hear.
pub(super) async fn one_way(arena: &mut Arena) -> Result<Strike, NemesisError> {
    let leader = arena.leader().await?;
    let mut strike = Strike::begin(arena);
    strike.takes_leader(arena);
    for other in arena.others(leader) {
        arena.ground.sever(leader, other).await?;
    }
    arena.hold(PARTED).await;
    replaced(arena, &mut strike, leader).await?;
    for other in arena.others(leader) {
        arena.ground.mend(leader, other).await?;
    }
    // A leader that does not hear cannot commit: it is lost, too.
    let deaf = arena.leader().await?;
    strike.takes_leader(arena);
    for other in arena.others(deaf) {
        arena.ground.sever(other, deaf).await?;
    }
    arena.hold(PARTED).await;
    for other in arena.others(deaf) {
        arena.ground.mend(other, deaf).await?;
    }
    Ok(strike.end(arena))
}

/// Whoever is not heard does not lead any more; if he did, the fault would have been none.
async fn replaced(arena: &Arena, strike: &mut Strike, old: Seat) -> Result<(), NemesisError> {
    if arena.leader().await? == old {
        let detail = format!("node {} still leads after {PARTED:?}", old.0);
        strike.broken.push(Broken { promise: "a leader that nobody hears is replaced", detail });
    }
    Ok(())
}

/// The leader's links come and go.
pub(super) async fn flapping(arena: &mut Arena) -> Result<Strike, NemesisError> {
    let leader = arena.leader().await?;
    let mut strike = Strike::begin(arena);
    for _ in 0..FLAPS {
        strike.fault();
        arena.isolate(leader).await?;
        let cut = Duration::from_millis(200 + arena.dice.below(700));
        tokio::time::sleep(cut).await;
        arena.rejoin(leader).await?;
        let mended = Duration::from_millis(100 + arena.dice.below(400));
        tokio::time::sleep(mended).await;
    }
    Ok(strike.end(arena))
}

/// Everything between nodes arrives late.
pub(super) async fn slow(arena: &mut Arena) -> Result<Strike, NemesisError> {
    let weather = Weather::Slow { delay: Duration::from_millis(30), jitter: Duration::from_millis(30) };
    bad_weather(arena, weather).await
}

/// Retransmissions and resets between nodes.
pub(super) async fn lossy(arena: &mut Arena) -> Result<Strike, NemesisError> {
    let before = arena.ground.carried().1;
    let mut strike = bad_weather(arena, Weather::Lossy { stalled: 30, reset: 3 }).await?;
    strike.note = format!("{} connections reset", arena.ground.carried().1 - before);
    Ok(strike)
}

async fn bad_weather(arena: &mut Arena, weather: Weather) -> Result<Strike, NemesisError> {
    let mut strike = Strike::begin(arena);
    for (from, to) in links(arena) {
        strike.fault();
        arena.ground.weather(from, to, weather);
    }
    arena.hold(BAD_WEATHER).await;
    for (from, to) in links(arena) {
        arena.ground.weather(from, to, Weather::Fair);
    }
    Ok(strike.end(arena))
}

/// Every direction between two nodes.
pub(super) fn links(arena: &Arena) -> Vec<(Seat, Seat)> {
    let seats = arena.cluster.seats();
    let pairs = seats.iter().flat_map(|from| seats.iter().map(move |to| (*from, *to)));
    pairs.filter(|(from, to)| from != to).collect()
}
