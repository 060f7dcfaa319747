//! One rank of one engine process: its block names, turned into positions in our chains.
//!
//! The engine's hashes are never interpreted. A block's place is found from its parent and its tokens, and what else
//! went into it (adapter, salt, images) is hashed in, so that it can never be taken for a plain text block.

mod adoption;

use vocabulary::{BlockHash, Namespace, PrefixId, RootKeys, Seed, Tier, Tokens};

use crate::closure::{Closure, Shape};
use crate::copies::{Copies, Place};
use crate::event::{EngineHash, ExtraKey, Removed, Stored};
use crate::index::Change;
use crate::mix::MixMap;
use crate::orphans::{Orphan, Orphans};

/// What a removal means to an engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Removal {
    /// One copy less (vLLM).
    #[default]
    PerCopy,
    /// The last copy went.
    LastCopy,
}

/// How a source's blocks become chain blocks, and how many it may have.
#[derive(Clone, Debug)]
pub struct SourceRules {
    /// Tokens a chain block; it must divide the engine's blocks.
    pub block: Tokens,
    /// The cluster's hash seed.
    pub seed: Seed,
    /// The model side of the chains' roots.
    pub namespace: Namespace,
    /// What a removal means.
    pub removal: Removal,
    /// Engine blocks that are kept; more are counted and left out.
    pub most_blocks: usize,
    /// Blocks without a known place that are kept.
    pub most_orphans: usize,
}

impl SourceRules {
    /// Rules for vLLM with room for 4 million blocks.
    pub fn new(block: Tokens, seed: Seed, namespace: Namespace) -> Self {
        Self { block, seed, namespace, removal: Removal::default(), most_blocks: 4 << 20, most_orphans: 1 << 16 }
    }
}

/// What went wrong, and how often; all zero on a healthy stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SourceCounts {
    /// Removals of blocks that were never stored.
    pub unknown_removals: u64,
    /// Blocks that came without a known parent or without tokens.
    pub orphans: u64,
    /// Blocks left out because too many were kept already.
    pub over_limit: u64,
    /// Blocks whose size the chain block does not divide.
    pub indivisible: u64,
}

/// A block whose place is known.
#[derive(Debug)]
pub(crate) struct Placed {
    /// The end of the block before; none at the start of a chain.
    pub(crate) before: Option<BlockHash>,
    pub(crate) end: PrefixId,
    /// Chain blocks inside this engine block before its last one.
    pub(crate) inner: Box<[BlockHash]>,
    pub(crate) copies: Copies,
}

/// The blocks of one rank of one process.
pub struct Source {
    rules: SourceRules,
    blocks: MixMap<EngineHash, Placed>,
    orphans: Orphans,
    closure: Closure,
    counts: SourceCounts,
}

impl Source {
    /// A source that holds nothing.
    pub fn new(rules: SourceRules) -> Self {
        Self {
            rules,
            blocks: MixMap::default(),
            orphans: Orphans::default(),
            closure: Closure::new(),
            counts: SourceCounts::default(),
        }
    }

    /// What went wrong so far.
    pub fn counts(&self) -> SourceCounts {
        self.counts
    }

    /// Engine blocks whose place is known.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether no block's place is known.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Blocks that still wait for a parent or for tokens.
    pub fn orphans(&self) -> usize {
        self.orphans.len()
    }

    /// Whether every held block's predecessor is held too.
    pub fn shape(&self) -> Shape {
        self.closure.shape()
    }

    /// The worst shape since this was asked last.
    pub fn worst_shape(&mut self) -> Shape {
        self.closure.worst()
    }

