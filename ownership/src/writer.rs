//! The queue in front of the log: many commands become few entries, and nobody who submits ever waits.
//!
//! Batches go to the leader, wherever it is. A batch whose answer was lost is sent again with the same serials, so
//! that it is executed once. It never carries the opening of its client: sent again after the ledger forgot the client,
//! it would open it anew, and be executed twice.

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
use crate::delivery::{Delivery, open_client};
use crate::error::SubmitError;
use crate::node_folder::random;

const BATCH: usize = 256;

/// Batches on their way at once: one is being made durable, and one is ready to be the next. What is submitted meanwhile
/// becomes one batch instead of many, and each batch costs every node a flush, messages and a copy of what it changes.
const IN_FLIGHT: usize = 2;

/// How long they are waited for before one more is sent: without a quorum nobody waits in vain for longer than alone.
const HURRY: Duration = Duration::from_millis(50);

/// Turns of the other tasks without a new command after which a batch is sent.
const IDLE_TURNS: u32 = 2;

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

/// Whether another batch is due while so many are on their way and the last was sent so long ago.
fn is_due(in_flight: usize, last_sent: Duration) -> bool {
    in_flight < IN_FLIGHT || last_sent >= HURRY
}

/// What the writer does next, besides taking answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Next {
    /// Sends a batch of what waits.
    Send,
    /// Takes commands from the queue.
    Take,
    /// Looks again when another batch is due.
    Later,
    /// Nothing, until a batch is answered.
    Rest,
}

/// Whether a batch can be sent now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pace {
    /// No room for another one.
    Full,
    Early,
    Due,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Left {
    Taken,
    /// What may come from the queue.
    Queue,
    /// Nothing any more.
    Nothing,
}

/// Decides the next step from one look at the clock: what is not due yet is waited for.
fn next(pace: Pace, left: Left) -> Next {
    match (pace, left) {
        (_, Left::Nothing) | (Pace::Full, _) => Next::Rest,
        (Pace::Early, _) => Next::Later,
        (Pace::Due, Left::Taken) => Next::Send,
        (Pace::Due, Left::Queue) => Next::Take,
    }
}

