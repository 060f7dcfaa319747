//! Older and newer binaries on the same data: upgrade, downgrade, upgrade, and no downgrade after the level is
//! raised.
//!
//! Level 1 is the level of the release before clusters existed, so its nodes stand alone: this runs on a separate
//! node.

use tokio::time::Instant;
use vocabulary::SessionId;

use super::record::NemesisRecord;
use crate::NemesisError;
use crate::check::{GuaranteeViolation, ResponseStreamEnd};
use crate::cluster::{NodeBootstrapMode, NodeStartMode};
use crate::history::{MemberSlot, OwnershipReply, OwnershipRequest, SessionOwner};
use crate::node::ProgramProcess;
use crate::streams::{StreamRequest, StreamResult, run_stream};
use crate::test_network::MAX_SLOTS;
use crate::testbed::{OPERATOR_TIMEOUT, TrialEnvironment};

const LONE_SLOT: MemberSlot = MemberSlot(MAX_SLOTS);
const OLD: u32 = 1;
const NEW: u32 = 2;
const SESSIONS: usize = 8;
const GUARANTEE: &str = "binaries of two levels work on the same data until the level is raised";

/// Old, new, old, new, raised; then the old binary must refuse to start.
pub(super) async fn mixed_releases(environment: &mut TrialEnvironment) -> Result<NemesisRecord, NemesisError> {
    let old = NodeStartMode { origin: NodeBootstrapMode::Standalone, max_level: Some(OLD) };
    let new = NodeStartMode::new(NodeBootstrapMode::Standalone);
    let mut fault = NemesisRecord::begin(environment);
    environment.cluster.wipe(LONE_SLOT)?;
    let mut running = environment.cluster.start_separate(LONE_SLOT, old).await?;
    let sessions = sessions(environment).await?;
    let mut known = write(environment, &sessions).await?;
    for (boot, word) in [(new, "newer"), (old, "older"), (new, "newer again")] {
        fault.count_fault();
        running = swap_binary(environment, running, boot).await?;
        let found = read(environment, &sessions).await?;
        if found != known {
            fault.broken.push(GuaranteeViolation {
                guarantee: GUARANTEE,
                detail: format!("{word}: {known:?} became {found:?}"),
            });
        }
        known = write(environment, &sessions).await?;
    }
    let addresses = environment.cluster.addresses();
    let level = addresses.status(LONE_SLOT).await?.feature_level;
    if level != OLD {
        fault.broken.push(GuaranteeViolation {
            guarantee: GUARANTEE,
            detail: format!("level {level} before anybody raised it"),
        });
    }
    addresses.raise_level(LONE_SLOT, NEW).await?;
    fault.count_fault();
    running.terminate().await?;
    match environment.cluster.start_expecting_failure(LONE_SLOT, old).await {
        Ok(said) if said.contains("level") => {}
        Ok(said) => fault
            .broken
            .push(GuaranteeViolation { guarantee: GUARANTEE, detail: format!("the refusal is unclear: {said}") }),
        Err(error) => fault.broken.push(GuaranteeViolation { guarantee: GUARANTEE, detail: error.to_string() }),
    }
    fault.note = format!("levels {OLD} and {NEW} on one node's data, {} writes", SESSIONS * 4);
    Ok(fault.end(environment))
}

async fn swap_binary(
    environment: &TrialEnvironment,
    process: ProgramProcess,
    boot: NodeStartMode,
) -> Result<ProgramProcess, NemesisError> {
    process.terminate().await?;
    environment.cluster.start_separate(LONE_SLOT, boot).await
}

/// Sessions in the separate node's ledger.
async fn sessions(environment: &TrialEnvironment) -> Result<Vec<SessionId>, NemesisError> {
    let addresses = environment.cluster.addresses();
    let deadline = Instant::now() + OPERATOR_TIMEOUT;
    let mut sessions = Vec::new();
    for number in 0..SESSIONS {
        let key = format!("alone-{number}");
        loop {
            let wish = StreamRequest { seat: LONE_SLOT, key: &key, tokens: 2 };
            let served = run_stream(addresses, wish, || {}).await == StreamResult::Ended(ResponseStreamEnd::Whole);
            if let Some(session) = if served { addresses.session_of(LONE_SLOT, &key).await? } else { None } {
                sessions.push(session);
                break;
            }
            if Instant::now() > deadline {
                return Err(NemesisError::Late { what: "a session on the lone node".into() });
            }
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    }
    Ok(sessions)
}

/// Releases every session and claims it for another owner; returns the grants.
async fn write(environment: &TrialEnvironment, sessions: &[SessionId]) -> Result<Vec<SessionOwner>, NemesisError> {
    let owners = environment.cluster.addresses().live_owners(LONE_SLOT).await?;
    let mut door = environment.cluster.addresses().client();
    for (at, session) in sessions.iter().enumerate() {
        let SessionOwner { owner, epoch } = door.read_owner(LONE_SLOT, *session).await?;
        if let Some(owner) = owner {
            expect_acknowledged(
                door.request(LONE_SLOT, (*session, OwnershipRequest::Release { owner, seen: epoch }), OPERATOR_TIMEOUT)
                    .await
                    .0,
            )?;
        }
        if let Some(next) = owners.get(at % owners.len().max(1)) {
            expect_acknowledged(
                door.request(LONE_SLOT, (*session, OwnershipRequest::Claim(*next)), OPERATOR_TIMEOUT).await.0,
            )?;
        }
    }
    read(environment, sessions).await
}

fn expect_acknowledged(reply: OwnershipReply) -> Result<(), NemesisError> {
    match reply {
        OwnershipReply::Granted(_) | OwnershipReply::Released => Ok(()),
        other => Err(NemesisError::Answer { who: "the lone node".into(), got: format!("{other:?} to a write") }),
    }
}

async fn read(environment: &TrialEnvironment, sessions: &[SessionId]) -> Result<Vec<SessionOwner>, NemesisError> {
    let mut door = environment.cluster.addresses().client();
    let mut found = Vec::new();
    for session in sessions {
        found.push(door.read_owner(LONE_SLOT, *session).await?);
    }
    Ok(found)
}
