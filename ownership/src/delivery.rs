//! One batch on its way to the leader: tried until it is answered or its time is over. The opening of a client is tried
//! only once with the same id.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use ledger::{Command, Outcome, Refusal, Submission};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};
use vocabulary::{ClientId, ClientSerial, NodeId};

use crate::core::{Core, Known};
use crate::error::SubmitError;
use crate::node_folder::random;
use crate::peers::{Lane, Method, PeerError, Pending};
use crate::proposer::{Asked, Fate, Proposed, Returned};

/// The wait before the same leader is asked again.
const PAUSE: Duration = Duration::from_millis(20);

/// What a leader says to a batch of another node.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Submitted {
    Outcomes(Vec<Outcome>),
    /// It does not lead.
    NotTaken,
    /// It leads no longer; what became of the batch is not known there.
    Unknown,
}

impl From<Proposed> for Submitted {
    fn from(proposed: Proposed) -> Self {
        match proposed {
            Ok(outcomes) => Self::Outcomes(outcomes),
            Err(Returned { fate: Fate::NotTaken, .. }) => Self::NotTaken,
            Err(Returned { fate: Fate::Unknown, .. }) => Self::Unknown,
        }
    }
}

/// The batch, in the form that the last attempt needed.
enum Batch {
    Plain(Vec<Submission>),
    Encoded(Bytes),
}

enum Attempt {
    /// To this node's own proposer.
    Here(oneshot::Receiver<Proposed>),
    There(NodeId, Pending),
}

/// How often a batch may reach a leader.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Attempts {
    /// As often as needed: its serials say whether it was executed.
    Any,
    One,
}

/// One batch until it is answered.
pub(crate) struct Delivery {
    core: Arc<Core>,
    /// Empty while the proposer has it.
    batch: Batch,
    deadline: Instant,
    /// What is known should nobody answer any more.
    fate: Fate,
    attempt: Option<Attempt>,
    attempts: Attempts,
}

/// Opens a client, each attempt with an id of its own: an id that was sent twice could be opened again after the ledger
/// forgot the client and with it what the client had executed.
pub(crate) async fn open_client(
    core: &Arc<Core>,
    serial: ClientSerial,
    deadline: Instant,
) -> Result<ClientId, SubmitError> {
    loop {
        let client = ClientId(random());
        let opening = Submission { client, serial, command: Command::OpenClient(core.node()) };
        let delivery = Delivery { attempts: Attempts::One, ..Delivery::new(core.clone(), vec![opening], deadline) };
        match delivery.first_attempt().await.finish().await {
            Ok(_) => return Ok(client),
            Err(_) if Instant::now() < deadline && *core.leader.borrow() != Known::Stopped => {}
            // Whatever became of it, no command was sent.
            Err(_) => return Err(SubmitError::Unavailable),
        }
    }
}

impl Delivery {
    pub(crate) fn new(core: Arc<Core>, submissions: Vec<Submission>, deadline: Instant) -> Self {
        Self {
            core,
            batch: Batch::Plain(submissions),
            deadline,
            fate: Fate::NotTaken,
            attempt: None,
            attempts: Attempts::Any,
        }
    }

    /// Sends it, if there is a leader; later batches come after it then.
    pub(crate) async fn first_attempt(mut self) -> Self {
        let leader = self.core.known_leader();
        if let Some(leader) = leader {
            self.attempt = self.send(leader).await;
        }
        self
    }

    /// Waits for the outcomes, and sends it again as often as needed.
    pub(crate) async fn finish(mut self) -> Result<Vec<Outcome>, SubmitError> {
        let deadline = self.deadline;
        match timeout_at(deadline, self.until_answered()).await {
            Ok(answered) => answered,
            Err(_) => Err(self.given_up()),
        }
    }

    fn given_up(&self) -> SubmitError {
        match self.fate {
            Fate::NotTaken => SubmitError::Unavailable,
            Fate::Unknown => SubmitError::UnknownOutcome,
        }
    }

    async fn until_answered(&mut self) -> Result<Vec<Outcome>, SubmitError> {
        loop {
            let leader = match self.attempt.take() {
                Some(attempt) => {
                    let before = self.fate;
                    self.fate = Fate::Unknown;
                    match self.answer(attempt).await {
                        Ok(outcomes) => return settled(outcomes, before),
                        Err(Fate::NotTaken) => self.fate = before,
                        Err(Fate::Unknown) => {}
                    }
                    self.next_leader().await.filter(|_| self.attempts == Attempts::Any)
                }
                None => self.next_leader().await,
            };
            let leader = leader.ok_or_else(|| self.given_up())?;
            self.attempt = self.send(leader).await;
        }
    }

