//! The directory: a node of the quorum, its read view, and the interface for writes.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use consensus::{ChangeStream, CompactedRevision, Consistency, LedgerView};
use futures::future::BoxFuture;
use ledger::{Command, Outcome};
use openraft::Raft;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::metrics::WaitError;
use parking_lot::Mutex;
use tokio::sync::Mutex as AsyncMutex;
use tokio::task::JoinHandle;
use vocabulary::{Incarnation, NodeId, WorkerId};

use crate::command_queue::{CommandTicket, OutcomeCallback};
use crate::command_writer::CommandWriter;
use crate::counters::LedgerNodeStats;
use crate::data_dir_watch::MAX_DETECTION_TIME;
use crate::error::{LedgerNodeError, SubmitError};
use crate::leader_call;
use crate::members::{self, ClusterMember, MemberChange, MemberError};
use crate::node_core::{NodeCore, start_failure};
use crate::node_folder::{ClusterId, NodeFolder};
use crate::node_observer::NodeStateMachine;
use crate::node_options::Options;
use crate::peers::socket::DialDelegate as _;
use crate::peers::{AbortingTask, ClusterPeers, PeerService, PeerTls, RouterTopic};
use crate::raft::TokioTypeConfig;
use crate::read::{self, ReadError};
use crate::startup::{self, START_TIMEOUT, StartedNode};
use crate::supervision::SupervisedTasks;

/// How long a closing leader waits for another one to take over.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(3);

/// How long a closing node waits for its accepted commands; the other nodes may be closing, too.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

/// How long to wait for a snapshot before it is requested again.
const SNAPSHOT_RETRY_DELAY: Duration = Duration::from_millis(200);

/// A node of the quorum that runs the ledger. Share it behind an `Arc`; close it before the runtime ends.
#[derive(Debug)]
pub struct OwnershipDirectory {
    core: Arc<NodeCore>,
    peers: ClusterPeers,
    lease: Duration,
    tasks: Mutex<Vec<AbortingTask>>,
    writer: Mutex<Option<JoinHandle<()>>>,
    _folder: NodeFolder,
}

