//! Which slots hold one chain block: a few in 8 bytes beside the block's hash, more as bit planes, one plane a tier.

use vocabulary::Tier;

/// Bits of 64 slots, one word for each tier, fastest first.
pub(crate) type Word = [u64; 3];

/// Holders that nearly all blocks have no more of.
const FEW: usize = 4;

/// Some slots in any order; where there are fewer, [`Holder::NONE`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Few([Holder; FEW]);

/// Any slots.
#[derive(Clone, Default, PartialEq, Debug)]
pub(crate) struct Many(Vec<Word>);

/// What became of a holder that was to be noted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Noted {
    /// It is.
    New,
    /// It was before.
    Before,
    /// There is no room for it.
    Full,
}

/// A slot in the upper 13 bits, and a bit for each tier below.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Holder(u16);

impl Holder {
    const NONE: Self = Self(0);
    /// Not a slot's, as it would be of the one after the last.
    const MANY: Self = Self(u16::MAX);

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
pub(crate) const MOST_SLOTS: usize = (1 << 13) - 1;

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

impl Few {
    pub(crate) const NONE: Self = Self([Holder::NONE; FEW]);

    pub(crate) fn one(slot: u16, tier: Tier) -> Self {
        let mut few = Self::NONE;
        few.0[0] = Holder::new(slot, tier);
        few
    }

    /// Stands for slots that are kept elsewhere, under a number.
    pub(crate) fn elsewhere(number: u32) -> Self {
        Self([Holder::MANY, Holder(number as u16), Holder((number >> 16) as u16), Holder::NONE])
    }

    /// The number under which they are.
    pub(crate) fn number(&self) -> Option<u32> {
        let [first, low, high, _] = self.0;
        (first == Holder::MANY).then(|| u32::from(high.0) << 16 | u32::from(low.0))
    }

    pub(crate) fn add(&mut self, slot: u16, tier: Tier) -> Noted {
        let new = Holder::new(slot, tier);
        if let Some(same) = self.0.iter_mut().find(|holder| holder.tiers() != 0 && holder.slot() == slot) {
            let grew = same.0 | new.0 != same.0;
            same.0 |= new.0;
            return if grew { Noted::New } else { Noted::Before };
        }
        let Some(free) = self.0.iter_mut().find(|holder| holder.tiers() == 0) else { return Noted::Full };
        *free = new;
        Noted::New
    }

    /// Forgets a holder; false if it was not noted.
    pub(crate) fn remove(&mut self, slot: u16, tier: Tier) -> bool {
        let gone = 1 << plane(tier);
        let noted = self.0.iter_mut().find(|holder| holder.slot() == slot && holder.tiers() & gone != 0);
        let Some(holder) = noted else { return false };
        holder.0 &= !gone;
        true
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(|holder| holder.tiers() == 0)
    }

    /// The 64 slots at `word`, where a faster tier's holder counts for the slower tiers too.
    pub(crate) fn reach(&self, word: usize) -> Word {
        include_slower(self.0.iter().fold(Word::default(), |mut planes, holder| {
            let (its, bit) = at(holder.slot());
            if its == word {
                note(&mut planes, *holder, bit);
            }
            planes
        }))
    }
}

impl Many {
    pub(crate) fn of(few: &Few) -> Self {
        let mut many = Self::default();
        for holder in few.0 {
            let (word, bit) = at(holder.slot());
            note(many.word(word), holder, bit);
        }
        many
    }

    /// Notes a holder; false if it was noted already.
    pub(crate) fn add(&mut self, slot: u16, tier: Tier) -> bool {
        let (word, bit) = at(slot);
        let bits = &mut self.word(word)[plane(tier)];
        let new = *bits & bit == 0;
        *bits |= bit;
        new
    }

    /// Forgets a holder; false if it was not noted.
    pub(crate) fn remove(&mut self, slot: u16, tier: Tier) -> bool {
        let (word, bit) = at(slot);
        let Some(bits) = self.0.get_mut(word).map(|planes| &mut planes[plane(tier)]) else { return false };
        let known = *bits & bit != 0;
        *bits &= !bit;
        known
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().flatten().all(|bits| *bits == 0)
    }

