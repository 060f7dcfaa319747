//! Backups: saved while clients write, restored as a separate cluster and compared with the history, then restored a
//! second time.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde::Deserialize;
use tokio::process::Command;
use tokio::time::Instant;
use vocabulary::{Epoch, SessionId};

use super::record::NemesisRecord;
use crate::NemesisError;
use crate::api_client::{ApiClient, MembershipChange};
use crate::check::{self, FinalOwners, GuaranteeViolation, NodeStateHash};
use crate::cluster::{NodeBootstrapMode, NodeStartMode};
use crate::history::{MemberSlot, OwnershipReply, OwnershipRequest, SessionOwner};
use crate::node::ProgramProcess;
use crate::test_network::{MAX_SLOTS, cut_tail};
use crate::testbed::{OPERATOR_TIMEOUT, TrialEnvironment};

/// Slots of the restored cluster, which the cluster under test never uses.
const RESTORED_SLOTS: [MemberSlot; 3] = [MemberSlot(MAX_SLOTS - 2), MemberSlot(MAX_SLOTS - 1), MemberSlot(MAX_SLOTS)];
const GUARANTEE: &str = "a restored backup holds all that was acknowledged before it";
/// Number of sessions written to in the restored cluster.
const WRITTEN_SESSIONS: usize = 12;
/// Writes to each of them in the first cluster of a backup; the second gets fewer.
const WRITES_PER_SESSION: usize = 4;

/// A snapshot saved by `ctl`.
#[derive(Deserialize)]
struct SnapshotSaveOutput {
    applied: u64,
}

/// Saves a backup of the leader and one of another node, and restores each as a cluster of three.
pub(super) async fn backup(environment: &mut TrialEnvironment) -> Result<NemesisRecord, NemesisError> {
    let mut fault = NemesisRecord::begin(environment);
    let leader = environment.leader().await?;
    let others = environment.others(leader);
    let other = environment.rng.pick(&others).copied().unwrap_or(leader);
    let mut notes = Vec::new();
    for (name, seat) in [("leader", leader), ("other", other)] {
        fault.count_fault();
        let file = environment
            .cluster
            .folder(seat)
            .with_file_name(format!("backup-{name}-{}", environment.rng.below(1 << 32)));
        let acknowledged = environment.history.read(|kept| check::newest_acknowledged(&kept.operations));
        let SnapshotSaveOutput { applied } = save(environment, seat, &file).await?;
        let saved = holdings(environment, &file)?;
        // The backup may contain writes still in flight; pausing the clients makes sure that their replies are
        // recorded.
        drop(environment.load.pause().await);
        let (history, held) = (environment.history.clone(), saved.clone());
        fault
            .broken
            .extend(check::run_blocking(move || check::check_backup(&history.snapshot(), &held, applied)).await?);
        if seat == leader && applied < acknowledged {
            let detail = format!("it ends at entry {applied}; {acknowledged} was acknowledged before it was asked for");
            fault.broken.push(GuaranteeViolation { guarantee: GUARANTEE, detail });
        }
        fault.broken.extend(check_truncated_backup(environment, &file).await?);
        notes.push(format!("{name} to entry {applied}"));
        let restored = restore(environment, &file).await?;
        let (first, broken) = check_restored(environment, &saved, WRITES_PER_SESSION).await?;
        fault.broken.extend(broken);
        drop(restored);
        // Simulates that the first restored cluster failed: the same backup is restored again and has written less so
        // far.
        if seat == leader {
            fault.count_fault();
            let again = restore(environment, &file).await?;
            let (second, broken) = check_restored(environment, &saved, 1).await?;
            fault.broken.extend(broken);
            fault.broken.extend(check_outranks(&first, &second));
            drop(again);
        }
        std::fs::remove_file(&file).map_err(NemesisError::system(file.display().to_string()))?;
    }
    fault.note = format!("restored on {} nodes: {}", RESTORED_SLOTS.len(), notes.join(", "));
    Ok(fault.end(environment))
}

async fn save(
    environment: &TrialEnvironment,
    slot: MemberSlot,
    file: &Path,
) -> Result<SnapshotSaveOutput, NemesisError> {
    let endpoint = format!("http://{}", environment.cluster.addresses().operator(slot));
    let file = file.display().to_string();
    let output = run_ctl(environment, &["--endpoint", &endpoint, "-o", "json", "snapshot", "save", &file]).await?;
    let output = output.success("ctl snapshot save")?;
    let odd =
        |error: serde_json::Error| NemesisError::Answer { who: "ctl snapshot save".into(), got: error.to_string() };
    serde_json::from_str(&output).map_err(odd)
}

