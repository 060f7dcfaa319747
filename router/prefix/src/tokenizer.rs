//! Tokenizer: text to token ids and back.

use fastokens::decoders::Decoder;
use fastokens::{AddedTokenConfig, Tokenizer};
use serde_json::Value;

use crate::{FallbackReason, PrefixError, PromptWorkLimits};

/// Whether special tokens are included: in encoding, those that a post-processor adds (begin and end of text); in
/// decoding, all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialTokens {
    /// With them.
    With,
    /// Without them.
    Without,
}

/// Texts that must round-trip; otherwise the tokenizer is not implemented correctly here.
const ROUND_TRIP_SAMPLES: [&str; 5] = [
    "The quick brown fox jumps over the lazy dog.",
    "fn main() {\n\tprintln!(\"{}\", 0x1F);\n}\n\n  indented",
    "naïve café, Ελληνικά, русский, 日本語, 한국어",
    "🌍👩‍👩‍👧 e\u{301}",
    "12345.678 a  b   c\r\n",
];

/// Shortest run of one character class that is not accepted as text, in bytes.
const MIN_ENDLESS_RUN: usize = 64 << 10;

/// A loaded `tokenizer.json`.
pub(crate) struct TextTokenizer {
    inner: Tokenizer,
    /// Whether each id decodes to bytes independently of its neighbours.
    byte_level: bool,
    /// Texts of tokens before which a text may be cut without changing its ids.
    cut_tokens: Vec<Box<str>>,
}

impl TextTokenizer {
    /// Builds the tokenizer. `config` is `tokenizer_config.json`, which may declare more added tokens.
    pub(crate) fn load(json: &[u8], config: &Value, limits: &PromptWorkLimits) -> Result<Self, PrefixError> {
        let mut json: Value =
            serde_json::from_slice(json).map_err(|source| PrefixError::File { file: "tokenizer.json", source })?;
        merge_added_tokens(&mut json, config);
        let mut inner = Tokenizer::from_json(json)?;
        // Engines truncate and pad per request, never as the file says.
        inner.set_truncation(None);
        inner.set_padding(None);
        inner.enable_segment_cache(usize::try_from(limits.segment_cache.0).unwrap_or(usize::MAX));
        let byte_level = matches!(inner.decoder(), Some(Decoder::ByteLevel(_)));
        let cuts = cut_tokens(inner.added_token_configs());
        let tokenizer = Self { inner, byte_level, cut_tokens: cuts };
        tokenizer.verify()?;
        Ok(tokenizer)
    }

    fn verify(&self) -> Result<(), PrefixError> {
        for text in ROUND_TRIP_SAMPLES {
            let ids = self.encode(text, SpecialTokens::Without)?;
            let back = self.decode(&ids, SpecialTokens::With)?;
            if back != text && self.inner.normalizer().is_none() {
                return Err(PrefixError::RoundTrip { text, back });
            }
            if self.encode(text, SpecialTokens::Without)? != ids {
                return Err(PrefixError::RoundTrip { text, back: "other ids the second time".into() });
            }
        }
        Ok(())
    }

    pub(crate) fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<u32>, PrefixError> {
        self.reject_endless(text)?;
        Ok(self.inner.encode_with_special_tokens(text, special == SpecialTokens::With)?)
    }

    /// Tokenizes a part of an accepted text that is cut where this is allowed.
    pub(crate) fn encode_part(&self, part: &str) -> Result<Vec<u32>, PrefixError> {
        Ok(self.inner.encode_with_special_tokens(part, false)?)
    }

    /// Rejects texts with endless words. Call it with whole texts: a part may pass although the whole does not.
    pub(crate) fn reject_endless(&self, text: &str) -> Result<(), PrefixError> {
        self.reject_endless_bytes(text.as_bytes())
    }

    fn reject_endless_bytes(&self, text: &[u8]) -> Result<(), PrefixError> {
        match has_endless_word(text) {
            true => Err(PrefixError::unresolvable(FallbackReason::TooLarge, "a word of more than 64 KiB")),
            false => Ok(()),
        }
    }

    /// Returns the texts of tokens before which a text may be cut.
    pub(crate) fn cut_tokens(&self) -> &[Box<str>] {
        &self.cut_tokens
    }

    /// Returns the offset of the first cut token in the first `within` bytes, and its index. Only tokens of mixed
    /// character classes count, because they end any run of one class.
    pub(crate) fn first_cut(&self, text: &str, within: usize) -> Option<(usize, usize)> {
        let starts = text.bytes().take(within).enumerate().filter(|(_, byte)| byte.is_ascii_punctuation());
        starts.map(|(at, _)| at).find_map(|at| {
            let begins = |token: &str| text.as_bytes()[at..].starts_with(token.as_bytes()) && is_mixed(token);
            Some((at, self.cut_tokens.iter().position(|token| begins(token))?))
        })
    }

