//! Incremental detokenizer: incomplete characters are held back until their ids arrive.

use crate::{ModelTokenizer, PrefixError, SpecialTokens};

/// Maximum number of ids held back when text depends on neighbouring ids; beyond it they are written as they are.
const MAX_HELD_IDS: usize = 64;

/// Incremental decoder. Its concatenated output equals what [`ModelTokenizer::decode`] returns for all ids at once.
#[derive(Debug)]
pub struct TextDecoder {
    special: SpecialTokens,
    /// Bytes of an incomplete character.
    incomplete: Vec<u8>,
    /// For tokenizers whose output depends on neighbouring ids: the ids since the last complete text, how many of
    /// them are already written, and their text.
    window: Vec<u32>,
    written: usize,
    prefix: String,
}

impl TextDecoder {
    /// Creates a decoder for the start of a response.
    pub fn new(special: SpecialTokens) -> Self {
        Self { special, incomplete: Vec::new(), window: Vec::new(), written: 0, prefix: String::new() }
    }

    /// Appends ids and returns the text they complete; empty if they end inside a character.
    pub fn push(&mut self, text: &ModelTokenizer, ids: &[u32]) -> Result<String, PrefixError> {
        let mut out = String::new();
        for &id in ids {
            if self.special == SpecialTokens::Without && text.is_special(id) {
                continue;
            }
            if !text.tokenizer().push_bytes(id, &mut self.incomplete) {
                self.push_window(text, id, &mut out)?;
            }
        }
        self.drain_complete(&mut out);
        Ok(out)
    }

    /// Returns the remaining text, with an incomplete character as U+FFFD, and resets the decoder.
    pub fn finish(&mut self, text: &ModelTokenizer) -> Result<String, PrefixError> {
        let mut out = String::from_utf8_lossy(&std::mem::take(&mut self.incomplete)).into_owned();
        if self.window.len() > self.written {
            let whole = text.decode(&self.window, SpecialTokens::With)?;
            out.push_str(whole.strip_prefix(self.prefix.as_str()).unwrap_or(""));
        }
        *self = Self::new(self.special);
        Ok(out)
    }

    /// Moves complete characters from `incomplete` to `out`; bytes that cannot become a character turn into U+FFFD.
    fn drain_complete(&mut self, out: &mut String) {
        let mut consumed = 0;
        for chunk in self.incomplete.utf8_chunks() {
            out.push_str(chunk.valid());
            consumed += chunk.valid().len();
            let ends = consumed + chunk.invalid().len() == self.incomplete.len();
            if chunk.invalid().is_empty() || (ends && may_continue(chunk.invalid())) {
                break;
            }
            out.push(char::REPLACEMENT_CHARACTER);
            consumed += chunk.invalid().len();
        }
        self.incomplete.drain(..consumed);
    }

    fn push_window(&mut self, text: &ModelTokenizer, id: u32, out: &mut String) -> Result<(), PrefixError> {
        self.window.push(id);
        let whole = text.decode(&self.window, SpecialTokens::With)?;
        let is_whole = !whole.ends_with(char::REPLACEMENT_CHARACTER);
        let is_full = self.window.len() - self.written >= MAX_HELD_IDS;
        if !is_whole && !is_full {
            return Ok(());
        }
        if let Some(more) = whole.strip_prefix(self.prefix.as_str()) {
            out.push_str(more);
        }
        // The ids just written stay as context of the next ones.
        self.window.drain(..self.written);
        self.prefix = text.decode(&self.window, SpecialTokens::With)?;
        self.written = self.window.len();
        Ok(())
    }
}

/// Returns whether invalid bytes at the end are the beginning of a character.
fn may_continue(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ModelFiles, ModelTokenizerSource};
    use proptest::prelude::*;
    use std::path::Path;

    fn model(folder: &str) -> ModelTokenizer {
        let files = ModelFiles::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)).unwrap();
        ModelTokenizer::load(ModelTokenizerSource::Files(files)).unwrap()
    }

    thread_local! {
        static TINY: ModelTokenizer = model("../../configs/models/tiny");
        static PIECES: ModelTokenizer = model("testdata/models/mistral_like");
    }

    #[test]
    fn incomplete_character_is_held_until_complete() {
        TINY.with(|tiny| {
            let ids = tiny.encode("a🌍b", SpecialTokens::Without).unwrap();
            let mut decoder = TextDecoder::new(SpecialTokens::With);
            let pieces: Vec<String> = ids.iter().map(|id| decoder.push(tiny, &[*id]).unwrap()).collect();
            assert_eq!(pieces.concat(), "a🌍b");
            assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')), "{pieces:?}");
            assert!(pieces.len() > 3, "the earth takes several ids: {pieces:?}");
        });
    }

    #[test]
    fn answer_ending_inside_a_character_emits_u_fffd() {
        TINY.with(|tiny| {
            let ids = tiny.encode("🌍", SpecialTokens::Without).unwrap();
            let mut decoder = TextDecoder::new(SpecialTokens::With);
            assert_eq!(decoder.push(tiny, &ids[..ids.len() - 1]).unwrap(), "");
            assert_eq!(decoder.finish(tiny).unwrap(), "\u{fffd}");
            assert_eq!(decoder.finish(tiny).unwrap(), "");
        });
    }

    #[test]
    fn special_tokens_are_shown_only_on_request() {
        TINY.with(|tiny| {
            let ids = tiny.encode("hi<|im_end|>", SpecialTokens::Without).unwrap();
            assert_eq!(TextDecoder::new(SpecialTokens::With).push(tiny, &ids).unwrap(), "hi<|im_end|>");
            assert_eq!(TextDecoder::new(SpecialTokens::Without).push(tiny, &ids).unwrap(), "hi");
        });
    }

    #[test]
    fn undecodable_ids_do_not_accumulate() {
        PIECES.with(|model| {
            let byte = model.token_id("<0xF0>").unwrap();
            let mut decoder = TextDecoder::new(SpecialTokens::With);
            for _ in 0..1_000 {
                decoder.push(model, &[byte]).unwrap();
                assert!(decoder.window.len() <= 2 * MAX_HELD_IDS, "{}", decoder.window.len());
            }
        });
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn piecewise_decoding_equals_decoding_at_once(ids in prop::collection::vec(0u32..4_200, 0..40), cut in 1usize..5) {
            TINY.with(|tiny| {
                for special in [SpecialTokens::With, SpecialTokens::Without] {
                    let mut decoder = TextDecoder::new(special);
                    let mut text: String = ids.chunks(cut).map(|ids| decoder.push(tiny, ids).unwrap()).collect();
                    text.push_str(&decoder.finish(tiny).unwrap());
                    prop_assert_eq!(text, tiny.decode(&ids, special).unwrap());
                }
                Ok(())
            })?;
        }

        #[test]
        fn any_text_round_trips_through_both_tokenizer_kinds(text in "\\PC{0,30}") {
            for model in [&TINY, &PIECES] {
                model.with(|model| {
                    let ids = model.encode(&text, SpecialTokens::Without).unwrap();
                    let mut decoder = TextDecoder::new(SpecialTokens::With);
                    let mut back: String = ids.iter().map(|id| decoder.push(model, &[*id]).unwrap()).collect();
                    back.push_str(&decoder.finish(model).unwrap());
                    prop_assert_eq!(&back, &model.decode(&ids, SpecialTokens::With).unwrap());
                    Ok(())
                })?;
            }
        }
    }
}
