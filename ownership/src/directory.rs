//! The directory: a node of the quorum, its view, and the way to write.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use consensus::{ChangeStream, CompactedRevision, Consistency, LedgerView};
use futures::future::BoxFuture;
use ledger::Command;
use openraft::Raft;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::metrics::WaitError;
use parking_lot::Mutex;
use tokio::sync::Mutex as AsyncMutex;
use tokio::task::JoinHandle;
use vocabulary::{Incarnation, NodeId, WorkerId};

use crate::counters::DirectoryStats;
use crate::error::{OwnershipError, SubmitError};
use crate::failure::start_failure;
use crate::leader_call;
use crate::members::{self, ClusterMember, MemberChange, MemberError};
use crate::node_core::NodeCore;
use crate::node_folder::{ClusterId, NodeFolder};
use crate::options::Options;
use crate::peers::socket::DialPolicy as _;
use crate::peers::{AbortingTask, PeerService, PeerTls, Peers, Topic};
use crate::raft::{NodeStateMachine, TokioTypeConfig};
use crate::read::{self, ReadError};
use crate::startup::{self, START_TIMEOUT, StartedNode};
use crate::supervision::Supervision;
use crate::writer::{CommandTicket, CommandWriter};

/// How long a leader that closes waits for another one to take over.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(3);

/// How long a node that closes waits for the commands that it took: the other nodes may be ending as well.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

/// How long a snapshot is waited for before it is asked for once more.
const SNAPSHOT_RETRY_DELAY: Duration = Duration::from_millis(200);

/// A node of the quorum that runs the ledger. Cheap to share behind an `Arc`; close it before the runtime ends.
#[derive(Debug)]
pub struct Directory {
    core: Arc<NodeCore>,
    peers: Peers,
    lease: Duration,
    tasks: Mutex<Vec<AbortingTask>>,
    writer: Mutex<Option<JoinHandle<()>>>,
    _folder: NodeFolder,
}

