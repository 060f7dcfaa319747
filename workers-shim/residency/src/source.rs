//! One rank of one engine process: maps its block hashes to positions in the router's hash chains.
//!
//! The engine's hashes are never interpreted. A block is placed by its parent and its tokens, and its further inputs
//! (adapter, salt, images) are hashed in, so that it cannot be mistaken for a block of plain text.

use std::collections::hash_map::Iter;
use vocabulary::{HashSeed, ModelNamespace, PrefixId, RequestNamespace, Tokens};

use crate::block_tree::{BlockHandle, BlockTree, BlocksByEnd, NewBlock, PlacedBlock};
use crate::copies::{BlockCopies, EngineCopyLocation};
use crate::index::ResidencyChange;
use crate::kv_event::{BlockRemoved, BlockStored, EngineHash, ExtraKey, KvCacheEvent};
use crate::orphans::{Orphan, Orphans};
use crate::prefix_closure::PrefixClosure;

/// What a removal event means at an engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum RemovalSemantics {
    /// One copy was removed (vLLM).
    #[default]
    PerCopy,
    /// The last copy was removed.
    LastCopy,
}

/// How a source's blocks are mapped to chain blocks, and how many are kept.
#[derive(Clone, Debug)]
pub struct BlockMappingRules {
    /// Tokens per chain block; must divide the engine's block size.
    pub block: Tokens,
    /// The cluster's hash seed.
    pub seed: HashSeed,
    /// The model's part of the chain roots.
    pub namespace: ModelNamespace,
    /// What a removal event means.
    pub removal: RemovalSemantics,
    /// Maximum number of engine blocks, and of hashes in the table of chain blocks inside them; further ones are
    /// counted and left out.
    pub max_blocks: usize,
    /// Maximum number of orphans, which are blocks that cannot be placed yet.
    pub max_orphans: usize,
    /// Maximum memory of orphans, in bytes.
    pub max_orphan_memory: usize,
}

/// Longest engine block that is indexed, in tokens. Engines use 16 to about 1,000.
const MAX_BLOCK_TOKENS: u32 = 1 << 16;
/// Limits of all ranks of one worker together, which share them equally.
const MAX_WORKER_BLOCKS: usize = 32 << 20;
const MAX_WORKER_ORPHAN_MEMORY: usize = 128 << 20;

impl BlockMappingRules {
    /// Creates rules for vLLM with room for 4 million blocks.
    pub fn new(block: Tokens, seed: HashSeed, namespace: ModelNamespace) -> Self {
        Self {
            block,
            seed,
            namespace,
            removal: RemovalSemantics::default(),
            max_blocks: 4 << 20,
            max_orphans: 1 << 16,
            max_orphan_memory: 16 << 20,
        }
    }

    /// Returns the rules for each of `ranks` ranks of one worker: an engine that names many gets no more room by it.
    pub fn among_ranks(self, ranks: usize) -> Self {
        let ranks = ranks.max(1);
        Self {
            max_blocks: self.max_blocks.min(MAX_WORKER_BLOCKS / ranks),
            max_orphan_memory: self.max_orphan_memory.min(MAX_WORKER_ORPHAN_MEMORY / ranks),
            ..self
        }
    }
}

/// Counters of anomalies; all zero on a healthy stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SourceAnomalies {
    /// Removals of blocks that were never stored.
    pub unknown_removals: u64,
    /// Blocks stored without a known parent or without tokens.
    pub orphans: u64,
    /// Blocks left out because of a limit.
    pub over_limit: u64,
    /// Blocks whose size is no multiple of the chain block, or beyond what engines use.
    pub indivisible: u64,
}

/// What a block is placed after: the prefix, and the block that ends it; None at the start of a chain.
#[derive(Clone, Copy)]
struct ChainParent {
    end_prefix: PrefixId,
    parent: Option<BlockHandle>,
}

/// A block as reported by one event.
struct ReportedBlock<'a> {
    engine_hash: EngineHash,
    parent: Option<EngineHash>,
    tokens: &'a [u32],
    /// Inputs of its hash other than tokens.
    extra: &'a [u8],
}

