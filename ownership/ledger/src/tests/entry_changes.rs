//! Compares the changes that an entry reports with the states before and after it.

use std::collections::{BTreeMap, BTreeSet};

use vocabulary::LedgerTime;

use crate::invariants::InvariantViolation;
use crate::*;

/// Checks that every record that differs is reported with its final state. A renewed lease is no difference.
pub(super) fn check_changes(before: &Ledger, after: &Ledger, told: &[RecordUpdate]) -> Result<(), InvariantViolation> {
    let broken = |detail| InvariantViolation { invariant: "every change is told, and nothing else", detail };
    let told: BTreeMap<&RecordKey, ChangeOp> = told.iter().map(|change| (&change.key, change.op)).collect();
    let (old, new) = (keys(before), keys(after));
    for key in old.union(&new) {
        let now = if new.contains(key) { ChangeOp::Put } else { ChangeOp::Removed };
        let said = told.get(key).copied();
        if said != Some(now) && differs(before, after, key) {
            return Err(broken(format!("{key:?} changed, {said:?} was told")));
        }
    }
    match told.iter().find(|(key, op)| (**op == ChangeOp::Put) != new.contains(**key)) {
        Some((key, op)) => Err(broken(format!("{key:?} was told {op:?}, and is not"))),
        None => Ok(()),
    }
}

fn keys(ledger: &Ledger) -> BTreeSet<RecordKey> {
    let workers = ledger.workers().map(|worker| RecordKey::Worker(worker.id));
    let sessions = ledger.sessions().map(|session| RecordKey::Session(session.id));
    let artifacts = ledger.artifacts().map(|artifact| RecordKey::Artifact(artifact.id));
    let nodes = ledger.nodes().map(|node| RecordKey::Node(node.id));
    let quotas = ledger.quotas().map(|(tenant, _)| RecordKey::Quota(tenant.clone()));
    workers.chain(sessions).chain(artifacts).chain(nodes).chain(quotas).collect()
}

fn differs(before: &Ledger, after: &Ledger, key: &RecordKey) -> bool {
    let still = |worker: &Worker| {
        let lease = if worker.is_live() { WorkerLease::Held { until: LedgerTime::default() } } else { worker.lease };
        Worker { lease, ..worker.clone() }
    };
    match key {
        RecordKey::Worker(id) => before.worker(*id).map(still) != after.worker(*id).map(still),
        RecordKey::Session(id) => before.session(*id) != after.session(*id),
        RecordKey::Artifact(id) => before.artifact(*id) != after.artifact(*id),
        RecordKey::Node(id) => before.node(*id) != after.node(*id),
        RecordKey::Quota(tenant) => before.quota(tenant) != after.quota(tenant),
    }
}
