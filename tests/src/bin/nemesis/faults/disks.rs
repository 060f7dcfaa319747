//! Disk faults: full disks, and logs and snapshots with a missing end or a flipped bit.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::processes::kill;
use super::record::NemesisRecord;
use crate::NemesisError;
use crate::check::GuaranteeViolation;
use crate::history::MemberSlot;
use crate::test_network::{cut_quarter, cut_tail, fill_disk, flip_byte, free_disk, newest_chunk};
use crate::testbed::TrialEnvironment;

const FAULT_DURATION: Duration = Duration::from_secs(3);

/// A voter's disk is full, then has space again. A node that could not write stops its ledger until it is restarted:
/// either it exited, or it continues to serve and reports it.
pub(super) async fn full(environment: &mut TrialEnvironment) -> Result<NemesisRecord, NemesisError> {
    let mut fault = NemesisRecord::begin(environment);
    let Some(slot) = environment.cluster.small_disk() else {
        fault.note = "no small disk can be mounted here".into();
        return Ok(fault);
    };
    match environment.leader().await? == slot && environment.cluster.seats().len() > 1 {
        true => fault.count_leader_loss(environment),
        false => fault.count_fault(),
    }
    let folder = environment.cluster.folder(slot);
    let bytes = fill_disk(&folder)?;
    environment.hold_fault(FAULT_DURATION).await;
    free_disk(&folder)?;
    let mut running = environment.cluster.take(slot)?;
    let did = match running.exit_status() {
        Some(status) => format!("the node ended ({status})"),
        None => format!("the node went on serving, and ended when asked ({})", running.terminate().await?),
    };
    fault.note = format!("{} MB; {did}", bytes >> 20);
    environment.cluster.restart(slot).await?;
    Ok(fault.end(environment))
}

/// The end of a stopped follower's log, with acknowledged entries, is missing.
pub(super) async fn torn(environment: &mut TrialEnvironment) -> Result<NemesisRecord, NemesisError> {
    check_damage(environment, newest_chunk, |chunk| cut_quarter(chunk).map(|left| format!("cut to {left} bytes"))).await
}

/// The last bytes of a stopped follower's log are missing. All of them were acknowledged, because nobody writes
/// before it stops.
pub(super) async fn tail(environment: &mut TrialEnvironment) -> Result<NemesisRecord, NemesisError> {
    let bytes = 1 + environment.rng.below(48);
    let pause = environment.load.pause().await;
    // Makes sure that everything proposed is replicated and known to be committed.
    environment.equal_states().await?;
    let struck = check_damage(environment, newest_chunk, move |chunk| {
        cut_tail(chunk, bytes).map(|_| format!("{bytes} bytes cut off"))
    });
    let fault = struck.await;
    drop(pause);
    fault
}

/// The end of a stopped follower's snapshot, on which its log builds, is missing.
pub(super) async fn snapshot(environment: &mut TrialEnvironment) -> Result<NemesisRecord, NemesisError> {
    for seat in environment.cluster.running_slots() {
        environment.cluster.addresses().snapshot(seat).await?;
    }
    let bytes = 1 + environment.rng.below(4096);
    let file = |folder: &Path| Ok(folder.join("snapshot"));
    check_damage(environment, file, move |file| {
        cut_tail(file, bytes).map(|left| format!("{bytes} bytes cut off, {left} left"))
    })
    .await
}

/// One bit of a stopped follower's log is flipped.
pub(super) async fn flipped(environment: &mut TrialEnvironment) -> Result<NemesisRecord, NemesisError> {
    check_damage(environment, newest_chunk, |chunk| flip_byte(chunk).map(|at| format!("flipped at {at}"))).await
}

/// Checks that the node refuses to start and names the file and the position; then it is wiped and joins under a new
/// id.
async fn check_damage(
    environment: &mut TrialEnvironment,
    file: impl FnOnce(&Path) -> Result<PathBuf, NemesisError>,
    damage: impl FnOnce(&Path) -> Result<String, NemesisError>,
) -> Result<NemesisRecord, NemesisError> {
    let alone = environment.cluster.seats().len() == 1;
    let slot = if alone { environment.leader().await? } else { environment.follower().await? };
    let mut fault = NemesisRecord::begin(environment);
    fault.count_fault();
    kill(environment, slot).await?;
    let file = file(&environment.cluster.folder(slot))?;
    let whole = std::fs::read(&file).map_err(NemesisError::system(file.display().to_string()))?;
    fault.note = damage(&file)?;
    let boot = environment.cluster.boot(slot)?;
    match environment.cluster.start_expecting_failure(slot, boot).await {
        Ok(said) => fault.broken.extend(check_names_damage((slot, &file), &said)),
        Err(error) => fault.broken.push(damage_violation(format!("node {}: {error}", slot.0))),
    }
    match alone {
        // Restores the file from a copy, like the backup that the message asks for.
        true => {
            std::fs::write(&file, whole).map_err(NemesisError::system(file.display().to_string()))?;
            environment.cluster.restart(slot).await?;
        }
        false => environment.replace(slot).await?,
    }
    Ok(fault.end(environment))
}

fn check_names_damage((seat, file): (MemberSlot, &Path), said: &str) -> Option<GuaranteeViolation> {
    // Damage at the end of a log is reported by entry, in the middle by offset.
    let located = said.contains("offset") || said.contains("entry");
    // The message may name the log's folder: missing entries are in none of its files.
    let folder = file.parent().filter(|folder| folder.ends_with("log"));
    let names = |path: &Path| said.contains(&path.display().to_string());
    let named = located && (names(file) || folder.is_some_and(names));
    (!named).then(|| {
        damage_violation(format!("node {} does not say that it is {}, or where: {said}", seat.0, file.display()))
    })
}

fn damage_violation(detail: String) -> GuaranteeViolation {
    GuaranteeViolation { guarantee: "a damaged log or snapshot stops the node, which says where the damage is", detail }
}