/// The blocks of one rank of one process.
pub struct SourceBlocks {
    rules: BlockMappingRules,
    blocks: BlockTree,
    orphans: Orphans,
    counts: SourceAnomalies,
}

impl SourceBlocks {
    /// Creates a source that holds nothing.
    pub fn new(rules: BlockMappingRules) -> Self {
        let blocks = BlockTree::default();
        Self { rules, blocks, orphans: Orphans::default(), counts: SourceAnomalies::default() }
    }

    /// Returns the counters of anomalies.
    pub fn counts(&self) -> SourceAnomalies {
        self.counts
    }

    /// Returns the number of placed engine blocks.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Returns whether there are no placed blocks.
    pub fn is_empty(&self) -> bool {
        self.blocks.len() == 0
    }

    /// Returns the number of orphans, which wait for a parent or for tokens.
    pub fn orphans(&self) -> usize {
        self.orphans.len()
    }

    /// Returns whether the parents of all held blocks are held, too.
    pub fn closure_state(&self) -> PrefixClosure {
        self.blocks.closure_state()
    }

    /// Returns the worst state since the last call.
    pub fn take_worst_closure(&mut self) -> PrefixClosure {
        self.blocks.take_worst_closure()
    }

    /// Prefetches what the next few events read, so that the memory accesses overlap.
    pub fn warm_cpu_cache(&self, events: &[KvCacheEvent]) {
        for event in events {
            match event {
                KvCacheEvent::Stored(BlockStored { hashes, .. })
                | KvCacheEvent::Removed(BlockRemoved { hashes, .. }) => self.blocks.warm_cpu_cache(hashes),
                KvCacheEvent::Cleared | KvCacheEvent::Other => {}
            }
        }
    }

    /// Adds one copy of each block of `event`.
    pub fn store(&mut self, event: &BlockStored, out: &mut Vec<ResidencyChange>) {
        let location = EngineCopyLocation { tier: event.tier, group: event.group, kind: event.kind };
        let size = event.block_size as usize;
        if size == 0
            || event.block_size > MAX_BLOCK_TOKENS
            || !u64::from(event.block_size).is_multiple_of(self.rules.block.0)
        {
            self.counts.indivisible += event.hashes.len() as u64;
            return;
        }
        let mut parent = event.parent;
        let (mut before, first_extra) = match parent {
            None => {
                let (end, extra) = self.root(event);
                (Some(ChainParent { end_prefix: end, parent: None }), extra)
            }
            Some(hash) => (self.blocks.find(hash).map(|at| self.child_of(at)), extra_of(event, 0)),
        };
        for (position, &name) in event.hashes.iter().enumerate() {
            let tokens = event.tokens.get(position * size..(position + 1) * size).unwrap_or_default();
            if let Some(at) = self.blocks.find(name) {
                before = Some(self.child_of(at));
                self.blocks.add_copy(at, location, out);
            } else {
                let extra = if position == 0 { first_extra.clone() } else { extra_of(event, position) };
                let block = ReportedBlock { engine_hash: name, parent, tokens, extra: &extra };
                before = self.insert_new(block, before, location, out);
            }
            parent = Some(name);
        }
    }

    fn child_of(&self, at: BlockHandle) -> ChainParent {
        ChainParent { end_prefix: self.blocks.end_prefix(at), parent: Some(at) }
    }

    /// Adds a block that is not placed: places it if its parent and tokens are known, otherwise stores it as an orphan.
    fn insert_new(
        &mut self,
        block: ReportedBlock<'_>,
        before: Option<ChainParent>,
        location: EngineCopyLocation,
        out: &mut Vec<ResidencyChange>,
    ) -> Option<ChainParent> {
        if let Some(before) = before.filter(|_| !block.tokens.is_empty()) {
            let earlier = if self.orphans.len() == 0 { None } else { self.orphans.remove(block.engine_hash) };
            let (at, placed) = self.place_block(&block, before)?;
            match earlier {
                None => self.blocks.add_copy(at, location, out),
                Some(Orphan { mut copies, .. }) => {
                    copies.add_copy(location);
                    self.blocks.init_copies(at, copies, out);
                }
            }
            self.place_descendants(block.engine_hash, placed, out);
            return Some(placed);
        }
        if let Some(earlier) = self.orphans.get_mut(block.engine_hash) {
            earlier.copies.add_copy(location);
            if earlier.tokens.is_empty() && !block.tokens.is_empty() {
                // Reported earlier by a slower tier without tokens; now only its parent is missing.
                let copies = self.orphans.remove(block.engine_hash).unwrap_or_default().copies;
                self.orphans.insert(block.engine_hash, block.orphan(copies));
            }
        } else if self.orphans.len() >= self.rules.max_orphans || self.orphans.memory() >= self.rules.max_orphan_memory
        {
            self.counts.over_limit += 1;
        } else {
            self.counts.orphans += 1;
            let mut copies = BlockCopies::default();
            copies.add_copy(location);
            self.orphans.insert(block.engine_hash, block.orphan(copies));
        }
        None
    }

