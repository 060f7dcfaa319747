//! Token checkpoints: the token ids of a prompt's beginning, so that only the rest must be tokenized.
//!
//! A prompt is cut right before a special token that no other token can overlap. The tokenizer finds such a token in
//! any context and tokenizes the text before and after it separately, so the ids of the parts are the ids of the
//! whole. A checkpoint is used only for exactly the same text and tokenizer.

use vocabulary::Tokens;
use xxhash_rust::xxh3::Xxh3;

use crate::PrefixError;
use crate::tokenizer::TextTokenizer;

/// Bytes of a serialized id; larger ids have no checkpoint.
const MAX_ID_BYTES: usize = 3;
/// Bytes before the serialized ids.
const HEADER_BYTES: usize = 24;

/// Token ids of the first bytes of a rendered prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenCheckpoint {
    /// Digest of the text and of everything that determines its ids.
    digest: u128,
    bytes: usize,
    ids: Vec<u32>,
}

impl TokenCheckpoint {
    /// Number of tokens in the checkpoint.
    pub fn token_count(&self) -> Tokens {
        Tokens(self.ids.len() as u64)
    }

    /// Serializes the checkpoint: digest, length of the text, ids; all little endian. Returns `None` if an id is too
    /// large.
    pub fn to_bytes(&self) -> Option<Vec<u8>> {
        let mut out = Vec::with_capacity(HEADER_BYTES + MAX_ID_BYTES * self.ids.len());
        out.extend_from_slice(&self.digest.to_le_bytes());
        out.extend_from_slice(&(self.bytes as u64).to_le_bytes());
        for id in &self.ids {
            let [low, middle, high, 0] = id.to_le_bytes() else { return None };
            out.extend_from_slice(&[low, middle, high]);
        }
        Some(out)
    }

    /// Parses what `to_bytes` wrote; `None` for anything else.
    pub fn from_bytes(stored: &[u8]) -> Option<Self> {
        let (digest, rest) = stored.split_first_chunk()?;
        let (bytes, ids) = rest.split_first_chunk()?;
        if ids.len() % MAX_ID_BYTES != 0 {
            return None;
        }
        let ids = ids.chunks_exact(MAX_ID_BYTES).map(|id| u32::from_le_bytes([id[0], id[1], id[2], 0])).collect();
        let bytes = usize::try_from(u64::from_le_bytes(*bytes)).ok()?;
        Some(Self { digest: u128::from_le_bytes(*digest), bytes, ids })
    }

    /// Returns the text after the checkpoint if it applies to `text`: what follows must be a token where the text may
    /// be cut.
    fn remaining_text<'a>(&self, text: &'a str, (tokenizer, name): (&TextTokenizer, &str)) -> Option<&'a str> {
        let (known, rest) = text.split_at_checked(self.bytes)?;
        let cuts = tokenizer.cut_tokens().iter().any(|token| rest.starts_with(&**token));
        (cuts && self.digest == digest(known, name)).then_some(rest)
    }
}

/// A prompt's token ids and how many were reused.
#[derive(Debug)]
pub struct TokenizedPrompt {
    /// All token ids.
    pub ids: Vec<u32>,
    /// How many of them come from a checkpoint.
    pub reused_tokens: Tokens,
    /// Checkpoint for the next prompt with the same beginning; `None` if the prompt cannot be cut.
    pub next_checkpoint: Option<TokenCheckpoint>,
}

/// Tokenizes `text`, reusing `checkpoint` if it applies. `name` identifies everything that determines the ids.
pub(crate) fn tokenize(
    text: &str,
    checkpoint: Option<&TokenCheckpoint>,
    by: (&TextTokenizer, &str),
) -> Result<TokenizedPrompt, PrefixError> {
    let (tokenizer, name) = by;
    tokenizer.reject_endless(text)?;
    let checkpoint = checkpoint.and_then(|checkpoint| Some((checkpoint, checkpoint.remaining_text(text, by)?)));
    let (mut ids, start) = match checkpoint {
        Some((checkpoint, _)) => (checkpoint.ids.clone(), checkpoint.bytes),
        None => (Vec::new(), 0),
    };
    let from_checkpoint = Tokens(ids.len() as u64);
    let rest = &text[start..];
    let Some(cut) = last_cut(rest, tokenizer) else {
        ids.extend(tokenizer.encode_part(rest)?);
        return Ok(TokenizedPrompt { ids, reused_tokens: from_checkpoint, next_checkpoint: None });
    };
    ids.extend(tokenizer.encode_part(&rest[..cut])?);
    let bytes = start + cut;
    let next = TokenCheckpoint { digest: digest(&text[..bytes], name), bytes, ids: ids.clone() };
    ids.extend(tokenizer.encode_part(&rest[cut..])?);
    Ok(TokenizedPrompt { ids, reused_tokens: from_checkpoint, next_checkpoint: (bytes > 0).then_some(next) })
}

/// Returns the offset of the last token before which the text may be cut.
fn last_cut(text: &str, tokenizer: &TextTokenizer) -> Option<usize> {
    tokenizer.cut_tokens().iter().filter_map(|token| text.rfind(&**token)).max()
}

/// xxh3-128 over the name of what determines the ids, preceded by its length, and the text.
fn digest(text: &str, name: &str) -> u128 {
    let mut hash = Xxh3::new();
    hash.update(&(name.len() as u64).to_le_bytes());
    hash.update(name.as_bytes());
    hash.update(text.as_bytes());
    hash.digest128()
}

#[cfg(test)]
mod tests;
