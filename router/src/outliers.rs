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
use vocabulary::{Incarnation, TenantId, WorkerHealth, WorkerId, WorkerRole, WorkerView};

pub(crate) use blame::{Suspects, culprit, record_failure, record_success};
pub use config::OutlierConfig;
pub use trials::Trials;

/// Why a worker was ejected.
#[derive(Clone, Copy, PartialEq, Eq, Debug, AsRefStr, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum EjectionCause {
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
pub struct Ejection {
    /// Why it was, the last time.
    pub cause: EjectionCause,
    /// How often it was; less the longer it was well in between.
    pub ejections: u32,
    /// Until when.
    pub state: EjectionState,
}

impl Ejection {
    /// Whether requests find out just now if it is well.
    pub fn is_on_trial(&self) -> bool {
        matches!(self.state, EjectionState::Trial { .. })
    }

    /// How long until requests may find out, whatever became of those that are there.
    pub fn time_to_trial(&self, now: Instant) -> Duration {
        match self.state {
            EjectionState::Active => Duration::ZERO,
            EjectionState::Ejected { until } | EjectionState::Trial { until, .. } => {
                until.saturating_duration_since(now)
            }
        }
    }
}

/// Whether a worker takes requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EjectionState {
    /// It does.
    Active,
    /// It does not, until then.
    Ejected {
        /// From then on trial requests may go there.
        until: Instant,
    },
    /// Half open: trial requests are there.
    Trial {
        /// How many.
        sent: u32,
        /// When the first of them was sent: what was asked before says nothing.
        since: Instant,
        /// From when on as many more may go, whatever became of these.
        until: Instant,
        /// Whether an answer to one of them has begun.
        answer_started: bool,
    },
}

/// Requests of this span of time and of the one before.
#[derive(Clone, Copy, Debug)]
struct FailureWindow {
    begun: Instant,
    /// Failed and all, now and before.
    counts: [(u32, u32); 2],
}

