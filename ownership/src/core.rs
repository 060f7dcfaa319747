//! What a node's tasks share once Raft runs, and how they follow it.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use consensus::{Freshness, InTurn, Office, Quorum, Turn, View, check_gate};
use ledger::{Command, Ledger, Outcome};
use openraft::async_runtime::instant::Instant as _;
use openraft::async_runtime::watch::{RecvError, WatchReceiver};
use openraft::type_config::alias::{CommittedLeaderIdOf, InstantOf};
use openraft::{Raft, ServerState};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot, watch};
use vocabulary::{LedgerTime, Micros, NodeId};

use crate::access::Elsewhere;
use crate::counters::Counters;
use crate::error::SubmitError;
use crate::log_store::LogStore;
use crate::members::MemberError;
use crate::news::News;
use crate::peers::Registry;
use crate::proposer::Asked;
use crate::raft::{LogId, Machine, Types, Vote};
use crate::supervision::Supervision;
use crate::ticker::Reports;
use crate::watch::Observer;
use crate::writer::{Queued, Ticket};

/// How often the quorum is looked at when nothing is heard of it.
const LOOK: Duration = Duration::from_millis(250);

type Metrics = openraft::RaftMetrics<Types>;
type LeaderId = CommittedLeaderIdOf<Types>;

/// One running node.
pub(crate) struct Core {
    pub(crate) raft: Raft<Types, Machine>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) observer: Arc<Observer>,
    pub(crate) reports: Reports,
    pub(crate) log: LogStore,
    pub(crate) folder: PathBuf,
    /// Who leads, as far as this node knows.
    pub(crate) leader: watch::Sender<Known>,
    pub(crate) proposals: mpsc::Sender<Asked>,
    pub(crate) heard: HeardLeader,
    pub(crate) freshness: Freshness<InstantOf<Types>>,
    /// The last transfer of the leadership that this node knows of.
    pub(crate) transfer: Mutex<Option<Transfer>>,
    /// Members as other members know them.
    pub(crate) elsewhere: Elsewhere,
    /// Addresses of members that this node was told to join through.
    pub(crate) seeds: Vec<String>,
    pub(crate) supervision: Arc<Supervision>,
    seat: Seat,
    /// Commands of this node; none once it is closing.
    queue: Mutex<Option<mpsc::Sender<Queued>>>,
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("node", &self.registry.own.node).finish_non_exhaustive()
    }
}

pub(crate) struct Parts {
    pub(crate) raft: Raft<Types, Machine>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) observer: Arc<Observer>,
    pub(crate) log: LogStore,
    pub(crate) folder: PathBuf,
    pub(crate) proposals: mpsc::Sender<Asked>,
    /// Without a word of the leader for so long, the view is stale.
    pub(crate) patience: Duration,
    /// Addresses of members that this node was told to join through.
    pub(crate) seeds: Vec<String>,
}

/// The leadership is on its way to another node, by its leader's own word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Transfer {
    /// The leadership that ends.
    pub(crate) from: Vote,
    pub(crate) to: NodeId,
}

/// What a node knows of its leader.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Known {
    Nobody,
    Leader(NodeId),
    /// Raft has stopped here: nothing will be known any more.
    Stopped,
}

impl Known {
    pub(crate) fn leader(self) -> Option<NodeId> {
        match self {
            Known::Leader(leader) => Some(leader),
            Known::Nobody | Known::Stopped => None,
        }
    }
}

/// What of Raft's metrics is looked at as soon as it changes. The rest changes with every entry, and is looked at in
/// its turn, or at once while this node waits for its office or for its quorum.
#[derive(PartialEq)]
struct Standing {
    runs: bool,
    term: u64,
    state: ServerState,
    leader: Option<u64>,
    members: Option<LogId>,
}

impl Standing {
    fn of(metrics: &Metrics) -> Self {
        Self {
            runs: metrics.running_state.is_ok(),
            term: metrics.current_term,
            state: metrics.state,
            leader: metrics.current_leader,
            members: *metrics.membership_config.log_id(),
        }
    }
}

