//! Reference sets. Most hold one member, a few hold a hundred thousand.

use imbl::OrdSet;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use vocabulary::{ArtifactId, SessionId};
use xxhash_rust::xxh3::xxh3_128;

/// Members kept in place before the set becomes a tree.
const MAX_INLINE: usize = 8;

/// What a set may hold: ids.
pub trait RefId: Ord + Copy {
    /// The id as a number.
    fn as_u128(self) -> u128;
}

impl RefId for SessionId {
    fn as_u128(self) -> u128 {
        self.0
    }
}

impl RefId for ArtifactId {
    fn as_u128(self) -> u128 {
        self.0
    }
}

pub(crate) fn digest<T: RefId>(member: T) -> u128 {
    xxh3_128(&member.as_u128().to_le_bytes())
}

fn sum<T: RefId>(members: &[T]) -> u128 {
    members.iter().fold(0, |sum, member| sum.wrapping_add(digest(*member)))
}

/// An ordered set that costs nothing while it is small and clones in O(1) when it is large.
///
/// Equal contents are equal sets, however they came about.
#[derive(Clone, Debug)]
pub struct RefSet<T: RefId>(RefStorage<T>);

#[derive(Clone, Debug)]
enum RefStorage<T: RefId> {
    Inline(Vec<T>),
    /// With the sum of its members' digests.
    Tree(OrdSet<T>, u128),
}

impl<T: RefId> Default for RefSet<T> {
    fn default() -> Self {
        Self(RefStorage::Inline(Vec::new()))
    }
}

impl<T: RefId> RefSet<T> {
    /// How many.
    pub fn len(&self) -> usize {
        match &self.0 {
            RefStorage::Inline(few) => few.len(),
            RefStorage::Tree(many, _) => many.len(),
        }
    }

    /// The sum of its members' digests, for a digest of what holds it; never walks a large set.
    pub(crate) fn digest(&self) -> u128 {
        match &self.0 {
            RefStorage::Inline(few) => sum(few),
            RefStorage::Tree(_, sum) => *sum,
        }
    }

    /// Whether it is a tree.
    pub(crate) fn is_tree(&self) -> bool {
        matches!(self.0, RefStorage::Tree(..))
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether `member` is in it.
    pub fn contains(&self, member: T) -> bool {
        match &self.0 {
            RefStorage::Inline(few) => few.binary_search(&member).is_ok(),
            RefStorage::Tree(many, _) => many.contains(&member),
        }
    }

    /// The only member, if there is exactly one.
    pub fn single(&self) -> Option<T> {
        if self.len() == 1 { self.iter().next() } else { None }
    }

    /// All members in order.
    pub fn iter(&self) -> impl Iterator<Item = T> + '_ {
        let (few, many) = match &self.0 {
            RefStorage::Inline(few) => (Some(few.iter()), None),
            RefStorage::Tree(many, _) => (None, Some(many.iter())),
        };
        few.into_iter().flatten().chain(many.into_iter().flatten()).copied()
    }

    /// Adds a member; false when it was there.
    pub(crate) fn insert(&mut self, member: T) -> bool {
        if let RefStorage::Inline(few) = &mut self.0 {
            let Err(place) = few.binary_search(&member) else { return false };
            if few.len() < MAX_INLINE {
                few.insert(place, member);
                return true;
            }
            self.0 = RefStorage::Tree(few.iter().copied().collect(), sum(few));
        }
        match &mut self.0 {
            RefStorage::Tree(many, sum) => {
                let is_new = many.insert(member).is_none();
                *sum = sum.wrapping_add(if is_new { digest(member) } else { 0 });
                is_new
            }
            RefStorage::Inline(_) => false,
        }
    }

    /// Removes a member; false when it was not there.
    pub(crate) fn remove(&mut self, member: T) -> bool {
        match &mut self.0 {
            RefStorage::Inline(few) => few.binary_search(&member).map(|place| few.remove(place)).is_ok(),
            RefStorage::Tree(many, sum) => {
                let was_there = many.remove(&member).is_some();
                *sum = sum.wrapping_sub(if was_there { digest(member) } else { 0 });
                was_there
            }
        }
    }
}

impl<T: RefId> PartialEq for RefSet<T> {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().eq(other.iter())
    }
}

impl<T: RefId> Eq for RefSet<T> {}

impl<T: RefId> FromIterator<T> for RefSet<T> {
    fn from_iter<I: IntoIterator<Item = T>>(members: I) -> Self {
        let mut refs = Self::default();
        for member in members {
            refs.insert(member);
        }
        refs
    }
}

impl<T: RefId + Serialize> Serialize for RefSet<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let members: Vec<T> = self.iter().collect();
        members.serialize(serializer)
    }
}

impl<'de, T: RefId + Deserialize<'de>> Deserialize<'de> for RefSet<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Vec::<T>::deserialize(deserializer)?.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl RefId for u32 {
        fn as_u128(self) -> u128 {
            self.into()
        }
    }

    #[test]
    fn a_ref_set_behaves_as_a_set_at_every_size() {
        let mut refs = RefSet::default();
        for round in 0..2 {
            for n in (0..40u32).rev() {
                assert_eq!(refs.insert(n), round == 0);
            }
        }
        assert_eq!(refs.len(), 40);
        assert!(refs.iter().eq(0..40));
        assert!(refs.contains(39) && !refs.contains(40));
        for n in 0..39 {
            assert!(refs.remove(n));
            assert!(!refs.remove(n));
        }
        assert_eq!(refs.single(), Some(39));
    }

    #[test]
    fn equal_sets_compare_equal_whatever_their_history() {
        let mut large: RefSet<u32> = (0..40).collect();
        for n in 3..40 {
            large.remove(n);
        }
        let small: RefSet<u32> = (0..3).collect();
        assert_eq!(large, small);
        assert!(large.is_tree() && !small.is_tree());
        assert_eq!(large.digest(), small.digest(), "however they came about");
        large.insert(2);
        assert_eq!(large.digest(), small.digest(), "it was there");
        large.insert(3);
        assert_ne!(large.digest(), small.digest());
        large.remove(3);
        large.remove(9);
        assert_ne!(large, (0..4).collect());
    }
}
