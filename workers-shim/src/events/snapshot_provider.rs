//! Residency snapshots between routers: where a follower fetches one, and how one is requested from a follower.
//!
//! A follower writes a snapshot between two messages, so it is consistent. Its transport is up to the caller.

use std::collections::HashMap;

use bytes::Bytes;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use residency::{BlockMappingRules, ResidencySnapshot, ResidencySnapshotHeader, ResidencySnapshotReader};
use tokio::sync::{mpsc, oneshot};
use vocabulary::{DpRank, Incarnation, WorkerId};

/// Maximum number of pending snapshot requests per rank.
const MAX_PENDING: usize = 4;

/// An encoded snapshot.
#[derive(Clone, Debug)]
pub struct EncodedSnapshot {
    /// What it is a snapshot of.
    pub head: ResidencySnapshotHeader,
    /// The chunks, in order.
    pub chunks: Vec<Bytes>,
}

/// A request for the snapshot of a source that is not known exactly here.
#[derive(Clone)]
pub struct SnapshotRequest {
    /// The worker.
    pub worker: WorkerId,
    /// Its data-parallel rank.
    pub rank: DpRank,
    /// The current incarnation of the worker.
    pub process: Incarnation,
    pub(super) rules: BlockMappingRules,
}

impl SnapshotRequest {
    /// Creates a reader for the chunks of a response.
    pub fn reader(&self) -> ResidencySnapshotReader {
        ResidencySnapshotReader::new((self.worker, self.rank), self.process, self.rules.clone())
    }
}

/// Fetches snapshots from the other routers.
pub trait SnapshotProvider: Send + Sync {
    /// Returns a snapshot of the source, if any router knows it exactly. Implementations must limit the time.
    fn fetch(&self, request: SnapshotRequest) -> BoxFuture<'static, Option<ResidencySnapshot>>;
}

pub(crate) type SnapshotSender = oneshot::Sender<Option<EncodedSnapshot>>;

/// The ranks of one worker that can be asked for a snapshot.
#[derive(Default)]
pub(crate) struct SnapshotExporters(Mutex<HashMap<DpRank, mpsc::Sender<SnapshotSender>>>);

impl SnapshotExporters {
    /// Registers a rank that is followed from now on; it answers the requests received here.
    pub(super) fn register(&self, rank: DpRank) -> mpsc::Receiver<SnapshotSender> {
        let (sender, receiver) = mpsc::channel(MAX_PENDING);
        self.0.lock().insert(rank, sender);
        receiver
    }

    /// Sends a request to a rank. None if the rank is not followed or has too many pending requests.
    pub(crate) fn request(
        &self,
        rank: DpRank,
    ) -> impl Future<Output = Option<EncodedSnapshot>> + Send + 'static + use<> {
        let (sender, answer) = oneshot::channel();
        let sent = self.0.lock().get(&rank).is_some_and(|asked| asked.try_send(sender).is_ok());
        async move { if sent { answer.await.ok().flatten() } else { None } }
    }
}
