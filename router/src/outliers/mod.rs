//! Outlier ejection: a worker whose requests fail takes none for a while; then a bounded number of trial requests finds out
//! whether it is well. Pure, and time is an argument; the edges are `blame` and `trials`.
//!
//! It only leaves workers out of plans, and never the last one that could serve: rather one that may be sick than none.
//! What probes say of health is theirs, and an unreachable worker is left out by that alone.

mod blame;
mod config;
mod trials;

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use strum::{AsRefStr, IntoStaticStr, VariantArray};
use vocabulary::{Health, Incarnation, Role, TenantId, WorkerId, WorkerView};

pub(crate) use blame::{Suspects, answered, failed, sick};
pub use config::OutlierConfig;
pub use trials::Trials;

/// Why a worker was ejected.
#[derive(Clone, Copy, PartialEq, Eq, Debug, AsRefStr, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum Cause {
    /// So many requests failed, one after another.
    #[strum(serialize = "consecutive_failures")]
    Consecutive,
    /// Too large a share of its requests failed.
    #[strum(serialize = "failure_percentage")]
    FailureRate,
    /// A trial request failed.
    #[strum(serialize = "trial_failed")]
    Trial,
}

/// A worker that is ejected, or on trial.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ejected {
    /// Why it was, the last time.
    pub cause: Cause,
    /// How often it was; less the longer it was well in between.
    pub times: u32,
    /// Until when.
    pub standing: Standing,
}

impl Ejected {
    /// Whether requests find out just now if it is well.
    pub fn is_on_trial(&self) -> bool {
        matches!(self.standing, Standing::Trial { .. })
    }

    /// How long until requests may find out, whatever became of those that are there.
    pub fn trial_in(&self, now: Instant) -> Duration {
        match self.standing {
            Standing::In => Duration::ZERO,
            Standing::Out { until } | Standing::Trial { until, .. } => until.saturating_duration_since(now),
        }
    }
}

/// Whether a worker takes requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Standing {
    /// It does.
    In,
    /// It does not, until then.
    Out {
        /// From then on trial requests may go there.
        until: Instant,
    },
    /// Half open: trial requests are there.
    Trial {
        /// How many.
        taken: u32,
        /// When the first of them was sent: what was asked before says nothing.
        since: Instant,
        /// From when on as many more may go, whatever became of these.
        until: Instant,
        /// Whether an answer to one of them has begun.
        heard: bool,
    },
}

/// Requests of this span of time and of the one before.
#[derive(Clone, Copy, Debug)]
struct Window {
    begun: Instant,
    /// Failed and all, now and before.
    counts: [(u32, u32); 2],
}

impl Window {
    fn note(&mut self, failures: u32, (interval, now): (Duration, Instant)) {
        let passed = now.saturating_duration_since(self.begun);
        if passed >= interval {
            let before = if passed < interval * 2 { self.counts[0] } else { (0, 0) };
            *self = Self { begun: now, counts: [(0, 0), before] };
        }
        let (failed, all) = &mut self.counts[0];
        (*failed, *all) = (failed.saturating_add(failures), all.saturating_add(1));
    }

    fn sum(&self) -> (u64, u64) {
        let [now, before] = self.counts;
        (u64::from(now.0) + u64::from(before.0), u64::from(now.1) + u64::from(before.1))
    }
}

/// What is known of one life of a worker.
#[derive(Debug)]
struct Record {
    life: Incarnation,
    standing: Standing,
    consecutive: u32,
    window: Window,
    /// Why it was ejected.
    cause: Cause,
    /// How often it was ejected; less the longer it is well.
    times: u32,
    back: Instant,
}

impl Record {
    fn new(life: Incarnation, now: Instant) -> Self {
        let window = Window { begun: now, counts: [(0, 0); 2] };
        Self { life, standing: Standing::In, consecutive: 0, window, cause: Cause::Consecutive, times: 0, back: now }
    }

    fn takes(&self, config: &OutlierConfig, now: Instant) -> bool {
        match self.standing {
            Standing::In => true,
            Standing::Out { until } => now >= until,
            Standing::Trial { taken, until, .. } => taken < config.trial_requests || now >= until,
        }
    }

    fn why(&self, config: &OutlierConfig) -> Option<Cause> {
        let share = u64::from(u8::from(config.failure_percentage));
        let (failed, all) = self.window.sum();
        if config.consecutive_failures > 0 && self.consecutive >= config.consecutive_failures {
            return Some(Cause::Consecutive);
        }
        let is_too_many = share > 0 && all >= u64::from(config.request_volume) && failed * 100 >= all * share;
        is_too_many.then_some(Cause::FailureRate)
    }

