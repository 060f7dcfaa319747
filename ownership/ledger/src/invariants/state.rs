//! Invariants of every state.

use std::collections::{BTreeMap, BTreeSet};

use vocabulary::{ArtifactId, Epoch};

use super::{InvariantCheckResult, ViolationDetail};
use crate::apply::control::{MAX_NODES, MAX_QUOTAS};
use crate::artifact_table::ArtifactTable;
use crate::ledger::{Ledger, LedgerIndexes};
use crate::point::WAYPOINT;
use crate::record::{Session, WorkerLease};
use crate::session_table::SessionTable;

pub(super) fn indexes_follow(ledger: &Ledger) -> InvariantCheckResult {
    ensure!(ledger.index == LedgerIndexes::of(&ledger.records), "an index differs from what the records say")
}

pub(super) fn digest_follows(ledger: &Ledger) -> InvariantCheckResult {
    let artifacts: ArtifactTable = ledger.artifacts().collect();
    let sessions: SessionTable = ledger.sessions().collect();
    let stored_digests = (ledger.records.sessions.digest, ledger.records.artifacts.digest);
    ensure!(stored_digests == (sessions.digest, artifacts.digest), "a digest differs from what the records say")
}

pub(super) fn leases_are_inverses(ledger: &Ledger) -> InvariantCheckResult {
    let live_workers = ledger.workers().filter(|worker| worker.is_live()).count();
    ensure!(live_workers == ledger.index.leases.len(), "{live_workers} held, {} indexed", ledger.index.leases.len())?;
    ledger.index.leases.iter().try_for_each(|(until, id)| {
        let lease = ledger.worker(*id).map(|worker| worker.lease);
        ensure!(lease == Some(WorkerLease::Held { until: *until }), "{id} has {lease:?}, indexed at {until}")
    })
}

pub(super) fn references_are_exact(ledger: &Ledger) -> InvariantCheckResult {
    let (mut sessions, mut children) = (BTreeMap::new(), BTreeMap::new());
    for (session, head) in ledger.sessions().flat_map(|s| s.heads.into_iter().map(move |head| (s.id, head))) {
        sessions.entry(head.artifact).or_insert_with(BTreeSet::new).insert(session);
    }
    for (child, parent) in ledger.artifacts().filter_map(|child| Some((child.id, child.parent?.artifact))) {
        children.entry(parent).or_insert_with(BTreeSet::new).insert(child);
    }
    for artifact in ledger.artifacts() {
        let holders = sessions.remove(&artifact.id).unwrap_or_default();
        ensure!(holders.iter().copied().eq(artifact.sessions.iter()), "sessions of {}", artifact.id)?;
        let child_count = children.remove(&artifact.id).unwrap_or_default();
        ensure!(child_count.iter().copied().eq(artifact.children.iter()), "children of {}", artifact.id)?;
    }
    let dangling = |session: Session| session.heads.iter().any(|head| ledger.artifact(head.artifact).is_none());
    ensure!(!ledger.sessions().any(dangling), "a head points at no extent")
}

/// Checks that a child starts after its parent's start, so that parent links form no cycle.
pub(super) fn forks_are_acyclic(ledger: &Ledger) -> InvariantCheckResult {
    ledger.artifacts().try_for_each(|child| {
        let Some(attached) = child.parent else { return Ok(()) };
        let parent = ledger
            .artifact(attached.artifact)
            .ok_or_else(|| ViolationDetail(format!("{} hangs on nothing", child.id)))?;
        let has_boundary = parent.boundaries.iter().any(|boundary| boundary.point == attached.at);
        ensure!(has_boundary, "{} hangs on a point that {} does not keep", child.id, parent.id)?;
        ensure!(parent.from() < child.from() && child.from() < child.end().blocks, "{} is empty", child.id)
    })
}

pub(super) fn boundaries_are_unique(ledger: &Ledger) -> InvariantCheckResult {
    let boundary_count: usize = ledger.artifacts().map(|artifact| artifact.boundaries.len()).sum();
    let indexed = ledger.index.boundaries.len();
    ensure!(boundary_count == indexed, "{boundary_count} boundaries are kept, {indexed} can be found")
}

