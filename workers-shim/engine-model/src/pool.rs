//! Paged memory with a prefix cache. Free blocks keep what they hold until they are taken again, least recently freed
//! first; the same content may lie in several blocks.

use std::collections::{BTreeMap, HashMap};

use crate::voice::{Fingerprint, Voice};

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct BlockId(pub(crate) u32);

/// What a block holds: the KV of these tokens, computed on top of `start`.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Content {
    pub(crate) start: Fingerprint,
    pub(crate) tokens: Vec<u32>,
    pub(crate) end: Fingerprint,
}

impl Content {
    pub(crate) fn on(start: Fingerprint) -> Self {
        Self { start, tokens: Vec::new(), end: start }
    }

    pub(crate) fn of(start: Fingerprint, tokens: &[u32], voice: &Voice) -> Self {
        let mut content = Self::on(start);
        tokens.iter().for_each(|token| content.push(*token, voice));
        content
    }

    pub(crate) fn push(&mut self, token: u32, voice: &Voice) {
        self.tokens.push(token);
        self.end = voice.read(self.end, token);
    }

    /// Keep the first `keep` tokens. What was never written becomes garbage.
    pub(crate) fn cut(&mut self, keep: usize, voice: &Voice) {
        if self.tokens.len() == keep {
            return;
        }
        let start = if self.tokens.len() < keep { self.start.spoiled() } else { self.start };
        let mut tokens = std::mem::take(&mut self.tokens);
        tokens.resize(keep, 0);
        *self = Self::of(start, &tokens, voice);
    }
}

struct Slot {
    users: u32,
    content: Content,
    key: Option<u64>,
    freed: u64,
}

/// All blocks of an engine.
#[derive(Default)]
pub(crate) struct Pool {
    slots: Vec<Slot>,
    blank: Vec<BlockId>,
    evictable: BTreeMap<u64, BlockId>,
    cached: HashMap<u64, Vec<BlockId>>,
    evicted: Vec<u64>,
    frees: u64,
}

impl Pool {
    pub(crate) fn new(blocks: u32) -> Self {
        let slot = || Slot { users: 0, content: Content::on(Fingerprint::GARBAGE), key: None, freed: 0 };
        Self {
            slots: (0..blocks).map(|_| slot()).collect(),
            blank: (0..blocks).rev().map(BlockId).collect(),
            ..Self::default()
        }
    }

    /// Blocks that can be taken.
    pub(crate) fn free(&self) -> usize {
        self.blank.len() + self.evictable.len()
    }

    /// Blocks that somebody uses.
    pub(crate) fn used(&self) -> usize {
        self.slots.len() - self.free()
    }

    /// One more user of a cached block, if there is one.
    pub(crate) fn share(&mut self, key: u64) -> Option<BlockId> {
        let id = *self.cached.get(&key)?.last()?;
        let slot = &mut self.slots[id.0 as usize];
        if slot.users == 0 {
            self.evictable.remove(&slot.freed);
        }
        slot.users += 1;
        Some(id)
    }

    /// A block for new content: an empty one, else the least recently freed.
    pub(crate) fn take(&mut self) -> Option<BlockId> {
        let id = match self.blank.pop() {
            Some(id) => id,
            None => self.evict()?,
        };
        let slot = &mut self.slots[id.0 as usize];
        slot.users = 1;
        slot.content = Content::on(Fingerprint::GARBAGE);
        Some(id)
    }

    fn evict(&mut self) -> Option<BlockId> {
        let (_, id) = self.evictable.pop_first()?;
        if let Some(key) = self.slots[id.0 as usize].key.take() {
            self.forget(key, id);
            self.evicted.push(key);
        }
        Some(id)
    }

    fn forget(&mut self, key: u64, id: BlockId) {
        if let Some(copies) = self.cached.get_mut(&key) {
            copies.retain(|copy| *copy != id);
            if copies.is_empty() {
                self.cached.remove(&key);
            }
        }
    }

    /// A used block is whole and may be found under `key` from now on.
    pub(crate) fn seal(&mut self, id: BlockId, key: u64) {
        let slot = &mut self.slots[id.0 as usize];
        debug_assert!(slot.users > 0 && slot.key.is_none(), "only fresh blocks are sealed");
        slot.key = Some(key);
        self.cached.entry(key).or_default().push(id);
    }

    /// One user less of each block of a sequence, given first block first. Its last blocks will be evicted first.
    pub(crate) fn give_back(&mut self, blocks: &[BlockId]) {
        for id in blocks.iter().rev() {
            let slot = &mut self.slots[id.0 as usize];
            debug_assert!(slot.users > 0, "a block is given back once per user");
            slot.users -= 1;
            if slot.users > 0 {
                continue;
            }
            if slot.key.is_none() {
                self.blank.push(*id);
            } else {
                self.frees += 1;
                slot.freed = self.frees;
                self.evictable.insert(self.frees, *id);
            }
        }
    }

    /// Forget all cached blocks; refused while any block is in use.
    pub(crate) fn clear(&mut self) -> bool {
        if self.used() > 0 {
            return false;
        }
        while let Some(id) = self.evict() {
            self.blank.push(id);
        }
        self.evicted.clear();
        true
    }

    /// Keys of the copies that were evicted since the last call.
    pub(crate) fn drain_evicted(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.evicted)
    }

    pub(crate) fn content(&self, id: BlockId) -> &Content {
        &self.slots[id.0 as usize].content
    }

    pub(crate) fn content_mut(&mut self, id: BlockId) -> &mut Content {
        &mut self.slots[id.0 as usize].content
    }

    /// Any block by number, as a remote reader names it.
    pub(crate) fn peek(&self, number: u32) -> Option<&Content> {
        self.slots.get(number as usize).map(|slot| &slot.content)
    }
}
