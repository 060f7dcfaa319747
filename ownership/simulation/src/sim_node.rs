//! One process of a node: the real Raft, state machine and leader tasks, on a simulated disk.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use consensus::{
    ChangeFeed, Consistency, FreshnessClock, JoiningNode, LeaderTermClock, LedgerView, MembershipGuard, MembershipLock,
    SharedLedgerEntry, StalledChangeDetector, StateMachine, SupportedLevels, TypeConfig, ViewPublisher, WorkerLiveness,
    check_command_level, expiries, raft_config, read_index, renewal,
};
use futures::StreamExt;
use futures::channel::{mpsc, oneshot};
use ledger::{Command, LedgerEntry, Outcome, Submission};
use openraft::async_runtime::instant::Instant;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::errors::ClientWriteError;
use openraft::impls::ProgressResponder;
use openraft::type_config::alias::CommittedLeaderIdOf;
use openraft::{AsyncRuntime, BasicNode, ChangeMembers, Config, Raft};
use vocabulary::{ClientId, ClientSerial, Incarnation, LedgerTime, Micros, NodeId, WorkerId};

use crate::checks::log_order;
use crate::checks::staleness::StalenessClaim;
use crate::disk::SimDisk;
use crate::log_store::SimLogStore;
use crate::process::Pid;
use crate::run_plan::{LEASE, SimPlan};
use crate::run_recorder::RecordingObserver;
use crate::runtime::{ProcessInstant, SimulatedRuntime, true_time};
use crate::sim_network::{SimNetworkFactory, ask};
use crate::snapshot_store::SimSnapshotStore;
use crate::world::SimWorld;

type SimTypeConfig = TypeConfig<SimulatedRuntime>;
type CommittedLeader = CommittedLeaderIdOf<SimTypeConfig>;
type SimStateMachine = StateMachine<SimSnapshotStore, RecordingObserver>;

/// Interval at which leases are renewed and expired.
pub(crate) const TICK: Duration = Duration::from_secs(1);
/// Maximum number of submissions per entry.
const BATCH: usize = 8;
/// How long the first submission waits for more.
const LINGER: Duration = Duration::from_millis(3);
/// Timeout of a call between nodes.
pub(crate) const RPC_TIMEOUT: Duration = Duration::from_secs(3);

#[derive(Clone, PartialEq, Debug)]
pub(crate) enum NodeReply<T> {
    Done(T),
    /// This node does not lead: ask the leader, if it is known. Nothing was done.
    NotLeader(Option<u64>),
    /// The outcome is unknown.
    Unknown,
}

#[derive(Clone, PartialEq, Debug)]
pub(crate) struct CommandAck {
    pub(crate) index: u64,
    pub(crate) outcome: Outcome,
}

struct QueuedSubmission {
    submission: Submission,
    answer: oneshot::Sender<NodeReply<CommandAck>>,
}

pub(crate) struct SimNode {
    pub(crate) id: u64,
    pub(crate) pid: Pid,
    pub(crate) raft: Raft<SimTypeConfig, SimStateMachine>,
    /// State that readers and watchers see.
    pub(crate) read_state: PublishedNodeState,
    /// Feature levels that its release supports.
    pub(crate) levels: SupportedLevels,
    world: Arc<SimWorld>,
    disk: SimDisk,
    leader_term: Mutex<LeaderTermClock<ProcessInstant>>,
    liveness: Mutex<WorkerLiveness<ProcessInstant>>,
    queue: mpsc::UnboundedSender<QueuedSubmission>,
    own_client: Mutex<(ClientId, u64)>,
    membership_lock: MembershipLock,
}

/// State of a node that readers and watchers see.
pub(crate) struct PublishedNodeState {
    publisher: Arc<ViewPublisher>,
    pub(crate) feed: Arc<ChangeFeed<SimulatedRuntime>>,
    freshness: FreshnessClock<ProcessInstant>,
}

pub(crate) struct SimNodeParts {
    pub(crate) id: u64,
    pub(crate) pid: Pid,
    pub(crate) boot: u64,
    pub(crate) disk: SimDisk,
    /// Feature levels that its release supports.
    pub(crate) levels: SupportedLevels,
}

fn config(plan: &SimPlan) -> Arc<Config> {
    let (heartbeat, election) = plan.timers;
    let config =
        Config { max_in_snapshot_log_to_keep: plan.retention.behind_snapshot, ..raft_config(heartbeat, election) };
    Arc::new(config.validate().expect("the timers are in order"))
}