/// The office that this node holds, and in which leadership.
#[derive(Debug, Default)]
struct Duty {
    office: Office,
    leader: Option<LeaderId>,
}

/// What a leader needs for its office.
#[derive(Debug, Default)]
struct Seat {
    duty: Mutex<Duty>,
    turn: Turn,
}

/// When this node last heard of its leader.
#[derive(Debug)]
pub(crate) struct HeardLeader {
    start: Instant,
    /// Milliseconds since the start, plus one; 0 before the first time.
    at: AtomicU64,
    patience: Duration,
}

impl HeardLeader {
    fn new(patience: Duration) -> Self {
        Self { start: Instant::now(), at: AtomicU64::new(0), patience }
    }

    pub(crate) fn now(&self) {
        self.at.store(self.start.elapsed().as_millis() as u64 + 1, Relaxed);
    }

    fn is_recent(&self) -> bool {
        match self.at.load(Relaxed) {
            0 => false,
            at => self.start.elapsed().saturating_sub(Duration::from_millis(at - 1)) < self.patience,
        }
    }
}

impl Core {
    pub(crate) fn new(parts: Parts, queue: mpsc::Sender<Queued>) -> Arc<Self> {
        let Parts { raft, registry, observer, log, folder, proposals, patience, seeds } = parts;
        let (leader, heard) = (watch::Sender::new(Known::Nobody), HeardLeader::new(patience));
        Arc::new(Self {
            raft,
            registry,
            observer,
            reports: Reports::default(),
            log,
            folder,
            leader,
            proposals,
            heard,
            freshness: Freshness::default(),
            transfer: Mutex::default(),
            elsewhere: Elsewhere::default(),
            seeds,
            supervision: Arc::default(),
            seat: Seat::default(),
            queue: Mutex::new(Some(queue)),
        })
    }

    /// The leader, as far as this node knows.
    pub(crate) fn known_leader(&self) -> Option<NodeId> {
        self.leader.borrow().leader()
    }

    /// Whether Raft runs here no more.
    pub(crate) fn has_stopped(&self) -> bool {
        *self.leader.borrow() == Known::Stopped
    }

    pub(crate) fn node(&self) -> NodeId {
        self.registry.own.node
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.observer.counters
    }

    pub(crate) fn view(&self) -> Arc<View> {
        self.registry.publisher.view()
    }

    pub(crate) fn submit(&self, command: Command) -> Result<Ticket, SubmitError> {
        let (answer, ticket) = oneshot::channel();
        if let Err(refusal) = check_gate(&self.view(), &command) {
            drop(answer.send(Ok(Outcome::Refused(refusal))));
            return Ok(Ticket(ticket));
        }
        let queued = Queued::new(command, answer).inspect_err(|error| self.counters().failed(*error))?;
        let sent = match &*self.queue.lock() {
            None => Err(SubmitError::Closed),
            Some(queue) => queue.try_send(queued).map_err(|error| match error {
                mpsc::error::TrySendError::Full(_) => SubmitError::QueueFull,
                mpsc::error::TrySendError::Closed(_) => SubmitError::Closed,
            }),
        };
        sent.map(|()| Ticket(ticket)).inspect_err(|error| self.counters().failed(*error))
    }

    /// Commands that wait for their batch.
    pub(crate) fn queue_depth(&self) -> u64 {
        let queue = self.queue.lock();
        queue.as_ref().map_or(0, |queue| (queue.max_capacity() - queue.capacity()) as u64)
    }

    /// Takes no more commands.
    pub(crate) fn close_queue(&self) {
        drop(self.queue.lock().take());
    }

    pub(crate) fn leads(&self) -> bool {
        self.seat.duty.lock().leader.is_some()
    }

    /// How long this node has been in office, without pauses; none out of office.
    pub(crate) fn in_office(&self) -> Option<Micros> {
        let duty = self.seat.duty.lock();
        duty.leader.map(|_| duty.office.held())
    }

