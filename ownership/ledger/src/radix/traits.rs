//! The map as a value: compared, printed, collected, written and read by its entries alone.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{Digits, Radix};

impl<K: Digits, V: Clone + PartialEq, const MAX: usize> PartialEq for Radix<K, V, MAX> {
    fn eq(&self, other: &Self) -> bool {
        self.len == other.len && self.iter().eq(other.iter())
    }
}

impl<K: Digits, V: Clone + Eq, const MAX: usize> Eq for Radix<K, V, MAX> {}

impl<K: Digits + fmt::Debug, V: Clone + fmt::Debug, const MAX: usize> fmt::Debug for Radix<K, V, MAX> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

impl<K: Digits + Serialize, V: Clone + Serialize, const MAX: usize> Serialize for Radix<K, V, MAX> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.len))?;
        for (key, value) in self.iter() {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

impl<'de, K: Digits + Deserialize<'de>, V: Clone + Deserialize<'de>, const MAX: usize> Deserialize<'de>
    for Radix<K, V, MAX>
{
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<K, V, const MAX: usize>(PhantomData<(K, V)>);
        impl<'de, K: Digits + Deserialize<'de>, V: Clone + Deserialize<'de>, const MAX: usize> Visitor<'de>
            for Entries<K, V, MAX>
        {
            type Value = Radix<K, V, MAX>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut radix = Radix::default();
                while let Some((key, value)) = map.next_entry()? {
                    radix.insert(key, value);
                }
                Ok(radix)
            }
        }
        deserializer.deserialize_map(Entries(PhantomData))
    }
}

impl<K: Digits, V: Clone, const MAX: usize> FromIterator<(K, V)> for Radix<K, V, MAX> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        let mut radix = Self::default();
        for (key, value) in entries {
            radix.insert(key, value);
        }
        radix
    }
}
