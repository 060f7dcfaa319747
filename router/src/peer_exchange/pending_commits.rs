//! Steps that were served here and that this node's view of the ledger does not show yet. Pure; time is an argument.
//!
//! One step of a session is on its way to the ledger at a time, and one waits; a newer one takes the place of the one that
//! waits, since it holds all of it. So a quorum that is slow, or gone for an hour, is told once where each session stands,
//! from the last head that it acknowledged. Meanwhile the next step of a session is planned on these.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ownership::ledger::{Command, KvOrigin, OwnershipTransition, PrefixPoint, Scope, StepCommit};
use smart_default::SmartDefault;
use vocabulary::{Blocks, NodeId, Owner, PrefixChain, PrefixId, SessionId};

/// How long a step that the ledger has is remembered where the view does not show it: another node may have applied it
/// before this one.
const COMMITTED_RETENTION: Duration = Duration::from_secs(5);

/// A served step, as the ledger is to be told of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UncommittedStep {
    /// Whose step.
    pub session: SessionId,
    /// What the session was forked from, where it is new.
    pub parent: Option<SessionId>,
    /// Whose blocks, of which model.
    pub origin: KvOrigin,
    /// The sealed part of prompt and answer.
    pub chain: PrefixChain,
    /// The head that the client rewrote.
    pub replaces: Option<PrefixId>,
    /// Who served it.
    pub owner: Owner,
    /// What becomes of the decode ownership.
    pub custody: OwnershipTransition,
    /// The head it was announced on.
    pub base: PrefixId,
}

impl UncommittedStep {
    /// The session's new head.
    pub fn head(&self) -> Option<PrefixPoint> {
        PrefixPoint::on_chain(&self.chain, self.chain.blocks())
    }

    /// Within which prefixes are shared.
    pub fn scope(&self) -> Scope {
        self.origin.scope()
    }

    /// The command, for a ledger that knows the chain's first `base` blocks; none when there is nothing to say.
    pub fn command(&self, base: Blocks, router: NodeId) -> Option<Command> {
        Command::commit_step(StepCommit {
            session: self.session,
            tenant: &self.origin.tenant,
            model: &self.origin.model,
            parent: self.parent,
            chain: &self.chain,
            sealed: self.chain.blocks(),
            base,
            replaced_head: self.replaces,
            owner: self.owner,
            ownership: self.custody,
            shape: self.origin.shape,
            router,
        })
    }

    /// Blocks that this chain shares with another of the same root.
    pub fn shared_blocks(&self, chain: &PrefixChain) -> Blocks {
        let (mut low, mut high) = (0, self.chain.ids.len().min(chain.ids.len()));
        // Every id names all before it: after the first difference nothing is equal.
        while low < high {
            let middle = low + (high - low) / 2;
            if self.chain.ids[middle] == chain.ids[middle] {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        Blocks(low as u64)
    }

    /// Whether it holds all of `older`, and is of the same session.
    fn extends(&self, older: &UncommittedStep) -> bool {
        self.scope() == older.scope() && older.head().is_some_and(|head| head.is_on_chain(&self.chain))
    }
}

/// Whether there is a quorum to tell.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QuorumReachability {
    /// As far as this node knows.
    Quorum,
    /// Nothing that is said now would be taken.
    NoQuorum,
}

/// What is known of a step that was sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CommitOutcome {
    /// The ledger has answered, whatever it said.
    Answered,
    /// It may have it or not; said again it does no harm.
    Unknown,
}

/// What is to be done now that a step is over.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CommitActions {
    /// To be sent at once.
    pub send: Option<Arc<UncommittedStep>>,
    /// Will not be sent any more: a newer one holds all of it.
    pub replaced: Option<Arc<UncommittedStep>>,
    /// To be sent at once, beside the others: another branch of the session, which the newer one does not hold.
    pub branch: Option<Arc<UncommittedStep>>,
}

/// How much is remembered. By default 64 MiB.
#[derive(Clone, Copy, PartialEq, Eq, Debug, SmartDefault)]
pub struct PendingLimits {
    /// Sessions.
    #[default(1 << 16)]
    pub sessions: usize,
    /// Blocks of all their chains; each takes 16 bytes.
    #[default(4 << 20)]
    pub blocks: usize,
}

