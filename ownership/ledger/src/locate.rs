//! Prompt lookup: which session a prompt belongs to and who owns its prefix. Takes O(log blocks) lookups.

use vocabulary::{ArtifactGroupId, ArtifactId, Blocks, Epoch, Owner, PrefixChain, PrefixId, SessionId};

use crate::PrefixPoint;
use crate::artifact::{Artifact, Scope};
use crate::artifact_table::BoundaryArtifactView;
use crate::ledger::Ledger;
use crate::point::WAYPOINT;
use crate::record::{Session, SessionHead, WorkerKind};

/// Prompt to look up.
#[derive(Clone, Copy, Debug)]
pub struct LocateQuery<'a> {
    /// Tenant and KV format.
    pub scope: Scope,
    /// Session, if the client named one.
    pub session: Option<SessionId>,
    /// Block hashes of the prompt.
    pub chain: &'a PrefixChain,
    /// Number of blocks that the system prompt and tools fill; 0 if unknown. A prompt that shares only these is no
    /// fork.
    pub shared_prefix: Blocks,
}

/// How a prompt relates to known sessions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SessionMatch {
    /// The prompt extends a head of this session.
    ExtendsHead {
        /// Session.
        session: SessionId,
        /// Deepest head of the session that is a prefix of the prompt.
        head: PrefixPoint,
    },
    /// The prompt diverges from the session's path before its head, or ends before it. If the client named the session,
    /// it rewrote or repeated a turn; otherwise this is a fork.
    ForksFrom {
        /// Session.
        session: SessionId,
        /// Head closest to the prompt.
        head: PrefixPoint,
        /// Deepest boundary that both share; the root if there is none.
        fork_point: PrefixPoint,
    },
    /// The prompt starts a new session that shares a prefix with others.
    SharesPrefix {
        /// Deepest boundary of the shared prefix.
        at: PrefixPoint,
    },
    /// The prompt starts a new session that shares nothing.
    New,
}

/// Who has a prefix, according to the ledger and counting live leases only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OwnershipStatus {
    /// The owner is live.
    Owned(Owner),
    /// The owner is gone; a read-only copy serves instead.
    Replicated(Owner),
    /// Only a store has the prefix.
    InStore(Owner),
    /// Nobody has the prefix; it must be recomputed.
    Unowned,
}

impl OwnershipStatus {
    /// Returns the effective owner.
    pub fn owner(self) -> Option<Owner> {
        match self {
            OwnershipStatus::Owned(owner) | OwnershipStatus::Replicated(owner) | OwnershipStatus::InStore(owner) => {
                Some(owner)
            }
            OwnershipStatus::Unowned => None,
        }
    }
}

/// Deepest sealed prefix of a prompt.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SealedPrefixMatch {
    /// Artifact that keeps the prefix.
    pub artifact: ArtifactId,
    /// Prefix.
    pub point: PrefixPoint,
    /// Who has the prefix.
    pub status: OwnershipStatus,
    /// Fencing token of the artifact's owner.
    pub epoch: Epoch,
    /// Holders of live read-only copies that reach this prefix.
    pub replicas: Vec<Owner>,
    /// Group of the artifact.
    pub group: Option<ArtifactGroupId>,
}

/// What the ledger knows about a prompt.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LocateResult {
    /// How the prompt relates to known sessions.
    pub session_match: SessionMatch,
    /// Deepest sealed prefix of the prompt.
    pub sealed: Option<SealedPrefixMatch>,
}

impl SealedPrefixMatch {
    /// Returns all holders of the prefix except the session's `owner`.
    ///
    /// The prefix's owner is one holder among others: whoever serves an unowned session may claim it, even if another
    /// worker first computed the shared system prompt.
    pub fn holders(&self, owner: Option<Owner>) -> Vec<Owner> {
        let copies = self.replicas.iter().copied().filter(|copy| self.status.owner() != Some(*copy));
        self.status.owner().into_iter().chain(copies).filter(|holder| owner != Some(*holder)).collect()
    }
}

/// Session of a prompt, and the head that it continues from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ResolvedSession {
    /// The named session, the session that the prompt extends, or a new one.
    pub session: SessionId,
    /// Session that the prompt forks from, if any.
    pub parent: Option<SessionId>,
    /// Head closest to the prompt, and the number of blocks that both share.
    pub head: Option<(PrefixPoint, Blocks)>,
    /// Head whose history the client rewrote.
    pub replaced_head: Option<PrefixId>,
}

