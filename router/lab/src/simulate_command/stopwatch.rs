//! How long this machine takes to place a step: the one figure of a report that another run has otherwise.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::time::Instant;

use simulator::policies::Stopwatch;
use simulator::report::{DecisionLatency, TimeDistribution};

/// A stopwatch for one policy after the other.
#[derive(Default)]
pub(super) struct DecisionStopwatch {
    policy: Cell<&'static str>,
    started: Cell<Option<Instant>>,
    /// Microseconds of each decision, by policy.
    durations: RefCell<HashMap<&'static str, Vec<f64>>>,
}

impl DecisionStopwatch {
    pub(super) fn set_policy(&self, policy: &'static str) {
        self.policy.set(policy);
    }

    /// What each policy took, in the order of its name.
    pub(super) fn planning_times(self) -> Vec<DecisionLatency> {
        let taken = self.durations.into_inner().into_iter();
        let mut all: Vec<DecisionLatency> =
            taken.map(|(policy, micros)| DecisionLatency { policy, micros: TimeDistribution::of(micros) }).collect();
        all.sort_by_key(|one| one.policy);
        all
    }
}

impl Stopwatch for DecisionStopwatch {
    fn start(&self) {
        self.started.set(Some(Instant::now()));
    }

    fn stop(&self) {
        if let Some(begun) = self.started.take() {
            let micros = begun.elapsed().as_secs_f64() * 1e6;
            self.durations.borrow_mut().entry(self.policy.get()).or_default().push(micros);
        }
    }
}