#[derive(Clone, Debug, Default)]
enum SendState {
    #[default]
    NotSent,
    InFlight(Arc<UncommittedStep>),
    Done(Arc<UncommittedStep>),
}

#[derive(Clone, Debug)]
struct PendingSession {
    send_state: SendState,
    waiting: Option<Arc<UncommittedStep>>,
    /// Order of the last change.
    sequence: u64,
    updated_at: Instant,
}

impl PendingSession {
    fn newest(&self) -> Option<&Arc<UncommittedStep>> {
        self.waiting.as_ref().or(match &self.send_state {
            SendState::NotSent => None,
            SendState::InFlight(step) | SendState::Done(step) => Some(step),
        })
    }

    fn blocks(&self) -> usize {
        let sent = match &self.send_state {
            SendState::NotSent => 0,
            SendState::InFlight(step) | SendState::Done(step) => step.chain.ids.len(),
        };
        sent + self.waiting.as_ref().map_or(0, |step| step.chain.ids.len())
    }

    fn is_on_its_way(&self) -> bool {
        matches!(self.send_state, SendState::InFlight(_))
    }
}

/// All of them.
#[derive(Debug, Default)]
pub struct PendingCommits {
    limits: PendingLimits,
    sessions: HashMap<SessionId, PendingSession>,
    /// Sessions by depth and place of their newest head.
    heads: BTreeMap<u64, HashMap<(Scope, PrefixId), SessionId>>,
    /// Sessions, the one that was idle longest first.
    idle: BTreeSet<(u64, SessionId)>,
    blocks: usize,
    sequence: u64,
    dropped: u64,
}

impl PendingCommits {
    /// Remembers nothing yet.
    pub fn new(limits: PendingLimits) -> Self {
        Self { limits, ..Self::default() }
    }

    /// A step is over.
    pub fn add(&mut self, step: UncommittedStep, reach: QuorumReachability, now: Instant) -> CommitActions {
        let mut taken = CommitActions::default();
        let mut entry = self.remove(step.session).unwrap_or(PendingSession {
            send_state: SendState::NotSent,
            waiting: None,
            sequence: 0,
            updated_at: now,
        });
        let mut step = step;
        if let Some(older) = entry.waiting.take() {
            // The session may not be there yet, and then only the older one said what it comes from.
            step.parent = step.parent.or(older.parent);
            if step.extends(&older) || reach == QuorumReachability::NoQuorum {
                taken.replaced = Some(older);
            } else {
                taken.branch = Some(older);
            }
        }
        let step = Arc::new(step);
        if entry.is_on_its_way() || reach == QuorumReachability::NoQuorum {
            entry.waiting = Some(step.clone());
        } else {
            entry.send_state = SendState::InFlight(step.clone());
            taken.send = Some(step.clone());
        }
        (entry.sequence, entry.updated_at) = (self.next_sequence(), now);
        self.insert(step.session, entry);
        self.enforce_limits();
        taken
    }

    /// A step that was sent came to an end; the one to be sent now.
    pub fn complete(
        &mut self,
        step: &Arc<UncommittedStep>,
        told: CommitOutcome,
        reach: QuorumReachability,
    ) -> Option<Arc<UncommittedStep>> {
        let mut entry = self.remove(step.session)?;
        let mut next = None;
        if matches!(&entry.send_state, SendState::InFlight(sent) if Arc::ptr_eq(sent, step)) {
            entry.send_state = match told {
                CommitOutcome::Answered => SendState::Done(step.clone()),
                CommitOutcome::Unknown => SendState::NotSent,
            };
            match (told, entry.waiting.take()) {
                (CommitOutcome::Unknown, None) => entry.waiting = Some(step.clone()),
                (CommitOutcome::Answered, Some(waiting)) if reach == QuorumReachability::Quorum => {
                    entry.send_state = SendState::InFlight(waiting.clone());
                    next = Some(waiting);
                }
                (_, waiting) => entry.waiting = waiting,
            }
        }
        self.insert(step.session, entry);
        next
    }

