//! Command queue in front of the log: batches many commands into few entries, and submitting never waits.
//!
//! Batches go to the leader, whichever node it is. A batch whose answer was lost is sent again with the same serials,
//! so that it is executed once. A batch never contains the opening of its client: if it were sent again after the
//! ledger forgot the client, it would open the client again and be executed twice.

use std::collections::{BTreeSet, VecDeque};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use ledger::{Command, Outcome, Refusal, Submission};
use tokio::sync::mpsc;
use tokio::time::Instant;
use vocabulary::{ClientId, ClientSerial};

use crate::command_queue::{MAX_BATCH_BYTES, OutcomeCallback, QueuedCommand, Urgency};
use crate::delivery::{CommandDelivery, open_client};
use crate::error::SubmitError;
use crate::node_core::NodeCore;
use crate::node_folder::random_u128;

const MAX_BATCH: usize = 256;

/// Maximum number of batches in flight: one is being made durable while the next is ready. Commands submitted meanwhile
/// form one larger batch, because each batch costs every node a flush, messages and a copy of what it changes.
const MAX_IN_FLIGHT: usize = 2;

/// How long to wait for answers before an extra batch is sent, so that without a quorum commands time out
/// independently.
const EXTRA_BATCH_DELAY: Duration = Duration::from_millis(50);

/// Minimum time between two batches of commands for which nobody waits.
const BACKGROUND_INTERVAL: Duration = Duration::from_millis(20);

/// Yields to other tasks without a new command after which a batch is sent.
const IDLE_TURNS: u32 = 2;

/// Maximum distance between the serials of the oldest unanswered and the newest sent command; the ledger remembers as
/// many outcomes.
const SERIAL_WINDOW: u64 = 1_024;

/// Takes the commands of the next batch, in order.
fn next_batch(waiting: &mut VecDeque<QueuedCommand>) -> Vec<QueuedCommand> {
    let mut bytes = 0;
    let mut fits = |queued: &QueuedCommand| {
        bytes += queued.bytes;
        bytes <= MAX_BATCH_BYTES
    };
    let count = waiting.iter().take(MAX_BATCH).take_while(|queued| fits(queued)).count();
    waiting.drain(..count).collect()
}

/// Returns whether another batch is due, given the number in flight and the time since the last one was sent.
fn is_due(in_flight: usize, last_sent: Duration) -> bool {
    in_flight < MAX_IN_FLIGHT || last_sent >= EXTRA_BATCH_DELAY
}

/// Next action of the writer, besides handling answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum WriterStep {
    /// Sends a batch of the waiting commands.
    Send,
    /// Takes commands from the queue.
    TakeFromQueue,
    /// Leaves further commands in the queue until the next batch of background commands is due: to be woken for each of
    /// them costs more than the command.
    Collect,
    /// Waits until another batch is due.
    WaitUntilDue,
    /// Waits until a batch is answered.
    WaitForAnswer,
}

/// Whether a batch can be sent now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum BatchReadiness {
    /// The maximum number of batches is in flight.
    Full,
    Early,
    Due,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum PendingWork {
    /// Somebody waits for a pending command, or the commands fill a batch, or no more can come.
    HasPending,
    /// Nobody waits for the pending commands, which are fewer than a batch may have.
    HasBackground,
    /// Nothing is pending, but the queue may still deliver commands.
    QueueOpen,
    /// The queue is closed and empty.
    Drained,
}

fn queue_state(waiting: &VecDeque<QueuedCommand>, is_closed: bool) -> PendingWork {
    let is_background = |queued: &QueuedCommand| queued.urgency == Urgency::Background;
    match (waiting.is_empty(), is_closed) {
        (true, true) => PendingWork::Drained,
        (true, false) => PendingWork::QueueOpen,
        (false, false) if waiting.len() < MAX_BATCH && waiting.iter().all(is_background) => PendingWork::HasBackground,
        (false, _) => PendingWork::HasPending,
    }
}

/// Decides the next action from one reading of the clock. If a batch is not due yet, the writer waits for it.
fn next_step(pace: BatchReadiness, left: PendingWork, last_sent: Duration) -> WriterStep {
    match (pace, left) {
        (_, PendingWork::Drained) | (BatchReadiness::Full, _) => WriterStep::WaitForAnswer,
        (BatchReadiness::Early, _) => WriterStep::WaitUntilDue,
        (BatchReadiness::Due, PendingWork::HasBackground) if last_sent < BACKGROUND_INTERVAL => WriterStep::Collect,
        (BatchReadiness::Due, PendingWork::HasPending | PendingWork::HasBackground) => WriterStep::Send,
        (BatchReadiness::Due, PendingWork::QueueOpen) => WriterStep::TakeFromQueue,
    }
}

