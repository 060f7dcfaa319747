//! What was told of an answer, place by place, and how much of it was told again. What was not told before is noted as it
//! comes, so that first and repeated answers are read alike.

use std::collections::BTreeMap;

use derive_where::derive_where;
use xxhash_rust::xxh3::xxh3_64;

use crate::dialect::said::Lost;

/// What was told at one place.
#[derive(Debug)]
#[derive_where(Default)]
struct Reel<T> {
    told: Vec<T>,
    /// Of it, what came again.
    again: usize,
}

impl<T: PartialEq + Clone> Reel<T> {
    /// How many of these, the next ones here, were told before. What was not is kept where there is room.
    fn pass(&mut self, next: &[T], room: Room) -> Result<usize, Lost> {
        let rest = &self.told[self.again..];
        let known = rest.len().min(next.len());
        if rest[..known] != next[..known] {
            return Err(Lost::Differs);
        }
        self.again += known;
        if room == Room::Left {
            self.told.extend_from_slice(&next[known..]);
            self.again = self.again + next.len() - known;
        }
        Ok(known)
    }
}

/// Whether more is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Room {
    Left,
    None,
}

/// Whether something was told before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Mark {
    New,
    Known,
}

#[derive(Debug, Default)]
pub(super) struct Tape {
    texts: BTreeMap<String, Reel<u8>>,
    lists: BTreeMap<String, Reel<u64>>,
    marks: BTreeMap<String, Told>,
    /// Whether something was told that another draw need not tell.
    speaks: bool,
    size: usize,
}

#[derive(Debug)]
struct Told {
    what: u64,
    /// Whether it came again.
    again: bool,
}

/// Beside its name, of each place that is kept.
const PLACE: usize = 48;
/// Bytes that are kept of one answer. What comes beyond them is passed and cannot be compared with another repeat.
pub(super) const MOST_TOLD: usize = 1 << 20;

impl Tape {
    /// What is new in this text, the next one of its place.
    pub(super) fn text<'t>(&mut self, place: &str, text: &'t str) -> Result<&'t str, Lost> {
        if text.is_empty() {
            return Ok(text);
        }
        self.speaks = true;
        let room = self.room();
        if !self.texts.contains_key(place) {
            if room == Room::None {
                return Ok(text);
            }
            self.keep(place);
        }
        let known = self.texts.entry(place.to_owned()).or_default().pass(text.as_bytes(), room)?;
        self.size += if room == Room::Left { text.len() - known } else { 0 };
        text.get(known..).ok_or(Lost::Differs)
    }

    /// How many of these items, the next ones of their place, are known.
    pub(super) fn list(&mut self, place: &str, items: &[u64]) -> Result<usize, Lost> {
        let room = self.room();
        if !self.lists.contains_key(place) {
            if room == Room::None {
                return Ok(0);
            }
            self.keep(place);
        }
        let known = self.lists.entry(place.to_owned()).or_default().pass(items, room)?;
        self.size += if room == Room::Left { (items.len() - known) * size_of::<u64>() } else { 0 };
        Ok(known)
    }

    /// Something that is told once, and is the same then.
    pub(super) fn mark(&mut self, place: &str, what: &str) -> Result<Mark, Lost> {
        let what = xxh3_64(what.as_bytes());
        let is_full = self.is_full();
        match self.marks.get_mut(place) {
            None if is_full => Ok(Mark::New),
            None => {
                self.keep(place);
                self.marks.insert(place.to_owned(), Told { what, again: true });
                Ok(Mark::New)
            }
            Some(told) if told.what == what => {
                told.again = true;
                Ok(Mark::Known)
            }
            Some(_) => Err(Lost::Differs),
        }
    }

    pub(super) fn keep(&mut self, name: &str) {
        self.size += name.len() + PLACE;
    }

    /// What was told now need not come again from another draw.
    pub(super) fn speak(&mut self) {
        self.speaks = true;
    }

    /// Whether this was told, be it before or just now.
    pub(super) fn is_marked(&self, place: &str) -> bool {
        self.marks.contains_key(place)
    }

    /// Everything at places that begin so must have come again, and what is told once as well.
    pub(super) fn complete(&self, places: &str) -> Result<(), Lost> {
        let marks = self.marks.range(places.to_owned()..).take_while(|(place, _)| place.starts_with(places));
        if marks.into_iter().all(|(_, told)| told.again) { self.through(places) } else { Err(Lost::Differs) }
    }

    /// All texts and lists at places that begin so must have come again.
    pub(super) fn through(&self, places: &str) -> Result<(), Lost> {
        fn all<T>(reels: &BTreeMap<String, Reel<T>>, places: &str) -> bool {
            let these = reels.range(places.to_owned()..).take_while(|(place, _)| place.starts_with(places));
            these.into_iter().all(|(_, reel)| reel.again == reel.told.len())
        }
        let is_through = all(&self.texts, places) && all(&self.lists, places);
        if is_through { Ok(()) } else { Err(Lost::Differs) }
    }

    /// All of it is to come again.
    pub(super) fn rewind(&mut self) {
        self.texts.values_mut().for_each(|reel| reel.again = 0);
        self.lists.values_mut().for_each(|reel| reel.again = 0);
        self.marks.values_mut().for_each(|told| told.again = false);
    }

    /// Whether something was told that another draw need not tell: a word, a tool.
    pub(super) fn speaks(&self) -> bool {
        self.speaks
    }

    pub(super) fn is_empty(&self) -> bool {
        self.texts.is_empty() && self.lists.is_empty() && self.marks.is_empty()
    }

    /// Whether not all of it could be kept.
    pub(super) fn is_full(&self) -> bool {
        self.size > MOST_TOLD
    }

    /// Bytes that are kept.
    #[cfg(test)]
    pub(super) fn size(&self) -> usize {
        self.size
    }

    fn room(&self) -> Room {
        if self.is_full() { Room::None } else { Room::Left }
    }
}