    /// The leader to ask, after a pause in which another one may be chosen. None when Raft has stopped here.
    async fn next_leader(&self) -> Option<NodeId> {
        let mut leaders = self.core.leader.subscribe();
        // A change ends the pause early; the same leader may be asked again after it.
        drop(tokio::time::timeout(PAUSE, leaders.changed()).await);
        let known = leaders.wait_for(|known| *known != Known::Nobody).await.ok()?;
        known.leader()
    }

    async fn send(&mut self, leader: NodeId) -> Option<Attempt> {
        if leader == self.core.node() { self.send_here().await } else { self.send_there(leader).await }
    }

    async fn send_here(&mut self) -> Option<Attempt> {
        let submissions = match std::mem::replace(&mut self.batch, Batch::Plain(Vec::new())) {
            Batch::Plain(submissions) => submissions,
            Batch::Encoded(bytes) => rmp_serde::from_slice(&bytes).expect("what was encoded here decodes"),
        };
        let (answer, answered) = oneshot::channel();
        match self.core.proposals.send(Asked { submissions, answer }).await {
            Ok(()) => Some(Attempt::Here(answered)),
            Err(closed) => {
                self.batch = Batch::Plain(closed.0.submissions);
                None
            }
        }
    }

    async fn send_there(&mut self, leader: NodeId) -> Option<Attempt> {
        let bytes = match &self.batch {
            Batch::Encoded(bytes) => bytes.clone(),
            Batch::Plain(submissions) => {
                let bytes = Bytes::from(rmp_serde::to_vec(submissions).expect("submissions encode"));
                self.batch = Batch::Encoded(bytes.clone());
                bytes
            }
        };
        let link = self.core.registry.link(leader, Lane::Call);
        link.ask(Method::Submit, bytes).await.ok().map(|pending| Attempt::There(leader, pending))
    }

    async fn answer(&mut self, attempt: Attempt) -> Result<Vec<Outcome>, Fate> {
        match attempt {
            Attempt::Here(answered) => match answered.await {
                Ok(Ok(outcomes)) => Ok(outcomes),
                Ok(Err(Returned { submissions, fate })) => {
                    self.batch = Batch::Plain(submissions);
                    Err(fate)
                }
                // The proposer is gone with the batch; this node is closing.
                Err(_) => std::future::pending().await,
            },
            Attempt::There(leader, pending) => tokio::select! {
                answered = pending.answer() => understood(answered),
                () = self.led_by_another(leader) => Err(Fate::Unknown),
            },
        }
    }

    /// An old leader may never answer; the new one knows what became of the batch.
    async fn led_by_another(&self, than: NodeId) {
        let mut leaders = self.core.leader.subscribe();
        let is_another = |known: &Known| !matches!(known, Known::Nobody) && *known != Known::Leader(than);
        if leaders.wait_for(is_another).await.is_err() {
            // This node is closing; the deadline ends the wait.
            std::future::pending().await
        }
    }
}

/// What a batch's outcomes mean to whoever sent it, given what is known of earlier attempts.
///
/// A client that was forgotten meanwhile is told that it is not known, also of what an earlier attempt executed.
fn settled(outcomes: Vec<Outcome>, earlier: Fate) -> Result<Vec<Outcome>, SubmitError> {
    let is_forgotten = outcomes.first() == Some(&Outcome::Refused(Refusal::UnknownClient));
    match earlier {
        Fate::Unknown if is_forgotten => Err(SubmitError::UnknownOutcome),
        Fate::Unknown | Fate::NotTaken => Ok(outcomes),
    }
}

fn understood(answered: Result<Bytes, PeerError>) -> Result<Vec<Outcome>, Fate> {
    use PeerError::{Busy, Refused, Unknown, Unreachable};
    match answered {
        Ok(bytes) => match rmp_serde::from_slice(&bytes) {
            Ok(Submitted::Outcomes(outcomes)) => Ok(outcomes),
            Ok(Submitted::NotTaken) => Err(Fate::NotTaken),
            Ok(Submitted::Unknown) | Err(_) => Err(Fate::Unknown),
        },
        Err(Busy | Refused { .. } | Unknown(_) | Unreachable { .. }) => Err(Fate::NotTaken),
        Err(_) => Err(Fate::Unknown),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_retry_of_a_forgotten_client_has_an_unknown_outcome_and_a_first_attempt_was_refused() {
        let forgotten = || vec![Outcome::Refused(Refusal::UnknownClient); 2];
        assert_eq!(settled(forgotten(), Fate::Unknown), Err(SubmitError::UnknownOutcome));
        assert_eq!(settled(forgotten(), Fate::NotTaken), Ok(forgotten()));
        for earlier in [Fate::Unknown, Fate::NotTaken] {
            assert_eq!(settled(vec![Outcome::Done], earlier), Ok(vec![Outcome::Done]));
        }
    }
}