/// Result of a `ctl` call.
#[derive(Debug)]
enum CtlResult {
    /// Success, with its output.
    Done(String),
    /// Failure, with its error.
    Refused(String),
}

impl CtlResult {
    fn success(self, who: &str) -> Result<String, NemesisError> {
        match self {
            CtlResult::Done(said) => Ok(said),
            CtlResult::Refused(got) => Err(NemesisError::Answer { who: who.into(), got }),
        }
    }
}

async fn run_ctl(environment: &TrialEnvironment, arguments: &[&str]) -> Result<CtlResult, NemesisError> {
    let mut command = Command::new(environment.cluster.binary());
    command.arg("ctl").args(arguments).stdin(Stdio::null()).kill_on_drop(true);
    let output = command.output().await.map_err(NemesisError::system("run ctl"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    Ok(if output.status.success() {
        CtlResult::Done(text(&output.stdout))
    } else {
        CtlResult::Refused(text(&output.stderr))
    })
}

/// Checks that a truncated backup is refused and leaves no data directory behind.
async fn check_truncated_backup(
    environment: &mut TrialEnvironment,
    file: &Path,
) -> Result<Option<GuaranteeViolation>, NemesisError> {
    let part = file.with_extension("part");
    std::fs::copy(file, &part).map_err(NemesisError::system(part.display().to_string()))?;
    let bytes = 1 + environment.rng.below(64);
    cut_tail(&part, bytes)?;
    let folder = part.with_extension("restored");
    let paths = [part.display().to_string(), folder.display().to_string()];
    let tried = run_ctl(environment, &["snapshot", "restore", &paths[0], "--data-dir", &paths[1]]).await?;
    let held = matches!(&tried, CtlResult::Refused(said) if said.contains(&paths[0]) && said.contains("offset"))
        && !folder.exists();
    let detail = || format!("{bytes} bytes were cut off: {tried:?}, a directory is there: {}", folder.exists());
    std::fs::remove_file(&part).map_err(NemesisError::system(paths[0].clone()))?;
    Ok((!held).then(|| GuaranteeViolation {
        guarantee: "a cut backup is refused with the file and the offset",
        detail: detail(),
    }))
}

/// Restores a backup as a cluster of three.
async fn restore(environment: &mut TrialEnvironment, file: &Path) -> Result<Vec<ProgramProcess>, NemesisError> {
    for seat in RESTORED_SLOTS {
        environment.cluster.wipe(seat)?;
    }
    let (founder, file) = (RESTORED_SLOTS[0], file.display().to_string());
    let folder: PathBuf = environment.cluster.folder(founder);
    let done =
        run_ctl(environment, &["snapshot", "restore", &file, "--data-dir", &folder.display().to_string()]).await?;
    done.success("ctl snapshot restore")?;
    let mut running =
        vec![environment.cluster.start_separate(founder, NodeStartMode::new(NodeBootstrapMode::Founder)).await?];
    for seat in &RESTORED_SLOTS[1..] {
        running.push(
            environment
                .cluster
                .start_separate(*seat, NodeStartMode::new(NodeBootstrapMode::JoinsThrough(founder)))
                .await?,
        );
    }
    promote(environment).await?;
    Ok(running)
}

async fn promote(environment: &TrialEnvironment) -> Result<(), NemesisError> {
    let (founder, deadline) = (RESTORED_SLOTS[0], Instant::now() + OPERATOR_TIMEOUT);
    loop {
        let tried = async {
            let mut nodes = Vec::new();
            for seat in &RESTORED_SLOTS[1..] {
                nodes.push(environment.cluster.member(*seat, founder).await?.node_id);
            }
            environment.cluster.addresses().change(founder, &MembershipChange::Promote(nodes)).await
        };
        match tried.await {
            Ok(()) => return Ok(()),
            Err(error) if Instant::now() > deadline => return Err(error),
            // A learner that has not joined or caught up yet.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Reads from the backup itself who owns which session.
fn holdings(environment: &TrialEnvironment, file: &Path) -> Result<FinalOwners, NemesisError> {
    let unreadable = |error: ownership::LedgerNodeError| NemesisError::Answer {
        who: file.display().to_string(),
        got: error.to_string(),
    };
    let ledger = ownership::load(file).map_err(unreadable)?;
    let sessions = environment.load.subjects().iter().filter_map(|subject| Some((*subject, ledger.session(*subject)?)));
    Ok(sessions
        .map(|(subject, session)| (subject, SessionOwner { owner: session.owner, epoch: session.epoch }))
        .collect())
}

/// Checks that every grant of the second cluster restored from a backup is newer than all grants of the first one, so
/// that their holders are fenced off.
fn check_outranks(first: &[Epoch], second: &[Epoch]) -> Option<GuaranteeViolation> {
    let (newest, oldest) = first.iter().max().zip(second.iter().min())?;
    let detail = format!("the first restored cluster granted {newest}, the second one, later, {oldest}");
    (oldest <= newest)
        .then_some(GuaranteeViolation { guarantee: "epochs rise over two restores of one backup", detail })
}

/// Compares the restored cluster with the backup through each of its nodes, checks that its grants (`writes` per
/// session) outrank all earlier ones, and that clients of the old cluster are fenced off. Returns the grants.
async fn check_restored(
    environment: &TrialEnvironment,
    saved: &FinalOwners,
    writes: usize,
) -> Result<(Vec<Epoch>, Vec<GuaranteeViolation>), NemesisError> {
    let (mut grants, mut broken) = (Vec::new(), Vec::new());
    let mut door = environment.cluster.addresses().client();
    let owners = environment.cluster.addresses().live_owners(RESTORED_SLOTS[0]).await?;
    for (at, (subject, before)) in saved.iter().enumerate() {
        let found = door.read_owner(RESTORED_SLOTS[at % RESTORED_SLOTS.len()], *subject).await?;
        if found.owner != before.owner {
            let detail = format!("{subject} was {before:?} in the backup, and is {found:?}");
            broken.push(GuaranteeViolation { guarantee: GUARANTEE, detail });
        }
        if at >= WRITTEN_SESSIONS || owners.is_empty() {
            continue;
        }
        let mut seen = found.epoch;
        for to in owners.iter().cycle().take(writes) {
            let (answer, _) = door
                .request(RESTORED_SLOTS[1], (*subject, OwnershipRequest::Migrate { to: *to, seen }), OPERATOR_TIMEOUT)
                .await;
            match answer {
                OwnershipReply::Granted(now) if now.generation > before.epoch.generation => {
                    grants.push(now);
                    seen = now;
                }
                _ => {
                    let detail = format!("{subject} was {before:?} in the backup; {answer:?} to a migration");
                    broken.push(GuaranteeViolation {
                        guarantee: "a restored cluster's grants outrank all earlier ones",
                        detail,
                    });
                    break;
                }
            }
        }
        broken.extend(check_fencing(&mut door, (*subject, *before)).await?);
    }
    broken.extend(check_equal(environment).await?);
    broken.extend(crate::snapshot::check(environment, RESTORED_SLOTS[2]).await?);
    Ok((grants, broken))
}

/// Checks that a client of the still running old cluster cannot release anything here with an epoch it saw there.
async fn check_fencing(
    door: &mut ApiClient,
    (subject, before): (SessionId, SessionOwner),
) -> Result<Option<GuaranteeViolation>, NemesisError> {
    let Some(owner) = before.owner else { return Ok(None) };
    let now = door.read_owner(RESTORED_SLOTS[0], subject).await?;
    let (answer, _) = door
        .request(
            RESTORED_SLOTS[0],
            (subject, OwnershipRequest::Release { owner, seen: before.epoch }),
            OPERATOR_TIMEOUT,
        )
        .await;
    let then = door.read_owner(RESTORED_SLOTS[0], subject).await?;
    let detail = format!("{subject} was {now:?}; {answer:?} to a release that had seen {before:?}, and it is {then:?}");
    Ok((then != now)
        .then_some(GuaranteeViolation { guarantee: "epochs from before a backup fence nothing after it", detail }))
}

async fn check_equal(environment: &TrialEnvironment) -> Result<Vec<GuaranteeViolation>, NemesisError> {
    let deadline = Instant::now() + OPERATOR_TIMEOUT;
    loop {
        let mut states: Vec<NodeStateHash> = Vec::new();
        for seat in RESTORED_SLOTS {
            let (applied, hash) = environment.cluster.addresses().state_hash(seat).await?;
            states.push(NodeStateHash { seat, applied, hash });
        }
        if states.iter().all(|state| state.applied == states[0].applied) {
            return Ok(check::check_equal_states(&states));
        }
        if Instant::now() > deadline {
            return Err(NemesisError::Late { what: format!("equal applied indexes after a restore: {states:?}") });
        }
    }
}
