//! Number of children of a block: nearly always one or none, so it takes two bytes, and larger counts are stored in a
//! map.

use crate::fold_hash::FoldHashMap;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ChildCount {
    /// Number of children; [`OVERFLOW`] if the counts are in the map.
    all: u8,
    /// Number of children that serve from device memory.
    serving: u8,
}

const OVERFLOW: u8 = u8::MAX;
/// Counts below this are moved from the map back to the node.
const SHRINK_BELOW: u32 = 128;

impl ChildCount {
    pub(super) const NONE: Self = Self { all: 0, serving: 0 };
}

#[derive(Clone, Copy)]
struct LargeChildCount {
    all: u32,
    serving: u32,
}

/// Whether a child starts or stops to serve from device memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ServingChange {
    Starts,
    Stops,
}

/// The counts of blocks with many children.
#[derive(Default)]
pub(super) struct LargeChildCounts(FoldHashMap<u32, LargeChildCount>);

impl LargeChildCounts {
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Applies new node indexes after compaction.
    pub(super) fn renumber(&mut self, numbers: &[u32]) {
        self.0 = self.0.drain().map(|(at, many)| (numbers[at as usize], many)).collect();
    }

    /// Returns the number of serving children of the block at `at`.
    pub(super) fn serving(&self, at: u32, count: ChildCount) -> u32 {
        if count.all == OVERFLOW { self.0.get(&at).map_or(0, |many| many.serving) } else { u32::from(count.serving) }
    }

    /// Adds a child, which does not serve yet, to the block at `at`.
    pub(super) fn add(&mut self, at: u32, count: &mut ChildCount) {
        if count.all < OVERFLOW {
            count.all += 1;
            if count.all == OVERFLOW {
                self.0.insert(at, LargeChildCount { all: u32::from(OVERFLOW), serving: u32::from(count.serving) });
            }
        } else if let Some(many) = self.0.get_mut(&at) {
            many.all += 1;
        }
    }

    /// Removes a child, which does not serve any more.
    pub(super) fn remove(&mut self, at: u32, count: &mut ChildCount) {
        if count.all < OVERFLOW {
            count.all -= 1;
        } else if let Some(many) = self.0.get_mut(&at) {
            many.all -= 1;
            if many.all == SHRINK_BELOW {
                *count = ChildCount { all: many.all as u8, serving: many.serving as u8 };
                self.0.remove(&at);
            }
        }
    }

    /// Records that a child starts or stops to serve.
    pub(super) fn set_serving(&mut self, at: u32, count: &mut ChildCount, serves: ServingChange) {
        match (self.0.get_mut(&at).filter(|_| count.all == OVERFLOW), serves) {
            (Some(many), ServingChange::Starts) => many.serving += 1,
            (Some(many), ServingChange::Stops) => many.serving -= 1,
            (None, ServingChange::Starts) => count.serving += 1,
            (None, ServingChange::Stops) => count.serving -= 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_and_large_child_counts_agree() {
        let (mut children, mut few) = (LargeChildCounts::default(), ChildCount::NONE);
        for n in 0..1000 {
            children.add(7, &mut few);
            if n % 2 == 0 {
                children.set_serving(7, &mut few, ServingChange::Starts);
            }
            assert_eq!(children.serving(7, few), n / 2 + 1);
        }
        assert!(!children.is_empty());
        for n in (0..1000).rev() {
            assert_eq!(children.serving(7, few), n / 2 + 1);
            if n % 2 == 0 {
                children.set_serving(7, &mut few, ServingChange::Stops);
            }
            children.remove(7, &mut few);
        }
        assert!(few == ChildCount::NONE && children.is_empty());
    }

    #[test]
    fn overflow_to_large_counts_loses_nothing() {
        let (mut children, mut few) = (LargeChildCounts::default(), ChildCount::NONE);
        (0..255).for_each(|_| children.add(1, &mut few));
        (0..255).for_each(|_| children.set_serving(1, &mut few, ServingChange::Starts));
        for _ in 0..300 {
            children.set_serving(1, &mut few, ServingChange::Stops);
            children.remove(1, &mut few);
            assert_eq!(children.serving(1, few), 254);
            children.add(1, &mut few);
            children.set_serving(1, &mut few, ServingChange::Starts);
        }
        assert_eq!(children.serving(1, few), 255);
    }
}
