//! Whether a source holds no block without the block before it.
//!
//! Engines evict leaves first, so it nearly always is so; then the depth of a chain can be found by bisection, exactly.

/// Whether every held block's predecessor is held too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PrefixClosure {
    /// It is: whoever holds a block holds all before it.
    Whole,
    /// Not for sure: only a walk tells.
    Holed,
}

/// Counts over a source's blocks.
#[derive(Default)]
pub(crate) struct ClosureTracker {
    /// Blocks in device memory whose predecessor is not.
    holes: u64,
    /// Held blocks in slower tiers, which may fill holes of faster ones.
    slower_tier_blocks: u64,
    /// Whether there was a hole at any time since it was asked last.
    was_holed: bool,
}

impl ClosureTracker {
    /// So many blocks lost, and so many got, their predecessor.
    pub(crate) fn update_holes(&mut self, opened: u32, closed: u32) {
        self.holes += u64::from(opened);
        self.holes -= u64::from(closed);
        self.was_holed |= self.holes > 0;
    }

    /// A block is held in a slower tier now.
    pub(crate) fn add_slower_tier(&mut self) {
        self.slower_tier_blocks += 1;
        self.was_holed = true;
    }

    pub(crate) fn remove_slower_tier(&mut self) {
        self.slower_tier_blocks -= 1;
    }

    pub(crate) fn current(&self) -> PrefixClosure {
        if self.holes == 0 && self.slower_tier_blocks == 0 { PrefixClosure::Whole } else { PrefixClosure::Holed }
    }

    /// The worst shape since this was asked last.
    pub(crate) fn take_worst(&mut self) -> PrefixClosure {
        let holed = std::mem::take(&mut self.was_holed) || self.current() == PrefixClosure::Holed;
        if holed { PrefixClosure::Holed } else { PrefixClosure::Whole }
    }
}