/// Takes commands that are submitted at this moment: an answer wakes many clients that submit again at once. Ends when
/// the other tasks had their turn without a new command.
async fn gather(queue: &mut mpsc::Receiver<QueuedCommand>, taken: &mut Vec<QueuedCommand>) {
    let mut idle = 0;
    while idle < IDLE_TURNS && taken.len() < MAX_BATCH {
        tokio::task::yield_now().await;
        let before = taken.len();
        while taken.len() < MAX_BATCH
            && let Ok(queued) = queue.try_recv()
        {
            taken.push(queued);
        }
        idle = if taken.len() > before { 0 } else { idle + 1 };
    }
}

/// Turns queued commands into batches of this node's client.
pub(crate) struct CommandWriter {
    core: Arc<NodeCore>,
    /// How long a batch is retried.
    deadline: Duration,
    client: ClientId,
    serial: u64,
    /// What the ledger knows of the client.
    client_state: LedgerClientState,
    /// First serials of the unanswered batches.
    unanswered: BTreeSet<u64>,
    last_sent: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum LedgerClientState {
    /// Nothing; the client is opened before the next batch.
    New,
    /// The client is being opened. The batch that waits for it is sent next, and nothing else until then.
    Opening,
    Open,
}

struct AnsweredBatch {
    first: u64,
    answers: Vec<OutcomeCallback>,
    result: Result<Vec<Outcome>, SubmitError>,
    client: BatchClientId,
}

/// Client with which a batch was sent.
enum BatchClientId {
    Existing(ClientId),
    Opened(ClientId),
    NotOpened,
}

impl CommandWriter {
    pub(crate) fn new(core: Arc<NodeCore>, deadline: Duration) -> Self {
        let client = ClientId(random_u128());
        let (unanswered, last_sent) = (BTreeSet::new(), Instant::now());
        Self { core, deadline, client, serial: 0, client_state: LedgerClientState::New, unanswered, last_sent }
    }

    /// Runs until the queue is closed and everything in it is answered.
    pub(crate) async fn run(mut self, queue: &mut mpsc::Receiver<QueuedCommand>) {
        let mut in_flight = FuturesUnordered::new();
        let (mut taken, mut waiting) = (Vec::new(), VecDeque::new());
        let mut is_closed = false;
        loop {
            let left = queue_state(&waiting, is_closed);
            let next = next_step(self.batch_readiness(), left, self.last_sent.elapsed());
            if next == WriterStep::Send {
                in_flight.push(self.send(next_batch(&mut waiting)).await);
                continue;
            }
            tokio::select! {
                count = queue.recv_many(&mut taken, MAX_BATCH), if next == WriterStep::TakeFromQueue => {
                    is_closed = count == 0;
                    // Background commands wait for each other anyway.
                    if taken.iter().any(|queued| queued.urgency == Urgency::Immediate) {
                        gather(queue, &mut taken).await;
                    }
                    waiting.extend(taken.drain(..));
                }
                Some(answered) = in_flight.next() => self.deliver_outcomes(answered),
                () = tokio::time::sleep_until(self.last_sent + EXTRA_BATCH_DELAY), if next == WriterStep::WaitUntilDue => {}
                is_awaited = self.collected(), if next == WriterStep::Collect => {
                    while taken.len() < MAX_BATCH
                        && let Ok(queued) = queue.try_recv()
                    {
                        taken.push(queued);
                    }
                    if is_awaited {
                        gather(queue, &mut taken).await;
                    }
                    waiting.extend(taken.drain(..));
                }
                else => return,
            }
        }
    }

    /// Waits until the next batch of background commands is due, or somebody waits for a command; returns whether.
    async fn collected(&self) -> bool {
        tokio::select! {
            () = self.core.immediate_submitted() => true,
            () = tokio::time::sleep_until(self.last_sent + BACKGROUND_INTERVAL) => false,
        }
    }

    fn has_room(&self) -> bool {
        let oldest = self.unanswered.first().copied().unwrap_or(self.serial + 1);
        self.client_state != LedgerClientState::Opening && self.serial + MAX_BATCH as u64 <= oldest + SERIAL_WINDOW - 2
    }

    fn batch_readiness(&self) -> BatchReadiness {
        match is_due(self.unanswered.len(), self.last_sent.elapsed()) {
            _ if !self.has_room() => BatchReadiness::Full,
            true => BatchReadiness::Due,
            false => BatchReadiness::Early,
        }
    }

