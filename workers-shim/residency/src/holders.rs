//! Which slots hold one chain block: some slots inline, more as bit planes, one plane a tier.

use vocabulary::Tier;

/// Bits of 64 slots, one word for each tier, fastest first.
pub(crate) type Word = [u64; 3];

/// Holders without an allocation, as many as fit beside the tag in 16 bytes: nearly all blocks have no more.
const FEW: usize = 7;

/// The slots of one block.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Holders {
    /// In any order; where nobody holds it, [`Holder::NONE`].
    Few([Holder; FEW]),
    #[allow(clippy::box_collection, reason = "a vector is 24 bytes, and each block would pay for them")]
    Many(Box<Vec<Word>>),
}

/// A slot in the upper 13 bits, and a bit for each tier below.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Holder(u16);

impl Holder {
    const NONE: Self = Self(0);

    fn new(slot: u16, tier: Tier) -> Self {
        Self(slot << 3 | 1 << plane(tier))
    }

    fn slot(self) -> u16 {
        self.0 >> 3
    }

    fn tiers(self) -> u16 {
        self.0 & 7
    }
}

/// Slots that a holder can name.
pub(crate) const MOST_SLOTS: usize = 1 << 13;

pub(crate) fn plane(tier: Tier) -> usize {
    match tier {
        Tier::Hbm => 0,
        Tier::Host => 1,
        Tier::Disk => 2,
    }
}

pub(crate) fn tier(plane: usize) -> Tier {
    [Tier::Hbm, Tier::Host, Tier::Disk][plane]
}

fn at(slot: u16) -> (usize, u64) {
    (usize::from(slot) / 64, 1 << (slot % 64))
}

impl Holders {
    pub(crate) fn one(slot: u16, tier: Tier) -> Self {
        let mut few = [Holder::NONE; FEW];
        few[0] = Holder::new(slot, tier);
        Holders::Few(few)
    }

    /// Notes a holder; false if it was noted already.
    pub(crate) fn add(&mut self, slot: u16, tier: Tier) -> bool {
        if let Holders::Few(few) = self {
            let new = Holder::new(slot, tier);
            if let Some(same) = few.iter_mut().find(|holder| holder.tiers() != 0 && holder.slot() == slot) {
                let grew = same.0 | new.0 != same.0;
                same.0 |= new.0;
                return grew;
            }
            if let Some(free) = few.iter_mut().find(|holder| holder.tiers() == 0) {
                *free = new;
                return true;
            }
            *self = Holders::Many(Box::new(spread(few)));
        }
        let Holders::Many(words) = self else { return false };
        let (word, bit) = at(slot);
        let bits = &mut set(words, word)[plane(tier)];
        let new = *bits & bit == 0;
        *bits |= bit;
        new
    }

