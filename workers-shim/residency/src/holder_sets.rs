//! The sets of slots that hold a chain block. The blocks of a conversation are held by the same workers, so each block
//! only stores the id of its set, and equal sets are stored once.
//!
//! The number of stored sets stays close to the number in use: with each new set, a few are checked and freed if no
//! block uses them.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use vocabulary::Tier;

use crate::bucket_table::spread;
use crate::fold_hash::FoldHashMap;

/// Bits of 64 slots: one word per tier, fastest first.
pub(crate) type TierSlotBits = [u64; 3];

/// Maximum number of slots.
pub(crate) const MAX_SLOTS: usize = (1 << 13) - 1;

pub(crate) fn plane(tier: Tier) -> usize {
    tier as usize
}

pub(crate) fn tier(plane: usize) -> Tier {
    [Tier::Hbm, Tier::Host, Tier::Disk][plane]
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct HolderSetId(pub(crate) u32);

impl HolderSetId {
    /// The id of the empty set.
    pub(crate) const NONE: Self = Self(0);
}

/// The members of a set among 64 slots; at least one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct HolderWord {
    word: usize,
    planes: TierSlotBits,
}

struct HolderSet {
    /// In ascending order; empty if the id is free.
    parts: Arc<[HolderWord]>,
    /// Number of blocks that use the set.
    blocks: u32,
}

/// Adds or removes one slot in one tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct HolderChange(u16);

impl HolderChange {
    fn removing(slot: u16, tier: Tier) -> Self {
        Self(slot << 3 | (plane(tier) as u16) << 1)
    }

    fn adding(slot: u16, tier: Tier) -> Self {
        Self(Self::removing(slot, tier).0 | 1)
    }

    /// Returns the resulting set; equal to `parts` if the change has no effect.
    fn apply_to(self, parts: &[HolderWord]) -> Vec<HolderWord> {
        let (slot, plane) = (usize::from(self.0 >> 3), usize::from(self.0 >> 1 & 3));
        let (word, bit) = (slot / 64, 1 << (slot % 64));
        let mut parts = parts.to_vec();
        let at = parts.partition_point(|part| part.word < word);
        if parts.get(at).is_none_or(|part| part.word != word) {
            parts.insert(at, HolderWord { word, planes: TierSlotBits::default() });
        }
        let bits = &mut parts[at].planes[plane];
        *bits = if self.0 & 1 == 1 { *bits | bit } else { *bits & !bit };
        if parts[at].planes == TierSlotBits::default() {
            parts.remove(at);
        }
        parts
    }
}

/// A cached result of applying a change to a set.
#[derive(Clone, Copy)]
struct CachedHolderTransition {
    from: HolderSetId,
    change: HolderChange,
    to: HolderSetId,
}

const TRANSITION_CACHE_BITS: u32 = 8;
const EMPTY_TRANSITION: CachedHolderTransition =
    CachedHolderTransition { from: HolderSetId(u32::MAX), change: HolderChange(0), to: HolderSetId::NONE };
/// Number of sets checked for reclaiming with each new one.
const RECLAIM_CHECKS: usize = 4;

pub(crate) struct HolderSets {
    /// Indexed by id, the empty set first.
    sets: Vec<HolderSet>,
    ids: FoldHashMap<Arc<[HolderWord]>, HolderSetId>,
    /// Free ids, smallest first, so that the ids at the end become free.
    free: BinaryHeap<Reverse<u32>>,
    /// Cache of transitions: events come in runs, so nearly every transition was used just before.
    transitions: Box<[CachedHolderTransition]>,
    /// The set that was checked last.
    reclaim_cursor: usize,
}

impl Default for HolderSets {
    fn default() -> Self {
        Self {
            sets: vec![HolderSet { parts: Arc::new([]), blocks: 0 }],
            ids: FoldHashMap::default(),
            free: BinaryHeap::new(),
            transitions: vec![EMPTY_TRANSITION; 1 << TRANSITION_CACHE_BITS].into(),
            reclaim_cursor: 0,
        }
    }
}

