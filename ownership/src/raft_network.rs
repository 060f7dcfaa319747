//! Raft's RPCs to the other nodes, over the links to them.

use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use futures::{Stream, StreamExt};
use openraft::errors::{NetworkError, RPCError, ReplicationClosed, StreamingError, Timeout, Unreachable};
use openraft::network::{RPCOption, RPCTypes, RaftNetworkFactory, RaftNetworkV2, stream_append_sequential};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, StreamAppendResult, TransferLeaderRequest,
    TransferLeaderResponse, VoteRequest, VoteResponse,
};
use openraft::{BasicNode, OptionalSend};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncReadExt, AsyncSeekExt};
use vocabulary::NodeId;

use crate::peers::socket::{DialDelegate, DialError};
use crate::peers::{self, ExchangeReceiver, ExchangeSender, Lane, PeerError, PeerLink, PeerMethod, PeerRegistry};
use crate::raft::{TokioTypeConfig, Vote};
use crate::snapshot_stream::{CHUNK_BYTES, SnapshotStreamHeader};
use crate::terms::{self, MessagePositions};

/// Maximum number of unanswered requests per stream.
const MAX_IN_FLIGHT: usize = 32;

/// Maximum bytes of log entries per request; larger requests are split.
const MAX_REQUEST_BYTES: usize = 8 << 20;

/// How long a follower may take to make entries durable before the stream is restarted.
const APPEND_TIMEOUT: Duration = Duration::from_secs(10);

/// Timeout for one chunk of a snapshot.
pub(crate) const CHUNK_TIMEOUT: Duration = Duration::from_secs(30);

/// Timeout for installing a received snapshot.
const INSTALL_TIMEOUT: Duration = Duration::from_secs(600);

type RpcError = RPCError<TokioTypeConfig>;
type AppendRequest = AppendEntriesRequest<TokioTypeConfig>;

/// Creates the clients for the other nodes.
pub(crate) struct RaftClientFactory {
    pub(crate) registry: Arc<PeerRegistry>,
}

impl RaftNetworkFactory<TokioTypeConfig> for RaftClientFactory {
    type Network = RaftClient;

    async fn new_client(&mut self, target: u64, node: &BasicNode) -> RaftClient {
        self.registry.note_address(NodeId(target), &node.addr);
        RaftClient { registry: self.registry.clone(), target: NodeId(target), appends: AppendMode::Stream }
    }

    async fn new_heartbeat_client(&mut self, target: u64, node: &BasicNode) -> RaftClient {
        RaftClient { appends: AppendMode::OneByOne, ..self.new_client(target, node).await }
    }
}

/// How entries are sent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AppendMode {
    /// Pipelined: many requests in flight.
    Stream,
    /// One request at a time: a heartbeat must not wait behind entries.
    OneByOne,
}

pub(crate) struct RaftClient {
    registry: Arc<PeerRegistry>,
    target: NodeId,
    appends: AppendMode,
}

impl RaftClient {
    fn link(&self, lane: Lane) -> PeerLink {
        self.registry.link(self.target, lane)
    }

    async fn ask<A: DeserializeOwned>(
        &self,
        method: PeerMethod,
        question: &impl Serialize,
        (kind, within): (RPCTypes, Duration),
    ) -> Result<A, RpcError> {
        let question = encode(question)?;
        let answer = self.link(Lane::Raft).call(method, question, within).await;
        decode(&answer.map_err(|error| self.rpc_error(error, kind))?)
    }

    /// Passes an answer to Raft only if its terms are plausible, because Raft persists them.
    fn check_plausible<A: MessagePositions>(&self, answer: A) -> Result<A, PeerError> {
        let own = self.registry.publisher.view().quorum().term;
        match terms::check(own, &answer) {
            Ok(()) => Ok(answer),
            Err(error) => {
                self.registry
                    .failures
                    .implausible_messages
                    .record(&format!("node {}", self.target), &error.to_string());
                Err(PeerError::Failed(error.to_string()))
            }
        }
    }

    async fn ask_checked<A: DeserializeOwned + MessagePositions>(
        &self,
        method: PeerMethod,
        question: &impl Serialize,
        (kind, within): (RPCTypes, Duration),
    ) -> Result<A, RpcError> {
        let answer = self.ask(method, question, (kind, within)).await?;
        self.check_plausible(answer).map_err(|error| self.rpc_error(error, kind))
    }

    /// Converts a call error to Raft's: Raft retries a timeout at once, but backs off from an unreachable node.
    fn rpc_error(&self, error: PeerError, action: RPCTypes) -> RpcError {
        if matches!(error, PeerError::Stopped(_)) {
            DialDelegate::on_dial_failed(&*self.registry, self.target, DialError::Other(error.to_string()));
        }
        match error {
            PeerError::TimedOut { millis } => {
                let (id, target) = (self.registry.welcome.node.0, self.target.0);
                RPCError::Timeout(Timeout { action, id, target, timeout: Duration::from_millis(millis) })
            }
            error => RPCError::Unreachable(Unreachable::new(&error)),
        }
    }
}

