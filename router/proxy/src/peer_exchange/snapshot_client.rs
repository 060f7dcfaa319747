//! Fetches residency snapshots from peers, for a KV event source of which this router does not know everything.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use ownership::RouterTopic;
use residency::{ReadProgress, ResidencySnapshot};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use vocabulary::NodeId;
use workers_shim::events::{SnapshotProvider, SnapshotRequest};

use super::RouterPeers;
use super::message::{SnapshotTransferReply, SnapshotTransferRequest};
use crate::telemetry::peer_exchange_metrics::ExchangeMetrics;

/// Maximum number of concurrent fetches.
const MAX_CONCURRENT_FETCHES: usize = 4;
/// Timeout for a fetch, including its wait for a permit. Without a snapshot the engine is asked for a replay, which may
/// not reach back as far.
const FETCH_TIMEOUT: Duration = Duration::from_secs(8);
/// Time between two questions to a busy peer.
const BUSY_RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// Maximum number of questions to a busy peer.
const MAX_ATTEMPTS: u32 = 20;

/// Fetches residency snapshots from peers.
#[derive(Clone)]
pub struct SnapshotClient {
    peers: Arc<dyn RouterPeers>,
    fetch_permits: Arc<Semaphore>,
    metrics: ExchangeMetrics,
}

/// Why a peer's snapshot cannot be used.
enum SnapshotFetchError {
    NotKnown,
    /// The fetch failed; the value is a metric label.
    Failed(&'static str),
}

impl SnapshotClient {
    /// Creates a client for these peers.
    pub fn new(peers: Arc<dyn RouterPeers>, metrics: ExchangeMetrics) -> Self {
        Self { peers, fetch_permits: Arc::new(Semaphore::new(MAX_CONCURRENT_FETCHES)), metrics }
    }

    /// Asks the peers one after the other, starting at a different one for each worker.
    async fn fetch_from_peers(self, request: SnapshotRequest) -> Option<ResidencySnapshot> {
        let mut others = self.peers.peers();
        if others.is_empty() {
            return None;
        }
        let begin = request.worker.0 as usize % others.len();
        others.rotate_left(begin);
        let _turn = self.fetch_permits.acquire().await.ok()?;
        for node in others {
            let outcome = match self.fetch_from(node, &request).await {
                Ok(imprint) => {
                    self.metrics.residency_snapshots.with_label_values(&["received"]).inc();
                    return Some(imprint);
                }
                Err(SnapshotFetchError::NotKnown) => "not_found",
                Err(SnapshotFetchError::Failed(cause)) => {
                    tracing::warn!(%node, worker = %request.worker, reason = cause, "a snapshot of another router is of no use");
                    cause
                }
            };
            self.metrics.residency_snapshots.with_label_values(&[outcome]).inc();
        }
        None
    }

    async fn fetch_from(
        &self,
        node: NodeId,
        request: &SnapshotRequest,
    ) -> Result<ResidencySnapshot, SnapshotFetchError> {
        let open =
            SnapshotTransferRequest::Open { worker: request.worker, rank: request.rank, process: request.process };
        let (transfer, chunks, first) = match self.ask_with_retry(node, open).await? {
            SnapshotTransferReply::Opened { transfer, chunks, first } => (transfer, chunks, first),
            SnapshotTransferReply::NotKnown => return Err(SnapshotFetchError::NotKnown),
            SnapshotTransferReply::Busy => return Err(SnapshotFetchError::Failed("busy")),
            SnapshotTransferReply::Chunk(_) | SnapshotTransferReply::Expired => {
                return Err(SnapshotFetchError::Failed("malformed"));
            }
        };
        let mut reader = request.reader();
        let mut chunk: Bytes = first;
        for index in 1.. {
            match reader.take(&chunk).map_err(|error| SnapshotFetchError::Failed(error.label()))? {
                ReadProgress::Complete(snapshot) => return Ok(snapshot),
                ReadProgress::More(next) => reader = next,
            }
            if index >= chunks {
                break;
            }
            chunk = match self.ask(node, SnapshotTransferRequest::Chunk { transfer, index }).await? {
                SnapshotTransferReply::Chunk(chunk) => chunk,
                _ => return Err(SnapshotFetchError::Failed("expired")),
            };
        }
        Err(SnapshotFetchError::Failed("corrupt"))
    }

    async fn ask_with_retry(
        &self,
        node: NodeId,
        question: SnapshotTransferRequest,
    ) -> Result<SnapshotTransferReply, SnapshotFetchError> {
        for _ in 1..MAX_ATTEMPTS {
            match self.ask(node, question).await? {
                SnapshotTransferReply::Busy => tokio::time::sleep(BUSY_RETRY_INTERVAL).await,
                answer => return Ok(answer),
            }
        }
        self.ask(node, question).await
    }

    async fn ask(
        &self,
        node: NodeId,
        question: SnapshotTransferRequest,
    ) -> Result<SnapshotTransferReply, SnapshotFetchError> {
        let answer = self.peers.call(node, RouterTopic::Residency, question.write()).await;
        let answer = answer.map_err(|error| SnapshotFetchError::Failed(error.cause()))?;
        SnapshotTransferReply::read(&answer).ok_or(SnapshotFetchError::Failed("malformed"))
    }
}

impl SnapshotProvider for SnapshotClient {
    fn fetch(&self, request: SnapshotRequest) -> BoxFuture<'static, Option<ResidencySnapshot>> {
        let (borrower, imprints) = (self.clone(), self.metrics.residency_snapshots.clone());
        async move {
            let borrowed = timeout(FETCH_TIMEOUT, borrower.fetch_from_peers(request)).await;
            borrowed.unwrap_or_else(|_| {
                imprints.with_label_values(&["timed_out"]).inc();
                None
            })
        }
        .boxed()
    }
}