    /// Sends a batch. When this returns, the batch is ordered before every later one.
    async fn send(&mut self, queued: Vec<QueuedCommand>) -> impl Future<Output = AnsweredBatch> + use<> {
        let first = self.serial + 1;
        self.serial += queued.len() as u64;
        self.unanswered.insert(first);
        self.last_sent = Instant::now();
        let (core, deadline) = (self.core.clone(), self.last_sent + self.deadline);
        let (commands, answers) = queued.into_iter().map(|queued| (queued.command, queued.answer)).unzip();
        // The client was forgotten, or there is none yet: open a new one. The batch is ordered only after that, so
        // nothing else is sent until it is answered.
        let sent = match std::mem::replace(&mut self.client_state, LedgerClientState::Opening) {
            LedgerClientState::New => InFlightBatch::NeedsClient(commands),
            known @ (LedgerClientState::Opening | LedgerClientState::Open) => {
                self.client_state = known;
                let delivery = CommandDelivery::new(core.clone(), submissions(commands, first, self.client), deadline);
                InFlightBatch::FirstAttempt(self.client, delivery.first_attempt().await)
            }
        };
        async move {
            let (client, result) = sent.await_answer(core, first, deadline).await;
            AnsweredBatch { first, answers, result, client }
        }
    }

    fn deliver_outcomes(&mut self, AnsweredBatch { first, answers, result, client }: AnsweredBatch) {
        self.unanswered.remove(&first);
        match client {
            // By now another client may have been opened, or is being opened.
            BatchClientId::Existing(client)
                if client == self.client && self.client_state == LedgerClientState::Open =>
            {
                if ends_client(&result) {
                    self.client_state = LedgerClientState::New;
                }
            }
            BatchClientId::Existing(_) => {}
            // A client whose first batch was not answered may already be forgotten.
            BatchClientId::Opened(client) if !ends_client(&result) && result.is_ok() => {
                (self.client, self.client_state) = (client, LedgerClientState::Open)
            }
            BatchClientId::Opened(_) | BatchClientId::NotOpened => self.client_state = LedgerClientState::New,
        }
        match result {
            Err(error) => {
                for answer in answers {
                    self.core.counters().record_failure(error);
                    answer.call(Err(error));
                }
            }
            Ok(outcomes) => {
                answers.into_iter().zip(outcomes).for_each(|(answer, outcome)| answer.call(Ok(outcome)));
            }
        }
    }
}

/// Returns whether a client must no longer be used after this answer, because the ledger forgot it or may have.
fn ends_client(result: &Result<Vec<Outcome>, SubmitError>) -> bool {
    match result {
        Ok(outcomes) => outcomes.contains(&Outcome::Refused(Refusal::UnknownClient)),
        Err(error) => *error == SubmitError::UnknownOutcome,
    }
}

/// A batch whose order is fixed.
enum InFlightBatch {
    /// Its client must be opened first.
    NeedsClient(Vec<Command>),
    /// Its first attempt was sent as this client.
    FirstAttempt(ClientId, CommandDelivery),
}

impl InFlightBatch {
    /// Waits for the outcomes; returns the client that was opened for the batch, if any.
    async fn await_answer(
        self,
        core: Arc<NodeCore>,
        first: u64,
        deadline: Instant,
    ) -> (BatchClientId, Result<Vec<Outcome>, SubmitError>) {
        let commands = match self {
            Self::FirstAttempt(client, delivery) => {
                return (BatchClientId::Existing(client), delivery.finish().await);
            }
            Self::NeedsClient(commands) => commands,
        };
        match open_client(&core, ClientSerial(first - 1), deadline).await {
            Err(error) => (BatchClientId::NotOpened, Err(error)),
            Ok(client) => {
                let delivery = CommandDelivery::new(core, submissions(commands, first, client), deadline);
                (BatchClientId::Opened(client), delivery.first_attempt().await.finish().await)
            }
        }
    }
}

/// Allocated exactly, because an entry stays in the log's cache.
fn submissions(commands: Vec<Command>, first: u64, client: ClientId) -> Vec<Submission> {
    let number = |(n, command)| Submission { client, serial: ClientSerial(first + n as u64), command };
    commands.into_iter().enumerate().map(number).collect()
}

#[cfg(test)]
mod tests {
    use ledger::OpenSession;
    use vocabulary::{ModelId, SessionId, TenantId};

    use super::*;

