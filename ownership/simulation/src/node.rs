//! One life of a node: the real Raft, the real state machine and the real leader's duties, over a simulated disk.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use consensus::{
    Consistency, Feed, Freshness, InTurn, Levels, Machine, Newcomer, Office, Proposal, Publisher, Signs, Turn, Types,
    Unfinished, View, check_gate, expiries, raft_config, read_index, renewal,
};
use futures::StreamExt;
use futures::channel::{mpsc, oneshot};
use ledger::{Command, Entry, Outcome, Submission};
use openraft::async_runtime::instant::Instant;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::errors::ClientWriteError;
use openraft::impls::ProgressResponder;
use openraft::type_config::alias::CommittedLeaderIdOf;
use openraft::{AsyncRuntime, BasicNode, ChangeMembers, Config, Raft};
use vocabulary::{ClientId, ClientSerial, Incarnation, LedgerTime, Micros, NodeId, WorkerId};

use crate::book::Probe;
use crate::checks::order;
use crate::checks::staleness::Claim;
use crate::disk::Disk;
use crate::log_store::LogStore;
use crate::network::{Links, ask};
use crate::plan::Plan;
use crate::process::Pid;
use crate::runtime::{Moment, Sim, true_time};
use crate::snapshots::Snapshots;
use crate::world::World;

type SimTypes = Types<Sim>;
type LeaderId = CommittedLeaderIdOf<SimTypes>;
type SimMachine = Machine<Snapshots, Probe>;

/// How long a lease is held after a sign of life.
pub(crate) const LEASE: Duration = Duration::from_secs(15);
/// How often leases are renewed and ended.
pub(crate) const TICK: Duration = Duration::from_secs(1);
/// Submissions in one entry.
const BATCH: usize = 8;
/// How long the first of them waits for more.
const LINGER: Duration = Duration::from_millis(3);
/// How long one node waits for another.
pub(crate) const PATIENCE: Duration = Duration::from_secs(3);

#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Reply<T> {
    Said(T),
    /// Not here: ask the leader, if it is known. Nothing was done.
    Elsewhere(Option<u64>),
    /// It may have been done.
    Unknown,
}

#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Acknowledged {
    pub(crate) index: u64,
    pub(crate) outcome: Outcome,
}

struct Queued {
    submission: Submission,
    answer: oneshot::Sender<Reply<Acknowledged>>,
}

pub(crate) struct Node {
    pub(crate) id: u64,
    pub(crate) pid: Pid,
    pub(crate) raft: Raft<SimTypes, SimMachine>,
    /// What readers and watchers see.
    pub(crate) shown: Shown,
    /// What its release can read.
    pub(crate) levels: Levels,
    world: Arc<World>,
    disk: Disk,
    office: Mutex<Office<Moment>>,
    signs: Mutex<Signs<Moment>>,
    queue: mpsc::UnboundedSender<Queued>,
    own: Mutex<(ClientId, u64)>,
    turn: Turn,
}

/// What readers and watchers see of a node.
pub(crate) struct Shown {
    publisher: Arc<Publisher>,
    pub(crate) feed: Arc<Feed<Sim>>,
    freshness: Freshness<Moment>,
}

pub(crate) struct Parts {
    pub(crate) id: u64,
    pub(crate) pid: Pid,
    pub(crate) boot: u64,
    pub(crate) disk: Disk,
    /// What its release can read.
    pub(crate) levels: Levels,
}

fn config(plan: &Plan) -> Arc<Config> {
    let (heartbeat, election) = plan.timers;
    let config = Config { max_in_snapshot_log_to_keep: plan.kept.behind_snapshot, ..raft_config(heartbeat, election) };
    Arc::new(config.validate().expect("the timers are in order"))
}

