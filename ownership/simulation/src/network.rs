//! Raft's messages over the simulated network, and every other question that one process asks another.

use std::future::{Future, pending};
use std::sync::Arc;
use std::time::Duration;

use consensus::{Snapshot, Types, Vote};
use derive_where::derive_where;
use futures::channel::oneshot;
use openraft::errors::{NetworkError, RPCError, ReplicationClosed, StreamingError, Unreachable};
use openraft::network::{RPCOption, RaftNetworkFactory, RaftNetworkV2};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, TransferLeaderRequest, TransferLeaderResponse,
    VoteRequest, VoteResponse,
};
use openraft::{AsyncRuntime, BasicNode, OptionalSend};

use crate::fabric::{Fate, Peer};
use crate::node::Node;
use crate::process::{self, Pid};
use crate::runtime::{Sim, true_time};
use crate::world::World;

type SimTypes = Types<Sim>;

/// How long a snapshot may be silent on its way before it is sent again; a real one is watched chunk by chunk.
const SNAPSHOT_PATIENCE: Duration = Duration::from_secs(5);

/// Why a question was not answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum Unanswered {
    /// Nobody listens there.
    #[error("connection refused")]
    Refused,
    /// No answer came in time; it may have been heard.
    #[error("no answer in time")]
    Silence,
}

/// Asks the process of a node, and waits for its answer so long at most.
///
/// The question travels even when the one who asked is killed meanwhile, and the answer is lost when the one who
/// answers is.
pub(crate) async fn ask<T, F, A>(
    world: &Arc<World>,
    (from, to): (Peer, Peer),
    limit: Duration,
    serve: F,
) -> Result<T, Unanswered>
where
    T: Send + 'static,
    F: Fn(Arc<Node>) -> A + Send + Sync + 'static,
    A: Future<Output = T> + Send + 'static,
{
    let (tx, rx) = oneshot::channel();
    let answer = Answer { world: world.clone(), from: to, to: from, tx: Arc::new(std::sync::Mutex::new(Some(tx))) };
    let serve = Arc::new(serve);
    if let Fate::Arrives(delays) = world.fate(from, to) {
        for delay in delays {
            let (answer, serve) = (answer.clone(), serve.clone());
            process::within(Pid::WORLD, || {
                drop(Sim::spawn(async move {
                    Sim::sleep(delay).await;
                    deliver(answer, serve);
                }));
            });
        }
    }
    drop(answer);
    let heard = Sim::timeout(limit, async move {
        match rx.await {
            Ok(heard) => heard,
            // Lost on the way: whoever waits cannot know.
            Err(_) => pending().await,
        }
    });
    heard.await.unwrap_or(Err(Unanswered::Silence))
}

fn deliver<T, F, A>(answer: Answer<T>, serve: Arc<F>)
where
    T: Send + 'static,
    F: Fn(Arc<Node>) -> A + Send + Sync + 'static,
    A: Future<Output = T> + Send + 'static,
{
    let world = answer.world.clone();
    if !world.connects(answer.to, answer.from) {
        return;
    }
    world.trace(&[answer.to, answer.from, true_time().as_nanos() as u64]);
    match world.life(answer.from) {
        None => answer.send(Err(Unanswered::Refused)),
        Some(node) => process::within(node.pid, || {
            drop(Sim::spawn(async move {
                let said = serve(node).await;
                answer.send(Ok(said));
            }));
        }),
    }
}

/// Who waits for the answer; nobody once it was given.
type Waiting<T> = Arc<std::sync::Mutex<Option<oneshot::Sender<Result<T, Unanswered>>>>>;

/// The way back to who asked.
#[derive_where(Clone)]
struct Answer<T> {
    world: Arc<World>,
    from: Peer,
    to: Peer,
    tx: Waiting<T>,
}

