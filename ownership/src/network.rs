//! Raft's messages to the other nodes, over the links to them.

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

use crate::peers::socket::{Directions, Missed};
use crate::peers::{self, Answers, Lane, Link, Method, PeerError, Registry, Speaker};
use crate::raft::{Types, Vote};
use crate::snapshot_stream::{CHUNK, SnapshotHead};
use crate::terms::{self, Names};

/// Requests of one stream that wait for their answers.
const WINDOW: usize = 32;

/// Bytes of log in one request; a larger one goes as several.
const PIECE: usize = 8 << 20;

/// How long a follower may take to have entries on disk before the stream is begun anew.
const APPEND_WITHIN: Duration = Duration::from_secs(10);

/// How long a piece of a snapshot may take.
pub(crate) const CHUNK_WITHIN: Duration = Duration::from_secs(30);

/// How long a snapshot may take to be installed once it is there.
const INSTALL_WITHIN: Duration = Duration::from_secs(600);

type RpcError = RPCError<Types>;
type Append = AppendEntriesRequest<Types>;

/// Makes the ways to the other nodes.
pub(crate) struct Network {
    pub(crate) registry: Arc<Registry>,
}

impl RaftNetworkFactory<Types> for Network {
    type Network = Way;

    async fn new_client(&mut self, target: u64, node: &BasicNode) -> Way {
        self.registry.note(NodeId(target), &node.addr);
        Way { registry: self.registry.clone(), target: NodeId(target), appends: Appends::Stream }
    }

    async fn new_heartbeat_client(&mut self, target: u64, node: &BasicNode) -> Way {
        Way { appends: Appends::OneByOne, ..self.new_client(target, node).await }
    }
}

/// How entries are sent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Appends {
    /// Many on their way at once.
    Stream,
    /// Each on its own: a heartbeat must not wait behind entries.
    OneByOne,
}

pub(crate) struct Way {
    registry: Arc<Registry>,
    target: NodeId,
    appends: Appends,
}

impl Way {
    fn link(&self, lane: Lane) -> Link {
        self.registry.link(self.target, lane)
    }

    async fn ask<A: DeserializeOwned>(
        &self,
        method: Method,
        question: &impl Serialize,
        (kind, within): (RPCTypes, Duration),
    ) -> Result<A, RpcError> {
        let question = encode(question)?;
        let answer = self.link(Lane::Raft).call(method, question, within).await;
        decode(&answer.map_err(|error| self.failed(error, kind))?)
    }

    /// An answer that Raft may hear: what it says of a term stays in this node's files.
    fn plausible<A: Names>(&self, answer: A) -> Result<A, PeerError> {
        let own = self.registry.publisher.view().quorum().term;
        match terms::check(own, &answer) {
            Ok(()) => Ok(answer),
            Err(error) => {
                self.registry.failures.implausible.note(&format!("node {}", self.target), &error.to_string());
                Err(PeerError::Failed(error.to_string()))
            }
        }
    }

    async fn ask_plausibly<A: DeserializeOwned + Names>(
        &self,
        method: Method,
        question: &impl Serialize,
        (kind, within): (RPCTypes, Duration),
    ) -> Result<A, RpcError> {
        let answer = self.ask(method, question, (kind, within)).await?;
        self.plausible(answer).map_err(|error| self.failed(error, kind))
    }

