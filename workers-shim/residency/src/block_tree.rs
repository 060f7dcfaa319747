//! The placed blocks of one source: found by the engine's hash, and linked to their parent blocks.
//! They can be exported, and imported in any order.
//!
//! A block costs 24 bytes, and about 16 in the table of engine hashes. A block that is removed while it has children
//! leaves a *stump*, so that the children find it when it is stored again; there are never more stumps than blocks.

mod child_count;
mod engine_hashes;
mod inner_hashes;

use vocabulary::{BlockHash, PrefixId, Tier};

use crate::copies::{BlockCopies, EngineCopyLocation, PackedCopyCount};
use crate::fold_hash::FoldHashMap;
use crate::index::ResidencyChange;
use crate::kv_event::EngineHash;
use crate::prefix_closure::{PrefixClosure, PrefixHoleCounters};
use child_count::{ChildCount, LargeChildCounts, ServingChange};
use engine_hashes::EngineHashTable;
use inner_hashes::SubBlockHashes;

/// Index of a block's node, valid while the block is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BlockHandle(u32);

const NO_BLOCK: u32 = u32::MAX;

/// A block, or a stump, which is a block without copies.
struct BlockNode {
    end_prefix: [u64; 2],
    /// The parent block; [`NO_BLOCK`] at the start of a chain, and for stumps.
    parent: u32,
    /// Blocks whose `parent` is this one.
    children: ChildCount,
    copies: PackedCopyCount,
}

pub(crate) struct NewBlock<'a> {
    pub(crate) engine_hash: EngineHash,
    /// None at the start of a chain.
    pub(crate) parent: Option<BlockHandle>,
    pub(crate) end: PrefixId,
    /// Chain blocks inside this engine block, except for the last one.
    pub(crate) inner_hashes: &'a [BlockHash],
}

#[derive(Default)]
pub(crate) struct BlockTree {
    nodes: Vec<BlockNode>,
    free: Vec<u32>,
    engine_hashes: EngineHashTable,
    children: LargeChildCounts,
    stumps: FoldHashMap<BlockHash, u32>,
    /// Copies that do not fit into [`PackedCopyCount`].
    overflow_copies: FoldHashMap<u32, BlockCopies>,
    inner: SubBlockHashes,
    closure: PrefixHoleCounters,
}

pub(crate) const TIERS: [Tier; 3] = [Tier::Hbm, Tier::Host, Tier::Disk];

impl BlockTree {
    pub(crate) fn len(&self) -> usize {
        self.engine_hashes.len()
    }

    /// Returns how many hashes the table of chain blocks inside engine blocks has room for, once a block with `inner` of
    /// them is added: one wide block widens every row.
    pub(crate) fn inner_room_with(&self, inner: usize) -> usize {
        self.inner.room(self.nodes.len() + 1, inner)
    }

    pub(crate) fn find(&self, hash: EngineHash) -> Option<BlockHandle> {
        self.engine_hashes.get(hash).map(BlockHandle)
    }

    /// Prefetches what [`Self::find`] reads for `names`, so that the memory accesses overlap.
    pub(crate) fn warm_cpu_cache(&self, names: &[EngineHash]) {
        std::hint::black_box(names.iter().fold(0, |seen, name| seen ^ self.engine_hashes.warm_cpu_cache(*name)));
    }

    pub(crate) fn end_prefix(&self, at: BlockHandle) -> PrefixId {
        let [low, high] = self.node(at.0).end_prefix;
        PrefixId(u128::from(high) << 64 | u128::from(low))
    }

    /// Returns whether the parents of all held blocks are held, too.
    pub(crate) fn closure_state(&self) -> PrefixClosure {
        self.closure.current()
    }

    /// Returns the worst state since the last call.
    pub(crate) fn take_worst_closure(&mut self) -> PrefixClosure {
        self.closure.take_worst()
    }