    fn eject(&mut self, cause: Cause, (config, now): (&OutlierConfig, Instant)) -> Duration {
        if cause != Cause::Trial {
            let forgiven = now.saturating_duration_since(self.back).as_millis() / config.interval.0.as_millis().max(1);
            self.times = self.times.saturating_sub(u32::try_from(forgiven).unwrap_or(u32::MAX));
        }
        self.times = self.times.saturating_add(1);
        let pause = self.pause(config);
        (self.cause, self.standing) = (cause, Standing::Out { until: now + pause });
        pause
    }

    fn pause(&self, config: &OutlierConfig) -> Duration {
        config.base_ejection_time.0.saturating_mul(self.times).min(config.max_ejection_time.0)
    }

    /// A request goes there. Whether it is a trial: not one that is sent where no other could be, before the pause is over.
    fn sent(&mut self, (config, now): (&OutlierConfig, Instant)) -> bool {
        let since = match &mut self.standing {
            Standing::In => return false,
            Standing::Out { until } if now < *until => return false,
            Standing::Out { .. } => now,
            Standing::Trial { taken, until, .. } if now < *until => {
                *taken = taken.saturating_add(1);
                return true;
            }
            // What those say that are still there counts as well.
            Standing::Trial { since, heard, .. } => {
                // Nobody heard of them: they hang, and the next ones may as well.
                self.times = self.times.saturating_add(u32::from(!*heard));
                *since
            }
        };
        self.standing = Standing::Trial { taken: 1, since, until: now + self.pause(config), heard: false };
        true
    }

    /// A trial that was sent at `asked` says nothing: another one may go.
    fn let_go(&mut self, (asked, now): (Instant, Instant)) {
        if let Standing::Trial { taken, since, .. } = &mut self.standing
            && asked >= *since
        {
            *taken = taken.saturating_sub(1);
            if *taken == 0 {
                self.standing = Standing::Out { until: now };
            }
        }
    }
}

/// So many workers are remembered; beyond that only those who are ejected.
const MOST_RECORDS: usize = 4096;
/// Of so many tenants a failure without a second opinion counts in an interval.
const MOST_TENANTS: usize = 1024;

/// All workers that were sent requests.
#[derive(Debug)]
pub struct Outliers {
    config: OutlierConfig,
    records: BTreeMap<WorkerId, Record>,
    /// When a failure without a second opinion was counted, by tenant.
    unconfirmed: HashMap<TenantId, Instant>,
}

impl Outliers {
    /// Nothing is known of anybody.
    pub fn new(config: OutlierConfig) -> Self {
        Self { config, records: BTreeMap::new(), unconfirmed: HashMap::new() }
    }

    /// Who of these takes no requests now.
    pub fn out(&self, workers: &[WorkerView], now: Instant) -> Vec<WorkerId> {
        let is_out = |worker: &&WorkerView| self.of(worker).is_some_and(|record| !record.takes(&self.config, now));
        workers.iter().filter(is_out).map(|worker| worker.id).collect()
    }

    /// Who of these is ejected, or on trial.
    pub fn all_ejected(&self, workers: &[WorkerView]) -> Vec<WorkerId> {
        workers.iter().filter(|worker| self.ejected(worker).is_some()).map(|worker| worker.id).collect()
    }

    /// How this life of a worker stands; none where its requests do not fail.
    pub fn ejected(&self, worker: &WorkerView) -> Option<Ejected> {
        let record = self.of(worker).filter(|record| record.standing != Standing::In)?;
        Some(Ejected { cause: record.cause, times: record.times, standing: record.standing })
    }

    /// A request goes there. Whether it finds out if the worker is well.
    pub fn sent(&mut self, worker: WorkerId, now: Instant) -> bool {
        self.records.get_mut(&worker).is_some_and(|record| record.sent((&self.config, now)))
    }

    /// An answer to a trial has begun: it does not hang, however long it is.
    pub fn heard(&mut self, worker: WorkerId) {
        if let Some(Standing::Trial { heard, .. }) = self.records.get_mut(&worker).map(|record| &mut record.standing) {
            *heard = true;
        }
    }