impl SimNode {
    /// Starts a node in its own process. Returns `None` where a real process would fail to read or write its disk.
    pub(crate) async fn start(world: &Arc<SimWorld>, parts: SimNodeParts) -> Option<Arc<SimNode>> {
        let SimNodeParts { id, pid, boot, disk, levels } = parts;
        let publisher = Arc::<ViewPublisher>::default();
        let feed = Arc::new(ChangeFeed::new(world.plan.retention.changes));
        let probe = Arc::new(RecordingObserver::new(id, levels, (world.recorder.clone(), feed.clone())));
        let machine = StateMachine::new(SimSnapshotStore::on_disk(disk.clone()), publisher.clone(), (probe, levels));
        let links = SimNetworkFactory { world: world.clone(), from: id };
        let committed = disk.read(|log| log.committed.map_or(0, |id| id.index));
        let raft = Raft::new(id, config(&world.plan), links, SimLogStore::on_disk(disk.clone()), machine).await.ok()?;
        world.recorder.record_result(log_order::check_recovered(id, publisher.view().applied(), committed));
        let (queue, queued) = mpsc::unbounded();
        let own = Mutex::new((ClientId(u128::from(id) << 64 | u128::from(boot)), 0));
        let node = Arc::new(SimNode {
            id,
            pid,
            raft,
            read_state: PublishedNodeState { publisher, feed, freshness: FreshnessClock::default() },
            levels,
            world: world.clone(),
            disk,
            leader_term: Mutex::default(),
            liveness: Mutex::default(),
            queue,
            own_client: own,
            membership_lock: MembershipLock::default(),
        });
        drop(SimulatedRuntime::spawn(node.clone().run_proposer(queued)));
        drop(SimulatedRuntime::spawn(node.clone().tick()));
        Some(node)
    }

    pub(crate) fn world(&self) -> &SimWorld {
        &self.world
    }

    pub(crate) fn view(&self) -> Arc<LedgerView> {
        self.read_state.publisher.view()
    }

    pub(crate) fn leader(&self) -> Option<u64> {
        self.raft.metrics().borrow_watched().current_leader
    }

    /// Returns the leadership that this node holds, once it has applied what earlier leaders wrote. The vote alone is
    /// not enough: a restarted leader still has its vote but no longer leads.
    pub(crate) fn leadership(&self) -> Option<CommittedLeader> {
        let metrics = self.raft.metrics();
        let (leads, term) = {
            let now = metrics.borrow_watched();
            let applied = now.last_applied.map(|applied| applied.committed_leader_id().term);
            (now.state.is_leader() && applied == Some(now.current_term), now.current_term)
        };
        let leader = self.raft.as_leader().ok().map(|leader| leader.to_committed_leader_id());
        leader.filter(|leader| leads && leader.term == term)
    }

    /// Returns why Raft has stopped here, if it has.
    pub(crate) fn end_cause(&self) -> Option<String> {
        self.raft.metrics().borrow_watched().running_state.as_ref().err().map(ToString::to_string)
    }

    /// Returns whether Raft still runs here.
    pub(crate) fn is_running(&self) -> bool {
        self.raft.metrics().borrow_watched().running_state.is_ok()
    }

    /// Accepts a submission, or names the leader.
    pub(crate) async fn submit(self: Arc<Self>, submission: Submission) -> NodeReply<CommandAck> {
        if self.leadership().is_none() {
            return NodeReply::NotLeader(self.leader().filter(|leader| *leader != self.id));
        }
        let view = self.view();
        if let Err(refusal) = check_command_level(&view, &submission.command) {
            return NodeReply::Done(CommandAck { index: view.applied(), outcome: Outcome::Refused(refusal) });
        }
        let (answer, answered) = oneshot::channel();
        if self.queue.unbounded_send(QueuedSubmission { submission, answer }).is_err() {
            return NodeReply::NotLeader(None);
        }
        answered.await.unwrap_or(NodeReply::Unknown)
    }

    /// Records that a router reached this incarnation of a worker.
    pub(crate) async fn report_liveness(self: Arc<Self>, worker: WorkerId, incarnation: Incarnation) -> NodeReply<()> {
        match self.leadership() {
            None => NodeReply::NotLeader(self.leader().filter(|leader| *leader != self.id)),
            Some(leader) => {
                let mut signs = self.liveness.lock().unwrap_or_else(PoisonError::into_inner);
                if signs.record((worker, incarnation), ProcessInstant::now()) {
                    self.world.recorder.on_liveness_report((worker, incarnation), (leader.term, self.id));
                }
                NodeReply::Done(())
            }
        }
    }

