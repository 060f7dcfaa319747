//! How many copies of one block a process holds, by tier and group: engines store and remove copies, not blocks.

use vocabulary::Tier;

use crate::event::SpecKind;

/// Copies of one kind in one place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    pub(crate) tier: Tier,
    pub(crate) group: u32,
    pub(crate) kind: SpecKind,
}

/// How many of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counted {
    pub(crate) place: Place,
    pub(crate) count: u32,
}

/// The copies of one block. The first place is inline, as nearly all blocks have just one.
#[derive(Clone, Default, Debug)]
pub(crate) struct Copies {
    first: Option<Counted>,
    more: Vec<Counted>,
}

impl Copies {
    fn places(&mut self) -> impl Iterator<Item = &mut Counted> {
        self.first.iter_mut().chain(self.more.iter_mut())
    }

    /// All of them, in the order in which their places were first taken.
    pub(crate) fn counted(&self) -> impl Iterator<Item = &Counted> {
        self.first.iter().chain(&self.more)
    }

    /// Copies in a place where there are none yet; false when there are some, or none are to come.
    pub(crate) fn begin(&mut self, counted: Counted) -> bool {
        let at = |counted: &Counted| (counted.place.tier, counted.place.group);
        if counted.count == 0 || self.counted().any(|other| at(other) == at(&counted)) {
            return false;
        }
        match self.first {
            None => self.first = Some(counted),
            Some(_) => self.more.push(counted),
        }
        true
    }

    /// One copy more.
    pub(crate) fn add(&mut self, place: Place) {
        let same = |counted: &&mut Counted| (counted.place.tier, counted.place.group) == (place.tier, place.group);
        if let Some(counted) = self.places().find(same) {
            counted.count = counted.count.saturating_add(1);
        } else if self.first.is_none() {
            self.first = Some(Counted { place, count: 1 });
        } else {
            self.more.push(Counted { place, count: 1 });
        }
    }

    /// Changes how many copies lie in `tier` and `group`; false when there are none to change.
    pub(crate) fn change(&mut self, tier: Tier, group: u32, left: impl FnOnce(u32) -> u32) -> bool {
        let found = self.places().find(|counted| (counted.place.tier, counted.place.group) == (tier, group));
        let Some(counted) = found else { return false };
        counted.count = left(counted.count);
        if counted.count == 0 {
            self.more.retain(|counted| counted.count > 0);
            if self.first.is_some_and(|counted| counted.count == 0) {
                self.first = self.more.pop();
            }
        }
        true
    }

    /// Whether a copy in `tier` serves full attention, so that it counts for prefixes.
    pub(crate) fn serves(&self, tier: Tier) -> bool {
        let counts = |counted: &Counted| counted.place.tier == tier && counted.place.kind == SpecKind::Full;
        self.first.iter().chain(&self.more).any(counts)
    }

    /// Whether the last copy is gone.
    pub(crate) fn is_empty(&self) -> bool {
        self.first.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HBM: Place = Place { tier: Tier::Hbm, group: 0, kind: SpecKind::Full };
    const HOST: Place = Place { tier: Tier::Host, group: 0, kind: SpecKind::Full };
    const WINDOW: Place = Place { tier: Tier::Hbm, group: 1, kind: SpecKind::Window };

    fn remove(copies: &mut Copies, place: Place) -> bool {
        copies.change(place.tier, place.group, |count| count - 1)
    }

    #[test]
    fn two_copies_need_two_removals() {
        let mut copies = Copies::default();
        copies.add(HBM);
        copies.add(HBM);
        assert!(remove(&mut copies, HBM) && copies.serves(Tier::Hbm));
        assert!(remove(&mut copies, HBM) && copies.is_empty());
        assert!(!remove(&mut copies, HBM), "nothing is left to remove");
    }

    #[test]
    fn places_are_counted_apart() {
        let mut copies = Copies::default();
        for place in [HBM, HOST, WINDOW] {
            copies.add(place);
        }
        assert!(remove(&mut copies, HBM));
        assert!(!copies.serves(Tier::Hbm), "a window is no prefix");
        assert!(copies.serves(Tier::Host) && !copies.is_empty());
        assert!(remove(&mut copies, WINDOW) && remove(&mut copies, HOST) && copies.is_empty());
    }

    #[test]
    fn what_is_taken_over_is_counted_on_and_no_place_is_taken_over_twice() {
        let mut copies = Copies::default();
        assert!(!copies.begin(Counted { place: HBM, count: 0 }), "no copies are none");
        assert!(copies.begin(Counted { place: HBM, count: 2 }) && copies.begin(Counted { place: WINDOW, count: 1 }));
        assert!(!copies.begin(Counted { place: HBM, count: 1 }));
        copies.add(HBM);
        assert_eq!(copies.counted().map(|counted| counted.count).collect::<Vec<_>>(), [3, 1]);
        assert!(remove(&mut copies, HBM) && remove(&mut copies, HBM) && copies.serves(Tier::Hbm));
        assert!(remove(&mut copies, HBM) && !copies.serves(Tier::Hbm) && !copies.is_empty());
    }
}
