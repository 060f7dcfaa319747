//! Commands that wait for a batch, and the tickets that resolve to their outcomes.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use ledger::{Command, Outcome};
use tokio::sync::oneshot;

use crate::error::SubmitError;

/// Maximum size of a batch, and so of one command, in bytes. An entry is sent to other nodes in one message; a larger
/// one would be in the log but could not be replicated.
pub(crate) const MAX_BATCH_BYTES: usize = 4 << 20;

/// How soon a command is sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Urgency {
    /// At once: somebody waits for its outcome.
    Immediate,
    /// With the next batch, a few milliseconds later at most: nobody waits for it.
    Background,
}

/// A queued command.
#[derive(Debug)]
pub(crate) struct QueuedCommand {
    pub(crate) command: Command,
    pub(crate) urgency: Urgency,
    pub(crate) answer: OutcomeSender,
    /// Encoded size of the command.
    pub(crate) bytes: usize,
}

pub(crate) type OutcomeSender = oneshot::Sender<Result<Outcome, SubmitError>>;

impl QueuedCommand {
    /// Creates a queued command; refuses one that is larger than a batch.
    pub(crate) fn new(command: Command, urgency: Urgency, answer: OutcomeSender) -> Result<Self, SubmitError> {
        let bytes = encoded_len(&command);
        if bytes > MAX_BATCH_BYTES { Err(SubmitError::TooLarge) } else { Ok(Self { command, urgency, answer, bytes }) }
    }
}

/// Returns the size of a command in the log and on the wire, in bytes.
pub(crate) fn encoded_len(command: &Command) -> usize {
    struct SizeCounter(usize);

    impl io::Write for SizeCounter {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    let mut count = SizeCounter(0);
    rmp_serde::encode::write(&mut count, command).expect("a command encodes");
    count.0
}

/// Resolves to the outcome of a submitted command. Dropping it does not withdraw the command.
#[derive(Debug)]
pub struct CommandTicket(pub(crate) oneshot::Receiver<Result<Outcome, SubmitError>>);

impl Future for CommandTicket {
    type Output = Result<Outcome, SubmitError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(context).map(|answer| answer.unwrap_or(Err(SubmitError::UnknownOutcome)))
    }
}
