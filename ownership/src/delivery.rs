//! Delivery of one batch to the leader, retried until it is answered or times out. The opening of a client is sent only
//! once per client id.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use ledger::{Command, Outcome, Refusal, Submission};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};
use vocabulary::{ClientId, ClientSerial, NodeId};

use crate::error::SubmitError;
use crate::node_core::{KnownLeader, NodeCore};
use crate::node_folder::random_u128;
use crate::peers::{AwaitedReply, Lane, PeerError, PeerMethod};
use crate::proposal::{ProposalBatch, ProposalResult, ReturnedSubmissions, SubmissionFate};

/// Wait before the same leader is asked again.
const RETRY_DELAY: Duration = Duration::from_millis(20);

/// A leader's answer to another node's batch.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum SubmitReply {
    Outcomes(Vec<Outcome>),
    /// The node does not lead; the batch entered no log.
    NotTaken,
    /// The node lost its leadership; the outcome of the batch is unknown.
    Unknown,
}

impl From<ProposalResult> for SubmitReply {
    fn from(proposed: ProposalResult) -> Self {
        match proposed {
            Ok(outcomes) => Self::Outcomes(outcomes),
            Err(ReturnedSubmissions { fate: SubmissionFate::NotAccepted, .. }) => Self::NotTaken,
            Err(ReturnedSubmissions { fate: SubmissionFate::Unknown, .. }) => Self::Unknown,
        }
    }
}

/// The batch in the form that the last attempt needed.
enum RetryableBatch {
    Plain(Vec<Submission>),
    Encoded(Bytes),
}

enum PendingAttempt {
    /// Sent to this node's own proposer.
    Local(oneshot::Receiver<ProposalResult>),
    Remote(NodeId, AwaitedReply),
}

/// How often a batch may be sent to a leader.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AttemptLimit {
    /// As often as necessary; its serials prevent a second execution.
    Unlimited,
    Once,
}

/// Delivery of one batch until it is answered.
pub(crate) struct CommandDelivery {
    core: Arc<NodeCore>,
    /// Empty while the proposer has it.
    batch: RetryableBatch,
    deadline: Instant,
    /// What is known of the batch if no answer arrives any more.
    fate: SubmissionFate,
    attempt: Option<PendingAttempt>,
    attempts: AttemptLimit,
}

/// Opens a client. Each attempt uses a new client id.
///
/// If an id were sent twice, it could be opened again after the ledger forgot the client and, with it, what the client
/// had executed.
pub(crate) async fn open_client(
    core: &Arc<NodeCore>,
    serial: ClientSerial,
    deadline: Instant,
) -> Result<ClientId, SubmitError> {
    loop {
        let client = ClientId(random_u128());
        let opening = Submission { client, serial, command: Command::OpenClient(core.node()) };
        let delivery = CommandDelivery {
            attempts: AttemptLimit::Once,
            ..CommandDelivery::new(core.clone(), vec![opening], deadline)
        };
        match delivery.first_attempt().await.finish().await {
            Ok(_) => return Ok(client),
            Err(_) if Instant::now() < deadline && *core.leader.borrow() != KnownLeader::Stopped => {}
            // The outcome does not matter, because no command was sent.
            Err(_) => return Err(SubmitError::Unavailable),
        }
    }
}

impl CommandDelivery {
    pub(crate) fn new(core: Arc<NodeCore>, submissions: Vec<Submission>, deadline: Instant) -> Self {
        Self {
            core,
            batch: RetryableBatch::Plain(submissions),
            deadline,
            fate: SubmissionFate::NotAccepted,
            attempt: None,
            attempts: AttemptLimit::Unlimited,
        }
    }

    /// Makes the first attempt, if there is a leader. Later batches are then ordered after this one.
    pub(crate) async fn first_attempt(mut self) -> Self {
        let leader = self.core.known_leader();
        if let Some(leader) = leader {
            self.attempt = self.send(leader).await;
        }
        self
    }

    /// Waits for the outcomes, and retries as often as necessary.
    pub(crate) async fn finish(mut self) -> Result<Vec<Outcome>, SubmitError> {
        let deadline = self.deadline;
        match timeout_at(deadline, self.retry_until_answered()).await {
            Ok(answered) => answered,
            Err(_) => Err(self.timeout_error()),
        }
    }

    fn timeout_error(&self) -> SubmitError {
        match self.fate {
            SubmissionFate::NotAccepted => SubmitError::Unavailable,
            SubmissionFate::Unknown => SubmitError::UnknownOutcome,
        }
    }

    async fn retry_until_answered(&mut self) -> Result<Vec<Outcome>, SubmitError> {
        loop {
            let leader = match self.attempt.take() {
                Some(attempt) => {
                    let before = self.fate;
                    self.fate = SubmissionFate::Unknown;
                    match self.await_answer(attempt).await {
                        Ok(outcomes) => return resolve_outcomes(outcomes, before),
                        Err(SubmissionFate::NotAccepted) => self.fate = before,
                        Err(SubmissionFate::Unknown) => {}
                    }
                    self.next_leader().await.filter(|_| self.attempts == AttemptLimit::Unlimited)
                }
                None => self.next_leader().await,
            };
            let leader = leader.ok_or_else(|| self.timeout_error())?;
            self.attempt = self.send(leader).await;
        }
    }