    /// A trial that was sent at `asked` is over. Where it neither failed nor was answered to its end, another one may go.
    pub fn let_go(&mut self, worker: WorkerId, (asked, now): (Instant, Instant)) {
        if let Some(record) = self.records.get_mut(&worker) {
            record.let_go((asked, now));
        }
    }

    /// A request that was sent at `asked` was answered to its end by this life of a worker. What was sent before the worker was
    /// ejected says nothing. Whether the worker came back because of it.
    pub fn answered(&mut self, (worker, life): (WorkerId, Incarnation), (asked, now): (Instant, Instant)) -> bool {
        let interval = self.config.interval.0;
        let record = self.record((worker, life), now);
        match record.standing {
            Standing::In => {
                record.consecutive = 0;
                record.window.note(0, (interval, now));
                false
            }
            Standing::Out { .. } => false,
            Standing::Trial { since, .. } if asked < since => false,
            Standing::Trial { .. } => {
                *record = Record { times: record.times, ..Record::new(life, now) };
                true
            }
        }
    }

    /// Whether a failure of this tenant's that no other worker had a chance to prove wrong is counted: one in an interval, so
    /// that requests that fail everywhere do not eject workers one by one.
    pub fn counts_unconfirmed(&mut self, tenant: &TenantId, now: Instant) -> bool {
        let interval = self.config.interval.0;
        self.unconfirmed.retain(|_, at| now.saturating_duration_since(*at) < interval);
        if self.unconfirmed.contains_key(tenant) || self.unconfirmed.len() >= MOST_TENANTS {
            return false;
        }
        self.unconfirmed.insert(tenant.clone(), now);
        true
    }

    /// A request that was sent at `asked` failed at `worker`, one of `workers`. How long it is out, where it is ejected because
    /// of that.
    pub fn failed(
        &mut self,
        workers: &[WorkerView],
        worker: WorkerId,
        (asked, now): (Instant, Instant),
    ) -> Option<(Cause, Duration)> {
        // Bounded by who is listed.
        self.records.retain(|id, _| workers.iter().any(|listed| listed.id == *id));
        let view = workers.iter().find(|listed| listed.id == worker)?;
        let (config, may_go) = (self.config, self.may_go(workers, view, now));
        let record = self.record((worker, view.incarnation), now);
        match record.standing {
            Standing::In => {
                record.consecutive = record.consecutive.saturating_add(1);
                record.window.note(1, (config.interval.0, now));
                let cause = record.why(&config).filter(|_| may_go)?;
                Some((cause, record.eject(cause, (&config, now))))
            }
            Standing::Out { .. } => None,
            Standing::Trial { since, .. } if asked < since => None,
            Standing::Trial { .. } => Some((Cause::Trial, record.eject(Cause::Trial, (&config, now)))),
        }
    }

    /// Whether one more may be left out, and somebody else serves what this one does.
    fn may_go(&self, workers: &[WorkerView], worker: &WorkerView, now: Instant) -> bool {
        let share = usize::from(u8::from(self.config.max_ejection_percent));
        let most = if share == 0 { 0 } else { (workers.len() * share / 100).max(1) };
        // One whose pause is over is not well before a trial says so.
        let out = self.all_ejected(workers).len();
        let takes = |other: &&WorkerView| self.of(other).is_none_or(|record| record.takes(&self.config, now));
        let others: Vec<_> = workers.iter().filter(|other| other.id != worker.id).filter(takes).collect();
        let serves = |other: &WorkerView, model| {
            let is_able = worker.role == Role::Prefill || other.role != Role::Prefill;
            other.health == Health::Ready && is_able && other.models.contains(model)
        };
        let is_served = worker.models.iter().all(|model| others.iter().any(|other| serves(other, model)));
        out < most && is_served && !others.is_empty()
    }

    fn of(&self, worker: &WorkerView) -> Option<&Record> {
        self.records.get(&worker.id).filter(|record| record.life == worker.incarnation)
    }

    /// Of this life: another process begins with a clean sheet.
    fn record(&mut self, (worker, life): (WorkerId, Incarnation), now: Instant) -> &mut Record {
        if self.records.len() >= MOST_RECORDS && !self.records.contains_key(&worker) {
            self.records.retain(|_, record| record.standing != Standing::In);
        }
        let record = self.records.entry(worker).or_insert_with(|| Record::new(life, now));
        if record.life != life {
            *record = Record::new(life, now);
        }
        record
    }
}

#[cfg(test)]
mod tests;