    /// Returns a view with the requested consistency; its claimed staleness is checked.
    pub(crate) async fn read(self: Arc<Self>, consistency: Consistency) -> NodeReply<Arc<LedgerView>> {
        let began = true_time();
        if let Err(reply) = self.read_state.freshness.ensure_fresh(consistency, self.catch_up()).await {
            return reply;
        }
        let view = self.view();
        let bound = match consistency {
            Consistency::Local => None,
            Consistency::Bounded(bound) => Some(bound),
            Consistency::Linearizable => Some(Duration::ZERO),
        };
        let within = bound.map(|bound| (StalenessClaim::BoundedRead(bound), began));
        let stated = self.read_state.freshness.age().map(|age| (StalenessClaim::StatedStaleness(age), true_time()));
        for claim in within.into_iter().chain(stated) {
            self.world.recorder.check_staleness(self.id, claim, view.applied());
        }
        NodeReply::Done(view)
    }

    /// Waits until the view shows everything that was acknowledged before now.
    async fn catch_up(&self) -> Result<(), NodeReply<Arc<LedgerView>>> {
        let index = if self.leadership().is_some() {
            self.read_index().await
        } else {
            let leader = self.leader().filter(|leader| *leader != self.id).ok_or(NodeReply::NotLeader(None))?;
            let question = |node: Arc<SimNode>| async move { node.read_index().await };
            ask(&self.world, (self.id, leader), RPC_TIMEOUT, question).await.ok().flatten()
        };
        let index = index.ok_or(NodeReply::Unknown)?;
        let caught_up = self.raft.wait(Some(RPC_TIMEOUT)).applied_index_at_least(Some(index), "read").await;
        caught_up.map(drop).map_err(|_| NodeReply::Unknown)
    }

    async fn read_index(&self) -> Option<u64> {
        SimulatedRuntime::timeout(RPC_TIMEOUT, read_index(&self.raft)).await.ok()?.ok()
    }

    /// Proposer task: turns a batch into an entry that only the current leadership may write.
    async fn run_proposer(self: Arc<Self>, mut queue: mpsc::UnboundedReceiver<QueuedSubmission>) {
        while let Some(first) = queue.next().await {
            SimulatedRuntime::sleep(LINGER).await;
            let mut batch = vec![first];
            while batch.len() < BATCH
                && let Ok(next) = queue.try_recv()
            {
                batch.push(next);
            }
            self.clone().propose(batch).await;
        }
    }

    async fn propose(self: Arc<Self>, batch: Vec<QueuedSubmission>) {
        let (submissions, answers): (Vec<_>, Vec<_>) = batch.into_iter().map(|q| (q.submission, q.answer)).unzip();
        let Some((time, leader)) = self.entry_time() else {
            return answers.into_iter().for_each(|answer| drop(answer.send(NodeReply::NotLeader(None))));
        };
        self.world.recorder.on_entry_proposed(time, (leader.term, leader.node_id));
        let proposal = SharedLedgerEntry(Arc::new(LedgerEntry { time, submissions }));
        let (responder, done) = ProgressResponder::complete_only();
        let sent = self.raft.write(proposal).with_leader(leader).responder(responder).await;
        let node = self.clone();
        drop(SimulatedRuntime::spawn(async move {
            let reply = |outcome: Option<_>| outcome.unwrap_or(NodeReply::Unknown);
            let result = if sent.is_err() { None } else { done.await.ok() };
            match result {
                Some(Ok(written)) => {
                    let index = written.log_id.index;
                    node.world.check_acknowledged(&node, index);
                    for (answer, outcome) in answers.into_iter().zip(written.data.0) {
                        drop(answer.send(NodeReply::Done(CommandAck { index, outcome })));
                    }
                }
                Some(Err(ClientWriteError::ForwardToLeader(forward))) => {
                    let elsewhere =
                        |answer: oneshot::Sender<_>| drop(answer.send(NodeReply::NotLeader(forward.leader_id)));
                    answers.into_iter().for_each(elsewhere);
                }
                _ => answers.into_iter().for_each(|answer| drop(answer.send(reply(None)))),
            }
        }));
    }

