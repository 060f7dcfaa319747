//! Whether a source holds no block without the block before it.
//!
//! Engines evict leaves first, so it nearly always is so; then the depth of a chain can be found by bisection, exactly.

/// Whether every held block's predecessor is held too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shape {
    /// It is: whoever holds a block holds all before it.
    Whole,
    /// Not for sure: only a walk tells.
    Holed,
}

/// Counts over a source's blocks.
#[derive(Default)]
pub(crate) struct Closure {
    /// Blocks in device memory whose predecessor is not.
    holes: u64,
    /// Held blocks in slower tiers, which may fill holes of faster ones.
    slower: u64,
    /// Whether there was a hole at any time since it was asked last.
    holed: bool,
}

impl Closure {
    /// So many blocks lost, and so many got, their predecessor.
    pub(crate) fn holes(&mut self, opened: u32, closed: u32) {
        self.holes += u64::from(opened);
        self.holes -= u64::from(closed);
        self.holed |= self.holes > 0;
    }

    /// A block is held in a slower tier now.
    pub(crate) fn hold_slower(&mut self) {
        self.slower += 1;
        self.holed = true;
    }

    pub(crate) fn drop_slower(&mut self) {
        self.slower -= 1;
    }

    pub(crate) fn shape(&self) -> Shape {
        if self.holes == 0 && self.slower == 0 { Shape::Whole } else { Shape::Holed }
    }

    /// The worst shape since this was asked last.
    pub(crate) fn worst(&mut self) -> Shape {
        let holed = std::mem::take(&mut self.holed) || self.shape() == Shape::Holed;
        if holed { Shape::Holed } else { Shape::Whole }
    }
}