    /// As `reject_endless`, for a text that continues with `part` after `known` accepted bytes.
    pub(crate) fn reject_endless_part(&self, known: usize, part: &str) -> Result<(), PrefixError> {
        // The window across the boundary contains the mixed token with which the part begins.
        let first = (MIN_ENDLESS_RUN - known % MIN_ENDLESS_RUN) % MIN_ENDLESS_RUN;
        self.reject_endless_bytes(part.as_bytes().get(first..).unwrap_or_default())
    }

    pub(crate) fn decode(&self, ids: &[u32], special: SpecialTokens) -> Result<String, PrefixError> {
        Ok(self.inner.decode(ids, special == SpecialTokens::Without)?)
    }

    pub(crate) fn vocab_size(&self) -> usize {
        self.inner.vocab_size()
    }

    pub(crate) fn is_special(&self, id: u32) -> bool {
        self.inner.is_special_token(id)
    }

    pub(crate) fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    pub(crate) fn special_ids(&self) -> impl Iterator<Item = u32> {
        self.inner.added_token_configs().iter().filter(|token| token.special).map(|token| token.id)
    }

    /// Appends the bytes that an id stands for. Returns `false` if they depend on neighbouring ids.
    pub(crate) fn push_bytes(&self, id: u32, out: &mut Vec<u8>) -> bool {
        if !self.byte_level {
            return false;
        }
        let Some(token) = self.inner.id_to_token(id) else { return true };
        let start = out.len();
        for c in token.chars() {
            match byte_of(c) {
                Some(byte) => out.push(byte),
                None => {
                    // Added tokens decode to their own text.
                    out.truncate(start);
                    out.extend_from_slice(token.as_bytes());
                    break;
                }
            }
        }
        true
    }
}

impl std::fmt::Debug for TextTokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TextTokenizer").field("vocab_size", &self.vocab_size()).finish_non_exhaustive()
    }
}

/// Returns the special tokens that are recognized in any context: plain characters, matched in the raw text, without
/// stripping white space before them, and not overlapping any other added token.
fn cut_tokens(added: &[AddedTokenConfig]) -> Vec<Box<str>> {
    let alone = |token: &AddedTokenConfig| {
        added.iter().all(|other| {
            let itself = other.content == token.content;
            !may_overlap(&other.content, &token.content)
                && !may_overlap(&token.content, &other.content)
                && (itself || !other.content.contains(&token.content) && !token.content.contains(&other.content))
        })
    };
    let plain = |text: &str| {
        text.len() >= 3
            && text.starts_with(|c: char| c.is_ascii_punctuation())
            && !text.contains(|c: char| c.is_whitespace() || c.is_control())
    };
    let fit = |token: &&AddedTokenConfig| {
        token.special
            && !token.normalized
            && !token.lstrip
            && !token.single_word
            && plain(&token.content)
            && alone(token)
    };
    added.iter().filter(fit).map(|token| token.content.as_str().into()).collect()
}

/// Returns whether a text can start inside `before` and end as the beginning of `after`.
fn may_overlap(before: &str, after: &str) -> bool {
    let inner = before.char_indices().skip(1).map(|(at, _)| &before[at..]);
    inner.into_iter().any(|end| after.starts_with(end))
}

/// Returns whether some word, number, gap or line of punctuation is longer than any real one. Merging takes more than
/// linear time in its length: a megabyte of spaces would cost a second. Always true from twice `MIN_ENDLESS_RUN` on,
/// never below it.
fn has_endless_word(text: &[u8]) -> bool {
    // A word of twice the length covers one of these windows; all other windows are left after a few bytes.
    text.chunks_exact(MIN_ENDLESS_RUN).any(|window| window.iter().all(|byte| class(byte) == class(&window[0])))
}

fn class(byte: &u8) -> u8 {
    match byte {
        b'\t'..=b'\r' | b' ' => 0,
        b'0'..=b'9' => 1,
        b'a'..=b'z' | b'A'..=b'Z' | 0x80.. => 2,
        _ => 3,
    }
}

/// Returns whether a text contains characters of several classes.
fn is_mixed(text: &str) -> bool {
    text.bytes().any(|byte| class(&byte) != class(&text.as_bytes()[0]))
}

/// GPT-2's byte alphabet: printable bytes map to themselves, the others to U+0100 and up, in order.
fn byte_of(c: char) -> Option<u8> {
    let is_printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    match u32::from(c) {
        code if is_printable(code) => u8::try_from(code).ok(),
        code @ 0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        code @ 0x121..=0x142 => u8::try_from(code - 0x121 + 0x7f).ok(),
        0x143 => Some(0xad),
        _ => None,
    }
}

