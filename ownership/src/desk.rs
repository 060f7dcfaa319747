//! What this node answers when others call it.

use std::sync::Arc;

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{StreamExt, stream};
use openraft::EntryPayload;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::raft::{AppendEntriesRequest, TransferLeaderRequest, VoteRequest};
use serde::Serialize;
use tokio::sync::{mpsc, oneshot};
use vocabulary::{Incarnation, NodeId, WorkerId};

use crate::core::{Core, Transfer};
use crate::delivery::Submitted;
use crate::network::CHUNK_WITHIN;
use crate::peers::caller::Caller;
use crate::peers::{self, Answerer, Exchange, MAX_CALL, Method, PeerError, Replies};
use crate::proposer::Asked;
use crate::raft::{Types, Vote};
use crate::snapshot_stream::{self, SnapshotHead};
use crate::terms::{self, Names};
use crate::{access, joining, members, read};

type Answer = Result<Bytes, PeerError>;

impl Answerer for Core {
    fn answer(self: Arc<Self>, caller: Arc<Caller>, exchange: Exchange) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let Exchange { method, first, more, replies } = exchange;
            let Some(method) = Method::from_repr(method) else {
                let what = format!("method {method} is not known here; upgrade this node");
                return replies.fail(PeerError::Failed(what)).await;
            };
            let from = match access::admitted(&self, &caller, (method, &first)).await {
                Ok(from) => from,
                Err(error) => return replies.fail(error).await,
            };
            // Raft would answer each call with an error in this node's log, and the caller would not learn why.
            if let Some(ended) = self.ended().filter(|_| method.needs_raft()) {
                let why = ended.to_string();
                let first = why.split_once(". ").map_or(why.as_str(), |(first, _)| first);
                return replies.fail(PeerError::Stopped(first.to_owned())).await;
            }
            match (method, more) {
                (Method::AppendStream, Some(more)) => append_stream(self, from, (first, more), replies).await,
                (Method::Snapshot, Some(more)) => {
                    let installed = self.snapshot(from, (first, more)).await;
                    if let Err(error) = &installed {
                        tracing::warn!(%from, %error, "a snapshot of another node was not taken; it is sent again");
                    }
                    replies.finish(installed).await;
                }
                (method, _) => replies.finish(self.answer_one(from, method, first).await).await,
            }
        })
    }
}

impl Core {
    async fn answer_one(&self, from: NodeId, method: Method, question: Bytes) -> Answer {
        match method {
            Method::Append => {
                let request = self.readable(from, &question)?;
                self.hear_of(from);
                // A heartbeat names the last entry that this node is known to have.
                let known = request.prev_log_id.filter(|_| request.entries.is_empty());
                let answer = self.raft.append_entries(request).await.map_err(failed)?;
                if let Some(known) = known {
                    self.note_heartbeat(known.index, &answer);
                }
                encode(&answer)
            }
            Method::Vote => {
                let request: VoteRequest<Types> = peers::read(&question)?;
                let mut request = self.plausible(from, request.vote, request)?;
                request.leadership_transfer &= self.is_heir(from);
                encode(&self.raft.vote(request).await.map_err(failed)?)
            }
            Method::PreVote => {
                let request: VoteRequest<Types> = peers::read(&question)?;
                let request = self.plausible(from, request.vote, request)?;
                encode(&self.raft.pre_vote(request).await.map_err(failed)?)
            }
            Method::TransferLeader => {
                let request: TransferLeaderRequest<Types> = peers::read(&question)?;
                let request = self.plausible(from, *request.from_leader(), request)?;
                let (leadership, to) = (*request.from_leader(), NodeId(*request.to_node_id()));
                *self.transfer.lock() = Some(Transfer { from: leadership, to });
                encode(&self.raft.handle_transfer_leader(request).await.map_err(failed)?)
            }
            Method::Submit => encode(&self.submit_for(peers::read(&question)?).await),
            Method::ReadIndex => encode(&read::index_here(self).await),
            Method::Alive => {
                let alive: Vec<(WorkerId, Incarnation)> = peers::read(&question)?;
                let all = alive.into_iter().all(|(worker, incarnation)| self.reports.note(worker, incarnation));
                if all { Ok(Bytes::new()) } else { Err(PeerError::Busy) }
            }
            Method::Admit => encode(&joining::admit(self, peers::read(&question)?).await),
            Method::Enrol => encode(&joining::enrol(self, from, peers::read(&question)?).await),
            Method::Change => encode(&members::carry_out(self, peers::read(&question)?).await),
            Method::Members => encode(&members::list(self)),
            Method::Exchange | Method::Residency | Method::Prompts => self.ask_service(from, method, question).await,
            Method::AppendStream | Method::Snapshot => Err(PeerError::Failed("it needs a conversation".into())),
        }
    }

    /// A message that Raft may hear. One that names what no sound node names would stay in its files for good.
    fn plausible<M: Names>(&self, from: NodeId, vote: Vote, message: M) -> Result<M, PeerError> {
        let own = self.raft.metrics().borrow_watched().current_term;
        let own = terms::beside(own, own == 0 && self.log.is_new());
        match terms::check_own(from, &vote).and_then(|()| terms::check(own, &message)) {
            Ok(()) => Ok(message),
            Err(error) => {
                self.registry.failures.implausible.note(&format!("node {from}"), &error.to_string());
                Err(PeerError::Failed(error.to_string()))
            }
        }
    }

