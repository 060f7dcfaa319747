//! Fast hashing of keys that are already hashes: one multiplication instead of SipHash. Not for keys that clients
//! choose.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map with evenly distributed keys.
pub(crate) type FoldHashMap<K, V> = HashMap<K, V, BuildHasherDefault<FoldHasher>>;

/// Multiplies and folds, so that counters used as keys are spread as well.
#[derive(Default)]
pub(crate) struct FoldHasher(u64);

impl Hasher for FoldHasher {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0u8; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u64(&mut self, value: u64) {
        let mixed = (self.0 ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = mixed ^ (mixed >> 32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::hash::BuildHasher;

    #[test]
    fn fold_hash_spreads_counters_over_low_and_high_bits() {
        let hash = |n: u64| BuildHasherDefault::<FoldHasher>::default().hash_one(n);
        let low: HashSet<u64> = (0..256).map(|n| hash(n) & 0xff).collect();
        let high: HashSet<u64> = (0..256).map(|n| hash(n) >> 57).collect();
        assert!(low.len() > 120 && high.len() > 60, "{} {}", low.len(), high.len());
    }
}
