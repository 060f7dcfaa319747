//! Rolling block hashes. A prefix is identified by the hash of all blocks up to its end.

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{Xxh3, xxh3_128_with_seed};

use crate::hex::hex_id;
use crate::{Blocks, Tokens};

/// Hash seed of the cluster. All routers of a cluster must use the same one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug, Default)]
#[serde(transparent)]
pub struct HashSeed(pub u64);

/// Identifies a prefix that ends at a block boundary: 128-bit xxh3 over the parent prefix and the block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PrefixId(pub u128);
hex_id!(PrefixId, u128, "p-");

/// The low 64 bits of a `PrefixId`, the key inside the residency index.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub u64);
hex_id!(BlockHash, u64, "b-");

impl PrefixId {
    /// Returns the short form that the residency index uses.
    pub fn block_hash(self) -> BlockHash {
        BlockHash(self.0 as u64)
    }

    /// Returns the prefix that is one block longer: xxh3-128 over this id (16 bytes, little endian) and the tokens (4
    /// bytes each).
    pub fn extend(self, seed: HashSeed, block: &[u32]) -> PrefixId {
        match block.len() {
            0..=16 => self.extend_in::<{ 16 + 4 * 16 }>(seed, block),
            17..=64 => self.extend_in::<{ 16 + 4 * 64 }>(seed, block),
            _ => {
                let mut hash = Xxh3::with_seed(seed.0);
                hash.update(&self.0.to_le_bytes());
                for token in block {
                    hash.update(&token.to_le_bytes());
                }
                PrefixId(hash.digest128())
            }
        }
    }

    /// Implements [`Self::extend`] in a buffer of `N` bytes. `N` must be large enough for the id and the block.
    fn extend_in<const N: usize>(self, seed: HashSeed, block: &[u32]) -> PrefixId {
        let mut buffer = [0u8; N];
        buffer[..16].copy_from_slice(&self.0.to_le_bytes());
        for (slot, token) in buffer[16..].chunks_exact_mut(4).zip(block) {
            slot.copy_from_slice(&token.to_le_bytes());
        }
        PrefixId(xxh3_128_with_seed(&buffer[..16 + 4 * block.len()], seed.0))
    }

    /// Returns the prefix that is one block of bytes longer, for chains without a tokenizer.
    pub fn extend_bytes(self, seed: HashSeed, block: &[u8]) -> PrefixId {
        match block.len() {
            0..=64 => self.extend_bytes_in::<{ 16 + 64 }>(seed, block),
            65..=256 => self.extend_bytes_in::<{ 16 + 256 }>(seed, block),
            _ => {
                let mut hash = Xxh3::with_seed(seed.0);
                hash.update(&self.0.to_le_bytes());
                hash.update(block);
                PrefixId(hash.digest128())
            }
        }
    }

    /// Implements [`Self::extend_bytes`] in a buffer of `N` bytes, which costs less than the state of a stream. `N`
    /// must be large enough for the id and the block.
    fn extend_bytes_in<const N: usize>(self, seed: HashSeed, block: &[u8]) -> PrefixId {
        let (mut buffer, length) = ([0u8; N], 16 + block.len());
        buffer[..16].copy_from_slice(&self.0.to_le_bytes());
        buffer[16..length].copy_from_slice(block);
        PrefixId(xxh3_128_with_seed(&buffer[..length], seed.0))
    }
}

/// Hashes of a prompt's full blocks, first block first. Tokens after the last full block are the tail.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PrefixChain {
    /// Hash of the namespace; identifies the empty prefix.
    pub root: PrefixId,
    /// Tokens per block.
    pub block: Tokens,
    /// One prefix id per full block.
    pub ids: Vec<PrefixId>,
    /// Length of the prompt in tokens, including the tail.
    pub tokens: Tokens,
}

impl PrefixChain {
    /// Bytes counted as one token where there is no tokenizer.
    pub const BYTES_PER_TOKEN: u64 = 4;

    /// Hashes `tokens` in blocks of `block` tokens. `block` must not be zero.
    pub fn over_tokens(root: PrefixId, seed: HashSeed, block: Tokens, tokens: &[u32]) -> Self {
        let mut chain =
            Self { root, block, ids: Vec::with_capacity(tokens.len() / block.0 as usize), tokens: Tokens(0) };
        chain.ids.extend(tokens.chunks_exact(block.0 as usize).scan(root, |parent, block| {
            *parent = parent.extend(seed, block);
            Some(*parent)
        }));
        chain.tokens = Tokens(tokens.len() as u64);
        chain
    }

