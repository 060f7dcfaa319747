//! Handler of calls from other nodes.

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

use crate::delivery::SubmitReply;
use crate::node_core::{AnnouncedTransfer, NodeCore};
use crate::peers::caller_identity::CallerIdentity;
use crate::peers::{self, ExchangeHandler, IncomingExchange, MAX_CALL_BYTES, PeerError, PeerMethod, ReplySender};
use crate::proposal::ProposalBatch;
use crate::raft::{TokioTypeConfig, Vote};
use crate::raft_network::CHUNK_TIMEOUT;
use crate::snapshot_stream::{self, SnapshotStreamHeader};
use crate::terms::{self, ImplausibleMessage, MessagePositions};
use crate::{access, joining, members, read};

type CallResult = Result<Bytes, PeerError>;

impl ExchangeHandler for NodeCore {
    fn handle(self: Arc<Self>, caller: Arc<CallerIdentity>, exchange: IncomingExchange) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let IncomingExchange { method, first, more, replies } = exchange;
            let Some(method) = PeerMethod::from_repr(method) else {
                let what = format!("method {method} is not known here; upgrade this node");
                return replies.fail(PeerError::Failed(what)).await;
            };
            let from = match access::authorize(&self, &caller, (method, &first)).await {
                Ok(from) => from,
                Err(error) => return replies.fail(error).await,
            };
            // Otherwise Raft would log an error for each call, and the caller would not learn the cause.
            if let Some(ended) = self.final_error().filter(|_| method.needs_raft()) {
                let why = ended.to_string();
                let first = why.split_once(". ").map_or(why.as_str(), |(first, _)| first);
                return replies.fail(PeerError::Stopped(first.to_owned())).await;
            }
            match (method, more) {
                (PeerMethod::AppendStream, Some(more)) => append_stream(self, from, (first, more), replies).await,
                (PeerMethod::Snapshot, Some(more)) => {
                    let installed = self.receive_snapshot(from, (first, more)).await;
                    if let Err(error) = &installed {
                        tracing::warn!(%from, %error, "a snapshot of another node was not taken; it is sent again");
                    }
                    replies.finish(installed).await;
                }
                (method, _) => replies.finish(self.answer_call(from, method, first).await).await,
            }
        })
    }
}

impl NodeCore {
    async fn answer_call(&self, from: NodeId, method: PeerMethod, question: Bytes) -> CallResult {
        match method {
            PeerMethod::Append => {
                let request = self.read_append(from, &question)?;
                self.note_leader_contact(from);
                // A heartbeat names the last entry that the leader knows to be on this node.
                let known = request.prev_log_id.filter(|_| request.entries.is_empty());
                let answer = self.raft.append_entries(request).await.map_err(failed_error)?;
                if let Some(known) = known {
                    self.note_heartbeat(known.index, &answer);
                }
                encode(&answer)
            }
            PeerMethod::Vote => {
                let request: VoteRequest<TokioTypeConfig> = peers::decode(&question)?;
                let mut request = self.check_plausible(from, request.vote, request)?;
                request.leadership_transfer &= self.is_chosen_successor(from);
                encode(&self.raft.vote(request).await.map_err(failed_error)?)
            }
            PeerMethod::PreVote => {
                let request: VoteRequest<TokioTypeConfig> = peers::decode(&question)?;
                let request = self.check_plausible(from, request.vote, request)?;
                encode(&self.raft.pre_vote(request).await.map_err(failed_error)?)
            }
            PeerMethod::TransferLeader => {
                let request: TransferLeaderRequest<TokioTypeConfig> = peers::decode(&question)?;
                let request = self.check_plausible(from, *request.from_leader(), request)?;
                let (leadership, to) = (*request.from_leader(), NodeId(*request.to_node_id()));
                *self.transfer.lock() = Some(AnnouncedTransfer { from: leadership, to });
                encode(&self.raft.handle_transfer_leader(request).await.map_err(failed_error)?)
            }
            PeerMethod::Submit => encode(&self.submit_forwarded(peers::decode(&question)?).await),
            PeerMethod::ReadIndex => encode(&read::local_read_index(self).await),
            PeerMethod::Alive => {
                let alive: Vec<(WorkerId, Incarnation)> = peers::decode(&question)?;
                let all = alive.into_iter().all(|(worker, incarnation)| self.reports.record(worker, incarnation));
                if all { Ok(Bytes::new()) } else { Err(PeerError::Busy) }
            }
            PeerMethod::Admit => encode(&joining::admit(self, peers::decode(&question)?).await),
            PeerMethod::Enrol => encode(&joining::enrol(self, from, peers::decode(&question)?).await),
            PeerMethod::Change => encode(&members::carry_out(self, peers::decode(&question)?).await),
            PeerMethod::Members => encode(&members::list(self)),
            PeerMethod::Exchange | PeerMethod::Residency | PeerMethod::Prompts => {
                self.call_service(from, method, question).await
            }
            PeerMethod::AppendStream | PeerMethod::Snapshot => Err(PeerError::Failed("it needs a conversation".into())),
        }
    }

    /// Returns a message only if its terms and log positions are plausible. Raft would persist implausible ones for
    /// good.
    fn check_plausible<M: MessagePositions>(&self, from: NodeId, vote: Vote, message: M) -> Result<M, PeerError> {
        let own = self.raft.metrics().borrow_watched().current_term;
        let own = terms::beside(own, own == 0 && self.log.is_new());
        let checked = terms::check_sender(from, &vote).and_then(|()| terms::check(own, &message));
        checked.map(|()| message).map_err(|implausible| self.implausible_error(from, implausible))
    }