impl Node {
    /// Starts a life, in its own process. Fails as a process would that cannot read or write its disk.
    pub(crate) async fn start(world: &Arc<World>, parts: Parts) -> Option<Arc<Node>> {
        let Parts { id, pid, boot, disk, levels } = parts;
        let publisher = Arc::<Publisher>::default();
        let feed = Arc::new(Feed::new(world.plan.kept.changes));
        let probe = Arc::new(Probe::new(id, levels, (world.book.clone(), feed.clone())));
        let machine = Machine::new(Snapshots::on(disk.clone()), publisher.clone(), (probe, levels));
        let links = Links { world: world.clone(), from: id };
        let committed = disk.read(|log| log.committed.map_or(0, |id| id.index));
        let raft = Raft::new(id, config(&world.plan), links, LogStore::on(disk.clone()), machine).await.ok()?;
        world.book.note(order::check_recovered(id, publisher.view().applied(), committed));
        let (queue, queued) = mpsc::unbounded();
        let own = Mutex::new((ClientId(u128::from(id) << 64 | u128::from(boot)), 0));
        let node = Arc::new(Node {
            id,
            pid,
            raft,
            shown: Shown { publisher, feed, freshness: Freshness::default() },
            levels,
            world: world.clone(),
            disk,
            office: Mutex::default(),
            signs: Mutex::default(),
            queue,
            own,
            turn: Turn::default(),
        });
        drop(Sim::spawn(node.clone().write(queued)));
        drop(Sim::spawn(node.clone().tick()));
        Some(node)
    }

    pub(crate) fn world(&self) -> &World {
        &self.world
    }

    pub(crate) fn view(&self) -> Arc<View> {
        self.shown.publisher.view()
    }

    pub(crate) fn leader(&self) -> Option<u64> {
        self.raft.metrics().borrow_watched().current_leader
    }

    /// The leadership that this node holds, once it has applied what earlier leaders wrote. The vote alone does not say:
    /// a restarted leader still has it, and leads no more.
    pub(crate) fn leadership(&self) -> Option<LeaderId> {
        let metrics = self.raft.metrics();
        let (leads, term) = {
            let now = metrics.borrow_watched();
            let applied = now.last_applied.map(|applied| applied.committed_leader_id().term);
            (now.state.is_leader() && applied == Some(now.current_term), now.current_term)
        };
        let leader = self.raft.as_leader().ok().map(|leader| leader.to_committed_leader_id());
        leader.filter(|leader| leads && leader.term == term)
    }

    /// Why Raft runs here no more, once it does not.
    pub(crate) fn ended(&self) -> Option<String> {
        self.raft.metrics().borrow_watched().running_state.as_ref().err().map(ToString::to_string)
    }

    /// Whether Raft still runs here.
    pub(crate) fn is_well(&self) -> bool {
        self.raft.metrics().borrow_watched().running_state.is_ok()
    }

    /// Takes a submission, or says who does.
    pub(crate) async fn submit(self: Arc<Self>, submission: Submission) -> Reply<Acknowledged> {
        if self.leadership().is_none() {
            return Reply::Elsewhere(self.leader().filter(|leader| *leader != self.id));
        }
        let view = self.view();
        if let Err(refusal) = check_gate(&view, &submission.command) {
            return Reply::Said(Acknowledged { index: view.applied(), outcome: Outcome::Refused(refusal) });
        }
        let (answer, answered) = oneshot::channel();
        if self.queue.unbounded_send(Queued { submission, answer }).is_err() {
            return Reply::Elsewhere(None);
        }
        answered.await.unwrap_or(Reply::Unknown)
    }

    /// Notes that a router reached this life of a worker.
    pub(crate) async fn report(self: Arc<Self>, worker: WorkerId, incarnation: Incarnation) -> Reply<()> {
        match self.leadership() {
            None => Reply::Elsewhere(self.leader().filter(|leader| *leader != self.id)),
            Some(leader) => {
                let mut signs = self.signs.lock().unwrap_or_else(PoisonError::into_inner);
                if signs.note((worker, incarnation), Moment::now()) {
                    self.world.book.reported((worker, incarnation), (leader.term, self.id));
                }
                Reply::Said(())
            }
        }
    }

