//! Buffer of one answer's contents by field path, with the position up to which they were repeated. New contents are
//! appended as they arrive, so that first and repeated answers are handled alike.

use std::collections::BTreeMap;

use derive_where::derive_where;
use xxhash_rust::xxh3::xxh3_64;

use crate::engine_api::token_transcript::TranscriptDefect;

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
    fn match_next(&mut self, next: &[T], room: BufferSpace) -> Result<usize, TranscriptDefect> {
        let rest = &self.values[self.matched..];
        let known = rest.len().min(next.len());
        if rest[..known] != next[..known] {
            return Err(TranscriptDefect::Diverged);
        }
        self.matched += known;
        if room == BufferSpace::Available {
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
pub(super) enum ReplayStatus {
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
    /// Returns the new part of `text`, the next fragment of the field `place`.
    pub(super) fn text<'t>(&mut self, place: &str, text: &'t str) -> Result<&'t str, TranscriptDefect> {
        if text.is_empty() {
            return Ok(text);
        }
        self.has_output = true;
        let room = self.space();
        if !self.texts.contains_key(place) {
            if room == BufferSpace::Full {
                return Ok(text);
            }
            self.reserve_space(place);
        }
        let known = self.texts.entry(place.to_owned()).or_default().match_next(text.as_bytes(), room)?;
        self.size += if room == BufferSpace::Available { text.len() - known } else { 0 };
        text.get(known..).ok_or(TranscriptDefect::Diverged)
    }

    /// Returns how many of `items`, the next ones of the list `place`, were known.
    pub(super) fn list(&mut self, place: &str, items: &[u64]) -> Result<usize, TranscriptDefect> {
        let room = self.space();
        if !self.lists.contains_key(place) {
            if room == BufferSpace::Full {
                return Ok(0);
            }
            self.reserve_space(place);
        }
        let known = self.lists.entry(place.to_owned()).or_default().match_next(items, room)?;
        self.size += if room == BufferSpace::Available { (items.len() - known) * size_of::<u64>() } else { 0 };
        Ok(known)
    }

    /// Records a value that occurs once in an answer and must be equal when repeated.
    pub(super) fn mark(&mut self, place: &str, what: &str) -> Result<ReplayStatus, TranscriptDefect> {
        let what = xxh3_64(what.as_bytes());
        let is_full = self.is_full();
        match self.marks.get_mut(place) {
            None if is_full => Ok(ReplayStatus::New),
            None => {
                self.reserve_space(place);
                self.marks.insert(place.to_owned(), FieldDigest { digest: what, matched: true });
                Ok(ReplayStatus::New)
            }
            Some(told) if told.digest == what => {
                told.matched = true;
                Ok(ReplayStatus::Known)
            }
            Some(_) => Err(TranscriptDefect::Diverged),
        }
    }

    pub(super) fn reserve_space(&mut self, name: &str) {
        self.size += name.len() + FIELD_OVERHEAD;
    }

    /// Records that there was output that another sample need not repeat.
    pub(super) fn mark_output(&mut self) {
        self.has_output = true;
    }

    /// Returns whether `place` has a value.
    pub(super) fn is_marked(&self, place: &str) -> bool {
        self.marks.contains_key(place)
    }

    /// Fails unless all fields and values whose paths begin with `places` were repeated in full.
    pub(super) fn check_complete(&self, places: &str) -> Result<(), TranscriptDefect> {
        let marks = self.marks.range(places.to_owned()..).take_while(|(place, _)| place.starts_with(places));
        if marks.into_iter().all(|(_, told)| told.matched) {
            self.check_fields_complete(places)
        } else {
            Err(TranscriptDefect::Diverged)
        }
    }

    /// Fails unless all texts and lists whose paths begin with `places` were repeated in full.
    pub(super) fn check_fields_complete(&self, places: &str) -> Result<(), TranscriptDefect> {
        fn all<T>(reels: &BTreeMap<String, FieldCursor<T>>, places: &str) -> bool {
            let these = reels.range(places.to_owned()..).take_while(|(place, _)| place.starts_with(places));
            these.into_iter().all(|(_, reel)| reel.matched == reel.values.len())
        }
        let is_through = all(&self.texts, places) && all(&self.lists, places);
        if is_through { Ok(()) } else { Err(TranscriptDefect::Diverged) }
    }

    /// Marks all contents as not repeated.
    pub(super) fn rewind(&mut self) {
        self.texts.values_mut().for_each(|reel| reel.matched = 0);
        self.lists.values_mut().for_each(|reel| reel.matched = 0);
        self.marks.values_mut().for_each(|told| told.matched = false);
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
