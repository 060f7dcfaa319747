//! The blocks of one source whose place is known: found by the engine's name, linked to the block before.
//!
//! A block costs 24 bytes, and about 16 among the names. A block that is gone while others hang on it leaves a *stump*, so that
//! they find it again when it is stored again; there are never more stumps than blocks.

mod child_count;
mod compaction;
mod engine_hashes;
mod inner_hashes;
mod snapshot;

use vocabulary::{BlockHash, PrefixId, Tier};

use crate::copies::{BlockCopies, CopyLocation, PackedCopies};
use crate::event::EngineHash;
use crate::fold_hash::FoldHashMap;
use crate::index::ResidencyChange;
use crate::prefix_closure::{ClosureTracker, PrefixClosure};
use child_count::{ChildCount, LargeChildCounts, ServingChange};
use engine_hashes::EngineHashTable;
use inner_hashes::InnerHashes;

pub(crate) use snapshot::{BlocksByEnd, PlacedBlock};

/// Where a block is kept, as long as it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BlockHandle(u32);

const NO_BLOCK: u32 = u32::MAX;

/// A block, or a stump: one without copies.
struct BlockNode {
    end_prefix: [u64; 2],
    /// The block before; [`NO_BLOCK`] at the start of a chain, and for stumps.
    parent: u32,
    /// Blocks whose `before` is this one.
    children: ChildCount,
    copies: PackedCopies,
}

pub(crate) struct BlockPlacement<'a> {
    pub(crate) engine_hash: EngineHash,
    /// None at the start of a chain.
    pub(crate) parent: Option<BlockHandle>,
    pub(crate) end: PrefixId,
    /// Chain blocks inside this engine block before its last one.
    pub(crate) inner_hashes: &'a [BlockHash],
}

#[derive(Default)]
pub(crate) struct BlockTree {
    nodes: Vec<BlockNode>,
    free: Vec<u32>,
    engine_hashes: EngineHashTable,
    children: LargeChildCounts,
    stumps: FoldHashMap<BlockHash, u32>,
    /// Copies that do not fit into a node.
    overflow_copies: FoldHashMap<u32, BlockCopies>,
    inner: InnerHashes,
    closure: ClosureTracker,
}

pub(crate) const TIERS: [Tier; 3] = [Tier::Hbm, Tier::Host, Tier::Disk];

impl BlockTree {
    pub(crate) fn len(&self) -> usize {
        self.engine_hashes.len()
    }

    pub(crate) fn find(&self, name: EngineHash) -> Option<BlockHandle> {
        self.engine_hashes.get(name).map(BlockHandle)
    }

    /// Fetches what [`Self::find`] reads for each of `names`, all at once instead of one after the other.
    pub(crate) fn warm_cpu_cache(&self, names: &[EngineHash]) {
        std::hint::black_box(names.iter().fold(0, |seen, name| seen ^ self.engine_hashes.warm_cpu_cache(*name)));
    }

    pub(crate) fn end_prefix(&self, at: BlockHandle) -> PrefixId {
        let [low, high] = self.node(at.0).end_prefix;
        PrefixId(u128::from(high) << 64 | u128::from(low))
    }

    /// Whether every held block's predecessor is held too.
    pub(crate) fn closure_state(&self) -> PrefixClosure {
        self.closure.current()
    }

    /// The worst shape since this was asked last.
    pub(crate) fn take_worst_closure(&mut self) -> PrefixClosure {
        self.closure.take_worst()
    }

    /// Makes room for a block that is not kept yet; it is kept once it has copies.
    pub(crate) fn insert(&mut self, block: BlockPlacement<'_>) -> BlockHandle {
        let end = [block.end.0 as u64, (block.end.0 >> 64) as u64];
        let stump = if self.stumps.is_empty() { None } else { self.stumps.remove(&block.end.block_hash()) };
        let at = stump.unwrap_or_else(|| self.allocate_node());
        let node = self.node_mut(at);
        (node.end_prefix, node.parent) = (end, block.parent.map_or(NO_BLOCK, |before| before.0));
        if let Some(before) = block.parent {
            self.children.add(before.0, &mut self.nodes[before.0 as usize].children);
        }
        self.engine_hashes.insert(block.engine_hash, at);
        self.inner.set(at, block.inner_hashes);
        BlockHandle(at)
    }

