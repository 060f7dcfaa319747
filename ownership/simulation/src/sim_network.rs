//! Raft's RPCs over the simulated network, and all other requests between processes.

use std::future::{Future, pending};
use std::sync::Arc;
use std::time::Duration;

use consensus::{Snapshot, TypeConfig, Vote};
use derive_where::derive_where;
use futures::channel::oneshot;
use openraft::errors::{NetworkError, RPCError, ReplicationClosed, StreamingError, Unreachable};
use openraft::network::{RPCOption, RaftNetworkFactory, RaftNetworkV2};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, TransferLeaderRequest, TransferLeaderResponse,
    VoteRequest, VoteResponse,
};
use openraft::{AsyncRuntime, BasicNode, OptionalSend};

use crate::network_model::{EndpointNumber, MessageFate};
use crate::process::{self, Pid};
use crate::runtime::{SimulatedRuntime, true_time};
use crate::sim_node::SimNode;
use crate::world::SimWorld;

type LinkTypeConfig = TypeConfig<SimulatedRuntime>;

/// Timeout of a snapshot transfer before it is sent again; a real transfer has a timeout per chunk.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a request was not answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum RpcFailure {
    /// Nobody listens there.
    #[error("connection refused")]
    Refused,
    /// No answer came in time; the request may have arrived.
    #[error("no answer in time")]
    NoReply,
}

/// Sends a request to a node's process, and waits for its answer up to a timeout.
///
/// The request continues to travel even if the caller is killed meanwhile; the answer is lost if the callee is killed.
pub(crate) async fn ask<T, F, A>(
    world: &Arc<SimWorld>,
    (from, to): (EndpointNumber, EndpointNumber),
    limit: Duration,
    serve: F,
) -> Result<T, RpcFailure>
where
    T: Send + 'static,
    F: Fn(Arc<SimNode>) -> A + Send + Sync + 'static,
    A: Future<Output = T> + Send + 'static,
{
    let (tx, rx) = oneshot::channel();
    let answer =
        ReplyHandle { world: world.clone(), from: to, to: from, tx: Arc::new(std::sync::Mutex::new(Some(tx))) };
    let serve = Arc::new(serve);
    if let MessageFate::Arrives(delays) = world.fate(from, to) {
        for delay in delays {
            let (answer, serve) = (answer.clone(), serve.clone());
            process::run_in(Pid::WORLD, || {
                drop(SimulatedRuntime::spawn(async move {
                    SimulatedRuntime::sleep(delay).await;
                    deliver(answer, serve);
                }));
            });
        }
    }
    drop(answer);
    let response = SimulatedRuntime::timeout(limit, async move {
        match rx.await {
            Ok(reply) => reply,
            // Lost in transit: the caller cannot know.
            Err(_) => pending().await,
        }
    });
    response.await.unwrap_or(Err(RpcFailure::NoReply))
}

fn deliver<T, F, A>(answer: ReplyHandle<T>, serve: Arc<F>)
where
    T: Send + 'static,
    F: Fn(Arc<SimNode>) -> A + Send + Sync + 'static,
    A: Future<Output = T> + Send + 'static,
{
    let world = answer.world.clone();
    if !world.connects(answer.to, answer.from) {
        return;
    }
    world.add_to_digest(&[answer.to, answer.from, true_time().as_nanos() as u64]);
    match world.running_node(answer.from) {
        None => answer.send(Err(RpcFailure::Refused)),
        Some(node) => process::run_in(node.pid, || {
            drop(SimulatedRuntime::spawn(async move {
                let response = serve(node).await;
                answer.send(Ok(response));
            }));
        }),
    }
}

/// Waiter for the answer; `None` once it was answered.
type ReplySlot<T> = Arc<std::sync::Mutex<Option<oneshot::Sender<Result<T, RpcFailure>>>>>;

/// Way back to the caller.
#[derive_where(Clone)]
struct ReplyHandle<T> {
    world: Arc<SimWorld>,
    from: EndpointNumber,
    to: EndpointNumber,
    tx: ReplySlot<T>,
}

impl<T: Send + 'static> ReplyHandle<T> {
    fn send(self, reply: Result<T, RpcFailure>) {
        let MessageFate::Arrives(delays) = self.world.fate(self.from, self.to) else { return };
        let Some(delay) = delays.first().copied() else { return };
        process::run_in(Pid::WORLD, || {
            drop(SimulatedRuntime::spawn(async move {
                SimulatedRuntime::sleep(delay).await;
                let waiting = self.tx.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
                // A second answer to a duplicated request, or one that nobody waits for any more.
                drop(waiting.map(|tx| tx.send(reply)));
            }));
        });
    }
}

