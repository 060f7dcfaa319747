//! How long this machine takes to place a step: the one figure of a report that another run has otherwise.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::time::Instant;

use simulator::policies::Stopwatch;
use simulator::report::{Planning, Times};

/// A stopwatch for one policy after the other.
#[derive(Default)]
pub(super) struct Clock {
    policy: Cell<&'static str>,
    begun: Cell<Option<Instant>>,
    /// Microseconds of each decision, by policy.
    taken: RefCell<HashMap<&'static str, Vec<f64>>>,
}

impl Clock {
    pub(super) fn times(&self, policy: &'static str) {
        self.policy.set(policy);
    }

    /// What each policy took, in the order of its name.
    pub(super) fn planning(self) -> Vec<Planning> {
        let taken = self.taken.into_inner().into_iter();
        let mut all: Vec<Planning> =
            taken.map(|(policy, micros)| Planning { policy, micros: Times::of(micros) }).collect();
        all.sort_by_key(|one| one.policy);
        all
    }
}

impl Stopwatch for Clock {
    fn start(&self) {
        self.begun.set(Some(Instant::now()));
    }

    fn stop(&self) {
        if let Some(begun) = self.begun.take() {
            let micros = begun.elapsed().as_secs_f64() * 1e6;
            self.taken.borrow_mut().entry(self.policy.get()).or_default().push(micros);
        }
    }
}