// Futures that reach into Raft are boxed: else all of it is compiled once more in each crate and test that awaits one.
impl Directory {
    /// Opens the data directory, reads snapshot and log, and comes up: alone as a quorum of one, else as the member
    /// that it was, or as a new learner of the cluster that it was told to join.
    ///
    /// Fails closed when anything that was written is not there or not readable.
    pub fn open(options: Options) -> BoxFuture<'static, Result<Self, OwnershipError>> {
        Box::pin(Self::open_node(options))
    }

    async fn open_node(options: Options) -> Result<Self, OwnershipError> {
        let StartedNode { core, folder, mut tasks, queue, address } = startup::start(&options).await?;
        let (writing, queue, within) = (core.clone(), Arc::new(AsyncMutex::new(queue)), options.submit_timeout);
        let writer = core.supervision.supervise("writer", move || {
            let (core, queue) = (writing.clone(), queue.clone());
            // What it had on its way is answered as unknown; it writes on as a new client.
            async move { CommandWriter::new(core, within).run(&mut *queue.lock().await).await }
        });
        startup::raise_level_of_new_cluster(&core, &options).await.map_err(|error| start_failure(&core, error))?;
        if let Some(address) = address {
            let settled = startup::await_membership(&core, address, &options).await;
            tasks.extend(settled.map_err(|error| start_failure(&core, error))?);
        }
        let peers = Peers { registry: core.registry.clone() };
        let (tasks, writer) = (Mutex::new(tasks), Mutex::new(Some(writer)));
        Ok(Self { core, peers, lease: options.lease, tasks, writer, _folder: folder })
    }

    /// The ledger as this node last applied it.
    pub fn view(&self) -> Arc<LedgerView> {
        self.core.view()
    }

    /// The ledger as fresh as asked; waits for the quorum where needed.
    pub fn read(&self, consistency: Consistency) -> BoxFuture<'_, Result<Arc<LedgerView>, ReadError>> {
        Box::pin(read::fresh_view(&self.core, consistency))
    }

    /// How old the view may be at most: everything that was acknowledged before is in it. None before the first
    /// contact with a quorum.
    pub fn staleness(&self) -> Option<Duration> {
        self.core.freshness.age()
    }

    /// Changes of the ledger as this node applies them, from the log index `from` on; in order and without a gap. A
    /// watch that broke is resumed with the revision that was seen last, on any node.
    pub fn watch(&self, from: u64) -> Result<ChangeStream, CompactedRevision> {
        self.core.observer.feed.watch(from)
    }

    /// Sends a command on its way. Never waits; the ticket resolves once the command is durable and applied, and the
    /// leader's view shows it then.
    pub fn submit(&self, command: Command) -> Result<CommandTicket, SubmitError> {
        self.core.submit(command)
    }

    /// Notes that a router reached this life of a worker; goes out with the next tick. False when too many are noted.
    pub fn report_alive(&self, worker: WorkerId, incarnation: Incarnation) -> bool {
        self.core.reports.record(worker, incarnation)
    }

    /// How long a lease is held after a sign of life: the `ttl` for registering workers.
    pub fn lease_duration(&self) -> Duration {
        self.lease
    }

    pub(crate) fn raft(&self) -> &Raft<TokioTypeConfig, NodeStateMachine> {
        &self.core.raft
    }

    pub(crate) fn core(&self) -> &Arc<NodeCore> {
        &self.core
    }

    /// The cluster that this node belongs to.
    pub fn cluster(&self) -> ClusterId {
        self.core.registry.own.cluster
    }

    /// This node.
    pub fn node(&self) -> NodeId {
        self.core.node()
    }

    /// Everybody who belongs to the cluster, as this node knows it.
    pub fn members(&self) -> Vec<ClusterMember> {
        members::list(&self.core)
    }

    /// Why this node could not talk with a member when it called it lately; none where it could, or did not call.
    pub fn last_dial_error(&self, node: NodeId) -> Option<String> {
        self.core.registry.last_dial_error(node)
    }

    /// Makes voters of learners, all in one step. A cluster has 1, 3 or 5 voters.
    pub async fn promote(&self, nodes: impl IntoIterator<Item = NodeId>) -> Result<(), MemberError> {
        self.change_members(MemberChange::Promote(nodes.into_iter().collect())).await
    }

    /// Makes learners of voters, all in one step.
    pub async fn demote(&self, nodes: impl IntoIterator<Item = NodeId>) -> Result<(), MemberError> {
        self.change_members(MemberChange::Demote(nodes.into_iter().collect::<BTreeSet<_>>())).await
    }

    /// Puts a learner in a voter's place, in one step.
    pub async fn replace(&self, old: NodeId, new: NodeId) -> Result<(), MemberError> {
        self.change_members(MemberChange::Replace { old, new }).await
    }

    /// Takes a learner out of the cluster for good.
    pub async fn remove(&self, node: NodeId) -> Result<(), MemberError> {
        self.change_members(MemberChange::Remove(node)).await
    }

    /// Lets another voter lead.
    pub async fn transfer_leader(&self, node: NodeId) -> Result<(), MemberError> {
        self.change_members(MemberChange::TransferLeader(node)).await
    }

    /// Raises the cluster's feature level, once every member's binary can work at it.
    pub async fn raise_level(&self, level: u32) -> Result<(), MemberError> {
        self.change_members(MemberChange::RaiseLevel(level)).await
    }

    /// Carries out a change of the membership at the leader, wherever it is.
    pub fn change_members(&self, change: MemberChange) -> BoxFuture<'_, Result<(), MemberError>> {
        Box::pin(leader_call::change_members(&self.core, change))
    }

    /// The other nodes, for what routers tell each other outside Raft.
    pub fn peers(&self) -> &Peers {
        &self.peers
    }

    /// Answers other nodes' calls on a topic from now on.
    pub fn serve_peers(&self, topic: Topic, service: Arc<dyn PeerService>) {
        self.core.registry.register_service(topic, service);
    }

    /// Reads the files of `PeerOptions::tls` anew, for connections from now on; nothing to do without it. What cannot be used,
    /// or would be refused by the others, is said, and what was read before stays.
    pub fn reload_certificates(&self) -> Result<(), OwnershipError> {
        self.core.registry.tls().map_or(Ok(()), PeerTls::reload)
    }

    /// Whether this node was removed from the cluster: then it only has its last view.
    pub fn is_removed(&self) -> bool {
        self.core.registry.is_retired()
    }

    /// What runs as long as this node does, and is begun anew when it ends too early.
    pub fn supervision(&self) -> &Arc<Supervision> {
        &self.core.supervision
    }

    /// What this node's files and threads had to wait for lately: file handles, memory or threads that the process lacks. Its
    /// ledger is whole, and goes on as soon as they are there.
    pub fn resource_shortage(&self) -> Option<String> {
        self.core.log.shortages().recent()
    }

    /// Counters and gauges.
    pub fn stats(&self) -> DirectoryStats {
        let last = self.core.log.bounds().map_or(0, |(_, last)| last);
        DirectoryStats {
            queue_depth: self.core.queue_depth(),
            apply_lag: last.saturating_sub(self.view().applied()),
            log_bytes: self.core.log.bytes(),
            tls_refusals: self.core.registry.failures.tls_refusals.count(),
            non_member_calls: self.core.registry.failures.non_member_calls.count(),
            shortage_retries: self.core.log.shortages().count(),
            tasks_ended: self.core.supervision.unexpected_ends(),
            implausible: self.core.registry.failures.implausible_messages.count(),
            ..self.core.counters().read()
        }
    }

    /// Writes a snapshot now and waits for it.
    pub fn write_snapshot(&self) -> BoxFuture<'_, Result<(), OwnershipError>> {
        Box::pin(self.write_and_await_snapshot())
    }

    async fn write_and_await_snapshot(&self) -> Result<(), OwnershipError> {
        let quorum = |error: &dyn std::fmt::Display| OwnershipError::Quorum(error.to_string());
        let raft = &self.core.raft;
        let Some(applied) = raft.metrics().borrow_watched().last_applied else { return Ok(()) };
        let until = Instant::now() + START_TIMEOUT;
        loop {
            // Raft takes no notice while it builds one, which may end before what is wanted here.
            raft.trigger().snapshot().await.map_err(|error| quorum(&error))?;
            let wait = raft.wait(Some(SNAPSHOT_RETRY_DELAY));
            match wait.metrics(|metrics| metrics.snapshot >= Some(applied), "a snapshot").await {
                Err(WaitError::Timeout(..)) if Instant::now() < until => {}
                written => return written.map(drop).map_err(|error| quorum(&error)),
            }
        }
    }

    /// Takes no more commands, lets another voter lead, answers the commands that were taken, and stops.
    pub fn close(&self) -> BoxFuture<'_, Result<(), OwnershipError>> {
        Box::pin(self.close_node())
    }

    async fn close_node(&self) -> Result<(), OwnershipError> {
        self.core.close_queue();
        if let Some(heir) = members::best_successor(&self.core) {
            let handed_over = leader_call::change_members(&self.core, MemberChange::TransferLeader(heir));
            let handed_over = tokio::time::timeout(TRANSFER_TIMEOUT, handed_over).await;
            if !matches!(handed_over, Ok(Ok(()))) {
                tracing::warn!(%heir, "nobody took over in time; the others will choose a leader by themselves");
            }
        }
        let writer = self.writer.lock().take();
        if let Some(mut writer) = writer {
            // A writer that panicked has dropped its tickets, which says enough. Without a quorum there are no answers.
            if tokio::time::timeout(ANSWER_TIMEOUT, &mut writer).await.is_err() {
                writer.abort();
                tracing::warn!("commands under way were not answered in time; whether they are done is not known");
            }
        }
        self.halt().await
    }

    /// Stops at once: commands under way are left unanswered, and no other leader is looked for.
    pub fn halt(&self) -> BoxFuture<'_, Result<(), OwnershipError>> {
        Box::pin(self.halt_node())
    }

    async fn halt_node(&self) -> Result<(), OwnershipError> {
        self.core.close_queue();
        self.core.log.shortages().stop_retrying();
        let writer = self.writer.lock().take().map(AbortingTask);
        let beside = std::mem::take(&mut *self.tasks.lock());
        for task in writer.into_iter().chain(beside) {
            task.abort_and_wait().await;
        }
        self.core.registry.close_links();
        self.core.raft.shutdown().await.map_err(|error| OwnershipError::Quorum(error.to_string()))?;
        let mark = self.core.log.marks_sync_handle()?;
        mark.sync_data().map_err(OwnershipError::io("committed"))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        drop(self.writer.lock().take().map(AbortingTask));
    }
}
