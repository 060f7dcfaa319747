//! Outlier ejection: a worker whose requests fail gets no requests for a while; then a bounded number of trial requests
//! shows whether it is healthy. Pure: time is an argument; `tracker` connects it to the request path.
//!
//! It only excludes workers from plans, and never the last one that could serve. Health probes are independent of it,
//! and an unreachable worker is excluded by that alone.

mod config;
mod tracker;

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use strum::{AsRefStr, IntoStaticStr, VariantArray};
use vocabulary::{Incarnation, TenantId, WorkerHealth, WorkerId, WorkerRole, WorkerView};

pub use config::OutlierConfig;
pub use tracker::SharedOutlierDetector;

/// Why a worker was ejected.
#[derive(Clone, Copy, PartialEq, Eq, Debug, AsRefStr, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum EjectionReason {
    /// Too many consecutive requests failed.
    #[strum(serialize = "consecutive_failures")]
    Consecutive,
    /// Too large a share of its requests failed.
    #[strum(serialize = "failure_percentage")]
    FailureRate,
    /// A trial request failed.
    #[strum(serialize = "trial_failed")]
    Trial,
}

/// Ejection of a worker, including its trial.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ejection {
    /// Reason of the last ejection.
    pub reason: EjectionReason,
    /// Number of ejections; decreases while the worker is healthy.
    pub ejections: u32,
    /// Current state, with the time when it ends.
    pub state: EjectionState,
}

impl Ejection {
    /// Whether trial requests are running at the worker.
    pub fn is_on_trial(&self) -> bool {
        matches!(self.state, EjectionState::Trial { .. })
    }

    /// Time until the next trial requests may be sent, even if the current ones do not end.
    pub fn time_to_trial(&self, now: Instant) -> Duration {
        match self.state {
            EjectionState::Active => Duration::ZERO,
            EjectionState::Ejected { until } | EjectionState::Trial { until, .. } => {
                until.saturating_duration_since(now)
            }
        }
    }
}

/// Whether a worker gets requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EjectionState {
    /// It gets requests.
    Active,
    /// It gets no requests.
    Ejected {
        /// When trial requests may begin.
        until: Instant,
    },
    /// Half open: trial requests were sent.
    Trial {
        /// Number of trial requests sent.
        sent: u32,
        /// When the first of them was sent: results of earlier requests do not count.
        since: Instant,
        /// When more trials may be sent, even if these have not ended.
        until: Instant,
        /// Whether one of them has begun to be answered.
        answer_started: bool,
    },
}

/// Counts of requests in the current interval and the one before.
#[derive(Clone, Copy, Debug)]
struct FailureWindow {
    start: Instant,
    /// `(failed, all)` of the current and of the previous interval.
    counts: [(u32, u32); 2],
}

impl FailureWindow {
    fn record(&mut self, failures: u32, (interval, now): (Duration, Instant)) {
        let passed = now.saturating_duration_since(self.start);
        if passed >= interval {
            let before = if passed < interval * 2 { self.counts[0] } else { (0, 0) };
            *self = Self { start: now, counts: [(0, 0), before] };
        }
        let (failed, all) = &mut self.counts[0];
        (*failed, *all) = (failed.saturating_add(failures), all.saturating_add(1));
    }

    fn sum(&self) -> (u64, u64) {
        let [now, before] = self.counts;
        (u64::from(now.0) + u64::from(before.0), u64::from(now.1) + u64::from(before.1))
    }
}

/// Failure statistics of one incarnation of a worker.
#[derive(Debug)]
struct WorkerMonitor {
    incarnation: Incarnation,
    state: EjectionState,
    consecutive: u32,
    window: FailureWindow,
    /// Cause of the last ejection.
    reason: EjectionReason,
    /// Number of ejections; decreases while the worker is healthy.
    ejections: u32,
    returned_at: Instant,
}