    /// The time of the next entry, and the leadership in which it may be written; none out of office.
    pub(crate) fn entry_time(&self) -> Option<(LedgerTime, LeaderId)> {
        let ledger = self.view().now();
        let mut duty = self.seat.duty.lock();
        let leader = duty.leader?;
        duty.office.time(ledger, Instant::now()).map(|time| (time, leader))
    }

    /// Without a word for so long, a node counts as silent.
    pub(crate) fn patience(&self) -> Duration {
        self.heard.patience
    }

    /// The turn to let a node in or to raise the level.
    pub(crate) fn turn(&self) -> Result<InTurn<'_>, MemberError> {
        let leadership = self.seat.duty.lock().leader.ok_or(MemberError::NoLeader)?;
        self.seat.turn.take(leadership).ok_or(MemberError::InProgress)
    }

    /// Follows Raft until it stops: keeps the office, the address book and the view's word on the quorum true.
    pub(crate) async fn follow(self: Arc<Self>) {
        let mut metrics = self.raft.metrics();
        let mut news = News::default();
        loop {
            let before = Standing::of(&metrics.borrow_and_update());
            let quorum = self.look();
            news.tell(&self, &quorum);
            let is_settled = !quorum.stale && self.leads() == (quorum.leader == Some(self.node()));
            let changed = async {
                loop {
                    metrics.changed().await?;
                    if !is_settled || Standing::of(&metrics.borrow_and_update()) != before {
                        return Ok::<_, RecvError>(());
                    }
                }
            };
            match tokio::time::timeout(LOOK, changed).await {
                Ok(Ok(())) | Err(_) => {}
                Ok(Err(_)) => {
                    self.registry.publisher.quorum(Quorum { leader: None, stale: true, ..quorum });
                    self.leader.send_replace(Known::Stopped);
                    return;
                }
            }
        }
    }

    /// Takes note of what Raft says now.
    pub(crate) fn look(&self) -> Quorum {
        let now: &Metrics = &self.raft.metrics().borrow_watched().clone();
        self.follow_office(now);
        let members = now.membership_config.nodes().map(|(id, node)| (NodeId(*id), node.addr.clone()));
        self.registry.set_book(members.collect::<BTreeMap<_, _>>());
        if is_retired(&self.view(), self.node()) {
            self.registry.retire();
        }
        if self.registry.is_retired() {
            // It has no voice: everybody would refuse it, and Raft say so at every attempt.
            self.raft.runtime_config().elect(false);
        }
        let leader = now.current_leader.map(NodeId);
        let quorum = Quorum { term: now.current_term, leader, stale: self.is_stale(now) };
        self.registry.publisher.quorum(quorum);
        let known = match leader {
            _ if now.running_state.is_err() => Known::Stopped,
            Some(leader) => Known::Leader(leader),
            None => Known::Nobody,
        };
        self.leader.send_if_modified(|before| std::mem::replace(before, known) != known);
        quorum
    }

    /// Office is taken once everything that earlier leaders wrote is applied: the ledger's clock is the newest then.
    fn follow_office(&self, now: &Metrics) {
        let term = now.current_term;
        let is_current = now.last_applied.is_some_and(|applied| applied.committed_leader_id().term == term);
        let leader = self.raft.as_leader().ok().map(|leader| leader.to_committed_leader_id());
        // The vote alone does not say: a restarted leader still has it, and leads no more.
        let leads = is_current && now.state.is_leader() && now.running_state.is_ok();
        let leader = leader.filter(|leader| leads && leader.term == term);
        let ledger = self.view().now();
        let mut duty = self.seat.duty.lock();
        let leads = leader.map(|leader| leader.term);
        duty.office.follow(leads, ledger, Instant::now());
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
            return !self.heard.is_recent();
        }
        let is_alone = now.membership_config.voter_ids().count() == 1;
        let acked = now.last_quorum_acked.as_ref().is_some_and(|at| at.elapsed() < self.heard.patience);
        !is_alone && !acked
    }
}

/// Whether a node was removed, as far as this ledger knows.
pub(crate) fn is_retired(ledger: &Ledger, node: NodeId) -> bool {
    ledger.node(node).is_some_and(|node| !node.is_member())
}
