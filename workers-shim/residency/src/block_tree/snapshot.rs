//! Export of blocks to a snapshot, and their import in any order.

use vocabulary::{BlockHash, PrefixId};

use super::{BlockHandle, BlockTree, NO_BLOCK, NewBlock};
use crate::copies::BlockCopies;
use crate::fold_hash::FoldHashMap;
use crate::index::ResidencyChange;
use crate::kv_event::EngineHash;

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
