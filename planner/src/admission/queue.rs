//! The steps that wait, and whose turn it is.

use vocabulary::{Micros, Tokens};

use super::{Admission, Start, Verdict, costs_others};
use crate::{Decision, Inputs};

/// Steps that wait, by the caller's names for them.
#[derive(Clone, Debug)]
pub struct Queue<K> {
    admission: Admission,
    steps: Vec<Waiting<K>>,
}

#[derive(Clone, Copy, Debug)]
struct Waiting<K> {
    step: K,
    prompt: Tokens,
    since: Micros,
}

/// What counts of a step for whether it waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Asking {
    /// The length of its prompt.
    pub prompt: Tokens,
    /// What starting as planned would cost others.
    pub costs_others: Micros,
    /// The time, on a clock that only goes forward.
    pub now: Micros,
}

impl Asking {
    /// Of a step as it was just planned.
    pub fn of(inputs: &Inputs<'_>, decision: &Decision) -> Self {
        let costs_others = costs_others(inputs, decision);
        Self { prompt: inputs.ask.prompt, costs_others, now: inputs.account.now }
    }
}

impl<K: Copy + Eq> Queue<K> {
    /// Nobody waits.
    pub fn new(admission: Admission) -> Self {
        Self { admission, steps: Vec::new() }
    }

    /// Whether a step, new or waiting, starts as it was just planned. One that has waited for the longest time starts, and
    /// so does one for which no place is left in the queue.
    pub fn admit(&mut self, step: K, asking: Asking) -> Verdict {
        let Asking { prompt, costs_others, now } = asking;
        let Admission { tolerated, longest, most } = self.admission;
        let place = self.steps.iter().position(|waiting| waiting.step == step);
        let is_full = self.steps.len() >= most;
        let starts = match place {
            _ if costs_others <= tolerated || longest == Micros::ZERO => Some(Start::Tolerated),
            Some(place) if now - self.steps[place].since >= longest => Some(Start::Longest),
            None if is_full => Some(Start::NoPlace),
            _ => None,
        };
        match (starts, place) {
            (Some(why), place) => {
                place.map(|place| self.steps.remove(place));
                Verdict::Start { why }
            }
            (None, place) => {
                if place.is_none() {
                    self.steps.push(Waiting { step, prompt, since: now });
                }
                Verdict::Hold { costs_others }
            }
        }
    }

    /// Whoever wanted this step does so no longer.
    pub fn leave(&mut self, step: K) {
        self.steps.retain(|waiting| waiting.step != step);
    }

    /// Who is asked in which order once there may be room: short prompts first, since more of them fit; of equal ones the
    /// first that came.
    pub fn in_turn(&self) -> Vec<K> {
        let mut all: Vec<_> = self.steps.iter().collect();
        all.sort_by_key(|waiting| (waiting.prompt, waiting.since));
        all.into_iter().map(|waiting| waiting.step).collect()
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }
}

impl<K: Copy + Eq> Default for Queue<K> {
    fn default() -> Self {
        Self::new(Admission::default())
    }
}
