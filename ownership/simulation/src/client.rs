//! A client of the quorum: it numbers its submissions, and retries the same number through other nodes until it is told
//! an outcome or gives up.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use consensus::{Consistency, View};
use ledger::{Command, Outcome, Refusal, Submission};
use openraft::AsyncRuntime;
use vocabulary::{ClientId, ClientSerial, NodeId};

use crate::fabric::{CLIENTS, Peer};
use crate::network::{Unanswered, ask};
use crate::node::{Acknowledged, Node, Reply};
use crate::rng::Rng;
use crate::runtime::{Sim, true_time};
use crate::world::World;

/// How long a client waits for one answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long it tries before it gives up.
const PERSISTENCE: Duration = Duration::from_secs(20);

pub(crate) struct Client {
    pub(crate) world: Arc<World>,
    pub(crate) rng: Rng,
    peer: Peer,
    id: ClientId,
    serial: u64,
    guess: Option<u64>,
    last: Option<(Submission, Outcome)>,
}

impl Client {
    /// The `n`th client, not opened yet.
    pub(crate) fn new(world: &Arc<World>, n: u64) -> Self {
        let rng = Rng::stream(world.plan.seed ^ n << 32, "client");
        let (peer, id) = (CLIENTS + n, ClientId(u128::from(CLIENTS + n)));
        Self { world: world.clone(), rng, peer, id, serial: 0, guess: None, last: None }
    }

    /// Opens, however long that takes.
    pub(crate) async fn open(&mut self) {
        while self.perform(Command::OpenClient(NodeId(1))).await.is_none() {}
    }

    /// Has a command executed once. None when no answer came: it may have been, or may still be.
    pub(crate) async fn perform(&mut self, command: Command) -> Option<Acknowledged> {
        let submission = Submission { client: self.id, serial: ClientSerial(self.serial), command };
        self.serial += 1;
        let said = self.insist(&submission).await?;
        // What the gate refused never had its serial executed.
        if !matches!(said.outcome, Outcome::Refused(Refusal::Level { .. })) {
            self.last = Some((submission, said.outcome.clone()));
        }
        Some(said)
    }

    /// Sends the last answered submission again, as after an answer that was lost.
    pub(crate) async fn repeat(&mut self) {
        let Some((submission, _)) = self.last.clone() else { return };
        drop(self.insist(&submission).await);
    }

    async fn insist(&mut self, submission: &Submission) -> Option<Acknowledged> {
        let give_up = true_time() + PERSISTENCE;
        while true_time() < give_up {
            let target = self.target()?;
            let submission = submission.clone();
            let serve = move |node: Arc<Node>| node.submit(submission.clone());
            let said = ask(&self.world, (self.peer, target), PATIENCE, serve).await;
            if let Some(acknowledged) = self.hear(said).await {
                return Some(acknowledged);
            }
        }
        None
    }

    /// Reads what is linearizable, from any node. None when no answer came.
    pub(crate) async fn read(&mut self) -> Option<Arc<View>> {
        let target = self.target()?;
        let serve = |node: Arc<Node>| node.read(Consistency::Linearizable);
        let said = ask(&self.world, (self.peer, target), PATIENCE, serve).await;
        self.hear(said).await
    }

    /// Reads from one node what is no older than a bound. True when it answered.
    pub(crate) async fn read_within(&self, target: u64, bound: Duration) -> bool {
        let serve = move |node: Arc<Node>| node.read(Consistency::Bounded(bound));
        let said = ask(&self.world, (self.peer, target), PATIENCE, serve).await;
        matches!(said, Ok(Reply::Said(_)))
    }

    /// Sends a message that nobody repeats.
    pub(crate) async fn send<T: Send + 'static, F, A>(&mut self, serve: F) -> Option<T>
    where
        F: Fn(Arc<Node>) -> A + Send + Sync + 'static,
        A: Future<Output = Reply<T>> + Send + 'static,
    {
        let target = self.target()?;
        let said = ask(&self.world, (self.peer, target), PATIENCE, serve).await;
        self.hear(said).await
    }

    /// The view of some node: what a router that runs there would see, however old.
    pub(crate) fn look(&mut self) -> Option<Arc<View>> {
        let up = self.world.up();
        self.rng.pick(&up).map(|node| node.view())
    }

    fn target(&mut self) -> Option<u64> {
        let anyone = || self.world.ids();
        match self.guess {
            Some(guess) if !self.rng.chance(50) => Some(guess),
            _ => self.rng.pick(&anyone()).copied(),
        }
    }

    /// Learns from an answer, and waits before the next try when there was none.
    async fn hear<T>(&mut self, said: Result<Reply<T>, Unanswered>) -> Option<T> {
        let wait = match said {
            Ok(Reply::Said(answer)) => return Some(answer),
            Ok(Reply::Elsewhere(leader)) => {
                self.guess = leader;
                if leader.is_some() { (1, 20) } else { (100, 600) }
            }
            Ok(Reply::Unknown) | Err(_) => {
                self.guess = None;
                (20, 300)
            }
        };
        Sim::sleep(self.rng.millis(wait.0, wait.1)).await;
        None
    }
}
