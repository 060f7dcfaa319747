//! The queue in front of the log: many commands become few entries, and nobody who submits ever waits.
//!
//! Batches go to the leader, wherever it is. A batch whose answer was lost is sent again with the same serials, so
//! that it is executed once.

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use ledger::{Command, Outcome, Refusal, Submission};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use vocabulary::{ClientId, ClientSerial};

use crate::core::Core;
use crate::delivery::Delivery;
use crate::error::SubmitError;
use crate::node_folder::random;

/// Commands in one batch.
const BATCH: usize = 256;

/// Serials between the oldest unanswered command and the newest that is sent; the ledger remembers as many outcomes.
const WINDOW: u64 = 1_024;

/// A command on its way.
#[derive(Debug)]
pub(crate) struct Queued {
    pub(crate) command: Command,
    pub(crate) answer: Answer,
}

type Answer = oneshot::Sender<Result<Outcome, SubmitError>>;

/// The outcome of a submitted command, once it is known. Dropping it does not withdraw the command.
#[derive(Debug)]
pub struct Ticket(pub(crate) oneshot::Receiver<Result<Outcome, SubmitError>>);

impl Future for Ticket {
    type Output = Result<Outcome, SubmitError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(context).map(|answer| answer.unwrap_or(Err(SubmitError::UnknownOutcome)))
    }
}

/// Turns queued commands into batches of this node's client.
pub(crate) struct Writer {
    core: Arc<Core>,
    /// How long a batch is tried.
    deadline: Duration,
    client: ClientId,
    serial: u64,
    /// What the ledger knows of the client.
    client_is: ClientIs,
    /// First serials of batches that are not answered.
    unanswered: BTreeSet<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ClientIs {
    /// Nothing; the next batch opens it.
    New,
    /// A batch that opens it is on its way; nothing else is sent meanwhile.
    Opening,
    /// Known.
    Open,
}

/// A batch that was answered.
struct Answered {
    first: u64,
    /// How many of its submissions only open the client.
    opened: usize,
    answers: Vec<Answer>,
    result: Result<Vec<Outcome>, SubmitError>,
}

impl Writer {
    pub(crate) fn new(core: Arc<Core>, deadline: Duration) -> Self {
        let client = ClientId(random());
        Self { core, deadline, client, serial: 0, client_is: ClientIs::New, unanswered: BTreeSet::new() }
    }

    /// Runs until the queue is closed and everything in it is answered.
    pub(crate) async fn run(mut self, mut queue: mpsc::Receiver<Queued>) {
        let mut in_flight = FuturesUnordered::new();
        let mut batch = Vec::new();
        let mut is_closed = false;
        loop {
            let has_room = !is_closed && self.has_room();
            tokio::select! {
                taken = queue.recv_many(&mut batch, BATCH), if has_room => {
                    if taken == 0 {
                        is_closed = true;
                    } else {
                        in_flight.push(self.send(std::mem::take(&mut batch)).await);
                    }
                }
                Some(answered) = in_flight.next() => self.answer(answered),
                else => return,
            }
        }
    }

    fn has_room(&self) -> bool {
        let oldest = self.unanswered.first().copied().unwrap_or(self.serial + 1);
        self.client_is != ClientIs::Opening && self.serial + BATCH as u64 <= oldest + WINDOW - 2
    }

    /// Sends a batch on its way. When this returns, it has its place before every later one.
    async fn send(&mut self, queued: Vec<Queued>) -> impl Future<Output = Answered> + use<> {
        let mut submissions = Vec::with_capacity(BATCH + 1);
        let mut opened = 0;
        if self.client_is == ClientIs::New {
            // An earlier client was forgotten, or there was none: begin as a new one.
            self.client = ClientId(random());
            submissions.push(self.submission(Command::OpenClient(self.core.node())));
            self.client_is = ClientIs::Opening;
            opened = 1;
        }
        let first = self.serial + 1 - opened as u64;
        let mut answers = Vec::with_capacity(BATCH);
        for Queued { command, answer } in queued {
            submissions.push(self.submission(command));
            answers.push(answer);
        }
        self.unanswered.insert(first);
        let delivery = Delivery::new(self.core.clone(), submissions, Instant::now() + self.deadline);
        let delivery = delivery.first_attempt().await;
        async move { Answered { first, opened, answers, result: delivery.finish().await } }
    }

    fn submission(&mut self, command: Command) -> Submission {
        self.serial += 1;
        Submission { client: self.client, serial: ClientSerial(self.serial), command }
    }

    fn answer(&mut self, Answered { first, opened, answers, result }: Answered) {
        self.unanswered.remove(&first);
        match result {
            Err(error) => {
                if opened > 0 {
                    self.client_is = ClientIs::New;
                }
                for answer in answers {
                    self.core.counters().failed(error);
                    // Whoever asked may have gone.
                    drop(answer.send(Err(error)));
                }
            }
            Ok(outcomes) => {
                if opened > 0 {
                    self.client_is = ClientIs::Open;
                }
                for (answer, outcome) in answers.into_iter().zip(outcomes.into_iter().skip(opened)) {
                    if outcome == Outcome::Refused(Refusal::UnknownClient) {
                        self.client_is = ClientIs::New;
                    }
                    drop(answer.send(Ok(outcome)));
                }
            }
        }
    }
}
