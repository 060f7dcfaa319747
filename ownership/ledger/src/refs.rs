//! Reference sets. Most hold one member, a few hold a hundred thousand.

use imbl::OrdSet;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use vocabulary::{ArtifactId, SessionId};
use xxhash_rust::xxh3::xxh3_128;

/// Members kept in place before the set becomes a tree.
const FEW: usize = 8;

/// What a set may hold: ids.
pub trait Member: Ord + Copy {
    /// The id as a number.
    fn number(self) -> u128;
}

impl Member for SessionId {
    fn number(self) -> u128 {
        self.0
    }
}

impl Member for ArtifactId {
    fn number(self) -> u128 {
        self.0
    }
}

pub(crate) fn digest<T: Member>(member: T) -> u128 {
    xxh3_128(&member.number().to_le_bytes())
}

fn sum<T: Member>(members: &[T]) -> u128 {
    members.iter().fold(0, |sum, member| sum.wrapping_add(digest(*member)))
}

/// An ordered set that costs nothing while it is small and clones in O(1) when it is large.
///
/// Equal contents are equal sets, however they came about.
#[derive(Clone, Debug)]
pub struct Refs<T: Member>(Kind<T>);

#[derive(Clone, Debug)]
enum Kind<T: Member> {
    Few(Vec<T>),
    /// With the sum of its members' digests.
    Many(OrdSet<T>, u128),
}

impl<T: Member> Default for Refs<T> {
    fn default() -> Self {
        Self(Kind::Few(Vec::new()))
    }
}

impl<T: Member> Refs<T> {
    /// How many.
    pub fn len(&self) -> usize {
        match &self.0 {
            Kind::Few(few) => few.len(),
            Kind::Many(many, _) => many.len(),
        }
    }

    /// The sum of its members' digests, for a digest of what holds it; never walks a large set.
    pub(crate) fn digest(&self) -> u128 {
        match &self.0 {
            Kind::Few(few) => sum(few),
            Kind::Many(_, sum) => *sum,
        }
    }

    /// Whether it is a tree.
    pub(crate) fn is_many(&self) -> bool {
        matches!(self.0, Kind::Many(..))
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether `member` is in it.
    pub fn contains(&self, member: T) -> bool {
        match &self.0 {
            Kind::Few(few) => few.binary_search(&member).is_ok(),
            Kind::Many(many, _) => many.contains(&member),
        }
    }

    /// The only member, if there is exactly one.
    pub fn single(&self) -> Option<T> {
        if self.len() == 1 { self.iter().next() } else { None }
    }

    /// All members in order.
    pub fn iter(&self) -> impl Iterator<Item = T> + '_ {
        let (few, many) = match &self.0 {
            Kind::Few(few) => (Some(few.iter()), None),
            Kind::Many(many, _) => (None, Some(many.iter())),
        };
        few.into_iter().flatten().chain(many.into_iter().flatten()).copied()
    }

    /// Adds a member; false when it was there.
    pub(crate) fn insert(&mut self, member: T) -> bool {
        if let Kind::Few(few) = &mut self.0 {
            let Err(place) = few.binary_search(&member) else { return false };
            if few.len() < FEW {
                few.insert(place, member);
                return true;
            }
            self.0 = Kind::Many(few.iter().copied().collect(), sum(few));
        }
        match &mut self.0 {
            Kind::Many(many, sum) => {
                let is_new = many.insert(member).is_none();
                *sum = sum.wrapping_add(if is_new { digest(member) } else { 0 });
                is_new
            }
            Kind::Few(_) => false,
        }
    }

    /// Removes a member; false when it was not there.
    pub(crate) fn remove(&mut self, member: T) -> bool {
        match &mut self.0 {
            Kind::Few(few) => few.binary_search(&member).map(|place| few.remove(place)).is_ok(),
            Kind::Many(many, sum) => {
                let was_there = many.remove(&member).is_some();
                *sum = sum.wrapping_sub(if was_there { digest(member) } else { 0 });
                was_there
            }
        }
    }
}

impl<T: Member> PartialEq for Refs<T> {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().eq(other.iter())
    }
}

impl<T: Member> Eq for Refs<T> {}

impl<T: Member> FromIterator<T> for Refs<T> {
    fn from_iter<I: IntoIterator<Item = T>>(members: I) -> Self {
        let mut refs = Self::default();
        for member in members {
            refs.insert(member);
        }
        refs
    }
}

impl<T: Member + Serialize> Serialize for Refs<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let members: Vec<T> = self.iter().collect();
        members.serialize(serializer)
    }
}

impl<'de, T: Member + Deserialize<'de>> Deserialize<'de> for Refs<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Vec::<T>::deserialize(deserializer)?.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Member for u32 {
        fn number(self) -> u128 {
            self.into()
        }
    }

    #[test]
    fn it_is_a_set_at_every_size() {
        let mut refs = Refs::default();
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
    fn sets_that_grew_and_shrank_equal_those_that_did_not() {
        let mut large: Refs<u32> = (0..40).collect();
        for n in 3..40 {
            large.remove(n);
        }
        let small: Refs<u32> = (0..3).collect();
        assert_eq!(large, small);
        assert!(large.is_many() && !small.is_many());
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
