//! Imprints between routers: where a follower gets one, and how one is asked of a follower.
//!
//! A follower writes an imprint between two messages, so that it is of exactly one moment; how it travels is the
//! caller's.

use std::collections::HashMap;

use bytes::Bytes;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use residency::{Imprint, ImprintHead, ImprintReader, SourceRules};
use tokio::sync::{mpsc, oneshot};
use vocabulary::{DpRank, Incarnation, WorkerId};

/// Imprints of one rank that may be asked for and not be written yet.
const MOST_WAITING: usize = 4;

/// An imprint, written.
#[derive(Clone, Debug)]
pub struct Exported {
    /// Of what it is.
    pub head: ImprintHead,
    /// In their order.
    pub chunks: Vec<Bytes>,
}

/// A source of which nothing, or not everything, is known here.
#[derive(Clone)]
pub struct Wanted {
    /// The engine.
    pub worker: WorkerId,
    /// Its rank.
    pub rank: DpRank,
    /// The process that is behind it now.
    pub process: Incarnation,
    pub(super) rules: SourceRules,
}

impl Wanted {
    /// Reads the chunks that somebody offers.
    pub fn reader(&self) -> ImprintReader {
        ImprintReader::new((self.worker, self.rank), self.process, self.rules.clone())
    }
}

/// The other routers, as far as they know what engines hold.
pub trait Imprints: Send + Sync {
    /// An imprint of the source, if anybody knows all of it. Bounded in time by whoever implements it.
    fn fetch(&self, wanted: Wanted) -> BoxFuture<'static, Option<Imprint>>;
}

pub(crate) type Asked = oneshot::Sender<Option<Exported>>;

/// The ranks of one worker that can be asked.
#[derive(Default)]
pub(crate) struct Exports(Mutex<HashMap<DpRank, mpsc::Sender<Asked>>>);

impl Exports {
    /// A rank is followed from now on; it answers what comes here.
    pub(super) fn open(&self, rank: DpRank) -> mpsc::Receiver<Asked> {
        let (sender, receiver) = mpsc::channel(MOST_WAITING);
        self.0.lock().insert(rank, sender);
        receiver
    }

    /// Asks a rank; none when nobody follows it, or too many ask.
    pub(crate) fn ask(&self, rank: DpRank) -> impl Future<Output = Option<Exported>> + Send + 'static + use<> {
        let (sender, answer) = oneshot::channel();
        let sent = self.0.lock().get(&rank).is_some_and(|asked| asked.try_send(sender).is_ok());
        async move { if sent { answer.await.ok().flatten() } else { None } }
    }
}
