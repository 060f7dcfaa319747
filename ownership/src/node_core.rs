//! State that a node's tasks share once Raft runs, and the final failures of a node that can no longer maintain its
//! ledger.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use consensus::{
    FreshnessClock, LeaderTermClock, LedgerView, MembershipGuard, MembershipLock, QuorumStatus, UnsupportedLevel,
    check_command_level,
};
use ledger::{Command, Outcome};
use openraft::Raft;
use openraft::async_runtime::instant::Instant as _;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::errors::Fatal;
use openraft::raft::AppendEntriesResponse;
use openraft::type_config::alias::{CommittedLeaderIdOf, InstantOf};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc, watch};
use vocabulary::{LedgerTime, Micros, NodeId};

use crate::command_queue::{CommandTicket, OutcomeCallback, QueuedCommand, Urgency};
use crate::counters::LedgerNodeCounters;
use crate::error::{LedgerNodeError, SubmitError};
use crate::liveness_reports::LivenessReports;
use crate::log_loss::{LOG_LOSS_FILE, LogLoss, log_loss_error};
use crate::log_store::LogStore;
use crate::members::{MemberError, is_retired};
use crate::node_folder::write_durably_with;
use crate::node_observer::{NodeApplyObserver, NodeStateMachine};
use crate::peers::PeerRegistry;
use crate::proposal::ProposalBatch;
use crate::raft::{TokioTypeConfig, Vote};
use crate::remote_members::MemberAddressCache;
use crate::supervision::SupervisedTasks;

type Metrics = openraft::RaftMetrics<TokioTypeConfig>;
type CommittedLeaderId = CommittedLeaderIdOf<TokioTypeConfig>;

/// One running node.
pub(crate) struct NodeCore {
    pub(crate) raft: Raft<TokioTypeConfig, NodeStateMachine>,
    pub(crate) registry: Arc<PeerRegistry>,
    pub(crate) observer: Arc<NodeApplyObserver>,
    pub(crate) reports: LivenessReports,
    pub(crate) log: LogStore,
    pub(crate) folder: PathBuf,
    /// Leader, as far as this node knows.
    pub(crate) leader: watch::Sender<KnownLeader>,
    pub(crate) proposals: mpsc::Sender<ProposalBatch>,
    pub(crate) leader_contact: LeaderContact,
    pub(crate) freshness: FreshnessClock<InstantOf<TokioTypeConfig>>,
    /// Last leadership transfer that this node knows of.
    pub(crate) transfer: Mutex<Option<AnnouncedTransfer>>,
    /// Members, as other members report them.
    pub(crate) remote_members: MemberAddressCache,
    /// Configured join addresses.
    pub(crate) seeds: Vec<String>,
    pub(crate) supervision: Arc<SupervisedTasks>,
    leader_state: LeaderState,
    /// Queue of this node's commands; `None` once the node is closing.
    queue: Mutex<Option<mpsc::Sender<QueuedCommand>>>,
    /// Tells the command writer, which does not look into the queue while background commands collect there.
    immediate_submitted: Notify,
}

impl fmt::Debug for NodeCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeCore").field("node", &self.registry.welcome.node).finish_non_exhaustive()
    }
}

pub(crate) struct NodeCoreParts {
    pub(crate) raft: Raft<TokioTypeConfig, NodeStateMachine>,
    pub(crate) registry: Arc<PeerRegistry>,
    pub(crate) observer: Arc<NodeApplyObserver>,
    pub(crate) log: LogStore,
    pub(crate) folder: PathBuf,
    pub(crate) proposals: mpsc::Sender<ProposalBatch>,
    /// The view counts as stale if the leader was silent for this long.
    pub(crate) silence_timeout: Duration,
    /// Configured join addresses.
    pub(crate) seeds: Vec<String>,
}

/// A leadership transfer that the leader itself announced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct AnnouncedTransfer {
    /// Leadership that ends.
    pub(crate) from: Vote,
    pub(crate) to: NodeId,
}

/// What a node knows of its leader.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum KnownLeader {
    Unknown,
    Leader(NodeId),
    /// Raft has stopped here, so nothing will be known any more.
    Stopped,
}

impl KnownLeader {
    pub(crate) fn leader(self) -> Option<NodeId> {
        match self {
            KnownLeader::Leader(leader) => Some(leader),
            KnownLeader::Unknown | KnownLeader::Stopped => None,
        }
    }
}

