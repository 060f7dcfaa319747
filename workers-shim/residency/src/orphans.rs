//! Blocks that an engine reported but that cannot be placed in a chain yet, because their parent or their tokens were
//! never reported. A limited number is kept until the missing part arrives.

use std::collections::hash_map::Iter;
use std::fmt;

use crate::copies::BlockCopies;
use crate::fold_hash::FoldHashMap;
use crate::kv_event::EngineHash;

/// A block that cannot be placed yet.
#[derive(Clone, Default)]
pub(crate) struct Orphan {
    /// Its parent block; None if only the tokens are missing.
    pub(crate) parent: Option<EngineHash>,
    /// Inputs of its hash other than tokens.
    pub(crate) extra: Box<[u8]>,
    /// Its tokens; empty if they were not reported.
    pub(crate) tokens: Box<[u32]>,
    /// Its copies stored since.
    pub(crate) copies: BlockCopies,
    /// Its index among the orphans that wait for the same parent.
    sibling_index: usize,
}

/// Memory of an orphan besides its tokens and extra inputs, in bytes: its entry in both maps, with spare room.
const ORPHAN_OVERHEAD: usize = 256;

impl Orphan {
    pub(crate) fn new(parent: Option<EngineHash>, extra: Box<[u8]>, tokens: Box<[u32]>, copies: BlockCopies) -> Self {
        Self { parent, extra, tokens, copies, sibling_index: 0 }
    }

    /// Returns the parent that it waits for; None if its tokens are missing.
    fn awaited_parent(&self) -> Option<EngineHash> {
        self.parent.filter(|_| !self.tokens.is_empty())
    }

    fn memory(&self) -> usize {
        ORPHAN_OVERHEAD + self.extra.len() + size_of_val::<[u32]>(&self.tokens)
    }
}

impl fmt::Debug for Orphan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { parent, extra, tokens, copies, sibling_index: _ } = self;
        f.debug_tuple("Orphan").field(parent).field(extra).field(tokens).field(copies).finish()
    }
}

/// All orphans, indexed by their own hash and by their parent's.
#[derive(Default)]
pub(crate) struct Orphans {
    blocks: FoldHashMap<EngineHash, Orphan>,
    waiting: FoldHashMap<EngineHash, Vec<EngineHash>>,
    /// Memory of all, in bytes.
    memory: usize,
}

impl Orphans {
    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Returns the memory that they take, in bytes.
    pub(crate) fn memory(&self) -> usize {
        self.memory
    }

    pub(crate) fn iter(&self) -> Iter<'_, EngineHash, Orphan> {
        self.blocks.iter()
    }

    pub(crate) fn get_mut(&mut self, hash: EngineHash) -> Option<&mut Orphan> {
        self.blocks.get_mut(&hash)
    }

    /// Adds an orphan that is not stored yet.
    pub(crate) fn insert(&mut self, hash: EngineHash, mut orphan: Orphan) {
        if let Some(parent) = orphan.awaited_parent() {
            let siblings = self.waiting.entry(parent).or_default();
            orphan.sibling_index = siblings.len();
            siblings.push(hash);
        }
        self.memory += orphan.memory();
        self.blocks.insert(hash, orphan);
    }

    /// Removes and returns an orphan.
    pub(crate) fn remove(&mut self, hash: EngineHash) -> Option<Orphan> {
        let orphan = self.take(hash)?;
        if let Some(parent) = orphan.awaited_parent()
            && let Some(siblings) = self.waiting.get_mut(&parent)
        {
            siblings.swap_remove(orphan.sibling_index);
            if let Some(moved) = siblings.get(orphan.sibling_index).and_then(|moved| self.blocks.get_mut(moved)) {
                moved.sibling_index = orphan.sibling_index;
            } else if siblings.is_empty() {
                self.waiting.remove(&parent);
            }
        }
        Some(orphan)
    }

    /// Removes and returns the orphans that wait for `parent` and have tokens.
    pub(crate) fn take_children(&mut self, parent: EngineHash) -> Vec<(EngineHash, Orphan)> {
        let children = self.waiting.remove(&parent).unwrap_or_default();
        children.into_iter().filter_map(|child| Some((child, self.take(child)?))).collect()
    }

    fn take(&mut self, hash: EngineHash) -> Option<Orphan> {
        let orphan = self.blocks.remove(&hash)?;
        self.memory -= orphan.memory();
        Some(orphan)
    }
}
