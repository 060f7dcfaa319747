//! Locates the top-level fields of a JSON object, and builds new bodies by replacing some of them.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use vocabulary::count_visited;

use super::json::{FieldSpan, JsonError, JsonWalker, ListEnd, MAX_ESCAPE};

/// Maximum number of fields at the top level.
const MAX_FIELDS: usize = 1024;

/// Maximum length of a top-level field's name in bytes.
const MAX_NAME: usize = 4096;

/// A validated body that is one JSON object, with the positions of its top-level fields.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ScannedJson {
    body: Bytes,
    open: usize,
    values: usize,
    containers: usize,
    fields: Vec<FieldSpan>,
}

impl ScannedJson {
    /// Validates `body` in one pass. Fields in `relied` may occur only once; of other repeated fields the last one
    /// counts.
    pub fn scan(body: Bytes, relied: &[&str]) -> Result<Self, JsonError> {
        let mut fields = Vec::with_capacity(24);
        let (open, values, containers) = JsonWalker::new(&body).whole_object(|field| push(&mut fields, field))?;
        Self { body, open, values, containers, fields }.checked(relied)
    }

    /// Compares `body` with this one up to the end of the last element of `list`, a field at the top level. Returns
    /// `None` where they differ, or there is no such element.
    pub fn growth_to(self: &Arc<Self>, body: &[u8], list: &str) -> Option<BodyGrowth> {
        let position = self.position(list)?;
        let end = self.fields[position].list_end?;
        let is_same = is_same_up_to(body, &self.body, end.offset);
        is_same.then(|| BodyGrowth { known: self.clone(), position, end })
    }

    /// Validates `body` from where it has grown on; it must be the body that was compared. The result is that of
    /// [`Self::scan`].
    pub fn scan_growth(body: Bytes, growth: &BodyGrowth, relied: &[&str]) -> Result<Self, JsonError> {
        let BodyGrowth { known, position, end } = growth;
        let (before, list) = (&known.fields[..*position], &known.fields[*position]);
        let mut fields = Vec::with_capacity(known.fields.len() + 4);
        fields.extend_from_slice(before);
        let (values, containers) = JsonWalker::rest_of_object(&body, (list, *end), |field| push(&mut fields, field))?;
        Self { body, open: known.open, values, containers, fields }.checked(relied)
    }

    /// Returns the offset after the last element of the field's list; `None` where it is no list or has none.
    pub fn list_end(&self, name: &str) -> Option<usize> {
        Some(self.fields[self.position(name)?].list_end?.offset)
    }

    /// Returns the memory of the positions in bytes, without the text.
    pub fn memory_bytes(&self) -> usize {
        let ends: usize = self.fields.iter().map(|field| size_of_val(&field.element_ends[..])).sum();
        size_of::<Self>() + self.fields.capacity() * size_of::<FieldSpan>() + ends
    }

    fn checked(self, relied: &[&str]) -> Result<Self, JsonError> {
        match relied.iter().find(|name| self.positions(name).nth(1).is_some()) {
            Some(name) => Err(JsonError::Duplicate { name: (*name).to_owned() }),
            None => Ok(self),
        }
    }

    /// Returns the scanned text.
    pub fn body(&self) -> &Bytes {
        &self.body
    }

    /// Returns how many of the values are objects or arrays.
    pub fn containers(&self) -> usize {
        self.containers
    }

    /// Returns the number of values at any depth.
    pub fn values(&self) -> usize {
        self.values
    }

    /// Iterates over all fields in order: the unescaped name, and the position of the value.
    pub fn all(&self) -> impl Iterator<Item = (Cow<'_, str>, Range<usize>)> {
        self.fields.iter().map(|field| {
            count_visited(field.name.len());
            let written = String::from_utf8_lossy(&self.body[field.name.clone()]);
            let name = if written.contains('\\') { self.read_name(field).map_or(written, Cow::Owned) } else { written };
            (name, field.value.clone())
        })
    }

