//! Reference sets. Most hold one member, a few hold a hundred thousand.

use imbl::OrdSet;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Members kept in place before the set becomes a tree.
const FEW: usize = 8;

/// An ordered set that costs nothing while it is small and clones in O(1) when it is large.
///
/// Equal contents are equal sets, however they came about.
#[derive(Clone, Debug)]
pub struct Refs<T: Ord>(Kind<T>);

#[derive(Clone, Debug)]
enum Kind<T: Ord> {
    Few(Vec<T>),
    Many(OrdSet<T>),
}

impl<T: Ord> Default for Refs<T> {
    fn default() -> Self {
        Self(Kind::Few(Vec::new()))
    }
}

impl<T: Ord + Copy> Refs<T> {
    /// How many.
    pub fn len(&self) -> usize {
        match &self.0 {
            Kind::Few(few) => few.len(),
            Kind::Many(many) => many.len(),
        }
    }

    /// Whether it is a tree.
    pub(crate) fn is_many(&self) -> bool {
        matches!(self.0, Kind::Many(_))
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether `member` is in it.
    pub fn contains(&self, member: T) -> bool {
        match &self.0 {
            Kind::Few(few) => few.binary_search(&member).is_ok(),
            Kind::Many(many) => many.contains(&member),
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
            Kind::Many(many) => (None, Some(many.iter())),
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
            self.0 = Kind::Many(few.iter().copied().collect());
        }
        match &mut self.0 {
            Kind::Many(many) => many.insert(member).is_none(),
            Kind::Few(_) => false,
        }
    }

    /// Removes a member; false when it was not there.
    pub(crate) fn remove(&mut self, member: T) -> bool {
        match &mut self.0 {
            Kind::Few(few) => few.binary_search(&member).map(|place| few.remove(place)).is_ok(),
            Kind::Many(many) => many.remove(&member).is_some(),
        }
    }
}

impl<T: Ord + Copy> PartialEq for Refs<T> {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().eq(other.iter())
    }
}

impl<T: Ord + Copy> Eq for Refs<T> {}

impl<T: Ord + Copy> FromIterator<T> for Refs<T> {
    fn from_iter<I: IntoIterator<Item = T>>(members: I) -> Self {
        let mut refs = Self::default();
        for member in members {
            refs.insert(member);
        }
        refs
    }
}

impl<T: Ord + Copy + Serialize> Serialize for Refs<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let members: Vec<T> = self.iter().collect();
        members.serialize(serializer)
    }
}

impl<'de, T: Ord + Copy + Deserialize<'de>> Deserialize<'de> for Refs<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Vec::<T>::deserialize(deserializer)?.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(large, (0..3).collect());
        assert_ne!(large, (0..4).collect());
    }
}
