//! The residency index: which workers hold each chain block.
//!
//! Exact for any holes and any order of eviction. If a source is whole (it holds no block without its parent), its
//! depth is found by bisection: a few cache misses instead of one per block. For other sources the chain is walked
//! while any of them remains. No operation visits all blocks of a source: retiring one clears one bit, and sweeping its
//! blocks is up to the feeds.

use vocabulary::{BlockHash, Blocks, DpRank, KvIndexState, Overlap, PrefixChain, Tier, WorkerId};

use crate::holder_sets::{HolderSets, MAX_SLOTS, TierSlotBits, plane, tier};
use crate::prefix_closure::PrefixClosure;
use crate::shard::{IndexShard, MixedBlockHash};

/// A change of one chain block at one source.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ResidencyChange {
    /// The source now holds the block in this tier.
    Added(BlockHash, Tier),
    /// The source no longer holds it there.
    Removed(BlockHash, Tier),
}

/// A source's slot in the index: one incarnation of one rank.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SourceSlot(u16);

/// All slots are in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the index has no place for more than {} sources", ResidencyIndex::MAX_SOURCES)]
pub struct TooManySources;

struct IndexedSource {
    worker: WorkerId,
    rank: DpRank,
    knowledge: KvIndexState,
}

/// Which source holds which chain block.
pub struct ResidencyIndex {
    shards: Box<[IndexShard]>,
    sets: HolderSets,
    /// The sources; None if a slot is free or retired.
    slots: Vec<Option<IndexedSource>>,
    /// Bit set of the slots in use.
    live: Vec<u64>,
    /// Bit set of the slots used by whole sources.
    whole: Vec<u64>,
    free: Vec<u16>,
}

impl ResidencyIndex {
    /// Number of slots, including retired ones that are not yet swept.
    pub const MAX_SOURCES: usize = MAX_SLOTS;

    /// Creates an empty index.
    pub fn new() -> Self {
        let shards = std::iter::repeat_with(IndexShard::default).take(MixedBlockHash::SHARDS).collect();
        Self {
            shards,
            sets: HolderSets::default(),
            slots: Vec::new(),
            live: Vec::new(),
            whole: Vec::new(),
            free: Vec::new(),
        }
    }