    /// Returns the time for the next entry, and the leadership in which it is written.
    fn entry_time(&self) -> Option<(LedgerTime, CommittedLeader)> {
        let leader = self.leadership();
        let mut leader_term = self.leader_term.lock().unwrap_or_else(PoisonError::into_inner);
        let term = leader.map(|leader| leader.term);
        term.into_iter().for_each(|term| self.world.recorder.on_leadership((term, self.id), self.pid));
        let (ledger, now) = (self.view().now(), ProcessInstant::now());
        leader_term.follow(term, ledger, now);
        Some((leader_term.entry_time(ledger, now)?, leader?))
    }

    async fn tick(self: Arc<Self>) {
        let mut snapshot_at = self.view().applied();
        let mut unfinished = StalledChangeDetector::default();
        loop {
            SimulatedRuntime::sleep(TICK).await;
            self.disk.sync_commit_mark();
            let view = self.view();
            if self.entry_time().is_some() {
                let time_leading = self.leader_term.lock().unwrap_or_else(PoisonError::into_inner).time_leading();
                let lease = Micros::of(LEASE);
                let mut signs = self.liveness.lock().unwrap_or_else(PoisonError::into_inner);
                let renewal = renewal(&view, signs.take(), lease);
                let expiries = signs.veto_recently_reached(
                    expiries(&view, time_leading, lease),
                    &view,
                    (LEASE, ProcessInstant::now()),
                );
                drop(signs);
                expiries.iter().for_each(|expire| self.world.recorder.on_expiry_proposed(expire.worker));
                let expiries = expiries.into_iter().map(Command::ExpireLease);
                renewal.into_iter().chain(expiries).for_each(|command| self.submit_internal(command));
                self.finish_change(&mut unfinished);
            }
            if view.applied() >= snapshot_at + self.world.plan.retention.between_snapshots
                && self.raft.trigger().snapshot().await.is_ok()
            {
                snapshot_at = view.applied();
                self.world.recorder.count("snapshots asked for");
            }
        }
    }

    /// Acquires the lock for adding a node or raising the level; `None` if this node does not lead or the lock is
    /// taken.
    pub(crate) fn lock_membership(&self) -> Option<MembershipGuard<'_>> {
        self.membership_lock.try_acquire(self.leadership()?)
    }

    /// Adds a node as a learner. Returns false if that failed or its outcome is unknown.
    pub(crate) async fn add_learner(&self, id: u64, levels: SupportedLevels) -> bool {
        let Some(turn) = self.lock_membership() else { return false };
        let newcomer = JoiningNode { id, node: BasicNode::default(), levels };
        turn.add_learner(&self.raft, newcomer, || self.view().level()).await.is_ok()
    }

    /// Raises the level. Returns false if that failed or its outcome is unknown.
    pub(crate) async fn raise_level(&self, turn: &MembershipGuard<'_>, level: u32) -> bool {
        let Some((time, leader)) = self.entry_time().filter(|(_, leader)| *leader == turn.leadership()) else {
            return false;
        };
        self.world.recorder.on_entry_proposed(time, (leader.term, leader.node_id));
        let client = ClientId(1 << 127 | u128::from(self.id) << 64 | u128::from(time.0));
        let commands = [Command::OpenClient(NodeId(self.id)), Command::RaiseLevel(level)];
        let submission = |(serial, command)| Submission { client, serial: ClientSerial(serial), command };
        let submissions = (0..).zip(commands).map(submission).collect();
        turn.write(&self.raft, LedgerEntry { time, submissions }).await.is_ok()
    }

    /// Finishes a voter change that another leader left incomplete.
    fn finish_change(&self, unfinished: &mut StalledChangeDetector) {
        let metrics = self.raft.metrics().borrow_watched().clone();
        let joint = unfinished.voters_to_finish(&metrics.membership_config, &metrics.committed_membership_config);
        let Some(voters) = joint else { return };
        self.world.recorder.count("changes finished by another leader");
        let raft = self.raft.clone();
        drop(SimulatedRuntime::spawn(async move {
            raft.change_membership(ChangeMembers::ReplaceAllVoters(voters), true).await.is_ok()
        }));
    }

    /// Submits a command of this node itself, without waiting for its outcome.
    pub(crate) fn submit_internal(&self, command: Command) {
        let mut own = self.own_client.lock().unwrap_or_else(PoisonError::into_inner);
        // Opening an open client does nothing, but without it a lost opening would make every later renewal fail.
        for command in [Command::OpenClient(NodeId(self.id)), command] {
            let submission = Submission { client: own.0, serial: ClientSerial(own.1), command };
            own.1 += 1;
            let (answer, _) = oneshot::channel();
            drop(self.queue.unbounded_send(QueuedSubmission { submission, answer }));
        }
    }
}
