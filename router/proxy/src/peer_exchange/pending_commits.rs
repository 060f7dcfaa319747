//! Pending commits: steps that this router served and its view of the ledger does not show yet. Pure: time is an
//! argument.
//!
//! Per session, one step is in flight to the ledger and one waits; a newer step replaces the waiting one, since it
//! contains all of it. So a quorum that is slow, or was gone for an hour, is told once where each session stands, from
//! the last head that it acknowledged. Meanwhile the next step of a session is planned on the pending ones.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ownership::ledger::{ChainDescriptor, Command, OwnershipTransition, PrefixPoint, Scope, StepCommit};
use smart_default::SmartDefault;
use vocabulary::{Blocks, NodeId, Owner, PrefixChain, PrefixId, SessionId};

/// How long a committed step is kept if the view does not show it: another node may have applied it before this one.
const COMMITTED_RETENTION: Duration = Duration::from_secs(5);

/// A served step, as it will be committed to the ledger.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UncommittedStep {
    /// The session of the step.
    pub session: SessionId,
    /// The session that this one was forked from, where it is new.
    pub parent: Option<SessionId>,
    /// Tenant, model, root and block spec of the chain.
    pub origin: ChainDescriptor,
    /// The sealed part of prompt and answer.
    pub chain: PrefixChain,
    /// The head whose history the client rewrote.
    pub replaces: Option<PrefixId>,
    /// The worker incarnation and rank that served it.
    pub owner: Owner,
    /// How the decode ownership changes.
    pub ownership_transition: OwnershipTransition,
    /// The head on which its intent was announced.
    pub base: PrefixId,
}

impl UncommittedStep {
    /// Returns the session's new head.
    pub fn head(&self) -> Option<PrefixPoint> {
        PrefixPoint::on_chain(&self.chain, self.chain.blocks())
    }

    /// Returns the scope within which prefixes are shared.
    pub fn scope(&self) -> Scope {
        self.origin.scope()
    }

    /// Returns the command for a ledger that knows the chain's first `base` blocks; `None` when there is nothing to
    /// commit.
    pub fn command(&self, base: Blocks, node: NodeId) -> Option<Command> {
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
            ownership: self.ownership_transition,
            shape: self.origin.shape,
            router: node,
        })
    }

    /// Number of leading blocks that this chain shares with another one of the same root.
    pub fn shared_blocks(&self, chain: &PrefixChain) -> Blocks {
        let (mut low, mut high) = (0, self.chain.ids.len().min(chain.ids.len()));
        // Binary search: every id covers all blocks before it, so nothing is equal after the first difference.
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

    /// Whether it contains all of `older`, in the same scope.
    fn extends(&self, older: &UncommittedStep) -> bool {
        self.scope() == older.scope() && older.head().is_some_and(|head| head.is_on_chain(&self.chain))
    }
}

/// Whether a quorum is reachable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QuorumReachability {
    /// Reachable, as far as this node knows.
    Quorum,
    /// No commit would be accepted now.
    NoQuorum,
}

/// Result of submitting a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SubmissionOutcome {
    /// The ledger has answered, whatever its answer.
    Answered,
    /// The ledger may have it or not; submitting it again is harmless.
    Unknown,
}

/// What to do after adding a step.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SubmissionActions {
    /// Submit this step at once.
    pub send: Option<Arc<UncommittedStep>>,
    /// This step will not be submitted: a newer one replaces it.
    pub replaced: Option<Arc<UncommittedStep>>,
    /// Submit this step at once, too: another branch of the session, which the newer one does not contain.
    pub branch: Option<Arc<UncommittedStep>>,
}

/// Limits of the pending commits. The defaults allow 64 MiB.
#[derive(Clone, Copy, PartialEq, Eq, Debug, SmartDefault)]
pub struct PendingCommitLimits {
    /// Number of sessions.
    #[default(1 << 16)]
    pub sessions: usize,
    /// Blocks of all chains; each takes 16 bytes.
    #[default(4 << 20)]
    pub blocks: usize,
}

