//! The queue in front of the log: many commands become few entries, and nobody who submits ever waits.
//!
//! Batches go to the leader, wherever it is. A batch whose answer was lost is sent again with the same serials, so
//! that it is executed once.

use std::collections::{BTreeSet, VecDeque};
use std::future::Future;
use std::io;
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

/// Bytes of one batch, and so of one command. An entry goes to other nodes as one piece, and must never be too large for
/// it: it would lie in the log and reach nobody.
const BATCH_BYTES: usize = 4 << 20;

/// Serials between the oldest unanswered command and the newest that is sent; the ledger remembers as many outcomes.
const WINDOW: u64 = 1_024;

/// A command on its way.
#[derive(Debug)]
pub(crate) struct Queued {
    command: Command,
    answer: Answer,
    /// Of the command, encoded.
    bytes: usize,
}

type Answer = oneshot::Sender<Result<Outcome, SubmitError>>;

impl Queued {
    /// Refuses a command that fits into no batch.
    pub(crate) fn new(command: Command, answer: Answer) -> Result<Self, SubmitError> {
        let bytes = encoded(&command);
        if bytes > BATCH_BYTES { Err(SubmitError::TooLarge) } else { Ok(Self { command, answer, bytes }) }
    }
}

/// How many bytes a command has in the log and on its way there.
fn encoded(command: &Command) -> usize {
    struct Count(usize);

    impl io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    let mut count = Count(0);
    rmp_serde::encode::write(&mut count, command).expect("a command encodes");
    count.0
}

/// Takes the commands of the next batch, in order.
fn next_batch(waiting: &mut VecDeque<Queued>) -> Vec<Queued> {
    let mut bytes = 0;
    let mut fits = |queued: &Queued| {
        bytes += queued.bytes;
        bytes <= BATCH_BYTES
    };
    let count = waiting.iter().take(BATCH).take_while(|queued| fits(queued)).count();
    waiting.drain(..count).collect()
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
        let (mut taken, mut waiting) = (Vec::new(), VecDeque::new());
        let mut is_closed = false;
        loop {
            while !waiting.is_empty() && self.has_room() {
                in_flight.push(self.send(next_batch(&mut waiting)).await);
            }
            let takes = !is_closed && waiting.is_empty() && self.has_room();
            tokio::select! {
                count = queue.recv_many(&mut taken, BATCH), if takes => {
                    is_closed = count == 0;
                    waiting.extend(taken.drain(..));
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
        for Queued { command, answer, .. } in queued {
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

#[cfg(test)]
mod tests {
    use ledger::OpenSession;
    use vocabulary::{ModelId, SessionId, TenantId};

    use super::*;

    fn queued(bytes: usize) -> Result<Queued, SubmitError> {
        let (tenant, model) = (TenantId::default(), ModelId::from("m".repeat(bytes).as_str()));
        let command = Command::OpenSession(OpenSession { session: SessionId(1), tenant, model, parent: None });
        Queued::new(command, oneshot::channel().0)
    }

    #[test]
    fn a_batch_is_bounded_by_commands_and_by_bytes_and_keeps_the_order() {
        let lengths = |batch: &[Queued]| batch.iter().map(|queued| queued.bytes >> 20).collect::<Vec<_>>();
        let mut waiting: VecDeque<_> = [1, 2, 2, 3, 1].into_iter().map(|mib| queued(mib << 20).unwrap()).collect();
        let mut batches = Vec::new();
        while !waiting.is_empty() {
            batches.push(lengths(&next_batch(&mut waiting)));
        }
        assert_eq!(batches, [vec![1, 2], vec![2], vec![3], vec![1]]);
        waiting.extend((0..BATCH + 1).map(|_| queued(1).unwrap()));
        assert_eq!((next_batch(&mut waiting).len(), waiting.len()), (BATCH, 1));
    }

    #[test]
    fn a_command_that_fits_into_no_batch_is_refused_at_once() {
        assert!(queued(BATCH_BYTES - 100).is_ok());
        assert_eq!(queued(BATCH_BYTES).unwrap_err(), SubmitError::TooLarge);
        let command = Command::CloseSession(SessionId(u128::MAX));
        assert_eq!(encoded(&command), rmp_serde::to_vec(&command).unwrap().len());
    }
}
