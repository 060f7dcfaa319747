//! Whose step is it, and who owns what it needs: reads over the ledger, in O(log blocks) lookups.

use vocabulary::{ArtifactId, Blocks, Epoch, GroupId, Owner, PrefixChain, PrefixId, SessionId};

use crate::PrefixPoint;
use crate::artifact::{Artifact, Scope};
use crate::artifact_table::BoundaryRef;
use crate::ledger::Ledger;
use crate::point::WAYPOINT;
use crate::record::{Head, Session, WorkerKind};

/// A prompt to be located.
#[derive(Clone, Copy, Debug)]
pub struct LocateQuery<'a> {
    /// Tenant and KV format.
    pub scope: Scope,
    /// The session, where the client says which.
    pub session: Option<SessionId>,
    /// The prompt.
    pub chain: &'a PrefixChain,
    /// Blocks that system prompt and tools fill; 0 when unknown. Sharing only these makes no fork.
    pub shared_prefix: Blocks,
}

/// How a prompt goes on from what is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lineage {
    /// It extends a head of this session.
    ExtendsHead {
        /// The session.
        session: SessionId,
        /// The deepest of its heads that prefixes the prompt.
        head: PrefixPoint,
    },
    /// It leaves the session's path before its head, or ends before it: rewritten or asked again where the client
    /// named the session, a fork of it where it did not.
    ForksFrom {
        /// The session.
        session: SessionId,
        /// The head nearest to it.
        head: PrefixPoint,
        /// The deepest kept point that both share; the root when there is none.
        fork_point: PrefixPoint,
    },
    /// A new session that shares a prefix with others.
    SharesPrefix {
        /// The deepest kept point of it.
        at: PrefixPoint,
    },
    /// A new session that shares nothing.
    New,
}

/// Who has a prefix, by decision and with live leases.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OwnershipStatus {
    /// Its owner.
    Owned(Owner),
    /// The owner is gone; a read-only copy stands in.
    Replicated(Owner),
    /// Only a store has it.
    InStore(Owner),
    /// Nobody: recompute.
    Unowned,
}

impl OwnershipStatus {
    /// The effective owner.
    pub fn owner(self) -> Option<Owner> {
        match self {
            OwnershipStatus::Owned(owner) | OwnershipStatus::Replicated(owner) | OwnershipStatus::InStore(owner) => {
                Some(owner)
            }
            OwnershipStatus::Unowned => None,
        }
    }
}

/// The deepest sealed prefix of a prompt.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SealedPrefix {
    /// The extent that keeps it.
    pub artifact: ArtifactId,
    /// The prefix.
    pub point: PrefixPoint,
    /// Who has it.
    pub status: OwnershipStatus,
    /// Its fencing token.
    pub epoch: Epoch,
    /// Live read-only copies that reach this far.
    pub replicas: Vec<Owner>,
    /// Its group.
    pub group: Option<GroupId>,
}

/// What the ledger knows about a prompt.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LocateResult {
    /// How it goes on from what is known.
    pub lineage: Lineage,
    /// Its deepest sealed prefix.
    pub sealed: Option<SealedPrefix>,
}

impl SealedPrefix {
    /// Who else has the prefix by decision, beside a session's `owner`. Its owner is one of them and no more: whoever
    /// serves a session that nobody owns may claim it, wherever the system prompt that it shares with others was
    /// computed first.
    pub fn holders(&self, owner: Option<Owner>) -> Vec<Owner> {
        let copies = self.replicas.iter().copied().filter(|copy| self.status.owner() != Some(*copy));
        self.status.owner().into_iter().chain(copies).filter(|holder| owner != Some(*holder)).collect()
    }
}

/// Whose step a prompt is, and what it goes on from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ResolvedSession {
    /// The session: the named one, the one that the chain extends, or a new one.
    pub session: SessionId,
    /// The session that it leaves, where the chain says so.
    pub parent: Option<SessionId>,
    /// The head nearest to the prompt, and how many blocks both share.
    pub head: Option<(PrefixPoint, Blocks)>,
    /// The head whose history the client rewrote.
    pub replaced_head: Option<PrefixId>,
}

impl LocateResult {
    /// Whose step it is, of a client that `named` its session or did not. `fresh` is the name of a session that is new.
    pub fn resolve_session(&self, named: Option<SessionId>, fresh: SessionId) -> ResolvedSession {
        let (session, parent, head) = match (self.lineage, named) {
            (Lineage::ExtendsHead { session, head }, _) => (session, None, Some((head, head.blocks))),
            (Lineage::ForksFrom { session, head, fork_point: at }, Some(_)) => (session, None, Some((head, at.blocks))),
            (Lineage::ForksFrom { session, head, fork_point: at }, None) => {
                (fresh, Some(session), Some((head, at.blocks)))
            }
            (Lineage::SharesPrefix { .. } | Lineage::New, named) => (named.unwrap_or(fresh), None, None),
        };
        ResolvedSession { session, parent, head, replaced_head: named.and_then(|_| self.replaced_head()) }
    }

