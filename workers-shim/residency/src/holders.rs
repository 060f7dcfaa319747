//! Which slots hold one chain block: one slot inline, more as bit planes, one plane a tier.

use vocabulary::Tier;

/// Bits of 64 slots, one word for each tier, fastest first.
pub(crate) type Word = [u64; 3];

/// The slots of one block.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Holders {
    One { slot: u16, tiers: u8 },
    Many(Vec<Word>),
}

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

fn planes(slot: u16, tiers: u8) -> impl Iterator<Item = (usize, usize, u64)> {
    let (word, bit) = at(slot);
    (0..3).filter(move |plane| tiers >> plane & 1 == 1).map(move |plane| (word, plane, bit))
}

impl Holders {
    pub(crate) fn one(slot: u16, tier: Tier) -> Self {
        Holders::One { slot, tiers: 1 << plane(tier) }
    }

    /// Notes a holder; false if it was noted already.
    pub(crate) fn add(&mut self, slot: u16, tier: Tier) -> bool {
        let tiers = 1 << plane(tier);
        match self {
            Holders::One { slot: same, tiers: held } if *same == slot => {
                let new = *held & tiers == 0;
                *held |= tiers;
                new
            }
            Holders::One { slot: other, tiers: held } => {
                let mut words = Vec::new();
                for (word, plane, bit) in planes(*other, *held).chain(planes(slot, tiers)) {
                    set(&mut words, word)[plane] |= bit;
                }
                *self = Holders::Many(words);
                true
            }
            Holders::Many(words) => {
                let (word, bit) = at(slot);
                let bits = &mut set(words, word)[plane(tier)];
                let new = *bits & bit == 0;
                *bits |= bit;
                new
            }
        }
    }

    /// Forgets a holder; false if it was not noted.
    pub(crate) fn remove(&mut self, slot: u16, tier: Tier) -> bool {
        let tiers = 1 << plane(tier);
        match self {
            Holders::One { slot: same, tiers: held } if *same == slot => {
                let known = *held & tiers != 0;
                *held &= !tiers;
                known
            }
            Holders::One { .. } => false,
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
            Holders::One { tiers, .. } => *tiers == 0,
            Holders::Many(words) => words.iter().flatten().all(|bits| *bits == 0),
        }
    }

    /// The 64 slots at `word`, where a faster tier's holder counts for the slower tiers too.
    pub(crate) fn reach(&self, word: usize) -> Word {
        let [hbm, host, disk] = match self {
            Holders::One { slot, tiers } => {
                let mut planes_of = Word::default();
                for (at, plane, bit) in planes(*slot, *tiers) {
                    if at == word {
                        planes_of[plane] = bit;
                    }
                }
                planes_of
            }
            Holders::Many(words) => words.get(word).copied().unwrap_or_default(),
        };
        [hbm, hbm | host, hbm | host | disk]
    }
}

fn set(words: &mut Vec<Word>, word: usize) -> &mut Word {
    if words.len() <= word {
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
