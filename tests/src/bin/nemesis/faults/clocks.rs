//! Clock faults of real processes: jumps and wrong rates.

use std::time::Duration;

use tokio::time::Instant;

use super::leases::{HeldLease, check_none_lost, held_leases};
use super::record::{NO_SYSCALL_FAULTS, NemesisRecord};
use crate::NemesisError;
use crate::check::GuaranteeViolation;
use crate::test_network::SyscallFault;
use crate::testbed::{MAX_FAIL_OVER, OPERATOR_TIMEOUT, RunLength, TICK, TrialEnvironment};
use crate::throughput::longest_silence;

const FAULT_DURATION: Duration = Duration::from_millis(1200);
const DAY: i64 = 86_400;
/// Jump in milliseconds, far beyond every lease and timeout.
const JUMP_MS: i64 = 90_000;
/// Rates of two nodes' monotonic clocks at once, in thousandths: the leader's and a follower's.
const CLOCK_RATES: [(i64, i64); 2] = [(1200, 800), (800, 1200)];

/// Wall clocks of the leader and a follower jump apart and back, which must have no effect. Then their monotonic
/// clocks jump, as after an unnoticed pause, which may cost leadership but no lease.
pub(super) async fn jumps(environment: &mut TrialEnvironment) -> Result<NemesisRecord, NemesisError> {
    let mut fault = NemesisRecord::begin(environment);
    let Some(levers) = environment.cluster.syscall_faults().cloned() else {
        return Ok(fault.not_run(NO_SYSCALL_FAULTS));
    };
    let (leader, follower) = (environment.leader().await?, environment.follower().await?);
    let (began, before) = (environment.history.now(), held_leases(environment).await?);
    for (ahead, behind) in [(DAY, -DAY), (-DAY, DAY), (0, 0)] {
        fault.count_fault();
        levers.set(leader, SyscallFault::WallOffset, ahead)?;
        levers.set(follower, SyscallFault::WallOffset, behind)?;
        environment.hold_fault(FAULT_DURATION).await;
    }
    let now = environment.history.now();
    let silence = environment.history.read(|kept| longest_silence(&kept.operations, (began, now)));
    let leads = environment.leader().await?;
    if leads != leader || silence > FAULT_DURATION.as_secs_f64() {
        let detail = format!("node {} led, node {} leads; {silence:.2} s without a write", leader.0, leads.0);
        fault.broken.push(GuaranteeViolation { guarantee: "wall clocks decide nothing", detail });
    }
    fault.broken.extend(check_none_lost(&before, &held_leases(environment).await?));
    let reads = levers.counts(leader)?.wall_reads + levers.counts(follower)?.wall_reads;
    fault.broken.extend(GuaranteeViolation::unless_observed("a wall clock that is off", reads));
    for seat in [leader, follower] {
        fault.count_fault();
        levers.set(seat, SyscallFault::ClockJump, JUMP_MS)?;
        environment.hold_fault(FAULT_DURATION).await;
        let now = environment.history.now();
        environment.await_recovery(now).await?;
    }
    fault.broken.extend(check_none_lost(&before, &held_leases(environment).await?));
    // The jumps are not reset before the nodes restart: a monotonic clock cannot go back.
    fault.note = format!("{reads} wall clocks read while they were a day off; then {} s of jumps", 2 * JUMP_MS / 1000);
    Ok(fault.end(environment))
}

/// The leader's clock runs a fifth too fast and a follower's too slow, then the other way round; a quick run has one
/// of the two. Reachable workers keep their leases; a dead worker's lease ends neither earlier nor later than that
/// rate explains.
pub(super) async fn drift(environment: &mut TrialEnvironment) -> Result<NemesisRecord, NemesisError> {
    let mut fault = NemesisRecord::begin(environment);
    let Some(levers) = environment.cluster.syscall_faults().cloned() else {
        return Ok(fault.not_run(NO_SYSCALL_FAULTS));
    };
    let mut paces = CLOCK_RATES.to_vec();
    if environment.pace == RunLength::Quick {
        paces.swap_remove(environment.rng.below(2) as usize);
    }
    let mut notes = Vec::new();
    for (own, other) in paces {
        let (leader, follower) = (environment.leader().await?, environment.follower().await?);
        let before = held_leases(environment).await?;
        fault.count_fault();
        levers.set(leader, SyscallFault::ClockRate, own)?;
        levers.set(follower, SyscallFault::ClockRate, other)?;
        environment.hold_fault(FAULT_DURATION).await;
        fault.broken.extend(check_none_lost(&before, &held_leases(environment).await?));
        let ended = dead_worker(environment, &mut fault, &before).await?;
        let kept = environment.leader().await? == leader;
        notes.push(format!("at {own}/1000 {}", judge_expiry(environment.lease, &mut fault, (own, ended, kept))));
        let reads = levers.counts(leader)?.skewed_reads.min(levers.counts(follower)?.skewed_reads);
        fault.broken.extend(GuaranteeViolation::unless_observed("a clock that drifts", reads));
        levers.set(leader, SyscallFault::ClockRate, 0)?;
        levers.set(follower, SyscallFault::ClockRate, 0)?;
    }
    fault.note = format!("a dead worker's lease ended: {}", notes.join("; "));
    Ok(fault.end(environment))
}

