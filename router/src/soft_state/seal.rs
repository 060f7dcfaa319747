//! Values as they lie in Redis: a version and a digest before them. What does not fit its digest or its key is not read.

use bytes::Bytes;
use xxhash_rust::xxh3::Xxh3;

const VERSION: u8 = 1;
/// Bytes before the value.
pub(super) const OVERHEAD: usize = 17;

/// `value` as it is written under `key`.
pub(super) fn seal(key: &str, value: &[u8]) -> Vec<u8> {
    let mut sealed = Vec::with_capacity(OVERHEAD + value.len());
    sealed.push(VERSION);
    sealed.extend_from_slice(&digest(key, value));
    sealed.extend_from_slice(value);
    sealed
}

/// What was sealed under this `key`; none for anything else.
pub(super) fn open(key: &str, sealed: Bytes) -> Option<Bytes> {
    if sealed.len() < OVERHEAD || sealed[0] != VERSION || sealed[1..OVERHEAD] != digest(key, &sealed[OVERHEAD..]) {
        return None;
    }
    Some(sealed.slice(OVERHEAD..))
}

/// xxh3-128 over the key, its length and the value: a value that was put under another key is as bad as a torn one.
fn digest(key: &str, value: &[u8]) -> [u8; 16] {
    let mut hash = Xxh3::new();
    hash.update(&(key.len() as u64).to_le_bytes());
    hash.update(key.as_bytes());
    hash.update(value);
    hash.digest128().to_le_bytes()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_was_sealed_opens_under_its_key_only(
            key in "[a-z:]{0,12}", other in "[a-z:]{0,12}", value in prop::collection::vec(any::<u8>(), 0..80),
        ) {
            let sealed = Bytes::from(seal(&key, &value));
            prop_assert_eq!(open(&key, sealed.clone()), Some(Bytes::from(value)));
            prop_assert_eq!(open(&other, sealed).is_some(), key == other);
        }

        #[test]
        fn what_was_cut_or_changed_does_not_open(
            value in prop::collection::vec(any::<u8>(), 0..80), at in any::<prop::sample::Index>(), change in 1u8..,
        ) {
            let sealed = seal("k", &value);
            let at = at.index(sealed.len());
            prop_assert_eq!(open("k", Bytes::from(sealed[..at].to_vec())), None);
            let mut changed = sealed;
            changed[at] ^= change;
            prop_assert_eq!(open("k", Bytes::from(changed)), None);
        }

        #[test]
        fn nothing_opens_by_chance(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            prop_assert_eq!(open("k", Bytes::from(bytes)), None);
        }
    }
}