    /// A view as fresh as asked, and what is said of it is checked.
    pub(crate) async fn read(self: Arc<Self>, consistency: Consistency) -> Reply<Arc<View>> {
        let began = true_time();
        if let Err(reply) = self.shown.freshness.meet(consistency, self.catch_up()).await {
            return reply;
        }
        let view = self.view();
        let bound = match consistency {
            Consistency::Local => None,
            Consistency::Bounded(bound) => Some(bound),
            Consistency::Linearizable => Some(Duration::ZERO),
        };
        let within = bound.map(|bound| (Claim::Within(bound), began));
        let stated = self.shown.freshness.age().map(|age| (Claim::Age(age), true_time()));
        for claim in within.into_iter().chain(stated) {
            self.world.book.claims(self.id, claim, view.applied());
        }
        Reply::Said(view)
    }

    /// Waits until the view shows everything that was acknowledged before now.
    async fn catch_up(&self) -> Result<(), Reply<Arc<View>>> {
        let index = if self.leadership().is_some() {
            self.read_index().await
        } else {
            let leader = self.leader().filter(|leader| *leader != self.id).ok_or(Reply::Elsewhere(None))?;
            let question = |node: Arc<Node>| async move { node.read_index().await };
            ask(&self.world, (self.id, leader), PATIENCE, question).await.ok().flatten()
        };
        let index = index.ok_or(Reply::Unknown)?;
        let caught_up = self.raft.wait(Some(PATIENCE)).applied_index_at_least(Some(index), "read").await;
        caught_up.map(drop).map_err(|_| Reply::Unknown)
    }

    async fn read_index(&self) -> Option<u64> {
        Sim::timeout(PATIENCE, read_index(&self.raft)).await.ok()?.ok()
    }

    /// The one task that proposes: a batch becomes an entry that only this office may write.
    async fn write(self: Arc<Self>, mut queue: mpsc::UnboundedReceiver<Queued>) {
        while let Some(first) = queue.next().await {
            Sim::sleep(LINGER).await;
            let mut batch = vec![first];
            while batch.len() < BATCH
                && let Ok(next) = queue.try_recv()
            {
                batch.push(next);
            }
            self.clone().propose(batch).await;
        }
    }

    async fn propose(self: Arc<Self>, batch: Vec<Queued>) {
        let (submissions, answers): (Vec<_>, Vec<_>) = batch.into_iter().map(|q| (q.submission, q.answer)).unzip();
        let Some((time, leader)) = self.time() else {
            return answers.into_iter().for_each(|answer| drop(answer.send(Reply::Elsewhere(None))));
        };
        self.world.book.proposed(time, (leader.term, leader.node_id));
        let proposal = Proposal(Arc::new(Entry { time, submissions }));
        let (responder, done) = ProgressResponder::complete_only();
        let sent = self.raft.write(proposal).with_leader(leader).responder(responder).await;
        let node = self.clone();
        drop(Sim::spawn(async move {
            let reply = |outcome: Option<_>| outcome.unwrap_or(Reply::Unknown);
            let result = if sent.is_err() { None } else { done.await.ok() };
            match result {
                Some(Ok(written)) => {
                    let index = written.log_id.index;
                    node.world.acknowledging(&node, index);
                    for (answer, outcome) in answers.into_iter().zip(written.data.0) {
                        drop(answer.send(Reply::Said(Acknowledged { index, outcome })));
                    }
                }
                Some(Err(ClientWriteError::ForwardToLeader(forward))) => {
                    let elsewhere = |answer: oneshot::Sender<_>| drop(answer.send(Reply::Elsewhere(forward.leader_id)));
                    answers.into_iter().for_each(elsewhere);
                }
                _ => answers.into_iter().for_each(|answer| drop(answer.send(reply(None)))),
            }
        }));
    }

    /// The time of the next entry, and the office that it is written in.
    fn time(&self) -> Option<(LedgerTime, LeaderId)> {
        let leader = self.leadership();
        let mut office = self.office.lock().unwrap_or_else(PoisonError::into_inner);
        let term = leader.map(|leader| leader.term);
        term.into_iter().for_each(|term| self.world.book.leads((term, self.id), self.pid));
        let (ledger, now) = (self.view().now(), Moment::now());
        office.follow(term, ledger, now);
        Some((office.time(ledger, now)?, leader?))
    }