    /// Returns the text of the value of `name` as the client wrote it; `null` counts as a value.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        self.position(name).map(|position| &self.body[self.fields[position].value.clone()])
    }

    /// Parses the value of `name` as a `T`; None if it is missing, null or of another type.
    pub fn read<'a, T: serde::Deserialize<'a>>(&'a self, name: &str) -> Option<T> {
        let value = self.get(name)?;
        count_visited(value.len());
        serde_json::from_slice::<Option<T>>(value).ok().flatten()
    }

    /// Returns whether the field is present and not null.
    pub fn has(&self, name: &str) -> bool {
        self.get(name).is_some_and(|value| value != b"null")
    }

    /// Returns whether a string in the field's value, at any depth, is the name of a message part that is not text, or
    /// may be one.
    pub fn names_media(&self, name: &str) -> bool {
        self.positions(name).any(|position| self.fields[position].strings.names_media)
    }

    /// Returns whether a string in the field's value, at any depth, is the name of a media part's id, or may be one.
    pub fn names_media_id(&self, name: &str) -> bool {
        self.positions(name).any(|position| self.fields[position].strings.names_media_id)
    }

    /// Returns whether no white space stands between the tokens of the field's value.
    pub fn is_compact(&self, name: &str) -> bool {
        self.position(name).is_some_and(|position| self.fields[position].is_compact)
    }

    /// Returns the offsets after the elements of a conversation's list; `None` for another field, and where white space
    /// stands between the list's tokens.
    pub fn compact_elements(&self, name: &str) -> Option<&[u32]> {
        let field = &self.fields[self.position(name)?];
        let is_short = u32::try_from(self.body.len()).is_ok();
        let is_compact = field.list_end.is_some_and(|end| end.is_compact) && !field.element_ends.is_empty();
        (is_compact && is_short).then_some(&field.element_ends[..])
    }

    /// Returns the number of elements of the field's list; 0 where it is none.
    pub fn elements(&self, name: &str) -> usize {
        self.position(name).and_then(|position| self.fields[position].list_end).map_or(0, |end| end.elements)
    }

    /// Returns whether any occurrence of the field is not null, also one that a later one overrides.
    pub fn has_any(&self, name: &str) -> bool {
        self.positions(name).any(|position| self.body[self.fields[position].value.clone()] != b"null"[..])
    }

    fn position(&self, name: &str) -> Option<usize> {
        self.positions(name).last()
    }

    fn positions<'a>(&'a self, name: &'a str) -> impl Iterator<Item = usize> + 'a {
        (0..self.fields.len()).filter(move |position| self.is_named(&self.fields[*position], name))
    }

    /// Compares unescaped names, as a JSON parser does.
    fn is_named(&self, field: &FieldSpan, name: &str) -> bool {
        let written = &self.body[field.name.clone()];
        if written.len() == name.len() {
            count_visited(name.len());
            return written == name.as_bytes();
        }
        // Called often, and names may be as long as a body: names that cannot match by their length are not decoded.
        let may_be_it = (name.len() + 1..=name.len() * MAX_ESCAPE).contains(&written.len());
        may_be_it && written.contains(&b'\\') && self.read_name(field).is_some_and(|read| read == name)
    }

    /// Unescapes a name; None if it is not valid text.
    fn read_name(&self, field: &FieldSpan) -> Option<String> {
        serde_json::from_slice(&self.body[field.name.start - 1..field.name.end + 1]).ok()
    }
}

/// Adds a field, unless there are too many or its name is too long.
fn push(fields: &mut Vec<FieldSpan>, field: FieldSpan) -> Result<(), JsonError> {
    if field.name.len() > MAX_NAME {
        return Err(JsonError::LongName { offset: field.name.start, max: MAX_NAME });
    }
    if fields.len() == MAX_FIELDS {
        return Err(JsonError::TooManyFields { max: MAX_FIELDS });
    }
    fields.push(field);
    Ok(())
}

/// Returns whether both bodies begin with the same `length` bytes, and `body` has no more of the value that ends there:
/// a number may go on.
fn is_same_up_to(body: &[u8], known: &[u8], length: usize) -> bool {
    let ends = |byte: &u8| matches!(byte, b',' | b']' | b' ' | b'\t' | b'\n' | b'\r');
    count_visited(length);
    body.get(length).is_some_and(ends) && body[..length] == known[..length]
}

/// The beginning that a body shares with a known one, up to the end of the last element of a list.
#[derive(Clone, Debug)]
pub struct BodyGrowth {
    known: Arc<ScannedJson>,
    position: usize,
    end: ListEnd,
}

impl BodyGrowth {
    /// Returns the offset up to which the bodies are equal.
    pub fn end(&self) -> usize {
        self.end.offset
    }
}

/// Builder of a changed body. Fields that are not mentioned keep their bytes.
#[derive(Debug)]
pub struct JsonSplice<'a> {
    fields: &'a ScannedJson,
    replaced: Vec<(usize, Option<Cow<'a, [u8]>>)>,
    appended: Vec<(&'static str, Cow<'a, [u8]>)>,
}

impl<'a> JsonSplice<'a> {
    /// Starts from a scanned body.
    pub fn new(fields: &'a ScannedJson) -> Self {
        Self { fields, replaced: Vec::new(), appended: Vec::new() }
    }

    /// Sets the field, in its place or at the end. `value` must be JSON text, `name` must need no escapes.
    pub fn set(&mut self, name: &'static str, value: impl Into<Cow<'a, [u8]>>) {
        let value = value.into();
        match self.fields.position(name) {
            Some(last) => {
                self.remove(name);
                self.replaced.retain(|(position, _)| *position != last);
                self.replaced.push((last, Some(value)));
            }
            None => {
                self.appended.retain(|(appended, _)| *appended != name);
                self.appended.push((name, value));
            }
        }
    }

    /// Removes all occurrences of the field; returns whether there were any.
    pub fn remove(&mut self, name: &str) -> bool {
        let places: Vec<usize> = self.fields.positions(name).collect();
        self.replaced.retain(|(position, _)| !places.contains(position));
        self.replaced.extend(places.iter().map(|position| (*position, None)));
        self.appended.retain(|(appended, _)| *appended != name);
        !places.is_empty()
    }

