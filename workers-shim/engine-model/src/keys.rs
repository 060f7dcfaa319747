//! The engine's own names of blocks. Nobody else may read meaning into them: the root differs per engine.

use xxhash_rust::xxh3::Xxh3;

use crate::CacheKeys;

/// The name of the block that holds `tokens` and follows `parent`.
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
