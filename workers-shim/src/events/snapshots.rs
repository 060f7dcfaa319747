//! Imprints between routers: where a follower gets one, and how one is asked of a follower.
//!
//! A follower writes an imprint between two messages, so that it is of exactly one moment; how it travels is the
//! caller's.

use std::collections::HashMap;

use bytes::Bytes;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use residency::{ResidencySnapshot, ResidencySnapshotHeader, ResidencySnapshotReader, SourceRules};
use tokio::sync::{mpsc, oneshot};
use vocabulary::{DpRank, Incarnation, WorkerId};

/// Imprints of one rank that may be asked for and not be written yet.
const MAX_PENDING: usize = 4;

/// An imprint, written.
#[derive(Clone, Debug)]
pub struct EncodedSnapshot {
    /// Of what it is.
    pub head: ResidencySnapshotHeader,
    /// In their order.
    pub chunks: Vec<Bytes>,
}

/// A source of which nothing, or not everything, is known here.
#[derive(Clone)]
pub struct SnapshotRequest {
    /// The engine.
    pub worker: WorkerId,
    /// Its rank.
    pub rank: DpRank,
    /// The process that is behind it now.
    pub process: Incarnation,
    pub(super) rules: SourceRules,
}

impl SnapshotRequest {
    /// Reads the chunks that somebody offers.
    pub fn reader(&self) -> ResidencySnapshotReader {
        ResidencySnapshotReader::new((self.worker, self.rank), self.process, self.rules.clone())
    }
}

/// The other routers, as far as they know what engines hold.
pub trait SnapshotProvider: Send + Sync {
    /// An imprint of the source, if anybody knows all of it. Bounded in time by whoever implements it.
    fn fetch(&self, wanted: SnapshotRequest) -> BoxFuture<'static, Option<ResidencySnapshot>>;
}

pub(crate) type SnapshotReply = oneshot::Sender<Option<EncodedSnapshot>>;

/// The ranks of one worker that can be asked.
#[derive(Default)]
pub(crate) struct SnapshotExporters(Mutex<HashMap<DpRank, mpsc::Sender<SnapshotReply>>>);

impl SnapshotExporters {
    /// A rank is followed from now on; it answers what comes here.
    pub(super) fn register(&self, rank: DpRank) -> mpsc::Receiver<SnapshotReply> {
        let (sender, receiver) = mpsc::channel(MAX_PENDING);
        self.0.lock().insert(rank, sender);
        receiver
    }

    /// Asks a rank; none when nobody follows it, or too many ask.
    pub(crate) fn request(
        &self,
        rank: DpRank,
    ) -> impl Future<Output = Option<EncodedSnapshot>> + Send + 'static + use<> {
        let (sender, answer) = oneshot::channel();
        let sent = self.0.lock().get(&rank).is_some_and(|asked| asked.try_send(sender).is_ok());
        async move { if sent { answer.await.ok().flatten() } else { None } }
    }
}
