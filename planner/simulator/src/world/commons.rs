//! Which runs more than one session uses: tools and system prompts. They are nobody's to drop.

use engine_model::runs::RunId;

use crate::policies::StepRef;
use crate::trace::Step;

/// How many runs from a prompt's start are looked at: what sessions share lies there.
const LOOKED_AT: usize = 6;

/// Who uses each run.
pub(super) struct Commons(Vec<Use>);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    Nobody,
    One(usize),
    Several,
}

impl Commons {
    pub(super) fn new(runs: usize) -> Self {
        Self(vec![Use::Nobody; runs])
    }

    pub(super) fn note(&mut self, at: StepRef, step: &Step) {
        for run in step.path.iter().take(LOOKED_AT) {
            let used = &mut self.0[run.0 as usize];
            *used = match *used {
                Use::Nobody => Use::One(at.session),
                Use::One(session) if session == at.session => *used,
                _ => Use::Several,
            };
        }
    }

    /// Without what several sessions use.
    pub(super) fn without(&self, mut runs: Vec<RunId>) -> Vec<RunId> {
        runs.retain(|run| self.0[run.0 as usize] != Use::Several);
        runs
    }
}
