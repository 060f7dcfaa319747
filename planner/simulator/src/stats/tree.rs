//! The tree of all prompts with how often each run was visited: where it forks, and how much of it repeats.

use engine_model::runs::{RunId, RunTree};
use serde::Serialize;
use smart_default::SmartDefault;
use vocabulary::Tokens;

use super::Percentiles;

/// Depth below which a fork is more than another first message.
const MIN_DEEP_FORK: Tokens = Tokens(4_096);

/// Where prompts part.
#[derive(Clone, Copy, PartialEq, Serialize, Debug)]
pub struct Forks {
    /// Runs that at least two different ones follow.
    pub nodes: usize,
    /// Of those, such that end at least 4,096 tokens deep.
    pub deep_nodes: usize,
    /// Different runs that follow them.
    pub children: Percentiles,
}

/// What counts as a repeated prefix.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug, SmartDefault)]
pub struct RepetitionCriteria {
    /// Runs that fewer prompts go through are pruned.
    #[default(2)]
    pub visits: u32,
    /// A prefix must be longer than so many tokens.
    #[default(1_024)]
    pub longer_than: u64,
}

/// How much of the traffic begins alike: what is left of the tree of prompts when rarely visited runs are pruned.
#[derive(Clone, Copy, PartialEq, Serialize, Debug)]
pub struct Repetition {
    /// What was counted.
    #[serde(flatten)]
    pub of: RepetitionCriteria,
    /// Leaves of the pruned tree that are long enough.
    pub prefixes: usize,
    /// By conversations.
    pub ratio: f64,
}

/// How often each run was visited.
pub(super) struct VisitCounts {
    counts: Vec<u32>,
    children: Vec<u32>,
}

impl VisitCounts {
    pub(super) fn new(runs: usize) -> Self {
        Self { counts: vec![0; runs], children: vec![0; runs] }
    }

    /// Counts a prompt. Whether it is the first to leave a path that `had` has, before its end.
    pub(super) fn visit(&mut self, runs: &RunTree, path: &[RunId], had: impl Fn(RunId) -> bool) -> bool {
        let mut forked = false;
        for run in path {
            let at = run.0 as usize;
            if self.counts[at] == 0
                && let Some(parent) = runs.parent(*run)
            {
                forked |= self.children[parent.0 as usize] > 0 && had(parent);
                self.children[parent.0 as usize] += 1;
            }
            self.counts[at] += 1;
        }
        forked
    }

    pub(super) fn forks(&self, runs: &RunTree) -> Forks {
        let forks = || self.children.iter().zip(0..).filter(|(children, _)| **children >= 2);
        Forks {
            nodes: forks().count(),
            deep_nodes: forks().filter(|(_, run)| runs.depth(RunId(*run)) >= MIN_DEEP_FORK).count(),
            children: Percentiles::of(forks().map(|(children, _)| f64::from(*children)).collect()),
        }
    }

    pub(super) fn repetition(&self, runs: &RunTree, of: RepetitionCriteria, conversations: usize) -> Repetition {
        let stays = |run: usize| self.counts[run] >= of.visits.max(1);
        let mut inner = vec![false; self.counts.len()];
        for run in (0..self.counts.len()).filter(|run| stays(*run)) {
            if let Some(parent) = runs.parent(RunId(run as u32)) {
                inner[parent.0 as usize] = true;
            }
        }
        let long = |run: usize| runs.depth(RunId(run as u32)).0 > of.longer_than;
        let prefixes = (0..self.counts.len()).filter(|run| stays(*run) && !inner[*run] && long(*run)).count();
        Repetition { of, prefixes, ratio: prefixes as f64 / conversations.max(1) as f64 }
    }
}
