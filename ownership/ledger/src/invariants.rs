//! What must hold in every state and over every step: named checks, for unit, simulation and cluster tests alike.

use std::collections::{BTreeMap, BTreeSet};

use vocabulary::{ArtifactId, Epoch};

use crate::apply::control::{MAX_NODES, MAX_QUOTAS};
use crate::ledger::{Indexes, Ledger};
use crate::point::WAYPOINT;
use crate::record::{Lease, Session};

/// A broken invariant.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{invariant}: {detail}")]
pub struct Violation {
    /// Which one.
    pub invariant: &'static str,
    /// Where.
    pub detail: String,
}

/// Where a check found its property broken.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct Broken(pub String);

/// What a check says.
pub type Checked = Result<(), Broken>;

/// A property of one state.
pub type StateCheck = fn(&Ledger) -> Checked;

/// A property of two states, the second of which came out of the first.
pub type StepCheck = fn(&Ledger, &Ledger) -> Checked;

/// Properties of every state.
pub const STATE: &[(&str, StateCheck)] = &[
    ("indexes follow from the records", indexes_follow),
    ("expiry index and lease table are inverses", leases_are_inverses),
    ("references equal what is referenced", references_are_exact),
    ("the fork graph is acyclic", forks_are_acyclic),
    ("a boundary is kept by one extent", boundaries_are_unique),
    ("waypoints are kept without a gap", waypoints_are_kept),
    ("a copy's digest equals the sealed digest", copies_match),
    ("no head is an ancestor of another", heads_are_apart),
    ("nothing is shared across tenants", tenants_are_apart),
    ("every grant lies in the past", grants_are_past),
    ("every table is bounded", tables_are_bounded),
];

/// Properties of every step.
pub const STEP: &[(&str, StepCheck)] = &[
    ("one owner per epoch", one_owner_per_epoch),
    ("fencing tokens rise", tokens_rise),
    ("no lease revives without a new grant", no_lease_revives),
    ("no lease ends early", no_lease_ends_early),
    ("a sealed artifact never changes", sealed_never_changes),
    ("the clock never runs backwards", clock_never_runs_back),
    ("the feature level never falls", level_never_falls),
    ("node ids are never reused", nodes_are_never_reused),
    ("a replayed serial returns the first outcome", outcomes_stay),
];

/// Checks one state.
pub fn check(ledger: &Ledger) -> Result<(), Violation> {
    STATE
        .iter()
        .try_for_each(|(invariant, check)| check(ledger).map_err(|broken| Violation { invariant, detail: broken.0 }))
}

/// Checks a step from one state to a later one.
pub fn check_step(before: &Ledger, after: &Ledger) -> Result<(), Violation> {
    let violation = |invariant, broken: Broken| Violation { invariant, detail: broken.0 };
    STEP.iter().try_for_each(|(invariant, check)| check(before, after).map_err(|broken| violation(invariant, broken)))
}

/// Fails a check unless something holds.
macro_rules! ensure {
    ($holds:expr, $($detail:tt)+) => {
        match $holds {
            true => Ok(()),
            false => Err(Broken(format!($($detail)+))),
        }
    };
}

fn indexes_follow(ledger: &Ledger) -> Checked {
    ensure!(ledger.index == Indexes::of(&ledger.records), "an index differs from what the records say")
}

fn leases_are_inverses(ledger: &Ledger) -> Checked {
    let held = ledger.workers().filter(|worker| worker.is_live()).count();
    ensure!(held == ledger.index.leases.len(), "{held} held, {} indexed", ledger.index.leases.len())?;
    ledger.index.leases.iter().try_for_each(|(until, id)| {
        let lease = ledger.worker(*id).map(|worker| worker.lease);
        ensure!(lease == Some(Lease::Held { until: *until }), "{id} has {lease:?}, indexed at {until}")
    })
}