    fn queued(bytes: usize) -> Result<QueuedCommand, OutcomeCallback> {
        let (tenant, model) = (TenantId::default(), ModelId::from("m".repeat(bytes).as_str()));
        let command = Command::OpenSession(OpenSession { session: SessionId(1), tenant, model, parent: None });
        QueuedCommand::new(command, Urgency::Immediate, OutcomeCallback::new(drop))
    }

    fn background() -> QueuedCommand {
        QueuedCommand { urgency: Urgency::Background, ..queued(1).unwrap() }
    }

    #[test]
    fn a_batch_is_bounded_by_commands_and_bytes_and_keeps_order() {
        let lengths = |batch: &[QueuedCommand]| batch.iter().map(|queued| queued.bytes >> 20).collect::<Vec<_>>();
        let mut waiting: VecDeque<_> = [1, 2, 2, 3, 1].into_iter().map(|mib| queued(mib << 20).unwrap()).collect();
        let mut batches = Vec::new();
        while !waiting.is_empty() {
            batches.push(lengths(&next_batch(&mut waiting)));
        }
        assert_eq!(batches, [vec![1, 2], vec![2], vec![3], vec![1]]);
        waiting.extend((0..MAX_BATCH + 1).map(|_| queued(1).unwrap()));
        assert_eq!((next_batch(&mut waiting).len(), waiting.len()), (MAX_BATCH, 1));
    }

    #[test]
    fn an_oversized_command_is_refused_at_once() {
        assert!(queued(MAX_BATCH_BYTES - (2 << 10)).is_ok());
        assert!(queued(MAX_BATCH_BYTES).is_err());
    }

    #[tokio::test]
    async fn commands_submitted_in_the_same_turns_share_a_batch() {
        let (submit, mut queue) = mpsc::channel(2 * MAX_BATCH);
        for _ in 0..10 {
            let submit = submit.clone();
            tokio::spawn(async move { submit.try_send(queued(1).unwrap()).unwrap() });
        }
        let mut taken = vec![queued(1).unwrap()];
        gather(&mut queue, &mut taken).await;
        assert_eq!(taken.len(), 11);
        (0..MAX_BATCH).for_each(|_| submit.try_send(queued(1).unwrap()).unwrap());
        gather(&mut queue, &mut taken).await;
        assert_eq!(taken.len(), MAX_BATCH, "never more than fits");
    }

    #[test]
    fn two_batches_are_in_flight_and_more_only_when_these_are_slow() {
        assert!(is_due(0, Duration::ZERO) && is_due(1, Duration::ZERO));
        assert!(!is_due(2, EXTRA_BATCH_DELAY / 2));
        assert!(is_due(2, EXTRA_BATCH_DELAY) && is_due(3, EXTRA_BATCH_DELAY));
    }

    #[test]
    fn a_pending_batch_is_sent_or_its_deadline_is_awaited() {
        let next_step = |pace, left| next_step(pace, left, Duration::ZERO);
        for left in [PendingWork::HasPending, PendingWork::HasBackground, PendingWork::QueueOpen] {
            assert_eq!(
                (next_step(BatchReadiness::Early, left), next_step(BatchReadiness::Full, left)),
                (WriterStep::WaitUntilDue, WriterStep::WaitForAnswer)
            );
        }
        assert_eq!(
            (
                next_step(BatchReadiness::Due, PendingWork::HasPending),
                next_step(BatchReadiness::Due, PendingWork::QueueOpen)
            ),
            (WriterStep::Send, WriterStep::TakeFromQueue)
        );
        for pace in [BatchReadiness::Full, BatchReadiness::Early, BatchReadiness::Due] {
            assert_eq!(next_step(pace, PendingWork::Drained), WriterStep::WaitForAnswer);
        }
    }

    #[test]
    fn background_commands_wait_for_others_but_never_long() {
        let next_step = |last_sent| next_step(BatchReadiness::Due, PendingWork::HasBackground, last_sent);
        assert_eq!(next_step(BACKGROUND_INTERVAL / 2), WriterStep::Collect);
        assert_eq!(next_step(BACKGROUND_INTERVAL), WriterStep::Send);
        let mut waiting: VecDeque<_> = (0..MAX_BATCH - 1).map(|_| background()).collect();
        assert_eq!(queue_state(&waiting, false), PendingWork::HasBackground);
        assert_eq!(queue_state(&waiting, true), PendingWork::HasPending, "nothing more can come");
        waiting.push_back(background());
        assert_eq!(queue_state(&waiting, false), PendingWork::HasPending, "the batch is full");
        waiting.truncate(1);
        waiting.push_back(queued(1).unwrap());
        assert_eq!(queue_state(&waiting, false), PendingWork::HasPending, "somebody waits for it");
    }
}