impl<T: Send + 'static> Answer<T> {
    fn send(self, said: Result<T, Unanswered>) {
        let Fate::Arrives(delays) = self.world.fate(self.from, self.to) else { return };
        let Some(delay) = delays.first().copied() else { return };
        process::within(Pid::WORLD, || {
            drop(Sim::spawn(async move {
                Sim::sleep(delay).await;
                let waiting = self.tx.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
                // A second answer to a doubled question, or one that nobody waits for any more.
                drop(waiting.map(|tx| tx.send(said)));
            }));
        });
    }
}

/// A node's links to the others.
#[derive(Clone)]
pub(crate) struct Links {
    pub(crate) world: Arc<World>,
    pub(crate) from: u64,
}

impl RaftNetworkFactory<SimTypes> for Links {
    type Network = Link;

    async fn new_client(&mut self, target: u64, _node: &BasicNode) -> Link {
        Link { world: self.world.clone(), ends: (self.from, target) }
    }
}

pub(crate) struct Link {
    world: Arc<World>,
    ends: (u64, u64),
}

fn unreachable(cause: Unanswered) -> RPCError<SimTypes> {
    match cause {
        Unanswered::Refused => RPCError::Unreachable(Unreachable::new(&cause)),
        Unanswered::Silence => RPCError::Network(NetworkError::new(&cause)),
    }
}

impl Link {
    async fn call<Q, T, E, F, A>(&self, option: RPCOption, request: Q, serve: F) -> Result<T, RPCError<SimTypes>>
    where
        Q: Clone + Send + Sync + 'static,
        T: Send + 'static,
        E: std::error::Error + Send + 'static,
        F: Fn(Arc<Node>, Q) -> A + Send + Sync + 'static,
        A: Future<Output = Result<T, E>> + Send + 'static,
    {
        let serve = move |node| serve(node, request.clone());
        let said = ask(&self.world, self.ends, option.hard_ttl(), serve).await.map_err(unreachable)?;
        // A node that failed says so as a server would: the connection breaks.
        said.map_err(|error| RPCError::Network(NetworkError::new(&error)))
    }
}

impl RaftNetworkV2<SimTypes> for Link {
    type SnapshotData = Arc<Vec<u8>>;

    async fn append_entries(
        &mut self,
        request: AppendEntriesRequest<SimTypes>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<SimTypes>, RPCError<SimTypes>> {
        self.call(option, request, |node, request| async move { node.raft.append_entries(request).await }).await
    }

    async fn vote(
        &mut self,
        request: VoteRequest<SimTypes>,
        option: RPCOption,
    ) -> Result<VoteResponse<SimTypes>, RPCError<SimTypes>> {
        self.call(option, request, |node, request| async move { node.raft.vote(request).await }).await
    }

    async fn pre_vote(
        &mut self,
        request: VoteRequest<SimTypes>,
        option: RPCOption,
    ) -> Result<VoteResponse<SimTypes>, RPCError<SimTypes>> {
        self.call(option, request, |node, request| async move { node.raft.pre_vote(request).await }).await
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: Snapshot<Arc<Vec<u8>>>,
        cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        option: RPCOption,
    ) -> Result<SnapshotResponse<SimTypes>, StreamingError<SimTypes>> {
        let serve = move |node: Arc<Node>| {
            let snapshot = snapshot.clone();
            async move { node.raft.install_full_snapshot(vote, snapshot).await }
        };
        let sent = ask(&self.world, self.ends, option.hard_ttl().min(SNAPSHOT_PATIENCE), serve);
        let network =
            |error: &dyn std::error::Error| StreamingError::Network(NetworkError::from_string(error.to_string()));
        futures::pin_mut!(sent, cancel);
        match futures::future::select(sent, cancel).await {
            futures::future::Either::Left((said, _)) => {
                let said = said.map_err(|error| network(&error))?;
                said.map_err(|error| network(&error))
            }
            futures::future::Either::Right((closed, _)) => Err(StreamingError::Closed(closed)),
        }
    }

    async fn transfer_leader(
        &mut self,
        request: TransferLeaderRequest<SimTypes>,
        option: RPCOption,
    ) -> Result<TransferLeaderResponse<SimTypes>, RPCError<SimTypes>> {
        self.call(option, request, |node, request| async move { node.raft.handle_transfer_leader(request).await }).await
    }
}