/// Adds tokens that models declare only in `tokenizer_config.json`; `tokenizer.json` takes precedence.
fn merge_added_tokens(json: &mut Value, config: &Value) {
    let Some(more) = config["added_tokens_decoder"].as_object() else { return };
    let Some(tokenizer) = json.as_object_mut() else { return };
    let known = tokenizer.entry("added_tokens").or_insert_with(|| Value::Array(Vec::new()));
    let Some(known) = known.as_array_mut() else { return };
    for (id, token) in more {
        let (Ok(id), Some(content)) = (id.parse::<u32>(), token["content"].as_str()) else { continue };
        if known.iter().any(|token| token["id"] == id || token["content"] == content) {
            continue;
        }
        let mut token = token.clone();
        token["id"] = id.into();
        known.push(token);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_alphabet_is_a_bijection() {
        let mut bytes: Vec<u8> = (0..0x144).filter_map(char::from_u32).filter_map(byte_of).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        let known =
            [('!', 0x21), ('Ā', 0), ('Ġ', 0x20), ('ġ', 0x7f), ('Ċ', 0x0a), ('ł', 0xa0), ('Ń', 0xad), ('ÿ', 0xff)];
        assert!(known.into_iter().all(|(c, byte)| byte_of(c) == Some(byte)));
        assert_eq!((byte_of(' '), byte_of('\u{ad}'), byte_of('\u{144}'), byte_of('🌍')), (None, None, None, None));
    }

    #[test]
    fn endless_words_are_found_at_any_offset() {
        for unit in [" ", "a", "7", "<", "日"] {
            for before in [0, 1, 1_000, MIN_ENDLESS_RUN - 1] {
                let text = format!("{};{}", "x ".repeat(before / 2), unit.repeat(2 * MIN_ENDLESS_RUN / unit.len() + 1));
                assert!(has_endless_word(text.as_bytes()), "{unit} after {before}");
            }
        }
    }

    #[test]
    fn long_text_with_breaks_is_accepted() {
        for text in ["word ".repeat(100_000), format!("{};", "a".repeat(MIN_ENDLESS_RUN - 2)).repeat(8), String::new()]
        {
            assert!(!has_endless_word(text.as_bytes()));
        }
    }

    #[test]
    fn part_is_rejected_exactly_when_the_whole_text_is() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/models/tiny");
        let json = std::fs::read(folder.join("tokenizer.json")).unwrap();
        let tokenizer = TextTokenizer::load(&json, &Value::Null, &PromptWorkLimits::default()).unwrap();
        for before in [0, 1, MIN_ENDLESS_RUN / 2, MIN_ENDLESS_RUN - 5, MIN_ENDLESS_RUN, MIN_ENDLESS_RUN + 9] {
            for word in [
                MIN_ENDLESS_RUN - 1,
                MIN_ENDLESS_RUN + MIN_ENDLESS_RUN / 2,
                2 * MIN_ENDLESS_RUN - 12,
                2 * MIN_ENDLESS_RUN,
            ] {
                let part = format!("<|im_end|>{}", "a".repeat(word));
                let whole = format!("{}{part}", "b ".repeat(before).split_at(before).0);
                let refused = tokenizer.reject_endless(&whole).is_err();
                assert_eq!(tokenizer.reject_endless_part(before, &part).is_err(), refused, "{before} {word}");
            }
        }
    }

    #[test]
    fn first_cut_is_a_special_token_of_mixed_characters() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/models/tiny");
        let json = std::fs::read(folder.join("tokenizer.json")).unwrap();
        let tokenizer = TextTokenizer::load(&json, &Value::Null, &PromptWorkLimits::default()).unwrap();
        let at = |text: &str| tokenizer.first_cut(text, 20).map(|(at, token)| (at, &*tokenizer.cut_tokens()[token]));
        assert_eq!(at("é < <|im_<|im_end|><|im_start|>"), Some((10, "<|im_end|>")));
        assert_eq!((at("nothing"), at(&format!("{}<|im_end|>", "x".repeat(20)))), (None, None));
        assert!(is_mixed("<|im_end|>") && !is_mixed("###"));
    }

    #[test]
    fn cut_tokens_exclude_overlapping_special_tokens() {
        let token = |content: &str, special: bool| {
            let token = serde_json::json!({"id": 1, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": special});
            serde_json::from_value::<AddedTokenConfig>(token).unwrap()
        };
        let added = ["<｜User｜>", "<|im_end|>", "x<|", "< a>", "｜x｜", "<|y|>"].map(|content| token(content, true));
        let cuts = cut_tokens(&[&added[..], &[token("|>z", false)]].concat());
        assert_eq!(cuts, ["<｜User｜>".into()]);
    }
}