    /// The base for the step's commit: blocks of the prompt that the ledger knows.
    pub fn known_blocks(&self) -> Blocks {
        self.sealed.as_ref().map_or(Blocks::ZERO, |sealed| sealed.point.blocks)
    }

    /// The session it belongs to, when that is a known one.
    pub fn session(&self) -> Option<SessionId> {
        match self.lineage {
            Lineage::ExtendsHead { session, .. } | Lineage::ForksFrom { session, .. } => Some(session),
            Lineage::SharesPrefix { .. } | Lineage::New => None,
        }
    }

    /// For a session that the client named: the head to replace, when the prompt keeps at least half of its history.
    /// Less in common is another branch of the conversation, which becomes a head beside it.
    pub fn replaced_head(&self) -> Option<PrefixId> {
        match self.lineage {
            Lineage::ForksFrom { head, fork_point: at, .. } if at.blocks.0 * 2 >= head.blocks.0 => Some(head.id),
            _ => None,
        }
    }
}

impl Ledger {
    /// Locates a prompt.
    pub fn locate(&self, query: LocateQuery<'_>) -> LocateResult {
        let session = query.session.and_then(|id| self.session(id));
        let deepest = session.as_ref().and_then(|session| self.deepest_of_session(session, query));
        let deepest = deepest
            .or_else(|| self.deepest_boundary(query.scope, query.chain).map(|kept| (kept.point, kept.artifact())));
        let lineage = match (query.session, &deepest) {
            (Some(_), _) => session.as_ref().and_then(|session| self.lineage_in_session(session, query)),
            (None, Some((at, artifact))) => self.lineage_by_chain(query, *at, artifact),
            (None, None) => None,
        };
        let shared = || deepest.as_ref().map_or(Lineage::New, |(at, _)| Lineage::SharesPrefix { at: *at });
        LocateResult {
            lineage: lineage.unwrap_or_else(shared),
            sealed: deepest.as_ref().map(|(at, artifact)| self.sealed_prefix(*at, artifact)),
        }
    }