    pub(crate) fn init_copies(
        &mut self,
        BlockHandle(at): BlockHandle,
        copies: BlockCopies,
        out: &mut Vec<ResidencyChange>,
    ) {
        self.set_copies(at, copies);
        for tier in TIERS {
            if self.serves(at, tier) {
                self.mark_held(at, tier, out);
            }
        }
    }

    /// One copy more.
    pub(crate) fn add_copy(
        &mut self,
        BlockHandle(at): BlockHandle,
        place: CopyLocation,
        out: &mut Vec<ResidencyChange>,
    ) {
        let served = self.serves(at, place.tier);
        if let Some(more) = self.node(at).copies.incremented(place) {
            self.node_mut(at).copies = more;
        } else {
            let mut copies = self.copies(at);
            copies.add_copy(place);
            self.set_copies(at, copies);
        }
        if !served && self.serves(at, place.tier) {
            self.mark_held(at, place.tier, out);
        }
    }

    /// Changes how many copies of a block lie in `tier` and `group`, and forgets it with the last one. Says whether there were
    /// any to change; none where there is no such block.
    pub(crate) fn change_copies(
        &mut self,
        name: EngineHash,
        (tier, group): (Tier, u32),
        left: impl Fn(u32) -> u32 + Copy,
        out: &mut Vec<ResidencyChange>,
    ) -> Option<bool> {
        let at = self.engine_hashes.get(name)?;
        let (served, before) = (self.serves(at, tier), self.node(at).copies);
        let known = if let Some(after) = before.count_in(tier, group).map(left).and_then(|left| before.with_count(left))
        {
            self.node_mut(at).copies = after;
            true
        } else {
            let mut copies = self.copies(at);
            let known = copies.change_copies(tier, group, left);
            self.set_copies(at, copies);
            known
        };
        if served && !self.serves(at, tier) {
            self.mark_gone(at, tier, out);
        }
        if self.node(at).copies == PackedCopies::NONE {
            self.engine_hashes.remove(name);
            self.remove_block(at);
            self.compact();
        }
        Some(known)
    }

    /// What is gone when all of them are. Nothing is kept for it but what it is told from.
    pub(crate) fn into_removals(self) -> impl Iterator<Item = ResidencyChange> + Send + Sync + use<> {
        let left =
            Self { nodes: self.nodes, overflow_copies: self.overflow_copies, inner: self.inner, ..Self::default() };
        (0..left.nodes.len() as u32).flat_map(move |at| {
            let mut gone = Vec::new();
            for tier in TIERS.into_iter().filter(|tier| left.serves(at, *tier)) {
                gone.extend(left.chain_blocks(at).map(|hash| ResidencyChange::Removed(hash, tier)));
            }
            gone
        })
    }

    #[cfg(test)]
    pub(crate) fn is_fully_cleared(&self) -> bool {
        let all_free = self.free.len() == self.nodes.len();
        all_free
            && self.len() == 0
            && self.children.is_empty()
            && self.stumps.is_empty()
            && self.overflow_copies.is_empty()
            && self.closure_state() == PrefixClosure::Whole
    }

    fn node(&self, at: u32) -> &BlockNode {
        &self.nodes[at as usize]
    }

    fn node_mut(&mut self, at: u32) -> &mut BlockNode {
        &mut self.nodes[at as usize]
    }

    fn allocate_node(&mut self) -> u32 {
        if let Some(at) = self.free.pop() {
            return at;
        }
        self.nodes.push(BlockNode {
            end_prefix: [0; 2],
            parent: NO_BLOCK,
            children: ChildCount::NONE,
            copies: PackedCopies::NONE,
        });
        // As many as `most_blocks` allows, and their stumps: far from what 32 bits can number.
        (self.nodes.len() - 1) as u32
    }

