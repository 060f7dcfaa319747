//! Disks that are slow or fail under running nodes.

use std::time::Duration;

use tokio::time::Instant;

use super::record::{NO_SYSCALL_FAULTS, NemesisRecord};
use crate::NemesisError;
use crate::check::GuaranteeViolation;
use crate::history::{MemberSlot, RunInstant};
use crate::test_network::{SyscallFault, SyscallFaultInjector};
use crate::testbed::{MAX_FAIL_OVER, OPERATOR_TIMEOUT, TrialEnvironment};
use crate::throughput::longest_silence;

const FAULT_DURATION: Duration = Duration::from_millis(2200);
/// Delay of an fdatasync on a busy disk, and on one about to fail.
const FDATASYNC_DELAYS: [Duration; 2] = [Duration::from_millis(120), Duration::from_millis(600)];
/// Maximum time without an acknowledged write while one of several disks is slow; shorter than any election.
const MAX_SLOW_SILENCE: Duration = Duration::from_millis(1400);
/// How much longer than that the fault lasts.
const EXTRA_DURATION: Duration = Duration::from_millis(600);
/// EIO, as the kernel returns it once per file.
const EIO: i64 = 5;

/// A follower's disk is slow, then the leader's. A quorum of fast disks must continue.
pub(super) async fn slow(environment: &mut TrialEnvironment) -> Result<NemesisRecord, NemesisError> {
    let mut fault = NemesisRecord::begin(environment);
    let Some(levers) = environment.cluster.syscall_faults().cloned() else {
        return Ok(fault.not_run(NO_SYSCALL_FAULTS));
    };
    let mut syncs = 0;
    for seat in [environment.follower().await?, environment.leader().await?] {
        let delay = *environment.rng.pick(&FDATASYNC_DELAYS).unwrap_or(&FDATASYNC_DELAYS[0]);
        fault.count_fault();
        let from = environment.history.now();
        levers.set(seat, SyscallFault::SyncDelay, i64::try_from(delay.as_millis()).unwrap_or(i64::MAX))?;
        environment.hold_fault(FAULT_DURATION).await;
        syncs += levers.counts(seat)?.delayed;
        levers.set(seat, SyscallFault::SyncDelay, 0)?;
        check_progress(environment, &mut fault, (from, MAX_SLOW_SILENCE));
    }
    fault.broken.extend(GuaranteeViolation::unless_observed("a slow disk", syncs));
    fault.note = format!("{syncs} syncs were late");
    Ok(fault.end(environment))
}

/// Every fdatasync of a follower fails, then every one of the leader. Each node reports it, acknowledges nothing any
/// more, and after a restart has everything that it had acknowledged.
pub(super) async fn failing(environment: &mut TrialEnvironment) -> Result<NemesisRecord, NemesisError> {
    let mut fault = NemesisRecord::begin(environment);
    let Some(levers) = environment.cluster.syscall_faults().cloned() else {
        return Ok(fault.not_run(NO_SYSCALL_FAULTS));
    };
    let follower = environment.follower().await?;
    fault.count_fault();
    let mut did = vec![fail_disk(environment, &mut fault, (&levers, follower, MAX_SLOW_SILENCE)).await?];
    let now = environment.history.now();
    environment.await_recovery(now).await?;
    let leader = environment.leader().await?;
    fault.count_leader_loss(environment);
    did.push(fail_disk(environment, &mut fault, (&levers, leader, MAX_FAIL_OVER)).await?);
    fault.note = format!("follower: {}; leader: {}", did[0], did[1]);
    Ok(fault.end(environment))
}

async fn fail_disk(
    environment: &mut TrialEnvironment,
    fault: &mut NemesisRecord,
    (levers, seat, longest): (&SyscallFaultInjector, MemberSlot, Duration),
) -> Result<String, NemesisError> {
    let began = environment.history.now();
    let before = environment.cluster.log_text(seat).len();
    levers.set(seat, SyscallFault::SyncError, EIO)?;
    let deadline = Instant::now() + OPERATOR_TIMEOUT;
    while levers.counts(seat)?.failed == 0 {
        if Instant::now() > deadline {
            return Err(NemesisError::Late { what: format!("an fdatasync of node {}", seat.0) });
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    environment.hold_fault(longest + EXTRA_DURATION).await;
    check_progress(environment, fault, (began, longest));
    let failed = levers.counts(seat)?.failed;
    let mut running = environment.cluster.take(seat)?;
    let end = match running.exit_status() {
        Some(status) => format!("ended ({status})"),
        None => format!("served on, ended when asked ({})", running.terminate().await?),
    };
    let log = environment.cluster.log_text(seat).split_off(before);
    if !(log.contains("os error 5") && log.contains("start the node again")) {
        let detail = format!("node {} {end}, and said neither the cause nor what to do: {log}", seat.0);
        fault.broken.push(GuaranteeViolation {
            guarantee: "a failed disk stops the ledger of its node, which says so",
            detail,
        });
    }
    // A restart resets the node's syscall faults.
    environment.cluster.restart(seat).await?;
    Ok(format!("{failed} syncs failed, {end}"))
}

/// Checks that some write was acknowledged at least every `longest`.
fn check_progress(environment: &TrialEnvironment, fault: &mut NemesisRecord, (from, longest): (RunInstant, Duration)) {
    let now = environment.history.now();
    let silence = environment.history.read(|kept| longest_silence(&kept.operations, (from, now)));
    if silence > longest.as_secs_f64() {
        let detail = format!("{silence:.2} s without an acknowledged write, {longest:?} allowed");
        fault.broken.push(GuaranteeViolation { guarantee: "the disk of one voter stops nobody else", detail });
    }
}
