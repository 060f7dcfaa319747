//! Clocks of real processes that jump, or run faster or slower than time.

use std::time::Duration;

use tokio::time::Instant;

use super::leases::{Granted, granted, lost};
use super::{NO_LEVERS, Strike};
use crate::NemesisError;
use crate::arena::{Arena, PATIENCE, Pace};
use crate::check::Broken;
use crate::ground::Lever;
use crate::throughput::longest_silence;
use crate::trial::{FAIL_OVER, TICK};

const HELD: Duration = Duration::from_millis(1200);
const DAY: i64 = 86_400;
/// Far beyond every lease and time-out.
const JUMP_MS: i64 = 90_000;
/// Monotonic clocks of two nodes at once, in thousandths: the leader's and a follower's.
const PACES: [(i64, i64); 2] = [(1200, 800), (800, 1200)];

/// Wall clocks of the leader and a follower jump apart and back: nothing may come of it. Then their monotonic clocks jump,
/// as after a pause that nobody noticed: that may cost the lead, and no lease.
pub(super) async fn jumps(arena: &mut Arena) -> Result<Strike, NemesisError> {
    let mut strike = Strike::begin(arena);
    let Some(levers) = arena.cluster.levers().cloned() else { return Ok(strike.not_run(NO_LEVERS)) };
    let (leader, follower) = (arena.leader().await?, arena.follower().await?);
    let (began, before) = (arena.history.now(), granted(arena).await?);
    for (ahead, behind) in [(DAY, -DAY), (-DAY, DAY), (0, 0)] {
        strike.fault();
        levers.pull(leader, Lever::WallOffset, ahead)?;
        levers.pull(follower, Lever::WallOffset, behind)?;
        arena.hold(HELD).await;
    }
    let now = arena.history.now();
    let silence = arena.history.look(|kept| longest_silence(&kept.operations, (began, now)));
    let leads = arena.leader().await?;
    if leads != leader || silence > HELD.as_secs_f64() {
        let detail = format!("node {} led, node {} leads; {silence:.2} s without a write", leader.0, leads.0);
        strike.broken.push(Broken { promise: "wall clocks decide nothing", detail });
    }
    strike.broken.extend(lost(&before, &granted(arena).await?));
    let reads = levers.felt(leader)?.wall_reads + levers.felt(follower)?.wall_reads;
    strike.broken.extend(Broken::unless_felt("a wall clock that is off", reads));
    for seat in [leader, follower] {
        strike.fault();
        levers.pull(seat, Lever::Jump, JUMP_MS)?;
        arena.hold(HELD).await;
        let now = arena.history.now();
        arena.recovered(now).await?;
    }
    strike.broken.extend(lost(&before, &granted(arena).await?));
    // No lever is back before the nodes are started again: a monotonic clock has no way back.
    strike.note = format!("{reads} wall clocks read while they were a day off; then {} s of jumps", 2 * JUMP_MS / 1000);
    Ok(strike.end(arena))
}

/// The leader's clock is a fifth too fast and a follower's too slow, and the other way round; a quick run has one of both. Workers that are reached
/// keep their leases; the lease of one that is dead ends neither earlier nor later than that clock explains.
pub(super) async fn drift(arena: &mut Arena) -> Result<Strike, NemesisError> {
    let mut strike = Strike::begin(arena);
    let Some(levers) = arena.cluster.levers().cloned() else { return Ok(strike.not_run(NO_LEVERS)) };
    let mut paces = PACES.to_vec();
    if arena.pace == Pace::Quick {
        paces.swap_remove(arena.dice.below(2) as usize);
    }
    let mut notes = Vec::new();
    for (own, other) in paces {
        let (leader, follower) = (arena.leader().await?, arena.follower().await?);
        let before = granted(arena).await?;
        strike.fault();
        levers.pull(leader, Lever::Pace, own)?;
        levers.pull(follower, Lever::Pace, other)?;
        arena.hold(HELD).await;
        strike.broken.extend(lost(&before, &granted(arena).await?));
        let ended = dead_worker(arena, &mut strike, &before).await?;
        let kept = arena.leader().await? == leader;
        notes.push(format!("at {own}/1000 {}", judged(arena.lease, &mut strike, (own, ended, kept))));
        let reads = levers.felt(leader)?.odd_reads.min(levers.felt(follower)?.odd_reads);
        strike.broken.extend(Broken::unless_felt("a clock that drifts", reads));
        levers.pull(leader, Lever::Pace, 0)?;
        levers.pull(follower, Lever::Pace, 0)?;
    }
    strike.note = format!("a dead worker's lease ended: {}", notes.join("; "));
    Ok(strike.end(arena))
}

