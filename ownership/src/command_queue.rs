//! Commands that wait for a batch, and the tickets that resolve to their outcomes.

use std::fmt;
use std::future::Future;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
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
    /// With the next batch, 20 ms after the last one at the latest: nobody waits for it.
    Background,
}

/// A queued command.
#[derive(Debug)]
pub(crate) struct QueuedCommand {
    pub(crate) command: Command,
    pub(crate) urgency: Urgency,
    pub(crate) answer: OutcomeCallback,
    /// Size in bytes that the encoded command has at most.
    pub(crate) bytes: usize,
}

type OutcomeFn = dyn FnOnce(Result<Outcome, SubmitError>) + Send + Sync;

/// Takes the outcome of a command: exactly once, and [`SubmitError::UnknownOutcome`] if nobody learns it.
pub(crate) struct OutcomeCallback(Option<Box<OutcomeFn>>);

impl OutcomeCallback {
    pub(crate) fn new(callback: impl FnOnce(Result<Outcome, SubmitError>) + Send + Sync + 'static) -> Self {
        Self(Some(Box::new(callback)))
    }

    pub(crate) fn call(mut self, outcome: Result<Outcome, SubmitError>) {
        self.call_once(outcome);
    }

    /// A panic of the callback ends neither the command writer nor the other callbacks of its batch.
    fn call_once(&mut self, outcome: Result<Outcome, SubmitError>) {
        if let Some(callback) = self.0.take()
            && catch_unwind(AssertUnwindSafe(|| callback(outcome))).is_err()
        {
            tracing::error!("a panic while the outcome of a command was handled; please report it");
        }
    }
}

impl Drop for OutcomeCallback {
    fn drop(&mut self) {
        self.call_once(Err(SubmitError::UnknownOutcome));
    }
}

impl fmt::Debug for OutcomeCallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OutcomeCallback")
    }
}

impl QueuedCommand {
    /// Creates a queued command; returns the callback of one that is larger than a batch.
    pub(crate) fn new(command: Command, urgency: Urgency, answer: OutcomeCallback) -> Result<Self, OutcomeCallback> {
        let bytes = max_encoded_len(&command);
        if bytes > MAX_BATCH_BYTES { Err(answer) } else { Ok(Self { command, urgency, answer, bytes }) }
    }
}

/// Size that a command without lists and names has at most, in bytes.
const MAX_FIXED_LEN: usize = 1 << 10;
/// Size that one point of a chain has at most, in bytes: an id of 16, each written in up to two, and a count.
const MAX_POINT_LEN: usize = 64;

/// Returns an upper bound for [`encoded_len`]. To encode a step's command only to count its bytes costs as much as to
/// write it to the log.
pub(crate) fn max_encoded_len(command: &Command) -> usize {
    match command {
        Command::Batch(commands) => 16 + commands.iter().map(max_encoded_len).sum::<usize>(),
        Command::Seal(seal) => {
            let names = seal.origin.tenant.0.len() + seal.origin.model.0.len();
            MAX_FIXED_LEN + names + MAX_POINT_LEN * seal.run.points.len()
        }
        Command::OpenSession(open) => MAX_FIXED_LEN + open.tenant.0.len() + open.model.0.len(),
        Command::Advance(_)
        | Command::ClaimOwner(_)
        | Command::Fork(_)
        | Command::Intent(_)
        | Command::Migrate(_)
        | Command::ReplicateReadonly(_) => MAX_FIXED_LEN,
        other => encoded_len(other),
    }
}

/// Returns the size of a command in the log and on the wire, in bytes.
fn encoded_len(command: &Command) -> usize {
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
pub struct CommandTicket(oneshot::Receiver<Result<Outcome, SubmitError>>);

impl CommandTicket {
    /// Returns a ticket, and the callback that resolves it.
    pub(crate) fn new() -> (OutcomeCallback, Self) {
        let (answer, ticket) = oneshot::channel();
        // Whoever waited may be gone.
        (OutcomeCallback::new(move |outcome| drop(answer.send(outcome))), Self(ticket))
    }
}

impl Future for CommandTicket {
    type Output = Result<Outcome, SubmitError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(context).map(|answer| answer.unwrap_or(Err(SubmitError::UnknownOutcome)))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex, mpsc};

    use ledger::{KvBlockSpec, KvFormatDigest, KvKinds, OwnershipTransition, StepCommit};
    use vocabulary::{
        Blocks, Bytes, DpRank, Epoch, Incarnation, ModelId, NodeId, Owner, PrefixChain, PrefixId, SessionId, TenantId,
        Tokens, WorkerId,
    };

    use super::*;

    #[test]
    fn a_callback_is_called_once_and_may_panic() {
        let (outcomes, heard) = mpsc::channel();
        let outcomes = Arc::new(Mutex::new(outcomes));
        let callback = || {
            let outcomes = outcomes.clone();
            OutcomeCallback::new(move |outcome| outcomes.lock().unwrap().send(outcome).unwrap())
        };
        callback().call(Ok(Outcome::Done));
        drop(callback());
        OutcomeCallback::new(|_| panic!("a callback panics")).call(Ok(Outcome::Done));
        drop(OutcomeCallback::new(|_| panic!("a callback panics")));
        assert_eq!(heard.try_iter().collect::<Vec<_>>(), [Ok(Outcome::Done), Err(SubmitError::UnknownOutcome)]);
    }

    #[test]
    fn no_steps_command_is_longer_than_its_bound() {
        let (tenant, model) = (TenantId("t".repeat(300).as_str().into()), ModelId::from("m".repeat(70_000).as_str()));
        let ids = vec![PrefixId(u128::MAX); 9_000];
        let chain = PrefixChain { root: PrefixId(u128::MAX), block: Tokens(16), ids, tokens: Tokens(u64::MAX) };
        let seen = Epoch { generation: u32::MAX, index: u64::MAX, position: u32::MAX };
        for (blocks, ownership) in [
            (1, OwnershipTransition::Claim),
            (9_000, OwnershipTransition::Migrate { seen }),
            (70, OwnershipTransition::Unchanged),
        ] {
            let command = Command::commit_step(StepCommit {
                session: SessionId(u128::MAX),
                tenant: &tenant,
                model: &model,
                parent: Some(SessionId(u128::MAX)),
                chain: &chain,
                sealed: Blocks(blocks),
                base: Blocks::ZERO,
                replaced_head: Some(PrefixId(u128::MAX)),
                owner: Owner { worker: WorkerId(u64::MAX), incarnation: Incarnation(u64::MAX), rank: DpRank(u16::MAX) },
                ownership,
                shape: KvBlockSpec {
                    format: KvFormatDigest(u64::MAX),
                    kinds: KvKinds(u8::MAX),
                    block: Tokens(u64::MAX),
                    block_bytes: Bytes(u64::MAX),
                },
                router: NodeId(u64::MAX),
            });
            let command = command.unwrap();
            let (exact, bound) = (rmp_serde::to_vec(&command).unwrap().len(), max_encoded_len(&command));
            assert!(exact <= bound && bound <= 3 * exact + (8 << 10), "{exact} of {bound}");
        }
    }
}
