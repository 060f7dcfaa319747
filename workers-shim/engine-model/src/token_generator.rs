//! Where text comes from. A fingerprint stands for the KV of everything before a point; the next token is a hash of
//! it. It must depend on nothing else: not on the request's name, the worker, or the time.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::ModelError;

/// Answers are at least this long, counted from the last special token before them.
const MIN_TURN_TOKENS: u32 = 16;
/// After that an answer ends at one token in this many.
const EOS_ONE_IN: u64 = 48;

/// What the KV up to some token amounts to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
pub struct KvFingerprint {
    hash: u64,
    /// Tokens since the last special one, so that a model knows how long its turn is.
    turn: u32,
}

impl KvFingerprint {
    /// What memory holds that nobody wrote.
    pub const GARBAGE: Self = Self { hash: 0x6761_7262_6167_6521, turn: 0 };

    /// Before the first token, for a model or one of its adapters.
    pub fn root(adapter: Option<&str>) -> Self {
        let hash = adapter.map_or(1, |name| xxhash_rust::xxh3::xxh3_64(name.as_bytes()));
        Self { hash, turn: 0 }
    }

    /// The context after one more whole block, which ends in `block`.
    pub fn extend_block(self, block: Self) -> Self {
        Self { hash: mix(mix(self.hash, 0x0062_6c6f_636b), block.hash), turn: block.turn }
    }

    /// What becomes of memory that was reused under a reader.
    pub fn corrupted(self) -> Self {
        Self { hash: mix(self.hash, Self::GARBAGE.hash), turn: self.turn }
    }
}

/// The tokens a model may say, and those that end or structure a turn.
#[derive(Clone, Debug)]
pub struct TokenGenerator {
    words: Arc<[u32]>,
    eos: u32,
    special_tokens: Arc<[u32]>,
}

impl TokenGenerator {
    /// `words` should be tokens of which any sequence is encoded back to itself, or decode blocks are not reused.
    pub fn new(words: &[u32], eos: u32, specials: &[u32]) -> Result<Self, ModelError> {
        let mut specials = specials.to_vec();
        specials.push(eos);
        specials.sort_unstable();
        specials.dedup();
        let words: Vec<u32> = words.iter().copied().filter(|w| specials.binary_search(w).is_err()).collect();
        if words.len() < 2 {
            return Err(ModelError::NoWords);
        }
        Ok(Self { words: words.into(), eos, special_tokens: specials.into() })
    }

    /// The token that ends an answer.
    pub fn eos(&self) -> u32 {
        self.eos
    }

    /// The fingerprint one token further.
    pub fn extend(&self, before: KvFingerprint, token: u32) -> KvFingerprint {
        let special = self.special_tokens.binary_search(&token).is_ok();
        KvFingerprint {
            hash: mix(before.hash, u64::from(token) + 1),
            turn: if special { 0 } else { before.turn.saturating_add(1) },
        }
    }

    /// The token that follows. `salt` stands for a seed; none is greedy.
    pub fn next_token(&self, state: KvFingerprint, salt: Option<u64>) -> u32 {
        let roll = self.hash_state(state, salt);
        if state.turn >= MIN_TURN_TOKENS && roll.is_multiple_of(EOS_ONE_IN) { self.eos } else { self.pick_token(roll) }
    }

    /// As `next`, but never the end.
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