/// Pauses a worker until its lease has ended, resumes it, and waits until it has a lease again. Returns how long the
/// lease took to end.
async fn dead_worker(
    environment: &mut TrialEnvironment,
    fault: &mut NemesisRecord,
    before: &[HeldLease],
) -> Result<Option<Duration>, NemesisError> {
    let Some(worker) = environment.cluster.worker(0) else { return Ok(None) };
    fault.count_fault();
    worker.pause().await?;
    let began = Instant::now();
    let ended = loop {
        if held_leases(environment).await?.len() < before.len() {
            break Some(began.elapsed());
        }
        if began.elapsed() > 2 * environment.lease + OPERATOR_TIMEOUT {
            break None;
        }
        tokio::time::sleep(POLL_INTERVAL / 2).await;
    };
    if let Some(worker) = environment.cluster.worker(0) {
        worker.resume().await?;
    }
    let deadline = Instant::now() + OPERATOR_TIMEOUT;
    while held_leases(environment).await?.len() < before.len() {
        if Instant::now() > deadline {
            return Err(NemesisError::Late { what: "a worker that goes on to get a lease again".into() });
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(ended)
}

/// Time between two reads of the leases, including the response time.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Checks that a lease ended in time by the leader's clock.
fn judge_expiry(
    lease: Duration,
    fault: &mut NemesisRecord,
    (pace, ended, kept): (i64, Option<Duration>, bool),
) -> String {
    let own = lease.mul_f64(1000.0 / pace as f64);
    // The last sign of life may be a probe and a tick older than the pause. A follower reports it in its next tick,
    // the leader renews in its own tick, and ends the lease in another. A new leader waits one more lease.
    let earliest = own.min(lease).saturating_sub(2 * TICK);
    let others = if kept { Duration::ZERO } else { lease.mul_f64(1.25) + MAX_FAIL_OVER };
    // The end is observed by polling, which takes time itself.
    let latest = (lease + 3 * TICK).mul_f64(1000.0 / pace as f64) + others + POLL_INTERVAL;
    let told = ended.map_or("never".into(), |ended| format!("after {:.1} s", ended.as_secs_f64()));
    let text = format!("{told}, {:.1} to {:.1} s allowed", earliest.as_secs_f64(), latest.as_secs_f64());
    if !ended.is_some_and(|ended| (earliest..=latest).contains(&ended)) {
        fault.broken.push(GuaranteeViolation {
            guarantee: "a lease ends when its time is over, not before",
            detail: text.clone(),
        });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::RunInstant;

    fn strike() -> NemesisRecord {
        let (began, healed) = (RunInstant(0), RunInstant(0));
        NemesisRecord { faults: 0, began, healed, leader_lost: Vec::new(), broken: Vec::new(), note: String::new() }
    }

    #[test]
    fn lease_expiry_follows_the_drift_of_the_leader_clock() {
        let holds = |pace, seconds: Option<f64>, kept| {
            let mut fault = strike();
            judge_expiry(Duration::from_secs(5), &mut fault, (pace, seconds.map(Duration::from_secs_f64), kept));
            fault.broken.is_empty()
        };
        assert!(holds(1200, Some(4.5), true) && holds(800, Some(9.0), true));
        assert!(!holds(1200, Some(1.0), true), "too early by any clock");
        assert!(!holds(1200, Some(7.0), true) && !holds(800, Some(10.5), true), "too late");
        assert!(holds(800, Some(10.5), false), "a new leader takes its time");
        assert!(!holds(800, None, false), "never");
    }
}
