//! Prefix ids of paths of runs in the ledger: a rolling hash over runs, with one id per block end.

use engine_model::runs::{RunId, RunTree};
use vocabulary::{HashSeed, PrefixChain, PrefixId, Tokens};

const SEED: HashSeed = HashSeed(0);

/// Prefix ids of every run's blocks. A block belongs to the run in which it ends.
pub(super) struct RunTreePrefixIds {
    block: Tokens,
    ids: Vec<PrefixId>,
    /// Index of each run's first id, plus the end of the last one's.
    run_starts: Vec<usize>,
}

impl RunTreePrefixIds {
    pub(super) const ROOT: PrefixId = PrefixId(1);

    /// Computes the ids of all runs, in blocks of `block` tokens.
    pub(super) fn new(runs: &RunTree, block: Tokens) -> Self {
        let mut chains = Self { block, ids: Vec::new(), run_starts: vec![0] };
        // Last id on the path to each run's end: runs come after their parents.
        let mut last: Vec<PrefixId> = Vec::with_capacity(runs.len());
        for run in (0..runs.len() as u32).map(RunId) {
            let parent = runs.parent(run);
            let mut id = parent.map_or(Self::ROOT, |parent| last[parent.0 as usize]);
            let ended = |depth: Tokens| depth.whole_blocks(block).0;
            for number in ended(runs.depth(run) - runs.tokens(run))..ended(runs.depth(run)) {
                id = id.extend(SEED, &[run.0, number as u32]);
                chains.ids.push(id);
            }
            last.push(id);
            chains.run_starts.push(chains.ids.len());
        }
        chains
    }

    /// Returns the chain of a prompt of `tokens` tokens whose whole blocks are this path.
    pub(super) fn of(&self, path: &[RunId], tokens: Tokens) -> PrefixChain {
        let own = |run: &RunId| &self.ids[self.run_starts[run.0 as usize]..self.run_starts[run.0 as usize + 1]];
        let mut ids = Vec::with_capacity(path.iter().map(|run| own(run).len()).sum());
        path.iter().for_each(|run| ids.extend_from_slice(own(run)));
        PrefixChain { root: Self::ROOT, block: self.block, ids, tokens }
    }
}

#[cfg(test)]
mod tests {
    use vocabulary::Blocks;

    use super::*;

    #[test]
    fn prompt_paths_share_ids_exactly_as_far_as_they_share_runs() {
        let mut runs = RunTree::default();
        let first = runs.add(None, 100);
        let [left, right] = [60, 60].map(|tokens| runs.add(Some(first), tokens));
        let other = runs.add(None, 100);
        let chains = RunTreePrefixIds::new(&runs, Tokens(20));
        let of = |path: &[RunId]| chains.of(path, runs.end_depth(path) + Tokens(7));
        let [one, two] = [left, right].map(|end| of(&[first, end]));
        assert_eq!((one.blocks(), one.tokens, one.ids[..5].to_vec()), (Blocks(8), Tokens(167), two.ids[..5].to_vec()));
        assert_eq!(of(&[first]).ids, one.ids[..5]);
        let ids = || [&one, &two, &of(&[other])].map(|chain| chain.ids.clone()).concat();
        assert_eq!(ids().into_iter().collect::<std::collections::BTreeSet<_>>().len(), 8 + 3 + 5);
    }

    #[test]
    fn block_across_a_run_boundary_belongs_to_the_run_it_ends_in() {
        let mut runs = RunTree::default();
        let first = runs.add(None, 30);
        let tiny = runs.add(Some(first), 5);
        let [left, right] = [25, 25].map(|tokens| runs.add(Some(tiny), tokens));
        let chains = RunTreePrefixIds::new(&runs, Tokens(20));
        let of = |path: &[RunId]| chains.of(path, runs.end_depth(path)).ids;
        let (one, two) = (of(&[first, tiny, left]), of(&[first, tiny, right]));
        assert_eq!((one.len(), of(&[first, tiny]).len(), of(&[first]).len()), (3, 1, 1));
        assert_eq!(one[0], two[0]);
        assert!(one[1] != two[1] && one[2] != two[2]);
    }
}