    /// Places the orphans that waited for a placed block, and recursively those that waited for them.
    fn place_descendants(&mut self, hash: EngineHash, block: ChainParent, out: &mut Vec<ResidencyChange>) {
        if self.orphans.len() == 0 {
            return;
        }
        let mut ready = vec![(hash, block)];
        while let Some((parent, before)) = ready.pop() {
            for (hash, orphan) in self.orphans.take_children(parent) {
                let Orphan { tokens, extra, copies, .. } = orphan;
                let reported =
                    ReportedBlock { engine_hash: hash, parent: Some(parent), tokens: &tokens, extra: &extra };
                if let Some((at, block)) = self.place_block(&reported, before) {
                    self.blocks.init_copies(at, copies, out);
                    ready.push((hash, block));
                }
            }
        }
    }

    /// Places a block, unless the limit is reached.
    fn place_block(&mut self, block: &ReportedBlock<'_>, before: ChainParent) -> Option<(BlockHandle, ChainParent)> {
        let inner_count = block.tokens.len() / self.rules.block.0 as usize;
        if self.blocks.len() >= self.rules.max_blocks || self.is_too_wide(inner_count.saturating_sub(1)) {
            self.counts.over_limit += 1;
            return None;
        }
        let seed = self.rules.seed;
        let start =
            if block.extra.is_empty() { before.end_prefix } else { before.end_prefix.extend_bytes(seed, block.extra) };
        let (mut end, mut inner) = (start, Vec::new());
        for (position, tokens) in block.tokens.chunks_exact(self.rules.block.0 as usize).enumerate() {
            if position > 0 {
                inner.push(end.block_hash());
            }
            end = end.extend(seed, tokens);
        }
        let at = self.blocks.insert(NewBlock {
            engine_hash: block.engine_hash,
            parent: before.parent,
            end,
            inner_hashes: &inner,
        });
        Some((at, ChainParent { end_prefix: end, parent: Some(at) }))
    }

    /// Returns whether a block with this many inner chain blocks takes more room than blocks may have.
    fn is_too_wide(&self, inner: usize) -> bool {
        self.blocks.inner_room_with(inner) > self.rules.max_blocks
    }

    /// Removes one copy of each block of `event`, or sets the remaining number that it contains.
    pub fn remove(&mut self, event: &BlockRemoved, out: &mut Vec<ResidencyChange>) {
        let location = (event.tier, event.group);
        for (position, &name) in event.hashes.iter().enumerate() {
            let remaining = |count: u32| match (event.remaining.get(position), self.rules.removal) {
                (Some(remaining), _) => *remaining,
                (None, RemovalSemantics::PerCopy) => count.saturating_sub(1),
                (None, RemovalSemantics::LastCopy) => 0,
            };
            let known = if let Some(known) = self.blocks.change_copies(name, location, remaining, out) {
                known
            } else if let Some(orphan) = self.orphans.get_mut(name) {
                let known = orphan.copies.change_copies(event.tier, event.group, remaining);
                if orphan.copies.is_empty() {
                    self.orphans.remove(name);
                }
                known
            } else {
                false
            };
            self.counts.unknown_removals += u64::from(!known);
        }
    }

    /// Forgets everything, and returns the removals as a lazy iterator, which the caller can consume in parts.
    pub fn clear(&mut self) -> impl Iterator<Item = ResidencyChange> + Send + Sync + use<> {
        self.orphans = Orphans::default();
        std::mem::take(&mut self.blocks).into_removals()
    }