/// Stops a worker until its lease has ended, and waits until it has one again. How long it took to end.
async fn dead_worker(
    arena: &mut Arena,
    strike: &mut Strike,
    before: &[Granted],
) -> Result<Option<Duration>, NemesisError> {
    let Some(worker) = arena.cluster.worker(0) else { return Ok(None) };
    strike.fault();
    worker.pause().await?;
    let began = Instant::now();
    let ended = loop {
        if granted(arena).await?.len() < before.len() {
            break Some(began.elapsed());
        }
        if began.elapsed() > 2 * arena.lease + PATIENCE {
            break None;
        }
        tokio::time::sleep(LOOK / 2).await;
    };
    if let Some(worker) = arena.cluster.worker(0) {
        worker.resume().await?;
    }
    let deadline = Instant::now() + PATIENCE;
    while granted(arena).await?.len() < before.len() {
        if Instant::now() > deadline {
            return Err(NemesisError::Late { what: "a worker that goes on to get a lease again".into() });
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(ended)
}

/// A pause between two looks at who holds a lease, and as long for the answer.
const LOOK: Duration = Duration::from_millis(200);

/// Whether a lease ended when the leader's clock says so.
fn judged(lease: Duration, strike: &mut Strike, (pace, ended, kept): (i64, Option<Duration>, bool)) -> String {
    let own = lease.mul_f64(1000.0 / pace as f64);
    // The last sign of life may be a probe and a tick older than the stop. A follower tells of one in its next tick, the
    // leader renews in its own, and ends the lease in another. A new leader waits a lease of its own.
    let earliest = own.min(lease).saturating_sub(2 * TICK);
    let others = if kept { Duration::ZERO } else { lease.mul_f64(1.25) + FAIL_OVER };
    // It is seen by asking, which takes a while itself.
    let latest = (lease + 3 * TICK).mul_f64(1000.0 / pace as f64) + others + LOOK;
    let told = ended.map_or("never".into(), |ended| format!("after {:.1} s", ended.as_secs_f64()));
    let told = format!("{told}, {:.1} to {:.1} s allowed", earliest.as_secs_f64(), latest.as_secs_f64());
    if !ended.is_some_and(|ended| (earliest..=latest).contains(&ended)) {
        strike.broken.push(Broken { promise: "a lease ends when its time is over, not before", detail: told.clone() });
    }
    told
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::At;

    fn strike() -> Strike {
        let (began, healed) = (At(0), At(0));
        Strike { faults: 0, began, healed, leader_lost: Vec::new(), broken: Vec::new(), note: String::new() }
    }

    #[test]
    fn a_lease_may_end_as_early_and_as_late_as_its_leaders_clock_says() {
        let holds = |pace, seconds: Option<f64>, kept| {
            let mut strike = strike();
            judged(Duration::from_secs(5), &mut strike, (pace, seconds.map(Duration::from_secs_f64), kept));
            strike.broken.is_empty()
        };
        assert!(holds(1200, Some(4.5), true) && holds(800, Some(9.0), true));
        assert!(!holds(1200, Some(1.0), true), "too early by any clock");
        assert!(!holds(1200, Some(7.0), true) && !holds(800, Some(10.5), true), "too late");
        assert!(holds(800, Some(10.5), false), "a new leader takes its time");
        assert!(!holds(800, None, false), "never");
    }
}
