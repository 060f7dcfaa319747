//! How many copies of one block a process holds, by tier and group: engines store and remove copies, not blocks.

use vocabulary::Tier;

use crate::event::SpecKind;
use crate::holders::{plane, tier};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    pub(crate) tier: Tier,
    pub(crate) group: u32,
    pub(crate) kind: SpecKind,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Counted {
    pub(crate) place: Place,
    pub(crate) count: u32,
}

/// The copies of nearly all blocks, in two bytes: a few in one place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Brief(u16);

impl Brief {
    pub(crate) const NONE: Self = Self(0);
    /// More than fits here: they are counted elsewhere.
    pub(crate) const ELSEWHERE: Self = Self(u16::MAX);
    /// Bits of the count, and below which bits group, tier and kind begin.
    const COUNT: u32 = 5;
    const TIER: u32 = 10;
    const MOST: u16 = (1 << Self::COUNT) - 1;
    const MOST_GROUP: u32 = (1 << (Self::TIER - Self::COUNT)) - 1;
    const WINDOW: u16 = 1 << 12;

    fn of_one(Counted { place, count }: Counted) -> Option<Self> {
        let fits = place.group <= Self::MOST_GROUP && count <= u32::from(Self::MOST);
        let kind = if place.kind == SpecKind::Window { Self::WINDOW } else { 0 };
        fits.then_some(Self(count as u16 | Self::there(place.tier, place.group) | kind))
    }

    /// A place, but for its kind, where the group fits.
    fn there(tier: Tier, group: u32) -> u16 {
        (group as u16) << Self::COUNT | (plane(tier) as u16) << Self::TIER
    }

    /// Whether a copy in `tier` serves full attention; not for [`Self::ELSEWHERE`].
    pub(crate) fn serves(self, tier: Tier) -> bool {
        self != Self::NONE && self.0 >> Self::TIER == plane(tier) as u16
    }

    /// One copy more in `place`; none where that does not fit, or copies are elsewhere.
    pub(crate) fn more(self, place: Place) -> Option<Self> {
        let one = Self::of_one(Counted { place, count: 1 })?;
        let same = self != Self::ELSEWHERE && self.place() == one.place() && self.count() < Self::MOST;
        if self == Self::NONE { Some(one) } else { same.then_some(Self(self.0 + 1)) }
    }

    /// How many there are, where all of them lie in `tier` and `group`.
    pub(crate) fn all_in(self, tier: Tier, group: u32) -> Option<u32> {
        let there = group <= Self::MOST_GROUP && self.place() & !Self::WINDOW == Self::there(tier, group);
        (there && self != Self::NONE && self != Self::ELSEWHERE).then(|| u32::from(self.count()))
    }

    /// So many in the same place; none where that does not fit.
    pub(crate) fn with(self, count: u32) -> Option<Self> {
        match u16::try_from(count) {
            Ok(0) => Some(Self::NONE),
            Ok(count @ 1..=Self::MOST) => Some(Self(self.place() | count)),
            _ => None,
        }
    }

    fn count(self) -> u16 {
        self.0 & Self::MOST
    }

    /// Group, tier and kind.
    fn place(self) -> u16 {
        self.0 & !Self::MOST
    }

    /// None where they do not fit.
    pub(crate) fn of(copies: &Copies) -> Option<Self> {
        match copies.first {
            None => Some(Self::NONE),
            Some(counted) if copies.more.is_empty() => Self::of_one(counted),
            Some(_) => None,
        }
    }

    /// The same as copies; none where they are counted elsewhere.
    pub(crate) fn copies(self) -> Copies {
        if self == Self::NONE || self == Self::ELSEWHERE {
            return Copies::default();
        }
        let kind = if self.0 & Self::WINDOW == 0 { SpecKind::Full } else { SpecKind::Window };
        let group = u32::from(self.0 >> Self::COUNT) & Self::MOST_GROUP;
        let place = Place { tier: tier(usize::from(self.0 >> Self::TIER & 3)), group, kind };
        Copies { first: Some(Counted { place, count: u32::from(self.count()) }), more: Vec::new() }
    }
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
    fn two_bytes_hold_what_fits_and_refuse_the_rest() {
        for tier in [Tier::Hbm, Tier::Host, Tier::Disk] {
            for (group, kind, count) in [(0, SpecKind::Full, 1), (31, SpecKind::Window, 31)] {
                let counted = Counted { place: Place { tier, group, kind }, count };
                let mut copies = Copies::default();
                copies.begin(counted);
                let brief = Brief::of(&copies).unwrap();
                assert!(brief != Brief::NONE && brief != Brief::ELSEWHERE);
                let [back] = brief.copies().counted().copied().collect::<Vec<_>>()[..] else { panic!("one place") };
                assert_eq!((back.place, back.count), (counted.place, counted.count));
                for tier in [Tier::Hbm, Tier::Host, Tier::Disk] {
                    assert_eq!(Brief::of(&copies).unwrap().serves(tier), copies.serves(tier));
                }
            }
        }
        assert_eq!(Brief::of(&Copies::default()), Some(Brief::NONE));
        let of = |all: &[Counted]| {
            let mut copies = Copies::default();
            all.iter().for_each(|counted| assert!(copies.begin(*counted)));
            Brief::of(&copies)
        };
        assert_eq!(of(&[Counted { place: HBM, count: 32 }]), None);
        assert_eq!(of(&[Counted { place: Place { group: 32, ..HBM }, count: 1 }]), None);
        assert_eq!(of(&[Counted { place: HBM, count: 1 }, Counted { place: WINDOW, count: 1 }]), None);
    }

    #[test]
    fn two_bytes_count_as_copies_do() {
        let one = Brief::NONE.more(HBM).unwrap();
        let two = one.more(HBM).unwrap();
        assert_eq!((one.all_in(Tier::Hbm, 0), two.all_in(Tier::Hbm, 0)), (Some(1), Some(2)));
        assert_eq!(
            (two.with(1), two.with(0), two.with(32), two.with(1 << 16)),
            (Some(one), Some(Brief::NONE), None, None)
        );
        assert!(one.serves(Tier::Hbm) && !one.serves(Tier::Host) && !Brief::NONE.serves(Tier::Hbm));
        for place in [HOST, WINDOW, Place { kind: SpecKind::Window, ..HBM }] {
            assert_eq!(one.more(place), None, "another place");
        }
        let full = one.with(31).unwrap();
        assert_eq!(
            (full.more(HBM), Brief::ELSEWHERE.more(HBM), Brief::NONE.more(Place { group: 32, ..HBM })),
            (None, None, None)
        );
        // Group 32 of device memory is not group 0 of the host's.
        let host = Brief::NONE.more(HOST).unwrap();
        assert_eq!(
            (host.all_in(Tier::Hbm, 32), host.all_in(Tier::Host, 0), host.all_in(Tier::Host, 1)),
            (None, Some(1), None)
        );
        assert_eq!((Brief::NONE.all_in(Tier::Hbm, 0), Brief::ELSEWHERE.all_in(Tier::Hbm, 0)), (None, None));
        let window = Brief::NONE.more(WINDOW).unwrap();
        assert_eq!((window.all_in(Tier::Hbm, 1), window.serves(Tier::Hbm)), (Some(1), false));
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