impl HolderSets {
    /// Adds a holder to a block's set; returns false if it was one already.
    pub(crate) fn add(&mut self, set: &mut HolderSetId, slot: u16, tier: Tier) -> bool {
        self.apply_change(set, HolderChange::adding(slot, tier))
    }

    /// Removes a holder from a block's set; returns false if it was none.
    pub(crate) fn remove(&mut self, set: &mut HolderSetId, slot: u16, tier: Tier) -> bool {
        self.apply_change(set, HolderChange::removing(slot, tier))
    }

    /// Returns which of the 64 slots at `word` are in the set. A slot counts as holder in its own tier and in all
    /// slower ones.
    pub(crate) fn reach(&self, set: HolderSetId, word: usize) -> TierSlotBits {
        let part = self.sets[set.0 as usize].parts.iter().find(|part| part.word == word);
        let [hbm, host, disk] = part.map_or(TierSlotBits::default(), |part| part.planes);
        [hbm, hbm | host, hbm | host | disk]
    }

    /// Returns the number of sets that are in use.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.sets.iter().filter(|set| set.blocks > 0).count()
    }

    fn apply_change(&mut self, set: &mut HolderSetId, turn: HolderChange) -> bool {
        let from = *set;
        let to = self.transition(from, turn);
        if to == from {
            return false;
        }
        if from != HolderSetId::NONE {
            self.sets[from.0 as usize].blocks -= 1;
        }
        if to != HolderSetId::NONE {
            self.sets[to.0 as usize].blocks += 1;
        }
        *set = to;
        true
    }

    fn transition(&mut self, from: HolderSetId, turn: HolderChange) -> HolderSetId {
        let place =
            (spread(u64::from(from.0) << 16 | u64::from(turn.0)) >> (u64::BITS - TRANSITION_CACHE_BITS)) as usize;
        let last = self.transitions[place];
        if (last.from, last.change) == (from, turn) {
            return last.to;
        }
        let parts = turn.apply_to(&self.sets[from.0 as usize].parts);
        let to = self.set_id(&parts);
        self.transitions[place] = CachedHolderTransition { from, change: turn, to };
        to
    }

    fn set_id(&mut self, parts: &[HolderWord]) -> HolderSetId {
        if parts.is_empty() {
            return HolderSetId::NONE;
        }
        if let Some(number) = self.ids.get(parts) {
            return *number;
        }
        self.reclaim_some();
        let set = HolderSet { parts: parts.into(), blocks: 0 };
        let parts = set.parts.clone();
        let number = match self.free.pop() {
            Some(Reverse(number)) => {
                self.sets[number as usize] = set;
                HolderSetId(number)
            }
            None => {
                self.sets.push(set);
                HolderSetId((self.sets.len() - 1) as u32)
            }
        };
        self.ids.insert(parts, number);
        number
    }

    /// Checks the next few sets, and frees the ids of those that no block uses.
    fn reclaim_some(&mut self) {
        for _ in 0..RECLAIM_CHECKS {
            self.reclaim_cursor = (self.reclaim_cursor + 1) % self.sets.len();
            let set = &mut self.sets[self.reclaim_cursor];
            if set.blocks == 0 && !set.parts.is_empty() {
                let parts = std::mem::replace(&mut set.parts, Arc::new([]));
                self.ids.remove(&parts);
                self.free.push(Reverse(self.reclaim_cursor as u32));
                self.transitions.fill(EMPTY_TRANSITION);
            }
            if self.reclaim_cursor == 0 {
                self.compact();
            }
        }
    }

    /// Frees memory if the upper half of the ids is free. Called once per round over all sets, so that the cost per new
    /// set is small.
    fn compact(&mut self) {
        let used = 1 + self.sets.iter().rposition(|set| !set.parts.is_empty()).unwrap_or(0);
        if used <= self.sets.len() / 2 {
            self.sets.truncate(used);
            self.sets.shrink_to_fit();
            self.free.retain(|Reverse(number)| (*number as usize) < used);
            self.free.shrink_to_fit();
            self.ids.shrink_to_fit();
        }
    }
}

#[cfg(test)]
mod tests;