    /// As [`Few::reach`].
    pub(crate) fn reach(&self, word: usize) -> Word {
        include_slower(self.0.get(word).copied().unwrap_or_default())
    }

    fn word(&mut self, word: usize) -> &mut Word {
        if self.0.len() <= word {
            self.0.reserve_exact(word + 1 - self.0.len());
            self.0.resize(word + 1, Word::default());
        }
        &mut self.0[word]
    }
}

fn include_slower([hbm, host, disk]: Word) -> Word {
    [hbm, hbm | host, hbm | host | disk]
}

fn note(planes: &mut Word, holder: Holder, bit: u64) {
    for (plane, bits) in planes.iter_mut().enumerate() {
        *bits |= bit * u64::from(holder.tiers() >> plane & 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_holder_is_found_in_its_tier_and_all_slower_ones() {
        let mut few = Few::one(70, Tier::Host);
        assert_eq!((few.reach(0), few.reach(1)), ([0, 0, 0], [0, 1 << 6, 1 << 6]));
        assert_eq!(few.add(3, Tier::Hbm), Noted::New);
        assert_eq!((few.reach(0), few.reach(1)), ([8, 8, 8], [0, 64, 64]));
        assert_eq!((Many::of(&few).reach(0), Many::of(&few).reach(1)), ([8, 8, 8], [0, 64, 64]));
    }

    #[test]
    fn holders_cost_8_bytes_and_the_last_slot_can_be_named() {
        assert_eq!(size_of::<Few>(), 8);
        let last = (MOST_SLOTS - 1) as u16;
        let mut few = Few::one(last, Tier::Disk);
        assert_eq!(few.reach(MOST_SLOTS / 64), [0, 0, 1 << 62]);
        assert_eq!((few.add(last, Tier::Hbm), few.add(last, Tier::Host)), (Noted::New, Noted::New));
        assert_eq!(few.number(), None, "slots are never taken for a number");
        assert!([0, 1, 70_000, u32::MAX].iter().all(|number| Few::elsewhere(*number).number() == Some(*number)));
        assert!(!Few::elsewhere(0).is_empty());
    }

    #[test]
    fn more_holders_than_fit_are_kept_all_the_same() {
        let mut few = Few::one(5, Tier::Host);
        assert!((0..3).all(|n| few.add(n * 3, Tier::Hbm) == Noted::New));
        assert_eq!((few.add(9, Tier::Hbm), few.add(5, Tier::Hbm)), (Noted::Full, Noted::New));
        assert!(few.remove(5, Tier::Hbm));
        let mut many = Many::of(&few);
        for slot in (0..40).map(|n| n * 3) {
            assert!(many.add(slot, Tier::Hbm) != (slot < 9), "{slot}");
            assert!(!many.add(slot, Tier::Hbm) && many.add(slot, Tier::Disk), "{slot}");
        }
        let third = |word: usize| {
            (0..64).filter(|n| (word * 64 + n).is_multiple_of(3) && word * 64 + n < 120).map(|n| 1 << n).sum::<u64>()
        };
        for word in 0..2 {
            let five = if word == 0 { 1 << 5 } else { 0 };
            assert_eq!(many.reach(word), [third(word), third(word) | five, third(word) | five]);
        }
        assert!(many.remove(5, Tier::Host) && !many.remove(5, Tier::Host) && !many.remove(999, Tier::Hbm));
        for slot in (0..40).map(|n| n * 3) {
            assert!(!many.is_empty() && many.remove(slot, Tier::Hbm) && many.remove(slot, Tier::Disk));
        }
        assert!(many.is_empty());
    }

    #[test]
    fn a_freed_place_is_taken_again_and_slot_zero_is_like_any_other() {
        let mut few = Few::one(0, Tier::Hbm);
        assert_eq!(few.add(1, Tier::Hbm), Noted::New);
        assert!(few.remove(0, Tier::Hbm) && !few.remove(0, Tier::Hbm));
        assert_eq!(few.reach(0), [2, 2, 2]);
        assert_eq!((few.add(0, Tier::Disk), few.add(0, Tier::Disk)), (Noted::New, Noted::Before));
        assert_eq!(few.reach(0), [2, 2, 3]);
        assert!(few.remove(0, Tier::Disk) && few.remove(1, Tier::Hbm) && few.is_empty());
    }
}