impl LocateResult {
    /// Decides which session the prompt belongs to. `named` is the client's session, if it sent one; `fresh` is the id
    /// to use for a new session.
    pub fn resolve_session(&self, named: Option<SessionId>, fresh: SessionId) -> ResolvedSession {
        let (session, parent, head) = match (self.session_match, named) {
            (SessionMatch::ExtendsHead { session, head }, _) => (session, None, Some((head, head.blocks))),
            (SessionMatch::ForksFrom { session, head, fork_point: at }, Some(_)) => {
                (session, None, Some((head, at.blocks)))
            }
            (SessionMatch::ForksFrom { session, head, fork_point: at }, None) => {
                (fresh, Some(session), Some((head, at.blocks)))
            }
            (SessionMatch::SharesPrefix { .. } | SessionMatch::New, named) => (named.unwrap_or(fresh), None, None),
        };
        ResolvedSession { session, parent, head, replaced_head: named.and_then(|_| self.replaced_head()) }
    }

    /// Returns how many blocks of the prompt the ledger knows: the base for the step's commit.
    pub fn known_blocks(&self) -> Blocks {
        self.sealed.as_ref().map_or(Blocks::ZERO, |sealed| sealed.point.blocks)
    }

    /// Returns the known session that the prompt extends or forks from.
    pub fn session(&self) -> Option<SessionId> {
        match self.session_match {
            SessionMatch::ExtendsHead { session, .. } | SessionMatch::ForksFrom { session, .. } => Some(session),
            SessionMatch::SharesPrefix { .. } | SessionMatch::New => None,
        }
    }

    /// Returns the head to replace, for a session that the client named, if the prompt keeps at least half of the
    /// head's history. With less in common the prompt is another branch of the conversation and adds a head.
    pub fn replaced_head(&self) -> Option<PrefixId> {
        match self.session_match {
            SessionMatch::ForksFrom { head, fork_point: at, .. } if at.blocks.0 * 2 >= head.blocks.0 => Some(head.id),
            _ => None,
        }
    }
}

impl Ledger {
    /// Looks up a prompt.
    pub fn locate(&self, query: LocateQuery<'_>) -> LocateResult {
        let session = query.session.and_then(|id| self.session(id));
        let deepest = session.as_ref().and_then(|session| self.deepest_of_session(session, query));
        let deepest = deepest
            .or_else(|| self.deepest_boundary(query.scope, query.chain).map(|kept| (kept.point, kept.artifact())));
        let session_match = match (query.session, &deepest) {
            (Some(_), _) => session.as_ref().and_then(|session| self.match_in_session(session, query)),
            (None, Some((at, artifact))) => self.match_by_chain(query, *at, artifact),
            (None, None) => None,
        };
        let match_by_prefix =
            || deepest.as_ref().map_or(SessionMatch::New, |(at, _)| SessionMatch::SharesPrefix { at: *at });
        LocateResult {
            session_match: session_match.unwrap_or_else(match_by_prefix),
            sealed: deepest.as_ref().map(|(at, artifact)| self.sealed_prefix(*at, artifact)),
        }
    }