    /// The deepest kept prefix of the chain, and the extent that keeps it.
    ///
    /// Looks for the last kept waypoint, which is found by halving because they are kept without a gap, from the end
    /// on, because most of a prompt is known. What is deeper lies before the next one, in the same extent or below it.
    pub fn deepest_boundary(&self, scope: Scope, chain: &PrefixChain) -> Option<BoundaryRef<'_>> {
        let kept = |blocks: u64| self.boundary(chain.prefix(Blocks(blocks))?, scope);
        let blocks = chain.blocks().0;
        let passed = last_present(blocks / WAYPOINT, |waypoint| kept(waypoint * WAYPOINT));
        let deepest = passed.map(|kept| kept.last_on_chain(chain));
        if deepest.is_some_and(|kept| !kept.has_children()) {
            return deepest;
        }
        let waypoint = passed.map_or(0, |kept| kept.point.blocks.0);
        let known = deepest.map_or(0, |kept| kept.point.blocks.0);
        let last = blocks.min(waypoint + WAYPOINT - 1);
        (known + 1..=last).rev().find_map(kept).or(deepest)
    }

    /// The same, of a session whose prompt goes on from the end of what anybody sealed there: whatever is deeper on this
    /// chain goes through the extent that keeps the last waypoint before the head, and hangs on it.
    fn deepest_of_session(&self, session: &Session, query: LocateQuery<'_>) -> Option<(PrefixPoint, Artifact)> {
        let on_chain = |head: &&Head| head.scope == query.scope && head.point.is_on_chain(query.chain);
        let head = session.heads.iter().filter(on_chain).max_by_key(|head| head.point.blocks)?;
        let artifact = self.artifact(head.artifact)?;
        let keeps_waypoint = head.point.blocks.0 / WAYPOINT > artifact.from().0 / WAYPOINT;
        let is_end = artifact.children.is_empty() && artifact.end() == head.point;
        (is_end && keeps_waypoint).then_some((head.point, artifact))
    }

    /// Who has a kept prefix, and since when.
    pub fn prefix_status(&self, prefix: PrefixId, scope: Scope) -> Option<(OwnershipStatus, Epoch)> {
        self.boundary(prefix, scope).map(|kept| (self.boundary_status(&kept), kept.epoch))
    }

    /// Who has the extent that keeps a point.
    pub fn boundary_status(&self, kept: &BoundaryRef<'_>) -> OwnershipStatus {
        match kept.owner.filter(|owner| self.is_live(*owner)) {
            Some(owner) => OwnershipStatus::Owned(owner),
            None => self.ownership_status(&kept.artifact()),
        }
    }

    /// Who has an extent: its owner, else a live copy at an engine, else one in a store, else nobody.
    pub fn ownership_status(&self, artifact: &Artifact) -> OwnershipStatus {
        if let Some(owner) = artifact.owner.filter(|owner| self.is_live(*owner)) {
            return OwnershipStatus::Owned(owner);
        }
        let copies = || self.live_replicas(artifact, artifact.from());
        let kind = |owner: &Owner| self.worker(owner.worker).map(|worker| worker.spec.kind);
        if let Some(owner) = copies().find(|owner| kind(owner) == Some(WorkerKind::Engine)) {
            return OwnershipStatus::Replicated(owner);
        }
        copies().next().map_or(OwnershipStatus::Unowned, OwnershipStatus::InStore)
    }

    /// Who decodes a session, while that worker's lease is held.
    pub fn session_owner(&self, session: &Session) -> Option<Owner> {
        session.owner.filter(|owner| self.is_live(*owner))
    }

    /// Whether the owner is a rank of its worker's present life and that life's lease is held.
    pub fn is_live(&self, owner: Owner) -> bool {
        self.worker(owner.worker).is_some_and(|worker| worker.is_live() && worker.matches(owner))
    }

    /// Holders of live copies that reach beyond `blocks`.
    fn live_replicas(&self, artifact: &Artifact, blocks: Blocks) -> impl Iterator<Item = Owner> {
        let now = self.now();
        let live = move |copy: &&crate::artifact::Replica| {
            copy.expires > now && copy.upto.blocks > blocks && self.is_live(copy.holder)
        };
        artifact.replicas.iter().filter(live).map(|copy| copy.holder)
    }

    fn sealed_prefix(&self, at: PrefixPoint, artifact: &Artifact) -> SealedPrefix {
        let before = Blocks(at.blocks.0.saturating_sub(1));
        SealedPrefix {
            artifact: artifact.id,
            point: at,
            status: self.ownership_status(artifact),
            epoch: artifact.epoch,
            replicas: self.live_replicas(artifact, before).collect(),
            group: artifact.group,
        }
    }

    /// How the prompt goes on from a session that the client named; `None` while it has no head in this scope.
    fn lineage_in_session(&self, session: &Session, query: LocateQuery<'_>) -> Option<Lineage> {
        let heads = || session.heads.iter().filter(|head| head.scope == query.scope);
        let on_chain = heads().filter(|head| head.point.is_on_chain(query.chain)).max_by_key(|head| head.point.blocks);
        if let Some(head) = on_chain {
            return Some(Lineage::ExtendsHead { session: session.id, head: head.point });
        }
        let shared = heads().map(|head| (self.last_shared_point(head, query.chain), head));
        let (at, head) = shared.max_by_key(|(at, head)| (at.blocks, head.touched))?;
        Some(Lineage::ForksFrom { session: session.id, head: head.point, fork_point: at })
    }

    /// How a prompt without a session goes on: `None` when it only shares what sessions share that were not forked from one
    /// another.
    fn lineage_by_chain(&self, query: LocateQuery<'_>, at: PrefixPoint, artifact: &Artifact) -> Option<Lineage> {
        if let Some(session) = self.session_with_head(artifact, at.id) {
            return Some(Lineage::ExtendsHead { session: session.id, head: at });
        }
        if at.blocks <= query.shared_prefix {
            return None;
        }
        let session = self.session_through(artifact)?;
        self.lineage_in_session(&session, query)
    }

    /// The deepest kept point that a head's path and the chain share; the root when there is none.
    fn last_shared_point(&self, head: &Head, chain: &PrefixChain) -> PrefixPoint {
        let root = PrefixPoint { blocks: Blocks::ZERO, id: chain.root };
        let (mut id, mut upto) = (head.artifact, head.point.blocks);
        while let Some(artifact) = self.artifact(id) {
            let kept = artifact.boundaries.partition_point(|b| b.point.blocks <= upto && b.point.is_on_chain(chain));
            if let Some(boundary) = artifact.boundaries[..kept].last() {
                return boundary.point;
            }
            let Some(parent) = artifact.parent else { return root };
            (id, upto) = (parent.artifact, parent.at.blocks);
        }
        root
    }
}

/// The last of the waypoints 1 to `last` that is kept, and what is kept there: steps back from the end, each twice as
/// far as the one before, then halving.
fn last_present<T>(last: u64, kept: impl Fn(u64) -> Option<T>) -> Option<T> {
    let (mut low, mut high, mut step) = (0, last, 1);
    let mut found = None;
    while low < high {
        let middle = if found.is_some() { (low + high).div_ceil(2) } else { high.saturating_sub(step - 1).max(1) };
        match kept(middle) {
            Some(here) => (low, found) = (middle, Some(here)),
            None => (high, step) = (middle - 1, step * 2),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::last_present;

    #[test]
    fn last_waypoint_search_takes_logarithmic_probes() {
        for last in 0..200u64 {
            for kept in 0..=last {
                let looks = Cell::new(0);
                let found = last_present(last, |waypoint| {
                    assert!(waypoint >= 1 && waypoint <= last, "{waypoint} of {last}");
                    looks.set(looks.get() + 1);
                    (waypoint <= kept).then_some(waypoint)
                });
                assert_eq!(found, (kept > 0).then_some(kept), "{kept} of {last}");
                // Near the end it is one look or two; nowhere more than twice a halving.
                let most = if kept == last { 1 } else { 2 * (64 - (last - kept).leading_zeros()) + 2 };
                assert!(looks.get() <= most, "{} looks for {kept} of {last}", looks.get());
            }
        }
    }
}
