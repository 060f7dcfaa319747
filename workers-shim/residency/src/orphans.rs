//! Blocks that an engine announced but whose place in a chain is not known yet: their parent, or their tokens, were
//! never seen. They are kept, within a bound, until the missing part appears.

use std::collections::hash_map::Iter;

use crate::copies::BlockCopies;
use crate::event::EngineHash;
use crate::fold_hash::FoldHashMap;

/// One such block.
#[derive(Clone, Default, Debug)]
pub(crate) struct Orphan {
    /// The block before it; none where only the tokens are missing.
    pub(crate) parent: Option<EngineHash>,
    /// What went into its hash besides tokens.
    pub(crate) extra: Box<[u8]>,
    /// Its tokens; empty when they were not told.
    pub(crate) tokens: Box<[u32]>,
    /// How often it was stored since.
    pub(crate) copies: BlockCopies,
}

/// All of them, found by their own name and by their parent's.
#[derive(Default)]
pub(crate) struct Orphans {
    blocks: FoldHashMap<EngineHash, Orphan>,
    waiting: FoldHashMap<EngineHash, Vec<EngineHash>>,
}

impl Orphans {
    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(crate) fn iter(&self) -> Iter<'_, EngineHash, Orphan> {
        self.blocks.iter()
    }

    pub(crate) fn get_mut(&mut self, hash: EngineHash) -> Option<&mut Orphan> {
        self.blocks.get_mut(&hash)
    }

    /// Keeps a block that is not kept yet.
    pub(crate) fn insert(&mut self, hash: EngineHash, orphan: Orphan) {
        if let Some(parent) = orphan.parent.filter(|_| !orphan.tokens.is_empty()) {
            self.waiting.entry(parent).or_default().push(hash);
        }
        self.blocks.insert(hash, orphan);
    }

    /// Gives a block away.
    pub(crate) fn remove(&mut self, hash: EngineHash) -> Option<Orphan> {
        let orphan = self.blocks.remove(&hash)?;
        if let Some(parent) = orphan.parent
            && let Some(siblings) = self.waiting.get_mut(&parent)
        {
            siblings.retain(|sibling| *sibling != hash);
            if siblings.is_empty() {
                self.waiting.remove(&parent);
            }
        }
        Some(orphan)
    }

    /// Gives away the blocks that wait for `parent` and have tokens.
    pub(crate) fn take_children(&mut self, parent: EngineHash) -> Vec<(EngineHash, Orphan)> {
        let children = self.waiting.remove(&parent).unwrap_or_default();
        children.into_iter().filter_map(|child| Some((child, self.blocks.remove(&child)?))).collect()
    }
}
