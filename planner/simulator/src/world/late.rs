//! What workers hold, as it is known a while later.

use std::collections::VecDeque;

use engine_model::runs::{RunId, Runs, Seconds};
use vocabulary::Tokens;

/// What each worker held in device memory so long ago. What lies in slower tiers is known at once.
pub(super) struct Late {
    by: Seconds,
    workers: Vec<Known>,
}

struct Known {
    has: Vec<bool>,
    /// What has changed since, oldest first.
    coming: VecDeque<(Seconds, RunId, bool)>,
}

impl Late {
    pub(super) fn new(by: Seconds, workers: usize, runs: usize) -> Self {
        let known = || Known { has: vec![false; runs], coming: VecDeque::new() };
        Self { by, workers: std::iter::repeat_with(known).take(workers).collect() }
    }

    /// A worker's memory changed: it has these runs from now on, or no longer.
    pub(super) fn changed(&mut self, worker: usize, now: Seconds, changes: impl IntoIterator<Item = (RunId, bool)>) {
        self.workers[worker].coming.extend(changes.into_iter().map(|(run, has)| (now, run, has)));
    }

    pub(super) fn pass(&mut self, now: Seconds) {
        for Known { has, coming } in &mut self.workers {
            while let Some((_, run, there)) = coming.pop_front_if(|(at, ..)| at.0 + self.by.0 <= now.0) {
                has[run.0 as usize] = there;
            }
        }
    }

    /// Leading tokens of a path that a worker is known to hold.
    pub(super) fn matched(&self, worker: usize, runs: &Runs, path: &[RunId]) -> Tokens {
        let has = &self.workers[worker].has;
        let found = path.iter().take_while(|run| has[run.0 as usize]).count();
        runs.end(&path[..found])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_changes_is_known_later_and_in_its_order() {
        let mut runs = Runs::default();
        let run = runs.add(None, 100);
        let mut late = Late::new(Seconds(1.0), 2, 1);
        late.changed(1, Seconds(5.0), [(run, true)]);
        late.changed(1, Seconds(5.5), [(run, false)]);
        let mut at = |now| {
            late.pass(Seconds(now));
            [0, 1].map(|worker| late.matched(worker, &runs, &[run]).0)
        };
        assert_eq!([at(5.9), at(6.0), at(6.4), at(6.5)], [[0, 0], [0, 100], [0, 100], [0, 0]]);
    }
}
