//! Steps that were served here and that this node's view of the ledger does not show yet. Pure; time is an argument.
//!
//! One step of a session is on its way to the ledger at a time, and one waits; a newer one takes the place of the one that
//! waits, since it holds all of it. So a quorum that is slow, or gone for an hour, is told once where each session stands,
//! from the last head that it acknowledged. Meanwhile the next step of a session is planned on these.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ownership::ledger::{Command, Custody, Origin, Point, Scope, StepCommit};
use smart_default::SmartDefault;
use vocabulary::{Blocks, Chain, NodeId, Owner, PrefixId, SessionId};

/// How long a step that the ledger has is remembered where the view does not show it: another node may have applied it
/// before this one.
const LINGERS: Duration = Duration::from_secs(5);

/// A served step, as the ledger is to be told of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finished {
    /// Whose step.
    pub session: SessionId,
    /// What the session was forked from, where it is new.
    pub parent: Option<SessionId>,
    /// Whose blocks, of which model.
    pub origin: Origin,
    /// The sealed part of prompt and answer.
    pub chain: Chain,
    /// The head that the client rewrote.
    pub replaces: Option<PrefixId>,
    /// Who served it.
    pub owner: Owner,
    /// What becomes of the decode ownership.
    pub custody: Custody,
    /// The head it was announced on.
    pub base: PrefixId,
}

impl Finished {
    /// The session's new head.
    pub fn head(&self) -> Option<Point> {
        Point::on(&self.chain, self.chain.blocks())
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
            replaces: self.replaces,
            owner: self.owner,
            custody: self.custody,
            shape: self.origin.shape,
            router,
        })
    }

    /// Blocks that this chain shares with another of the same root.
    pub fn shared(&self, chain: &Chain) -> Blocks {
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
    fn extends(&self, older: &Finished) -> bool {
        self.scope() == older.scope() && older.head().is_some_and(|head| head.is_on(&self.chain))
    }
}

/// Whether there is a quorum to tell.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reach {
    /// As far as this node knows.
    Quorum,
    /// Nothing that is said now would be taken.
    Nobody,
}

/// What is known of a step that was sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Told {
    /// The ledger has answered, whatever it said.
    Answered,
    /// It may have it or not; said again it does no harm.
    Unknown,
}

/// What is to be done now that a step is over.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Taken {
    /// To be sent at once.
    pub send: Option<Arc<Finished>>,
    /// Will not be sent any more: a newer one holds all of it.
    pub replaced: Option<Arc<Finished>>,
    /// To be sent at once, beside the others: another branch of the session, which the newer one does not hold.
    pub branch: Option<Arc<Finished>>,
}

/// How much is remembered. By default 64 MiB.
#[derive(Clone, Copy, PartialEq, Eq, Debug, SmartDefault)]
pub struct Limits {
    /// Sessions.
    #[default(1 << 16)]
    pub sessions: usize,
    /// Blocks of all their chains; each takes 16 bytes.
    #[default(4 << 20)]
    pub blocks: usize,
}

#[derive(Clone, Debug, Default)]
enum Sent {
    #[default]
    Nothing,
    OnItsWay(Arc<Finished>),
    Done(Arc<Finished>),
}

#[derive(Clone, Debug)]
struct Entry {
    sent: Sent,
    waiting: Option<Arc<Finished>>,
    /// Order of the last change.
    turn: u64,
    at: Instant,
}

impl Entry {
    fn newest(&self) -> Option<&Arc<Finished>> {
        self.waiting.as_ref().or(match &self.sent {
            Sent::Nothing => None,
            Sent::OnItsWay(step) | Sent::Done(step) => Some(step),
        })
    }

    fn blocks(&self) -> usize {
        let sent = match &self.sent {
            Sent::Nothing => 0,
            Sent::OnItsWay(step) | Sent::Done(step) => step.chain.ids.len(),
        };
        sent + self.waiting.as_ref().map_or(0, |step| step.chain.ids.len())
    }

    fn is_on_its_way(&self) -> bool {
        matches!(self.sent, Sent::OnItsWay(_))
    }
}

/// All of them.
#[derive(Debug, Default)]
pub struct Unapplied {
    limits: Limits,
    sessions: HashMap<SessionId, Entry>,
    /// Sessions by depth and place of their newest head.
    heads: BTreeMap<u64, HashMap<(Scope, PrefixId), SessionId>>,
    /// Sessions, the one that was idle longest first.
    idle: BTreeSet<(u64, SessionId)>,
    blocks: usize,
    turn: u64,
    dropped: u64,
}

impl Unapplied {
    /// Remembers nothing yet.
    pub fn new(limits: Limits) -> Self {
        Self { limits, ..Self::default() }
    }

    /// A step is over.
    pub fn take(&mut self, step: Finished, reach: Reach, now: Instant) -> Taken {
        let mut taken = Taken::default();
        let mut entry =
            self.out(step.session).unwrap_or(Entry { sent: Sent::Nothing, waiting: None, turn: 0, at: now });
        let mut step = step;
        if let Some(older) = entry.waiting.take() {
            // The session may not be there yet, and then only the older one said what it comes from.
            step.parent = step.parent.or(older.parent);
            if step.extends(&older) || reach == Reach::Nobody {
                taken.replaced = Some(older);
            } else {
                taken.branch = Some(older);
            }
        }
        let step = Arc::new(step);
        if entry.is_on_its_way() || reach == Reach::Nobody {
            entry.waiting = Some(step.clone());
        } else {
            entry.sent = Sent::OnItsWay(step.clone());
            taken.send = Some(step.clone());
        }
        (entry.turn, entry.at) = (self.next_turn(), now);
        self.put(step.session, entry);
        self.keep_bounds();
        taken
    }

