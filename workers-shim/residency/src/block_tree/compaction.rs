//! Compaction of the nodes after most of them were freed, so that a burst does not hold its memory forever.

use super::{BlockTree, NO_BLOCK};

/// Number of nodes below which nothing is compacted.
const MIN_COMPACTED_NODES: usize = 8;

impl BlockTree {
    /// Frees memory if three of four nodes are free. One pass over all nodes, after at least as many removals.
    pub(super) fn compact(&mut self) {
        if self.nodes.len() < MIN_COMPACTED_NODES || self.free.len() < self.nodes.len() / 4 * 3 {
            return;
        }
        let mut numbers = vec![0; self.nodes.len()];
        self.free.drain(..).for_each(|at| numbers[at as usize] = NO_BLOCK);
        self.free.shrink_to_fit();
        let mut next = 0;
        for number in numbers.iter_mut().filter(|number| **number != NO_BLOCK) {
            *number = next;
            next += 1;
        }
        let nodes = std::mem::replace(&mut self.nodes, Vec::with_capacity(next as usize));
        for (mut node, _) in nodes.into_iter().zip(&numbers).filter(|(_, number)| **number != NO_BLOCK) {
            if node.parent != NO_BLOCK {
                node.parent = numbers[node.parent as usize];
            }
            self.nodes.push(node);
        }
        let renumbered = |at: u32| numbers[at as usize];
        self.engine_hashes.renumber(&numbers);
        self.stumps = self.stumps.drain().map(|(end, at)| (end, renumbered(at))).collect();
        self.overflow_copies = self.overflow_copies.drain().map(|(at, copies)| (renumbered(at), copies)).collect();
        self.children.renumber(&numbers);
        self.inner.renumber(&numbers, NO_BLOCK);
    }
}
