//! Maintenance of a node: renews and expires leases, makes the marks durable, triggers snapshots.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use consensus::{StalledChangeDetector, expiries, limit_widening, renewal};
use ledger::{Command, Outcome};
use openraft::ChangeMembers;
use openraft::async_runtime::watch::WatchReceiver;
use vocabulary::{Incarnation, Micros, NodeId, WorkerId};

use crate::node_core::NodeCore;
use crate::node_options::Options;
use crate::peers::{Lane, PeerMethod};

/// How long the leader may take to accept this node's reports.
const REPORT_TIMEOUT: Duration = Duration::from_secs(2);

/// The node's periodic maintenance.
pub(crate) struct MaintenanceTask {
    pub(crate) core: Arc<NodeCore>,
    pub(crate) options: Options,
    pub(crate) snapshot_at: u64,
    pub(crate) snapshot_bytes: u64,
    pub(crate) pending_change: StalledChangeDetector,
}

impl MaintenanceTask {
    /// Runs until it is aborted.
    pub(crate) async fn run(mut self) {
        let first = tokio::time::Instant::now() + self.options.tick;
        let mut ticks = tokio::time::interval_at(first, self.options.tick);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            match self.core.time_leading() {
                Some(time_leading) => {
                    self.renew();
                    self.expire(time_leading);
                    self.widen_limits();
                    self.finish_voter_change();
                }
                None => {
                    self.pending_change = StalledChangeDetector::default();
                    self.report_to_leader();
                }
            }
            self.sync_mark().await;
            self.snapshot().await;
        }
    }

    fn renew(&self) {
        let view = self.core.view();
        let lease = Micros::of(self.options.lease);
        let renew = |alive| match renewal(&view, alive, lease) {
            Some(renewal) => self.core.submit(renewal).map(drop),
            None => Ok(()),
        };
        if let Err(error) = self.core.reports.send_with(renew) {
            tracing::warn!(%error, "leases could not be renewed this tick; the next one renews them");
        }
    }

    fn expire(&self, time_leading: Micros) {
        let view = self.core.view();
        let lease = self.options.lease;
        let expired =
            self.core.reports.veto_recently_reached(expiries(&view, time_leading, Micros::of(lease)), &view, lease);
        for expire in expired {
            let Ok(ticket) = self.core.submit(Command::ExpireLease(expire)) else { return };
            let (core, worker) = (self.core.clone(), expire.worker);
            tokio::spawn(async move {
                if ticket.await == Ok(Outcome::Done) {
                    core.counters().record_lease_end();
                    tracing::warn!(%worker, "a worker's lease expired: no router reached the worker in time");
                }
            });
        }
    }

    /// Requests the configured limits until the ledger has them.
    fn widen_limits(&self) {
        let Some(command) = limit_widening(&self.core.view(), self.options.desired_limits) else { return };
        if let Err(error) = self.core.submit(command) {
            tracing::warn!(%error, "the ledger's bounds could not be widened this tick");
        }
    }

    /// Finishes a voter change that a lost leader, or one that gave up, left incomplete.
    fn finish_voter_change(&mut self) {
        let metrics = self.core.raft.metrics().borrow_watched().clone();
        let joint =
            self.pending_change.voters_to_finish(&metrics.membership_config, &metrics.committed_membership_config);
        let Some(voters) = joint else { return };
        let core = self.core.clone();
        tokio::spawn(async move {
            tracing::info!(?voters, "a change of the voters was left half done; this leader finishes it");
            let finished = core.raft.change_membership(ChangeMembers::ReplaceAllVoters(voters), true).await;
            if let Err(error) = finished {
                tracing::warn!(%error, "the change could not be finished; the next tick tries again");
            }
        });
    }

    /// Reports the workers that this node's router reached to the leader, which makes one renewal of all nodes'
    /// reports.
    fn report_to_leader(&self) {
        let leader = self.core.known_leader();
        let Some(leader) = leader.filter(|leader| *leader != self.core.node()) else { return };
        let alive = self.core.reports.take();
        if !alive.is_empty() {
            tokio::spawn(send_report(self.core.clone(), leader, alive));
        }
    }

    async fn sync_mark(&self) {
        let Ok(mark) = self.core.log.marks_sync_handle() else { return };
        let synced = tokio::task::spawn_blocking(move || mark.sync_data()).await;
        if let Ok(Err(error)) = synced {
            tracing::error!(%error, "the committed mark could not be made durable");
        }
    }

    /// Triggers a snapshot after enough entries or enough bytes.
    async fn snapshot(&mut self) {
        let applied = self.core.view().applied();
        let bytes = self.core.log.bytes();
        // A purge since then may have shrunk the log.
        self.snapshot_bytes = self.snapshot_bytes.min(bytes);
        let entries_due = applied >= self.snapshot_at.saturating_add(self.options.snapshot_entries);
        let bytes_due = bytes >= self.snapshot_bytes.saturating_add(self.options.snapshot_bytes);
        if !entries_due && !bytes_due {
            return;
        }
        if let Err(error) = self.core.raft.trigger().snapshot().await {
            tracing::error!(%error, "no snapshot could be asked for");
            return;
        }
        self.core.counters().record_snapshot_request();
        (self.snapshot_at, self.snapshot_bytes) = (applied, bytes);
    }
}

async fn send_report(core: Arc<NodeCore>, leader: NodeId, alive: Vec<(WorkerId, Incarnation)>) {
    let question = Bytes::from(rmp_serde::to_vec(&alive).expect("plain values encode"));
    let response = core.registry.link(leader, Lane::Call).call(PeerMethod::Alive, question, REPORT_TIMEOUT).await;
    if let Err(error) = response {
        tracing::debug!(%leader, %error, "the leader was not told which workers were reached; next tick again");
        core.reports.requeue(alive);
    }
}
