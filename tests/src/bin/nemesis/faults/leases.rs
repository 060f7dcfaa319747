//! Leases: none ends early because a leader restarted, and the dead ones end in time.

use std::time::Duration;

use tokio::time::Instant;
use vocabulary::{Epoch, WorkerId};

use super::Strike;
use super::processes::kill;
use crate::NemesisError;
use crate::arena::{Arena, PATIENCE};
use crate::check::Broken;
use crate::trial::{FAIL_OVER, TICK};

/// The leader is killed and started again at once, while a follower is cut off, all inside a lease; after that a worker
/// dies together with the leader.
pub(super) async fn restart_inside(arena: &mut Arena) -> Result<Strike, NemesisError> {
    let before = granted(arena).await?;
    let mut strike = Strike::begin(arena);
    let (leader, follower) = (arena.leader().await?, arena.follower().await?);
    strike.fault();
    arena.isolate(follower).await?;
    // Of three voters one is left: this is no fail-over to be measured.
    strike.fault();
    kill(arena, leader).await?;
    arena.cluster.restart(leader).await?;
    arena.rejoin(follower).await?;
    let now = arena.history.now();
    arena.recovered(now).await?;
    let after = granted(arena).await?;
    strike.broken.extend(lost(&before, &after));
    dead_worker(arena, &mut strike).await?;
    Ok(strike.end(arena))
}

/// A stopped worker answers no probe. Its lease must be gone within one lease, one fail-over and one tick.
async fn dead_worker(arena: &mut Arena, strike: &mut Strike) -> Result<(), NemesisError> {
    let leases = granted(arena).await?;
    let Some(worker) = arena.cluster.worker(0) else { return Ok(()) };
    strike.fault();
    worker.pause().await?;
    let leader = arena.leader().await?;
    strike.takes_leader(arena);
    kill(arena, leader).await?;
    let began = Instant::now();
    // A report that was under way may still renew it once.
    let bound = arena.lease + FAIL_OVER + 2 * TICK;
    let ended = loop {
        let live = granted(arena).await?;
        if live.len() < leases.len() {
            break Some(began.elapsed());
        }
        if began.elapsed() > bound + PATIENCE {
            break None;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    if let Some(worker) = arena.cluster.worker(0) {
        worker.resume().await?;
    }
    arena.cluster.restart(leader).await?;
    let late = ended.is_none_or(|after| after > bound);
    let after = ended.map_or("never".into(), |after| format!("after {:.1} s", after.as_secs_f64()));
    strike.note = format!("a dead worker's lease ended {after}, {:.1} s allowed", bound.as_secs_f64());
    if late {
        strike.broken.push(Broken { promise: "dead leases are gone in time", detail: strike.note.clone() });
    }
    Ok(())
}

/// A lease that is held: whose, and since when.
pub(super) type Granted = (WorkerId, Epoch);

/// The leases that ended although their workers were reached all the time.
pub(super) fn lost(before: &[Granted], after: &[Granted]) -> Vec<Broken> {
    let lost = before.iter().filter(|lease| !after.contains(lease));
    let early = |(worker, epoch): &Granted| Broken {
        promise: "no lease ends early",
        detail: format!("{worker} was granted its lease at {epoch}, and lost it while routers reached it"),
    };
    lost.map(early).collect()
}

/// Leases that are held, by worker and grant, as the leader has them.
pub(super) async fn granted(arena: &Arena) -> Result<Vec<Granted>, NemesisError> {
    let leader = arena.leader().await?;
    let seen = arena.cluster.doors().leases(leader).await?;
    Ok(seen.into_iter().filter(|lease| lease.is_live).map(|lease| (lease.worker, lease.granted)).collect())
}