fn references_are_exact(ledger: &Ledger) -> Checked {
    let (mut sessions, mut children) = (BTreeMap::new(), BTreeMap::new());
    for (session, head) in ledger.sessions().flat_map(|s| s.heads.iter().map(|head| (s.id, head))) {
        sessions.entry(head.artifact).or_insert_with(BTreeSet::new).insert(session);
    }
    for (child, parent) in ledger.artifacts().filter_map(|child| Some((child.id, child.parent?.artifact))) {
        children.entry(parent).or_insert_with(BTreeSet::new).insert(child);
    }
    for artifact in ledger.artifacts() {
        let held = sessions.remove(&artifact.id).unwrap_or_default();
        ensure!(held.iter().copied().eq(artifact.sessions.iter()), "sessions of {}", artifact.id)?;
        let held = children.remove(&artifact.id).unwrap_or_default();
        ensure!(held.iter().copied().eq(artifact.children.iter()), "children of {}", artifact.id)?;
    }
    let dangling = |session: &Session| session.heads.iter().any(|head| ledger.artifact(head.artifact).is_none());
    ensure!(!ledger.sessions().any(dangling), "a head points at no extent")
}

/// A child starts after its parent's start, so no path of parents is a ring.
fn forks_are_acyclic(ledger: &Ledger) -> Checked {
    ledger.artifacts().try_for_each(|child| {
        let Some(attached) = child.parent else { return Ok(()) };
        let parent =
            ledger.artifact(attached.artifact).ok_or_else(|| Broken(format!("{} hangs on nothing", child.id)))?;
        let kept = parent.boundaries.iter().any(|boundary| boundary.point == attached.at);
        ensure!(kept, "{} hangs on a point that {} does not keep", child.id, parent.id)?;
        ensure!(parent.from() < child.from() && child.from() < child.end().blocks, "{} is empty", child.id)
    })
}

fn boundaries_are_unique(ledger: &Ledger) -> Checked {
    let kept: usize = ledger.artifacts().map(|artifact| artifact.boundaries.len()).sum();
    let indexed = ledger.index.boundaries.len();
    ensure!(kept == indexed, "{kept} boundaries are kept, {indexed} can be found")
}

fn waypoints_are_kept(ledger: &Ledger) -> Checked {
    ledger.artifacts().try_for_each(|artifact| {
        let rises = artifact.boundaries.windows(2).all(|pair| pair[0].point.blocks < pair[1].point.blocks);
        let wanted = artifact.end().blocks.0 / WAYPOINT - artifact.from().0 / WAYPOINT;
        let kept = artifact.boundaries.iter().filter(|boundary| boundary.point.blocks.0 % WAYPOINT == 0).count();
        ensure!(rises && kept as u64 == wanted, "{}: {kept} waypoints of {wanted}", artifact.id)
    })
}

fn copies_match(ledger: &Ledger) -> Checked {
    ledger.artifacts().try_for_each(|artifact| {
        let sealed = |point| artifact.boundaries.iter().any(|boundary| boundary.point == point);
        let match_all = artifact.replicas.iter().all(|copy| sealed(copy.upto) && artifact.owner != Some(copy.holder));
        let ordered = artifact.replicas.windows(2).all(|pair| pair[0].holder < pair[1].holder);
        ensure!(match_all && ordered, "copies of {}", artifact.id)
    })
}

fn heads_are_apart(ledger: &Ledger) -> Checked {
    ledger.sessions().try_for_each(|session| {
        let heads = &session.heads;
        let apart = |a: usize, b: usize| a == b || !ledger.descends(&heads[a], &heads[b]);
        let all = (0..heads.len()).all(|a| (0..heads.len()).all(|b| apart(a, b)));
        ensure!(all, "heads of {}", session.id)
    })
}

