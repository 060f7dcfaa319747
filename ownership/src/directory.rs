//! The directory: a node of the quorum, its view, and the way to write.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use consensus::{LeaderClock, Publisher, Quorum, View};
use ledger::Command;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::{BasicNode, Config, Raft, SnapshotPolicy};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use vocabulary::{Incarnation, NodeId, WorkerId};

use crate::counters::{Counters, Readings};
use crate::error::{OwnershipError, SubmitError};
use crate::log_store::LogStore;
use crate::network::Alone;
use crate::node_folder::{ClusterId, NodeFolder};
use crate::raft::{Machine, Types};
use crate::snapshots::SnapshotFile;
use crate::ticker::{Reports, Ticker};
use crate::writer::{Queued, Ticket, Writer};

/// How long the quorum may take to come up.
const START_WITHIN: Duration = Duration::from_secs(60);

/// How a directory is kept.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where log, snapshot and identity lie.
    pub data_dir: PathBuf,
    /// The cluster that the data directory must belong to; a new directory joins it, or founds one when none is given.
    pub cluster: Option<ClusterId>,
    /// Commands that may wait; beyond it they are refused at once.
    pub queue: usize,
    /// How long a worker's lease is held after a sign of life.
    pub lease: Duration,
    /// How often leases are renewed and ended.
    pub tick: Duration,
    /// A snapshot is written after so many entries.
    pub snapshot_entries: u64,
    /// A snapshot is written after so many bytes of log.
    pub snapshot_bytes: u64,
}

impl Options {
    /// The defaults, in `data_dir`.
    pub fn new(data_dir: impl Into<PathBuf>) -> Self {
        Self {
            data_dir: data_dir.into(),
            cluster: None,
            queue: 4_096,
            lease: Duration::from_secs(15),
            tick: Duration::from_secs(1),
            snapshot_entries: 50_000,
            snapshot_bytes: 64 << 20,
        }
    }
}

/// What the directory's tasks share.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) publisher: Arc<Publisher>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) reports: Reports,
    pub(crate) log: LogStore,
    queue: Mutex<Option<mpsc::Sender<Queued>>>,
    capacity: usize,
}

impl Inner {
    pub(crate) fn submit(&self, command: Command) -> Result<Ticket, SubmitError> {
        let (answer, ticket) = oneshot::channel();
        let queued = Queued { command, answer };
        let sent = match &*self.queue.lock().unwrap_or_else(PoisonError::into_inner) {
            None => Err(SubmitError::Closed),
            Some(queue) => queue.try_send(queued).map_err(|error| match error {
                mpsc::error::TrySendError::Full(_) => SubmitError::QueueFull,
                mpsc::error::TrySendError::Closed(_) => SubmitError::Closed,
            }),
        };
        sent.map(|()| Ticket(ticket)).inspect_err(|error| self.counters.failed(*error))
    }

    fn depth(&self) -> u64 {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.as_ref().map_or(0, |queue| (self.capacity - queue.capacity()) as u64)
    }
}

/// A node of the quorum that runs the ledger. Cheap to share behind an `Arc`; close it before the runtime ends.
#[derive(Debug)]
pub struct Directory {
    inner: Arc<Inner>,
    raft: Raft<Types, Machine>,
    lease: Duration,
    cluster: ClusterId,
    tasks: Mutex<Vec<JoinHandle<()>>>,
    writer: Mutex<Option<JoinHandle<()>>>,
    _folder: NodeFolder,
}

impl Directory {
    /// Opens the data directory, reads snapshot and log, and comes up as a quorum of one.
    ///
    /// Fails closed when anything that was written is not there or not readable.
    pub async fn open(options: Options) -> Result<Self, OwnershipError> {
        let folder = NodeFolder::open(&options.data_dir, options.cluster)?;
        let snapshots = SnapshotFile::at(folder.path("snapshot"), folder.identity.cluster);
        let log = LogStore::open(&folder)?;
        let snapshot_at = check_snapshot(&snapshots, &log, &folder)?;
        let (publisher, counters) = (Arc::<Publisher>::default(), Arc::<Counters>::default());
        let machine = Machine::new(snapshots, publisher.clone(), counters.clone());
        let node = folder.identity.node;
        let raft = start(node, log.clone(), machine).await?;
        let clock = LeaderClock::take_office(publisher.view().now(), Instant::now());
        let clock = Arc::new(Mutex::new(clock));
        let capacity = options.queue.max(1);
        let (queue, queued) = mpsc::channel(capacity);
        let writer = Writer::new(raft.clone(), clock.clone(), counters.clone(), node);
        let writer = tokio::spawn(writer.run(queued));
        let queue = Mutex::new(Some(queue));
        let inner = Inner { publisher, counters, reports: Reports::default(), log, queue, capacity };
        let inner = Arc::new(inner);
        let lease = options.lease;
        let snapshot_bytes = inner.log.bytes();
        let ticker = Ticker { inner: inner.clone(), raft: raft.clone(), clock, options, snapshot_at, snapshot_bytes };
        let tasks = vec![tokio::spawn(watch_quorum(raft.clone(), inner.clone())), tokio::spawn(ticker.run())];
        let cluster = folder.identity.cluster;
        let (tasks, writer) = (Mutex::new(tasks), Mutex::new(Some(writer)));
        Ok(Self { inner, raft, lease, cluster, tasks, writer, _folder: folder })
    }

    /// The ledger as this node last applied it.
    pub fn view(&self) -> Arc<View> {
        self.inner.publisher.view()
    }