    /// Returns whether no trace of earlier blocks is left.
    #[cfg(test)]
    pub(crate) fn is_fully_cleared(&self) -> bool {
        self.blocks.is_fully_cleared() && self.orphans.len() == 0
    }

    /// Returns the root of the event's chain, and the extra keys of its first block that are not part of that root.
    fn root(&self, event: &BlockStored) -> (PrefixId, Box<[u8]>) {
        let adapter = event.adapter.as_deref();
        let keys: Vec<&ExtraKey> = extra_keys(event, 0).collect();
        let (salt, extra) = match (&event.salt, &*keys) {
            (Some(salt), _) => (Some(&**salt), encode(keys.into_iter())),
            (None, [ExtraKey::Text(salt)]) if event.parent.is_none() => (Some(&**salt), Box::default()),
            (None, _) => (None, encode(keys.into_iter())),
        };
        let root = self.rules.namespace.root(self.rules.seed, RequestNamespace { adapter, salt, content: None });
        (root, extra)
    }
}

impl ReportedBlock<'_> {
    fn orphan(&self, copies: BlockCopies) -> Orphan {
        Orphan::new(self.parent, self.extra.into(), self.tokens.into(), copies)
    }
}

/// Returns the extra keys of one block without the adapter's name, which vLLM repeats there.
fn extra_keys(event: &BlockStored, position: usize) -> impl Iterator<Item = &ExtraKey> {
    let adapter = event.adapter.as_deref();
    let is_adapter = move |key: &&ExtraKey| matches!(key, ExtraKey::Text(text) if Some(&**text) == adapter);
    event.extra.get(position).into_iter().flatten().filter(move |key| !is_adapter(key))
}

fn extra_of(event: &BlockStored, position: usize) -> Box<[u8]> {
    if event.extra.is_empty() {
        return Box::default();
    }
    encode(extra_keys(event, position))
}

/// Encodes keys with length prefixes, so that different lists have different encodings; empty for none.
fn encode<'a>(keys: impl Iterator<Item = &'a ExtraKey>) -> Box<[u8]> {
    let mut bytes = Vec::new();
    for key in keys {
        let (kind, content) = match key {
            ExtraKey::Text(text) => (b't', text.as_bytes()),
            ExtraKey::Raw(raw) => (b'r', &**raw),
        };
        bytes.push(kind);
        bytes.extend_from_slice(&(content.len() as u64).to_le_bytes());
        bytes.extend_from_slice(content);
    }
    bytes.into()
}

/// Export to a snapshot, and import from one.
impl SourceBlocks {
    pub(crate) fn rules(&self) -> &BlockMappingRules {
        &self.rules
    }

    /// Iterates over the placed blocks.
    pub(crate) fn placed(&self) -> impl Iterator<Item = (EngineHash, PlacedBlock)> {
        self.blocks.placed()
    }

    /// Iterates over the orphans.
    pub(crate) fn orphan_entries(&self) -> Iter<'_, EngineHash, Orphan> {
        self.orphans.iter()
    }

    /// Imports a placed block, in any order; returns false if there is one of this name already, or no room.
    pub(crate) fn adopt_placed(
        &mut self,
        (name, block): (EngineHash, PlacedBlock),
        ends: &mut BlocksByEnd,
        out: &mut Vec<ResidencyChange>,
    ) -> bool {
        if self.is_too_wide(block.inner_hashes.len()) {
            return false;
        }
        self.blocks.adopt(name, block, ends, out)
    }

    /// Imports an orphan; returns false if there is one of this name already, or no room. As much as the sender's last
    /// orphan may exceed its limit.
    pub(crate) fn adopt_orphan(&mut self, hash: EngineHash, orphan: Orphan) -> bool {
        let room = self.rules.max_orphan_memory.saturating_add(MAX_BLOCK_TOKENS as usize * size_of::<u32>());
        if self.blocks.find(hash).is_some() || self.orphans.get_mut(hash).is_some() || self.orphans.memory() > room {
            return false;
        }
        self.orphans.insert(hash, orphan);
        true
    }
}

#[cfg(test)]
mod tests;