    /// Returns the new body as one text; the original bytes if nothing changed.
    pub fn finish(self) -> Bytes {
        self.chunks().into_bytes()
    }

    /// Returns the new body in chunks: what is long and unchanged shares the memory of the original.
    pub fn chunks(self) -> LegBody {
        let ScannedJson { body, open, fields, .. } = self.fields;
        if self.replaced.is_empty() && self.appended.is_empty() {
            return LegBody::shared(body.clone());
        }
        let mut out = ChunkWriter::new(body);
        out.keep(0..fields.first().map_or(*open, |first| first.name.start - 1));
        let mut written = false;
        for (position, field) in fields.iter().enumerate() {
            let value = match self.replaced.iter().find(|(replaced, _)| *replaced == position) {
                Some((_, None)) => continue,
                Some((_, Some(value))) => Some(value),
                None => None,
            };
            if written {
                // What separates this field from the one before: a comma and the client's whitespace.
                out.keep(fields[position - 1].value.end..field.name.start - 1);
            }
            out.keep(field.name.start - 1..field.value.start);
            match value {
                Some(value) => out.add(value),
                None => out.keep(field.value.clone()),
            }
            written = true;
        }
        for (name, value) in &self.appended {
            out.add(if written { b",\"" } else { b"\"" });
            out.add(name.as_bytes());
            out.add(b"\":");
            out.add(value);
            written = true;
        }
        out.keep(fields.last().map_or(*open, |last| last.value.end)..body.len());
        out.finish()
    }
}

/// Least length in bytes of an unchanged part that becomes a chunk of its own; a shorter one is copied, which costs less
/// than a chunk.
const MIN_SHARED: usize = 16 << 10;

/// Writer of a body of copied and shared parts.
struct ChunkWriter<'a> {
    body: &'a Bytes,
    /// Unchanged bytes that are not written yet.
    run: Range<usize>,
    /// Copied bytes that are no chunk yet.
    copied: Vec<u8>,
    chunks: LegBody,
}

impl<'a> ChunkWriter<'a> {
    fn new(body: &'a Bytes) -> Self {
        let room = if body.len() < MIN_SHARED { body.len() + 256 } else { 1 << 10 };
        Self { body, run: 0..0, copied: Vec::with_capacity(room), chunks: LegBody::default() }
    }

    /// Adds a part of the original.
    fn keep(&mut self, part: Range<usize>) {
        if part.start != self.run.end {
            self.end_run();
            self.run = part;
            return;
        }
        self.run.end = part.end;
    }

    fn add(&mut self, bytes: &[u8]) {
        self.end_run();
        self.copied.extend_from_slice(bytes);
    }

    fn end_run(&mut self) {
        let run = std::mem::take(&mut self.run);
        if run.len() < MIN_SHARED {
            self.copied.extend_from_slice(&self.body[run]);
            return;
        }
        self.end_copied();
        self.chunks.chunks.push(self.body.slice(run));
    }

    fn end_copied(&mut self) {
        if !self.copied.is_empty() {
            self.chunks.copied += self.copied.len();
            self.chunks.chunks.push(std::mem::take(&mut self.copied).into());
        }
    }

    fn finish(mut self) -> LegBody {
        self.end_run();
        self.end_copied();
        self.chunks
    }
}

/// A body for a worker, in chunks that are sent one after the other.
#[derive(Clone, Debug, Default)]
pub struct LegBody {
    chunks: Vec<Bytes>,
    /// Bytes in memory of its own; the others share the memory of the client's body.
    copied: usize,
}

impl LegBody {
    /// Returns the chunks.
    pub fn into_chunks(self) -> Vec<Bytes> {
        self.chunks
    }

    /// Returns how many bytes have memory of their own.
    pub fn copied_bytes(&self) -> usize {
        self.copied
    }

    /// Returns the text, copied where it has several chunks.
    pub fn into_bytes(mut self) -> Bytes {
        match self.chunks.len() {
            0 | 1 => self.chunks.pop().unwrap_or_default(),
            _ => self.chunks.concat().into(),
        }
    }

    /// Replaces the last chunk, which is dropped last, by what `wrap` makes of it; `wrap` must keep the bytes.
    pub fn map_last(mut self, wrap: impl FnOnce(Bytes) -> Bytes) -> Self {
        if let Some(last) = self.chunks.last_mut() {
            *last = wrap(std::mem::take(last));
        }
        self
    }

    /// A body that shares the memory of the client's.
    pub fn shared(body: Bytes) -> Self {
        Self { chunks: vec![body], copied: 0 }
    }
}

impl From<String> for LegBody {
    fn from(text: String) -> Self {
        Bytes::from(text).into()
    }
}

/// A body with memory of its own.
impl From<Bytes> for LegBody {
    fn from(body: Bytes) -> Self {
        Self { copied: body.len(), chunks: vec![body] }
    }
}

#[cfg(test)]
mod tests;
