//! Number of copies of one block in an engine process, by tier and group: engines store and remove copies, not blocks.

use vocabulary::Tier;

use crate::holder_sets::{plane, tier};
use crate::kv_event::KvCacheSpecKind;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct EngineCopyLocation {
    pub(crate) tier: Tier,
    pub(crate) group: u32,
    pub(crate) kind: KvCacheSpecKind,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct EngineCopyCount {
    pub(crate) location: EngineCopyLocation,
    pub(crate) count: u32,
}

/// The copies of nearly all blocks, in two bytes: a small count in one location.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PackedCopyCount(u16);

impl PackedCopyCount {
    pub(crate) const NONE: Self = Self(0);
    /// The copies do not fit and are stored elsewhere.
    pub(crate) const OVERFLOW: Self = Self(u16::MAX);
    /// Bits of the count; group, tier and kind start at the following bits.
    const COUNT_BITS: u32 = 5;
    const TIER_SHIFT: u32 = 10;
    const MAX_COUNT: u16 = (1 << Self::COUNT_BITS) - 1;
    const MAX_GROUP: u32 = (1 << (Self::TIER_SHIFT - Self::COUNT_BITS)) - 1;
    const WINDOW_FLAG: u16 = 1 << 12;

    fn single_location(EngineCopyCount { location, count }: EngineCopyCount) -> Option<Self> {
        let fits = location.group <= Self::MAX_GROUP && count <= u32::from(Self::MAX_COUNT);
        let kind = if location.kind == KvCacheSpecKind::Window { Self::WINDOW_FLAG } else { 0 };
        fits.then_some(Self(count as u16 | Self::pack_location(location.tier, location.group) | kind))
    }

    /// Packs a location without its kind. The group must fit.
    fn pack_location(tier: Tier, group: u32) -> u16 {
        (group as u16) << Self::COUNT_BITS | (plane(tier) as u16) << Self::TIER_SHIFT
    }

    /// Returns whether a copy in `tier` serves full attention; not for [`Self::OVERFLOW`].
    pub(crate) fn serves(self, tier: Tier) -> bool {
        self != Self::NONE && self.0 >> Self::TIER_SHIFT == plane(tier) as u16
    }

    /// Returns the copies with one more in `location`. None if they do not fit or are stored elsewhere.
    pub(crate) fn incremented(self, location: EngineCopyLocation) -> Option<Self> {
        let one = Self::single_location(EngineCopyCount { location, count: 1 })?;
        let same =
            self != Self::OVERFLOW && self.packed_location() == one.packed_location() && self.count() < Self::MAX_COUNT;
        if self == Self::NONE { Some(one) } else { same.then(|| Self(self.0 + 1)) }
    }

    /// Returns how many there are, if all of them are in `tier` and `group`.
    pub(crate) fn count_in(self, tier: Tier, group: u32) -> Option<u32> {
        let is_at_location =
            group <= Self::MAX_GROUP && self.packed_location() & !Self::WINDOW_FLAG == Self::pack_location(tier, group);
        (is_at_location && self != Self::NONE && self != Self::OVERFLOW).then(|| u32::from(self.count()))
    }

    /// Returns this many copies in the same location; None if they do not fit.
    pub(crate) fn with_count(self, count: u32) -> Option<Self> {
        match u16::try_from(count) {
            Ok(0) => Some(Self::NONE),
            Ok(count @ 1..=Self::MAX_COUNT) => Some(Self(self.packed_location() | count)),
            _ => None,
        }
    }

    fn count(self) -> u16 {
        self.0 & Self::MAX_COUNT
    }

    /// Returns the packed group, tier and kind.
    fn packed_location(self) -> u16 {
        self.0 & !Self::MAX_COUNT
    }

    /// Packs copies; None if they do not fit.
    pub(crate) fn of(copies: &BlockCopies) -> Option<Self> {
        match copies.first {
            None => Some(Self::NONE),
            Some(counted) if copies.others.is_empty() => Self::single_location(counted),
            Some(_) => None,
        }
    }

    /// Unpacks the copies; none if they are stored elsewhere.
    pub(crate) fn unpack(self) -> BlockCopies {
        if self == Self::NONE || self == Self::OVERFLOW {
            return BlockCopies::default();
        }
        let kind = if self.0 & Self::WINDOW_FLAG == 0 { KvCacheSpecKind::Full } else { KvCacheSpecKind::Window };
        let group = u32::from(self.0 >> Self::COUNT_BITS) & Self::MAX_GROUP;
        let location = EngineCopyLocation { tier: tier(usize::from(self.0 >> Self::TIER_SHIFT & 3)), group, kind };
        BlockCopies { first: Some(EngineCopyCount { location, count: u32::from(self.count()) }), others: Vec::new() }
    }
}

/// The copies of one block. The first location is inline, because nearly all blocks have only one.
#[derive(Clone, Default, Debug)]
pub(crate) struct BlockCopies {
    first: Option<EngineCopyCount>,
    others: Vec<EngineCopyCount>,
}

impl BlockCopies {
    fn locations(&mut self) -> impl Iterator<Item = &mut EngineCopyCount> {
        self.first.iter_mut().chain(self.others.iter_mut())
    }

    /// Iterates over the counts of all locations, in the order in which these were first used.
    pub(crate) fn counts(&self) -> impl Iterator<Item = &EngineCopyCount> {
        self.first.iter().chain(&self.others)
    }

    /// Sets the count of a new location; returns false if it has copies already, or the count is 0.
    pub(crate) fn insert_location(&mut self, counted: EngineCopyCount) -> bool {
        let at = |counted: &EngineCopyCount| (counted.location.tier, counted.location.group);
        if counted.count == 0 || self.counts().any(|other| at(other) == at(&counted)) {
            return false;
        }
        match self.first {
            None => self.first = Some(counted),
            Some(_) => self.others.push(counted),
        }
        true
    }

    /// Adds one copy.
    pub(crate) fn add_copy(&mut self, location: EngineCopyLocation) {
        let same = |counted: &&mut EngineCopyCount| {
            (counted.location.tier, counted.location.group) == (location.tier, location.group)
        };
        if let Some(counted) = self.locations().find(same) {
            counted.count = counted.count.saturating_add(1);
        } else if self.first.is_none() {
            self.first = Some(EngineCopyCount { location, count: 1 });
        } else {
            self.others.push(EngineCopyCount { location, count: 1 });
        }
    }

    /// Changes the number of copies in `tier` and `group`; returns false if there are none.
    pub(crate) fn change_copies(&mut self, tier: Tier, group: u32, remaining: impl FnOnce(u32) -> u32) -> bool {
        let found = self.locations().find(|counted| (counted.location.tier, counted.location.group) == (tier, group));
        let Some(counted) = found else { return false };
        counted.count = remaining(counted.count);
        if counted.count == 0 {
            self.others.retain(|counted| counted.count > 0);
            if self.first.is_some_and(|counted| counted.count == 0) {
                self.first = self.others.pop();
            }
        }
        true
    }

    /// Returns whether a copy in `tier` serves full attention, so that it counts for prefixes.
    pub(crate) fn serves(&self, tier: Tier) -> bool {
        let counts =
            |counted: &EngineCopyCount| counted.location.tier == tier && counted.location.kind == KvCacheSpecKind::Full;
        self.first.iter().chain(&self.others).any(counts)
    }

    /// Returns whether there are no copies.
    pub(crate) fn is_empty(&self) -> bool {
        self.first.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HBM: EngineCopyLocation = EngineCopyLocation { tier: Tier::Hbm, group: 0, kind: KvCacheSpecKind::Full };
    const HOST: EngineCopyLocation = EngineCopyLocation { tier: Tier::Host, group: 0, kind: KvCacheSpecKind::Full };
    const WINDOW: EngineCopyLocation = EngineCopyLocation { tier: Tier::Hbm, group: 1, kind: KvCacheSpecKind::Window };

    fn remove(copies: &mut BlockCopies, location: EngineCopyLocation) -> bool {
        copies.change_copies(location.tier, location.group, |count| count - 1)
    }

    #[test]
    fn two_copies_need_two_removals() {
        let mut copies = BlockCopies::default();
        copies.add_copy(HBM);
        copies.add_copy(HBM);
        assert!(remove(&mut copies, HBM) && copies.serves(Tier::Hbm));
        assert!(remove(&mut copies, HBM) && copies.is_empty());
        assert!(!remove(&mut copies, HBM), "nothing is left to remove");
    }

    #[test]
    fn copy_locations_are_counted_separately() {
        let mut copies = BlockCopies::default();
        for location in [HBM, HOST, WINDOW] {
            copies.add_copy(location);
        }
        assert!(remove(&mut copies, HBM));
        assert!(!copies.serves(Tier::Hbm), "a window is no prefix");
        assert!(copies.serves(Tier::Host) && !copies.is_empty());
        assert!(remove(&mut copies, WINDOW) && remove(&mut copies, HOST) && copies.is_empty());
    }

    #[test]
    fn packed_copies_hold_what_fits_and_refuse_the_rest() {
        for tier in [Tier::Hbm, Tier::Host, Tier::Disk] {
            for (group, kind, count) in [(0, KvCacheSpecKind::Full, 1), (31, KvCacheSpecKind::Window, 31)] {
                let counted = EngineCopyCount { location: EngineCopyLocation { tier, group, kind }, count };
                let mut copies = BlockCopies::default();
                copies.insert_location(counted);
                let brief = PackedCopyCount::of(&copies).unwrap();
                assert!(brief != PackedCopyCount::NONE && brief != PackedCopyCount::OVERFLOW);
                let [back] = brief.unpack().counts().copied().collect::<Vec<_>>()[..] else { panic!("one place") };
                assert_eq!((back.location, back.count), (counted.location, counted.count));
                for tier in [Tier::Hbm, Tier::Host, Tier::Disk] {
                    assert_eq!(PackedCopyCount::of(&copies).unwrap().serves(tier), copies.serves(tier));
                }
            }
        }
        assert_eq!(PackedCopyCount::of(&BlockCopies::default()), Some(PackedCopyCount::NONE));
        let of = |all: &[EngineCopyCount]| {
            let mut copies = BlockCopies::default();
            all.iter().for_each(|counted| assert!(copies.insert_location(*counted)));
            PackedCopyCount::of(&copies)
        };
        assert_eq!(of(&[EngineCopyCount { location: HBM, count: 32 }]), None);
        assert_eq!(of(&[EngineCopyCount { location: EngineCopyLocation { group: 32, ..HBM }, count: 1 }]), None);
        assert_eq!(
            of(&[EngineCopyCount { location: HBM, count: 1 }, EngineCopyCount { location: WINDOW, count: 1 }]),
            None
        );
    }

    #[test]
    fn packed_copies_count_like_block_copies() {
        let one = PackedCopyCount::NONE.incremented(HBM).unwrap();
        let two = one.incremented(HBM).unwrap();
        assert_eq!((one.count_in(Tier::Hbm, 0), two.count_in(Tier::Hbm, 0)), (Some(1), Some(2)));
        assert_eq!(
            (two.with_count(1), two.with_count(0), two.with_count(32), two.with_count(1 << 16)),
            (Some(one), Some(PackedCopyCount::NONE), None, None)
        );
        assert!(one.serves(Tier::Hbm) && !one.serves(Tier::Host) && !PackedCopyCount::NONE.serves(Tier::Hbm));
        for location in [HOST, WINDOW, EngineCopyLocation { kind: KvCacheSpecKind::Window, ..HBM }] {
            assert_eq!(one.incremented(location), None, "another place");
        }
        let full = one.with_count(31).unwrap();
        assert_eq!(
            (
                full.incremented(HBM),
                PackedCopyCount::OVERFLOW.incremented(HBM),
                PackedCopyCount::NONE.incremented(EngineCopyLocation { group: 32, ..HBM })
            ),
            (None, None, None)
        );
        // Group 32 in device memory must not be confused with group 0 in host memory.
        let host = PackedCopyCount::NONE.incremented(HOST).unwrap();
        assert_eq!(
            (host.count_in(Tier::Hbm, 32), host.count_in(Tier::Host, 0), host.count_in(Tier::Host, 1)),
            (None, Some(1), None)
        );
        assert_eq!(
            (PackedCopyCount::NONE.count_in(Tier::Hbm, 0), PackedCopyCount::OVERFLOW.count_in(Tier::Hbm, 0)),
            (None, None)
        );
        let window = PackedCopyCount::NONE.incremented(WINDOW).unwrap();
        assert_eq!((window.count_in(Tier::Hbm, 1), window.serves(Tier::Hbm)), (Some(1), false));
    }

    #[test]
    fn adopted_count_continues_and_a_location_is_adopted_once() {
        let mut copies = BlockCopies::default();
        assert!(!copies.insert_location(EngineCopyCount { location: HBM, count: 0 }), "no copies are none");
        assert!(
            copies.insert_location(EngineCopyCount { location: HBM, count: 2 })
                && copies.insert_location(EngineCopyCount { location: WINDOW, count: 1 })
        );
        assert!(!copies.insert_location(EngineCopyCount { location: HBM, count: 1 }));
        copies.add_copy(HBM);
        assert_eq!(copies.counts().map(|counted| counted.count).collect::<Vec<_>>(), [3, 1]);
        assert!(remove(&mut copies, HBM) && remove(&mut copies, HBM) && copies.serves(Tier::Hbm));
        assert!(remove(&mut copies, HBM) && !copies.serves(Tier::Hbm) && !copies.is_empty());
    }
}
