//! Temporary resource shortages: descriptors and memory for opened files and accepted connections, and threads. A
//! full disk is a separate nemesis, because it stops a ledger.

use std::time::Duration;

use tokio::time::Instant;

use super::record::{NO_SYSCALL_FAULTS, NemesisRecord};
use crate::NemesisError;
use crate::check::GuaranteeViolation;
use crate::history::MemberSlot;
use crate::test_network::{SyscallFault, SyscallFaultInjector};
use crate::testbed::{OPERATOR_TIMEOUT, TrialEnvironment};

const FAULT_DURATION: Duration = Duration::from_millis(900);
const GUARANTEE: &str = "a shortage ends with its cause";

/// Each with the error of the system call: EMFILE, ENOMEM, EAGAIN.
const SHORTAGES: [(&str, SyscallFault, i64); 5] = [
    ("descriptors for files", SyscallFault::OpenError, 24),
    ("memory for files", SyscallFault::OpenError, 12),
    ("descriptors for connections", SyscallFault::AcceptError, 24),
    ("memory for connections", SyscallFault::AcceptError, 12),
    ("threads", SyscallFault::ThreadError, 11),
];

/// A follower, then the leader, runs out of each resource while it is asked for a snapshot. No node exits, and what
/// failed succeeds without a restart once the shortage is over: only a failed write or fsync stops a ledger.
pub(super) async fn shortages(environment: &mut TrialEnvironment) -> Result<NemesisRecord, NemesisError> {
    let mut fault = NemesisRecord::begin(environment);
    let Some(levers) = environment.cluster.syscall_faults().cloned() else {
        return Ok(fault.not_run(NO_SYSCALL_FAULTS));
    };
    let (mut unopened, mut unaccepted, mut unstarted) = (0, 0, 0);
    for seat in [environment.follower().await?, environment.leader().await?] {
        for (what, lever, error) in SHORTAGES {
            fault.count_fault();
            levers.set(seat, lever, error)?;
            request_under_shortage(environment, seat).await;
            levers.set(seat, lever, 0)?;
            if let Some(broken) = check_recovered(environment, (seat, what)).await? {
                fault.broken.push(broken);
                // Further shortages would prove nothing about this node.
                restart_node(environment, seat).await?;
                break;
            }
        }
        let felt = fault_counts(&levers, seat)?;
        unopened += felt.0;
        unaccepted += felt.1;
        unstarted += felt.2;
    }
    if fault.broken.is_empty() {
        fault.broken.extend(GuaranteeViolation::unless_observed("a shortage of descriptors for files", unopened));
        fault
            .broken
            .extend(GuaranteeViolation::unless_observed("a shortage of descriptors for connections", unaccepted));
    }
    // A failed thread start goes unnoticed if the existing threads do the work, so it is only noted.
    fault.note =
        format!("{unopened} files not opened, {unaccepted} connections not taken, {unstarted} threads not started");
    Ok(fault.end(environment))
}

fn fault_counts(faults: &SyscallFaultInjector, slot: MemberSlot) -> Result<(i64, i64, i64), NemesisError> {
    let felt = faults.counts(slot)?;
    Ok((felt.failed_opens, felt.failed_accepts, felt.failed_thread_starts))
}

/// Requests a snapshot, which opens a file, on a separate connection. The result does not matter during the shortage.
async fn request_under_shortage(environment: &mut TrialEnvironment, slot: MemberSlot) {
    let span = environment.fault_duration(FAULT_DURATION);
    let addresses = environment.cluster.addresses().clone();
    let asked = async {
        let _ = addresses.write_snapshot(slot).await;
        let _ = addresses.snapshot(slot).await;
    };
    let until = Instant::now() + span;
    let _ = tokio::time::timeout(span, asked).await;
    tokio::time::sleep_until(until).await;
}

/// Checks what the node must be able to do again.
async fn check_recovered(
    environment: &mut TrialEnvironment,
    (seat, what): (MemberSlot, &str),
) -> Result<Option<GuaranteeViolation>, NemesisError> {
    let deadline = Instant::now() + OPERATOR_TIMEOUT;
    loop {
        if environment.cluster.running(seat)?.exit_status().is_some() {
            let detail = format!("node {} ran out of {what} and ended: {}", seat.0, environment.cluster.log_tail(seat));
            return Ok(Some(GuaranteeViolation { guarantee: GUARANTEE, detail }));
        }
        let refused = match environment.cluster.addresses().write_snapshot(seat).await {
            Ok(()) => return Ok(None),
            Err(refused) => refused,
        };
        if Instant::now() > deadline {
            let detail = format!("node {} ran out of {what}, and still answers: {refused}", seat.0);
            return Ok(Some(GuaranteeViolation { guarantee: GUARANTEE, detail }));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn restart_node(environment: &mut TrialEnvironment, slot: MemberSlot) -> Result<(), NemesisError> {
    let mut running = environment.cluster.take(slot)?;
    if running.exit_status().is_none() {
        running.kill().await?;
    }
    environment.cluster.restart(slot).await
}