    /// Raft retries a timed-out request at once, and waits before it calls an unreachable node again.
    fn failed(&self, error: PeerError, action: RPCTypes) -> RpcError {
        if matches!(error, PeerError::Stopped(_)) {
            Directions::missed(&*self.registry, self.target, Missed::Other(error.to_string()));
        }
        match error {
            PeerError::TimedOut { millis } => {
                let (id, target) = (self.registry.own.node.0, self.target.0);
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

impl RaftNetworkV2<Types> for Way {
    type SnapshotData = std::fs::File;

    async fn append_entries(
        &mut self,
        request: Append,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<Types>, RpcError> {
        self.ask_plausibly(Method::Append, &request, (RPCTypes::AppendEntries, option.soft_ttl())).await
    }

    fn stream_append<'s, S>(
        &'s mut self,
        input: S,
        option: RPCOption,
    ) -> BoxFuture<'s, Result<BoxStream<'s, Result<StreamAppendResult<Types>, RpcError>>, RpcError>>
    where
        S: Stream<Item = Append> + OptionalSend + Unpin + 'static,
    {
        if self.appends == Appends::OneByOne {
            return stream_append_sequential(self, input, option);
        }
        Box::pin(async move {
            let appending = Appending { way: self, input: Some(input), open: None, unanswered: 0 };
            let answers = futures::stream::unfold(Some(appending), |appending| async {
                let mut appending = appending?;
                let answer = appending.next().await?;
                let goes_on = matches!(&answer, Ok(Ok(_)));
                Some((answer, goes_on.then_some(appending)))
            });
            Ok(answers.boxed())
        })
    }

    async fn vote(&mut self, request: VoteRequest<Types>, option: RPCOption) -> Result<VoteResponse<Types>, RpcError> {
        self.ask_plausibly(Method::Vote, &request, (RPCTypes::Vote, option.soft_ttl())).await
    }

    async fn pre_vote(
        &mut self,
        request: VoteRequest<Types>,
        option: RPCOption,
    ) -> Result<VoteResponse<Types>, RpcError> {
        self.ask_plausibly(Method::PreVote, &request, (RPCTypes::Vote, option.soft_ttl())).await
    }

    async fn transfer_leader(
        &mut self,
        request: TransferLeaderRequest<Types>,
        option: RPCOption,
    ) -> Result<TransferLeaderResponse<Types>, RpcError> {
        self.ask(Method::TransferLeader, &request, (RPCTypes::TransferLeader, option.soft_ttl())).await
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: consensus::Snapshot<std::fs::File>,
        cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        _option: RPCOption,
    ) -> Result<SnapshotResponse<Types>, StreamingError<Types>> {
        let sending = self.send_snapshot(vote, snapshot);
        tokio::select! {
            sent = sending => sent.map_err(|error| match error {
                SendError::Disk(error) => {
                    tracing::warn!(node = %self.target, %error, "this node's snapshot cannot be read; it is tried again");
                    StreamingError::Network(NetworkError::new(&error))
                }
                SendError::Peer(error) => {
                    tracing::warn!(node = %self.target, %error, "a node did not take a snapshot; it is sent again");
                    self.failed(error, RPCTypes::InstallSnapshot).into()
                }
            }),
            closed = cancel => Err(StreamingError::Closed(closed)),
        }
    }
}

/// Why a snapshot did not arrive.
#[derive(Debug, thiserror::Error)]
enum SendError {
    #[error(transparent)]
    Disk(#[from] io::Error),
    #[error(transparent)]
    Peer(#[from] PeerError),
}

impl Way {
    /// Straight from the file, a chunk at a time; the other side installs it when it has all.
    async fn send_snapshot(
        &self,
        vote: Vote,
        snapshot: consensus::Snapshot<std::fs::File>,
    ) -> Result<SnapshotResponse<Types>, SendError> {
        let mut file = tokio::fs::File::from_std(snapshot.snapshot);
        file.rewind().await?;
        let bytes = file.metadata().await?.len();
        let head = SnapshotHead { vote, meta: snapshot.meta, bytes };
        let head = rmp_serde::to_vec(&head).map_err(io::Error::other)?;
        let (speaker, mut answers) = self.link(Lane::Bulk).converse(Method::Snapshot, head.into(), 1).await?;
        let late = |_| PeerError::TimedOut { millis: CHUNK_WITHIN.as_millis() as u64 };
        let mut left = bytes;
        while left > 0 {
            let mut chunk = Vec::with_capacity(CHUNK.min(left as usize));
            let read = (&mut file).take(CHUNK as u64).read_to_end(&mut chunk).await?;
            if read == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
            left = left.saturating_sub(read as u64);
            tokio::time::timeout(CHUNK_WITHIN, speaker.say(chunk.into())).await.map_err(late)??;
            if let Ok(early) = answers.try_recv() {
                return Ok(self.plausible(peers::read(&early?)?)?);
            }
        }
        speaker.end().await?;
        let late = |_| PeerError::TimedOut { millis: INSTALL_WITHIN.as_millis() as u64 };
        let installed = tokio::time::timeout(INSTALL_WITHIN, answers.recv()).await.map_err(late)?;
        let installed = installed.ok_or_else(|| PeerError::Failed("the snapshot was not answered".into()))??;
        Ok(self.plausible(peers::read(&installed)?)?)
    }
}

/// One stream of entries to a follower: sends what comes while answers are awaited, in order, within the window.
struct Appending<'s, S> {
    way: &'s Way,
    /// None once it has ended.
    input: Option<S>,
    open: Option<(Speaker, Answers)>,
    unanswered: usize,
}

impl<S: Stream<Item = Append> + Unpin> Appending<'_, S> {
    /// The next answer; none when everything was sent and answered.
    async fn next(&mut self) -> Option<Result<StreamAppendResult<Types>, RpcError>> {
        loop {
            if self.input.is_none() && self.unanswered == 0 {
                return None;
            }
            let has_room = self.unanswered < WINDOW;
            let awaits = self.unanswered > 0;
            tokio::select! {
                biased;
                answer = heard(&mut self.open), if awaits => {
                    self.unanswered -= 1;
                    let answer = answer.and_then(|answer| peers::read(&answer));
                    let answer = answer.and_then(|answer: StreamAppendResult<Types>| self.way.plausible(answer));
                    return Some(answer.map_err(|error| self.failed(error)));
                }
                request = asked(&mut self.input), if has_room && self.input.is_some() => match request {
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
        self.way.failed(error, RPCTypes::AppendEntries)
    }

    /// Sends a request, in several pieces when it is long: each is a whole request of its own.
    async fn send(&mut self, request: Append) -> Result<(), RpcError> {
        let mut pieces = vec![request];
        while let Some(piece) = pieces.pop() {
            let encoded = encode(&piece)?;
            if encoded.len() > PIECE && piece.entries.len() > 1 {
                let (first, rest) = halves(piece);
                pieces.extend([rest, first]);
                continue;
            }
            self.say(encoded).await.map_err(|error| self.failed(error))?;
            self.unanswered += 1;
        }
        Ok(())
    }

    async fn say(&mut self, request: Bytes) -> Result<(), PeerError> {
        match &self.open {
            Some((speaker, _)) => speaker.say(request).await,
            None => {
                // A long request goes as several, each with an answer.
                let expected = WINDOW + 1_024;
                let link = self.way.link(Lane::Raft);
                self.open = Some(link.converse(Method::AppendStream, request, expected).await?);
                Ok(())
            }
        }
    }
}

async fn asked<S: Stream + Unpin>(input: &mut Option<S>) -> Option<S::Item> {
    input.as_mut()?.next().await
}

async fn heard(open: &mut Option<(Speaker, Answers)>) -> Result<Bytes, PeerError> {
    let Some((_, answers)) = open else { return Err(PeerError::Failed("nothing was asked".into())) };
    let late = |_| PeerError::TimedOut { millis: APPEND_WITHIN.as_millis() as u64 };
    let answer = pin!(tokio::time::timeout(APPEND_WITHIN, answers.recv()));
    answer.await.map_err(late)?.unwrap_or_else(|| Err(PeerError::Failed("the stream was closed".into())))
}

/// Two requests that say the same as one.
fn halves(mut request: Append) -> (Append, Append) {
    let rest = request.entries.split_off(request.entries.len() / 2);
    let prev_log_id = request.entries.last().map(|entry| entry.log_id).or(request.prev_log_id);
    let second = Append { vote: request.vote, prev_log_id, entries: rest, leader_commit: request.leader_commit };
    (request, second)
}
