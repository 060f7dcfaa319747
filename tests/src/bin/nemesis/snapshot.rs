//! Checks a node's stored ledger against the ledger's own invariants.

use crate::NemesisError;
use crate::check::GuaranteeViolation;
use crate::history::MemberSlot;
use crate::testbed::TrialEnvironment;

/// Downloads a snapshot of a running node, as a backup would, parses it, and checks its invariants.
pub(crate) async fn check(
    environment: &TrialEnvironment,
    slot: MemberSlot,
) -> Result<Vec<GuaranteeViolation>, NemesisError> {
    let bytes = environment.cluster.addresses().snapshot(slot).await?;
    let path = environment.cluster.folder(slot).with_extension("snapshot");
    std::fs::write(&path, bytes).map_err(NemesisError::system(path.display().to_string()))?;
    let unreadable = |detail: String| GuaranteeViolation { guarantee: "a snapshot can be read", detail };
    let ledger = match ownership::load(&path) {
        Ok(ledger) => ledger,
        Err(error) => return Ok(vec![unreadable(error.to_string())]),
    };
    let violated = ledger::invariants::check(&ledger).err();
    let broken = |violation: ledger::invariants::InvariantViolation| GuaranteeViolation {
        guarantee: violation.invariant,
        detail: format!("node {} at entry {}: {}", slot.0, ledger.applied(), violation.detail),
    };
    Ok(violated.map(broken).into_iter().collect())
}
