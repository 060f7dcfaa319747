//! Blocks as another router knew them: what of each is written down, and how they are put together again in any order.

use vocabulary::{BlockHash, PrefixId};

use super::{At, Blocks, NOWHERE, Placing};
use crate::copies::Copies;
use crate::event::EngineHash;
use crate::index::Change;
use crate::mix::MixMap;

/// A block whose place is known, by itself.
#[derive(Debug)]
pub(crate) struct Placed {
    /// The end of the block before; none at the start of a chain.
    pub(crate) before: Option<BlockHash>,
    pub(crate) end: PrefixId,
    /// Chain blocks inside this engine block before its last one.
    pub(crate) inner: Vec<BlockHash>,
    pub(crate) copies: Copies,
}

/// Where the blocks that were taken over end.
pub(crate) type Ends = MixMap<BlockHash, At>;

impl Blocks {
    /// One after the other.
    pub(crate) fn placed(&self) -> impl Iterator<Item = (EngineHash, Placed)> {
        self.names.entries().map(|(name, at)| (name, self.placed_at(at)))
    }

    fn placed_at(&self, at: u32) -> Placed {
        let before = self.node(at).before;
        let before = (before != NOWHERE).then(|| self.end(At(before)).block_hash());
        Placed { before, end: self.end(At(at)), inner: self.inner.of(at).to_vec(), copies: self.copies(at) }
    }

    /// Takes over a block; false when there is one of this name already, or it claims to
    /// hang on itself. What it hangs on may come later, or never.
    pub(crate) fn adopt(&mut self, name: EngineHash, block: Placed, ends: &mut Ends, out: &mut Vec<Change>) -> bool {
        if self.find(name).is_some() || block.before == Some(block.end.block_hash()) {
            return false;
        }
        let before = block.before.map(|end| match (ends.get(&end), self.stumps.get(&end)) {
            (Some(at), _) => *at,
            (None, Some(stump)) => At(*stump),
            (None, None) => self.stump(end),
        });
        let placing = Placing { name, before, end: block.end, inner: &block.inner };
        let at = self.place(placing);
        self.begin(at, block.copies, out);
        ends.insert(block.end.block_hash(), at);
        true
    }

    fn stump(&mut self, end: BlockHash) -> At {
        let at = self.vacant();
        self.node_mut(at).end = [end.0, 0];
        self.stumps.insert(end, at);
        At(at)
    }
}