    /// Hashes canonical bytes in blocks of `block` tokens, counting `BYTES_PER_TOKEN` bytes as one token. `block` must
    /// not be zero.
    pub fn over_bytes(root: PrefixId, seed: HashSeed, block: Tokens, bytes: &[u8]) -> Self {
        Self::over_more_bytes((root, &[]), seed, block, bytes)
    }

    /// Hashes canonical bytes like [`Self::over_bytes`], of which `ids` are the ids of the first blocks and `bytes` what
    /// follows them.
    pub fn over_more_bytes((root, ids): (PrefixId, &[PrefixId]), seed: HashSeed, block: Tokens, bytes: &[u8]) -> Self {
        let size = (block.0 * Self::BYTES_PER_TOKEN) as usize;
        let length = (ids.len() * size + bytes.len()) as u64;
        let mut chain = Self {
            root,
            block,
            ids: Vec::with_capacity(length as usize / size),
            tokens: Tokens(length / Self::BYTES_PER_TOKEN),
        };
        chain.ids.extend_from_slice(ids);
        chain.ids.extend(bytes.chunks_exact(size).scan(chain.head(), |parent, block| {
            *parent = parent.extend_bytes(seed, block);
            Some(*parent)
        }));
        chain
    }

    /// Returns the number of full blocks.
    pub fn blocks(&self) -> Blocks {
        Blocks(self.ids.len() as u64)
    }

    /// Returns the prefix of the first `blocks` blocks: the root for zero, `None` beyond the end.
    pub fn prefix(&self, blocks: Blocks) -> Option<PrefixId> {
        match blocks.0 {
            0 => Some(self.root),
            n => self.ids.get(n as usize - 1).copied(),
        }
    }

    /// Returns the longest prefix: the root if there is no full block.
    pub fn head(&self) -> PrefixId {
        self.ids.last().copied().unwrap_or(self.root)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: PrefixId = PrefixId(7);

    fn chain(block: u64, tokens: &[u32]) -> PrefixChain {
        PrefixChain::over_tokens(ROOT, HashSeed(3), Tokens(block), tokens)
    }

    #[test]
    fn equal_prefixes_have_equal_ids_regardless_of_later_tokens() {
        let tokens: Vec<u32> = (0..100).collect();
        let (short, long) = (chain(16, &tokens[..50]), chain(16, &tokens));
        assert_eq!(short.ids, long.ids[..3]);
        assert_eq!((short.blocks(), short.tokens), (Blocks(3), Tokens(50)));
    }

    #[test]
    fn a_changed_token_changes_every_id_from_its_block_on() {
        let a: Vec<u32> = (0..64).collect();
        let mut b = a.clone();
        b[20] ^= 1;
        let (a, b) = (chain(16, &a), chain(16, &b));
        assert_eq!(a.ids[0], b.ids[0]);
        assert!(a.ids[1..].iter().zip(&b.ids[1..]).all(|(a, b)| a != b));
    }

    #[test]
    fn long_and_short_blocks_hash_the_same_byte_encoding() {
        // The two code paths of `extend` must agree with the documented formula.
        for n in [0usize, 1, 16, 17, 64, 65, 300] {
            let block: Vec<u32> = (0..n as u32).collect();
            let mut bytes = ROOT.0.to_le_bytes().to_vec();
            bytes.extend(block.iter().flat_map(|t| t.to_le_bytes()));
            assert_eq!(ROOT.extend(HashSeed(3), &block).0, xxh3_128_with_seed(&bytes, 3), "{n} tokens");
        }
        for n in [0usize, 1, 63, 64, 65, 256, 257, 1000] {
            let bytes = [&ROOT.0.to_le_bytes()[..], &vec![b'x'; n]].concat();
            assert_eq!(ROOT.extend_bytes(HashSeed(3), &bytes[16..]).0, xxh3_128_with_seed(&bytes, 3), "{n} bytes");
        }
    }

    #[test]
    fn prefix_counts_blocks_from_the_root() {
        let c = chain(16, &(0..40).collect::<Vec<_>>());
        assert_eq!(c.prefix(Blocks(0)), Some(ROOT));
        assert_eq!(c.prefix(Blocks(2)), Some(c.head()));
        assert_eq!(c.prefix(Blocks(3)), None);
    }
}