    /// Whether the leader itself said that this node is to lead next. Only then a vote may be asked for while it leads.
    fn is_heir(&self, node: NodeId) -> bool {
        let from = self.raft.metrics().borrow_watched().vote;
        *self.transfer.lock() == Some(Transfer { from, to: node })
    }

    /// Entries, all of which this node's release can read: what it cannot is never skipped.
    fn readable(&self, from: NodeId, request: &[u8]) -> Result<AppendEntriesRequest<Types>, PeerError> {
        let request: AppendEntriesRequest<Types> = peers::read(request)?;
        let request = self.plausible(from, request.vote, request)?;
        let levels = self.registry.own.levels;
        for entry in &request.entries {
            let EntryPayload::Normal(proposal) = &entry.payload else { continue };
            levels.check(&proposal.0).map_err(failed)?;
        }
        Ok(request)
    }

    /// A word of the leader is a sign that it is there.
    fn hear_of(&self, from: NodeId) {
        if self.known_leader() == Some(from) {
            self.heard.now();
        }
    }

    async fn submit_for(&self, submissions: Vec<ledger::Submission>) -> Submitted {
        let (answer, answered) = oneshot::channel();
        if self.proposals.send(Asked { submissions, answer }).await.is_err() {
            return Submitted::NotTaken;
        }
        answered.await.map_or(Submitted::Unknown, Submitted::from)
    }

    async fn ask_service(&self, from: NodeId, method: Method, question: Bytes) -> Answer {
        let Some(topic) = method.topic() else { return Err(PeerError::Failed("no topic".into())) };
        let service = self.registry.service(topic).ok_or(PeerError::NoService(topic))?;
        let answer = service.answer(from, question).await?;
        match answer.len() {
            bytes if bytes > MAX_CALL => Err(PeerError::TooLarge { bytes: bytes as u64, most: MAX_CALL as u64 }),
            _ => Ok(answer),
        }
    }

    /// Receives a snapshot and installs it.
    async fn snapshot(&self, from: NodeId, (head, chunks): (Bytes, mpsc::Receiver<Bytes>)) -> Answer {
        let SnapshotHead { vote, meta, bytes } = peers::read(&head)?;
        self.plausible(from, vote, (vote, meta.last_log_id))?;
        let _place = self.registry.incoming.try_acquire().map_err(|_| {
            PeerError::Failed("as many snapshots as may be are on their way to this node already; send it later".into())
        })?;
        let is_sound = meta.last_log_id.is_none_or(|last| last.committed_leader_id() <= &vote.leader_id);
        if !is_sound {
            return Err(PeerError::Garbled("the snapshot is newer than the leader that sends it".into()));
        }
        tracing::info!(bytes, upto = meta.last_log_id.map_or(0, |id| id.index), "a snapshot is on its way here");
        // Held until it is kept.
        let mut reserved = self.registry.space.reserve(&self.folder, bytes)?;
        let place = (self.folder.as_path(), &mut reserved);
        let snapshot = snapshot_stream::receive(place, bytes, (chunks, CHUNK_WITHIN)).await?;
        let snapshot = snapshot_stream::checked(snapshot, &meta).await?;
        let snapshot = consensus::Snapshot { meta, snapshot };
        encode(&self.raft.install_full_snapshot(vote, snapshot).await.map_err(failed)?)
    }
}

/// Entries as they come, answered in order; ends at the first that does not fit.
async fn append_stream(core: Arc<Core>, from: NodeId, (first, more): (Bytes, mpsc::Receiver<Bytes>), replies: Replies) {
    let reading = Reading { core: core.clone(), from, first: Some(first), more };
    let requests = stream::unfold(reading, |mut reading| async { reading.next().await.map(|next| (next, reading)) });
    let mut answers = std::pin::pin!(core.raft.stream_append(requests));
    while let Some(answer) = answers.next().await {
        let answer = answer.map_err(failed).and_then(|answer| encode(&answer));
        let sent = match answer {
            Ok(answer) => replies.send(answer).await,
            Err(error) => return replies.fail(error).await,
        };
        if sent.is_err() {
            return;
        }
    }
    replies.done().await;
}

/// The requests of one stream.
struct Reading {
    core: Arc<Core>,
    from: NodeId,
    first: Option<Bytes>,
    more: mpsc::Receiver<Bytes>,
}

impl Reading {
    /// The next request; the stream ends at one that cannot be read, and whoever sent it starts anew.
    async fn next(&mut self) -> Option<AppendEntriesRequest<Types>> {
        let piece = match self.first.take() {
            Some(first) => first,
            None => self.more.recv().await?,
        };
        self.core.hear_of(self.from);
        let request = self.core.readable(self.from, &piece);
        request.inspect_err(|error| tracing::error!(from = %self.from, %error, "entries are unreadable")).ok()
    }
}

fn encode(answer: &impl Serialize) -> Answer {
    rmp_serde::to_vec(answer).map(Bytes::from).map_err(|error| PeerError::Failed(error.to_string()))
}

fn failed(error: impl std::fmt::Display) -> PeerError {
    PeerError::Failed(error.to_string())
}