pub(super) fn waypoints_are_kept(ledger: &Ledger) -> InvariantCheckResult {
    ledger.artifacts().try_for_each(|artifact| {
        let rises = artifact.boundaries.windows(2).all(|pair| pair[0].point.blocks < pair[1].point.blocks);
        let expected = artifact.end().blocks.0 / WAYPOINT - artifact.from().0 / WAYPOINT;
        let waypoints = artifact.boundaries.iter().filter(|boundary| boundary.point.blocks.0 % WAYPOINT == 0).count();
        ensure!(rises && waypoints as u64 == expected, "{}: {waypoints} waypoints of {expected}", artifact.id)
    })
}

pub(super) fn copies_match(ledger: &Ledger) -> InvariantCheckResult {
    ledger.artifacts().try_for_each(|artifact| {
        let sealed = |point| artifact.boundaries.iter().any(|boundary| boundary.point == point);
        let match_all = artifact.replicas.iter().all(|copy| sealed(copy.upto) && artifact.owner != Some(copy.holder));
        let ordered = artifact.replicas.windows(2).all(|pair| pair[0].holder < pair[1].holder);
        ensure!(match_all && ordered, "copies of {}", artifact.id)
    })
}

pub(super) fn heads_are_apart(ledger: &Ledger) -> InvariantCheckResult {
    ledger.sessions().try_for_each(|session| {
        let heads = &session.heads;
        let apart = |a: usize, b: usize| a == b || !ledger.descends_from(&heads[a], &heads[b]);
        let all = (0..heads.len()).all(|a| (0..heads.len()).all(|b| apart(a, b)));
        ensure!(all, "heads of {}", session.id)
    })
}

pub(super) fn tenants_are_apart(ledger: &Ledger) -> InvariantCheckResult {
    let tenant = |id: ArtifactId| ledger.records.artifacts.origin(id);
    ledger.artifacts().try_for_each(|artifact| {
        let parent = artifact.parent.and_then(|parent| tenant(parent.artifact));
        let own = &artifact.origin;
        let same = parent.is_none_or(|parent| parent.scope() == own.scope() && parent.root == own.root);
        ensure!(same, "{} extends another tenant's extent", artifact.id)
    })?;
    ledger.sessions().try_for_each(|session| {
        let own = |id| tenant(id).is_some_and(|o| o.tenant == session.tenant && o.model == session.model);
        ensure!(session.heads.iter().all(|head| own(head.artifact)), "heads of {}", session.id)
    })
}

pub(super) fn grants_are_past(ledger: &Ledger) -> InvariantCheckResult {
    let now = (ledger.generation(), ledger.applied());
    let past = |epoch: Epoch| (epoch.generation, epoch.index) <= now;
    let workers = ledger.workers().map(|worker| worker.epoch);
    let sessions = ledger.sessions().map(|session| session.epoch);
    let boundaries = ledger.artifacts().flat_map(|a| a.boundaries.into_iter().map(|boundary| boundary.epoch));
    let mut all = workers.chain(sessions).chain(ledger.artifacts().map(|a| a.epoch)).chain(boundaries);
    ensure!(all.all(past), "a grant lies in the future")
}

pub(super) fn tables_are_bounded(ledger: &Ledger) -> InvariantCheckResult {
    let (limits, records) = (ledger.limits(), &ledger.records);
    let within = [
        (records.workers.len(), limits.workers),
        (records.sessions.len(), limits.sessions),
        (records.artifacts.len(), limits.artifacts),
        (records.intents.len(), limits.intents),
        (records.clients.len(), limits.clients),
        (ledger.nodes().count(), MAX_NODES as u32),
        (ledger.quota_count(), MAX_QUOTAS as u32),
        (records.clients.values().map(|client| client.outcomes().len()).max().unwrap_or(0), limits.outcomes),
        (ledger.sessions().map(|session| session.heads.len()).max().unwrap_or(0), limits.heads),
        (ledger.artifacts().map(|artifact| artifact.replicas.len()).max().unwrap_or(0), limits.replicas),
    ];
    let broken = within.iter().position(|(len, limit)| *len > *limit as usize);
    ensure!(broken.is_none(), "table {broken:?} holds {within:?}")
}