    /// Allocates the node of a new block, which counts as stored once it has copies.
    pub(crate) fn insert(&mut self, block: NewBlock<'_>) -> BlockHandle {
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

    /// Adds one copy.
    pub(crate) fn add_copy(
        &mut self,
        BlockHandle(at): BlockHandle,
        location: EngineCopyLocation,
        out: &mut Vec<ResidencyChange>,
    ) {
        let served = self.serves(at, location.tier);
        if let Some(more) = self.node(at).copies.incremented(location) {
            self.node_mut(at).copies = more;
        } else {
            let mut copies = self.copies(at);
            copies.add_copy(location);
            self.set_copies(at, copies);
        }
        if !served && self.serves(at, location.tier) {
            self.mark_held(at, location.tier, out);
        }
    }

    /// Changes the number of copies of a block in `tier` and `group`, and removes the block with its last copy. Returns
    /// whether there were any to change; None if there is no such block.
    pub(crate) fn change_copies(
        &mut self,
        hash: EngineHash,
        (tier, group): (Tier, u32),
        remaining: impl Fn(u32) -> u32 + Copy,
        out: &mut Vec<ResidencyChange>,
    ) -> Option<bool> {
        let at = self.engine_hashes.get(hash)?;
        let (served, before) = (self.serves(at, tier), self.node(at).copies);
        let known = if let Some(after) =
            before.count_in(tier, group).map(remaining).and_then(|remaining| before.with_count(remaining))
        {
            self.node_mut(at).copies = after;
            true
        } else {
            let mut copies = self.copies(at);
            let known = copies.change_copies(tier, group, remaining);
            self.set_copies(at, copies);
            known
        };
        if served && !self.serves(at, tier) {
            self.mark_gone(at, tier, out);
        }
        if self.node(at).copies == PackedCopyCount::NONE {
            self.engine_hashes.remove(hash);
            self.remove_block(at);
            self.compact();
        }
        Some(known)
    }

    /// Returns the changes that remove all blocks. Keeps only the memory that this iteration needs.
    pub(crate) fn into_removals(self) -> impl Iterator<Item = ResidencyChange> + Send + Sync + use<> {
        let tree =
            Self { nodes: self.nodes, overflow_copies: self.overflow_copies, inner: self.inner, ..Self::default() };
        (0..tree.nodes.len() as u32).flat_map(move |at| {
            let mut removals = Vec::new();
            for tier in TIERS.into_iter().filter(|tier| tree.serves(at, *tier)) {
                removals.extend(tree.chain_blocks(at).map(|hash| ResidencyChange::Removed(hash, tier)));
            }
            removals
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
            copies: PackedCopyCount::NONE,
        });
        // Limited by `max_blocks` and the number of stumps: far below 2^32.
        (self.nodes.len() - 1) as u32
    }

    fn copies(&self, at: u32) -> BlockCopies {
        match self.node(at).copies {
            PackedCopyCount::OVERFLOW => self.overflow_copies.get(&at).cloned().unwrap_or_default(),
            brief => brief.unpack(),
        }
    }

    fn set_copies(&mut self, at: u32, copies: BlockCopies) {
        let before = self.node(at).copies;
        if let Some(brief) = PackedCopyCount::of(&copies) {
            self.node_mut(at).copies = brief;
            if before == PackedCopyCount::OVERFLOW {
                self.overflow_copies.remove(&at);
            }
        } else {
            self.node_mut(at).copies = PackedCopyCount::OVERFLOW;
            self.overflow_copies.insert(at, copies);
        }
    }

    #[inline]
    fn serves(&self, at: u32, tier: Tier) -> bool {
        match self.node(at).copies {
            PackedCopyCount::OVERFLOW => self.serves_elsewhere(at, tier),
            brief => brief.serves(tier),
        }
    }

    #[cold]
    fn serves_elsewhere(&self, at: u32, tier: Tier) -> bool {
        self.overflow_copies.get(&at).is_some_and(|copies| copies.serves(tier))
    }

    /// Returns the chain blocks inside a block, first one first.
    fn chain_blocks(&self, at: u32) -> impl DoubleEndedIterator<Item = BlockHash> {
        let last = BlockHash(self.node(at).end_prefix[0]);
        self.inner.of(at).iter().copied().chain(std::iter::once(last))
    }

    /// Records that the block now serves prefixes from `tier`.
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

    /// Records that it no longer does. The last chain block is removed first, so that no single change leaves a hole.
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

    /// Tells the parent whether this child serves from device memory. Returns whether the parent itself does not, so
    /// that there is a hole between them.
    fn update_parent(&mut self, at: u32, serves: ServingChange) -> bool {
        let before = self.node(at).parent;
        if before == NO_BLOCK {
            return false;
        }
        self.children.set_serving(before, &mut self.nodes[before as usize].children, serves);
        !self.serves(before, Tier::Hbm)
    }

    /// Removes a block after its last copy.
    fn remove_block(&mut self, at: u32) {
        let node = self.node(at);
        let (before, is_leaf, hash) = (node.parent, node.children == ChildCount::NONE, BlockHash(node.end_prefix[0]));
        self.node_mut(at).parent = NO_BLOCK;
        if before != NO_BLOCK {
            self.children.remove(before, &mut self.nodes[before as usize].children);
            if self.node(before).children == ChildCount::NONE && self.node(before).copies == PackedCopyCount::NONE {
                self.free_node(before);
            }
        }
        if is_leaf {
            self.free_node(at);
        } else {
            self.stumps.entry(hash).or_insert(at);
        }
    }

    /// Frees the node of a block or a stump without children.
    fn free_node(&mut self, at: u32) {
        let hash = BlockHash(self.node(at).end_prefix[0]);
        if !self.stumps.is_empty() && self.stumps.get(&hash) == Some(&at) {
            self.stumps.remove(&hash);
        }
        self.free.push(at);
    }
}

/// Number of nodes below which nothing is compacted.
const MIN_COMPACTED_NODES: usize = 8;

impl BlockTree {
    /// Frees memory if three of four nodes are free. One pass over all nodes, after at least as many removals.
    fn compact(&mut self) {
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

/// A placed block, independent of others.
#[derive(Debug)]
pub(crate) struct PlacedBlock {
    /// The end of the parent block; None at the start of a chain.
    pub(crate) parent: Option<BlockHash>,
    pub(crate) end: PrefixId,
    /// Chain blocks inside this engine block, except for the last one.
    pub(crate) inner_hashes: Vec<BlockHash>,
    pub(crate) copies: BlockCopies,
}

/// Imported blocks by the hash of their end.
pub(crate) type BlocksByEnd = FoldHashMap<BlockHash, BlockHandle>;

impl BlockTree {
    /// Iterates over all blocks.
    pub(crate) fn placed(&self) -> impl Iterator<Item = (EngineHash, PlacedBlock)> {
        self.engine_hashes.entries().map(|(name, at)| (name, self.placed_block(at)))
    }

    fn placed_block(&self, at: u32) -> PlacedBlock {
        let before = self.node(at).parent;
        let before = (before != NO_BLOCK).then(|| self.end_prefix(BlockHandle(before)).block_hash());
        PlacedBlock {
            parent: before,
            end: self.end_prefix(BlockHandle(at)),
            inner_hashes: self.inner.of(at).to_vec(),
            copies: self.copies(at),
        }
    }

    /// Imports a block. Returns false if there is one of this name already, or if it names itself as its parent. Its
    /// parent may be imported later, or never.
    pub(crate) fn adopt(
        &mut self,
        hash: EngineHash,
        block: PlacedBlock,
        ends: &mut BlocksByEnd,
        out: &mut Vec<ResidencyChange>,
    ) -> bool {
        if self.find(hash).is_some() || block.parent == Some(block.end.block_hash()) {
            return false;
        }
        let before = block.parent.map(|end| match (ends.get(&end), self.stumps.get(&end)) {
            (Some(at), _) => *at,
            (None, Some(stump)) => BlockHandle(*stump),
            (None, None) => self.insert_stump(end),
        });
        let placing = NewBlock { engine_hash: hash, parent: before, end: block.end, inner_hashes: &block.inner_hashes };
        let at = self.insert(placing);
        self.init_copies(at, block.copies, out);
        ends.insert(block.end.block_hash(), at);
        true
    }

    fn insert_stump(&mut self, end: BlockHash) -> BlockHandle {
        let at = self.allocate_node();
        self.node_mut(at).end_prefix = [end.0, 0];
        self.stumps.insert(end, at);
        BlockHandle(at)
    }
}

#[cfg(test)]
mod tests;
