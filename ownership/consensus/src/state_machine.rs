//! The state machine that Raft drives: applies entries to the ledger, publishes the view, then answers.

use std::io;
use std::sync::Arc;

use futures::{Stream, StreamExt};
use ledger::{Ledger, LedgerEntry, Outcome, RecordUpdate};
use openraft::storage::{ApplyResponder, EntryResponder, RaftStateMachine};
use openraft::{AsyncRuntime, EntryPayload, OptionalSend, RaftSnapshotBuilder};

use crate::levels::{SupportedLevels, UnsupportedLevel};
use crate::snapshot::{SnapshotContents, SnapshotStore};
use crate::types::{EntryOutcomes, LogId, Payload, Snapshot, SnapshotMeta, StoredMembership, TypeConfig};
use crate::view::ViewPublisher;

/// Entries whose answers wait for one publication of the view.
const PUBLISH_EVERY: usize = 64;

/// An entry that was just applied.
#[derive(Debug)]
pub struct AppliedEntry<'a> {
    /// Where it lies.
    pub id: LogId,
    /// What it says; none for an entry of Raft's own.
    pub entry: Option<&'a LedgerEntry>,
    /// One outcome for each of its submissions.
    pub outcomes: &'a [Outcome],
    /// The records that it changed.
    pub changes: &'a [RecordUpdate],
    /// The ledger right after it.
    pub ledger: &'a Ledger,
}

/// Sees what a machine does; changes nothing.
pub trait ApplyObserver: Send + Sync + 'static {
    /// An entry was applied.
    fn on_applied(&self, applied: &AppliedEntry<'_>);

    /// The ledger was replaced by a snapshot's.
    fn on_installed(&self, ledger: &Ledger) {
        let _ = ledger;
    }

    /// An entry or a snapshot that this release cannot read: nothing is applied any more.
    fn on_unreadable(&self, unreadable: UnsupportedLevel) {
        let _ = unreadable;
    }

    /// Readers see what was applied or installed so far.
    fn on_published(&self, ledger: &Ledger) {
        let _ = ledger;
    }
}

/// The ledger, and how far it is.
#[derive(Debug)]
pub struct StateMachine<S, W> {
    ledger: Ledger,
    applied: Option<LogId>,
    membership: StoredMembership,
    snapshots: S,
    publisher: Arc<ViewPublisher>,
    observer: Arc<W>,
    /// What this release can read.
    levels: SupportedLevels,
}

impl<S: SnapshotStore, W: ApplyObserver> StateMachine<S, W> {
    /// A machine that has applied nothing; Raft brings it up from the snapshot and the log.
    pub fn new(snapshots: S, publisher: Arc<ViewPublisher>, (observer, levels): (Arc<W>, SupportedLevels)) -> Self {
        let (ledger, membership) = (Ledger::default(), StoredMembership::default());
        Self { ledger, applied: None, membership, snapshots, publisher, observer, levels }
    }

    /// Whoever cannot read something stops before it, wherever it came from: to skip it would make another ledger of it.
    fn check_readable(&self, read: Result<(), UnsupportedLevel>) -> Result<(), io::Error> {
        read.map_err(|unreadable| {
            self.observer.on_unreadable(unreadable);
            io::Error::other(unreadable)
        })
    }

    fn meta(&self) -> SnapshotMeta {
        SnapshotMeta { last_log_id: self.applied, last_membership: self.membership.clone() }
    }

    fn apply_one(&mut self, id: LogId, payload: Payload) -> Result<EntryOutcomes, io::Error> {
        if let EntryPayload::Normal(proposal) = &payload {
            self.check_readable(self.levels.check(&proposal.0))?;
        }
        self.applied = Some(id);
        match payload {
            EntryPayload::Normal(proposal) => {
                let outcomes = self.ledger.apply(id.index, &proposal.0);
                let changes = self.ledger.take_changes();
                let (entry, ledger) = (Some(&*proposal.0), &self.ledger);
                self.observer.on_applied(&AppliedEntry { id, entry, outcomes: &outcomes, changes: &changes, ledger });
                return Ok(EntryOutcomes(outcomes));
            }
            EntryPayload::Membership(membership) => self.membership = StoredMembership::new(Some(id), membership),
            EntryPayload::Blank => {}
        }
        self.ledger.apply_empty(id.index);
        self.observer.on_applied(&AppliedEntry { id, entry: None, outcomes: &[], changes: &[], ledger: &self.ledger });
        Ok(EntryOutcomes::default())
    }

    /// Publishes what was applied, then answers: who has an answer finds it in the view.
    fn publish<R: AsyncRuntime>(&self, answers: &mut Vec<(Option<ApplyResponder<TypeConfig<R>>>, EntryOutcomes)>) {
        let before = self.publisher.publish_ledger(self.ledger.clone());
        self.observer.on_published(&self.ledger);
        for (responder, answer) in answers.drain(..) {
            if let Some(responder) = responder {
                responder.send(answer);
            }
        }
        before.retained.into_iter().for_each(|view| self.snapshots.discard(view));
        drop(before.current);
    }
}

impl<R: AsyncRuntime, S: SnapshotStore, W: ApplyObserver> RaftStateMachine<TypeConfig<R>> for StateMachine<S, W> {
    type SnapshotData = S::Handle;
    type SnapshotBuilder = SnapshotBuilder<S>;

    async fn applied_state(&mut self) -> Result<(Option<LogId>, StoredMembership), io::Error> {
        Ok((self.applied, self.membership.clone()))
    }

    async fn apply<E>(&mut self, mut entries: E) -> Result<(), io::Error>
    where
        E: Stream<Item = Result<EntryResponder<TypeConfig<R>>, io::Error>> + Unpin + OptionalSend,
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

    async fn get_snapshot_builder(&mut self) -> SnapshotBuilder<S> {
        let body = SnapshotContents { meta: self.meta(), ledger: self.ledger.clone() };
        SnapshotBuilder { body: Some(body), snapshots: self.snapshots.clone() }
    }

    async fn install_snapshot(&mut self, meta: &SnapshotMeta, snapshot: S::Handle) -> Result<(), io::Error> {
        let body = self.snapshots.install(snapshot).await?;
        self.check_readable(self.levels.check_level(body.ledger.level()))?;
        self.ledger = body.ledger;
        self.applied = meta.last_log_id;
        self.membership = meta.last_membership.clone();
        self.observer.on_installed(&self.ledger);
        let before = self.publisher.publish_ledger(self.ledger.clone());
        self.observer.on_published(&self.ledger);
        before.current.into_iter().chain(before.retained).for_each(|view| self.snapshots.discard(view));
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<Snapshot<S::Handle>>, io::Error> {
        self.snapshots.current().await
    }
}

/// Writes a snapshot of the ledger as it was when this was made.
#[derive(Debug)]
pub struct SnapshotBuilder<S> {
    body: Option<SnapshotContents>,
    snapshots: S,
}

impl<R: AsyncRuntime, S: SnapshotStore> RaftSnapshotBuilder<TypeConfig<R>> for SnapshotBuilder<S> {
    type SnapshotData = S::Handle;

    async fn build_snapshot(&mut self) -> Result<Snapshot<S::Handle>, io::Error> {
        // Given away, so that what only the snapshot still holds is freed where it was written.
        let body = self.body.take().ok_or_else(|| io::Error::other("a builder builds one snapshot"))?;
        self.snapshots.write(body).await
    }
}
