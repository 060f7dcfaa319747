//! The steps that wait, and whose turn it is.

use vocabulary::{Micros, Tokens};

use super::{Admission, Verdict, costs_others};
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

impl<K: Copy + Eq> Queue<K> {
    /// Nobody waits.
    pub fn new(admission: Admission) -> Self {
        Self { admission, steps: Vec::new() }
    }

    /// Whether a step, new or waiting, starts as it was just planned. One that has waited for the longest time starts, and
    /// so does one for which no place is left in the queue.
    pub fn admit(&mut self, step: K, inputs: &Inputs<'_>, decision: &Decision) -> Verdict {
        let place = self.steps.iter().position(|waiting| waiting.step == step);
        let waited = place.map_or(Micros::ZERO, |place| inputs.account.now - self.steps[place].since);
        let full = place.is_none() && self.steps.len() >= self.admission.most;
        if waited < self.admission.longest && !full {
            let costs_others = costs_others(inputs, decision);
            if costs_others > self.admission.tolerated {
                if place.is_none() {
                    self.steps.push(Waiting { step, prompt: inputs.ask.prompt, since: inputs.account.now });
                }
                return Verdict::Hold { costs_others };
            }
        }
        if let Some(place) = place {
            self.steps.remove(place);
        }
        Verdict::Start
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
