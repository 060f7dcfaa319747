//! How many blocks hang on a block: nearly always one or none, so two bytes count them, and more are counted elsewhere.

use crate::fold_hash::FoldHashMap;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ChildCount {
    /// [`OVERFLOW`] where they are counted elsewhere.
    all: u8,
    /// Those of them that serve from device memory.
    serving: u8,
}

const OVERFLOW: u8 = u8::MAX;
/// So few of many that they are counted here again.
const SHRINK_BELOW: u32 = 128;

impl ChildCount {
    pub(super) const NONE: Self = Self { all: 0, serving: 0 };
}

#[derive(Clone, Copy)]
struct LargeChildCount {
    all: u32,
    serving: u32,
}

/// Whether a child serves from device memory from now on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ServingChange {
    Starts,
    Stops,
}

/// Those of the blocks that have many.
#[derive(Default)]
pub(super) struct LargeChildCounts(FoldHashMap<u32, LargeChildCount>);

impl LargeChildCounts {
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Blocks are where these numbers say now.
    pub(super) fn renumber(&mut self, numbers: &[u32]) {
        self.0 = self.0.drain().map(|(at, many)| (numbers[at as usize], many)).collect();
    }

    /// Of the block at `at`.
    pub(super) fn serving(&self, at: u32, few: ChildCount) -> u32 {
        if few.all == OVERFLOW { self.0.get(&at).map_or(0, |many| many.serving) } else { u32::from(few.serving) }
    }

    /// The block at `at` has one more, which does not serve yet.
    pub(super) fn add(&mut self, at: u32, few: &mut ChildCount) {
        if few.all < OVERFLOW {
            few.all += 1;
            if few.all == OVERFLOW {
                self.0.insert(at, LargeChildCount { all: u32::from(OVERFLOW), serving: u32::from(few.serving) });
            }
        } else if let Some(many) = self.0.get_mut(&at) {
            many.all += 1;
        }
    }

    /// One less, which does not serve any more.
    pub(super) fn remove(&mut self, at: u32, few: &mut ChildCount) {
        if few.all < OVERFLOW {
            few.all -= 1;
        } else if let Some(many) = self.0.get_mut(&at) {
            many.all -= 1;
            if many.all == SHRINK_BELOW {
                *few = ChildCount { all: many.all as u8, serving: many.serving as u8 };
                self.0.remove(&at);
            }
        }
    }

    /// One of them serves from now on, or no more.
    pub(super) fn set_serving(&mut self, at: u32, few: &mut ChildCount, serves: ServingChange) {
        match (self.0.get_mut(&at).filter(|_| few.all == OVERFLOW), serves) {
            (Some(many), ServingChange::Starts) => many.serving += 1,
            (Some(many), ServingChange::Stops) => many.serving -= 1,
            (None, ServingChange::Starts) => few.serving += 1,
            (None, ServingChange::Stops) => few.serving -= 1,
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