// Futures that call Raft are boxed; otherwise Raft would be compiled again in each crate and test that awaits one.
impl OwnershipDirectory {
    /// Opens the data directory, reads snapshot and log, and starts the node: alone as a quorum of one, as the member
    /// that it was, or as a new learner of the cluster that it joins.
    ///
    /// Fails if anything that was written is missing or unreadable.
    pub fn open(options: Options) -> BoxFuture<'static, Result<Self, LedgerNodeError>> {
        Box::pin(Self::open_node(options))
    }

    async fn open_node(options: Options) -> Result<Self, LedgerNodeError> {
        let StartedNode { core, folder, mut tasks, queue, address } = startup::start(&options).await?;
        let (writing, queue, within) = (core.clone(), Arc::new(AsyncMutex::new(queue)), options.submit_timeout);
        let writer = core.supervision.supervise("writer", move || {
            let (core, queue) = (writing.clone(), queue.clone());
            // After a restart, commands in flight are answered as unknown, and writing continues as a new client.
            async move { CommandWriter::new(core, within).run(&mut *queue.lock().await).await }
        });
        startup::raise_level_of_new_cluster(&core, &options).await.map_err(|error| start_failure(&core, error))?;
        if let Some(address) = address {
            let settled = startup::await_membership(&core, address, &options).await;
            tasks.extend(settled.map_err(|error| start_failure(&core, error))?);
        }
        let peers = ClusterPeers { registry: core.registry.clone() };
        let (tasks, writer) = (Mutex::new(tasks), Mutex::new(Some(writer)));
        Ok(Self { core, peers, lease: options.lease, tasks, writer, _folder: folder })
    }

    /// Returns the ledger as this node last applied it.
    pub fn view(&self) -> Arc<LedgerView> {
        self.core.view()
    }

    /// Returns the ledger with the requested consistency; waits for the quorum if necessary.
    pub fn read(&self, consistency: Consistency) -> BoxFuture<'_, Result<Arc<LedgerView>, ReadError>> {
        Box::pin(read::fresh_view(&self.core, consistency))
    }

    /// Returns the maximum age of the view: it contains everything that was acknowledged before. `None` before the
    /// first contact with a quorum.
    pub fn staleness(&self) -> Option<Duration> {
        self.core.freshness.age()
    }

    /// Streams the changes of the ledger as this node applies them, from log index `from` on, in order and without
    /// gaps. A broken watch can be resumed on any node, from the last revision that was seen.
    pub fn watch(&self, from: u64) -> Result<ChangeStream, CompactedRevision> {
        self.core.observer.feed.watch(from)
    }

    /// Submits a command. Never waits; the ticket resolves once the command is durable, applied, and visible in the
    /// leader's view.
    pub fn submit(&self, command: Command) -> Result<CommandTicket, SubmitError> {
        self.core.submit(command)
    }

    /// Submits a command for which nobody waits. It is sent 20 ms after the last batch, with those that came meanwhile,
    /// because each batch costs every node a flush and messages. Calls `answer` once with the outcome, on the thread that
    /// learns it, which may be this one; it must not block.
    pub fn submit_in_background(
        &self,
        command: Command,
        answer: impl FnOnce(Result<Outcome, SubmitError>) + Send + Sync + 'static,
    ) {
        self.core.submit_in_background(command, OutcomeCallback::new(answer));
    }

    /// Records that a router reached this incarnation of a worker; it is reported with the next tick. Returns false if
    /// too many reports are pending.
    pub fn report_alive(&self, worker: WorkerId, incarnation: Incarnation) -> bool {
        self.core.reports.record(worker, incarnation)
    }

    /// Returns how long a lease is held after a liveness report: the `ttl` for registering workers.
    pub fn lease_duration(&self) -> Duration {
        self.lease
    }

    /// Returns the cause once this node's ledger has failed for good. Nothing is retried: the process should end, and
    /// be restarted when the cause is fixed. Acknowledged writes are on disk, unless its files were removed.
    pub async fn wait_for_failure(&self) -> LedgerNodeError {
        let (mut metrics, mut is_looked_at) = (self.raft().metrics(), false);
        loop {
            match self.core().final_error() {
                // A write may have failed because the folder is gone, before the periodic check noticed it.
                Some(LedgerNodeError::Failed(_)) if !is_looked_at => {
                    is_looked_at = true;
                    tokio::time::sleep(MAX_DETECTION_TIME).await;
                    continue;
                }
                Some(failed) => return failed,
                None => {}
            }
            if metrics.changed().await.is_err() {
                return LedgerNodeError::Failed("its task is gone".into());
            }
        }
    }

    /// Returns whether the data directory, or the log in it, was moved or removed while the node ran: it has left the
    /// quorum.
    pub fn is_folder_gone(&self) -> bool {
        self.core().folder_gone().is_some()
    }

    pub(crate) fn raft(&self) -> &Raft<TokioTypeConfig, NodeStateMachine> {
        &self.core.raft
    }

    pub(crate) fn core(&self) -> &Arc<NodeCore> {
        &self.core
    }

    /// Returns the cluster that this node belongs to.
    pub fn cluster(&self) -> ClusterId {
        self.core.registry.welcome.cluster
    }

    /// Returns this node's id.
    pub fn node(&self) -> NodeId {
        self.core.node()
    }

    /// Returns all members of the cluster, as this node knows them.
    pub fn members(&self) -> Vec<ClusterMember> {
        members::list(&self.core)
    }

    /// Returns why the last call to a member failed; `None` if it succeeded or there was no recent call.
    pub fn last_dial_error(&self, node: NodeId) -> Option<String> {
        self.core.registry.last_dial_error(node)
    }

    /// Makes learners voters, in one step. A cluster has 1, 3 or 5 voters.
    pub async fn promote(&self, nodes: impl IntoIterator<Item = NodeId>) -> Result<(), MemberError> {
        self.change_members(MemberChange::Promote(nodes.into_iter().collect())).await
    }

    /// Makes voters learners, in one step.
    pub async fn demote(&self, nodes: impl IntoIterator<Item = NodeId>) -> Result<(), MemberError> {
        self.change_members(MemberChange::Demote(nodes.into_iter().collect::<BTreeSet<_>>())).await
    }

    /// Replaces a voter by a learner, in one step.
    pub async fn replace(&self, old: NodeId, new: NodeId) -> Result<(), MemberError> {
        self.change_members(MemberChange::Replace { old, new }).await
    }

    /// Removes a learner from the cluster for good.
    pub async fn remove(&self, node: NodeId) -> Result<(), MemberError> {
        self.change_members(MemberChange::Remove(node)).await
    }

    /// Transfers the leadership to another voter.
    pub async fn transfer_leader(&self, node: NodeId) -> Result<(), MemberError> {
        self.change_members(MemberChange::TransferLeader(node)).await
    }

    /// Raises the cluster's feature level, if every member's release supports it.
    pub async fn raise_level(&self, level: u32) -> Result<(), MemberError> {
        self.change_members(MemberChange::RaiseLevel(level)).await
    }

    /// Carries out a membership change at the leader, whichever node that is.
    pub fn change_members(&self, change: MemberChange) -> BoxFuture<'_, Result<(), MemberError>> {
        Box::pin(leader_call::change_members(&self.core, change))
    }

    /// Returns the other nodes, for calls between routers outside Raft.
    pub fn peers(&self) -> &ClusterPeers {
        &self.peers
    }

    /// Registers the service that answers other nodes' calls on a topic.
    pub fn serve_peers(&self, topic: RouterTopic, service: Arc<dyn PeerService>) {
        self.core.registry.register_service(topic, service);
    }

    /// Reloads the files of `ClusterOptions::tls` for new connections; does nothing without TLS. If the files are
    /// unusable, or the other nodes would refuse them, it returns an error and keeps the old ones.
    pub fn reload_certificates(&self) -> Result<(), LedgerNodeError> {
        self.core.registry.tls().map_or(Ok(()), PeerTls::reload)
    }

    /// Returns whether this node was removed from the cluster. It then only has its last view.
    pub fn is_removed(&self) -> bool {
        self.core.registry.is_retired()
    }

    /// Returns the supervisor of the tasks that run as long as this node does.
    pub fn supervision(&self) -> &Arc<SupervisedTasks> {
        &self.core.supervision
    }

    /// Returns what this node's files and threads recently had to wait for: file descriptors, memory or threads that
    /// the process lacks. The ledger is intact and continues once they are available.
    pub fn resource_shortage(&self) -> Option<String> {
        self.core.log.shortages().recent()
    }

    /// Returns counters and gauges.
    pub fn stats(&self) -> LedgerNodeStats {
        let last = self.core.log.bounds().map_or(0, |(_, last)| last);
        LedgerNodeStats {
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
    pub fn write_snapshot(&self) -> BoxFuture<'_, Result<(), LedgerNodeError>> {
        Box::pin(self.write_and_await_snapshot())
    }

    async fn write_and_await_snapshot(&self) -> Result<(), LedgerNodeError> {
        let quorum = |error: &dyn std::fmt::Display| LedgerNodeError::Quorum(error.to_string());
        let raft = &self.core.raft;
        let Some(applied) = raft.metrics().borrow_watched().last_applied else { return Ok(()) };
        let until = Instant::now() + START_TIMEOUT;
        loop {
            // Raft ignores the trigger while it builds a snapshot, which may end before the requested entry.
            raft.trigger().snapshot().await.map_err(|error| quorum(&error))?;
            let wait = raft.wait(Some(SNAPSHOT_RETRY_DELAY));
            match wait.metrics(|metrics| metrics.snapshot >= Some(applied), "a snapshot").await {
                Err(WaitError::Timeout(..)) if Instant::now() < until => {}
                written => return written.map(drop).map_err(|error| quorum(&error)),
            }
        }
    }

    /// Closes the node: rejects new commands, transfers the leadership, answers the accepted commands, and stops.
    pub fn close(&self) -> BoxFuture<'_, Result<(), LedgerNodeError>> {
        Box::pin(self.close_node())
    }

    async fn close_node(&self) -> Result<(), LedgerNodeError> {
        self.core.close_queue();
        if let Some(heir) = members::best_successor(&self.core) {
            let handed_over = leader_call::change_members(&self.core, MemberChange::TransferLeader(heir));
            let handed_over = tokio::time::timeout(TRANSFER_TIMEOUT, handed_over).await;
            if !matches!(handed_over, Ok(Ok(()))) {
                tracing::warn!(successor = %heir, "no voter took over the leadership in time; the others elect a leader by themselves");
            }
        }
        let writer = self.writer.lock().take();
        if let Some(mut writer) = writer {
            // A writer that panicked has already dropped its tickets. Without a quorum there are no answers to wait
            // for.
            if tokio::time::timeout(ANSWER_TIMEOUT, &mut writer).await.is_err() {
                writer.abort();
                tracing::warn!("commands under way were not answered in time; whether they are done is not known");
            }
        }
        self.halt().await
    }

    /// Stops at once: commands in flight are not answered, and the leadership is not transferred.
    pub fn halt(&self) -> BoxFuture<'_, Result<(), LedgerNodeError>> {
        Box::pin(self.halt_node())
    }

    async fn halt_node(&self) -> Result<(), LedgerNodeError> {
        self.core.close_queue();
        self.core.log.shortages().stop_retrying();
        let writer = self.writer.lock().take().map(AbortingTask);
        let tasks = std::mem::take(&mut *self.tasks.lock());
        for task in writer.into_iter().chain(tasks) {
            task.abort_and_wait().await;
        }
        self.core.registry.close_links();
        self.core.raft.shutdown().await.map_err(|error| LedgerNodeError::Quorum(error.to_string()))?;
        let mark = self.core.log.marks_sync_handle()?;
        mark.sync_data().map_err(LedgerNodeError::io("committed"))
    }
}

impl Drop for OwnershipDirectory {
    fn drop(&mut self) {
        drop(self.writer.lock().take().map(AbortingTask));
    }
}