impl WorkerMonitor {
    fn new(incarnation: Incarnation, now: Instant) -> Self {
        let window = FailureWindow { start: now, counts: [(0, 0); 2] };
        Self {
            incarnation,
            state: EjectionState::Active,
            consecutive: 0,
            window,
            reason: EjectionReason::Consecutive,
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

    fn ejection_reason(&self, config: &OutlierConfig) -> Option<EjectionReason> {
        let share = u64::from(u8::from(config.failure_percentage));
        let (failed, all) = self.window.sum();
        if config.consecutive_failures > 0 && self.consecutive >= config.consecutive_failures {
            return Some(EjectionReason::Consecutive);
        }
        let is_too_many = share > 0 && all >= u64::from(config.request_volume) && failed * 100 >= all * share;
        is_too_many.then_some(EjectionReason::FailureRate)
    }

    fn eject(&mut self, reason: EjectionReason, (config, now): (&OutlierConfig, Instant)) -> Duration {
        if reason != EjectionReason::Trial {
            let forgiven =
                now.saturating_duration_since(self.returned_at).as_millis() / config.interval.0.as_millis().max(1);
            self.ejections = self.ejections.saturating_sub(u32::try_from(forgiven).unwrap_or(u32::MAX));
        }
        self.ejections = self.ejections.saturating_add(1);
        let pause = self.ejection_time(config);
        (self.reason, self.state) = (reason, EjectionState::Ejected { until: now + pause });
        pause
    }

    fn ejection_time(&self, config: &OutlierConfig) -> Duration {
        config.base_ejection_time.0.saturating_mul(self.ejections).min(config.max_ejection_time.0)
    }

    /// Records that a request is sent there. Returns whether it is a trial, which it is not before the pause is over:
    /// then it goes there only because no other worker can serve it.
    fn record_sent(&mut self, (config, now): (&OutlierConfig, Instant)) -> bool {
        let since = match &mut self.state {
            EjectionState::Active => return false,
            EjectionState::Ejected { until } if now < *until => return false,
            EjectionState::Ejected { .. } => now,
            EjectionState::Trial { sent: taken, until, .. } if now < *until => {
                *taken = taken.saturating_add(1);
                return true;
            }
            // Results of trials that are still running count as well.
            EjectionState::Trial { since, answer_started: heard, .. } => {
                // None of them was answered: they hang, and the next ones may do the same.
                self.ejections = self.ejections.saturating_add(u32::from(!*heard));
                *since
            }
        };
        self.state =
            EjectionState::Trial { sent: 1, since, until: now + self.ejection_time(config), answer_started: false };
        true
    }

    /// A trial that was sent at `asked` ended without a result: another one may be sent.
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

/// Limit of tracked workers; beyond it only ejected ones are kept.
const MAX_RECORDS: usize = 4096;
/// Limit of tenants whose unconfirmed failures count in one interval.
const MOST_TENANTS: usize = 1024;

/// Detector of outliers: failure statistics of all workers that got requests.
#[derive(Debug)]
pub struct OutlierDetector {
    config: OutlierConfig,
    records: BTreeMap<WorkerId, WorkerMonitor>,
    /// When an unconfirmed failure was last counted, by tenant.
    unconfirmed: HashMap<TenantId, Instant>,
}

impl OutlierDetector {
    /// Returns a detector without statistics.
    pub fn new(config: OutlierConfig) -> Self {
        Self { config, records: BTreeMap::new(), unconfirmed: HashMap::new() }
    }

    /// Returns the workers of this list that get no requests now.
    pub fn excluded(&self, workers: &[WorkerView], now: Instant) -> Vec<WorkerId> {
        let is_out =
            |worker: &&WorkerView| self.of(worker).is_some_and(|record| !record.takes_requests(&self.config, now));
        workers.iter().filter(is_out).map(|worker| worker.id).collect()
    }

    /// Returns the workers of this list that are ejected or on trial.
    pub fn all_ejected(&self, workers: &[WorkerView]) -> Vec<WorkerId> {
        workers.iter().filter(|worker| self.ejection(worker).is_some()).map(|worker| worker.id).collect()
    }

    /// Returns the ejection of this worker incarnation; `None` if it is not ejected.
    pub fn ejection(&self, worker: &WorkerView) -> Option<Ejection> {
        let record = self.of(worker).filter(|record| record.state != EjectionState::Active)?;
        Some(Ejection { reason: record.reason, ejections: record.ejections, state: record.state })
    }

    /// Records that a request is sent to the worker. Returns whether it is a trial.
    pub fn record_sent(&mut self, worker: WorkerId, now: Instant) -> bool {
        self.records.get_mut(&worker).is_some_and(|record| record.record_sent((&self.config, now)))
    }

    /// Records that the answer to a trial has begun: the worker does not hang, however long the answer takes.
    pub fn record_answer_started(&mut self, worker: WorkerId) {
        if let Some(EjectionState::Trial { answer_started: heard, .. }) =
            self.records.get_mut(&worker).map(|record| &mut record.state)
        {
            *heard = true;
        }
    }

    /// Ends a trial that was sent at `asked`. If it neither failed nor was answered completely, another one may be
    /// sent.
    pub fn release_trial(&mut self, worker: WorkerId, (asked, now): (Instant, Instant)) {
        if let Some(record) = self.records.get_mut(&worker) {
            record.release_trial((asked, now));
        }
    }

    /// Records that this worker incarnation completely answered a request sent at `asked`. Requests sent before an
    /// ejection do not count. Returns whether the worker returned because of it.
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

    /// Whether to count a failure of this tenant that no other worker's answer has confirmed: one per interval, so that
    /// requests that fail everywhere do not eject workers one after another.
    pub fn counts_unconfirmed(&mut self, tenant: &TenantId, now: Instant) -> bool {
        let interval = self.config.interval.0;
        self.unconfirmed.retain(|_, at| now.saturating_duration_since(*at) < interval);
        if self.unconfirmed.contains_key(tenant) || self.unconfirmed.len() >= MOST_TENANTS {
            return false;
        }
        self.unconfirmed.insert(tenant.clone(), now);
        true
    }

    /// Records that a request sent at `asked` failed at `worker`, one of `workers`. Returns reason and duration if the
    /// worker is ejected because of it.
    pub fn record_failure(
        &mut self,
        workers: &[WorkerView],
        worker: WorkerId,
        (asked, now): (Instant, Instant),
    ) -> Option<(EjectionReason, Duration)> {
        // Bounded by the list of workers.
        self.records.retain(|id, _| workers.iter().any(|listed| listed.id == *id));
        let view = workers.iter().find(|listed| listed.id == worker)?;
        let (config, may_go) = (self.config, self.may_eject(workers, view, now));
        let record = self.record((worker, view.incarnation), now);
        match record.state {
            EjectionState::Active => {
                record.consecutive = record.consecutive.saturating_add(1);
                record.window.record(1, (config.interval.0, now));
                let reason = record.ejection_reason(&config).filter(|_| may_go)?;
                Some((reason, record.eject(reason, (&config, now))))
            }
            EjectionState::Ejected { .. } => None,
            EjectionState::Trial { since, .. } if asked < since => None,
            EjectionState::Trial { .. } => {
                Some((EjectionReason::Trial, record.eject(EjectionReason::Trial, (&config, now))))
            }
        }
    }

    /// Whether one more worker may be ejected, and others serve all of its models.
    fn may_eject(&self, workers: &[WorkerView], worker: &WorkerView, now: Instant) -> bool {
        let share = usize::from(u8::from(self.config.max_ejection_percent));
        let most = if share == 0 { 0 } else { (workers.len() * share / 100).max(1) };
        // A worker whose pause is over counts as ejected until a trial succeeds.
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

    /// Returns the record of this incarnation; a new incarnation starts without failures.
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

/// The workers of one plan for which its requests are trials. Dropping it lets the next trial begin where this one had
/// no result: the client left, or the worker had no capacity.
#[derive(Debug)]
pub struct TrialGuard {
    outliers: SharedOutlierDetector,
    workers: Vec<WorkerId>,
    sent_at: Instant,
}

impl TrialGuard {
    /// Records requests to these workers; `None` where none of them is a trial.
    pub fn begin(outliers: &SharedOutlierDetector, workers: impl Iterator<Item = WorkerId>) -> Option<Self> {
        let start = Instant::now();
        let mut known = outliers.lock();
        let workers: Vec<_> = workers.filter(|worker| known.record_sent(*worker, start)).collect();
        drop(known);
        (!workers.is_empty()).then(|| Self { outliers: outliers.clone(), workers, sent_at: start })
    }

    /// Records that the answer has begun.
    pub fn record_answer_started(&self) {
        let mut known = self.outliers.lock();
        self.workers.iter().for_each(|worker| known.record_answer_started(*worker));
    }
}

impl Drop for TrialGuard {
    fn drop(&mut self) {
        let mut known = self.outliers.lock();
        self.workers.iter().for_each(|worker| known.release_trial(*worker, (self.sent_at, Instant::now())));
    }
}

#[cfg(test)]
mod tests;