    fn copies(&self, at: u32) -> BlockCopies {
        match self.node(at).copies {
            PackedCopies::OVERFLOW => self.overflow_copies.get(&at).cloned().unwrap_or_default(),
            brief => brief.unpack(),
        }
    }

    fn set_copies(&mut self, at: u32, copies: BlockCopies) {
        let before = self.node(at).copies;
        if let Some(brief) = PackedCopies::of(&copies) {
            self.node_mut(at).copies = brief;
            if before == PackedCopies::OVERFLOW {
                self.overflow_copies.remove(&at);
            }
        } else {
            self.node_mut(at).copies = PackedCopies::OVERFLOW;
            self.overflow_copies.insert(at, copies);
        }
    }

    #[inline]
    fn serves(&self, at: u32, tier: Tier) -> bool {
        match self.node(at).copies {
            PackedCopies::OVERFLOW => self.serves_elsewhere(at, tier),
            brief => brief.serves(tier),
        }
    }

    #[cold]
    fn serves_elsewhere(&self, at: u32, tier: Tier) -> bool {
        self.overflow_copies.get(&at).is_some_and(|copies| copies.serves(tier))
    }

    /// First one first.
    fn chain_blocks(&self, at: u32) -> impl DoubleEndedIterator<Item = BlockHash> {
        let last = BlockHash(self.node(at).end_prefix[0]);
        self.inner.of(at).iter().copied().chain(std::iter::once(last))
    }

    /// It serves prefixes from `tier` now.
    fn mark_held(&mut self, at: u32, tier: Tier, out: &mut Vec<ResidencyChange>) {
        if tier == Tier::Hbm {
            let closed = self.children.serving(at, self.node(at).children);
            let opened = self.update_parent(at, ServingChange::Starts);
            self.closure.update_holes(u32::from(opened), closed);
        } else {
            self.closure.add_slower_tier();
        }
        out.extend(self.chain_blocks(at).map(|hash| ResidencyChange::Added(hash, tier)));
    }

    /// It no longer does. The last chain block goes first, so that no change leaves a hole behind.
    fn mark_gone(&mut self, at: u32, tier: Tier, out: &mut Vec<ResidencyChange>) {
        if tier == Tier::Hbm {
            let opened = self.children.serving(at, self.node(at).children);
            let closed = self.update_parent(at, ServingChange::Stops);
            self.closure.update_holes(opened, u32::from(closed));
        } else {
            self.closure.remove_slower_tier();
        }
        out.extend(self.chain_blocks(at).rev().map(|hash| ResidencyChange::Removed(hash, tier)));
    }

    /// Tells the block before whether this child of it serves from device memory; whether it does not itself, so that there
    /// is a hole between them.
    fn update_parent(&mut self, at: u32, serves: ServingChange) -> bool {
        let before = self.node(at).parent;
        if before == NO_BLOCK {
            return false;
        }
        self.children.set_serving(before, &mut self.nodes[before as usize].children, serves);
        !self.serves(before, Tier::Hbm)
    }

    /// The last copy is gone, and the name.
    fn remove_block(&mut self, at: u32) {
        let node = self.node(at);
        let (before, is_leaf, hash) = (node.parent, node.children == ChildCount::NONE, BlockHash(node.end_prefix[0]));
        self.node_mut(at).parent = NO_BLOCK;
        if before != NO_BLOCK {
            self.children.remove(before, &mut self.nodes[before as usize].children);
            if self.node(before).children == ChildCount::NONE && self.node(before).copies == PackedCopies::NONE {
                self.free_node(before);
            }
        }
        if is_leaf {
            self.free_node(at);
        } else {
            self.stumps.entry(hash).or_insert(at);
        }
    }

    /// Gives the place of a block or a stump away on which nothing hangs.
    fn free_node(&mut self, at: u32) {
        let hash = BlockHash(self.node(at).end_prefix[0]);
        if !self.stumps.is_empty() && self.stumps.get(&hash) == Some(&at) {
            self.stumps.remove(&hash);
        }
        self.free.push(at);
    }
}

#[cfg(test)]
mod tests;
