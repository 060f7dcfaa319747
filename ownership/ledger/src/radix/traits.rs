//! Equality, formatting and collecting of the map, which depend on its entries only.

use std::fmt;

use super::{RadixKey, RadixMap};

impl<K: RadixKey, V: Clone + PartialEq, const MAX: usize> PartialEq for RadixMap<K, V, MAX> {
    fn eq(&self, other: &Self) -> bool {
        self.len == other.len && self.iter().eq(other.iter())
    }
}

impl<K: RadixKey, V: Clone + Eq, const MAX: usize> Eq for RadixMap<K, V, MAX> {}

impl<K: RadixKey + fmt::Debug, V: Clone + fmt::Debug, const MAX: usize> fmt::Debug for RadixMap<K, V, MAX> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

impl<K: RadixKey, V: Clone, const MAX: usize> FromIterator<(K, V)> for RadixMap<K, V, MAX> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        let mut radix = Self::default();
        for (key, value) in entries {
            radix.insert(key, value);
        }
        radix
    }
}
