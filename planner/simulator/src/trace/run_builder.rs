//! Radix tree over block ids that cuts prompts into runs: a run ends where any prompt ends or diverges.

use std::collections::{BTreeMap, HashMap, HashSet};

use engine_model::runs::{RunId, RunTree};

use super::block_ids::PromptBlockIds;

/// Builder of the tree. Prompts are kept as lists until it is frozen.
#[derive(Default)]
pub(crate) struct RadixBuilder {
    lists: Vec<PromptBlockIds>,
    nodes: Vec<BlockRangeNode>,
    roots: BTreeMap<u64, usize>,
}

/// Blocks `from..to` of a list.
struct BlockRangeNode {
    list: usize,
    from: u32,
    to: u32,
    children: BTreeMap<u64, usize>,
    run: Option<RunId>,
}

/// Shared start of a tree: trees with the same key share it, such as the same tools at the start of several sessions.
pub(crate) struct ToolPrefix<'a> {
    /// Key that identifies the shared prefix.
    pub(crate) key: u64,
    pub(crate) blocks: u32,
    pub(crate) list: usize,
    /// Runs of the shared prefixes of earlier trees, by key and blocks.
    pub(crate) known: &'a mut HashMap<(u64, u32, u32), RunId>,
}

impl RadixBuilder {
    /// Inserts a prompt and returns its number. Its runs are known once the tree is frozen.
    pub(crate) fn insert(&mut self, ids: PromptBlockIds) -> usize {
        let (list, blocks) = (self.lists.len(), ids.len());
        self.lists.push(ids);
        self.cut(list, blocks);
        list
    }

    pub(crate) fn list(&self, list: usize) -> &PromptBlockIds {
        &self.lists[list]
    }

    /// Makes a run end after `blocks` blocks of a list.
    pub(crate) fn cut(&mut self, list: usize, blocks: u32) {
        let end = blocks.min(self.lists[list].len());
        let (mut at, mut parent) = (0, None);
        while at < end {
            let first = self.lists[list].id(at).expect("`at` lies within the list");
            let Some(mut child) = self.children(parent).get(&first).copied() else {
                let node = self.add(BlockRangeNode { list, from: at, to: end, children: BTreeMap::new(), run: None });
                self.children(parent).insert(first, node);
                return;
            };
            let node = &self.nodes[child];
            let most = (node.to - node.from).min(end - at);
            let common = self.lists[list].common_prefix_len(at, &self.lists[node.list], node.from).min(most);
            if common < node.to - node.from {
                child = self.split(child, common);
                self.children(parent).insert(first, child);
            }
            at += common;
            parent = Some(child);
        }
    }

    fn children(&mut self, of: Option<usize>) -> &mut BTreeMap<u64, usize> {
        match of {
            None => &mut self.roots,
            Some(node) => &mut self.nodes[node].children,
        }
    }

    fn add(&mut self, node: BlockRangeNode) -> usize {
        self.nodes.push(node);
        self.nodes.len() - 1
    }

    /// Splits a node after its first `blocks` blocks: they become a new node, and the rest its child.
    fn split(&mut self, node: usize, blocks: u32) -> usize {
        let BlockRangeNode { list, from, .. } = self.nodes[node];
        let middle = from + blocks;
        let next = self.lists[list].id(middle).expect("a node is split within");
        self.nodes[node].from = middle;
        self.add(BlockRangeNode { list, from, to: middle, children: BTreeMap::from([(next, node)]), run: None })
    }

    /// Assigns a run to every node; no list may be inserted afterwards.
    pub(crate) fn freeze(&mut self, block: u32, runs: &mut RunTree, mut preamble: Option<ToolPrefix<'_>>) {
        let mut shared = HashSet::new();
        let mut open: Vec<(usize, Option<RunId>)> = self.roots.values().rev().map(|root| (*root, None)).collect();
        while let Some((at, parent)) = open.pop() {
            let node = &self.nodes[at];
            let key = preamble.as_ref().and_then(|preamble| self.shared_prefix_key(node, parent, (preamble, &shared)));
            let mut fresh = || runs.add(parent, (node.to - node.from).saturating_mul(block));
            let run = match (key, &mut preamble) {
                (Some(key), Some(preamble)) => *preamble.known.entry(key).or_insert_with(fresh),
                _ => fresh(),
            };
            if key.is_some() {
                shared.insert(run);
            }
            open.extend(node.children.values().rev().map(|child| (*child, Some(run))));
            self.nodes[at].run = Some(run);
        }
    }

