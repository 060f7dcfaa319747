//! Session resolution: which session a step belongs to, from the ledger view and from this router's own steps that the
//! view does not show yet.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ownership::ledger::{
    Ledger, LocateQuery, LocateResult as Found, OwnershipTransition, PrefixPoint, ResolvedSession,
};
use vocabulary::{Blocks, Owner, PrefixId, SessionId};

use crate::peer_exchange::pending_commits::{PendingCommits, UncommittedStep};

#[derive(Clone, Debug)]
pub(super) struct SessionResolution {
    /// The session: the one that the client names, the one that the chain extends, or a new one.
    pub(super) session: SessionId,
    /// The session that this one forks, according to the chain.
    pub(super) parent: Option<SessionId>,
    /// The head nearest to the prompt, and the number of blocks that both share.
    pub(super) head: Option<(PrefixPoint, Blocks)>,
    /// The head whose history the client rewrote.
    pub(super) rewrites: Option<PrefixId>,
    /// A step of this session that this router served and the view does not show yet, and the time since it ended.
    pub(super) pending: Option<(Arc<UncommittedStep>, Duration)>,
}

impl SessionResolution {
    /// Resolves from the ledger view. `fresh` is the id for a new session.
    pub(super) fn from_view(found: &Found, named: Option<SessionId>, fresh: SessionId) -> Self {
        let ResolvedSession { session, parent, head, replaced_head: rewrites } = found.resolve_session(named, fresh);
        Self { session, parent, head, rewrites, pending: None }
    }

    /// Adds this router's own steps that `view` does not show.
    pub(super) fn with_pending(
        mut self,
        pending_commits: &PendingCommits,
        view: &Ledger,
        (query, now): (LocateQuery<'_>, Instant),
    ) -> Self {
        let on_chain = self.head.filter(|(head, shared)| head.blocks == *shared).map_or(Blocks::ZERO, |(_, at)| at);
        let session = query.session.or_else(|| pending_commits.deepest_head(query.scope, query.chain, on_chain));
        let own =
            session.and_then(|id| pending_commits.newest(id, now)).filter(|(step, _)| step.scope() == query.scope);
        let Some((step, ago)) = own.filter(|(step, _)| !view_contains(view, step)) else { return self };
        let Some(head) = step.head() else { return self };
        let shared = step.shared_blocks(query.chain);
        if shared == head.blocks && self.head.is_some_and(|(_, at)| at >= shared) {
            // The ledger is ahead of this step, whatever became of it.
            return self;
        }
        if self.head.is_none_or(|(_, at)| shared > at) {
            let left_late = shared < head.blocks && 2 * shared.0 >= head.blocks.0;
            self.rewrites = query.session.filter(|_| left_late).map(|_| head.id);
            (self.session, self.parent, self.head) = (step.session, None, Some((head, shared)));
        }
        self.pending = Some((step, ago)).filter(|(step, _)| step.session == self.session);
        self
    }

    /// Returns the session's owner, given the one in the view.
    pub(super) fn owner(&self, known: Option<Owner>) -> Option<Owner> {
        match &self.pending {
            None => known,
            Some((step, _)) => match step.ownership_transition {
                OwnershipTransition::Unchanged => known,
                OwnershipTransition::Claim => known.or(Some(step.owner)),
                OwnershipTransition::Migrate { .. } => Some(step.owner),
            },
        }
    }
}

/// Whether the ledger view contains a step, or a later one.
pub(super) fn view_contains(view: &Ledger, step: &UncommittedStep) -> bool {
    let Some(head) = step.head() else { return true };
    let is_head = |session: ownership::ledger::Session| session.heads.iter().any(|known| known.point == head);
    view.session(step.session).is_some_and(is_head)
        || view.deepest_boundary(step.scope(), &step.chain).is_some_and(|kept| kept.point.blocks >= head.blocks)
}

#[cfg(test)]
mod tests;
