//! Leases: none ends early because the leader restarted, and those of dead workers end in time.

use std::time::Duration;

use tokio::time::Instant;
use vocabulary::{Epoch, WorkerId};

use super::processes::kill;
use super::record::FaultRecord;
use crate::NemesisError;
use crate::check::GuaranteeViolation;
use crate::testbed::{MAX_FAIL_OVER, OPERATOR_TIMEOUT, TICK, TrialEnvironment};

/// The leader is killed and restarted at once while a follower is cut off, all within a lease; then a worker dies
/// together with the leader.
pub(super) async fn restart_leader_within_lease(arena: &mut TrialEnvironment) -> Result<FaultRecord, NemesisError> {
    let before = held_leases(arena).await?;
    let mut strike = FaultRecord::begin(arena);
    let (leader, follower) = (arena.leader().await?, arena.follower().await?);
    strike.count_fault();
    arena.isolate(follower).await?;
    // Of three voters one is left, so this does not count as a fail-over.
    strike.count_fault();
    kill(arena, leader).await?;
    arena.cluster.restart(leader).await?;
    arena.heal_isolation(follower).await?;
    let now = arena.history.now();
    arena.await_recovery(now).await?;
    let after = held_leases(arena).await?;
    strike.broken.extend(check_none_lost(&before, &after));
    dead_worker(arena, &mut strike).await?;
    Ok(strike.end(arena))
}

/// A paused worker answers no probe. Its lease must end within one lease, one fail-over and one tick.
async fn dead_worker(arena: &mut TrialEnvironment, strike: &mut FaultRecord) -> Result<(), NemesisError> {
    let leases = held_leases(arena).await?;
    let Some(worker) = arena.cluster.worker(0) else { return Ok(()) };
    strike.count_fault();
    worker.pause().await?;
    let leader = arena.leader().await?;
    strike.count_leader_loss(arena);
    kill(arena, leader).await?;
    let began = Instant::now();
    // A report in flight may still renew it once.
    let bound = arena.lease + MAX_FAIL_OVER + 2 * TICK;
    let ended = loop {
        let live = held_leases(arena).await?;
        if live.len() < leases.len() {
            break Some(began.elapsed());
        }
        if began.elapsed() > bound + OPERATOR_TIMEOUT {
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
        strike
            .broken
            .push(GuaranteeViolation { guarantee: "dead leases are gone in time", detail: strike.note.clone() });
    }
    Ok(())
}

/// A held lease: its worker, and the epoch of the grant.
pub(super) type HeldLease = (WorkerId, Epoch);

/// Checks that no lease ended, since all workers were reachable.
pub(super) fn check_none_lost(before: &[HeldLease], after: &[HeldLease]) -> Vec<GuaranteeViolation> {
    let lost = before.iter().filter(|lease| !after.contains(lease));
    let early = |(worker, epoch): &HeldLease| GuaranteeViolation {
        guarantee: "no lease ends early",
        detail: format!("{worker} was granted its lease at {epoch}, and lost it while routers reached it"),
    };
    lost.map(early).collect()
}

/// Returns the held leases as the leader knows them, by worker and grant.
pub(super) async fn held_leases(arena: &TrialEnvironment) -> Result<Vec<HeldLease>, NemesisError> {
    let leader = arena.leader().await?;
    let seen = arena.cluster.addresses().leases(leader).await?;
    Ok(seen.into_iter().filter(|lease| lease.is_live).map(|lease| (lease.worker, lease.granted)).collect())
}
