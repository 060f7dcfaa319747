//! Locates the top-level fields of a JSON object, and builds new bodies by replacing some of them.

use std::borrow::Cow;
use std::ops::Range;

use bytes::Bytes;

use super::json::{FieldSpan, JsonError, JsonWalker};

/// Maximum number of fields at the top level.
const MAX_FIELDS: usize = 1024;

/// Maximum length of a top-level field's name in bytes.
const MAX_NAME: usize = 4096;
/// Length of `\uXXXX`, which decodes to at least one byte.
const MAX_ESCAPE: usize = 6;

/// A validated body that is one JSON object, with the positions of its top-level fields.
#[derive(Clone, Debug)]
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
        let (open, values, containers) = JsonWalker::new(&body)?.whole_object(|field| {
            if field.name.len() > MAX_NAME {
                return Err(JsonError::LongName { offset: field.name.start, max: MAX_NAME });
            }
            if fields.len() == MAX_FIELDS {
                return Err(JsonError::TooManyFields { max: MAX_FIELDS });
            }
            fields.push(field);
            Ok(())
        })?;
        let scanned = Self { body, open, values, containers, fields };
        match relied.iter().find(|name| scanned.positions(name).nth(1).is_some()) {
            Some(name) => Err(JsonError::Duplicate { name: (*name).to_owned() }),
            None => Ok(scanned),
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
        serde_json::from_slice::<Option<T>>(self.get(name)?).ok().flatten()
    }

    /// Returns whether the field is present and not null.
    pub fn has(&self, name: &str) -> bool {
        self.get(name).is_some_and(|value| value != b"null")
    }

    /// Returns whether a string in the field's value, at any depth, is the name of a message part that is not text, or
    /// may be one.
    pub fn names_media(&self, name: &str) -> bool {
        self.positions(name).any(|position| self.fields[position].names_media)
    }

    /// Returns the number of elements of the field's list; 0 where it is none.
    pub fn elements(&self, name: &str) -> usize {
        self.position(name).map_or(0, |position| self.fields[position].elements)
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
        if written == name.as_bytes() {
            return true;
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

    /// Returns the new body; the original bytes if nothing changed.
    pub fn finish(self) -> Bytes {
        let ScannedJson { body, open, fields, .. } = self.fields;
        if self.replaced.is_empty() && self.appended.is_empty() {
            return body.clone();
        }
        let added: usize = self.replaced.iter().filter_map(|(_, value)| value.as_ref()).map(|value| value.len()).sum();
        let appended: usize = self.appended.iter().map(|(name, value)| name.len() + value.len() + 4).sum();
        let mut out = Vec::with_capacity(body.len() + added + appended);
        out.extend_from_slice(&body[..fields.first().map_or(*open, |first| first.name.start - 1)]);
        let mut written = false;
        for (position, field) in fields.iter().enumerate() {
            let value = match self.replaced.iter().find(|(replaced, _)| *replaced == position) {
                Some((_, None)) => continue,
                Some((_, Some(value))) => &**value,
                None => &body[field.value.clone()],
            };
            if written {
                // What separates this field from the one before: a comma and the client's whitespace.
                out.extend_from_slice(&body[fields[position - 1].value.end..field.name.start - 1]);
            }
            out.extend_from_slice(&body[field.name.start - 1..field.value.start]);
            out.extend_from_slice(value);
            written = true;
        }
        for (name, value) in &self.appended {
            out.extend_from_slice(if written { b",\"" } else { b"\"" });
            out.extend_from_slice(name.as_bytes());
            out.extend_from_slice(b"\":");
            out.extend_from_slice(value);
            written = true;
        }
        out.extend_from_slice(&body[fields.last().map_or(*open, |last| last.value.end)..]);
        out.into()
    }
}

#[cfg(test)]
mod tests;
