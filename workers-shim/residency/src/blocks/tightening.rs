//! Moving blocks together once most of many are gone, so that a burst is not paid for until the process ends.

use super::{Blocks, NOWHERE};

/// Places below which nothing is moved.
const LEAST: usize = 8;

impl Blocks {
    /// Gives memory back where three of four places are free. A pass over all of them, after as many removals.
    pub(super) fn tighten(&mut self) {
        if self.nodes.len() < LEAST || self.free.len() < self.nodes.len() / 4 * 3 {
            return;
        }
        let mut numbers = vec![0; self.nodes.len()];
        self.free.drain(..).for_each(|at| numbers[at as usize] = NOWHERE);
        self.free.shrink_to_fit();
        let mut next = 0;
        for number in numbers.iter_mut().filter(|number| **number != NOWHERE) {
            *number = next;
            next += 1;
        }
        let nodes = std::mem::replace(&mut self.nodes, Vec::with_capacity(next as usize));
        for (mut node, _) in nodes.into_iter().zip(&numbers).filter(|(_, number)| **number != NOWHERE) {
            if node.before != NOWHERE {
                node.before = numbers[node.before as usize];
            }
            self.nodes.push(node);
        }
        let renumbered = |at: u32| numbers[at as usize];
        self.names.renumber(&numbers);
        self.stumps = self.stumps.drain().map(|(end, at)| (end, renumbered(at))).collect();
        self.many = self.many.drain().map(|(at, copies)| (renumbered(at), copies)).collect();
        self.children.renumber(&numbers);
        self.inner.renumber(&numbers, NOWHERE);
    }
}
