//! How many blocks hang on a block: nearly always one or none, so two bytes count them, and more are counted elsewhere.

use crate::mix::MixMap;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Few {
    /// [`MANY`] where they are counted elsewhere.
    all: u8,
    /// Those of them that serve from device memory.
    serving: u8,
}

const MANY: u8 = u8::MAX;
/// So few of many that they are counted here again.
const FEW_AGAIN: u32 = 128;

impl Few {
    pub(super) const NONE: Self = Self { all: 0, serving: 0 };
}

#[derive(Clone, Copy)]
struct Many {
    all: u32,
    serving: u32,
}

/// Whether a child serves from device memory from now on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Serves {
    From,
    NoMore,
}

/// Those of the blocks that have many.
#[derive(Default)]
pub(super) struct Children(MixMap<u32, Many>);

impl Children {
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Blocks are where these numbers say now.
    pub(super) fn renumber(&mut self, numbers: &[u32]) {
        self.0 = self.0.drain().map(|(at, many)| (numbers[at as usize], many)).collect();
    }

    /// Of the block at `at`.
    pub(super) fn serving(&self, at: u32, few: Few) -> u32 {
        if few.all == MANY { self.0.get(&at).map_or(0, |many| many.serving) } else { u32::from(few.serving) }
    }

    /// The block at `at` has one more, which does not serve yet.
    pub(super) fn add(&mut self, at: u32, few: &mut Few) {
        if few.all < MANY {
            few.all += 1;
            if few.all == MANY {
                self.0.insert(at, Many { all: u32::from(MANY), serving: u32::from(few.serving) });
            }
        } else if let Some(many) = self.0.get_mut(&at) {
            many.all += 1;
        }
    }

    /// One less, which does not serve any more.
    pub(super) fn remove(&mut self, at: u32, few: &mut Few) {
        if few.all < MANY {
            few.all -= 1;
        } else if let Some(many) = self.0.get_mut(&at) {
            many.all -= 1;
            if many.all == FEW_AGAIN {
                *few = Few { all: many.all as u8, serving: many.serving as u8 };
                self.0.remove(&at);
            }
        }
    }

    /// One of them serves from now on, or no more.
    pub(super) fn serve(&mut self, at: u32, few: &mut Few, serves: Serves) {
        match (self.0.get_mut(&at).filter(|_| few.all == MANY), serves) {
            (Some(many), Serves::From) => many.serving += 1,
            (Some(many), Serves::NoMore) => many.serving -= 1,
            (None, Serves::From) => few.serving += 1,
            (None, Serves::NoMore) => few.serving -= 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_and_many_are_counted_alike() {
        let (mut children, mut few) = (Children::default(), Few::NONE);
        for n in 0..1000 {
            children.add(7, &mut few);
            if n % 2 == 0 {
                children.serve(7, &mut few, Serves::From);
            }
            assert_eq!(children.serving(7, few), n / 2 + 1);
        }
        assert!(!children.is_empty());
        for n in (0..1000).rev() {
            assert_eq!(children.serving(7, few), n / 2 + 1);
            if n % 2 == 0 {
                children.serve(7, &mut few, Serves::NoMore);
            }
            children.remove(7, &mut few);
        }
        assert!(few == Few::NONE && children.is_empty());
    }

    #[test]
    fn at_the_edge_nothing_is_lost() {
        let (mut children, mut few) = (Children::default(), Few::NONE);
        (0..255).for_each(|_| children.add(1, &mut few));
        (0..255).for_each(|_| children.serve(1, &mut few, Serves::From));
        for _ in 0..300 {
            children.serve(1, &mut few, Serves::NoMore);
            children.remove(1, &mut few);
            assert_eq!(children.serving(1, few), 254);
            children.add(1, &mut few);
            children.serve(1, &mut few, Serves::From);
        }
        assert_eq!(children.serving(1, few), 255);
    }
}