    /// A step that was sent came to an end; the one to be sent now.
    pub fn told(&mut self, step: &Arc<Finished>, told: Told, reach: Reach) -> Option<Arc<Finished>> {
        let mut entry = self.out(step.session)?;
        let mut next = None;
        if matches!(&entry.sent, Sent::OnItsWay(sent) if Arc::ptr_eq(sent, step)) {
            entry.sent = match told {
                Told::Answered => Sent::Done(step.clone()),
                Told::Unknown => Sent::Nothing,
            };
            match (told, entry.waiting.take()) {
                (Told::Unknown, None) => entry.waiting = Some(step.clone()),
                (Told::Answered, Some(waiting)) if reach == Reach::Quorum => {
                    entry.sent = Sent::OnItsWay(waiting.clone());
                    next = Some(waiting);
                }
                (_, waiting) => entry.waiting = waiting,
            }
        }
        self.put(step.session, entry);
        next
    }

    /// Steps that wait although nothing of their session is on its way, at most so many; they are from now on.
    pub fn due(&mut self, most: usize) -> Vec<Arc<Finished>> {
        let waits = |entry: &Entry| entry.waiting.is_some() && !entry.is_on_its_way();
        let due: Vec<SessionId> =
            self.idle.iter().filter(|(_, id)| waits(&self.sessions[id])).take(most).map(|(_, id)| *id).collect();
        let mut steps = Vec::with_capacity(due.len());
        for id in due {
            let Some(mut entry) = self.out(id) else { continue };
            if let Some(step) = entry.waiting.take() {
                entry.sent = Sent::OnItsWay(step.clone());
                steps.push(step);
            }
            self.put(id, entry);
        }
        steps
    }

    /// Forgets what the ledger has answered: at once where `shows` it, and some time later anyway.
    pub fn sweep(&mut self, now: Instant, shows: impl Fn(&Finished) -> bool) {
        let over = |entry: &Entry| match (&entry.sent, &entry.waiting) {
            (Sent::Done(step), None) => shows(step) || now.saturating_duration_since(entry.at) > LINGERS,
            _ => false,
        };
        let gone: Vec<SessionId> = self.sessions.iter().filter(|(_, entry)| over(entry)).map(|(id, _)| *id).collect();
        gone.into_iter().for_each(|id| drop(self.out(id)));
    }

    /// The newest step of a session, and how long it is over.
    pub fn newest(&self, session: SessionId, now: Instant) -> Option<(Arc<Finished>, Duration)> {
        let entry = self.sessions.get(&session)?;
        Some((entry.newest()?.clone(), now.saturating_duration_since(entry.at)))
    }

    /// The step whose head is the deepest prefix of `chain` that is deeper than `beyond`.
    pub fn deepest(&self, scope: Scope, chain: &Chain, beyond: Blocks) -> Option<SessionId> {
        let depths = self.heads.range(beyond.0 + 1..=chain.blocks().0.max(beyond.0 + 1)).rev();
        depths.filter_map(|(depth, at)| at.get(&(scope, chain.prefix(Blocks(*depth))?))).next().copied()
    }

    /// Sessions whose newest step the ledger may not have.
    pub fn untold(&self) -> usize {
        self.sessions.values().filter(|entry| !matches!((&entry.sent, &entry.waiting), (Sent::Done(_), None))).count()
    }

    /// Whether nothing is remembered.
    pub fn is_empty(&self) -> bool {
        self.sessions.is_empty()
    }

    /// Sessions that were forgotten because of too many.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    fn next_turn(&mut self) -> u64 {
        self.turn += 1;
        self.turn
    }

    /// Takes a session out of all indexes.
    fn out(&mut self, id: SessionId) -> Option<Entry> {
        let entry = self.sessions.remove(&id)?;
        self.blocks -= entry.blocks();
        self.idle.remove(&(entry.turn, id));
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
    fn put(&mut self, id: SessionId, entry: Entry) {
        let Some((scope, head)) = entry.newest().and_then(|step| Some((step.scope(), step.head()?))) else { return };
        self.blocks += entry.blocks();
        self.idle.insert((entry.turn, id));
        self.heads.entry(head.blocks.0).or_default().insert((scope, head.id), id);
        self.sessions.insert(id, entry);
    }

    /// At the bound the session that was idle longest is forgotten, unless it is on its way: the queue bounds those.
    fn keep_bounds(&mut self) {
        while self.sessions.len() > self.limits.sessions || self.blocks > self.limits.blocks {
            let free = |(_, id): &&(u64, SessionId)| !self.sessions[id].is_on_its_way();
            let Some((_, id)) = self.idle.iter().find(free).copied() else { return };
            let waited = self.out(id).is_some_and(|entry| entry.waiting.is_some());
            self.dropped += u64::from(waited);
        }
    }
}

#[cfg(test)]
mod tests;
