//! Tree of all prompts with the visits of each run: its forks, and repeated prefixes.

use engine_model::runs::{RunId, RunTree};
use serde::Serialize;
use smart_default::SmartDefault;
use vocabulary::Tokens;

use super::Percentiles;

/// Depth from which a fork is more than a different first message.
const MIN_DEEP_FORK: Tokens = Tokens(4_096);

/// Forks in the tree of prompts.
#[derive(Clone, Copy, PartialEq, Serialize, Debug)]
pub struct ForkStats {
    /// Runs with at least two different followers.
    pub nodes: usize,
    /// Such runs that end at a depth of at least 4,096 tokens.
    pub deep_nodes: usize,
    /// Number of followers of these runs.
    pub children: Percentiles,
}

/// Criteria for a repeated prefix.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug, SmartDefault)]
pub struct RepeatedPrefixCriteria {
    /// Runs with fewer visits are pruned.
    #[default(2)]
    pub min_visits: u32,
    /// A prefix must have at least this many tokens.
    #[default(1_024)]
    pub min_prefix_tokens: u64,
}

/// Repeated prefixes: the leaves of the prompt tree after pruning rarely visited runs.
#[derive(Clone, Copy, PartialEq, Serialize, Debug)]
pub struct RepeatedPrefixStats {
    /// Criteria used.
    #[serde(flatten)]
    pub of: RepeatedPrefixCriteria,
    /// Leaves of the pruned tree that are long enough.
    pub prefixes: usize,
    /// Number of these prefixes divided by the number of conversations.
    pub ratio: f64,
}

/// Number of visits of each run.
pub(super) struct VisitCounts {
    counts: Vec<u32>,
    children: Vec<u32>,
}

impl VisitCounts {
    pub(super) fn new(runs: usize) -> Self {
        Self { counts: vec![0; runs], children: vec![0; runs] }
    }

    /// Counts a prompt. Returns whether it is the first one to leave, before its end, a path that `had` contains.
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

    pub(super) fn forks(&self, runs: &RunTree) -> ForkStats {
        let forks = || self.children.iter().zip(0..).filter(|(children, _)| **children >= 2);
        ForkStats {
            nodes: forks().count(),
            deep_nodes: forks().filter(|(_, run)| runs.depth(RunId(*run)) >= MIN_DEEP_FORK).count(),
            children: Percentiles::of(forks().map(|(children, _)| f64::from(*children)).collect()),
        }
    }

    pub(super) fn repetition(
        &self,
        runs: &RunTree,
        of: RepeatedPrefixCriteria,
        conversations: usize,
    ) -> RepeatedPrefixStats {
        let stays = |run: usize| self.counts[run] >= of.min_visits.max(1);
        let mut inner = vec![false; self.counts.len()];
        for run in (0..self.counts.len()).filter(|run| stays(*run)) {
            if let Some(parent) = runs.parent(RunId(run as u32)) {
                inner[parent.0 as usize] = true;
            }
        }
        let long = |run: usize| runs.depth(RunId(run as u32)).0 >= of.min_prefix_tokens;
        let prefixes = (0..self.counts.len()).filter(|run| stays(*run) && !inner[*run] && long(*run)).count();
        RepeatedPrefixStats { of, prefixes, ratio: prefixes as f64 / conversations.max(1) as f64 }
    }
}
