//! The queue in front of the log: many commands become few entries, and nobody who submits ever waits.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use consensus::LeaderClock;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use ledger::{Command, Entry, Outcome, Refusal, Submission};
use openraft::Raft;
use tokio::sync::{mpsc, oneshot};
use vocabulary::{ClientId, ClientSerial, NodeId};

use crate::counters::Counters;
use crate::error::SubmitError;
use crate::node_folder::random;
use crate::raft::{Machine, Proposal, Types};

/// Commands in one entry.
const BATCH: usize = 256;

/// Entries on their way through the log at once: enough to share an fdatasync, few enough to keep order and memory.
const IN_FLIGHT: usize = 4;

/// A command on its way.
#[derive(Debug)]
pub(crate) struct Queued {
    pub(crate) command: Command,
    pub(crate) answer: oneshot::Sender<Result<Outcome, SubmitError>>,
}

/// The outcome of a submitted command, once it is known. Dropping it does not withdraw the command.
#[derive(Debug)]
pub struct Ticket(pub(crate) oneshot::Receiver<Result<Outcome, SubmitError>>);

impl Future for Ticket {
    type Output = Result<Outcome, SubmitError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(context).map(|answer| answer.unwrap_or(Err(SubmitError::UnknownOutcome)))
    }
}

/// Turns queued commands into entries of this node's client.
pub(crate) struct Writer {
    raft: Raft<Types, Machine>,
    clock: Arc<std::sync::Mutex<LeaderClock>>,
    counters: Arc<Counters>,
    node: NodeId,
    client: ClientId,
    serial: u64,
    is_open: bool,
}

type Answered = (Vec<oneshot::Sender<Result<Outcome, SubmitError>>>, Result<Vec<Outcome>, SubmitError>);

impl Writer {
    pub(crate) fn new(
        raft: Raft<Types, Machine>,
        clock: Arc<std::sync::Mutex<LeaderClock>>,
        counters: Arc<Counters>,
        node: NodeId,
    ) -> Self {
        Self { raft, clock, counters, node, client: ClientId(random()), serial: 0, is_open: false }
    }

    /// Runs until the queue is closed and everything in it is answered.
    pub(crate) async fn run(mut self, mut queue: mpsc::Receiver<Queued>) {
        let mut in_flight = FuturesUnordered::new();
        let mut batch = Vec::with_capacity(BATCH);
        let mut is_closed = false;
        loop {
            let has_room = !is_closed && in_flight.len() < IN_FLIGHT;
            tokio::select! {
                taken = queue.recv_many(&mut batch, BATCH), if has_room => {
                    if taken == 0 {
                        is_closed = true;
                    } else {
                        let (answers, entry) = self.entry(batch.drain(..));
                        // The entry enters Raft's own queue here, so entries keep their order.
                        let sent = self.raft.client_write_many([proposal(entry)]).await;
                        in_flight.push(async move { (answers, outcomes(sent).await) });
                    }
                }
                Some(answered) = in_flight.next() => self.answer(answered),
                else => return,
            }
        }
    }

    fn entry(
        &mut self,
        queued: impl Iterator<Item = Queued>,
    ) -> (Vec<oneshot::Sender<Result<Outcome, SubmitError>>>, Entry) {
        let mut submissions = Vec::new();
        if !self.is_open {
            // An earlier client was forgotten, or there was none: begin as a new one.
            self.client = ClientId(random());
            submissions.push(self.submission(Command::OpenClient(self.node)));
            self.is_open = true;
        }
        let mut answers = Vec::new();
        for Queued { command, answer } in queued {
            submissions.push(self.submission(command));
            answers.push(answer);
        }
        let mut clock = self.clock.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        (answers, Entry { time: clock.read(Instant::now()), submissions })
    }

    fn submission(&mut self, command: Command) -> Submission {
        self.serial += 1;
        Submission { client: self.client, serial: ClientSerial(self.serial), command }
    }

    fn answer(&mut self, (answers, result): Answered) {
        match result {
            Err(error) => {
                for answer in answers {
                    self.counters.failed(error);
                    // Whoever asked may have gone.
                    drop(answer.send(Err(error)));
                }
            }
            Ok(outcomes) => {
                let opened = outcomes.len().saturating_sub(answers.len());
                for (answer, outcome) in answers.into_iter().zip(outcomes.into_iter().skip(opened)) {
                    self.is_open &= outcome != Outcome::Refused(Refusal::UnknownClient);
                    drop(answer.send(Ok(outcome)));
                }
            }
        }
    }
}

fn proposal(entry: Entry) -> Proposal {
    Proposal(Arc::new(entry))
}

/// Waits for an entry to be applied. Whatever goes wrong after it was sent leaves its outcome unknown.
async fn outcomes<S, F, W>(sent: Result<S, F>) -> Result<Vec<Outcome>, SubmitError>
where
    S: futures::Stream<Item = W> + Unpin,
    W: Applied,
{
    let mut sent = sent.map_err(|_| SubmitError::UnknownOutcome)?;
    let written = sent.next().await.ok_or(SubmitError::UnknownOutcome)?;
    written.outcomes().ok_or(SubmitError::UnknownOutcome)
}

/// The result of a write, however Raft nests it.
trait Applied {
    fn outcomes(self) -> Option<Vec<Outcome>>;
}

impl<E1, E2> Applied for Result<Result<openraft::raft::WriteResponse<Types>, E1>, E2> {
    fn outcomes(self) -> Option<Vec<Outcome>> {
        Some(self.ok()?.ok()?.response.0)
    }
}