    /// Returns the deepest boundary on the chain.
    ///
    /// Waypoints are kept without gaps, so an exponential search from the end (most of a prompt is usually known) finds
    /// the last one. Any deeper boundary lies before the next waypoint, in the same artifact or a descendant.
    pub fn deepest_boundary(&self, scope: Scope, chain: &PrefixChain) -> Option<BoundaryArtifactView<'_>> {
        let boundary_at = |blocks: u64| self.boundary(chain.prefix(Blocks(blocks))?, scope);
        let blocks = chain.blocks().0;
        let passed = last_present(blocks / WAYPOINT, |waypoint| boundary_at(waypoint * WAYPOINT));
        let deepest = passed.map(|boundary_at| boundary_at.last_on_chain(chain));
        if deepest.is_some_and(|boundary_at| !boundary_at.has_children()) {
            return deepest;
        }
        let waypoint = passed.map_or(0, |boundary| boundary.point.blocks.0);
        let known = deepest.map_or(0, |boundary| boundary.point.blocks.0);
        let last = blocks.min(waypoint + WAYPOINT - 1);
        (known + 1..=last).rev().find_map(boundary_at).or(deepest)
    }

    /// Returns the deepest boundary without a search, if the prompt continues from a session's head that ends a path.
    ///
    /// The head's artifact must keep the last waypoint before the head. Then any deeper boundary on the chain would be
    /// in that artifact or attach to it.
    fn deepest_of_session(&self, session: &Session, query: LocateQuery<'_>) -> Option<(PrefixPoint, Artifact)> {
        let on_chain = |head: &&SessionHead| head.scope == query.scope && head.point.is_on_chain(query.chain);
        let head = session.heads.iter().filter(on_chain).max_by_key(|head| head.point.blocks)?;
        let artifact = self.artifact(head.artifact)?;
        let keeps_waypoint = head.point.blocks.0 / WAYPOINT > artifact.from().0 / WAYPOINT;
        let is_end = artifact.children.is_empty() && artifact.end() == head.point;
        (is_end && keeps_waypoint).then_some((head.point, artifact))
    }

    /// Returns who has a sealed prefix, and since when.
    pub fn prefix_status(&self, prefix: PrefixId, scope: Scope) -> Option<(OwnershipStatus, Epoch)> {
        self.boundary(prefix, scope).map(|kept| (self.boundary_status(&kept), kept.epoch))
    }

    /// Returns who has the artifact of a boundary.
    pub fn boundary_status(&self, boundary: &BoundaryArtifactView<'_>) -> OwnershipStatus {
        match boundary.owner.filter(|owner| self.is_live(*owner)) {
            Some(owner) => OwnershipStatus::Owned(owner),
            None => self.ownership_status(&boundary.artifact()),
        }
    }

    /// Returns who has an artifact: its live owner, else a live copy at an engine, else one in a store, else nobody.
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

    /// Returns the owner of a session while that worker's lease is held.
    pub fn session_owner(&self, session: &Session) -> Option<Owner> {
        session.owner.filter(|owner| self.is_live(*owner))
    }

    /// Returns whether the owner is a rank of its worker's current incarnation and that incarnation's lease is held.
    pub fn is_live(&self, owner: Owner) -> bool {
        self.worker(owner.worker).is_some_and(|worker| worker.is_live() && worker.matches(owner))
    }

    /// Iterates over the holders of live copies that reach beyond `blocks`.
    fn live_replicas(&self, artifact: &Artifact, blocks: Blocks) -> impl Iterator<Item = Owner> {
        let now = self.now();
        let live = move |copy: &&crate::artifact::Replica| {
            copy.expires > now && copy.upto.blocks > blocks && self.is_live(copy.holder)
        };
        artifact.replicas.iter().filter(live).map(|copy| copy.holder)
    }

    fn sealed_prefix(&self, at: PrefixPoint, artifact: &Artifact) -> SealedPrefixMatch {
        let before = Blocks(at.blocks.0.saturating_sub(1));
        SealedPrefixMatch {
            artifact: artifact.id,
            point: at,
            status: self.ownership_status(artifact),
            epoch: artifact.epoch,
            replicas: self.live_replicas(artifact, before).collect(),
            group: artifact.group,
        }
    }

    /// Returns how the prompt relates to a given session; `None` if the session has no head in this scope.
    fn match_in_session(&self, session: &Session, query: LocateQuery<'_>) -> Option<SessionMatch> {
        let heads = || session.heads.iter().filter(|head| head.scope == query.scope);
        let on_chain = heads().filter(|head| head.point.is_on_chain(query.chain)).max_by_key(|head| head.point.blocks);
        if let Some(head) = on_chain {
            return Some(SessionMatch::ExtendsHead { session: session.id, head: head.point });
        }
        let shared = heads().map(|head| (self.last_shared_point(head, query.chain), head));
        let (at, head) = shared.max_by_key(|(at, head)| (at.blocks, head.touched))?;
        Some(SessionMatch::ForksFrom { session: session.id, head: head.point, fork_point: at })
    }

    /// Returns how a prompt without a named session relates to known ones; `None` if it shares only a prefix of
    /// sessions that were not forked from one another.
    fn match_by_chain(&self, query: LocateQuery<'_>, at: PrefixPoint, artifact: &Artifact) -> Option<SessionMatch> {
        if let Some(session) = self.session_with_head(artifact, at.id) {
            return Some(SessionMatch::ExtendsHead { session: session.id, head: at });
        }
        if at.blocks <= query.shared_prefix {
            return None;
        }
        let session = self.session_through(artifact)?;
        self.match_in_session(&session, query)
    }

    /// Returns the deepest boundary that a head's path and the chain share; the root if there is none.
    fn last_shared_point(&self, head: &SessionHead, chain: &PrefixChain) -> PrefixPoint {
        let root = PrefixPoint { blocks: Blocks::ZERO, id: chain.root };
        let (mut id, mut upto) = (head.artifact, head.point.blocks);
        while let Some(artifact) = self.artifact(id) {
            let on_chain =
                artifact.boundaries.partition_point(|b| b.point.blocks <= upto && b.point.is_on_chain(chain));
            if let Some(boundary) = artifact.boundaries[..on_chain].last() {
                return boundary.point;
            }
            let Some(parent) = artifact.parent else { return root };
            (id, upto) = (parent.artifact, parent.at.blocks);
        }
        root
    }
}

/// Returns the last of the waypoints 1 to `last` for which `kept` returns something. Searches exponentially from the
/// end, then by bisection.
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
                // At the end it takes one probe; elsewhere at most twice as many as a bisection.
                let most = if kept == last { 1 } else { 2 * (64 - (last - kept).leading_zeros()) + 2 };
                assert!(looks.get() <= most, "{} looks for {kept} of {last}", looks.get());
            }
        }
    }
}