    /// Sends a command on its way. Never waits; the ticket resolves once the command is durable and applied, and the
    /// view shows it then.
    pub fn submit(&self, command: Command) -> Result<Ticket, SubmitError> {
        self.inner.submit(command)
    }

    /// Notes that a router reached this life of a worker; goes out with the next tick. False when too many are noted.
    pub fn report_alive(&self, worker: WorkerId, incarnation: Incarnation) -> bool {
        self.inner.reports.note(worker, incarnation)
    }

    /// How long a lease is held after a sign of life: the `ttl` for registering workers.
    pub fn lease(&self) -> Duration {
        self.lease
    }

    pub(crate) fn raft(&self) -> &Raft<Types, Machine> {
        &self.raft
    }

    /// The cluster that this node belongs to.
    pub fn cluster(&self) -> ClusterId {
        self.cluster
    }

    /// This node.
    pub fn node(&self) -> NodeId {
        NodeId(*self.raft.node_id())
    }

    /// Counters and gauges.
    pub fn readings(&self) -> Readings {
        let last = self.inner.log.bounds().map_or(0, |(_, last)| last);
        Readings {
            queue_depth: self.inner.depth(),
            apply_lag: last.saturating_sub(self.view().applied()),
            log_bytes: self.inner.log.bytes(),
            ..self.inner.counters.read()
        }
    }

    /// Writes a snapshot now and waits for it.
    pub async fn snapshot(&self) -> Result<(), OwnershipError> {
        let quorum = |error: &dyn std::fmt::Display| OwnershipError::Quorum(error.to_string());
        let applied = self.raft.metrics().borrow_watched().last_applied;
        self.raft.trigger().snapshot().await.map_err(|error| quorum(&error))?;
        let Some(applied) = applied else { return Ok(()) };
        let wait = self.raft.wait(Some(START_WITHIN));
        let written = wait.metrics(|metrics| metrics.snapshot >= Some(applied), "a snapshot").await;
        written.map(drop).map_err(|error| quorum(&error))
    }

    /// Takes no more commands, answers those that were taken, and stops.
    pub async fn close(&self) -> Result<(), OwnershipError> {
        drop(self.inner.queue.lock().unwrap_or_else(PoisonError::into_inner).take());
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(writer) = writer {
            // A writer that panicked has dropped its tickets, which says enough.
            drop(writer.await);
        }
        for task in self.tasks.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            task.abort();
        }
        self.raft.shutdown().await.map_err(|error| OwnershipError::Quorum(error.to_string()))?;
        let mark = self.inner.log.mark()?;
        mark.sync_data().map_err(OwnershipError::io("committed"))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        for task in self.tasks.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            task.abort();
        }
    }
}

/// What was purged from the log must be in the snapshot. Returns the snapshot's index.
fn check_snapshot(snapshots: &SnapshotFile, log: &LogStore, folder: &NodeFolder) -> Result<u64, OwnershipError> {
    let path = folder.path("snapshot");
    let (purged, _) = log.bounds().map_err(OwnershipError::io(folder.path("log")))?;
    let upto = snapshots.meta()?.and_then(|meta| meta.last_log_id).map_or(0, |id| id.index);
    if upto < purged {
        let detail = format!("it ends at entry {upto}, but the log was purged up to entry {purged}");
        return Err(OwnershipError::Damaged { path, detail });
    }
    Ok(upto)
}

/// Starts Raft, founds the quorum where there is none, and waits until everything committed is applied.
async fn start(node: NodeId, log: LogStore, machine: Machine) -> Result<Raft<Types, Machine>, OwnershipError> {
    let quorum = |error: &dyn std::fmt::Display| OwnershipError::Quorum(error.to_string());
    let config = Config {
        cluster_name: "ownerserve".into(),
        heartbeat_interval: 500,
        election_timeout_min: 1_500,
        election_timeout_max: 3_500,
        snapshot_policy: SnapshotPolicy::Never,
        max_in_snapshot_log_to_keep: 1_000,
        ..Config::default()
    };
    let config = Arc::new(config.validate().map_err(|error| quorum(&error))?);
    let raft = Raft::new(node.0, config, Alone, log, machine).await.map_err(|error| quorum(&error))?;
    if raft.is_initialized().await.map_err(|error| quorum(&error))? {
        // Alone there is no one to wait for.
        raft.trigger().elect(false).await.map_err(|error| quorum(&error))?;
    } else {
        let members = std::collections::BTreeMap::from([(node.0, BasicNode::default())]);
        raft.initialize(members).await.map_err(|error| quorum(&error))?;
    }
    let wait = raft.wait(Some(START_WITHIN));
    wait.current_leader(node.0, "a leader").await.map_err(|error| quorum(&error))?;
    raft.wait_for_recovery(Some(START_WITHIN)).await.map_err(|error| quorum(&error))?;
    Ok(raft)
}

/// Keeps the view's word on the quorum true.
async fn watch_quorum(raft: Raft<Types, Machine>, inner: Arc<Inner>) {
    let mut metrics = raft.metrics();
    loop {
        let quorum = {
            let now = metrics.borrow_watched();
            let stale = now.current_leader.is_none() || now.running_state.is_err();
            Quorum { term: now.current_term, leader: now.current_leader.map(NodeId), stale }
        };
        inner.publisher.quorum(quorum);
        if metrics.changed().await.is_err() {
            inner.publisher.quorum(Quorum { leader: None, stale: true, ..quorum });
            return;
        }
    }
}
