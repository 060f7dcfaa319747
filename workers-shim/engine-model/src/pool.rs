//! Paged memory with a prefix cache. Free blocks keep their contents until they are allocated again, least recently
//! freed first. Several blocks can have the same contents.

use std::collections::{BTreeMap, HashMap};

use crate::token_generator::{KvFingerprint, TokenGenerator};

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct BlockId(pub(crate) u32);

/// Contents of a block: the KV of these tokens, computed on top of `start`.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct BlockContent {
    pub(crate) start: KvFingerprint,
    pub(crate) tokens: Vec<u32>,
    pub(crate) end: KvFingerprint,
}

impl BlockContent {
    pub(crate) fn empty(start: KvFingerprint) -> Self {
        Self { start, tokens: Vec::new(), end: start }
    }

    pub(crate) fn of(start: KvFingerprint, tokens: &[u32], generator: &TokenGenerator) -> Self {
        let mut content = Self::empty(start);
        tokens.iter().for_each(|token| content.push(*token, generator));
        content
    }

    pub(crate) fn push(&mut self, token: u32, generator: &TokenGenerator) {
        self.tokens.push(token);
        self.end = generator.extend(self.end, token);
    }

    /// Keeps the first `keep` tokens. Contents that were never written are garbage.
    pub(crate) fn truncate(&mut self, keep: usize, generator: &TokenGenerator) {
        if self.tokens.len() == keep {
            return;
        }
        let start = if self.tokens.len() < keep { self.start.corrupted() } else { self.start };
        let mut tokens = std::mem::take(&mut self.tokens);
        tokens.resize(keep, 0);
        *self = Self::of(start, &tokens, generator);
    }
}

struct PooledBlock {
    users: u32,
    content: BlockContent,
    key: Option<u64>,
    freed_at: u64,
}

/// All blocks of an engine.
#[derive(Default)]
pub(crate) struct BlockPool {
    slots: Vec<PooledBlock>,
    empty: Vec<BlockId>,
    evictable: BTreeMap<u64, BlockId>,
    cached: HashMap<u64, Vec<BlockId>>,
    evicted: Vec<u64>,
    free_count: u64,
}

impl BlockPool {
    pub(crate) fn new(blocks: u32) -> Self {
        let slot =
            || PooledBlock { users: 0, content: BlockContent::empty(KvFingerprint::GARBAGE), key: None, freed_at: 0 };
        Self {
            slots: (0..blocks).map(|_| slot()).collect(),
            empty: (0..blocks).rev().map(BlockId).collect(),
            ..Self::default()
        }
    }

    /// Returns how many blocks can be allocated.
    pub(crate) fn free(&self) -> usize {
        self.empty.len() + self.evictable.len()
    }

    /// Returns how many blocks are in use.
    pub(crate) fn used(&self) -> usize {
        self.slots.len() - self.free()
    }

    /// Adds a user to a cached block, if there is one.
    pub(crate) fn acquire_cached(&mut self, key: u64) -> Option<BlockId> {
        let id = *self.cached.get(&key)?.last()?;
        let slot = &mut self.slots[id.0 as usize];
        if slot.users == 0 {
            self.evictable.remove(&slot.freed_at);
        }
        slot.users += 1;
        Some(id)
    }

    /// Allocates a block for new contents: an empty one, otherwise the least recently freed.
    pub(crate) fn allocate(&mut self) -> Option<BlockId> {
        let id = match self.empty.pop() {
            Some(id) => id,
            None => self.evict()?,
        };
        let slot = &mut self.slots[id.0 as usize];
        slot.users = 1;
        slot.content = BlockContent::empty(KvFingerprint::GARBAGE);
        Some(id)
    }

    fn evict(&mut self) -> Option<BlockId> {
        let (_, id) = self.evictable.pop_first()?;
        if let Some(key) = self.slots[id.0 as usize].key.take() {
            self.remove_from_cache(key, id);
            self.evicted.push(key);
        }
        Some(id)
    }

    fn remove_from_cache(&mut self, key: u64, id: BlockId) {
        if let Some(copies) = self.cached.get_mut(&key) {
            copies.retain(|copy| *copy != id);
            if copies.is_empty() {
                self.cached.remove(&key);
            }
        }
    }

    /// Adds a full block that is in use to the prefix cache, under `key`.
    pub(crate) fn seal(&mut self, id: BlockId, key: u64) {
        let slot = &mut self.slots[id.0 as usize];
        debug_assert!(slot.users > 0 && slot.key.is_none(), "only fresh blocks are sealed");
        slot.key = Some(key);
        self.cached.entry(key).or_default().push(id);
    }

    /// Removes one user from each block of a sequence, given from first to last. Later blocks will be evicted earlier.
    pub(crate) fn release(&mut self, blocks: &[BlockId]) {
        for id in blocks.iter().rev() {
            let slot = &mut self.slots[id.0 as usize];
            debug_assert!(slot.users > 0, "a block is given back once per user");
            slot.users -= 1;
            if slot.users > 0 {
                continue;
            }
            if slot.key.is_none() {
                self.empty.push(*id);
            } else {
                self.free_count += 1;
                slot.freed_at = self.free_count;
                self.evictable.insert(self.free_count, *id);
            }
        }
    }

    /// Removes all blocks from the cache; returns false while any block is in use.
    pub(crate) fn clear(&mut self) -> bool {
        if self.used() > 0 {
            return false;
        }
        while let Some(id) = self.evict() {
            self.empty.push(id);
        }
        self.evicted.clear();
        true
    }

    /// Returns the keys of the copies evicted since the last call.
    pub(crate) fn drain_evicted(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.evicted)
    }

    pub(crate) fn content(&self, id: BlockId) -> &BlockContent {
        &self.slots[id.0 as usize].content
    }

    pub(crate) fn content_mut(&mut self, id: BlockId) -> &mut BlockContent {
        &mut self.slots[id.0 as usize].content
    }

    /// Returns any block by its number, as a remote reader addresses it.
    pub(crate) fn peek(&self, number: u32) -> Option<&BlockContent> {
        self.slots.get(number as usize).map(|slot| &slot.content)
    }
}