#[derive(Clone, Debug, Default)]
enum SubmissionState {
    #[default]
    NotSent,
    InFlight(Arc<UncommittedStep>),
    Done(Arc<UncommittedStep>),
}

#[derive(Clone, Debug)]
struct PendingSession {
    send_state: SubmissionState,
    waiting: Option<Arc<UncommittedStep>>,
    /// Sequence number of the last change.
    sequence: u64,
    updated_at: Instant,
}

impl PendingSession {
    fn newest(&self) -> Option<&Arc<UncommittedStep>> {
        self.waiting.as_ref().or(match &self.send_state {
            SubmissionState::NotSent => None,
            SubmissionState::InFlight(step) | SubmissionState::Done(step) => Some(step),
        })
    }

    fn blocks(&self) -> usize {
        let sent = match &self.send_state {
            SubmissionState::NotSent => 0,
            SubmissionState::InFlight(step) | SubmissionState::Done(step) => step.chain.ids.len(),
        };
        sent + self.waiting.as_ref().map_or(0, |step| step.chain.ids.len())
    }

    fn is_on_its_way(&self) -> bool {
        matches!(self.send_state, SubmissionState::InFlight(_))
    }
}

/// The pending commits of all sessions.
#[derive(Debug, Default)]
pub struct PendingCommits {
    limits: PendingCommitLimits,
    sessions: HashMap<SessionId, PendingSession>,
    /// Sessions by depth and id of their newest head.
    heads: BTreeMap<u64, HashMap<(Scope, PrefixId), SessionId>>,
    /// Sessions, the longest idle first.
    idle: BTreeSet<(u64, SessionId)>,
    blocks: usize,
    sequence: u64,
    dropped: u64,
}

impl PendingCommits {
    /// Returns an empty set.
    pub fn new(limits: PendingCommitLimits) -> Self {
        Self { limits, ..Self::default() }
    }

    /// Adds a step that has ended.
    pub fn add(&mut self, step: UncommittedStep, reach: QuorumReachability, now: Instant) -> SubmissionActions {
        let mut actions = SubmissionActions::default();
        let mut entry = self.remove(step.session).unwrap_or(PendingSession {
            send_state: SubmissionState::NotSent,
            waiting: None,
            sequence: 0,
            updated_at: now,
        });
        let mut step = step;
        if let Some(older) = entry.waiting.take() {
            // The ledger may not have the session yet, and then only the older step says where it comes from.
            step.parent = step.parent.or(older.parent);
            if step.extends(&older) || reach == QuorumReachability::NoQuorum {
                actions.replaced = Some(older);
            } else {
                actions.branch = Some(older);
            }
        }
        let step = Arc::new(step);
        if entry.is_on_its_way() || reach == QuorumReachability::NoQuorum {
            entry.waiting = Some(step.clone());
        } else {
            entry.send_state = SubmissionState::InFlight(step.clone());
            actions.send = Some(step.clone());
        }
        (entry.sequence, entry.updated_at) = (self.next_sequence(), now);
        self.insert(step.session, entry);
        self.enforce_limits();
        actions
    }

    /// Records the result of a submitted step; returns the step to submit next.
    pub fn complete(
        &mut self,
        step: &Arc<UncommittedStep>,
        outcome: SubmissionOutcome,
        reach: QuorumReachability,
    ) -> Option<Arc<UncommittedStep>> {
        let mut entry = self.remove(step.session)?;
        let mut next = None;
        if matches!(&entry.send_state, SubmissionState::InFlight(sent) if Arc::ptr_eq(sent, step)) {
            entry.send_state = match outcome {
                SubmissionOutcome::Answered => SubmissionState::Done(step.clone()),
                SubmissionOutcome::Unknown => SubmissionState::NotSent,
            };
            match (outcome, entry.waiting.take()) {
                (SubmissionOutcome::Unknown, None) => entry.waiting = Some(step.clone()),
                (SubmissionOutcome::Answered, Some(waiting)) if reach == QuorumReachability::Quorum => {
                    entry.send_state = SubmissionState::InFlight(waiting.clone());
                    next = Some(waiting);
                }
                (_, waiting) => entry.waiting = waiting,
            }
        }
        self.insert(step.session, entry);
        next
    }

