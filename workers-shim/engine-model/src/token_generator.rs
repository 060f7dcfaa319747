//! Generates text. A fingerprint stands for the KV of all preceding tokens, and the next token is a hash of it. It must
//! depend on nothing else: not on the request's name, the worker, or the time.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::EngineBuildError;

/// Minimum length of an answer, counted from the last special token before it.
const MIN_TURN_TOKENS: u32 = 16;
/// After that, one token in this many ends the answer.
const EOS_ONE_IN: u64 = 48;

/// A fingerprint of the KV up to some token.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
pub struct KvFingerprint {
    hash: u64,
    /// Tokens since the last special one, from which the model knows how long its turn is.
    turn: u32,
}

impl KvFingerprint {
    /// The fingerprint of memory that was never written.
    pub const GARBAGE: Self = Self { hash: 0x6761_7262_6167_6521, turn: 0 };

    /// Returns the fingerprint before the first token, for the base model or an adapter.
    pub fn root(adapter: Option<&str>) -> Self {
        let hash = adapter.map_or(1, |name| xxhash_rust::xxh3::xxh3_64(name.as_bytes()));
        Self { hash, turn: 0 }
    }

    /// Returns the fingerprint after one more complete block, which ends in `block`.
    pub fn extend_block(self, block: Self) -> Self {
        Self { hash: mix(mix(self.hash, 0x0062_6c6f_636b), block.hash), turn: block.turn }
    }

    /// Returns the fingerprint of memory that was reused while it was being read.
    pub fn corrupted(self) -> Self {
        Self { hash: mix(self.hash, Self::GARBAGE.hash), turn: self.turn }
    }
}

/// The tokens that a model can generate, and those that end or structure a turn.
#[derive(Clone, Debug)]
pub struct TokenGenerator {
    words: Arc<[u32]>,
    eos: u32,
    special_tokens: Arc<[u32]>,
}

impl TokenGenerator {
    /// Creates a generator. Any sequence of `words` should encode back to the same tokens, or generated blocks cannot
    /// be reused.
    pub fn new(words: &[u32], eos: u32, specials: &[u32]) -> Result<Self, EngineBuildError> {
        let mut specials = specials.to_vec();
        specials.push(eos);
        specials.sort_unstable();
        specials.dedup();
        let words: Vec<u32> = words.iter().copied().filter(|w| specials.binary_search(w).is_err()).collect();
        if words.len() < 2 {
            return Err(EngineBuildError::NoWords);
        }
        Ok(Self { words: words.into(), eos, special_tokens: specials.into() })
    }

    /// Returns the token that ends an answer.
    pub fn eos(&self) -> u32 {
        self.eos
    }

    /// Returns the fingerprint after one more token.
    pub fn extend(&self, before: KvFingerprint, token: u32) -> KvFingerprint {
        let special = self.special_tokens.binary_search(&token).is_ok();
        KvFingerprint {
            hash: mix(before.hash, u64::from(token) + 1),
            turn: if special { 0 } else { before.turn.saturating_add(1) },
        }
    }

    /// Returns the next token. `salt` stands for a seed; None is greedy.
    pub fn next_token(&self, state: KvFingerprint, salt: Option<u64>) -> u32 {
        let roll = self.hash_state(state, salt);
        if state.turn >= MIN_TURN_TOKENS && roll.is_multiple_of(EOS_ONE_IN) { self.eos } else { self.pick_token(roll) }
    }

    /// Returns the next token, which is never the end of the answer.
    pub fn next_non_eos_token(&self, state: KvFingerprint, salt: Option<u64>) -> u32 {
        self.pick_token(self.hash_state(state, salt))
    }

    fn hash_state(&self, state: KvFingerprint, salt: Option<u64>) -> u64 {
        mix(state.hash, salt.map_or(0, |salt| salt | 1))
    }

    fn pick_token(&self, roll: u64) -> u32 {
        self.words[(roll >> 20) as usize % self.words.len()]
    }
}

fn mix(a: u64, b: u64) -> u64 {
    let mut x = a.rotate_left(23) ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^= x >> 32;
    x = x.wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^ (x >> 29)
}