    /// Returns the leader to ask, after a pause in which a new one may be elected. `None` if Raft has stopped here.
    async fn next_leader(&self) -> Option<NodeId> {
        let mut leaders = self.core.leader.subscribe();
        // A leader change ends the pause early; the same leader may be asked again afterwards.
        drop(tokio::time::timeout(RETRY_DELAY, leaders.changed()).await);
        let known = leaders.wait_for(|known| *known != KnownLeader::Unknown).await.ok()?;
        known.leader()
    }

    async fn send(&mut self, leader: NodeId) -> Option<PendingAttempt> {
        if leader == self.core.node() { self.send_local().await } else { self.send_to_leader(leader).await }
    }

    async fn send_local(&mut self) -> Option<PendingAttempt> {
        let submissions = match std::mem::replace(&mut self.batch, RetryableBatch::Plain(Vec::new())) {
            RetryableBatch::Plain(submissions) => submissions,
            RetryableBatch::Encoded(bytes) => rmp_serde::from_slice(&bytes).expect("what was encoded here decodes"),
        };
        let (answer, answered) = oneshot::channel();
        match self.core.proposals.send(ProposalBatch { submissions, answer }).await {
            Ok(()) => Some(PendingAttempt::Local(answered)),
            Err(closed) => {
                self.batch = RetryableBatch::Plain(closed.0.submissions);
                None
            }
        }
    }

    async fn send_to_leader(&mut self, leader: NodeId) -> Option<PendingAttempt> {
        let bytes = match &self.batch {
            RetryableBatch::Encoded(bytes) => bytes.clone(),
            RetryableBatch::Plain(submissions) => {
                let bytes = Bytes::from(rmp_serde::to_vec(submissions).expect("submissions encode"));
                self.batch = RetryableBatch::Encoded(bytes.clone());
                bytes
            }
        };
        let link = self.core.registry.link(leader, Lane::Call);
        link.start_call(PeerMethod::Submit, bytes).await.ok().map(|pending| PendingAttempt::Remote(leader, pending))
    }

    async fn await_answer(&mut self, attempt: PendingAttempt) -> Result<Vec<Outcome>, SubmissionFate> {
        match attempt {
            PendingAttempt::Local(answered) => match answered.await {
                Ok(Ok(outcomes)) => Ok(outcomes),
                Ok(Err(ReturnedSubmissions { submissions, fate })) => {
                    self.batch = RetryableBatch::Plain(submissions);
                    Err(fate)
                }
                // The proposer was dropped with the batch; this node is closing.
                Err(_) => std::future::pending().await,
            },
            PendingAttempt::Remote(leader, pending) => tokio::select! {
                answered = pending.answer() => parse_reply(answered),
                () = self.leader_changed(leader) => Err(SubmissionFate::Unknown),
            },
        }
    }

    /// Waits for another leader: an old one may never answer, and the new one knows the batch's outcome.
    async fn leader_changed(&self, than: NodeId) {
        let mut leaders = self.core.leader.subscribe();
        let is_another =
            |known: &KnownLeader| !matches!(known, KnownLeader::Unknown) && *known != KnownLeader::Leader(than);
        if leaders.wait_for(is_another).await.is_err() {
            // This node is closing; the deadline ends the wait.
            std::future::pending().await
        }
    }
}

/// Interprets a batch's outcomes, given what is known of earlier attempts.
///
/// A client that was forgotten meanwhile gets a refusal even for commands that an earlier attempt executed.
fn resolve_outcomes(outcomes: Vec<Outcome>, earlier: SubmissionFate) -> Result<Vec<Outcome>, SubmitError> {
    let is_forgotten = outcomes.first() == Some(&Outcome::Refused(Refusal::UnknownClient));
    match earlier {
        SubmissionFate::Unknown if is_forgotten => Err(SubmitError::UnknownOutcome),
        SubmissionFate::Unknown | SubmissionFate::NotAccepted => Ok(outcomes),
    }
}

fn parse_reply(answered: Result<Bytes, PeerError>) -> Result<Vec<Outcome>, SubmissionFate> {
    use PeerError::{Busy, Refused, Unknown, Unreachable};
    match answered {
        Ok(bytes) => match rmp_serde::from_slice(&bytes) {
            Ok(SubmitReply::Outcomes(outcomes)) => Ok(outcomes),
            Ok(SubmitReply::NotTaken) => Err(SubmissionFate::NotAccepted),
            Ok(SubmitReply::Unknown) | Err(_) => Err(SubmissionFate::Unknown),
        },
        Err(Busy | Refused { .. } | Unknown(_) | Unreachable { .. }) => Err(SubmissionFate::NotAccepted),
        Err(_) => Err(SubmissionFate::Unknown),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_retry_of_a_forgotten_client_has_an_unknown_outcome() {
        let forgotten = || vec![Outcome::Refused(Refusal::UnknownClient); 2];
        assert_eq!(resolve_outcomes(forgotten(), SubmissionFate::Unknown), Err(SubmitError::UnknownOutcome));
        assert_eq!(resolve_outcomes(forgotten(), SubmissionFate::NotAccepted), Ok(forgotten()));
        for earlier in [SubmissionFate::Unknown, SubmissionFate::NotAccepted] {
            assert_eq!(resolve_outcomes(vec![Outcome::Done], earlier), Ok(vec![Outcome::Done]));
        }
    }
}