    /// Steps that wait although nothing of their session is on its way, at most so many; they are from now on.
    pub fn take_due(&mut self, most: usize) -> Vec<Arc<UncommittedStep>> {
        let waits = |entry: &PendingSession| entry.waiting.is_some() && !entry.is_on_its_way();
        let due: Vec<SessionId> =
            self.idle.iter().filter(|(_, id)| waits(&self.sessions[id])).take(most).map(|(_, id)| *id).collect();
        let mut steps = Vec::with_capacity(due.len());
        for id in due {
            let Some(mut entry) = self.remove(id) else { continue };
            if let Some(step) = entry.waiting.take() {
                entry.send_state = SendState::InFlight(step.clone());
                steps.push(step);
            }
            self.insert(id, entry);
        }
        steps
    }

    /// Forgets what the ledger has answered: at once where `shows` it, and some time later anyway.
    pub fn sweep(&mut self, now: Instant, shows: impl Fn(&UncommittedStep) -> bool) {
        let over = |entry: &PendingSession| match (&entry.send_state, &entry.waiting) {
            (SendState::Done(step), None) => {
                shows(step) || now.saturating_duration_since(entry.updated_at) > COMMITTED_RETENTION
            }
            _ => false,
        };
        let gone: Vec<SessionId> = self.sessions.iter().filter(|(_, entry)| over(entry)).map(|(id, _)| *id).collect();
        gone.into_iter().for_each(|id| drop(self.remove(id)));
    }

    /// The newest step of a session, and how long it is over.
    pub fn newest(&self, session: SessionId, now: Instant) -> Option<(Arc<UncommittedStep>, Duration)> {
        let entry = self.sessions.get(&session)?;
        Some((entry.newest()?.clone(), now.saturating_duration_since(entry.updated_at)))
    }

    /// The step whose head is the deepest prefix of `chain` that is deeper than `beyond`.
    pub fn deepest_head(&self, scope: Scope, chain: &PrefixChain, beyond: Blocks) -> Option<SessionId> {
        let depths = self.heads.range(beyond.0 + 1..=chain.blocks().0.max(beyond.0 + 1)).rev();
        depths.filter_map(|(depth, at)| at.get(&(scope, chain.prefix(Blocks(*depth))?))).next().copied()
    }

    /// Sessions whose newest step the ledger may not have.
    pub fn pending_count(&self) -> usize {
        self.sessions
            .values()
            .filter(|entry| !matches!((&entry.send_state, &entry.waiting), (SendState::Done(_), None)))
            .count()
    }

    /// Whether nothing is remembered.
    pub fn is_empty(&self) -> bool {
        self.sessions.is_empty()
    }

    /// Sessions that were forgotten because of too many.
    pub fn dropped_count(&self) -> u64 {
        self.dropped
    }

    fn next_sequence(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence
    }

    /// Takes a session out of all indexes.
    fn remove(&mut self, id: SessionId) -> Option<PendingSession> {
        let entry = self.sessions.remove(&id)?;
        self.blocks -= entry.blocks();
        self.idle.remove(&(entry.sequence, id));
        if let Some((scope, head)) = entry.newest().and_then(|step| Some((step.scope(), step.head()?)))
            && let Some(at) = self.heads.get_mut(&head.blocks.0)
        {
            if at.get(&(scope, head.id)) == Some(&id) {
                at.remove(&(scope, head.id));
            }
            if at.is_empty() {
                self.heads.remove(&head.blocks.0);
            }
        }
        Some(entry)
    }

    /// Puts it back, if there is anything in it.
    fn insert(&mut self, id: SessionId, entry: PendingSession) {
        let Some((scope, head)) = entry.newest().and_then(|step| Some((step.scope(), step.head()?))) else { return };
        self.blocks += entry.blocks();
        self.idle.insert((entry.sequence, id));
        self.heads.entry(head.blocks.0).or_default().insert((scope, head.id), id);
        self.sessions.insert(id, entry);
    }

    /// At the bound the session that was idle longest is forgotten, unless it is on its way: the queue bounds those.
    fn enforce_limits(&mut self) {
        while self.sessions.len() > self.limits.sessions || self.blocks > self.limits.blocks {
            let free = |(_, id): &&(u64, SessionId)| !self.sessions[id].is_on_its_way();
            let Some((_, id)) = self.idle.iter().find(free).copied() else { return };
            let waited = self.remove(id).is_some_and(|entry| entry.waiting.is_some());
            self.dropped += u64::from(waited);
        }
    }
}

#[cfg(test)]
mod tests;
