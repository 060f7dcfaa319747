//! Selects the tokens that a simulated model generates, and decodes them incrementally.

use std::sync::Arc;

use engine_model::{EngineBuildError, TokenGenerator};

use super::codec::{AddSpecialTokens, TextCodec};

/// Creates a generator of words whose concatenation always encodes back to the same tokens, so that an answer repeated
/// in the next step's prompt has the tokens it was generated with. If the vocabulary has too few such words, all tokens
/// that are not special are used.
pub(crate) fn token_generator_of(codec: &dyn TextCodec) -> Result<TokenGenerator, EngineBuildError> {
    const MIN_WORDS: usize = 64;
    let specials = codec.specials();
    let plain: Vec<u32> = (0..codec.vocabulary_size()).filter(|id| !specials.contains(id)).collect();
    let words: Vec<u32> = plain.iter().copied().filter(|id| is_word(codec, *id)).collect();
    let text = if words.len() >= MIN_WORDS { &words } else { &plain };
    TokenGenerator::new(text, codec.eos(), &specials)
}

/// Returns whether the token is a space and lower-case letters: byte-level tokenizers always split between such tokens.
fn is_word(codec: &dyn TextCodec, id: u32) -> bool {
    let text = codec.decode(&[id]);
    let letters = text.strip_prefix(' ').unwrap_or_default();
    let plain = letters.len() > 1 && letters.bytes().all(|byte| byte.is_ascii_lowercase());
    plain && codec.encode(&text, AddSpecialTokens::Bare).is_ok_and(|ids| ids == [id])
}

/// Incremental decoder that emits whole characters.
pub(crate) struct Detokenizer {
    codec: Arc<dyn TextCodec>,
    ids: Vec<u32>,
    /// Start of the decoding window; tokens before `emitted` were emitted, those after it may end within a character.
    anchor: usize,
    emitted: usize,
}

impl Detokenizer {
    pub(crate) fn new(codec: Arc<dyn TextCodec>) -> Self {
        Self { codec, ids: Vec::new(), anchor: 0, emitted: 0 }
    }

    /// Returns the text that one more token adds; empty while a character is incomplete.
    pub(crate) fn push(&mut self, id: u32) -> String {
        self.ids.push(id);
        let before = self.codec.decode(&self.ids[self.anchor..self.emitted]);
        let after = self.codec.decode(&self.ids[self.anchor..]);
        if after.len() <= before.len() || after.ends_with('\u{fffd}') {
            return String::new();
        }
        self.anchor = self.emitted;
        self.emitted = self.ids.len();
        after.get(before.len()..).unwrap_or_default().to_owned()
    }

    /// Returns the remaining text at the end, even if incomplete.
    pub(crate) fn finish(&mut self) -> String {
        let before = self.codec.decode(&self.ids[self.anchor..self.emitted]);
        let after = self.codec.decode(&self.ids[self.anchor..]);
        self.anchor = self.ids.len();
        self.emitted = self.ids.len();
        after.get(before.len()..).unwrap_or_default().to_owned()
    }
}