/// A node's links to the others.
#[derive(Clone)]
pub(crate) struct SimNetworkFactory {
    pub(crate) world: Arc<SimWorld>,
    pub(crate) from: u64,
}

impl RaftNetworkFactory<LinkTypeConfig> for SimNetworkFactory {
    type Network = SimRaftClient;

    async fn new_client(&mut self, target: u64, _node: &BasicNode) -> SimRaftClient {
        SimRaftClient { world: self.world.clone(), ends: (self.from, target) }
    }
}

pub(crate) struct SimRaftClient {
    world: Arc<SimWorld>,
    ends: (u64, u64),
}

fn unreachable(cause: RpcFailure) -> RPCError<LinkTypeConfig> {
    match cause {
        RpcFailure::Refused => RPCError::Unreachable(Unreachable::new(&cause)),
        RpcFailure::NoReply => RPCError::Network(NetworkError::new(&cause)),
    }
}

impl SimRaftClient {
    async fn call<Q, T, E, F, A>(&self, option: RPCOption, request: Q, serve: F) -> Result<T, RPCError<LinkTypeConfig>>
    where
        Q: Clone + Send + Sync + 'static,
        T: Send + 'static,
        E: std::error::Error + Send + 'static,
        F: Fn(Arc<SimNode>, Q) -> A + Send + Sync + 'static,
        A: Future<Output = Result<T, E>> + Send + 'static,
    {
        let serve = move |node| serve(node, request.clone());
        let response = ask(&self.world, self.ends, option.hard_ttl(), serve).await.map_err(unreachable)?;
        // A failed node reports that like a server would: the connection breaks.
        response.map_err(|error| RPCError::Network(NetworkError::new(&error)))
    }
}

impl RaftNetworkV2<LinkTypeConfig> for SimRaftClient {
    type SnapshotData = Arc<Vec<u8>>;

    async fn append_entries(
        &mut self,
        request: AppendEntriesRequest<LinkTypeConfig>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<LinkTypeConfig>, RPCError<LinkTypeConfig>> {
        self.call(option, request, |node, request| async move { node.raft.append_entries(request).await }).await
    }

    async fn vote(
        &mut self,
        request: VoteRequest<LinkTypeConfig>,
        option: RPCOption,
    ) -> Result<VoteResponse<LinkTypeConfig>, RPCError<LinkTypeConfig>> {
        self.call(option, request, |node, request| async move { node.raft.vote(request).await }).await
    }

    async fn pre_vote(
        &mut self,
        request: VoteRequest<LinkTypeConfig>,
        option: RPCOption,
    ) -> Result<VoteResponse<LinkTypeConfig>, RPCError<LinkTypeConfig>> {
        self.call(option, request, |node, request| async move { node.raft.pre_vote(request).await }).await
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: Snapshot<Arc<Vec<u8>>>,
        cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        option: RPCOption,
    ) -> Result<SnapshotResponse<LinkTypeConfig>, StreamingError<LinkTypeConfig>> {
        let serve = move |node: Arc<SimNode>| {
            let snapshot = snapshot.clone();
            async move { node.raft.install_full_snapshot(vote, snapshot).await }
        };
        let sent = ask(&self.world, self.ends, option.hard_ttl().min(SNAPSHOT_TIMEOUT), serve);
        let network =
            |error: &dyn std::error::Error| StreamingError::Network(NetworkError::from_string(error.to_string()));
        futures::pin_mut!(sent, cancel);
        match futures::future::select(sent, cancel).await {
            futures::future::Either::Left((reply, _)) => {
                let response = reply.map_err(|error| network(&error))?;
                response.map_err(|error| network(&error))
            }
            futures::future::Either::Right((closed, _)) => Err(StreamingError::Closed(closed)),
        }
    }

    async fn transfer_leader(
        &mut self,
        request: TransferLeaderRequest<LinkTypeConfig>,
        option: RPCOption,
    ) -> Result<TransferLeaderResponse<LinkTypeConfig>, RPCError<LinkTypeConfig>> {
        self.call(option, request, |node, request| async move { node.raft.handle_transfer_leader(request).await }).await
    }
}
