//! Invariants of every transition from one state to a later one.

use super::{InvariantCheckResult, ViolationDetail};
use crate::ledger::Ledger;
use crate::record::WorkerLease;

pub(super) fn one_owner_per_epoch(before: &Ledger, after: &Ledger) -> InvariantCheckResult {
    for old in before.artifacts() {
        let new = after.artifact(old.id).filter(|new| new.epoch == old.epoch);
        ensure!(new.is_none_or(|new| new.owner == old.owner), "{} at {}", old.id, old.epoch)?;
    }
    for old in before.sessions() {
        let new = after.session(old.id).filter(|new| new.epoch == old.epoch);
        ensure!(new.is_none_or(|new| new.owner == old.owner), "{} at {}", old.id, old.epoch)?;
    }
    Ok(())
}

pub(super) fn tokens_rise(before: &Ledger, after: &Ledger) -> InvariantCheckResult {
    ensure!(before.applied() <= after.applied(), "the applied index fell")?;
    let workers = before.workers().filter_map(|old| Some((old.epoch, after.worker(old.id)?.epoch)));
    let sessions = before.sessions().filter_map(|old| Some((old.epoch, after.session(old.id)?.epoch)));
    let artifacts = before.artifacts().filter_map(|old| Some((old.epoch, after.artifact(old.id)?.epoch)));
    let mut all = workers.chain(sessions).chain(artifacts);
    all.try_for_each(|(old, new)| {
        ensure!(old == new || (old < new && new.index > before.applied()), "{old} became {new}")
    })
}

pub(super) fn no_lease_revives(before: &Ledger, after: &Ledger) -> InvariantCheckResult {
    before.workers().filter(|old| !old.is_live()).try_for_each(|old| {
        let new = after.worker(old.id).filter(|new| new.is_live());
        ensure!(new.is_none_or(|new| new.epoch > old.epoch), "{} without a grant", old.id)
    })
}

pub(super) fn no_lease_ends_early(before: &Ledger, after: &Ledger) -> InvariantCheckResult {
    before.workers().try_for_each(|old| {
        let (WorkerLease::Held { until }, Some(new)) = (old.lease, after.worker(old.id)) else { return Ok(()) };
        let early = matches!(new.lease, WorkerLease::Expired { at } if at < until)
            || matches!(new.lease, WorkerLease::Held { until: now } if now < until && new.incarnation == old.incarnation);
        ensure!(!early, "{} was promised until {until}, now {:?}", old.id, new.lease)
    })
}

pub(super) fn sealed_never_changes(before: &Ledger, after: &Ledger) -> InvariantCheckResult {
    before.artifacts().try_for_each(|old| {
        let Some(new) = after.artifact(old.id) else { return Ok(()) };
        let same = (&old.origin, old.parent) == (&new.origin, new.parent) && old.end().blocks <= new.end().blocks;
        let mut boundaries = new.boundaries.iter().filter(|boundary| boundary.point.blocks <= old.end().blocks);
        let unchanged = boundaries.all(|boundary| old.boundaries.contains(boundary));
        ensure!(same && unchanged, "{}", old.id)
    })
}

pub(super) fn clock_never_runs_back(before: &Ledger, after: &Ledger) -> InvariantCheckResult {
    ensure!(before.now() <= after.now(), "{} became {}", before.now(), after.now())
}

pub(super) fn level_never_falls(before: &Ledger, after: &Ledger) -> InvariantCheckResult {
    ensure!(before.level() <= after.level(), "{} became {}", before.level(), after.level())
}

/// Checks that an id belongs to one nonce, that a retired node does not come back, and that a new node's id is higher
/// than all before it.
pub(super) fn nodes_are_never_reused(before: &Ledger, after: &Ledger) -> InvariantCheckResult {
    let last = |ledger: &Ledger| ledger.records.cluster.as_ref().map_or(0, |cluster| cluster.last_node.0);
    ensure!(last(before) <= last(after), "the last id fell from {} to {}", last(before), last(after))?;
    after.nodes().try_for_each(|new| match before.node(new.id) {
        Some(old) => ensure!(old.nonce == new.nonce && (old.is_member() || !new.is_member()), "node {}", new.id),
        None => ensure!(new.id.0 > last(before) && new.id.0 <= last(after), "node {} is no new id", new.id),
    })
}

pub(super) fn outcomes_stay(before: &Ledger, after: &Ledger) -> InvariantCheckResult {
    for (id, old) in &before.records.clients {
        let Some(new) = after.records.clients.get(id) else { continue };
        let differs = |(serial, outcome)| new.outcomes().get(serial).is_some_and(|now| now != outcome);
        ensure!(!old.outcomes().iter().any(differs), "{id}")?;
    }
    Ok(())
}
