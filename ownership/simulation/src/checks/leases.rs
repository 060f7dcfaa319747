//! No lease ends early on the holder's clock, whoever leads meanwhile.
//!
//! A holder is promised its lease from the moment when a leader recorded a liveness report, or proposed the entry that
//! grants or renews the lease. A report that a leader recorded after another leader's term had begun, or after the
//! expiry was proposed, promises nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use ledger::{Command, LedgerEntry, Outcome};
use vocabulary::{Incarnation, LedgerTime, WorkerId};

use crate::checks::log_order::TermLeader;
use crate::ensure;
use crate::property::PropertyResult;
use crate::run_plan::LEASE;
use crate::runtime::true_time;

const BORROWED: &str = "the ledger's clock keeps up with its leader's";
const EARLY: &str = "no lease ends early on the holder's clock";

type LeaseHolder = (WorkerId, Incarnation);

#[derive(Debug, Default)]
pub(crate) struct LeaseExpiryCheck {
    /// When the first entry with this time was proposed.
    proposed_at: BTreeMap<LedgerTime, Duration>,
    /// Highest leadership so far.
    leadership: TermLeader,
    promised_until: BTreeMap<LeaseHolder, Duration>,
    incarnations: BTreeMap<WorkerId, Incarnation>,
    ending: BTreeSet<WorkerId>,
    /// When the entry that is being applied was proposed.
    entry_proposed_at: Option<Duration>,
}

/// Returns the minimum true duration of a lease: a leader's clock may be fast by at most 2 %.
fn min_lease() -> Duration {
    LEASE.mul_f64(0.97)
}

impl LeaseExpiryCheck {
    pub(crate) fn on_entry_proposed(&mut self, time: LedgerTime, term_leader: TermLeader) {
        self.leadership = self.leadership.max(term_leader);
        self.proposed_at.entry(time).or_insert_with(true_time);
    }

    pub(crate) fn on_liveness_report(&mut self, holder: LeaseHolder, term_leader: TermLeader) {
        if term_leader >= self.leadership && !self.ending.contains(&holder.0) {
            self.extend_promise(holder, true_time());
        }
    }

    pub(crate) fn on_expiry_proposed(&mut self, worker: WorkerId) {
        self.ending.insert(worker);
    }

    fn extend_promise(&mut self, holder: LeaseHolder, since: Duration) {
        let until = since + min_lease();
        let promised = self.promised_until.entry(holder).or_insert(until);
        *promised = until.max(*promised);
    }

    /// Called before an entry is applied for the first time, when the ledger's clock will be `now`. If the ledger's
    /// clock were behind the leader's, it would catch up faster than time passes, and leases granted here would end
    /// early.
    pub(crate) fn before_apply(&mut self, entry: &LedgerEntry, now: LedgerTime) -> PropertyResult {
        self.entry_proposed_at = self.proposed_at.get(&entry.time).copied();
        ensure!(entry.time <= now, BORROWED, "an entry of {} is applied at {now}", entry.time)
    }

    pub(crate) fn on_applied(&mut self, command: &Command, outcome: &Outcome) -> PropertyResult {
        match (command, outcome) {
            (Command::RegisterWorker(worker), Outcome::Granted { .. }) => {
                self.incarnations.insert(worker.worker, worker.incarnation);
                if worker.ttl.duration() >= LEASE {
                    self.renew((worker.worker, worker.incarnation));
                }
            }
            (Command::RenewLease(renewal), Outcome::Renewed { refused, .. }) => {
                let renewed = renewal.alive.iter().filter(|(worker, _)| !refused.contains(worker));
                renewed.for_each(|life| self.renew(*life));
            }
            (Command::ExpireLease(expire), Outcome::Done) => return self.check_expiry(expire.worker),
            _ => {}
        }
        Ok(())
    }

    fn renew(&mut self, holder: LeaseHolder) {
        self.ending.remove(&holder.0);
        if let Some(since) = self.entry_proposed_at {
            self.extend_promise(holder, since);
        }
    }

    fn check_expiry(&self, worker: WorkerId) -> PropertyResult {
        let life = self.incarnations.get(&worker).map(|incarnation| (worker, *incarnation));
        let promised = life.and_then(|life| self.promised_until.get(&life)).copied().unwrap_or_default();
        let now = true_time();
        ensure!(promised <= now, EARLY, "{worker} was promised its lease until {promised:?}, it ended at {now:?}")
    }
}
