//! Residency of the workers, as it is known after a delay.

use std::collections::VecDeque;

use engine_model::runs::{RunId, RunTree, Seconds};
use vocabulary::Tokens;

/// Runs that each worker held in device memory a while ago. The content of slower tiers is known at once.
pub(super) struct DelayedResidency {
    delay: Seconds,
    workers: Vec<WorkerResidency>,
}

struct WorkerResidency {
    has: Vec<bool>,
    /// Changes that are not known yet, oldest first.
    pending: VecDeque<(Seconds, RunId, bool)>,
}

impl DelayedResidency {
    pub(super) fn new(delay: Seconds, workers: usize, runs: usize) -> Self {
        let known = || WorkerResidency { has: vec![false; runs], pending: VecDeque::new() };
        Self { delay, workers: std::iter::repeat_with(known).take(workers).collect() }
    }

    /// Records that a worker now holds these runs, or no longer does.
    pub(super) fn changed(&mut self, worker: usize, now: Seconds, changes: impl IntoIterator<Item = (RunId, bool)>) {
        self.workers[worker].pending.extend(changes.into_iter().map(|(run, has)| (now, run, has)));
    }

    pub(super) fn pass(&mut self, now: Seconds) {
        for WorkerResidency { has, pending: coming } in &mut self.workers {
            while let Some((_, run, there)) = coming.pop_front_if(|(at, ..)| at.0 + self.delay.0 <= now.0) {
                has[run.0 as usize] = there;
            }
        }
    }

    /// Returns the leading tokens of a path that a worker is known to hold.
    pub(super) fn matched_tokens(&self, worker: usize, runs: &RunTree, path: &[RunId]) -> Tokens {
        let has = &self.workers[worker].has;
        let found = path.iter().take_while(|run| has[run.0 as usize]).count();
        runs.end_depth(&path[..found])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn residency_changes_become_visible_in_order_after_the_delay() {
        let mut runs = RunTree::default();
        let run = runs.add(None, 100);
        let mut late = DelayedResidency::new(Seconds(1.0), 2, 1);
        late.changed(1, Seconds(5.0), [(run, true)]);
        late.changed(1, Seconds(5.5), [(run, false)]);
        let mut at = |now| {
            late.pass(Seconds(now));
            [0, 1].map(|worker| late.matched_tokens(worker, &runs, &[run]).0)
        };
        assert_eq!([at(5.9), at(6.0), at(6.4), at(6.5)], [[0, 0], [0, 100], [0, 100], [0, 0]]);
    }
}
