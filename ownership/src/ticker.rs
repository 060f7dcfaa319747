//! What happens once a tick: leases renewed and ended, the mark made durable, snapshots asked for.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use consensus::{LeaderClock, expiries, renewal};
use ledger::{Command, Outcome};
use openraft::Raft;
use vocabulary::{Incarnation, Micros, WorkerId};

use crate::directory::{Inner, Options};
use crate::raft::{Machine, Types};

/// Workers that may be reported between two ticks.
const MAX_REPORTS: usize = 4_096;

/// Signs of life since the last tick.
#[derive(Debug, Default)]
pub(crate) struct Reports(Mutex<BTreeMap<WorkerId, Incarnation>>);

impl Reports {
    /// Notes that a life of a worker was reached; the one that was noted last counts. False when too many are noted already.
    pub(crate) fn note(&self, worker: WorkerId, incarnation: Incarnation) -> bool {
        let mut reports = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if reports.len() >= MAX_REPORTS && !reports.contains_key(&worker) {
            return false;
        }
        reports.insert(worker, incarnation);
        true
    }

    fn take(&self) -> Vec<(WorkerId, Incarnation)> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner)).into_iter().collect()
    }
}

/// The one task that acts by itself.
pub(crate) struct Ticker {
    pub(crate) inner: Arc<Inner>,
    pub(crate) raft: Raft<Types, Machine>,
    pub(crate) clock: Arc<Mutex<LeaderClock>>,
    pub(crate) options: Options,
    pub(crate) snapshot_at: u64,
    pub(crate) snapshot_bytes: u64,
}

impl Ticker {
    /// Runs until it is aborted.
    pub(crate) async fn run(mut self) {
        let first = tokio::time::Instant::now() + self.options.tick;
        let mut ticks = tokio::time::interval_at(first, self.options.tick);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.renew();
            self.expire();
            self.sync_mark().await;
            self.snapshot().await;
        }
    }

    fn renew(&self) {
        let view = self.inner.publisher.view();
        let lease = Micros::of(self.options.lease);
        let Some(renewal) = renewal(&view, self.inner.reports.take(), lease) else { return };
        if let Err(error) = self.inner.submit(renewal) {
            tracing::warn!(%error, "leases could not be renewed this tick");
        }
    }

    fn expire(&self) {
        let in_office = self.clock.lock().unwrap_or_else(PoisonError::into_inner).in_office();
        let view = self.inner.publisher.view();
        for expire in expiries(&view, in_office, Micros::of(self.options.lease)) {
            let Ok(ticket) = self.inner.submit(Command::Expire(expire)) else { return };
            let (inner, worker) = (self.inner.clone(), expire.worker);
            tokio::spawn(async move {
                if ticket.await == Ok(Outcome::Done) {
                    inner.counters.lease_ended();
                    tracing::warn!(%worker, "lease ended: no router reached this process");
                }
            });
        }
    }

    async fn sync_mark(&self) {
        let Ok(mark) = self.inner.log.mark() else { return };
        let synced = tokio::task::spawn_blocking(move || mark.sync_data()).await;
        if let Ok(Err(error)) = synced {
            tracing::error!(%error, "the committed mark could not be made durable");
        }
    }

    /// Asks for a snapshot after so many entries or so many bytes.
    async fn snapshot(&mut self) {
        let applied = self.inner.publisher.view().applied();
        let bytes = self.inner.log.bytes();
        // A purge since then gave bytes back.
        self.snapshot_bytes = self.snapshot_bytes.min(bytes);
        let entries_due = applied >= self.snapshot_at.saturating_add(self.options.snapshot_entries);
        let bytes_due = bytes >= self.snapshot_bytes.saturating_add(self.options.snapshot_bytes);
        if !entries_due && !bytes_due {
            return;
        }
        if let Err(error) = self.raft.trigger().snapshot().await {
            tracing::error!(%error, "no snapshot could be asked for");
            return;
        }
        self.inner.counters.snapshot_asked();
        (self.snapshot_at, self.snapshot_bytes) = (applied, bytes);
    }
}
