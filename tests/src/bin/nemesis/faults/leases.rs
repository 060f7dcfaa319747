//! Leases: none ends early because the leader restarted, and those of dead workers end in time.

use std::time::Duration;

use tokio::time::Instant;
use vocabulary::{Epoch, WorkerId};

use super::processes::kill;
use super::record::NemesisRecord;
use crate::NemesisError;
use crate::check::GuaranteeViolation;
use crate::testbed::{MAX_FAIL_OVER, OPERATOR_TIMEOUT, TICK, TrialEnvironment};

/// The leader is killed and restarted at once while a follower is cut off, all within a lease; then a worker dies
/// together with the leader.
pub(super) async fn restart_leader_within_lease(
    environment: &mut TrialEnvironment,
) -> Result<NemesisRecord, NemesisError> {
    let before = held_leases(environment).await?;
    let mut fault = NemesisRecord::begin(environment);
    let (leader, follower) = (environment.leader().await?, environment.follower().await?);
    fault.count_fault();
    environment.isolate(follower).await?;
    // Of three voters one is left, so this does not count as a fail-over.
    fault.count_fault();
    kill(environment, leader).await?;
    environment.cluster.restart(leader).await?;
    environment.heal_isolation(follower).await?;
    let now = environment.history.now();
    environment.await_recovery(now).await?;
    let after = held_leases(environment).await?;
    fault.broken.extend(check_none_lost(&before, &after));
    dead_worker(environment, &mut fault).await?;
    Ok(fault.end(environment))
}

/// A paused worker answers no probe. Its lease must end within one lease, one fail-over and one tick.
async fn dead_worker(environment: &mut TrialEnvironment, fault: &mut NemesisRecord) -> Result<(), NemesisError> {
    let leases = held_leases(environment).await?;
    let Some(worker) = environment.cluster.worker(0) else { return Ok(()) };
    fault.count_fault();
    worker.pause().await?;
    let leader = environment.leader().await?;
    fault.count_leader_loss(environment);
    kill(environment, leader).await?;
    let began = Instant::now();
    // A report in flight may still renew it once.
    let bound = environment.lease + MAX_FAIL_OVER + 2 * TICK;
    let ended = loop {
        let live = held_leases(environment).await?;
        if live.len() < leases.len() {
            break Some(began.elapsed());
        }
        if began.elapsed() > bound + OPERATOR_TIMEOUT {
            break None;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    if let Some(worker) = environment.cluster.worker(0) {
        worker.resume().await?;
    }
    environment.cluster.restart(leader).await?;
    let late = ended.is_none_or(|after| after > bound);
    let after = ended.map_or("never".into(), |after| format!("after {:.1} s", after.as_secs_f64()));
    fault.note = format!("a dead worker's lease ended {after}, {:.1} s allowed", bound.as_secs_f64());
    if late {
        fault.broken.push(GuaranteeViolation { guarantee: "dead leases are gone in time", detail: fault.note.clone() });
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
pub(super) async fn held_leases(environment: &TrialEnvironment) -> Result<Vec<HeldLease>, NemesisError> {
    let leader = environment.leader().await?;
    let seen = environment.cluster.addresses().leases(leader).await?;
    Ok(seen.into_iter().filter(|lease| lease.is_live).map(|lease| (lease.worker, lease.granted)).collect())
}