/// Leader term of this node, and its leadership id.
#[derive(Debug, Default)]
struct HeldLeadership {
    term: LeaderTermClock,
    leader: Option<CommittedLeaderId>,
}

/// State of a node as leader.
#[derive(Debug, Default)]
struct LeaderState {
    leadership: Mutex<HeldLeadership>,
    membership_lock: MembershipLock,
}

/// When this node last heard from its leader.
#[derive(Debug)]
pub(crate) struct LeaderContact {
    start: Instant,
    /// Milliseconds since `start`, plus one; 0 before the first contact.
    last_ms: AtomicU64,
    silence_timeout: Duration,
}

impl LeaderContact {
    fn new(silence_timeout: Duration) -> Self {
        Self { start: Instant::now(), last_ms: AtomicU64::new(0), silence_timeout }
    }

    pub(crate) fn touch(&self) {
        self.last_ms.store(self.start.elapsed().as_millis() as u64 + 1, Relaxed);
    }

    fn is_recent(&self) -> bool {
        match self.last_ms.load(Relaxed) {
            0 => false,
            at => self.start.elapsed().saturating_sub(Duration::from_millis(at - 1)) < self.silence_timeout,
        }
    }
}

impl NodeCore {
    pub(crate) fn new(parts: NodeCoreParts, queue: mpsc::Sender<QueuedCommand>) -> Arc<Self> {
        let NodeCoreParts { raft, registry, observer, log, folder, proposals, silence_timeout: patience, seeds } =
            parts;
        let (leader, heard) = (watch::Sender::new(KnownLeader::Unknown), LeaderContact::new(patience));
        Arc::new(Self {
            raft,
            registry,
            observer,
            reports: LivenessReports::default(),
            log,
            folder,
            leader,
            proposals,
            leader_contact: heard,
            freshness: FreshnessClock::default(),
            transfer: Mutex::default(),
            remote_members: MemberAddressCache::default(),
            seeds,
            supervision: Arc::default(),
            leader_state: LeaderState::default(),
            queue: Mutex::new(Some(queue)),
            immediate_submitted: Notify::new(),
        })
    }

    /// Returns the leader, as far as this node knows.
    pub(crate) fn known_leader(&self) -> Option<NodeId> {
        self.leader.borrow().leader()
    }

    /// Returns whether Raft has stopped here.
    pub(crate) fn has_stopped(&self) -> bool {
        *self.leader.borrow() == KnownLeader::Stopped
    }

    pub(crate) fn node(&self) -> NodeId {
        self.registry.welcome.node
    }

    pub(crate) fn counters(&self) -> &LedgerNodeCounters {
        &self.observer.counters
    }

    pub(crate) fn view(&self) -> Arc<LedgerView> {
        self.registry.publisher.view()
    }

    /// Submits a command whose outcome somebody waits for.
    pub(crate) fn submit(&self, command: Command) -> Result<CommandTicket, SubmitError> {
        let (answer, ticket) = CommandTicket::new();
        self.enqueue(command, Urgency::Immediate, answer).map_err(|(error, _)| error)?;
        self.immediate_submitted.notify_one();
        Ok(ticket)
    }

    /// Submits a command for which nobody waits.
    pub(crate) fn submit_in_background(&self, command: Command, answer: OutcomeCallback) {
        if let Err((error, answer)) = self.enqueue(command, Urgency::Background, answer) {
            answer.call(Err(error));
        }
    }

    /// Returns once a command was submitted for whose outcome somebody waits.
    pub(crate) async fn immediate_submitted(&self) {
        self.immediate_submitted.notified().await;
    }

    fn enqueue(
        &self,
        command: Command,
        urgency: Urgency,
        answer: OutcomeCallback,
    ) -> Result<(), (SubmitError, OutcomeCallback)> {
        if let Err(refusal) = check_command_level(&self.view(), &command) {
            answer.call(Ok(Outcome::Refused(refusal)));
            return Ok(());
        }
        let sent = match QueuedCommand::new(command, urgency, answer) {
            Err(answer) => Err((SubmitError::TooLarge, answer)),
            Ok(queued) => match &*self.queue.lock() {
                None => Err((SubmitError::Closed, queued.answer)),
                Some(queue) => queue.try_send(queued).map_err(|error| match error {
                    mpsc::error::TrySendError::Full(queued) => (SubmitError::QueueFull, queued.answer),
                    mpsc::error::TrySendError::Closed(queued) => (SubmitError::Closed, queued.answer),
                }),
            },
        };
        sent.inspect_err(|(error, _)| self.counters().record_failure(*error))
    }

