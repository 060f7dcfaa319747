//! Which requests belong together, and how long the pauses between them are.

use std::collections::{HashMap, HashSet};

use engine_model::runs::RunId;
use vocabulary::{Micros, Tokens};

use crate::trace::{Arrivals, Step, Trace};

/// A prompt shorter than this is nobody's beginning.
const SHORTEST_LINK: Tokens = Tokens(1_024);

/// One request's place.
pub(super) struct Place {
    pub(super) conversation: usize,
    pub(super) first: bool,
    /// It goes on from a request that another one went on from before. Only known of recorded times.
    pub(super) forked: bool,
    /// Seconds since the step before.
    pub(super) gap: Option<f64>,
}

#[derive(Default)]
pub(super) struct Conversations {
    pub(super) steps: Vec<f64>,
    pub(super) gaps: Vec<f64>,
    /// Of recorded times: the run where a prompt ended, its conversation and time.
    ends: HashMap<RunId, (usize, Micros)>,
    went_on: HashSet<RunId>,
}

impl Conversations {
    pub(super) fn next_session(&mut self) {
        self.steps.push(0.0);
        self.ends.clear();
        self.went_on.clear();
    }

    pub(super) fn place(&mut self, trace: &Trace, step: &Step) -> Place {
        let place = match trace.arrivals {
            Arrivals::AfterOthers => {
                let gap = (!step.after.is_empty()).then_some(step.think.0 as f64 / 1e6);
                Place { conversation: self.steps.len() - 1, first: step.after.is_empty(), forked: false, gap }
            }
            Arrivals::Recorded => self.chained(trace, step),
        };
        self.steps[place.conversation] += 1.0;
        self.gaps.extend(place.gap);
        place
    }

    fn chained(&mut self, trace: &Trace, step: &Step) -> Place {
        let long = |run: &&RunId| trace.runs.depth(**run) >= SHORTEST_LINK;
        let before = step.path.iter().rev().take_while(long).find_map(|run| Some((*run, *self.ends.get(run)?)));
        let place = match before {
            Some((run, (conversation, at))) => {
                let (forked, gap) = (!self.went_on.insert(run), Some((step.at - at).0 as f64 / 1e6));
                Place { conversation: if forked { self.begin() } else { conversation }, first: false, forked, gap }
            }
            None => Place { conversation: self.begin(), first: true, forked: false, gap: None },
        };
        if let Some(last) = step.path.last() {
            self.ends.insert(*last, (place.conversation, step.at));
            self.went_on.remove(last);
        }
        place
    }

    /// The file's first chain takes the place that was made for the file.
    fn begin(&mut self) -> usize {
        if self.steps.last().is_some_and(|steps| *steps > 0.0) {
            self.steps.push(0.0);
        }
        self.steps.len() - 1
    }
}
