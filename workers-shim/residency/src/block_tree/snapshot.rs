//! Blocks as another router knew them: what of each is written down, and how they are put together again in any order.

use vocabulary::{BlockHash, PrefixId};

use super::{BlockHandle, BlockPlacement, BlockTree, NO_BLOCK};
use crate::copies::BlockCopies;
use crate::event::EngineHash;
use crate::fold_hash::FoldHashMap;
use crate::index::ResidencyChange;

/// A block whose place is known, by itself.
#[derive(Debug)]
pub(crate) struct PlacedBlock {
    /// The end of the block before; none at the start of a chain.
    pub(crate) parent: Option<BlockHash>,
    pub(crate) end: PrefixId,
    /// Chain blocks inside this engine block before its last one.
    pub(crate) inner_hashes: Vec<BlockHash>,
    pub(crate) copies: BlockCopies,
}

/// Where the blocks that were taken over end.
pub(crate) type BlocksByEnd = FoldHashMap<BlockHash, BlockHandle>;

impl BlockTree {
    /// One after the other.
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

    /// Takes over a block; false when there is one of this name already, or it claims to
    /// hang on itself. What it hangs on may come later, or never.
    pub(crate) fn adopt(
        &mut self,
        name: EngineHash,
        block: PlacedBlock,
        ends: &mut BlocksByEnd,
        out: &mut Vec<ResidencyChange>,
    ) -> bool {
        if self.find(name).is_some() || block.parent == Some(block.end.block_hash()) {
            return false;
        }
        let before = block.parent.map(|end| match (ends.get(&end), self.stumps.get(&end)) {
            (Some(at), _) => *at,
            (None, Some(stump)) => BlockHandle(*stump),
            (None, None) => self.insert_stump(end),
        });
        let placing =
            BlockPlacement { engine_hash: name, parent: before, end: block.end, inner_hashes: &block.inner_hashes };
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