    /// Returns the number of commands that wait for a batch.
    pub(crate) fn queue_depth(&self) -> u64 {
        let queue = self.queue.lock();
        queue.as_ref().map_or(0, |queue| (queue.max_capacity() - queue.capacity()) as u64)
    }

    /// Rejects new commands from now on.
    pub(crate) fn close_queue(&self) {
        drop(self.queue.lock().take());
    }

    pub(crate) fn is_leading(&self) -> bool {
        self.leader_state.leadership.lock().leader.is_some()
    }

    /// Returns how long this node has led, without pauses; `None` if it does not lead.
    pub(crate) fn time_leading(&self) -> Option<Micros> {
        let duty = self.leader_state.leadership.lock();
        duty.leader.map(|_| duty.term.time_leading())
    }

    /// Returns the time for the next entry and the leadership in which it may be written; `None` if this node does not
    /// lead.
    pub(crate) fn entry_time(&self) -> Option<(LedgerTime, CommittedLeaderId)> {
        let ledger = self.view().now();
        let mut duty = self.leader_state.leadership.lock();
        let leader = duty.leader?;
        duty.term.entry_time(ledger, Instant::now()).map(|time| (time, leader))
    }

    /// Returns the silence after which a node counts as not answering.
    pub(crate) fn silence_timeout(&self) -> Duration {
        self.leader_contact.silence_timeout
    }

    /// Acquires the lock for adding a node or raising the level.
    pub(crate) fn lock_membership(&self) -> Result<MembershipGuard<'_>, MemberError> {
        let leadership = self.leader_state.leadership.lock().leader.ok_or(MemberError::NoLeader)?;
        self.leader_state.membership_lock.try_acquire(leadership).ok_or(MemberError::InProgress)
    }

    /// Updates this node's state from Raft's current metrics.
    pub(crate) fn update_quorum(&self) -> QuorumStatus {
        let now: &Metrics = &self.raft.metrics().borrow_watched().clone();
        self.update_leader_term(now);
        let members = now.membership_config.nodes().map(|(id, node)| (NodeId(*id), node.addr.clone()));
        self.registry.set_members(members.collect::<BTreeMap<_, _>>());
        if is_retired(&self.view(), self.node()) {
            self.registry.mark_retired();
        }
        if self.registry.is_retired() {
            // A removed node must not start elections: all would refuse it, and Raft would log every attempt.
            self.raft.runtime_config().elect(false);
        }
        let leader = now.current_leader.map(NodeId);
        let quorum = QuorumStatus { term: now.current_term, leader, stale: self.is_stale(now) };
        self.registry.publisher.publish_quorum(quorum);
        let known = match leader {
            _ if now.running_state.is_err() => KnownLeader::Stopped,
            Some(leader) => KnownLeader::Leader(leader),
            None => KnownLeader::Unknown,
        };
        self.leader.send_if_modified(|before| std::mem::replace(before, known) != known);
        quorum
    }

    /// Begins or ends the leader term. It begins once everything that earlier leaders wrote is applied, because the
    /// ledger's clock is up to date only then.
    fn update_leader_term(&self, now: &Metrics) {
        let term = now.current_term;
        let is_current = now.last_applied.is_some_and(|applied| applied.committed_leader_id().term == term);
        let leader = self.raft.as_leader().ok().map(|leader| leader.to_committed_leader_id());
        // The vote alone is not enough: a restarted leader still has its vote but no longer leads.
        let leads = is_current && now.state.is_leader() && now.running_state.is_ok();
        let leader = leader.filter(|leader| leads && leader.term == term);
        let ledger = self.view().now();
        let mut duty = self.leader_state.leadership.lock();
        let leads = leader.map(|leader| leader.term);
        duty.term.follow(leads, ledger, Instant::now());
        if duty.leader != leader {
            match leads {
                Some(term) => tracing::info!(term, node = %self.node(), "this node leads"),
                None => tracing::info!(term, node = %self.node(), "this node leads no longer"),
            }
        }
        duty.leader = leader;
    }

    fn is_stale(&self, now: &Metrics) -> bool {
        if now.running_state.is_err() || now.current_leader.is_none() || self.registry.is_retired() {
            return true;
        }
        if now.current_leader != Some(self.node().0) {
            return !self.leader_contact.is_recent();
        }
        let is_alone = now.membership_config.voter_ids().count() == 1;
        let acked = now.last_quorum_acked.as_ref().is_some_and(|at| at.elapsed() < self.leader_contact.silence_timeout);
        !is_alone && !acked
    }
}