pub(crate) fn encode(message: &impl Serialize) -> Result<Bytes, RpcError> {
    let encoded = rmp_serde::to_vec(message).map_err(|error| RPCError::Network(NetworkError::new(&error)))?;
    Ok(encoded.into())
}

fn decode<A: DeserializeOwned>(answer: &[u8]) -> Result<A, RpcError> {
    rmp_serde::from_slice(answer).map_err(|error| RPCError::Network(NetworkError::new(&error)))
}

impl RaftNetworkV2<TokioTypeConfig> for RaftClient {
    type SnapshotData = std::fs::File;

    async fn append_entries(
        &mut self,
        request: AppendRequest,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<TokioTypeConfig>, RpcError> {
        self.ask_checked(PeerMethod::Append, &request, (RPCTypes::AppendEntries, option.soft_ttl())).await
    }

    fn stream_append<'s, S>(
        &'s mut self,
        input: S,
        option: RPCOption,
    ) -> BoxFuture<'s, Result<BoxStream<'s, Result<StreamAppendResult<TokioTypeConfig>, RpcError>>, RpcError>>
    where
        S: Stream<Item = AppendRequest> + OptionalSend + Unpin + 'static,
    {
        if self.appends == AppendMode::OneByOne {
            return stream_append_sequential(self, input, option);
        }
        Box::pin(async move {
            let appending = EntryStream { client: self, input: Some(input), exchange: None, unanswered: 0 };
            let answers = futures::stream::unfold(Some(appending), |appending| async {
                let mut appending = appending?;
                let answer = appending.next().await?;
                let goes_on = matches!(&answer, Ok(Ok(_)));
                Some((answer, goes_on.then_some(appending)))
            });
            Ok(answers.boxed())
        })
    }

    async fn vote(
        &mut self,
        request: VoteRequest<TokioTypeConfig>,
        option: RPCOption,
    ) -> Result<VoteResponse<TokioTypeConfig>, RpcError> {
        self.ask_checked(PeerMethod::Vote, &request, (RPCTypes::Vote, option.soft_ttl())).await
    }

    async fn pre_vote(
        &mut self,
        request: VoteRequest<TokioTypeConfig>,
        option: RPCOption,
    ) -> Result<VoteResponse<TokioTypeConfig>, RpcError> {
        self.ask_checked(PeerMethod::PreVote, &request, (RPCTypes::Vote, option.soft_ttl())).await
    }

    async fn transfer_leader(
        &mut self,
        request: TransferLeaderRequest<TokioTypeConfig>,
        option: RPCOption,
    ) -> Result<TransferLeaderResponse<TokioTypeConfig>, RpcError> {
        self.ask(PeerMethod::TransferLeader, &request, (RPCTypes::TransferLeader, option.soft_ttl())).await
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: consensus::Snapshot<std::fs::File>,
        cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        _option: RPCOption,
    ) -> Result<SnapshotResponse<TokioTypeConfig>, StreamingError<TokioTypeConfig>> {
        let sending = self.send_snapshot(vote, snapshot);
        tokio::select! {
            sent = sending => sent.map_err(|error| match error {
                SnapshotSendError::Disk(error) => {
                    tracing::warn!(node = %self.target, %error, "this node's snapshot cannot be read; it is tried again");
                    StreamingError::Network(NetworkError::new(&error))
                }
                SnapshotSendError::Peer(error) => {
                    tracing::warn!(node = %self.target, %error, "a node did not take a snapshot; it is sent again");
                    self.rpc_error(error, RPCTypes::InstallSnapshot).into()
                }
            }),
            closed = cancel => Err(StreamingError::Closed(closed)),
        }
    }
}

