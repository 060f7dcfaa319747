//! The state machine that Raft drives: applies entries to the ledger, publishes the view, then answers.

use std::fs::File;
use std::io;
use std::sync::Arc;

use futures::{Stream, StreamExt};
use ledger::Ledger;
use openraft::storage::{ApplyResponder, EntryResponder, RaftStateMachine};
use openraft::{EntryPayload, OptionalSend, RaftSnapshotBuilder};

use crate::counters::Counters;
use crate::raft::{Answers, LogId, Snapshot, SnapshotMeta, StoredMembership, Types};
use crate::snapshots::{self, SnapshotFile};
use crate::view::Publisher;

/// Entries whose answers wait for one publication of the view.
const PUBLISH_EVERY: usize = 64;

/// The ledger, and how far it is.
pub(crate) struct Machine {
    ledger: Ledger,
    applied: Option<LogId>,
    membership: StoredMembership,
    snapshots: SnapshotFile,
    publisher: Arc<Publisher>,
    counters: Arc<Counters>,
}

impl Machine {
    pub(crate) fn new(snapshots: SnapshotFile, publisher: Arc<Publisher>, counters: Arc<Counters>) -> Self {
        let (ledger, membership) = (Ledger::default(), StoredMembership::default());
        Self { ledger, applied: None, membership, snapshots, publisher, counters }
    }

    fn meta(&self) -> SnapshotMeta {
        SnapshotMeta { last_log_id: self.applied, last_membership: self.membership.clone() }
    }

    fn apply_one(
        &mut self,
        id: LogId,
        payload: EntryPayload<crate::raft::Proposal, u64, openraft::BasicNode>,
    ) -> Answers {
        self.applied = Some(id);
        match payload {
            EntryPayload::Normal(proposal) => {
                let outcomes = self.ledger.apply(id.index, &proposal.0);
                self.counters.applied(&outcomes);
                return Answers(outcomes);
            }
            EntryPayload::Membership(membership) => self.membership = StoredMembership::new(Some(id), membership),
            EntryPayload::Blank => {}
        }
        self.ledger.skip(id.index);
        Answers::default()
    }

    /// Publishes what was applied, then answers: who has an answer finds it in the view.
    fn publish(&self, answers: &mut Vec<(Option<ApplyResponder<Types>>, Answers)>) {
        self.publisher.ledger(self.ledger.clone());
        for (responder, answer) in answers.drain(..) {
            if let Some(responder) = responder {
                responder.send(answer);
            }
        }
    }
}

impl RaftStateMachine<Types> for Machine {
    type SnapshotData = File;
    type SnapshotBuilder = Builder;

    async fn applied_state(&mut self) -> Result<(Option<LogId>, StoredMembership), io::Error> {
        Ok((self.applied, self.membership.clone()))
    }

    async fn apply<S>(&mut self, mut entries: S) -> Result<(), io::Error>
    where
        S: Stream<Item = Result<EntryResponder<Types>, io::Error>> + Unpin + OptionalSend,
    {
        let mut answers = Vec::new();
        while let Some(next) = entries.next().await {
            let (entry, responder) = next?;
            let answer = self.apply_one(entry.log_id, entry.payload);
            answers.push((responder, answer));
            if answers.len() >= PUBLISH_EVERY {
                self.publish(&mut answers);
            }
        }
        self.publish(&mut answers);
        Ok(())
    }

    async fn get_snapshot_builder(&mut self) -> Builder {
        Builder { ledger: self.ledger.clone(), meta: self.meta(), snapshots: self.snapshots.clone() }
    }

    async fn install_snapshot(&mut self, meta: &SnapshotMeta, snapshot: File) -> Result<(), io::Error> {
        let snapshots = self.snapshots.clone();
        let read = move || {
            let body = snapshots::read(snapshot, std::path::Path::new("snapshot")).map_err(io::Error::other)?;
            let current = snapshots.meta().map_err(io::Error::other)?;
            if current.as_ref() != Some(&body.meta) {
                snapshots.write(&body.meta, &body.ledger)?;
            }
            Ok::<_, io::Error>(body)
        };
        let body = tokio::task::spawn_blocking(read).await.map_err(io::Error::other)??;
        self.ledger = body.ledger;
        self.applied = meta.last_log_id;
        self.membership = meta.last_membership.clone();
        self.publish(&mut Vec::new());
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<Snapshot>, io::Error> {
        let snapshots = self.snapshots.clone();
        let read = move || {
            let Some(meta) = snapshots.meta().map_err(io::Error::other)? else { return Ok(None) };
            Ok(snapshots.open()?.map(|snapshot| Snapshot { meta, snapshot }))
        };
        tokio::task::spawn_blocking(read).await.map_err(io::Error::other)?
    }
}

/// Writes a snapshot of the ledger as it was when this was made.
pub(crate) struct Builder {
    ledger: Ledger,
    meta: SnapshotMeta,
    snapshots: SnapshotFile,
}

impl RaftSnapshotBuilder<Types> for Builder {
    type SnapshotData = File;

    async fn build_snapshot(&mut self) -> Result<Snapshot, io::Error> {
        let (ledger, meta, snapshots) = (self.ledger.clone(), self.meta.clone(), self.snapshots.clone());
        let write = move || {
            snapshots.write(&meta, &ledger)?;
            let snapshot = snapshots.open()?.ok_or(io::ErrorKind::NotFound)?;
            Ok(Snapshot { meta, snapshot })
        };
        tokio::task::spawn_blocking(write).await.map_err(io::Error::other)?
    }
}