    /// Allocates a slot for a source, which holds nothing yet.
    pub fn add_source(
        &mut self,
        worker: WorkerId,
        rank: DpRank,
        index_state: KvIndexState,
    ) -> Result<SourceSlot, TooManySources> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.slots.len() < Self::MAX_SOURCES => {
                self.slots.push(None);
                self.live.resize(self.slots.len().div_ceil(64), 0);
                self.whole.resize(self.live.len(), 0);
                (self.slots.len() - 1) as u16
            }
            None => return Err(TooManySources),
        };
        self.slots[usize::from(slot)] = Some(IndexedSource { worker, rank, knowledge: index_state });
        self.live[usize::from(slot) / 64] |= 1 << (slot % 64);
        Ok(SourceSlot(slot))
    }

    /// Hides all blocks of a source. They stay in the index until they are removed.
    pub fn retire(&mut self, slot: SourceSlot) {
        self.slots[usize::from(slot.0)] = None;
        self.live[usize::from(slot.0) / 64] &= !(1 << (slot.0 % 64));
        self.whole[usize::from(slot.0) / 64] &= !(1 << (slot.0 % 64));
    }

    /// Sets whether a source is whole. A whole source must be so after every single change that is applied;
    /// [`PrefixClosure::Holed`] is always correct, and is the initial value.
    pub fn set_closure(&mut self, slot: SourceSlot, shape: PrefixClosure) {
        let (word, bit) = (usize::from(slot.0) / 64, 1 << (slot.0 % 64));
        match shape {
            PrefixClosure::Whole => self.whole[word] |= bit & self.live[word],
            PrefixClosure::Holed => self.whole[word] &= !bit,
        }
    }

    /// Frees a retired slot, all of whose blocks must have been removed.
    pub fn release(&mut self, slot: SourceSlot) {
        debug_assert!(self.slots[usize::from(slot.0)].is_none(), "only a retired place can be released");
        self.free.push(slot.0);
    }

    /// Prefetches what [`Self::apply`] reads and writes, so that the memory accesses overlap. Needs only read access.
    pub fn warm_cpu_cache(&self, changes: &[ResidencyChange]) {
        let seen = changes.iter().fold(0, |seen, change| {
            let (ResidencyChange::Added(hash, _) | ResidencyChange::Removed(hash, _)) = *change;
            let key = MixedBlockHash::of(hash);
            seen ^ self.shards[key.shard()].warm_cpu_cache(key)
        });
        std::hint::black_box(seen);
    }

    /// Applies changes to a source's blocks. Removing blocks that are not held has no effect.
    pub fn apply(&mut self, slot: SourceSlot, changes: &[ResidencyChange]) {
        for change in changes {
            let (ResidencyChange::Added(hash, tier) | ResidencyChange::Removed(hash, tier)) = *change;
            let key = MixedBlockHash::of(hash);
            let shard = &mut self.shards[key.shard()];
            match change {
                ResidencyChange::Added(..) => shard.hold(key, slot.0, tier, &mut self.sets),
                ResidencyChange::Removed(..) => shard.release(key, slot.0, tier, &mut self.sets),
            }
        }
    }

    fn holders_of(&self, hash: BlockHash, word: usize) -> TierSlotBits {
        let key = MixedBlockHash::of(hash);
        self.sets.reach(self.shards[key.shard()].holders(key), word)
    }

    /// Sets how exactly a source's blocks are known.
    pub fn set_kv_index_state(&mut self, slot: SourceSlot, index_state: KvIndexState) {
        if let Some(slot) = &mut self.slots[usize::from(slot.0)] {
            slot.knowledge = index_state;
        }
    }

    /// Returns how exactly a worker's blocks are known: the worst state of its ranks.
    pub fn kv_index_state(&self, worker: WorkerId) -> KvIndexState {
        let seats = self.slots.iter().flatten().filter(|seat| seat.worker == worker);
        seats.map(|seat| seat.knowledge).min().unwrap_or_default()
    }

    /// Returns the number of chain blocks that are held at all.
    pub fn blocks(&self) -> usize {
        self.shards.iter().map(IndexShard::len).sum()
    }

    /// Returns the number of sources.
    pub fn sources(&self) -> usize {
        self.slots.iter().flatten().count()
    }

    /// Returns which sources hold leading blocks of `chain` without a hole, and how many. A slower tier is listed only
    /// if it reaches further than the faster ones alone. Sorted by worker, rank and tier; sources without blocks are
    /// not listed.
    pub fn overlaps(&self, chain: &[BlockHash]) -> Vec<Overlap> {
        self.find_depths(chain.len(), &[], |at| chain[at])
    }

    /// Returns the overlaps with a prompt's chain.
    pub fn overlaps_of_chain(&self, chain: &PrefixChain) -> Vec<Overlap> {
        self.overlaps_with_hint(chain, &[])
    }

    /// Returns the overlaps with a prompt's chain. Faster if holders end at one of the depths in `near`, which do not
    /// affect the result.
    pub fn overlaps_with_hint(&self, chain: &PrefixChain, near: &[Blocks]) -> Vec<Overlap> {
        self.find_depths(chain.ids.len(), near, |at| chain.ids[at].block_hash())
    }

    pub(crate) fn find_depths(
        &self,
        length: usize,
        near: &[Blocks],
        chain: impl Fn(usize) -> BlockHash,
    ) -> Vec<Overlap> {
        let mut found = Vec::new();
        if length == 0 {
            return found;
        }
        // A source that ends at a depth holds that many blocks, and not one more.
        let mut near: Vec<usize> =
            near.iter().map(|depth| depth.0 as usize).flat_map(|depth| [depth, depth.saturating_add(1)]).collect();
        near.sort_unstable();
        // Word by word: most fleets have only one, and in most words no source holds even the first block.
        for (word, whole) in self.whole.iter().enumerate().filter(|(_, whole)| **whole != 0) {
            let first = self.holders_of(chain(0), word)[0];
            self.bisect(DepthSearch { low: 1, high: length, hinted: &near }, &chain, (word, whole & first), &mut found);
        }
        if self.live != self.whole {
            let holed = self.live.iter().zip(&self.whole).map(|(live, whole)| live & !whole).collect();
            self.walk((0..length).map(&chain), holed, &mut found);
        }
        self.normalize(found)
    }

    /// Finds the depths, within `span`, of whole sources in one word of bits.
    fn bisect(
        &self,
        mut span: DepthSearch<'_>,
        chain: &impl Fn(usize) -> BlockHash,
        (word, mut sources): (usize, u64),
        found: &mut Vec<Overlap>,
    ) {
        while sources != 0
            && let Some(depth) = span.next_probe()
        {
            let deeper = sources & self.holders_of(chain(depth - 1), word)[0];
            if deeper == sources {
                span.low = depth;
            } else {
                // The larger hints were already used.
                self.bisect(DepthSearch { low: depth, high: span.high, hinted: &[] }, chain, (word, deeper), found);
                sources &= !deeper;
                span.high = depth - 1;
            }
        }
        self.record_overlaps(sources, (word, 0, span.low as u64), found);
    }

    /// Finds the depths of `sources`, whole or not.
    fn walk(&self, chain: impl Iterator<Item = BlockHash>, sources: Vec<u64>, found: &mut Vec<Overlap>) {
        if sources.iter().all(|bits| *bits == 0) {
            return;
        }
        let mut alive: Vec<TierSlotBits> = sources.into_iter().map(|bits| [bits; 3]).collect();
        let mut depth = 0;
        for hash in chain {
            let mut anyone = 0;
            for (word, alive) in alive.iter_mut().enumerate() {
                let reach = self.holders_of(hash, word);
                for plane in 0..3 {
                    self.record_overlaps(alive[plane] & !reach[plane], (word, plane, depth), found);
                    alive[plane] &= reach[plane];
                }
                // The slowest tier's bits include the faster ones.
                anyone |= alive[2];
            }
            if anyone == 0 {
                return;
            }
            depth += 1;
        }
        for (word, alive) in alive.iter().enumerate() {
            for (plane, &left) in alive.iter().enumerate() {
                self.record_overlaps(left, (word, plane, depth), found);
            }
        }
    }

    /// Adds the sources in `bits` with their depth, unless it is 0.
    fn record_overlaps(&self, mut bits: u64, (word, plane, depth): (usize, usize, u64), found: &mut Vec<Overlap>) {
        while bits != 0 && depth > 0 {
            let slot = word * 64 + bits.trailing_zeros() as usize;
            bits &= bits - 1;
            if let Some(slot) = &self.slots[slot] {
                let blocks = Blocks(depth);
                found.push(Overlap { worker: slot.worker, rank: slot.rank, tier: tier(plane), blocks });
            }
        }
    }

    /// Sorts the result and drops slower tiers that reach no further than a faster one.
    fn normalize(&self, mut found: Vec<Overlap>) -> Vec<Overlap> {
        found.sort_unstable_by_key(|overlap| (overlap.worker, overlap.rank, plane(overlap.tier)));
        let mut last: Option<Overlap> = None;
        found.retain(|overlap| {
            let repeats = last.is_some_and(|last| {
                (last.worker, last.rank) == (overlap.worker, overlap.rank) && overlap.blocks <= last.blocks
            });
            if !repeats {
                last = Some(*overlap);
            }
            !repeats
        });
        found
    }
}

/// Search for a depth: the range that is still possible.
struct DepthSearch<'a> {
    low: usize,
    high: usize,
    /// Likely depths in ascending order.
    hinted: &'a [usize],
}

impl DepthSearch<'_> {
    /// Returns the next depth to check: the largest remaining hint, then the middle.
    fn next_probe(&mut self) -> Option<usize> {
        while let [rest @ .., last] = self.hinted {
            self.hinted = rest;
            if (self.low + 1..=self.high).contains(last) {
                return Some(*last);
            }
        }
        (self.low < self.high).then(|| self.low + (self.high - self.low).div_ceil(2))
    }
}

impl Default for ResidencyIndex {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests;
