//! Block ids of a prompt as ranges of consecutive ids: the prompts of agents need a few ranges, not thousands of
//! blocks.

/// Ids of the whole blocks of a prompt, in order.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct PromptBlockIds {
    /// Position of each range in the prompt, with its first id.
    runs: Vec<(u32, u64)>,
    blocks: u32,
}

impl PromptBlockIds {
    pub(crate) fn len(&self) -> u32 {
        self.blocks
    }

    /// Appends `count` consecutive ids from `first` on.
    pub(crate) fn push_run(&mut self, first: u64, count: u32) {
        if count == 0 {
            return;
        }
        let goes_on = self.runs.last().is_some_and(|(at, id)| id + u64::from(self.blocks - at) == first);
        if !goes_on {
            self.runs.push((self.blocks, first));
        }
        self.blocks += count;
    }

    /// Returns the number of ranges in the first `blocks` blocks.
    pub(crate) fn runs(&self, blocks: u32) -> usize {
        self.runs.partition_point(|(at, _)| *at < blocks)
    }

    /// Returns a copy of the first `blocks` blocks.
    pub(crate) fn first(&self, blocks: u32) -> Self {
        Self { runs: self.runs[..self.runs(blocks)].to_vec(), blocks: self.blocks.min(blocks) }
    }

    /// Keeps only the first `blocks` blocks.
    pub(crate) fn truncate(&mut self, blocks: u32) {
        self.runs.retain(|(at, _)| *at < blocks);
        self.blocks = self.blocks.min(blocks);
    }

    pub(crate) fn id(&self, at: u32) -> Option<u64> {
        let (from, first) = self.runs[self.run(at)?];
        Some(first + u64::from(at - from))
    }

    /// Returns how many ids are equal from `at` here and from `there` in `other` on.
    pub(crate) fn common_prefix_len(&self, at: u32, other: &Self, there: u32) -> u32 {
        let (Some(mut a), Some(mut b)) = (self.run(at), other.run(there)) else { return 0 };
        let mut equal = 0;
        while a < self.runs.len() && b < other.runs.len() {
            let (here, beyond) = (at + equal, there + equal);
            if self.runs[a].1 + u64::from(here - self.runs[a].0)
                != other.runs[b].1 + u64::from(beyond - other.runs[b].0)
            {
                break;
            }
            let (rest, other_rest) = (self.run_end(a) - here, other.run_end(b) - beyond);
            let step = rest.min(other_rest);
            equal += step;
            a += usize::from(step == rest);
            b += usize::from(step == other_rest);
        }
        equal
    }

    fn run(&self, at: u32) -> Option<usize> {
        (at < self.blocks).then(|| self.runs.partition_point(|(from, _)| *from <= at) - 1)
    }

    fn run_end(&self, run: usize) -> u32 {
        self.runs.get(run + 1).map_or(self.blocks, |(from, _)| *from)
    }
}

impl FromIterator<u64> for PromptBlockIds {
    fn from_iter<I: IntoIterator<Item = u64>>(ids: I) -> Self {
        let mut all = Self::default();
        ids.into_iter().for_each(|id| all.push_run(id, 1));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::PromptBlockIds;

    fn ids(all: &[u64]) -> PromptBlockIds {
        all.iter().copied().collect()
    }

    #[test]
    fn adjacent_ids_merge_into_runs_and_read_back() {
        let all = ids(&[1, 2, 3, 9, 10, 4]);
        assert_eq!((all.runs.len(), all.len()), (3, 6));
        let back: Vec<_> = (0..7).map(|at| all.id(at)).collect();
        assert_eq!(back, [Some(1), Some(2), Some(3), Some(9), Some(10), Some(4), None]);
    }

    #[test]
    fn common_prefix_length_does_not_depend_on_run_boundaries() {
        let a = ids(&[1, 2, 3, 4, 9, 10]);
        let mut b = PromptBlockIds::default();
        [(1, 2), (3, 2), (9, 1), (11, 5)].into_iter().for_each(|(first, count)| b.push_run(first, count));
        assert_eq!(a.common_prefix_len(0, &b, 0), 5);
        assert_eq!(a.common_prefix_len(2, &b, 2), 3);
        assert_eq!(a.common_prefix_len(0, &b, 1), 0);
        assert_eq!(a.common_prefix_len(6, &b, 0), 0, "beyond the end nothing is shared");
    }

    #[test]
    fn truncated_block_ids_continue_where_they_were_cut() {
        let mut all = ids(&[1, 2, 3, 9, 10]);
        all.truncate(4);
        assert_eq!(all, ids(&[1, 2, 3, 9]));
        assert_eq!((all.first(2), all.first(3), all.first(9)), (ids(&[1, 2]), ids(&[1, 2, 3]), all.clone()));
        assert_eq!([0, 2, 3, 4].map(|blocks| all.runs(blocks)), [0, 1, 1, 2]);
        all.truncate(2);
        all.push_run(3, 1);
        assert_eq!(all, ids(&[1, 2, 3]));
        all.truncate(0);
        assert_eq!(all.len(), 0);
    }
}
