//! Which slots hold a chain block. The blocks of a conversation lie at the same workers, so a block tells only the number of
//! its set, and a set is kept once for all blocks that have it.
//!
//! There are never many more sets than blocks have: with each new one, a few that no block has any more are given up.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use vocabulary::Tier;

use crate::mix::MixMap;
use crate::table::spread;

/// Bits of 64 slots, one word for each tier, fastest first.
pub(crate) type Word = [u64; 3];

/// Slots that can be told apart.
pub(crate) const MOST_SLOTS: usize = (1 << 13) - 1;

pub(crate) fn plane(tier: Tier) -> usize {
    tier as usize
}

pub(crate) fn tier(plane: usize) -> Tier {
    [Tier::Hbm, Tier::Host, Tier::Disk][plane]
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Number(pub(crate) u32);

impl Number {
    /// Of the empty set.
    pub(crate) const NONE: Self = Self(0);
}

/// The members of a set among 64 slots, of which there is at least one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Part {
    word: usize,
    planes: Word,
}

struct Set {
    /// In order; none where the number is free.
    parts: Arc<[Part]>,
    /// That have it.
    blocks: u32,
}

/// A slot that joins or leaves a set, in one tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Turn(u16);

impl Turn {
    fn leaves(slot: u16, tier: Tier) -> Self {
        Self(slot << 3 | (plane(tier) as u16) << 1)
    }

    fn joins(slot: u16, tier: Tier) -> Self {
        Self(Self::leaves(slot, tier).0 | 1)
    }

    /// The set after it, as parts; the same where nothing is to be done.
    fn taken(self, parts: &[Part]) -> Vec<Part> {
        let (slot, plane) = (usize::from(self.0 >> 3), usize::from(self.0 >> 1 & 3));
        let (word, bit) = (slot / 64, 1 << (slot % 64));
        let mut parts = parts.to_vec();
        let at = parts.partition_point(|part| part.word < word);
        if parts.get(at).is_none_or(|part| part.word != word) {
            parts.insert(at, Part { word, planes: Word::default() });
        }
        let bits = &mut parts[at].planes[plane];
        *bits = if self.0 & 1 == 1 { *bits | bit } else { *bits & !bit };
        if parts[at].planes == Word::default() {
            parts.remove(at);
        }
        parts
    }
}

/// What a turn made of a set.
#[derive(Clone, Copy)]
struct Step {
    from: Number,
    turn: Turn,
    to: Number,
}

const STEPS: u32 = 8;
const FORGOTTEN: Step = Step { from: Number(u32::MAX), turn: Turn(0), to: Number::NONE };
/// Sets that are looked at for each new one.
const LOOKS: usize = 4;

pub(crate) struct Sets {
    /// The empty one first.
    sets: Vec<Set>,
    numbers: MixMap<Arc<[Part]>, Number>,
    /// Numbers that no set has, the least first, so that those above the sets in use come free.
    free: BinaryHeap<Reverse<u32>>,
    /// As events come in runs, nearly every step was taken just before.
    steps: Box<[Step]>,
    /// The one that was looked at last.
    hand: usize,
}

impl Default for Sets {
    fn default() -> Self {
        Self {
            sets: vec![Set { parts: Arc::new([]), blocks: 0 }],
            numbers: MixMap::default(),
            free: BinaryHeap::new(),
            steps: vec![FORGOTTEN; 1 << STEPS].into(),
            hand: 0,
        }
    }
}

impl Sets {
    /// A block gets one holder more; false where that was one before.
    pub(crate) fn add(&mut self, set: &mut Number, slot: u16, tier: Tier) -> bool {
        self.turn(set, Turn::joins(slot, tier))
    }

    /// A block gets one holder less; false where that was none.
    pub(crate) fn remove(&mut self, set: &mut Number, slot: u16, tier: Tier) -> bool {
        self.turn(set, Turn::leaves(slot, tier))
    }

    /// Who of the 64 slots at `word` is in the set, where a faster tier's holder counts for the slower tiers too.
    pub(crate) fn reach(&self, set: Number, word: usize) -> Word {
        let part = self.sets[set.0 as usize].parts.iter().find(|part| part.word == word);
        let [hbm, host, disk] = part.map_or(Word::default(), |part| part.planes);
        [hbm, hbm | host, hbm | host | disk]
    }

    /// Sets that some block has.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.sets.iter().filter(|set| set.blocks > 0).count()
    }

    fn turn(&mut self, set: &mut Number, turn: Turn) -> bool {
        let from = *set;
        let to = self.step(from, turn);
        if to == from {
            return false;
        }
        if from != Number::NONE {
            self.sets[from.0 as usize].blocks -= 1;
        }
        if to != Number::NONE {
            self.sets[to.0 as usize].blocks += 1;
        }
        *set = to;
        true
    }

    fn step(&mut self, from: Number, turn: Turn) -> Number {
        let place = (spread(u64::from(from.0) << 16 | u64::from(turn.0)) >> (u64::BITS - STEPS)) as usize;
        let last = self.steps[place];
        if (last.from, last.turn) == (from, turn) {
            return last.to;
        }
        let parts = turn.taken(&self.sets[from.0 as usize].parts);
        let to = self.number(&parts);
        self.steps[place] = Step { from, turn, to };
        to
    }

    fn number(&mut self, parts: &[Part]) -> Number {
        if parts.is_empty() {
            return Number::NONE;
        }
        if let Some(number) = self.numbers.get(parts) {
            return *number;
        }
        self.give_up_some();
        let set = Set { parts: parts.into(), blocks: 0 };
        let parts = set.parts.clone();
        let number = match self.free.pop() {
            Some(Reverse(number)) => {
                self.sets[number as usize] = set;
                Number(number)
            }
            None => {
                self.sets.push(set);
                Number((self.sets.len() - 1) as u32)
            }
        };
        self.numbers.insert(parts, number);
        number
    }

    /// Looks at the next few sets, and frees the numbers of those that no block has.
    fn give_up_some(&mut self) {
        for _ in 0..LOOKS {
            self.hand = (self.hand + 1) % self.sets.len();
            let set = &mut self.sets[self.hand];
            if set.blocks == 0 && !set.parts.is_empty() {
                let parts = std::mem::replace(&mut set.parts, Arc::new([]));
                self.numbers.remove(&parts);
                self.free.push(Reverse(self.hand as u32));
                self.steps.fill(FORGOTTEN);
            }
            if self.hand == 0 {
                self.tighten();
            }
        }
    }

    /// Gives memory back where the upper half of the numbers is free. Once a round, so that it costs each new set little.
    fn tighten(&mut self) {
        let used = 1 + self.sets.iter().rposition(|set| !set.parts.is_empty()).unwrap_or(0);
        if used <= self.sets.len() / 2 {
            self.sets.truncate(used);
            self.sets.shrink_to_fit();
            self.free.retain(|Reverse(number)| (*number as usize) < used);
            self.free.shrink_to_fit();
            self.numbers.shrink_to_fit();
        }
    }
}

#[cfg(test)]
mod tests;
