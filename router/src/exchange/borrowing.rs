//! Imprints from neighbours, for a source of which not all is known here.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use ownership::Topic;
use residency::{Imprint, Taken};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use vocabulary::NodeId;
use workers_shim::events::{Imprints, Wanted};

use super::Neighbours;
use super::message::{Answer, Question};
use crate::telemetry::exchange::ExchangeMetrics;

/// Imprints that are fetched at once.
const AT_ONCE: usize = 4;
/// Longest wait for one, its turn included. Without one the engine is asked for a replay, which may not reach as far.
const PATIENCE: Duration = Duration::from_secs(8);
/// Between two questions to a neighbour that lends to too many.
const AGAIN: Duration = Duration::from_millis(50);
/// How often it is asked.
const TRIES: u32 = 20;

/// Asks the neighbours for imprints.
#[derive(Clone)]
pub struct Borrower {
    neighbours: Arc<dyn Neighbours>,
    turns: Arc<Semaphore>,
    metrics: ExchangeMetrics,
}

/// Why a neighbour's imprint is of no use.
enum Useless {
    NotKnown,
    /// For this reason, a word for the metrics.
    Because(&'static str),
}

impl Borrower {
    /// From these neighbours.
    pub fn new(neighbours: Arc<dyn Neighbours>, metrics: ExchangeMetrics) -> Self {
        Self { neighbours, turns: Arc::new(Semaphore::new(AT_ONCE)), metrics }
    }

    /// Asks one after the other, beginning with another one for each worker.
    async fn borrow(self, wanted: Wanted) -> Option<Imprint> {
        let mut others = self.neighbours.others();
        if others.is_empty() {
            return None;
        }
        let begin = wanted.worker.0 as usize % others.len();
        others.rotate_left(begin);
        let _turn = self.turns.acquire().await.ok()?;
        for node in others {
            let outcome = match self.from(node, &wanted).await {
                Ok(imprint) => {
                    self.metrics.imprints.with_label_values(&["borrowed"]).inc();
                    return Some(imprint);
                }
                Err(Useless::NotKnown) => "not_known",
                Err(Useless::Because(cause)) => {
                    tracing::warn!(%node, worker = %wanted.worker, cause, "an imprint of another router is of no use");
                    cause
                }
            };
            self.metrics.imprints.with_label_values(&[outcome]).inc();
        }
        None
    }

    async fn from(&self, node: NodeId, wanted: &Wanted) -> Result<Imprint, Useless> {
        let open = Question::Open { worker: wanted.worker, rank: wanted.rank, process: wanted.process };
        let (loan, chunks, first) = match self.ask_patiently(node, open).await? {
            Answer::Opened { loan, chunks, first } => (loan, chunks, first),
            Answer::NotKnown => return Err(Useless::NotKnown),
            Answer::Busy => return Err(Useless::Because("busy")),
            Answer::Chunk(_) | Answer::Gone => return Err(Useless::Because("garbled")),
        };
        let mut reader = wanted.reader();
        let mut chunk: Bytes = first;
        for place in 1.. {
            match reader.take(&chunk).map_err(|error| Useless::Because(error.cause()))? {
                Taken::Whole(imprint) => return Ok(imprint),
                Taken::More(next) => reader = next,
            }
            if place >= chunks {
                break;
            }
            chunk = match self.ask(node, Question::Chunk { loan, place }).await? {
                Answer::Chunk(chunk) => chunk,
                _ => return Err(Useless::Because("gone")),
            };
        }
        Err(Useless::Because("damaged"))
    }

    async fn ask_patiently(&self, node: NodeId, question: Question) -> Result<Answer, Useless> {
        for _ in 1..TRIES {
            match self.ask(node, question).await? {
                Answer::Busy => tokio::time::sleep(AGAIN).await,
                answer => return Ok(answer),
            }
        }
        self.ask(node, question).await
    }

    async fn ask(&self, node: NodeId, question: Question) -> Result<Answer, Useless> {
        let answer = self.neighbours.call(node, Topic::Residency, question.write()).await;
        let answer = answer.map_err(|error| Useless::Because(error.cause()))?;
        Answer::read(&answer).ok_or(Useless::Because("garbled"))
    }
}

impl Imprints for Borrower {
    fn fetch(&self, wanted: Wanted) -> BoxFuture<'static, Option<Imprint>> {
        let (borrower, imprints) = (self.clone(), self.metrics.imprints.clone());
        async move {
            let borrowed = timeout(PATIENCE, borrower.borrow(wanted)).await;
            borrowed.unwrap_or_else(|_| {
                imprints.with_label_values(&["timed_out"]).inc();
                None
            })
        }
        .boxed()
    }
}