    async fn tick(self: Arc<Self>) {
        let mut snapshot_at = self.view().applied();
        let mut unfinished = Unfinished::default();
        loop {
            Sim::sleep(TICK).await;
            self.disk.sync_mark();
            let view = self.view();
            if self.time().is_some() {
                let held = self.office.lock().unwrap_or_else(PoisonError::into_inner).held();
                let lease = Micros::of(LEASE);
                let mut signs = self.signs.lock().unwrap_or_else(PoisonError::into_inner);
                let renewal = renewal(&view, signs.take(), lease);
                let expiries = signs.spare(expiries(&view, held, lease), &view, (LEASE, Moment::now()));
                drop(signs);
                expiries.iter().for_each(|expire| self.world.book.ending(expire.worker));
                let expiries = expiries.into_iter().map(Command::Expire);
                renewal.into_iter().chain(expiries).for_each(|command| self.submit_own(command));
                self.finish_change(&mut unfinished);
            }
            if view.applied() >= snapshot_at + self.world.plan.kept.between_snapshots
                && self.raft.trigger().snapshot().await.is_ok()
            {
                snapshot_at = view.applied();
                self.world.book.count("snapshots asked for");
            }
        }
    }

    /// The turn to let a node in or to raise the level; none where this node does not lead, or somebody has it.
    pub(crate) fn turn(&self) -> Option<InTurn<'_>> {
        self.turn.take(self.leadership()?)
    }

    /// Lets a node in as a learner. False where it is not, or nobody knows.
    pub(crate) async fn let_in(&self, id: u64, levels: Levels) -> bool {
        let Some(turn) = self.turn() else { return false };
        let newcomer = Newcomer { id, node: BasicNode::default(), levels };
        turn.let_in(&self.raft, newcomer, || self.view().level()).await.is_ok()
    }

    /// Raises the level. False where it is not, or nobody knows.
    pub(crate) async fn raise(&self, turn: &InTurn<'_>, level: u32) -> bool {
        let Some((time, leader)) = self.time().filter(|(_, leader)| *leader == turn.leadership()) else { return false };
        self.world.book.proposed(time, (leader.term, leader.node_id));
        let client = ClientId(1 << 127 | u128::from(self.id) << 64 | u128::from(time.0));
        let commands = [Command::OpenClient(NodeId(self.id)), Command::RaiseLevel(level)];
        let submission = |(serial, command)| Submission { client, serial: ClientSerial(serial), command };
        let submissions = (0..).zip(commands).map(submission).collect();
        turn.write(&self.raft, Entry { time, submissions }).await.is_ok()
    }

    /// Finishes a change of the voters that another leader left half done.
    fn finish_change(&self, unfinished: &mut Unfinished) {
        let metrics = self.raft.metrics().borrow_watched().clone();
        let joint = unfinished.voters(&metrics.membership_config, &metrics.committed_membership_config);
        let Some(voters) = joint else { return };
        self.world.book.count("changes finished by another leader");
        let raft = self.raft.clone();
        drop(Sim::spawn(
            async move { raft.change_membership(ChangeMembers::ReplaceAllVoters(voters), true).await.is_ok() },
        ));
    }

    /// Sends a command of this node's own. Nobody waits for its outcome.
    pub(crate) fn submit_own(&self, command: Command) {
        let mut own = self.own.lock().unwrap_or_else(PoisonError::into_inner);
        // Opening again what is open does nothing, and an opening that was lost would cost every renewal.
        for command in [Command::OpenClient(NodeId(self.id)), command] {
            let submission = Submission { client: own.0, serial: ClientSerial(own.1), command };
            own.1 += 1;
            let (answer, _) = oneshot::channel();
            drop(self.queue.unbounded_send(Queued { submission, answer }));
        }
    }
}