    /// Takes at most `most` waiting steps whose sessions have no step in flight; these are in flight from now on.
    pub fn take_due(&mut self, most: usize) -> Vec<Arc<UncommittedStep>> {
        let waits = |entry: &PendingSession| entry.waiting.is_some() && !entry.is_on_its_way();
        let due: Vec<SessionId> =
            self.idle.iter().filter(|(_, id)| waits(&self.sessions[id])).take(most).map(|(_, id)| *id).collect();
        let mut steps = Vec::with_capacity(due.len());
        for id in due {
            let Some(mut entry) = self.remove(id) else { continue };
            if let Some(step) = entry.waiting.take() {
                entry.send_state = SubmissionState::InFlight(step.clone());
                steps.push(step);
            }
            self.insert(id, entry);
        }
        steps
    }

    /// Removes committed steps: at once where `shows` returns true, else after `COMMITTED_RETENTION`.
    pub fn sweep(&mut self, now: Instant, shows: impl Fn(&UncommittedStep) -> bool) {
        let over = |entry: &PendingSession| match (&entry.send_state, &entry.waiting) {
            (SubmissionState::Done(step), None) => {
                shows(step) || now.saturating_duration_since(entry.updated_at) > COMMITTED_RETENTION
            }
            _ => false,
        };
        let gone: Vec<SessionId> = self.sessions.iter().filter(|(_, entry)| over(entry)).map(|(id, _)| *id).collect();
        gone.into_iter().for_each(|id| drop(self.remove(id)));
    }

    /// Returns the newest step of a session, and the time since it ended.
    pub fn newest(&self, session: SessionId, now: Instant) -> Option<(Arc<UncommittedStep>, Duration)> {
        let entry = self.sessions.get(&session)?;
        Some((entry.newest()?.clone(), now.saturating_duration_since(entry.updated_at)))
    }

    /// Returns the session whose head is the deepest prefix of `chain` deeper than `beyond`.
    pub fn deepest_head(&self, scope: Scope, chain: &PrefixChain, beyond: Blocks) -> Option<SessionId> {
        let depths = self.heads.range(beyond.0 + 1..=chain.blocks().0.max(beyond.0 + 1)).rev();
        depths.filter_map(|(depth, at)| at.get(&(scope, chain.prefix(Blocks(*depth))?))).next().copied()
    }

    /// Number of sessions whose newest step may not be committed.
    pub fn pending_count(&self) -> usize {
        self.sessions
            .values()
            .filter(|entry| !matches!((&entry.send_state, &entry.waiting), (SubmissionState::Done(_), None)))
            .count()
    }

    /// Whether nothing is pending.
    pub fn is_empty(&self) -> bool {
        self.sessions.is_empty()
    }

    /// Number of sessions that were dropped because a limit was reached.
    pub fn dropped_count(&self) -> u64 {
        self.dropped
    }

    fn next_sequence(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence
    }

    /// Removes a session from all indexes.
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

    /// Inserts the session again, unless it has no step.
    fn insert(&mut self, id: SessionId, entry: PendingSession) {
        let Some((scope, head)) = entry.newest().and_then(|step| Some((step.scope(), step.head()?))) else { return };
        self.blocks += entry.blocks();
        self.idle.insert((entry.sequence, id));
        self.heads.entry(head.blocks.0).or_default().insert((scope, head.id), id);
        self.sessions.insert(id, entry);
    }

    /// Drops the longest idle sessions beyond the limits, except those with a step in flight, which the queue bounds.
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
