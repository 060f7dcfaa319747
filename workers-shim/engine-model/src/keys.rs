//! Computes the engine's block hashes. They are opaque to everybody else, because the root differs per engine.

use xxhash_rust::xxh3::Xxh3;

use crate::CacheKeys;

/// Returns the hash of the block that holds `tokens` and follows `parent`.
pub(crate) fn block_key(root: u64, parent: Option<u64>, tokens: &[u32], keys: &CacheKeys) -> u64 {
    let mut hash = Xxh3::with_seed(root);
    hash.update(&parent.unwrap_or(root).to_le_bytes());
    for token in tokens {
        hash.update(&token.to_le_bytes());
    }
    if let (None, Some(salt)) = (parent, &keys.salt) {
        hash.update(b"salt");
        hash.update(salt.as_bytes());
    }
    if let Some(adapter) = &keys.adapter {
        hash.update(b"adapter");
        hash.update(adapter.as_bytes());
    }
    hash.digest()
}
