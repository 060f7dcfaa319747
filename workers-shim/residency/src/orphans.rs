//! Blocks that an engine reported but that cannot be placed in a chain yet, because their parent or their tokens were
//! never reported. A limited number is kept until the missing part arrives.

use std::collections::hash_map::Iter;

use crate::copies::BlockCopies;
use crate::fold_hash::FoldHashMap;
use crate::kv_event::EngineHash;

/// A block that cannot be placed yet.
#[derive(Clone, Default, Debug)]
pub(crate) struct Orphan {
    /// Its parent block; None if only the tokens are missing.
    pub(crate) parent: Option<EngineHash>,
    /// Inputs of its hash other than tokens.
    pub(crate) extra: Box<[u8]>,
    /// Its tokens; empty if they were not reported.
    pub(crate) tokens: Box<[u32]>,
    /// Its copies stored since.
    pub(crate) copies: BlockCopies,
}

/// All orphans, indexed by their own hash and by their parent's.
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

    /// Adds an orphan that is not stored yet.
    pub(crate) fn insert(&mut self, hash: EngineHash, orphan: Orphan) {
        if let Some(parent) = orphan.parent.filter(|_| !orphan.tokens.is_empty()) {
            self.waiting.entry(parent).or_default().push(hash);
        }
        self.blocks.insert(hash, orphan);
    }

    /// Removes and returns an orphan.
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

    /// Removes and returns the orphans that wait for `parent` and have tokens.
    pub(crate) fn take_children(&mut self, parent: EngineHash) -> Vec<(EngineHash, Orphan)> {
        let children = self.waiting.remove(&parent).unwrap_or_default();
        children.into_iter().filter_map(|child| Some((child, self.blocks.remove(&child)?))).collect()
    }
}
