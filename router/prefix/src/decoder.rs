//! Ids to text while they arrive: characters that are not complete yet are held back.

use crate::{ModelText, PrefixError, SpecialTokens};

/// Ids held back at most where a piece's text depends on its neighbours; then they are written as they stand.
const MAX_HELD_IDS: usize = 64;

/// An incremental decoder. What it returns, joined, is what [`ModelText::decode`] returns for all ids at once.
#[derive(Debug)]
pub struct TextDecoder {
    special: SpecialTokens,
    /// Bytes of a character that is not complete.
    held: Vec<u8>,
    /// For tokenizers whose pieces depend on each other: the ids since the last place where text was whole, how many
    /// of them are written already, and their text.
    window: Vec<u32>,
    written: usize,
    prefix: String,
}

impl TextDecoder {
    /// A decoder at the start of an answer.
    pub fn new(special: SpecialTokens) -> Self {
        Self { special, held: Vec::new(), window: Vec::new(), written: 0, prefix: String::new() }
    }

    /// The text that these ids complete; empty when they end inside a character.
    pub fn push(&mut self, text: &ModelText, ids: &[u32]) -> Result<String, PrefixError> {
        let mut out = String::new();
        for &id in ids {
            if self.special == SpecialTokens::Without && text.is_special(id) {
                continue;
            }
            if !text.tokenizer().push_bytes(id, &mut self.held) {
                self.push_window(text, id, &mut out)?;
            }
        }
        self.take_whole(&mut out);
        Ok(out)
    }

    /// What is still held, an incomplete character as U+FFFD. The decoder is at a start again.
    pub fn finish(&mut self, text: &ModelText) -> Result<String, PrefixError> {
        let mut out = String::from_utf8_lossy(&std::mem::take(&mut self.held)).into_owned();
        if self.window.len() > self.written {
            let whole = text.decode(&self.window, SpecialTokens::With)?;
            out.push_str(whole.strip_prefix(self.prefix.as_str()).unwrap_or(""));
        }
        *self = Self::new(self.special);
        Ok(out)
    }

    /// Moves whole characters from `held` to `out`; bytes that cannot become one turn into U+FFFD.
    fn take_whole(&mut self, out: &mut String) {
        let mut taken = 0;
        for chunk in self.held.utf8_chunks() {
            out.push_str(chunk.valid());
            taken += chunk.valid().len();
            let ends = taken + chunk.invalid().len() == self.held.len();
            if chunk.invalid().is_empty() || (ends && may_continue(chunk.invalid())) {
                break;
            }
            out.push(char::REPLACEMENT_CHARACTER);
            taken += chunk.invalid().len();
        }
        self.held.drain(..taken);
    }

    fn push_window(&mut self, text: &ModelText, id: u32, out: &mut String) -> Result<(), PrefixError> {
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
        // Keep the ids just written as the neighbourhood of the next ones.
        self.window.drain(..self.written);
        self.prefix = text.decode(&self.window, SpecialTokens::With)?;
        self.written = self.window.len();
        Ok(())
    }
}

/// Whether invalid bytes at the end are the beginning of a character.
fn may_continue(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}
