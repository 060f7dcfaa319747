//! The state machine that Raft drives: applies entries to the ledger, publishes the view, then answers.

use std::io;
use std::sync::Arc;

use futures::{Stream, StreamExt};
use ledger::{Changed, Entry, Ledger, Outcome};
use openraft::storage::{ApplyResponder, EntryResponder, RaftStateMachine};
use openraft::{AsyncRuntime, EntryPayload, OptionalSend, RaftSnapshotBuilder};

use crate::levels::{Levels, Unreadable};
use crate::snapshot::{Body, SnapshotStore};
use crate::types::{Answers, LogId, Payload, Snapshot, SnapshotMeta, StoredMembership, Types};
use crate::view::Publisher;

/// Entries whose answers wait for one publication of the view.
const PUBLISH_EVERY: usize = 64;

/// An entry that was just applied.
#[derive(Debug)]
pub struct Applied<'a> {
    /// Where it lies.
    pub id: LogId,
    /// What it says; none for an entry of Raft's own.
    pub entry: Option<&'a Entry>,
    /// One outcome for each of its submissions.
    pub outcomes: &'a [Outcome],
    /// The records that it changed.
    pub changes: &'a [Changed],
    /// The ledger right after it.
    pub ledger: &'a Ledger,
}

/// Sees what a machine does; changes nothing.
pub trait Witness: Send + Sync + 'static {
    /// An entry was applied.
    fn applied(&self, applied: &Applied<'_>);

    /// The ledger was replaced by a snapshot's.
    fn installed(&self, ledger: &Ledger) {
        let _ = ledger;
    }

    /// An entry or a snapshot that this release cannot read: nothing is applied any more.
    fn unreadable(&self, unreadable: Unreadable) {
        let _ = unreadable;
    }

    /// Readers see what was applied or installed so far.
    fn published(&self, ledger: &Ledger) {
        let _ = ledger;
    }
}

/// The ledger, and how far it is.
#[derive(Debug)]
pub struct Machine<S, W> {
    ledger: Ledger,
    applied: Option<LogId>,
    membership: StoredMembership,
    snapshots: S,
    publisher: Arc<Publisher>,
    witness: Arc<W>,
    /// What this release can read.
    levels: Levels,
}

impl<S: SnapshotStore, W: Witness> Machine<S, W> {
    /// A machine that has applied nothing; Raft brings it up from the snapshot and the log.
    pub fn new(snapshots: S, publisher: Arc<Publisher>, (witness, levels): (Arc<W>, Levels)) -> Self {
        let (ledger, membership) = (Ledger::default(), StoredMembership::default());
        Self { ledger, applied: None, membership, snapshots, publisher, witness, levels }
    }

    /// Whoever cannot read something stops before it, wherever it came from: to skip it would make another ledger of it.
    fn readable(&self, read: Result<(), Unreadable>) -> Result<(), io::Error> {
        read.map_err(|unreadable| {
            self.witness.unreadable(unreadable);
            io::Error::other(unreadable)
        })
    }

    fn meta(&self) -> SnapshotMeta {
        SnapshotMeta { last_log_id: self.applied, last_membership: self.membership.clone() }
    }

    fn apply_one(&mut self, id: LogId, payload: Payload) -> Result<Answers, io::Error> {
        if let EntryPayload::Normal(proposal) = &payload {
            self.readable(self.levels.check(&proposal.0))?;
        }
        self.applied = Some(id);
        match payload {
            EntryPayload::Normal(proposal) => {
                let outcomes = self.ledger.apply(id.index, &proposal.0);
                let changes = self.ledger.take_changes();
                let (entry, ledger) = (Some(&*proposal.0), &self.ledger);
                self.witness.applied(&Applied { id, entry, outcomes: &outcomes, changes: &changes, ledger });
                return Ok(Answers(outcomes));
            }
            EntryPayload::Membership(membership) => self.membership = StoredMembership::new(Some(id), membership),
            EntryPayload::Blank => {}
        }
        self.ledger.skip(id.index);
        self.witness.applied(&Applied { id, entry: None, outcomes: &[], changes: &[], ledger: &self.ledger });
        Ok(Answers::default())
    }

    /// Publishes what was applied, then answers: who has an answer finds it in the view.
    fn publish<R: AsyncRuntime>(&self, answers: &mut Vec<(Option<ApplyResponder<Types<R>>>, Answers)>) {
        let before = self.publisher.ledger(self.ledger.clone());
        self.witness.published(&self.ledger);
        for (responder, answer) in answers.drain(..) {
            if let Some(responder) = responder {
                responder.send(answer);
            }
        }
        before.older.into_iter().for_each(|view| self.snapshots.discard(view));
        drop(before.last);
    }
}

impl<R: AsyncRuntime, S: SnapshotStore, W: Witness> RaftStateMachine<Types<R>> for Machine<S, W> {
    type SnapshotData = S::Handle;
    type SnapshotBuilder = Builder<S>;

    async fn applied_state(&mut self) -> Result<(Option<LogId>, StoredMembership), io::Error> {
        Ok((self.applied, self.membership.clone()))
    }

    async fn apply<E>(&mut self, mut entries: E) -> Result<(), io::Error>
    where
        E: Stream<Item = Result<EntryResponder<Types<R>>, io::Error>> + Unpin + OptionalSend,
    {
        let mut answers = Vec::new();
        while let Some(next) = entries.next().await {
            let (entry, responder) = next?;
            let answer = self.apply_one(entry.log_id, entry.payload)?;
            answers.push((responder, answer));
            if answers.len() >= PUBLISH_EVERY {
                self.publish(&mut answers);
            }
        }
        self.publish(&mut answers);
        Ok(())
    }

    async fn get_snapshot_builder(&mut self) -> Builder<S> {
        let body = Body { meta: self.meta(), ledger: self.ledger.clone() };
        Builder { body: Some(body), snapshots: self.snapshots.clone() }
    }

    async fn install_snapshot(&mut self, meta: &SnapshotMeta, snapshot: S::Handle) -> Result<(), io::Error> {
        let body = self.snapshots.install(snapshot).await?;
        self.readable(self.levels.check_level(body.ledger.level()))?;
        self.ledger = body.ledger;
        self.applied = meta.last_log_id;
        self.membership = meta.last_membership.clone();
        self.witness.installed(&self.ledger);
        let before = self.publisher.ledger(self.ledger.clone());
        self.witness.published(&self.ledger);
        before.last.into_iter().chain(before.older).for_each(|view| self.snapshots.discard(view));
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<Snapshot<S::Handle>>, io::Error> {
        self.snapshots.current().await
    }
}

/// Writes a snapshot of the ledger as it was when this was made.
#[derive(Debug)]
pub struct Builder<S> {
    body: Option<Body>,
    snapshots: S,
}

impl<R: AsyncRuntime, S: SnapshotStore> RaftSnapshotBuilder<Types<R>> for Builder<S> {
    type SnapshotData = S::Handle;

    async fn build_snapshot(&mut self) -> Result<Snapshot<S::Handle>, io::Error> {
        // Given away, so that what only the snapshot still holds is freed where it was written.
        let body = self.body.take().ok_or_else(|| io::Error::other("a builder builds one snapshot"))?;
        self.snapshots.write(body).await
    }
}