    /// Forgets a holder; false if it was not noted.
    pub(crate) fn remove(&mut self, slot: u16, tier: Tier) -> bool {
        match self {
            Holders::Few(few) => {
                let gone = 1 << plane(tier);
                let noted = few.iter_mut().find(|holder| holder.slot() == slot && holder.tiers() & gone != 0);
                let Some(holder) = noted else { return false };
                holder.0 &= !gone;
                true
            }
            Holders::Many(words) => {
                let (word, bit) = at(slot);
                let Some(bits) = words.get_mut(word).map(|planes| &mut planes[plane(tier)]) else { return false };
                let known = *bits & bit != 0;
                *bits &= !bit;
                known
            }
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        match self {
            Holders::Few(few) => few.iter().all(|holder| holder.tiers() == 0),
            Holders::Many(words) => words.iter().flatten().all(|bits| *bits == 0),
        }
    }

    /// The 64 slots at `word`, where a faster tier's holder counts for the slower tiers too.
    pub(crate) fn reach(&self, word: usize) -> Word {
        let [hbm, host, disk] = match self {
            Holders::Few(few) => few.iter().fold(Word::default(), |mut planes, holder| {
                let (its, bit) = at(holder.slot());
                if its == word {
                    note(&mut planes, *holder, bit);
                }
                planes
            }),
            Holders::Many(words) => words.get(word).copied().unwrap_or_default(),
        };
        [hbm, hbm | host, hbm | host | disk]
    }
}

fn note(planes: &mut Word, holder: Holder, bit: u64) {
    for (plane, bits) in planes.iter_mut().enumerate() {
        *bits |= bit * u64::from(holder.tiers() >> plane & 1);
    }
}

fn spread(few: &[Holder]) -> Vec<Word> {
    let mut words = Vec::new();
    for holder in few {
        let (word, bit) = at(holder.slot());
        note(set(&mut words, word), *holder, bit);
    }
    words
}

fn set(words: &mut Vec<Word>, word: usize) -> &mut Word {
    if words.len() <= word {
        words.reserve_exact(word + 1 - words.len());
        words.resize(word + 1, Word::default());
    }
    &mut words[word]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_holder_is_found_in_its_tier_and_all_slower_ones() {
        let mut holders = Holders::one(70, Tier::Host);
        assert_eq!(holders.reach(0), [0, 0, 0]);
        assert_eq!(holders.reach(1), [0, 1 << 6, 1 << 6]);
        assert!(holders.add(3, Tier::Hbm));
        assert_eq!((holders.reach(0), holders.reach(1)), ([8, 8, 8], [0, 64, 64]));
    }

    #[test]
    fn a_block_costs_16_bytes_and_the_last_slot_can_be_named() {
        assert_eq!(size_of::<Holders>(), 16);
        let last = (MOST_SLOTS - 1) as u16;
        let holders = Holders::one(last, Tier::Disk);
        assert_eq!(holders.reach(MOST_SLOTS / 64 - 1), [0, 0, 1 << 63]);
    }

    #[test]
    fn more_holders_than_fit_are_kept_all_the_same() {
        let mut holders = Holders::one(5, Tier::Host);
        for slot in (0..40).map(|n| n * 3) {
            assert!(holders.add(slot, Tier::Hbm), "{slot}");
            assert!(!holders.add(slot, Tier::Hbm) && holders.add(slot, Tier::Disk), "{slot}");
        }
        let third = |word: usize| {
            (0..64).filter(|n| (word * 64 + n).is_multiple_of(3) && word * 64 + n < 120).map(|n| 1 << n).sum::<u64>()
        };
        for word in 0..2 {
            let five = if word == 0 { 1 << 5 } else { 0 };
            assert_eq!(holders.reach(word), [third(word), third(word) | five, third(word) | five]);
        }
        assert!(holders.remove(5, Tier::Host) && !holders.remove(5, Tier::Host));
        for slot in (0..40).map(|n| n * 3) {
            assert!(!holders.is_empty() && holders.remove(slot, Tier::Hbm) && holders.remove(slot, Tier::Disk));
        }
        assert!(holders.is_empty());
    }

    #[test]
    fn a_freed_place_is_taken_again_and_slot_zero_is_like_any_other() {
        let mut holders = Holders::one(0, Tier::Hbm);
        assert!(holders.add(1, Tier::Hbm) && holders.remove(0, Tier::Hbm) && !holders.remove(0, Tier::Hbm));
        assert_eq!(holders.reach(0), [2, 2, 2]);
        assert!(holders.add(0, Tier::Disk) && !holders.add(0, Tier::Disk));
        assert_eq!(holders.reach(0), [2, 2, 3]);
    }

    #[test]
    fn adding_and_removing_tell_whether_they_changed_anything() {
        let mut holders = Holders::one(1, Tier::Hbm);
        assert!(!holders.add(1, Tier::Hbm) && holders.add(1, Tier::Disk));
        assert!(!holders.remove(2, Tier::Hbm) && holders.remove(1, Tier::Disk) && !holders.remove(1, Tier::Disk));
        assert!(holders.add(200, Tier::Hbm) && !holders.add(200, Tier::Hbm));
        assert!(!holders.remove(999, Tier::Hbm));
        assert!(holders.remove(200, Tier::Hbm) && !holders.is_empty());
        assert!(holders.remove(1, Tier::Hbm) && holders.is_empty());
    }
}
