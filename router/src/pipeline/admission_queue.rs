//! Steps that wait rather than push out others' KV: the planner's queue, and how each of them is called to ask again.
//!
//! They are asked one after the other, in rounds: in their turn, so that what one takes is taken for the next. A round begins
//! when a step anywhere ends, and at least every half second.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use planner::{AdmissionDecision, AdmissionLimits, AdmissionReason, AdmissionRequest, StepQueue};
use serde::Serialize;
use strum::{AsRefStr, VariantArray};
use tokio::sync::Notify;
use vocabulary::{Micros, RequestId};

use super::kv_reservation::OccupancyTracker;

/// Between two rounds, at most.
const MAX_ROUND_INTERVAL: Duration = Duration::from_millis(500);

/// Everybody who waits.
#[derive(Debug)]
pub(super) struct AdmissionQueue {
    queue: StepQueue<RequestId>,
    wakers: HashMap<RequestId, Arc<Notify>>,
    round: WakeRound,
}

#[derive(Debug)]
struct WakeRound {
    /// In their turn. The first one was called, and asks.
    waiting: VecDeque<RequestId>,
    began_at: Micros,
    /// Whether something has ended since.
    repeat: bool,
}

impl AdmissionQueue {
    /// Nobody waits.
    pub(super) fn new(admission: AdmissionLimits) -> Self {
        let round = WakeRound { waiting: VecDeque::new(), began_at: Micros::ZERO, repeat: false };
        Self { queue: StepQueue::new(admission), wakers: HashMap::new(), round }
    }

    /// Whether a step, new or waiting, starts as it was just planned.
    pub(super) fn admit(&mut self, step: RequestId, asking: AdmissionRequest) -> AdmissionDecision {
        let verdict = self.queue.admit(step, asking);
        match verdict {
            AdmissionDecision::Hold { .. } => _ = self.wakers.entry(step).or_default(),
            AdmissionDecision::Start { .. } => _ = self.wakers.remove(&step),
        }
        self.end_turn(step, asking.now);
        verdict
    }

    /// Whoever wanted this step does so no longer, or it starts unasked.
    fn leave(&mut self, step: RequestId, now: Micros) {
        self.queue.remove(step);
        self.wakers.remove(&step);
        self.end_turn(step, now);
    }

    /// A step has ended somewhere: there may be room.
    pub(super) fn notify_completion(&mut self, now: Micros) {
        match self.round.waiting.is_empty() {
            true => self.begin_round(now),
            false => self.round.repeat = true,
        }
    }

    /// How many wait.
    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    /// A step has heard nothing for a period.
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

    /// A step's turn is over, whether or not it was its turn.
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

/// A step's place among those that wait. It leaves when this is dropped.
#[derive(Debug)]
pub struct QueueTicket {
    tracker: OccupancyTracker,
    step: RequestId,
    waker: Arc<Notify>,
    queued_at: Instant,
    costs_others: Micros,
}

impl QueueTicket {
    /// Of a step that was just held; none where it was not.
    pub(super) fn of(account: &OccupancyTracker, step: RequestId, costs_others: Micros) -> Option<Self> {
        let bell = account.lock().admission_queue().wakers.get(&step)?.clone();
        Some(Self { tracker: account.clone(), step, waker: bell, queued_at: Instant::now(), costs_others })
    }

    /// Until it is its turn to ask again.
    pub async fn wait_for_turn(&self) {
        while tokio::time::timeout(MAX_ROUND_INTERVAL, self.waker.notified()).await.is_err() {
            let mut account = self.tracker.lock();
            let now = account.now;
            account.admission_queue().poll_idle(now);
        }
    }

    pub(super) fn finish_wait(&self, until: WaitOutcome) -> AdmissionWait {
        AdmissionWait { time: Micros::of(self.queued_at.elapsed()), costs_others: self.costs_others, until }
    }
}

impl Drop for QueueTicket {
    fn drop(&mut self) {
        let mut account = self.tracker.lock();
        let now = account.now;
        account.admission_queue().leave(self.step, now);
    }
}

/// That a step waited, or would have.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug)]
pub struct AdmissionWait {
    /// How long.
    pub time: Micros,
    /// What starting at once would have cost others, of computing again.
    pub costs_others: Micros,
    /// What ended it.
    pub until: WaitOutcome,
}

/// What ends a wait.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Debug, AsRefStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum WaitOutcome {
    /// It costs others no more than is tolerated, or nobody asks any more: the mode was changed, or its worker is not known
    /// exactly.
    Room,
    /// The longest wait was over.
    Longest,
    /// There was no place to wait in, so that it started at once.
    NoPlace,
    /// Its client left, or nobody can serve it any more.
    Left,
}

impl From<AdmissionReason> for WaitOutcome {
    fn from(why: AdmissionReason) -> Self {
        match why {
            AdmissionReason::Tolerated => Self::Room,
            AdmissionReason::Longest => Self::Longest,
            AdmissionReason::NoPlace => Self::NoPlace,
        }
    }
}

#[cfg(test)]
mod tests;