/// Why a snapshot did not arrive.
#[derive(Debug, thiserror::Error)]
enum SnapshotSendError {
    #[error(transparent)]
    Disk(#[from] io::Error),
    #[error(transparent)]
    Peer(#[from] PeerError),
}

impl RaftClient {
    /// Sends a snapshot from its file, one chunk at a time; the receiver installs it once it has all.
    async fn send_snapshot(
        &self,
        vote: Vote,
        snapshot: consensus::Snapshot<std::fs::File>,
    ) -> Result<SnapshotResponse<TokioTypeConfig>, SnapshotSendError> {
        let mut file = tokio::fs::File::from_std(snapshot.snapshot);
        file.rewind().await?;
        let bytes = file.metadata().await?.len();
        let head = SnapshotStreamHeader { vote, meta: snapshot.meta, bytes };
        let head = rmp_serde::to_vec(&head).map_err(io::Error::other)?;
        let (speaker, mut answers) = self.link(Lane::Bulk).open_exchange(PeerMethod::Snapshot, head.into(), 1).await?;
        let late = |_| PeerError::TimedOut { millis: CHUNK_TIMEOUT.as_millis() as u64 };
        let mut left = bytes;
        while left > 0 {
            let mut chunk = Vec::with_capacity(CHUNK_BYTES.min(left as usize));
            let read = (&mut file).take(CHUNK_BYTES as u64).read_to_end(&mut chunk).await?;
            if read == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
            left = left.saturating_sub(read as u64);
            tokio::time::timeout(CHUNK_TIMEOUT, speaker.send(chunk.into())).await.map_err(late)??;
            if let Ok(early) = answers.try_recv() {
                return Ok(self.check_plausible(peers::decode(&early?)?)?);
            }
        }
        speaker.end().await?;
        let late = |_| PeerError::TimedOut { millis: INSTALL_TIMEOUT.as_millis() as u64 };
        let installed = tokio::time::timeout(INSTALL_TIMEOUT, answers.recv()).await.map_err(late)?;
        let installed = installed.ok_or_else(|| PeerError::Failed("the snapshot was not answered".into()))??;
        Ok(self.check_plausible(peers::decode(&installed)?)?)
    }
}

/// A stream of entries to a follower: sends requests while it awaits answers, in order and within the window.
struct EntryStream<'s, S> {
    client: &'s RaftClient,
    /// `None` once the input has ended.
    input: Option<S>,
    exchange: Option<(ExchangeSender, ExchangeReceiver)>,
    unanswered: usize,
}

impl<S: Stream<Item = AppendRequest> + Unpin> EntryStream<'_, S> {
    /// Returns the next answer; `None` when everything was sent and answered.
    async fn next(&mut self) -> Option<Result<StreamAppendResult<TokioTypeConfig>, RpcError>> {
        loop {
            if self.input.is_none() && self.unanswered == 0 {
                return None;
            }
            let has_room = self.unanswered < MAX_IN_FLIGHT;
            let awaits = self.unanswered > 0;
            tokio::select! {
                biased;
                answer = next_answer(&mut self.exchange), if awaits => {
                    self.unanswered -= 1;
                    let answer = answer.and_then(|answer| peers::decode(&answer));
                    let answer = answer.and_then(|answer: StreamAppendResult<TokioTypeConfig>| self.client.check_plausible(answer));
                    return Some(answer.map_err(|error| self.failed(error)));
                }
                request = next_input(&mut self.input), if has_room && self.input.is_some() => match request {
                    None => self.input = None,
                    Some(request) => {
                        if let Err(error) = self.send(request).await {
                            return Some(Err(error));
                        }
                    }
                }
            }
        }
    }

    fn failed(&self, error: PeerError) -> RpcError {
        self.client.rpc_error(error, RPCTypes::AppendEntries)
    }

    /// Sends a request, split into several if it is long; each part is a complete request.
    async fn send(&mut self, request: AppendRequest) -> Result<(), RpcError> {
        let mut pieces = vec![request];
        while let Some(piece) = pieces.pop() {
            let encoded = encode(&piece)?;
            if encoded.len() > MAX_REQUEST_BYTES && piece.entries.len() > 1 {
                let (first, rest) = split_request(piece);
                pieces.extend([rest, first]);
                continue;
            }
            self.send_piece(encoded).await.map_err(|error| self.failed(error))?;
            self.unanswered += 1;
        }
        Ok(())
    }

    async fn send_piece(&mut self, request: Bytes) -> Result<(), PeerError> {
        match &self.exchange {
            Some((speaker, _)) => speaker.send(request).await,
            None => {
                // A long request is sent as several, each with its own answer.
                let expected = MAX_IN_FLIGHT + 1_024;
                let link = self.client.link(Lane::Raft);
                self.exchange = Some(link.open_exchange(PeerMethod::AppendStream, request, expected).await?);
                Ok(())
            }
        }
    }
}

async fn next_input<S: Stream + Unpin>(input: &mut Option<S>) -> Option<S::Item> {
    input.as_mut()?.next().await
}

async fn next_answer(open: &mut Option<(ExchangeSender, ExchangeReceiver)>) -> Result<Bytes, PeerError> {
    let Some((_, answers)) = open else { return Err(PeerError::Failed("nothing was asked".into())) };
    let late = |_| PeerError::TimedOut { millis: APPEND_TIMEOUT.as_millis() as u64 };
    let answer = pin!(tokio::time::timeout(APPEND_TIMEOUT, answers.recv()));
    answer.await.map_err(late)?.unwrap_or_else(|| Err(PeerError::Failed("the stream was closed".into())))
}

/// Splits a request into two that together have the same effect.
fn split_request(mut request: AppendRequest) -> (AppendRequest, AppendRequest) {
    let rest = request.entries.split_off(request.entries.len() / 2);
    let prev_log_id = request.entries.last().map(|entry| entry.log_id).or(request.prev_log_id);
    let second = AppendRequest { vote: request.vote, prev_log_id, entries: rest, leader_commit: request.leader_commit };
    (request, second)
}
