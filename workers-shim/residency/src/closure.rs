//! Whether a source holds no block without the block before it.
//!
//! Engines evict leaves first, so it nearly always is so; then the depth of a chain can be found by bisection, exactly.

use vocabulary::BlockHash;

use crate::mix::MixMap;

/// Whether every held block's predecessor is held too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shape {
    /// It is: whoever holds a block holds all before it.
    Whole,
    /// Not for sure: only a walk tells.
    Holed,
}

#[derive(Clone, Copy, Default)]
struct End {
    /// Engine blocks that end here and are held.
    held: u32,
    /// Held engine blocks that begin here.
    after: u32,
}

/// Counts, over the places where engine blocks end and begin.
pub(crate) struct Closure {
    ends: MixMap<BlockHash, End>,
    /// Held blocks whose predecessor is not.
    holes: u64,
    /// Held blocks in slower tiers, which may fill holes of faster ones.
    slower: u64,
    /// Whether there was a hole at any time since it was asked last.
    holed: bool,
}

impl Closure {
    /// Of a source that holds nothing.
    pub(crate) fn new() -> Self {
        Self { ends: MixMap::default(), holes: 0, slower: 0, holed: false }
    }

    /// A block is held in device memory now; `before` is none at the start of a chain.
    pub(crate) fn hold(&mut self, before: Option<BlockHash>, end: BlockHash) {
        let ends = self.ends.entry(end).or_default();
        ends.held += 1;
        if ends.held == 1 {
            self.holes -= u64::from(ends.after);
        }
        if let Some(before) = before {
            let begins = self.ends.entry(before).or_default();
            begins.after += 1;
            self.holes += u64::from(begins.held == 0);
        }
        self.holed |= self.holes > 0;
    }

    /// It no longer is. Must have been held.
    pub(crate) fn drop(&mut self, before: Option<BlockHash>, end: BlockHash) {
        if let Some(ends) = self.ends.get_mut(&end) {
            ends.held -= 1;
            if ends.held == 0 {
                self.holes += u64::from(ends.after);
                self.forget_unused(end);
            }
        }
        if let Some(before) = before
            && let Some(begins) = self.ends.get_mut(&before)
        {
            begins.after -= 1;
            self.holes -= u64::from(begins.held == 0);
            self.forget_unused(before);
        }
        self.holed |= self.holes > 0;
    }

    fn forget_unused(&mut self, place: BlockHash) {
        if self.ends.get(&place).is_some_and(|end| end.held == 0 && end.after == 0) {
            self.ends.remove(&place);
        }
    }

    /// A block is held in a slower tier now.
    pub(crate) fn hold_slower(&mut self) {
        self.slower += 1;
        self.holed = true;
    }

    /// It no longer is.
    pub(crate) fn drop_slower(&mut self) {
        self.slower -= 1;
    }

    /// The shape now.
    pub(crate) fn shape(&self) -> Shape {
        if self.holes == 0 && self.slower == 0 { Shape::Whole } else { Shape::Holed }
    }

    /// The worst shape since this was asked last.
    pub(crate) fn worst(&mut self) -> Shape {
        let holed = std::mem::take(&mut self.holed) || self.shape() == Shape::Holed;
        if holed { Shape::Holed } else { Shape::Whole }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: BlockHash = BlockHash(1);
    const B: BlockHash = BlockHash(2);
    const C: BlockHash = BlockHash(3);

    #[test]
    fn a_hole_opens_and_closes_from_either_side() {
        let mut closure = Closure::new();
        closure.hold(None, A);
        closure.hold(Some(A), B);
        closure.hold(Some(B), C);
        assert_eq!((closure.shape(), closure.worst()), (Shape::Whole, Shape::Whole));
        closure.drop(Some(A), B);
        assert_eq!(closure.shape(), Shape::Holed, "C hangs in the air");
        closure.hold(Some(A), B);
        assert_eq!((closure.shape(), closure.worst(), closure.worst()), (Shape::Whole, Shape::Holed, Shape::Whole));
        closure.drop(Some(A), B);
        closure.drop(Some(B), C);
        assert_eq!(closure.shape(), Shape::Whole);
        closure.drop(None, A);
        assert!(closure.ends.is_empty() && closure.holes == 0);
    }

    #[test]
    fn siblings_and_second_names_are_counted() {
        let mut closure = Closure::new();
        closure.hold(Some(A), B);
        closure.hold(Some(A), C);
        assert_eq!(closure.holes, 2);
        closure.hold(None, A);
        closure.hold(None, A);
        closure.drop(None, A);
        assert_eq!(closure.shape(), Shape::Whole);
        closure.drop(None, A);
        assert_eq!(closure.holes, 2);
    }

    #[test]
    fn slower_tiers_make_it_a_walk() {
        let mut closure = Closure::new();
        closure.hold_slower();
        assert_eq!(closure.shape(), Shape::Holed);
        closure.drop_slower();
        assert_eq!((closure.shape(), closure.worst()), (Shape::Whole, Shape::Holed));
    }
}
