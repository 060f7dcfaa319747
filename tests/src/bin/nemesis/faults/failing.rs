//! Disks that are slow, or fail, under running nodes.

use std::time::Duration;

use tokio::time::Instant;

use super::{NO_LEVERS, Strike};
use crate::NemesisError;
use crate::arena::{Arena, PATIENCE};
use crate::check::Broken;
use crate::ground::{Lever, Levers};
use crate::history::{At, Seat};
use crate::throughput::longest_silence;
use crate::trial::FAIL_OVER;

const HELD: Duration = Duration::from_millis(2200);
/// What an fdatasync takes: of a busy disk, and of one that is about to die.
const SLOW: [Duration; 2] = [Duration::from_millis(120), Duration::from_millis(600)];
/// Longest time without an acknowledged write while one disk of several is slow: no election takes so little.
const SLOWED: Duration = Duration::from_millis(1400);
/// So much longer than that the fault lasts.
const SOME: Duration = Duration::from_millis(600);
/// EIO, as the kernel says it once for every file.
const FAILS: i64 = 5;

/// A follower's disk is slow, then the leader's. Whoever has a quorum of quick disks goes on.
pub(super) async fn slow(arena: &mut Arena) -> Result<Strike, NemesisError> {
    let mut strike = Strike::begin(arena);
    let Some(levers) = arena.cluster.levers().cloned() else { return Ok(strike.not_run(NO_LEVERS)) };
    let mut syncs = 0;
    for seat in [arena.follower().await?, arena.leader().await?] {
        let delay = *arena.dice.pick(&SLOW).unwrap_or(&SLOW[0]);
        strike.fault();
        let from = arena.history.now();
        levers.pull(seat, Lever::SyncDelay, i64::try_from(delay.as_millis()).unwrap_or(i64::MAX))?;
        arena.hold(HELD).await;
        syncs += levers.felt(seat)?.delayed;
        levers.pull(seat, Lever::SyncDelay, 0)?;
        went_on(arena, &mut strike, (from, SLOWED));
    }
    strike.broken.extend(Broken::unless_felt("a slow disk", syncs));
    strike.note = format!("{syncs} syncs were late");
    Ok(strike.end(arena))
}

/// Every fdatasync of a follower fails, then every one of the leader. Each says so, vouches for nothing any more, and
/// comes back with all that it had acknowledged once it is started again.
pub(super) async fn failing(arena: &mut Arena) -> Result<Strike, NemesisError> {
    let mut strike = Strike::begin(arena);
    let Some(levers) = arena.cluster.levers().cloned() else { return Ok(strike.not_run(NO_LEVERS)) };
    let follower = arena.follower().await?;
    strike.fault();
    let mut did = vec![fails(arena, &mut strike, (&levers, follower, SLOWED)).await?];
    let now = arena.history.now();
    arena.recovered(now).await?;
    let leader = arena.leader().await?;
    strike.takes_leader(arena);
    did.push(fails(arena, &mut strike, (&levers, leader, FAIL_OVER)).await?);
    strike.note = format!("follower: {}; leader: {}", did[0], did[1]);
    Ok(strike.end(arena))
}

async fn fails(
    arena: &mut Arena,
    strike: &mut Strike,
    (levers, seat, longest): (&Levers, Seat, Duration),
) -> Result<String, NemesisError> {
    let began = arena.history.now();
    let before = arena.cluster.said(seat).len();
    levers.pull(seat, Lever::SyncError, FAILS)?;
    let deadline = Instant::now() + PATIENCE;
    while levers.felt(seat)?.failed == 0 {
        if Instant::now() > deadline {
            return Err(NemesisError::Late { what: format!("an fdatasync of node {}", seat.0) });
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    arena.hold(longest + SOME).await;
    went_on(arena, strike, (began, longest));
    let failed = levers.felt(seat)?.failed;
    let mut running = arena.cluster.take(seat)?;
    let end = match running.ended() {
        Some(status) => format!("ended ({status})"),
        None => format!("served on, ended when asked ({})", running.terminate().await?),
    };
    let said = arena.cluster.said(seat).split_off(before);
    if !(said.contains("os error 5") && said.contains("start the node again")) {
        let detail = format!("node {} {end}, and said neither the cause nor what to do: {said}", seat.0);
        strike.broken.push(Broken { promise: "a failed disk stops the ledger of its node, which says so", detail });
    }
    // It takes its levers up anew.
    arena.cluster.restart(seat).await?;
    Ok(format!("{failed} syncs failed, {end}"))
}

/// Somebody's writes were acknowledged at least so often.
fn went_on(arena: &Arena, strike: &mut Strike, (from, longest): (At, Duration)) {
    let now = arena.history.now();
    let silence = arena.history.look(|kept| longest_silence(&kept.operations, (from, now)));
    if silence > longest.as_secs_f64() {
        let detail = format!("{silence:.2} s without an acknowledged write, {longest:?} allowed");
        strike.broken.push(Broken { promise: "the disk of one voter stops nobody else", detail });
    }
}
