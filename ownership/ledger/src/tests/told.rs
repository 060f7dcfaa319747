//! What an entry tells of a step, held against the states before and after it.

use std::collections::{BTreeMap, BTreeSet};

use vocabulary::LedgerTime;

use crate::invariants::Violation;
use crate::*;

/// A record that differs is told, as it is now; a renewed lease is no difference.
pub(super) fn check_changes(before: &Ledger, after: &Ledger, told: &[Changed]) -> Result<(), Violation> {
    let broken = |detail| Violation { invariant: "every change is told, and nothing else", detail };
    let told: BTreeMap<&Key, Op> = told.iter().map(|change| (&change.key, change.op)).collect();
    let (old, new) = (keys(before), keys(after));
    for key in old.union(&new) {
        let now = if new.contains(key) { Op::Put } else { Op::Gone };
        let said = told.get(key).copied();
        if said != Some(now) && differs(before, after, key) {
            return Err(broken(format!("{key:?} changed, {said:?} was told")));
        }
    }
    match told.iter().find(|(key, op)| (**op == Op::Put) != new.contains(**key)) {
        Some((key, op)) => Err(broken(format!("{key:?} was told {op:?}, and is not"))),
        None => Ok(()),
    }
}

fn keys(ledger: &Ledger) -> BTreeSet<Key> {
    let workers = ledger.workers().map(|worker| Key::Worker(worker.id));
    let sessions = ledger.sessions().map(|session| Key::Session(session.id));
    let artifacts = ledger.artifacts().map(|artifact| Key::Artifact(artifact.id));
    let nodes = ledger.nodes().map(|node| Key::Node(node.id));
    let quotas = ledger.quotas().map(|(tenant, _)| Key::Quota(tenant.clone()));
    workers.chain(sessions).chain(artifacts).chain(nodes).chain(quotas).collect()
}

fn differs(before: &Ledger, after: &Ledger, key: &Key) -> bool {
    let still = |worker: &Worker| {
        let lease = if worker.is_live() { Lease::Held { until: LedgerTime::default() } } else { worker.lease };
        Worker { lease, ..worker.clone() }
    };
    match key {
        Key::Worker(id) => before.worker(*id).map(still) != after.worker(*id).map(still),
        Key::Session(id) => before.session(*id) != after.session(*id),
        Key::Artifact(id) => before.artifact(*id) != after.artifact(*id),
        Key::Node(id) => before.node(*id) != after.node(*id),
        Key::Quota(tenant) => before.quota(tenant) != after.quota(tenant),
    }
}
