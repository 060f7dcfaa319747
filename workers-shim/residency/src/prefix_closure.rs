//! Tracks whether a source holds no block without its parent block.
//!
//! Engines evict leaves first, so this is nearly always the case, and then the depth of a chain can be found exactly by
//! bisection.

/// Whether the parents of all held blocks are held, too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PrefixClosure {
    /// They are: whoever holds a block holds all blocks before it.
    Whole,
    /// Not certain: the chain has to be walked.
    Holed,
}

/// Counters over a source's blocks.
#[derive(Default)]
pub(crate) struct PrefixHoleCounters {
    /// Blocks in device memory whose parent is not there.
    holes: u64,
    /// Blocks held in slower tiers, which may fill holes of faster ones.
    slower_tier_blocks: u64,
    /// Whether there was a hole at any time since the last query.
    was_holed: bool,
}

impl PrefixHoleCounters {
    /// Adds blocks that lost (`opened`) or got (`closed`) their parent.
    pub(crate) fn update_holes(&mut self, opened: u32, closed: u32) {
        self.holes += u64::from(opened);
        self.holes -= u64::from(closed);
        self.was_holed |= self.holes > 0;
    }

    /// Records that a block is held in a slower tier.
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

    /// Returns the worst state since the last call.
    pub(crate) fn take_worst(&mut self) -> PrefixClosure {
        let holed = std::mem::take(&mut self.was_holed) || self.current() == PrefixClosure::Holed;
        if holed { PrefixClosure::Holed } else { PrefixClosure::Whole }
    }
}
