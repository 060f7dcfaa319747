//! Sessions, their heads and their intents. Forks are decided by prefix chain, never by epoch.

use vocabulary::{Epoch, NodeId, PrefixId, SessionId};

use super::{CommandResult, UnresolvedPrefix};
use crate::command::{AdvanceHead, ForkSession, OpenSession, PrefixRef, SetIntent};
use crate::ledger::Ledger;
use crate::outcome::{HeadMovement, Outcome, Refusal};
use crate::record::{Intent, Session, SessionHead};

const MAX_INTENTS: usize = 8;

impl Ledger {
    pub(super) fn open_session(&mut self, epoch: Epoch, open: &OpenSession) -> CommandResult {
        if let Some(session) = self.session(open.session) {
            let same = session.tenant == open.tenant && session.model == open.model;
            return if same {
                Ok(Outcome::Opened { epoch: session.epoch })
            } else {
                Err(Refusal::SessionScopeMismatch)
            };
        }
        self.check_session_quota(&open.tenant)?;
        while self.session_count() >= self.records.limits.sessions.max(1) as usize {
            self.make_room_for_session(&open.tenant);
        }
        self.put_session(Session {
            id: open.session,
            tenant: open.tenant.clone(),
            model: open.model.clone(),
            parent: open.parent,
            heads: Vec::new(),
            owner: None,
            epoch,
            opened: self.now(),
            touched: self.now(),
        });
        Ok(Outcome::Opened { epoch })
    }

    pub(super) fn advance(&mut self, advance: AdvanceHead) -> CommandResult {
        if let Some((base, router)) = advance.intent {
            self.withdraw_intents(advance.session, router, |known| known == base);
        }
        let session = self.session(advance.session).ok_or(Refusal::UnknownSession)?;
        let head = match self.head_at(&session, advance.head) {
            Ok(head) => head,
            Err(unresolved) => return unresolved.into(),
        };
        let (heads, movement) = self.heads_after_move(&session, head, advance.replaces);
        let session = Session { heads, touched: self.now(), ..session };
        self.put_session(session);
        // An intent of this router on the chain's root is finished, too.
        let root = self.artifact(head.artifact).map(|artifact| artifact.origin.root);
        if let Some((_, router)) = advance.intent {
            self.withdraw_intents(advance.session, router, |known| Some(known) == root);
        }
        Ok(Outcome::Advanced { movement })
    }

    pub(super) fn fork(&mut self, epoch: Epoch, fork: ForkSession) -> CommandResult {
        let parent = self.session(fork.parent).ok_or(Refusal::UnknownSession)?;
        let head = match self.head_at(&parent, fork.at) {
            Ok(head) => head,
            Err(unresolved) => return unresolved.into(),
        };
        if !parent.heads.iter().any(|known| self.descends_from(known, &head)) {
            return Err(Refusal::UnknownPrefix);
        }
        let (tenant, model) = (parent.tenant, parent.model);
        self.open_session(epoch, &OpenSession { session: fork.child, tenant, model, parent: Some(fork.parent) })?;
        self.advance(AdvanceHead { session: fork.child, head: fork.at, replaces: None, intent: None })
    }

    fn head_at(&self, session: &Session, prefix: PrefixRef) -> Result<SessionHead, UnresolvedPrefix> {
        let artifact = self.resolve_prefix(prefix)?;
        if artifact.origin.tenant != session.tenant || artifact.origin.model != session.model {
            return Err(UnresolvedPrefix::Refused(Refusal::SessionScopeMismatch));
        }
        Ok(SessionHead { point: prefix.point, artifact: artifact.id, scope: prefix.scope, touched: self.now() })
    }

    /// Returns a session's heads after it reached `new`.
    fn heads_after_move(
        &self,
        session: &Session,
        new: SessionHead,
        replaces: Option<PrefixId>,
    ) -> (Vec<SessionHead>, HeadMovement) {
        let mut heads = session.heads.clone();
        if let Some(known) = heads.iter().position(|head| self.descends_from(head, &new)) {
            let head = heads.remove(known);
            heads.push(SessionHead { touched: new.touched, ..head });
            return (heads, HeadMovement::Unchanged);
        }
        let before = heads.len();
        heads.retain(|head| !self.descends_from(&new, head));
        let forwarded = heads.len() < before;
        let before = heads.len();
        heads.retain(|head| replaces != Some(head.point.id));
        let replaced = heads.len() < before;
        heads.push(new);
        let surplus = heads.len().saturating_sub(self.records.limits.heads.max(1) as usize);
        heads.drain(..surplus);
        let movement = match (session.heads.is_empty(), forwarded, replaced) {
            (true, ..) => HeadMovement::First,
            (_, true, _) => HeadMovement::FastForward,
            (.., true) => HeadMovement::Replaced,
            _ => HeadMovement::Diverged,
        };
        (heads, movement)
    }

    /// Returns whether `head` is `ancestor` or a descendant of it on the same chain.
    pub(crate) fn descends_from(&self, head: &SessionHead, ancestor: &SessionHead) -> bool {
        let (mut id, mut upto) = (head.artifact, head.point.blocks);
        while upto >= ancestor.point.blocks {
            if id == ancestor.artifact {
                return true;
            }
            let Some(parent) = self.artifact(id).and_then(|artifact| artifact.parent) else { return false };
            (id, upto) = (parent.artifact, parent.at.blocks);
        }
        false
    }

    pub(super) fn set_intent(&mut self, set: SetIntent) -> CommandResult {
        let Some((worker, ttl)) = set.step else {
            self.withdraw_intents(set.session, set.router, |known| known == set.base);
            return Ok(Outcome::Done);
        };
        let known = self.records.intents.get(&set.session);
        if known.is_none() && self.records.intents.len() >= self.records.limits.intents as usize {
            return Err(Refusal::LedgerFull);
        }
        let mut intents = known.map_or_else(Vec::new, |known| (**known).clone());
        intents.retain(|intent| (intent.base, intent.router) != (set.base, set.router));
        intents.push(Intent { base: set.base, worker, router: set.router, expires: self.now().after(ttl) });
        let surplus = intents.len().saturating_sub(MAX_INTENTS);
        intents.drain(..surplus);
        self.put_intents(set.session, intents);
        Ok(Outcome::Done)
    }

    fn withdraw_intents(&mut self, session: SessionId, node: NodeId, is_over: impl Fn(PrefixId) -> bool) {
        let Some(known) = self.records.intents.get(&session) else { return };
        let mut intents = (**known).clone();
        intents.retain(|intent| intent.router != node || !is_over(intent.base));
        self.put_intents(session, intents);
    }
}