impl FailureWindow {
    fn record(&mut self, failures: u32, (interval, now): (Duration, Instant)) {
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
struct WorkerMonitor {
    incarnation: Incarnation,
    state: EjectionState,
    consecutive: u32,
    window: FailureWindow,
    /// Why it was ejected.
    cause: EjectionCause,
    /// How often it was ejected; less the longer it is well.
    ejections: u32,
    returned_at: Instant,
}

impl WorkerMonitor {
    fn new(incarnation: Incarnation, now: Instant) -> Self {
        let window = FailureWindow { begun: now, counts: [(0, 0); 2] };
        Self {
            incarnation,
            state: EjectionState::Active,
            consecutive: 0,
            window,
            cause: EjectionCause::Consecutive,
            ejections: 0,
            returned_at: now,
        }
    }

    fn takes_requests(&self, config: &OutlierConfig, now: Instant) -> bool {
        match self.state {
            EjectionState::Active => true,
            EjectionState::Ejected { until } => now >= until,
            EjectionState::Trial { sent: taken, until, .. } => taken < config.trial_requests || now >= until,
        }
    }

    fn ejection_cause(&self, config: &OutlierConfig) -> Option<EjectionCause> {
        let share = u64::from(u8::from(config.failure_percentage));
        let (failed, all) = self.window.sum();
        if config.consecutive_failures > 0 && self.consecutive >= config.consecutive_failures {
            return Some(EjectionCause::Consecutive);
        }
        let is_too_many = share > 0 && all >= u64::from(config.request_volume) && failed * 100 >= all * share;
        is_too_many.then_some(EjectionCause::FailureRate)
    }

    fn eject(&mut self, cause: EjectionCause, (config, now): (&OutlierConfig, Instant)) -> Duration {
        if cause != EjectionCause::Trial {
            let forgiven =
                now.saturating_duration_since(self.returned_at).as_millis() / config.interval.0.as_millis().max(1);
            self.ejections = self.ejections.saturating_sub(u32::try_from(forgiven).unwrap_or(u32::MAX));
        }
        self.ejections = self.ejections.saturating_add(1);
        let pause = self.ejection_time(config);
        (self.cause, self.state) = (cause, EjectionState::Ejected { until: now + pause });
        pause
    }

    fn ejection_time(&self, config: &OutlierConfig) -> Duration {
        config.base_ejection_time.0.saturating_mul(self.ejections).min(config.max_ejection_time.0)
    }

    /// A request goes there. Whether it is a trial: not one that is sent where no other could be, before the pause is over.
    fn record_sent(&mut self, (config, now): (&OutlierConfig, Instant)) -> bool {
        let since = match &mut self.state {
            EjectionState::Active => return false,
            EjectionState::Ejected { until } if now < *until => return false,
            EjectionState::Ejected { .. } => now,
            EjectionState::Trial { sent: taken, until, .. } if now < *until => {
                *taken = taken.saturating_add(1);
                return true;
            }
            // What those say that are still there counts as well.
            EjectionState::Trial { since, answer_started: heard, .. } => {
                // Nobody heard of them: they hang, and the next ones may as well.
                self.ejections = self.ejections.saturating_add(u32::from(!*heard));
                *since
            }
        };
        self.state =
            EjectionState::Trial { sent: 1, since, until: now + self.ejection_time(config), answer_started: false };
        true
    }

    /// A trial that was sent at `asked` says nothing: another one may go.
    fn release_trial(&mut self, (asked, now): (Instant, Instant)) {
        if let EjectionState::Trial { sent: taken, since, .. } = &mut self.state
            && asked >= *since
        {
            *taken = taken.saturating_sub(1);
            if *taken == 0 {
                self.state = EjectionState::Ejected { until: now };
            }
        }
    }
}

/// So many workers are remembered; beyond that only those who are ejected.
const MAX_RECORDS: usize = 4096;
/// Of so many tenants a failure without a second opinion counts in an interval.
const MOST_TENANTS: usize = 1024;

/// All workers that were sent requests.
#[derive(Debug)]
pub struct Outliers {
    config: OutlierConfig,
    records: BTreeMap<WorkerId, WorkerMonitor>,
    /// When a failure without a second opinion was counted, by tenant.
    unconfirmed: HashMap<TenantId, Instant>,
}

impl Outliers {
    /// Nothing is known of anybody.
    pub fn new(config: OutlierConfig) -> Self {
        Self { config, records: BTreeMap::new(), unconfirmed: HashMap::new() }
    }

    /// Who of these takes no requests now.
    pub fn excluded(&self, workers: &[WorkerView], now: Instant) -> Vec<WorkerId> {
        let is_out =
            |worker: &&WorkerView| self.of(worker).is_some_and(|record| !record.takes_requests(&self.config, now));
        workers.iter().filter(is_out).map(|worker| worker.id).collect()
    }

    /// Who of these is ejected, or on trial.
    pub fn all_ejected(&self, workers: &[WorkerView]) -> Vec<WorkerId> {
        workers.iter().filter(|worker| self.ejection(worker).is_some()).map(|worker| worker.id).collect()
    }

    /// How this life of a worker stands; none where its requests do not fail.
    pub fn ejection(&self, worker: &WorkerView) -> Option<Ejection> {
        let record = self.of(worker).filter(|record| record.state != EjectionState::Active)?;
        Some(Ejection { cause: record.cause, ejections: record.ejections, state: record.state })
    }

    /// A request goes there. Whether it finds out if the worker is well.
    pub fn record_sent(&mut self, worker: WorkerId, now: Instant) -> bool {
        self.records.get_mut(&worker).is_some_and(|record| record.record_sent((&self.config, now)))
    }

    /// An answer to a trial has begun: it does not hang, however long it is.
    pub fn record_answer_started(&mut self, worker: WorkerId) {
        if let Some(EjectionState::Trial { answer_started: heard, .. }) =
            self.records.get_mut(&worker).map(|record| &mut record.state)
        {
            *heard = true;
        }
    }

    /// A trial that was sent at `asked` is over. Where it neither failed nor was answered to its end, another one may go.
    pub fn release_trial(&mut self, worker: WorkerId, (asked, now): (Instant, Instant)) {
        if let Some(record) = self.records.get_mut(&worker) {
            record.release_trial((asked, now));
        }
    }

    /// A request that was sent at `asked` was answered to its end by this life of a worker. What was sent before the worker was
    /// ejected says nothing. Whether the worker came back because of it.
    pub fn record_success(
        &mut self,
        (worker, life): (WorkerId, Incarnation),
        (asked, now): (Instant, Instant),
    ) -> bool {
        let interval = self.config.interval.0;
        let record = self.record((worker, life), now);
        match record.state {
            EjectionState::Active => {
                record.consecutive = 0;
                record.window.record(0, (interval, now));
                false
            }
            EjectionState::Ejected { .. } => false,
            EjectionState::Trial { since, .. } if asked < since => false,
            EjectionState::Trial { .. } => {
                *record = WorkerMonitor { ejections: record.ejections, ..WorkerMonitor::new(life, now) };
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
    pub fn record_failure(
        &mut self,
        workers: &[WorkerView],
        worker: WorkerId,
        (asked, now): (Instant, Instant),
    ) -> Option<(EjectionCause, Duration)> {
        // Bounded by who is listed.
        self.records.retain(|id, _| workers.iter().any(|listed| listed.id == *id));
        let view = workers.iter().find(|listed| listed.id == worker)?;
        let (config, may_go) = (self.config, self.may_eject(workers, view, now));
        let record = self.record((worker, view.incarnation), now);
        match record.state {
            EjectionState::Active => {
                record.consecutive = record.consecutive.saturating_add(1);
                record.window.record(1, (config.interval.0, now));
                let cause = record.ejection_cause(&config).filter(|_| may_go)?;
                Some((cause, record.eject(cause, (&config, now))))
            }
            EjectionState::Ejected { .. } => None,
            EjectionState::Trial { since, .. } if asked < since => None,
            EjectionState::Trial { .. } => {
                Some((EjectionCause::Trial, record.eject(EjectionCause::Trial, (&config, now))))
            }
        }
    }

    /// Whether one more may be left out, and somebody else serves what this one does.
    fn may_eject(&self, workers: &[WorkerView], worker: &WorkerView, now: Instant) -> bool {
        let share = usize::from(u8::from(self.config.max_ejection_percent));
        let most = if share == 0 { 0 } else { (workers.len() * share / 100).max(1) };
        // One whose pause is over is not well before a trial says so.
        let out = self.all_ejected(workers).len();
        let takes = |other: &&WorkerView| self.of(other).is_none_or(|record| record.takes_requests(&self.config, now));
        let others: Vec<_> = workers.iter().filter(|other| other.id != worker.id).filter(takes).collect();
        let serves = |other: &WorkerView, model| {
            let is_able = worker.role == WorkerRole::Prefill || other.role != WorkerRole::Prefill;
            other.health == WorkerHealth::Ready && is_able && other.models.contains(model)
        };
        let is_served = worker.models.iter().all(|model| others.iter().any(|other| serves(other, model)));
        out < most && is_served && !others.is_empty()
    }

    fn of(&self, worker: &WorkerView) -> Option<&WorkerMonitor> {
        self.records.get(&worker.id).filter(|record| record.incarnation == worker.incarnation)
    }

    /// Of this life: another process begins with a clean sheet.
    fn record(&mut self, (worker, life): (WorkerId, Incarnation), now: Instant) -> &mut WorkerMonitor {
        if self.records.len() >= MAX_RECORDS && !self.records.contains_key(&worker) {
            self.records.retain(|_, record| record.state != EjectionState::Active);
        }
        let record = self.records.entry(worker).or_insert_with(|| WorkerMonitor::new(life, now));
        if record.incarnation != life {
            *record = WorkerMonitor::new(life, now);
        }
        record
    }
}

#[cfg(test)]
mod tests;
