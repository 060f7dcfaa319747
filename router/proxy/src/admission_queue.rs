//! Admission queue: steps that wait because starting them would evict other sessions' KV, and how they are woken.
//!
//! Waiting steps are woken one after the other, in rounds, so that each decision sees what the previous one took. A
//! round begins whenever a step ends anywhere, and at least every half second.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use planner::{AdmissionDecision, AdmissionLimits, AdmissionRequest, StepQueue};
use prometheus::HistogramVec;
use tokio::sync::Notify;
use vocabulary::{Micros, RequestId};

use crate::kv_reservation::OccupancyTracker;
use crate::receipt::{AdmissionWait, WaitOutcome};

/// Longest time between two rounds.
const MAX_ROUND_INTERVAL: Duration = Duration::from_millis(500);

/// All waiting steps, with their wakers.
#[derive(Debug)]
pub(crate) struct AdmissionQueue {
    queue: StepQueue<RequestId>,
    wakers: HashMap<RequestId, Arc<Notify>>,
    round: WakeRound,
}

#[derive(Debug)]
struct WakeRound {
    /// Steps of this round in admission order. The first one has been woken and is being planned.
    waiting: VecDeque<RequestId>,
    began_at: Micros,
    /// Whether a step has ended since the round began, so that another round must follow.
    repeat: bool,
}

impl AdmissionQueue {
    /// Returns an empty queue.
    pub(crate) fn new(admission: AdmissionLimits) -> Self {
        let round = WakeRound { waiting: VecDeque::new(), began_at: Micros::ZERO, repeat: false };
        Self { queue: StepQueue::new(admission), wakers: HashMap::new(), round }
    }

    /// Decides whether a step, new or waiting, starts with the plan just made for it.
    pub(crate) fn admit(&mut self, step: RequestId, asking: AdmissionRequest) -> AdmissionDecision {
        let verdict = self.queue.admit(step, asking);
        match verdict {
            AdmissionDecision::Hold { .. } => _ = self.wakers.entry(step).or_default(),
            AdmissionDecision::Start { .. } => _ = self.wakers.remove(&step),
        }
        self.end_turn(step, asking.now);
        verdict
    }

    /// Removes a step that was cancelled, or that starts without being admitted.
    fn leave(&mut self, step: RequestId, now: Micros) {
        self.queue.remove(step);
        self.wakers.remove(&step);
        self.end_turn(step, now);
    }

    /// Starts a round, or schedules another one: a step has ended somewhere and may have freed memory.
    pub(crate) fn notify_completion(&mut self, now: Micros) {
        match self.round.waiting.is_empty() {
            true => self.begin_round(now),
            false => self.round.repeat = true,
        }
    }

    /// Number of waiting steps.
    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Starts a round if the last one is over and began at least `MAX_ROUND_INTERVAL` ago.
    fn poll_idle(&mut self, now: Micros) {
        if self.round.waiting.is_empty() && now - self.round.began_at >= Micros::of(MAX_ROUND_INTERVAL) {
            self.begin_round(now);
        }
    }

    fn begin_round(&mut self, now: Micros) {
        self.round = WakeRound { waiting: self.queue.admission_order().into(), began_at: now, repeat: false };
        self.wake_next();
    }

    fn wake_next(&self) {
        if let Some(bell) = self.round.waiting.front().and_then(|first| self.wakers.get(first)) {
            bell.notify_one();
        }
    }

    /// Removes a step from the round, and wakes the next one if it was this step's turn.
    fn end_turn(&mut self, step: RequestId, now: Micros) {
        let was_called = self.round.waiting.front() == Some(&step);
        self.round.waiting.retain(|other| *other != step);
        if !was_called {
            return;
        }
        match self.round.waiting.is_empty() && self.round.repeat {
            true => self.begin_round(now),
            false => self.wake_next(),
        }
    }
}

/// A step's entry in the admission queue. Dropping it removes the step.
#[derive(Debug)]
pub struct QueueTicket {
    tracker: OccupancyTracker,
    step: RequestId,
    waker: Arc<Notify>,
    queued_at: Instant,
    costs_others: Micros,
    /// Observes how long steps waited.
    seconds: HistogramVec,
}

impl QueueTicket {
    /// Returns the ticket of a step that was just held; `None` where it was not.
    pub(crate) fn of(
        (account, seconds): (&OccupancyTracker, &HistogramVec),
        step: RequestId,
        costs_others: Micros,
    ) -> Option<Self> {
        let bell = account.lock().admission_queue().wakers.get(&step)?.clone();
        let (tracker, seconds) = (account.clone(), seconds.clone());
        Some(Self { tracker, step, waker: bell, queued_at: Instant::now(), costs_others, seconds })
    }

    /// Waits until the step is to be planned again.
    pub async fn wait_for_turn(&self) {
        while tokio::time::timeout(MAX_ROUND_INTERVAL, self.waker.notified()).await.is_err() {
            let mut account = self.tracker.lock();
            let now = account.now;
            account.admission_queue().poll_idle(now);
        }
    }

    /// Records that the wait is over. Dropping the ticket then removes the step from the queue.
    pub(crate) fn finish_wait(&self, until: WaitOutcome) -> AdmissionWait {
        let duration = Micros::of(self.queued_at.elapsed());
        let waited = AdmissionWait { duration, displaced_compute: self.costs_others, outcome: until };
        waited.record(&self.seconds);
        waited
    }
}

impl Drop for QueueTicket {
    fn drop(&mut self) {
        let mut account = self.tracker.lock();
        let now = account.now;
        account.admission_queue().leave(self.step, now);
    }
}

#[cfg(test)]
mod tests;
