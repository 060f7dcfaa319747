//! A client of the quorum: numbers its submissions, and retries the same serial through other nodes until it gets an
//! outcome or gives up.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use consensus::{Consistency, LedgerView};
use ledger::{Command, Outcome, Refusal, Submission};
use openraft::AsyncRuntime;
use vocabulary::{ClientId, ClientSerial, NodeId};

use crate::network_model::{EndpointNumber, FIRST_CLIENT};
use crate::rng::Rng;
use crate::runtime::{SimulatedRuntime, true_time};
use crate::sim_network::{RpcFailure, ask};
use crate::sim_node::{CommandAck, NodeReply, SimNode};
use crate::world::SimWorld;

/// Timeout for one answer.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a client retries before it gives up.
const MAX_RETRY_TIME: Duration = Duration::from_secs(20);

pub(crate) struct SimClient {
    pub(crate) world: Arc<SimWorld>,
    pub(crate) rng: Rng,
    peer: EndpointNumber,
    id: ClientId,
    serial: u64,
    leader_guess: Option<u64>,
    last_answered: Option<(Submission, Outcome)>,
}

impl SimClient {
    /// Creates the `n`th client, not opened yet.
    pub(crate) fn new(world: &Arc<SimWorld>, n: u64) -> Self {
        let rng = Rng::stream(world.plan.seed ^ n << 32, "client");
        let (peer, id) = (FIRST_CLIENT + n, ClientId(u128::from(FIRST_CLIENT + n)));
        Self { world: world.clone(), rng, peer, id, serial: 0, leader_guess: None, last_answered: None }
    }

    /// Opens the client, however long that takes.
    pub(crate) async fn open(&mut self) {
        while self.execute(Command::OpenClient(NodeId(1))).await.is_none() {}
    }

    /// Executes a command once. `None` if no answer came: it may have been executed, or may still be.
    pub(crate) async fn execute(&mut self, command: Command) -> Option<CommandAck> {
        let submission = Submission { client: self.id, serial: ClientSerial(self.serial), command };
        self.serial += 1;
        let outcome = self.submit_until_answered(&submission).await?;
        // A serial that the level gate refused was never executed.
        if !matches!(outcome.outcome, Outcome::Refused(Refusal::FeatureLevelTooLow { .. })) {
            self.last_answered = Some((submission, outcome.outcome.clone()));
        }
        Some(outcome)
    }

    /// Sends the last answered submission again, as after a lost answer.
    pub(crate) async fn resend_last(&mut self) {
        let Some((submission, _)) = self.last_answered.clone() else { return };
        drop(self.submit_until_answered(&submission).await);
    }

    async fn submit_until_answered(&mut self, submission: &Submission) -> Option<CommandAck> {
        let give_up = true_time() + MAX_RETRY_TIME;
        while true_time() < give_up {
            let target = self.target()?;
            let submission = submission.clone();
            let serve = move |node: Arc<SimNode>| node.submit(submission.clone());
            let response = ask(&self.world, (self.peer, target), REPLY_TIMEOUT, serve).await;
            if let Some(acknowledged) = self.handle_reply(response).await {
                return Some(acknowledged);
            }
        }
        None
    }

    /// Performs a linearizable read at any node. `None` if no answer came.
    pub(crate) async fn read(&mut self) -> Option<Arc<LedgerView>> {
        let target = self.target()?;
        let serve = |node: Arc<SimNode>| node.read(Consistency::Linearizable);
        let response = ask(&self.world, (self.peer, target), REPLY_TIMEOUT, serve).await;
        self.handle_reply(response).await
    }

    /// Performs a read with bounded staleness at one node. Returns whether it answered.
    pub(crate) async fn read_bounded(&self, target: u64, bound: Duration) -> bool {
        let serve = move |node: Arc<SimNode>| node.read(Consistency::Bounded(bound));
        let response = ask(&self.world, (self.peer, target), REPLY_TIMEOUT, serve).await;
        matches!(response, Ok(NodeReply::Done(_)))
    }

    /// Sends a message once, without retries.
    pub(crate) async fn send<T: Send + 'static, F, A>(&mut self, serve: F) -> Option<T>
    where
        F: Fn(Arc<SimNode>) -> A + Send + Sync + 'static,
        A: Future<Output = NodeReply<T>> + Send + 'static,
    {
        let target = self.target()?;
        let response = ask(&self.world, (self.peer, target), REPLY_TIMEOUT, serve).await;
        self.handle_reply(response).await
    }

    /// Returns some node's view, as a router on that node would see it, however old.
    pub(crate) fn pick_view(&mut self) -> Option<Arc<LedgerView>> {
        let up = self.world.running_nodes();
        self.rng.pick(&up).map(|node| node.view())
    }

    fn target(&mut self) -> Option<u64> {
        let anyone = || self.world.ids();
        match self.leader_guess {
            Some(guess) if !self.rng.chance(50) => Some(guess),
            _ => self.rng.pick(&anyone()).copied(),
        }
    }

    /// Learns the leader from an answer, and waits before the next attempt if there was none.
    async fn handle_reply<T>(&mut self, reply: Result<NodeReply<T>, RpcFailure>) -> Option<T> {
        let wait = match reply {
            Ok(NodeReply::Done(answer)) => return Some(answer),
            Ok(NodeReply::NotLeader(leader)) => {
                self.leader_guess = leader;
                if leader.is_some() { (1, 20) } else { (100, 600) }
            }
            Ok(NodeReply::Unknown) | Err(_) => {
                self.leader_guess = None;
                (20, 300)
            }
        };
        SimulatedRuntime::sleep(self.rng.millis(wait.0, wait.1)).await;
        None
    }
}
