//! Reference sets. Most have one member, a few have a hundred thousand.

use imbl::OrdSet;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use vocabulary::{ArtifactId, SessionId};
use xxhash_rust::xxh3::xxh3_128;

/// Maximum number of members stored inline; larger sets become trees.
const MAX_INLINE: usize = 8;

/// Id that a set may contain.
pub trait RefSetMember: Ord + Copy {
    /// Returns the id as a number.
    fn as_u128(self) -> u128;
}

impl RefSetMember for SessionId {
    fn as_u128(self) -> u128 {
        self.0
    }
}

impl RefSetMember for ArtifactId {
    fn as_u128(self) -> u128 {
        self.0
    }
}

pub(crate) fn digest<T: RefSetMember>(member: T) -> u128 {
    xxh3_128(&member.as_u128().to_le_bytes())
}

fn sum<T: RefSetMember>(members: &[T]) -> u128 {
    members.iter().fold(0, |sum, member| sum.wrapping_add(digest(*member)))
}

/// Ordered set that is compact while small and clones in O(1) when large.
///
/// Sets with equal contents are equal, whatever their history.
#[derive(Clone, Debug)]
pub struct RefSet<T: RefSetMember>(RefStorage<T>);

#[derive(Clone, Debug)]
enum RefStorage<T: RefSetMember> {
    Inline(Vec<T>),
    /// Members, and the sum of their digests.
    Tree(OrdSet<T>, u128),
}

impl<T: RefSetMember> Default for RefSet<T> {
    fn default() -> Self {
        Self(RefStorage::Inline(Vec::new()))
    }
}

impl<T: RefSetMember> RefSet<T> {
    /// Returns the number of members.
    pub fn len(&self) -> usize {
        match &self.0 {
            RefStorage::Inline(few) => few.len(),
            RefStorage::Tree(many, _) => many.len(),
        }
    }

    /// Returns the sum of the members' digests, for the digest of the containing record; never walks a large set.
    pub(crate) fn digest(&self) -> u128 {
        match &self.0 {
            RefStorage::Inline(few) => sum(few),
            RefStorage::Tree(_, sum) => *sum,
        }
    }

    /// Returns whether the set is stored as a tree.
    pub(crate) fn is_tree(&self) -> bool {
        matches!(self.0, RefStorage::Tree(..))
    }

    /// Returns whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether the set contains `member`.
    pub fn contains(&self, member: T) -> bool {
        match &self.0 {
            RefStorage::Inline(few) => few.binary_search(&member).is_ok(),
            RefStorage::Tree(many, _) => many.contains(&member),
        }
    }

    /// Returns the only member, if there is exactly one.
    pub fn single(&self) -> Option<T> {
        if self.len() == 1 { self.iter().next() } else { None }
    }

    /// Iterates over the members in order.
    pub fn iter(&self) -> impl Iterator<Item = T> + '_ {
        let (few, many) = match &self.0 {
            RefStorage::Inline(few) => (Some(few.iter()), None),
            RefStorage::Tree(many, _) => (None, Some(many.iter())),
        };
        few.into_iter().flatten().chain(many.into_iter().flatten()).copied()
    }

    /// Adds a member; returns false if it was already there.
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

    /// Removes a member; returns false if it was not there.
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

impl<T: RefSetMember> PartialEq for RefSet<T> {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().eq(other.iter())
    }
}

impl<T: RefSetMember> Eq for RefSet<T> {}

impl<T: RefSetMember> FromIterator<T> for RefSet<T> {
    fn from_iter<I: IntoIterator<Item = T>>(members: I) -> Self {
        let mut refs = Self::default();
        for member in members {
            refs.insert(member);
        }
        refs
    }
}

impl<T: RefSetMember + Serialize> Serialize for RefSet<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let members: Vec<T> = self.iter().collect();
        members.serialize(serializer)
    }
}

impl<'de, T: RefSetMember + Deserialize<'de>> Deserialize<'de> for RefSet<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Vec::<T>::deserialize(deserializer)?.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl RefSetMember for u32 {
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
