//! Steps that wait rather than push out others' KV: the planner's queue, and how each of them is called to ask again.
//!
//! They are asked one after the other, in rounds: in their turn, so that what one takes is taken for the next. A round begins
//! when a step anywhere ends, and at least every half second.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use planner::{Admission, Asking, Queue, Start, Verdict};
use serde::Serialize;
use strum::{AsRefStr, VariantArray};
use tokio::sync::Notify;
use vocabulary::{Micros, RequestId};

use super::tenure::Account;

/// Between two rounds, at most.
const PERIOD: Duration = Duration::from_millis(500);

/// Everybody who waits.
#[derive(Debug)]
pub(super) struct Turns {
    queue: Queue<RequestId>,
    bells: HashMap<RequestId, Arc<Notify>>,
    round: Round,
}

#[derive(Debug)]
struct Round {
    /// In their turn. The first one was called, and asks.
    left: VecDeque<RequestId>,
    began: Micros,
    /// Whether something has ended since.
    again: bool,
}

impl Turns {
    /// Nobody waits.
    pub(super) fn new(admission: Admission) -> Self {
        let round = Round { left: VecDeque::new(), began: Micros::ZERO, again: false };
        Self { queue: Queue::new(admission), bells: HashMap::new(), round }
    }

    /// Whether a step, new or waiting, starts as it was just planned.
    pub(super) fn admit(&mut self, step: RequestId, asking: Asking) -> Verdict {
        let verdict = self.queue.admit(step, asking);
        match verdict {
            Verdict::Hold { .. } => _ = self.bells.entry(step).or_default(),
            Verdict::Start { .. } => _ = self.bells.remove(&step),
        }
        self.asked(step, asking.now);
        verdict
    }

    /// Whoever wanted this step does so no longer, or it starts unasked.
    fn leave(&mut self, step: RequestId, now: Micros) {
        self.queue.leave(step);
        self.bells.remove(&step);
        self.asked(step, now);
    }

    /// A step has ended somewhere: there may be room.
    pub(super) fn stir(&mut self, now: Micros) {
        match self.round.left.is_empty() {
            true => self.begin(now),
            false => self.round.again = true,
        }
    }

    /// How many wait.
    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    /// A step has heard nothing for a period.
    fn heard_nothing(&mut self, now: Micros) {
        if self.round.left.is_empty() && now - self.round.began >= Micros::of(PERIOD) {
            self.begin(now);
        }
    }

    fn begin(&mut self, now: Micros) {
        self.round = Round { left: self.queue.in_turn().into(), began: now, again: false };
        self.call();
    }

    fn call(&self) {
        if let Some(bell) = self.round.left.front().and_then(|first| self.bells.get(first)) {
            bell.notify_one();
        }
    }

    /// A step's turn is over, whether or not it was its turn.
    fn asked(&mut self, step: RequestId, now: Micros) {
        let was_called = self.round.left.front() == Some(&step);
        self.round.left.retain(|other| *other != step);
        if !was_called {
            return;
        }
        match self.round.left.is_empty() && self.round.again {
            true => self.begin(now),
            false => self.call(),
        }
    }
}

/// A step's place among those that wait. It leaves when this is dropped.
#[derive(Debug)]
pub struct Place {
    account: Account,
    step: RequestId,
    bell: Arc<Notify>,
    since: Instant,
    costs_others: Micros,
}

impl Place {
    /// Of a step that was just held; none where it was not.
    pub(super) fn of(account: &Account, step: RequestId, costs_others: Micros) -> Option<Self> {
        let bell = account.now().turns().bells.get(&step)?.clone();
        Some(Self { account: account.clone(), step, bell, since: Instant::now(), costs_others })
    }

    /// Until it is its turn to ask again.
    pub async fn called(&self) {
        while tokio::time::timeout(PERIOD, self.bell.notified()).await.is_err() {
            let mut account = self.account.now();
            let now = account.now;
            account.turns().heard_nothing(now);
        }
    }

    pub(super) fn waited(&self, until: Until) -> Waited {
        Waited { time: Micros::of(self.since.elapsed()), costs_others: self.costs_others, until }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut account = self.account.now();
        let now = account.now;
        account.turns().leave(self.step, now);
    }
}

/// That a step waited, or would have.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug)]
pub struct Waited {
    /// How long.
    pub time: Micros,
    /// What starting at once would have cost others, of computing again.
    pub costs_others: Micros,
    /// What ended it.
    pub until: Until,
}

/// What ends a wait.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Debug, AsRefStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum Until {
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

impl From<Start> for Until {
    fn from(why: Start) -> Self {
        match why {
            Start::Tolerated => Self::Room,
            Start::Longest => Self::Longest,
            Start::NoPlace => Self::NoPlace,
        }
    }
}

#[cfg(test)]
mod tests;
