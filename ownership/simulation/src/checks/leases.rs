//! No lease ends early on the holder's clock, whoever leads meanwhile.
//!
//! A holder is promised its lease from the moment at which a leader noted that it lives, or proposed the entry that
//! grants or renews it. A note that a leader took after somebody else had taken office, or after it had proposed the end
//! of the lease, promises nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use ledger::{Command, Entry, Outcome};
use vocabulary::{Incarnation, LedgerTime, WorkerId};

use crate::book::Checked;
use crate::checks::order::Leadership;
use crate::ensure;
use crate::node::LEASE;
use crate::runtime::true_time;

const BORROWED: &str = "the ledger's clock keeps up with its leader's";
const EARLY: &str = "no lease ends early on the holder's clock";

type Life = (WorkerId, Incarnation);

#[derive(Debug, Default)]
pub(crate) struct Leases {
    /// When entries with this time were proposed: the first of them.
    proposed: BTreeMap<LedgerTime, Duration>,
    /// The highest office that anybody took.
    office: Leadership,
    promised: BTreeMap<Life, Duration>,
    lives: BTreeMap<WorkerId, Incarnation>,
    ending: BTreeSet<WorkerId>,
    /// When the entry that is being applied was proposed.
    entry: Option<Duration>,
}

/// The shortest true time that a lease may last: a leader's clock may run fast, by 2 % at most.
fn shortest() -> Duration {
    LEASE.mul_f64(0.97)
}

impl Leases {
    pub(crate) fn proposed(&mut self, time: LedgerTime, office: Leadership) {
        self.office = self.office.max(office);
        self.proposed.entry(time).or_insert_with(true_time);
    }

    pub(crate) fn reported(&mut self, life: Life, office: Leadership) {
        if office >= self.office && !self.ending.contains(&life.0) {
            self.promise(life, true_time());
        }
    }

    pub(crate) fn ending(&mut self, worker: WorkerId) {
        self.ending.insert(worker);
    }

    fn promise(&mut self, life: Life, since: Duration) {
        let until = since + shortest();
        let promised = self.promised.entry(life).or_insert(until);
        *promised = until.max(*promised);
    }

    /// An entry is applied for the first time, and brings the ledger's clock to `now`. Behind the leader's clock, it
    /// would catch up later, faster than time passes, and whatever is granted here would end early.
    pub(crate) fn applying(&mut self, entry: &Entry, now: LedgerTime) -> Checked {
        self.entry = self.proposed.get(&entry.time).copied();
        ensure!(entry.time <= now, BORROWED, "an entry of {} is applied at {now}", entry.time)
    }

    pub(crate) fn applied(&mut self, command: &Command, outcome: &Outcome) -> Checked {
        match (command, outcome) {
            (Command::RegisterWorker(worker), Outcome::Granted { .. }) => {
                self.lives.insert(worker.worker, worker.incarnation);
                if worker.ttl.duration() >= LEASE {
                    self.renew((worker.worker, worker.incarnation));
                }
            }
            (Command::RenewLease(renewal), Outcome::Renewed { refused, .. }) => {
                let renewed = renewal.alive.iter().filter(|(worker, _)| !refused.contains(worker));
                renewed.for_each(|life| self.renew(*life));
            }
            (Command::Expire(expire), Outcome::Done) => return self.ended(expire.worker),
            _ => {}
        }
        Ok(())
    }

    fn renew(&mut self, life: Life) {
        self.ending.remove(&life.0);
        if let Some(since) = self.entry {
            self.promise(life, since);
        }
    }

    fn ended(&self, worker: WorkerId) -> Checked {
        let life = self.lives.get(&worker).map(|incarnation| (worker, *incarnation));
        let promised = life.and_then(|life| self.promised.get(&life)).copied().unwrap_or_default();
        let now = true_time();
        ensure!(promised <= now, EARLY, "{worker} was promised its lease until {promised:?}, it ended at {now:?}")
    }
}