/// Returns the cause of a failed start. If the store failed, that is the cause: the missing quorum is only a
/// consequence.
pub(crate) fn start_failure(core: &NodeCore, error: LedgerNodeError) -> LedgerNodeError {
    if let Some(known) = core.known_failure() {
        return known;
    }
    match &core.raft.metrics().borrow_watched().running_state {
        Err(fatal @ Fatal::StorageError(_)) => LedgerNodeError::Failed(fatal.to_string()),
        _ => error,
    }
}

/// Returns an error if this release met an entry or a snapshot that it cannot read.
pub(crate) fn unsupported_level(observer: &NodeApplyObserver) -> Option<LedgerNodeError> {
    let UnsupportedLevel { level, levels } = *observer.unreadable.get()?;
    Some(LedgerNodeError::Level { level, highest: levels.highest })
}

/// How long a node with a lost log may take to record that before it ends.
const NOTED_WITHIN: Duration = Duration::from_secs(1);

impl NodeCore {
    /// Examines the answer to a heartbeat that named the last entry acknowledged by this node.
    pub(crate) fn note_heartbeat(&self, acknowledged: u64, answer: &AppendEntriesResponse<TokioTypeConfig>) {
        match answer {
            AppendEntriesResponse::Conflict => {}
            AppendEntriesResponse::Success => return self.observer.log_loss.clear(),
            _ => return,
        }
        if !self.observer.log_loss.note_contradiction(Instant::now()) {
            return;
        }
        let last = self.raft.metrics().borrow_watched().last_log_index.unwrap_or(0);
        let reverted = LogLoss { last, acknowledged };
        if self.observer.log_loss.loss.set(reverted).is_ok() {
            tracing::error!(
                last,
                acknowledged,
                "this node's log lacks entries that the node acknowledged; the node stops. Replace it (`ownerserve ctl member replace`)"
            );
            let bytes = serde_json::to_vec(&reverted).expect("two numbers encode");
            let (raft, path, shortages) = (self.raft.clone(), self.folder.join(LOG_LOSS_FILE), self.log.shortages());
            tokio::spawn(async move {
                let own = shortages.clone();
                let written = shortages.run_blocking("what is lacking", move || {
                    write_durably_with(&own, &path, |file| file.write_all(&bytes))
                });
                // The node must stop voting even if no file can be opened now.
                let written = tokio::time::timeout(NOTED_WITHIN, written).await;
                if let Err(error) = written.map_err(io::Error::from).and_then(|written| written) {
                    tracing::error!(%error, "the loss of log entries could not be recorded in the data directory; do not start this node again");
                }
                raft.shutdown().await
            });
        }
    }

    /// Leaves the quorum for good: its files are gone, so what it acknowledges is not kept.
    pub(crate) fn leave_quorum(&self, path: PathBuf) {
        let gone = format!("{} is gone from the disk, or was replaced", path.display());
        if self.observer.missing_path.set(path).is_ok() {
            self.log.close_with(&io::Error::new(io::ErrorKind::NotFound, gone));
            let raft = self.raft.clone();
            tokio::spawn(async move { raft.shutdown().await });
        }
    }

    /// Returns an error if a path of the data directory is missing.
    pub(crate) fn folder_gone(&self) -> Option<LedgerNodeError> {
        self.observer.missing_path.get().map(|path| LedgerNodeError::FolderGone { path: path.clone() })
    }

    fn log_loss(&self) -> Option<LedgerNodeError> {
        self.observer.log_loss.loss.get().map(|reverted| log_loss_error(&self.folder, *reverted))
    }

    /// Returns why this node's ledger has failed for good, if it has.
    pub(crate) fn final_error(&self) -> Option<LedgerNodeError> {
        let fatal = self.raft.metrics().borrow_watched().running_state.clone().err()?;
        Some(self.known_failure().unwrap_or_else(|| LedgerNodeError::Failed(fatal.to_string())))
    }

    /// Returns why this node ends or has ended, if more is known than that Raft has stopped.
    fn known_failure(&self) -> Option<LedgerNodeError> {
        unsupported_level(&self.observer).or_else(|| self.log_loss()).or_else(|| self.folder_gone())
    }
}
