//! Buffer of one answer's contents by field path, with the position up to which they were repeated. New contents are
//! appended as they arrive, so that first and repeated answers are handled alike.

use std::collections::BTreeMap;

use derive_where::derive_where;
use xxhash_rust::xxh3::xxh3_64;

use crate::engine_api::token_transcript::ContinuationBlocker;

/// The values of one field and how many of them were repeated.
#[derive(Debug)]
#[derive_where(Default)]
struct FieldCursor<T> {
    values: Vec<T>,
    /// How many of the values were repeated.
    matched: usize,
}

impl<T: PartialEq + Clone> FieldCursor<T> {
    /// Compares `next` with the values that follow here, and returns how many of its items were known. New items are
    /// stored if there is room.
    fn match_next(&mut self, next: &[T], space: BufferSpace) -> Result<usize, ContinuationBlocker> {
        let rest = &self.values[self.matched..];
        let known = rest.len().min(next.len());
        if rest[..known] != next[..known] {
            return Err(ContinuationBlocker::Diverged);
        }
        self.matched += known;
        if space == BufferSpace::Available {
            self.values.extend_from_slice(&next[known..]);
            self.matched = self.matched + next.len() - known;
        }
        Ok(known)
    }
}

/// Whether the buffer has room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum BufferSpace {
    Available,
    Full,
}

/// Whether a value was known before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FieldNovelty {
    New,
    Known,
}

#[derive(Debug, Default)]
pub(super) struct ReplayBuffer {
    texts: BTreeMap<String, FieldCursor<u8>>,
    lists: BTreeMap<String, FieldCursor<u64>>,
    marks: BTreeMap<String, FieldDigest>,
    /// Whether there was output that another sample need not repeat.
    has_output: bool,
    size: usize,
}

#[derive(Debug)]
struct FieldDigest {
    digest: u64,
    /// Whether it was repeated.
    matched: bool,
}

/// Bytes accounted for each stored field, beside its name.
const FIELD_OVERHEAD: usize = 48;
/// Buffer size in bytes for one answer. Contents beyond it are forwarded and not stored, so they cannot be verified.
pub(super) const MAX_BUFFERED_BYTES: usize = 1 << 20;

impl ReplayBuffer {
    /// Returns the new part of `text`, the next fragment of the field at `path`.
    pub(super) fn text<'t>(&mut self, path: &str, text: &'t str) -> Result<&'t str, ContinuationBlocker> {
        if text.is_empty() {
            return Ok(text);
        }
        self.has_output = true;
        let space = self.space();
        if !self.texts.contains_key(path) {
            if space == BufferSpace::Full {
                return Ok(text);
            }
            self.reserve_space(path);
        }
        let known = self.texts.entry(path.to_owned()).or_default().match_next(text.as_bytes(), space)?;
        self.size += if space == BufferSpace::Available { text.len() - known } else { 0 };
        text.get(known..).ok_or(ContinuationBlocker::Diverged)
    }

    /// Returns how many of `items`, the next ones of the list at `path`, were known.
    pub(super) fn list(&mut self, path: &str, items: &[u64]) -> Result<usize, ContinuationBlocker> {
        let space = self.space();
        if !self.lists.contains_key(path) {
            if space == BufferSpace::Full {
                return Ok(0);
            }
            self.reserve_space(path);
        }
        let known = self.lists.entry(path.to_owned()).or_default().match_next(items, space)?;
        self.size += if space == BufferSpace::Available { (items.len() - known) * size_of::<u64>() } else { 0 };
        Ok(known)
    }

    /// Records a value that occurs once in an answer and must be equal when repeated.
    pub(super) fn mark(&mut self, path: &str, value: &str) -> Result<FieldNovelty, ContinuationBlocker> {
        let digest = xxh3_64(value.as_bytes());
        let is_full = self.is_full();
        match self.marks.get_mut(path) {
            None if is_full => Ok(FieldNovelty::New),
            None => {
                self.reserve_space(path);
                self.marks.insert(path.to_owned(), FieldDigest { digest, matched: true });
                Ok(FieldNovelty::New)
            }
            Some(earlier) if earlier.digest == digest => {
                earlier.matched = true;
                Ok(FieldNovelty::Known)
            }
            Some(_) => Err(ContinuationBlocker::Diverged),
        }
    }

    pub(super) fn reserve_space(&mut self, name: &str) {
        self.size += name.len() + FIELD_OVERHEAD;
    }

    /// Records that there was output that another sample need not repeat.
    pub(super) fn mark_output(&mut self) {
        self.has_output = true;
    }

    /// Returns whether a value was recorded at `path`.
    pub(super) fn is_marked(&self, path: &str) -> bool {
        self.marks.contains_key(path)
    }

    /// Fails unless all fields and values whose paths begin with `places` were repeated in full.
    pub(super) fn check_complete(&self, places: &str) -> Result<(), ContinuationBlocker> {
        let marks = self.marks.range(places.to_owned()..).take_while(|(path, _)| path.starts_with(places));
        if marks.into_iter().all(|(_, mark)| mark.matched) {
            self.check_fields_complete(places)
        } else {
            Err(ContinuationBlocker::Diverged)
        }
    }

    /// Fails unless all texts and lists whose paths begin with `places` were repeated in full.
    pub(super) fn check_fields_complete(&self, places: &str) -> Result<(), ContinuationBlocker> {
        fn all<T>(cursors: &BTreeMap<String, FieldCursor<T>>, places: &str) -> bool {
            let matching = cursors.range(places.to_owned()..).take_while(|(path, _)| path.starts_with(places));
            matching.into_iter().all(|(_, cursor)| cursor.matched == cursor.values.len())
        }
        let is_through = all(&self.texts, places) && all(&self.lists, places);
        if is_through { Ok(()) } else { Err(ContinuationBlocker::Diverged) }
    }

    /// Marks all contents as not repeated.
    pub(super) fn rewind(&mut self) {
        self.texts.values_mut().for_each(|cursor| cursor.matched = 0);
        self.lists.values_mut().for_each(|cursor| cursor.matched = 0);
        self.marks.values_mut().for_each(|mark| mark.matched = false);
    }

    /// Returns whether there was output (text or a tool call) that another sample need not repeat.
    pub(super) fn has_output(&self) -> bool {
        self.has_output
    }

    pub(super) fn is_empty(&self) -> bool {
        self.texts.is_empty() && self.lists.is_empty() && self.marks.is_empty()
    }

    /// Returns whether the size limit is exceeded.
    pub(super) fn is_full(&self) -> bool {
        self.size > MAX_BUFFERED_BYTES
    }

    /// Returns the accounted size in bytes.
    #[cfg(test)]
    pub(super) fn size(&self) -> usize {
        self.size
    }

    fn space(&self) -> BufferSpace {
        if self.is_full() { BufferSpace::Full } else { BufferSpace::Available }
    }
}
