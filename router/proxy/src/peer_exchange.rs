//! Peer exchange between routers: what this router has done and the ledger does not show yet, and what routers tell
//! each other.
//!
//! Every router publishes its requests in flight at once, so that routers do not herd onto one worker, and serves
//! residency snapshots to a router that starts. On the request path this costs only short memory reads. Missing data
//! makes a plan worse, never an answer wrong; a single router exchanges nothing.

mod in_flight_tables;
pub mod ledger_health;
mod message;
pub mod pending_commits;
pub mod prompt_exchange;
mod snapshot_client;
mod snapshot_transfer;

pub use snapshot_client::SnapshotClient;

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use ownership::{ClusterPeers, OwnershipDirectory, PeerError, PeerService, RouterTopic};
use vocabulary::{KvIndexState, NodeId, WorkerHealth};
use workers_shim::fleet::{Fleet, MergeOutcome};

use crate::telemetry::peer_exchange_metrics::ExchangeMetrics;
use snapshot_transfer::SnapshotServer;

/// This router's side of the peer exchange.
pub struct PeerExchange {
    /// Start time of this process in microseconds, which identifies its incarnation.
    boot: u64,
    fleet: Arc<Fleet>,
    peers: Arc<dyn RouterPeers>,
    snapshots: SnapshotServer,
    metrics: ExchangeMetrics,
}

impl PeerExchange {
    /// Creates the exchange with these peers. Nothing is published or answered yet.
    pub fn new(fleet: Arc<Fleet>, peers: Arc<dyn RouterPeers>, metrics: ExchangeMetrics) -> Arc<Self> {
        let started = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let boot = u64::try_from(started.as_micros()).unwrap_or(u64::MAX);
        Arc::new(Self { boot, fleet, peers, snapshots: SnapshotServer::default(), metrics })
    }

    /// Answers the other nodes of this directory from now on, as long as it runs.
    pub fn serve(self: &Arc<Self>, directory: &OwnershipDirectory) {
        for topic in [RouterTopic::Exchange, RouterTopic::Residency] {
            directory.serve_peers(topic, Arc::new(TopicService { exchange: Arc::downgrade(self), topic }));
        }
    }

    /// Answers a question of a peer.
    pub fn answer(
        self: &Arc<Self>,
        topic: RouterTopic,
        from: NodeId,
        question: Bytes,
    ) -> BoxFuture<'static, Result<Bytes, PeerError>> {
        let exchange = self.clone();
        async move {
            match topic {
                RouterTopic::Exchange => exchange.receive_table(from, &question),
                // `PromptService` answers these itself.
                RouterTopic::Prompts => Err(PeerError::NoService(topic)),
                RouterTopic::Residency => {
                    exchange.snapshots.answer(&exchange.fleet, &exchange.metrics, &question).await
                }
            }
        }
        .boxed()
    }

    /// Publishes this router's requests in flight, and drops those of silent peers, until aborted.
    pub async fn run(self: Arc<Self>) {
        tokio::join!(in_flight_tables::publish(&self), self.record_time_to_exact());
    }

    fn receive_table(&self, from: NodeId, message: &[u8]) -> Result<Bytes, PeerError> {
        let count = |outcome: &str| self.metrics.tables.with_label_values(&[outcome]).inc();
        let Some(table) = message::read_table(message) else {
            count("malformed");
            return Err(PeerError::Garbled("a table of requests in flight".into()));
        };
        count(match self.fleet.merge_peer_table(from, table, Instant::now()) {
            MergeOutcome::Changed => "heard",
            MergeOutcome::Stale => "old",
            MergeOutcome::TooMany => "too_many",
        });
        Ok(Bytes::new())
    }

    /// Records the time until every worker's KV index was exact for the first time.
    async fn record_time_to_exact(&self) {
        let started = Instant::now();
        loop {
            let workers = self.fleet.snapshot();
            let exact = workers.iter().filter(|worker| worker.kv_index_state == KvIndexState::Exact);
            let ready = workers.iter().filter(|worker| worker.health == WorkerHealth::Ready);
            if !workers.is_empty() && exact.count() == workers.len() && ready.count() == workers.len() {
                let took = started.elapsed();
                self.metrics.exact_seconds.set(took.as_secs_f64());
                tracing::info!(workers = workers.len(), ?took, "what all workers hold is known exactly");
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

impl std::fmt::Debug for PeerExchange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PeerExchange").field("boot", &self.boot).finish_non_exhaustive()
    }
}

/// The other routers of the cluster.
pub trait RouterPeers: Send + Sync + 'static {
    /// Returns all of them, reachable or not.
    fn peers(&self) -> Vec<NodeId>;
    /// Sends a question to one of them. The implementation bounds the time.
    fn call(&self, node: NodeId, topic: RouterTopic, question: Bytes) -> BoxFuture<'static, Result<Bytes, PeerError>>;
}

impl RouterPeers for ClusterPeers {
    fn peers(&self) -> Vec<NodeId> {
        ClusterPeers::others(self)
    }

    fn call(&self, node: NodeId, topic: RouterTopic, question: Bytes) -> BoxFuture<'static, Result<Bytes, PeerError>> {
        let peers = self.clone();
        async move { ClusterPeers::call(&peers, node, topic, question).await }.boxed()
    }
}

/// Answers the other nodes on one topic, as long as the exchange exists.
struct TopicService {
    exchange: Weak<PeerExchange>,
    topic: RouterTopic,
}

impl PeerService for TopicService {
    fn answer(&self, from: NodeId, question: Bytes) -> BoxFuture<'static, Result<Bytes, PeerError>> {
        match self.exchange.upgrade() {
            Some(exchange) => exchange.answer(self.topic, from, question),
            None => std::future::ready(Err(PeerError::NoService(self.topic))).boxed(),
        }
    }
}

#[cfg(test)]
mod tests;