    /// Counts an implausible message of a node.
    fn implausible_error(&self, from: NodeId, implausible: ImplausibleMessage) -> PeerError {
        self.registry.failures.implausible_messages.record(&format!("node {from}"), &implausible.to_string());
        PeerError::Failed(implausible.to_string())
    }

    /// Returns whether the leader itself announced this node as its successor. Only then may the node ask for votes
    /// while the leader is alive.
    fn is_chosen_successor(&self, node: NodeId) -> bool {
        let from = self.raft.metrics().borrow_watched().vote;
        *self.transfer.lock() == Some(AnnouncedTransfer { from, to: node })
    }

    /// Decodes entries, and fails if this release cannot read one of them: such an entry must never be skipped.
    fn read_append(&self, from: NodeId, request: &[u8]) -> Result<AppendEntriesRequest<TokioTypeConfig>, PeerError> {
        let request: AppendEntriesRequest<TokioTypeConfig> = peers::decode(request)?;
        let request = self.check_plausible(from, request.vote, request)?;
        terms::check_sequence(&request).map_err(|implausible| self.implausible_error(from, implausible))?;
        let levels = self.registry.welcome.levels;
        for entry in &request.entries {
            let EntryPayload::Normal(proposal) = &entry.payload else { continue };
            levels.check(&proposal.0).map_err(failed_error)?;
        }
        Ok(request)
    }

    /// Records a message of the leader as a sign of life.
    fn note_leader_contact(&self, from: NodeId) {
        if self.known_leader() == Some(from) {
            self.leader_contact.touch();
        }
    }

    async fn submit_forwarded(&self, submissions: Vec<ledger::Submission>) -> SubmitReply {
        let (answer, answered) = oneshot::channel();
        if self.proposals.send(ProposalBatch { submissions, answer }).await.is_err() {
            return SubmitReply::NotTaken;
        }
        answered.await.map_or(SubmitReply::Unknown, SubmitReply::from)
    }

    async fn call_service(&self, from: NodeId, method: PeerMethod, question: Bytes) -> CallResult {
        let Some(topic) = method.topic() else { return Err(PeerError::Failed("no topic".into())) };
        let service = self.registry.service(topic).ok_or(PeerError::NoService(topic))?;
        let answer = service.answer(from, question).await?;
        match answer.len() {
            bytes if bytes > MAX_CALL_BYTES => {
                Err(PeerError::TooLarge { bytes: bytes as u64, most: MAX_CALL_BYTES as u64 })
            }
            _ => Ok(answer),
        }
    }

    /// Receives a snapshot and installs it.
    async fn receive_snapshot(&self, from: NodeId, (head, chunks): (Bytes, mpsc::Receiver<Bytes>)) -> CallResult {
        let SnapshotStreamHeader { vote, meta, bytes } = peers::decode(&head)?;
        self.check_plausible(from, vote, (vote, meta.last_log_id))?;
        let _place = self.registry.snapshot_permits.try_acquire().map_err(|_| {
            PeerError::Failed("as many snapshots as may be are on their way to this node already; send it later".into())
        })?;
        let is_sound = meta.last_log_id.is_none_or(|last| last.committed_leader_id() <= &vote.leader_id);
        if !is_sound {
            return Err(PeerError::Garbled("the snapshot is newer than the leader that sends it".into()));
        }
        tracing::info!(bytes, upto = meta.last_log_id.map_or(0, |id| id.index), "a snapshot is on its way here");
        // Reserved until the snapshot is installed.
        let mut reserved = self.registry.space.reserve(&self.folder, bytes)?;
        let place = (self.folder.as_path(), &mut reserved);
        let snapshot = snapshot_stream::receive(place, bytes, (chunks, CHUNK_TIMEOUT)).await?;
        let snapshot = snapshot_stream::verify_received(snapshot, &meta).await?;
        let snapshot = consensus::Snapshot { meta, snapshot };
        encode(&self.raft.install_full_snapshot(vote, snapshot).await.map_err(failed_error)?)
    }
}

/// Appends a stream of entries and answers in order; ends at the first request that does not match the log.
async fn append_stream(
    core: Arc<NodeCore>,
    from: NodeId,
    (first, more): (Bytes, mpsc::Receiver<Bytes>),
    replies: ReplySender,
) {
    let reading = AppendRequestStream { core: core.clone(), from, first: Some(first), more };
    let requests = stream::unfold(reading, |mut reading| async { reading.next().await.map(|next| (next, reading)) });
    let mut answers = std::pin::pin!(core.raft.stream_append(requests));
    while let Some(answer) = answers.next().await {
        let answer = answer.map_err(failed_error).and_then(|answer| encode(&answer));
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

/// Requests of one stream.
struct AppendRequestStream {
    core: Arc<NodeCore>,
    from: NodeId,
    first: Option<Bytes>,
    more: mpsc::Receiver<Bytes>,
}

impl AppendRequestStream {
    /// Returns the next request. The stream ends at an unreadable request, and the sender starts a new one.
    async fn next(&mut self) -> Option<AppendEntriesRequest<TokioTypeConfig>> {
        let piece = match self.first.take() {
            Some(first) => first,
            None => self.more.recv().await?,
        };
        self.core.note_leader_contact(self.from);
        let request = self.core.read_append(self.from, &piece);
        request.inspect_err(|error| tracing::error!(from = %self.from, %error, "entries are unreadable")).ok()
    }
}

fn encode(answer: &impl Serialize) -> CallResult {
    rmp_serde::to_vec(answer).map(Bytes::from).map_err(|error| PeerError::Failed(error.to_string()))
}

fn failed_error(error: impl std::fmt::Display) -> PeerError {
    PeerError::Failed(error.to_string())
}
