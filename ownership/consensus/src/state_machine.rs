//! The replicated state machine: applies entries to the ledger, publishes the view, then answers the clients.

use std::future::Future;
use std::io;
use std::sync::Arc;

use futures::{Stream, StreamExt};
use ledger::{Ledger, LedgerEntry, Outcome, RecordUpdate};
use openraft::storage::{ApplyResponder, EntryResponder, RaftStateMachine};
use openraft::{AsyncRuntime, EntryPayload, OptionalSend, RaftSnapshotBuilder};

use crate::levels::{SupportedLevels, UnsupportedLevel};
use crate::types::{EntryOutcomes, LogId, Payload, Snapshot, SnapshotMeta, StoredMembership, TypeConfig};
use crate::view::{LedgerView, ViewPublisher};

/// Maximum number of entries whose answers wait for one publication of the view.
const PUBLISH_EVERY: usize = 64;

/// Entry that was just applied.
#[derive(Debug)]
pub struct AppliedEntry<'a> {
    /// Log position of the entry.
    pub id: LogId,
    /// Contents of the entry; `None` for Raft's own entries.
    pub entry: Option<&'a LedgerEntry>,
    /// One outcome per submission.
    pub outcomes: &'a [Outcome],
    /// Records that the entry changed.
    pub changes: &'a [RecordUpdate],
    /// State of the ledger right after the entry.
    pub ledger: &'a Ledger,
}

/// Observes what the state machine does. Cannot change it.
pub trait ApplyObserver: Send + Sync + 'static {
    /// Called after an entry was applied.
    fn on_applied(&self, applied: &AppliedEntry<'_>);

    /// Called after a snapshot replaced the ledger.
    fn on_installed(&self, ledger: &Ledger) {
        let _ = ledger;
    }

    /// Called when an entry or a snapshot cannot be read by this release; nothing is applied from then on.
    fn on_unreadable(&self, level_error: UnsupportedLevel) {
        let _ = level_error;
    }

    /// Called when readers can see what was applied or installed so far.
    fn on_published(&self, ledger: &Ledger) {
        let _ = ledger;
    }
}

/// The ledger with its log position and membership.
#[derive(Debug)]
pub struct StateMachine<S, W> {
    ledger: Ledger,
    applied: Option<LogId>,
    membership: StoredMembership,
    snapshots: S,
    publisher: Arc<ViewPublisher>,
    observer: Arc<W>,
    /// Feature levels that this release supports.
    levels: SupportedLevels,
}

impl<S: SnapshotStore, W: ApplyObserver> StateMachine<S, W> {
    /// Creates a state machine that has applied nothing. Raft brings it up to date from the snapshot and the log.
    pub fn new(snapshots: S, publisher: Arc<ViewPublisher>, (observer, levels): (Arc<W>, SupportedLevels)) -> Self {
        let (ledger, membership) = (Ledger::default(), StoredMembership::default());
        Self { ledger, applied: None, membership, snapshots, publisher, observer, levels }
    }

    /// Fails if this release cannot read an entry or a snapshot, whatever its source. Skipping it would make the ledger
    /// diverge.
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

    /// Publishes the view before it answers, so that a client finds its write in the view.
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

/// Writes a snapshot of the ledger as it was when this builder was created.
#[derive(Debug)]
pub struct SnapshotBuilder<S> {
    body: Option<SnapshotContents>,
    snapshots: S,
}

impl<R: AsyncRuntime, S: SnapshotStore> RaftSnapshotBuilder<TypeConfig<R>> for SnapshotBuilder<S> {
    type SnapshotData = S::Handle;

    async fn build_snapshot(&mut self) -> Result<Snapshot<S::Handle>, io::Error> {
        // Moved out, so that memory that only the snapshot still holds is freed by whoever wrote it.
        let body = self.body.take().ok_or_else(|| io::Error::other("a builder builds one snapshot"))?;
        self.snapshots.write(body).await
    }
}

/// Contents of a snapshot.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct SnapshotContents {
    /// Log position and membership of the snapshot.
    pub meta: SnapshotMeta,
    /// State of the ledger at that position.
    pub ledger: Ledger,
}

/// Stores the newest snapshot only. A write is durable when its call returns.
pub trait SnapshotStore: Clone + Send + Sync + 'static {
    /// Handle through which a snapshot's bytes can be read.
    type Handle: Send + 'static;

    /// Replaces the stored snapshot by this state.
    fn write(&self, contents: SnapshotContents) -> impl Future<Output = io::Result<Snapshot<Self::Handle>>> + Send;

    /// Verifies a snapshot that this or another node wrote, and stores it unless it is the stored one already.
    fn install(&self, snapshot: Self::Handle) -> impl Future<Output = io::Result<SnapshotContents>> + Send;

    /// Drops a view that a snapshot replaced. Dropping a large view takes time, so implementations may move it
    /// elsewhere.
    fn discard(&self, old: Arc<LedgerView>) {
        drop(old);
    }

    /// Returns the stored snapshot, if there is one.
    fn current(&self) -> impl Future<Output = io::Result<Option<Snapshot<Self::Handle>>>> + Send;
}