fn tenants_are_apart(ledger: &Ledger) -> Checked {
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

fn grants_are_past(ledger: &Ledger) -> Checked {
    let now = (ledger.generation(), ledger.applied());
    let past = |epoch: Epoch| (epoch.generation, epoch.index) <= now;
    let workers = ledger.workers().map(|worker| worker.epoch);
    let sessions = ledger.sessions().map(|session| session.epoch);
    let boundaries = ledger.artifacts().flat_map(|a| a.boundaries.into_iter().map(|boundary| boundary.epoch));
    let mut all = workers.chain(sessions).chain(ledger.artifacts().map(|a| a.epoch)).chain(boundaries);
    ensure!(all.all(past), "a grant lies in the future")
}

fn tables_are_bounded(ledger: &Ledger) -> Checked {
    let (limits, records) = (ledger.limits(), &ledger.records);
    let within = [
        (records.workers.len(), limits.workers),
        (records.sessions.len(), limits.sessions),
        (records.artifacts.len(), limits.artifacts),
        (records.intents.len(), limits.intents),
        (records.clients.len(), limits.clients),
        (ledger.nodes().count(), MAX_NODES as u32),
        (ledger.quotas().count(), MAX_QUOTAS as u32),
        (records.clients.values().map(|client| client.outcomes().len()).max().unwrap_or(0), limits.outcomes),
        (ledger.sessions().map(|session| session.heads.len()).max().unwrap_or(0), limits.heads),
        (ledger.artifacts().map(|artifact| artifact.replicas.len()).max().unwrap_or(0), limits.replicas),
    ];
    let broken = within.iter().position(|(len, limit)| *len > *limit as usize);
    ensure!(broken.is_none(), "table {broken:?} holds {within:?}")
}

fn one_owner_per_epoch(before: &Ledger, after: &Ledger) -> Checked {
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

fn tokens_rise(before: &Ledger, after: &Ledger) -> Checked {
    ensure!(before.applied() <= after.applied(), "the applied index fell")?;
    let workers = before.workers().filter_map(|old| Some((old.epoch, after.worker(old.id)?.epoch)));
    let sessions = before.sessions().filter_map(|old| Some((old.epoch, after.session(old.id)?.epoch)));
    let artifacts = before.artifacts().filter_map(|old| Some((old.epoch, after.artifact(old.id)?.epoch)));
    let mut all = workers.chain(sessions).chain(artifacts);
    all.try_for_each(|(old, new)| {
        ensure!(old == new || (old < new && new.index > before.applied()), "{old} became {new}")
    })
}

fn no_lease_revives(before: &Ledger, after: &Ledger) -> Checked {
    before.workers().filter(|old| !old.is_live()).try_for_each(|old| {
        let new = after.worker(old.id).filter(|new| new.is_live());
        ensure!(new.is_none_or(|new| new.epoch > old.epoch), "{} without a grant", old.id)
    })
}

fn no_lease_ends_early(before: &Ledger, after: &Ledger) -> Checked {
    before.workers().try_for_each(|old| {
        let (Lease::Held { until }, Some(new)) = (old.lease, after.worker(old.id)) else { return Ok(()) };
        let early = matches!(new.lease, Lease::Expired { at } if at < until)
            || matches!(new.lease, Lease::Held { until: now } if now < until && new.incarnation == old.incarnation);
        ensure!(!early, "{} was promised until {until}, now {:?}", old.id, new.lease)
    })
}

fn sealed_never_changes(before: &Ledger, after: &Ledger) -> Checked {
    before.artifacts().try_for_each(|old| {
        let Some(new) = after.artifact(old.id) else { return Ok(()) };
        let same = (&old.origin, old.parent) == (&new.origin, new.parent) && old.end().blocks <= new.end().blocks;
        let mut kept = new.boundaries.iter().filter(|boundary| boundary.point.blocks <= old.end().blocks);
        let unchanged = kept.all(|boundary| old.boundaries.contains(boundary));
        ensure!(same && unchanged, "{}", old.id)
    })
}

fn clock_never_runs_back(before: &Ledger, after: &Ledger) -> Checked {
    ensure!(before.now() <= after.now(), "{} became {}", before.now(), after.now())
}

fn level_never_falls(before: &Ledger, after: &Ledger) -> Checked {
    ensure!(before.level() <= after.level(), "{} became {}", before.level(), after.level())
}

/// An id stands for one nonce; a retired node does not come back; a new node has a higher id than all before it.
fn nodes_are_never_reused(before: &Ledger, after: &Ledger) -> Checked {
    let last = |ledger: &Ledger| ledger.records.cluster.as_ref().map_or(0, |cluster| cluster.last_node.0);
    ensure!(last(before) <= last(after), "the last id fell from {} to {}", last(before), last(after))?;
    after.nodes().try_for_each(|new| match before.node(new.id) {
        Some(old) => ensure!(old.nonce == new.nonce && (old.is_member() || !new.is_member()), "node {}", new.id),
        None => ensure!(new.id.0 > last(before) && new.id.0 <= last(after), "node {} is no new id", new.id),
    })
}

fn outcomes_stay(before: &Ledger, after: &Ledger) -> Checked {
    for (id, old) in &before.records.clients {
        let Some(new) = after.records.clients.get(id) else { continue };
        let differs = |(serial, outcome)| new.outcomes().get(serial).is_some_and(|now| now != outcome);
        ensure!(!old.outcomes().iter().any(differs), "{id}")?;
    }
    Ok(())
}