/// Takes what else is being submitted right now: an answer wakes many who ask again at once. It ends when the others
/// had their turn and brought nothing.
async fn gather(queue: &mut mpsc::Receiver<Queued>, taken: &mut Vec<Queued>) {
    let mut idle = 0;
    while idle < IDLE_TURNS && taken.len() < BATCH {
        tokio::task::yield_now().await;
        let before = taken.len();
        while taken.len() < BATCH
            && let Ok(queued) = queue.try_recv()
        {
            taken.push(queued);
        }
        idle = if taken.len() > before { 0 } else { idle + 1 };
    }
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
    last_sent: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ClientIs {
    /// Nothing; it is opened before the next batch.
    New,
    /// It is being opened, and the batch that waits for it comes next; nothing else is sent meanwhile.
    Opening,
    Open,
}

struct Answered {
    first: u64,
    answers: Vec<Answer>,
    result: Result<Vec<Outcome>, SubmitError>,
    client: Opened,
}

/// What became of the client of a batch before it was sent.
enum Opened {
    Before(ClientId),
    As(ClientId),
    Not,
}

impl Writer {
    pub(crate) fn new(core: Arc<Core>, deadline: Duration) -> Self {
        let client = ClientId(random());
        let (unanswered, last_sent) = (BTreeSet::new(), Instant::now());
        Self { core, deadline, client, serial: 0, client_is: ClientIs::New, unanswered, last_sent }
    }

    /// Runs until the queue is closed and everything in it is answered.
    pub(crate) async fn run(mut self, queue: &mut mpsc::Receiver<Queued>) {
        let mut in_flight = FuturesUnordered::new();
        let (mut taken, mut waiting) = (Vec::new(), VecDeque::new());
        let mut is_closed = false;
        loop {
            let left = match is_closed {
                _ if !waiting.is_empty() => Left::Taken,
                false => Left::Queue,
                true => Left::Nothing,
            };
            let next = next(self.pace(), left);
            if next == Next::Send {
                in_flight.push(self.send(next_batch(&mut waiting)).await);
                continue;
            }
            tokio::select! {
                count = queue.recv_many(&mut taken, BATCH), if next == Next::Take => {
                    is_closed = count == 0;
                    gather(queue, &mut taken).await;
                    waiting.extend(taken.drain(..));
                }
                Some(answered) = in_flight.next() => self.answer(answered),
                () = tokio::time::sleep_until(self.last_sent + HURRY), if next == Next::Later => {}
                else => return,
            }
        }
    }

    fn has_room(&self) -> bool {
        let oldest = self.unanswered.first().copied().unwrap_or(self.serial + 1);
        self.client_is != ClientIs::Opening && self.serial + BATCH as u64 <= oldest + WINDOW - 2
    }

    fn pace(&self) -> Pace {
        match is_due(self.unanswered.len(), self.last_sent.elapsed()) {
            _ if !self.has_room() => Pace::Full,
            true => Pace::Due,
            false => Pace::Early,
        }
    }

    /// Sends a batch on its way. When this returns, it has its place before every later one.
    async fn send(&mut self, queued: Vec<Queued>) -> impl Future<Output = Answered> + use<> {
        let first = self.serial + 1;
        self.serial += queued.len() as u64;
        self.unanswered.insert(first);
        self.last_sent = Instant::now();
        let (core, deadline) = (self.core.clone(), self.last_sent + self.deadline);
        let (commands, answers) = queued.into_iter().map(|queued| (queued.command, queued.answer)).unzip();
        // An earlier client was forgotten, or there was none: begin as a new one. What is sent there has its place only
        // then, and nothing else is sent until it is answered.
        let sent = match std::mem::replace(&mut self.client_is, ClientIs::Opening) {
            ClientIs::New => Sent::Unopened(commands),
            known @ (ClientIs::Opening | ClientIs::Open) => {
                self.client_is = known;
                let delivery = Delivery::new(core.clone(), submissions(commands, first, self.client), deadline);
                Sent::First(self.client, delivery.first_attempt().await)
            }
        };
        async move {
            let (client, result) = sent.answered(core, first, deadline).await;
            Answered { first, answers, result, client }
        }
    }

    fn answer(&mut self, Answered { first, answers, result, client }: Answered) {
        self.unanswered.remove(&first);
        match client {
            // By now another one may have been opened, or is just being.
            Opened::Before(client) if client == self.client && self.client_is == ClientIs::Open => {
                if is_over(&result) {
                    self.client_is = ClientIs::New;
                }
            }
            Opened::Before(_) => {}
            // A client whose first batch was not answered may be forgotten already.
            Opened::As(client) if !is_over(&result) && result.is_ok() => {
                (self.client, self.client_is) = (client, ClientIs::Open)
            }
            Opened::As(_) | Opened::Not => self.client_is = ClientIs::New,
        }
        match result {
            Err(error) => {
                for answer in answers {
                    self.core.counters().failed(error);
                    // Whoever asked may have gone.
                    drop(answer.send(Err(error)));
                }
            }
            Ok(outcomes) => {
                answers.into_iter().zip(outcomes).for_each(|(answer, outcome)| drop(answer.send(Ok(outcome))));
            }
        }
    }
}

/// Whether nothing more is sent as the client of a batch that was answered so: the ledger forgot it, or may have.
fn is_over(result: &Result<Vec<Outcome>, SubmitError>) -> bool {
    match result {
        Ok(outcomes) => outcomes.contains(&Outcome::Refused(Refusal::UnknownClient)),
        Err(error) => *error == SubmitError::UnknownOutcome,
    }
}

/// A batch whose place is taken.
enum Sent {
    /// Its client is opened first.
    Unopened(Vec<Command>),
    /// Its first attempt is on its way, as this client.
    First(ClientId, Delivery),
}

impl Sent {
    /// The client that was opened for it, and what became of it.
    async fn answered(
        self,
        core: Arc<Core>,
        first: u64,
        deadline: Instant,
    ) -> (Opened, Result<Vec<Outcome>, SubmitError>) {
        let commands = match self {
            Self::First(client, delivery) => return (Opened::Before(client), delivery.finish().await),
            Self::Unopened(commands) => commands,
        };
        match open_client(&core, ClientSerial(first - 1), deadline).await {
            Err(error) => (Opened::Not, Err(error)),
            Ok(client) => {
                let delivery = Delivery::new(core, submissions(commands, first, client), deadline);
                (Opened::As(client), delivery.first_attempt().await.finish().await)
            }
        }
    }
}

/// Exactly as many as there are: an entry lives on in the log's cache.
fn submissions(commands: Vec<Command>, first: u64, client: ClientId) -> Vec<Submission> {
    let number = |(n, command)| Submission { client, serial: ClientSerial(first + n as u64), command };
    commands.into_iter().enumerate().map(number).collect()
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

    #[tokio::test]
    async fn what_the_others_submit_in_their_next_turns_goes_with_the_same_batch() {
        let (submit, mut queue) = mpsc::channel(2 * BATCH);
        for _ in 0..10 {
            let submit = submit.clone();
            tokio::spawn(async move { submit.try_send(queued(1).unwrap()).unwrap() });
        }
        let mut taken = vec![queued(1).unwrap()];
        gather(&mut queue, &mut taken).await;
        assert_eq!(taken.len(), 11);
        (0..BATCH).for_each(|_| submit.try_send(queued(1).unwrap()).unwrap());
        gather(&mut queue, &mut taken).await;
        assert_eq!(taken.len(), BATCH, "never more than fits");
    }

    #[test]
    fn two_batches_are_on_their_way_at_once_and_more_only_when_they_take_long() {
        assert!(is_due(0, Duration::ZERO) && is_due(1, Duration::ZERO));
        assert!(!is_due(2, HURRY / 2));
        assert!(is_due(2, HURRY) && is_due(3, HURRY));
    }

    #[test]
    fn a_batch_that_waits_is_sent_or_its_time_is_waited_for() {
        for left in [Left::Taken, Left::Queue] {
            assert_eq!((next(Pace::Early, left), next(Pace::Full, left)), (Next::Later, Next::Rest));
        }
        assert_eq!((next(Pace::Due, Left::Taken), next(Pace::Due, Left::Queue)), (Next::Send, Next::Take));
        for pace in [Pace::Full, Pace::Early, Pace::Due] {
            assert_eq!(next(pace, Left::Nothing), Next::Rest);
        }
    }
}
