//! A part of the index: the blocks whose hashes begin alike. Parts are small, so that the growing of one keeps nobody
//! waiting.

use vocabulary::{BlockHash, Tier};

use crate::holders::{Few, Many, Noted, Word, plane};
use crate::mix::MixMap;
use crate::table::{Entry, Table, spread};

/// A block's hash, spread evenly: its first bits say in which part of the index it is.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Key(u64);

/// Bits that number the parts.
const PARTS: u32 = 10;

impl Key {
    pub(crate) const SHARDS: usize = 1 << PARTS;

    pub(crate) fn of(hash: BlockHash) -> Self {
        Self(spread(hash.0))
    }

    pub(crate) fn shard(self) -> usize {
        (self.0 >> (64 - PARTS)) as usize
    }
}

/// A block and who holds it: 16 bytes.
#[derive(Clone, Copy)]
struct Held {
    key: Key,
    holders: Few,
}

impl Held {
    fn hash_of(key: Key) -> u64 {
        key.0 << PARTS
    }
}

impl Entry for Held {
    const FREE: Self = Self { key: Key(0), holders: Few::NONE };

    fn is_free(&self) -> bool {
        self.holders == Few::NONE
    }

    fn hash(&self) -> u64 {
        Self::hash_of(self.key)
    }
}

/// What few blocks need.
#[derive(Default)]
struct Rare {
    /// Holders of blocks with too many for their entry, by number.
    many: Vec<Many>,
    free: Vec<u32>,
    /// Blocks that one source holds under several of its own names, beyond the first.
    doubled: MixMap<(Key, u16, u8), u32>,
}

/// The blocks of one part.
#[derive(Default)]
pub(crate) struct Shard {
    blocks: Table<Held>,
    rare: Option<Box<Rare>>,
}

impl Shard {
    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Fetches what a look at `key` reads; see [`Table::glance`].
    pub(crate) fn glance(&self, key: Key) -> u64 {
        self.blocks.glance(Held::hash_of(key)).key.0
    }

    /// Who of the 64 slots at `word` holds the block, in each tier and all faster ones.
    pub(crate) fn reach(&self, key: Key, word: usize) -> Word {
        let Some(place) = self.find(key) else { return Word::default() };
        let holders = self.blocks.at(place).holders;
        match holders.number() {
            None => holders.reach(word),
            Some(number) => self.many(number).map_or(Word::default(), |many| many.reach(word)),
        }
    }

    pub(crate) fn hold(&mut self, key: Key, slot: u16, tier: Tier) {
        let Some(place) = self.find(key) else {
            return self.blocks.insert(Held { key, holders: Few::one(slot, tier) });
        };
        let holders = &mut self.blocks.at_mut(place).holders;
        let rare = &mut self.rare;
        let noted = match holders.number() {
            None => holders.add(slot, tier),
            Some(number) if rare.get_or_insert_default().many[number as usize].add(slot, tier) => Noted::New,
            Some(_) => Noted::Before,
        };
        match noted {
            Noted::New => {}
            Noted::Before => {
                *rare.get_or_insert_default().doubled.entry((key, slot, plane(tier) as u8)).or_default() += 1;
            }
            Noted::Full => self.move_out(place, slot, tier),
        }
    }

    /// What is removed without being held is ignored.
    pub(crate) fn drop_one(&mut self, key: Key, slot: u16, tier: Tier) {
        if self.is_doubled(key, slot, tier) {
            return;
        }
        let Some(place) = self.find(key) else { return };
        let holders = &mut self.blocks.at_mut(place).holders;
        if let Some(number) = holders.number() {
            let rare = self.rare.get_or_insert_default();
            let many = &mut rare.many[number as usize];
            if many.remove(slot, tier) && many.is_empty() {
                *many = Many::default();
                rare.free.push(number);
                self.blocks.remove(place);
            }
        } else if holders.remove(slot, tier) && holders.is_empty() {
            self.blocks.remove(place);
        }
    }

    fn find(&self, key: Key) -> Option<usize> {
        self.blocks.find(Held::hash_of(key), |_| true)
    }

    fn many(&self, number: u32) -> Option<&Many> {
        self.rare.as_ref()?.many.get(number as usize)
    }

    /// Whether one of several names of the block went, and the block stays.
    fn is_doubled(&mut self, key: Key, slot: u16, tier: Tier) -> bool {
        let Some(rare) = &mut self.rare else { return false };
        let name = (key, slot, plane(tier) as u8);
        let Some(count) = rare.doubled.get_mut(&name) else { return false };
        *count -= 1;
        if *count == 0 {
            rare.doubled.remove(&name);
        }
        true
    }

    /// A block gets one holder more than its entry has room for.
    fn move_out(&mut self, place: usize, slot: u16, tier: Tier) {
        let mut many = Many::of(&self.blocks.at(place).holders);
        many.add(slot, tier);
        let rare = self.rare.get_or_insert_default();
        let number = rare.free.pop().unwrap_or_else(|| {
            rare.many.push(Many::default());
            (rare.many.len() - 1) as u32
        });
        rare.many[number as usize] = many;
        self.blocks.at_mut(place).holders = Few::elsewhere(number);
    }
}

#[cfg(test)]
mod tests;