    /// One copy more of each block of `event`.
    pub fn store(&mut self, event: &Stored, out: &mut Vec<Change>) {
        let place = Place { tier: event.tier, group: event.group, kind: event.kind };
        let size = event.block_size as usize;
        if size == 0 || !u64::from(event.block_size).is_multiple_of(self.rules.block.0) {
            self.counts.indivisible += event.hashes.len() as u64;
            return;
        }
        let (root, first_extra) = self.root(event);
        let mut parent = event.parent;
        let mut before = match parent {
            None => Some(root),
            Some(hash) => self.blocks.get(&hash).map(|block| block.end),
        };
        for (position, &hash) in event.hashes.iter().enumerate() {
            let tokens = event.tokens.get(position * size..(position + 1) * size).unwrap_or_default();
            if let Some(block) = self.blocks.get_mut(&hash) {
                before = Some(block.end);
                block.stored(place, &mut self.closure, out);
            } else {
                let extra = match (position, event.parent) {
                    (0, None) => first_extra.clone(),
                    _ => extra_of(event, position),
                };
                let orphan = Orphan { parent, extra, tokens: tokens.into(), copies: Copies::default() };
                before = self.introduce(hash, orphan, (before, place), out);
            }
            parent = Some(hash);
        }
    }

    /// A block that is not placed yet: it is, if its parent and tokens are known, and kept for later otherwise.
    fn introduce(
        &mut self,
        hash: EngineHash,
        mut orphan: Orphan,
        (before, place): (Option<PrefixId>, Place),
        out: &mut Vec<Change>,
    ) -> Option<PrefixId> {
        if let Some(before) = before.filter(|_| !orphan.tokens.is_empty()) {
            if let Some(earlier) = self.orphans.take(hash) {
                orphan.copies = earlier.copies;
            }
            orphan.copies.add(place);
            return self.place_with_descendants(hash, orphan, before, out);
        }
        if let Some(earlier) = self.orphans.get_mut(hash) {
            earlier.copies.add(place);
            if earlier.tokens.is_empty() && !orphan.tokens.is_empty() {
                // Told by a slower tier first, without tokens; now only its parent is missing.
                orphan.copies = self.orphans.take(hash).unwrap_or_default().copies;
                self.orphans.keep(hash, orphan);
            }
        } else if self.orphans.len() >= self.rules.most_orphans {
            self.counts.over_limit += 1;
        } else {
            self.counts.orphans += 1;
            orphan.copies.add(place);
            self.orphans.keep(hash, orphan);
        }
        None
    }

    /// Places a block, then whatever waited for it, and so on.
    fn place_with_descendants(
        &mut self,
        hash: EngineHash,
        block: Orphan,
        before: PrefixId,
        out: &mut Vec<Change>,
    ) -> Option<PrefixId> {
        let end = self.place(hash, block, before, out)?;
        let mut ready = vec![(hash, end)];
        while let Some((parent, end)) = ready.pop() {
            for (child, block) in self.orphans.take_children(parent) {
                if let Some(end) = self.place(child, block, end, out) {
                    ready.push((child, end));
                }
            }
        }
        Some(end)
    }

    fn place(&mut self, hash: EngineHash, block: Orphan, before: PrefixId, out: &mut Vec<Change>) -> Option<PrefixId> {
        if self.blocks.len() >= self.rules.most_blocks {
            self.counts.over_limit += 1;
            return None;
        }
        let seed = self.rules.seed;
        let mut end = if block.extra.is_empty() { before } else { before.extend_bytes(seed, &block.extra) };
        let chain_blocks = block.tokens.chunks_exact(self.rules.block.0 as usize);
        let mut inner = Vec::with_capacity(chain_blocks.len().saturating_sub(1));
        let last = chain_blocks.len().saturating_sub(1);
        for (position, tokens) in chain_blocks.enumerate() {
            end = end.extend(seed, tokens);
            if position < last {
                inner.push(end.block_hash());
            }
        }
        let begin = block.parent.is_some().then(|| before.block_hash());
        let placed = Placed { before: begin, end, inner: inner.into(), copies: block.copies };
        for tier in TIERS {
            if placed.copies.serves(tier) {
                placed.held(tier, &mut self.closure, out);
            }
        }
        self.blocks.insert(hash, placed);
        Some(end)
    }