    fn shared_prefix_key(
        &self,
        node: &BlockRangeNode,
        parent: Option<RunId>,
        (preamble, shared): (&ToolPrefix<'_>, &HashSet<RunId>),
    ) -> Option<(u64, u32, u32)> {
        let inside = node.to <= preamble.blocks;
        let follows = parent.is_none_or(|parent| shared.contains(&parent));
        let like = || {
            let (first, own) = (&self.lists[preamble.list], &self.lists[node.list]);
            node.list == preamble.list || first.common_prefix_len(node.from, own, node.from) >= node.to - node.from
        };
        (inside && follows && like()).then_some((preamble.key, node.from, node.to))
    }

    /// Returns the runs of the first `blocks` blocks of a list, which must end at a cut.
    pub(crate) fn path(&self, list: usize, blocks: u32) -> Vec<RunId> {
        let ids = &self.lists[list];
        let (mut at, mut children, mut path) = (0, &self.roots, Vec::new());
        while at < blocks.min(ids.len()) {
            let node = ids.id(at).and_then(|first| children.get(&first)).map(|node| &self.nodes[*node]);
            let node = node.expect("every list was inserted");
            path.push(node.run.expect("the tree is frozen"));
            (at, children) = (node.to, &node.children);
        }
        path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(all: &[u64]) -> PromptBlockIds {
        all.iter().copied().collect()
    }

    fn lengths(radix: &RadixBuilder, runs: &RunTree, list: usize) -> Vec<u64> {
        radix.path(list, u32::MAX).into_iter().map(|run| runs.tokens(run).0).collect()
    }

    #[test]
    fn runs_end_where_prompts_end_or_diverge() {
        let (mut radix, mut runs) = (RadixBuilder::default(), RunTree::default());
        let lists = [&[1, 2, 3, 4, 5, 6][..], &[1, 2, 3], &[1, 2, 3, 4, 9], &[7]].map(|all| radix.insert(ids(all)));
        radix.freeze(10, &mut runs, None);
        assert_eq!(lengths(&radix, &runs, lists[0]), [30, 10, 20]);
        assert_eq!(lengths(&radix, &runs, lists[1]), [30]);
        assert_eq!(lengths(&radix, &runs, lists[2]), [30, 10, 10]);
        assert_eq!(lengths(&radix, &runs, lists[3]), [10]);
        let (a, c) = (radix.path(lists[0], 6), radix.path(lists[2], 5));
        assert_eq!(a[..2], c[..2]);
        assert_ne!(a[2], c[2]);
        assert_eq!((runs.len(), runs.depth(a[2]).0, runs.parent(a[2])), (5, 60, Some(a[1])));
    }

    #[test]
    fn runs_do_not_depend_on_prompt_order() {
        let prompts = [&[1, 2, 3, 4][..], &[1, 2], &[1, 2, 8, 9], &[1, 2, 8, 9, 10, 11], &[5, 6]];
        let mut orders = Vec::new();
        for turn in 0..prompts.len() {
            let (mut radix, mut runs) = (RadixBuilder::default(), RunTree::default());
            let mut lists: Vec<_> = (0..prompts.len()).map(|at| (at + turn) % prompts.len()).collect();
            lists.iter_mut().for_each(|at| *at = 100 * *at + radix.insert(ids(prompts[*at])));
            lists.sort_unstable();
            radix.freeze(1, &mut runs, None);
            orders.push(lists.iter().map(|list| lengths(&radix, &runs, list % 100)).collect::<Vec<_>>());
        }
        assert!(orders.iter().all(|order| *order == orders[0]), "{orders:?}");
    }

    #[test]
    fn shared_tool_prefix_is_one_run_across_trees() {
        let (mut runs, mut known) = (RunTree::default(), HashMap::new());
        let mut tree = |prompt: &[u64], key, blocks| {
            let mut radix = RadixBuilder::default();
            let list = radix.insert(ids(prompt));
            radix.cut(list, blocks);
            radix.freeze(1, &mut runs, Some(ToolPrefix { key, blocks, list, known: &mut known }));
            radix.path(list, u32::MAX)
        };
        let (a, b, c) = (tree(&[1, 2, 3, 4], 7, 2), tree(&[51, 52, 53], 7, 2), tree(&[1, 2, 3], 8, 2));
        assert_eq!(a[0], b[0], "ids are each trace's own: the key says that the tools are the same");
        assert_ne!(a[1], b[1]);
        assert_ne!(a[0], c[0]);
    }
}