    /// One copy less of each block of `event`, or as many as it says.
    pub fn remove(&mut self, event: &Removed, out: &mut Vec<Change>) {
        for (position, &hash) in event.hashes.iter().enumerate() {
            let left = |count: u32| match (event.remaining.get(position), self.rules.removal) {
                (Some(remaining), _) => *remaining,
                (None, Removal::PerCopy) => count.saturating_sub(1),
                (None, Removal::LastCopy) => 0,
            };
            let known = if let Some(block) = self.blocks.get_mut(&hash) {
                let served = block.copies.serves(event.tier);
                let known = block.copies.change(event.tier, event.group, left);
                if served && !block.copies.serves(event.tier) {
                    block.gone(event.tier, &mut self.closure, out);
                }
                if block.copies.is_empty() {
                    self.blocks.remove(&hash);
                }
                known
            } else if let Some(orphan) = self.orphans.get_mut(hash) {
                let known = orphan.copies.change(event.tier, event.group, left);
                if orphan.copies.is_empty() {
                    self.orphans.take(hash);
                }
                known
            } else {
                false
            };
            self.counts.unknown_removals += u64::from(!known);
        }
    }

    /// Forgets everything, and says what is gone; the walk is the caller's to spread out.
    pub fn clear(&mut self) -> impl Iterator<Item = Change> + Send + Sync + use<> {
        self.orphans = Orphans::default();
        self.closure = Closure::new();
        std::mem::take(&mut self.blocks).into_values().flat_map(|block| {
            let tiers = TIERS.into_iter().filter(|tier| block.copies.serves(*tier));
            tiers.flat_map(|tier| block.chain_blocks().map(move |hash| Change::Gone(hash, tier))).collect::<Vec<_>>()
        })
    }

    /// The root of the event's chain, and what of its first block's extra keys is not in that root.
    fn root(&self, event: &Stored) -> (PrefixId, Box<[u8]>) {
        let adapter = event.adapter.as_deref();
        let keys: Vec<&ExtraKey> = extra_keys(event, 0).collect();
        let (salt, extra) = match (&event.salt, &*keys) {
            (Some(salt), _) => (Some(&**salt), encode(keys.into_iter())),
            (None, [ExtraKey::Text(salt)]) if event.parent.is_none() => (Some(&**salt), Box::default()),
            (None, _) => (None, encode(keys.into_iter())),
        };
        let root = self.rules.namespace.root(self.rules.seed, RootKeys { adapter, salt, content: None });
        (root, extra)
    }
}

const TIERS: [Tier; 3] = [Tier::Hbm, Tier::Host, Tier::Disk];

impl Placed {
    /// First one first.
    fn chain_blocks(&self) -> impl DoubleEndedIterator<Item = BlockHash> {
        self.inner.iter().copied().chain(std::iter::once(self.end.block_hash()))
    }

    fn stored(&mut self, place: Place, closure: &mut Closure, out: &mut Vec<Change>) {
        let served = self.copies.serves(place.tier);
        self.copies.add(place);
        if !served && self.copies.serves(place.tier) {
            self.held(place.tier, closure, out);
        }
    }

    /// It serves prefixes from `tier` now.
    fn held(&self, tier: Tier, closure: &mut Closure, out: &mut Vec<Change>) {
        match tier {
            Tier::Hbm => closure.hold(self.before, self.end.block_hash()),
            Tier::Host | Tier::Disk => closure.hold_slower(),
        }
        out.extend(self.chain_blocks().map(|hash| Change::Held(hash, tier)));
    }

    /// It no longer does. The last chain block goes first, so that no change leaves a hole behind.
    fn gone(&self, tier: Tier, closure: &mut Closure, out: &mut Vec<Change>) {
        match tier {
            Tier::Hbm => closure.drop(self.before, self.end.block_hash()),
            Tier::Host | Tier::Disk => closure.drop_slower(),
        }
        out.extend(self.chain_blocks().rev().map(|hash| Change::Gone(hash, tier)));
    }
}

/// The extra keys of one block, less the adapter's name, which vLLM repeats there.
fn extra_keys(event: &Stored, position: usize) -> impl Iterator<Item = &ExtraKey> {
    let adapter = event.adapter.as_deref();
    let is_adapter = move |key: &&ExtraKey| matches!(key, ExtraKey::Text(text) if Some(&**text) == adapter);
    event.extra.get(position).into_iter().flatten().filter(move |key| !is_adapter(key))
}

fn extra_of(event: &Stored, position: usize) -> Box<[u8]> {
    encode(extra_keys(event, position))
}

/// Length-prefixed, so that different lists never meet; empty for none.
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

#[cfg(test)]
mod tests;
