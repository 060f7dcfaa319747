//! Strict JSON validator that walks the text once. It stores no values; of what it passes it notes what later steps ask
//! for, so that none of them walks the text again.

use std::ops::Range;

use vocabulary::count_visited;

/// Maximum nesting depth.
pub(super) const MAX_DEPTH: u32 = 128;
/// Maximum number of values in a text, names not counted. A prompt of a million token ids has a million.
pub(super) const MAX_VALUES: usize = 2 << 20;

/// Why a body is not an acceptable JSON object.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum JsonError {
    /// Not UTF-8.
    #[error("byte {offset} is not UTF-8")]
    NotUtf8 {
        /// Byte offset.
        offset: usize,
    },
    /// An unexpected or missing token.
    #[error("byte {offset}: expected {expected}")]
    Syntax {
        /// Byte offset.
        offset: usize,
        /// What is allowed there.
        expected: &'static str,
    },
    /// Values are nested too deep.
    #[error("byte {offset}: nested deeper than {MAX_DEPTH} levels")]
    TooDeep {
        /// Byte offset.
        offset: usize,
    },
    /// A field that matters here occurs twice; engine and router could read different ones.
    #[error("the field {name:?} stands twice")]
    Duplicate {
        /// Its name.
        name: String,
    },
    /// A field name longer than any that engines use.
    #[error("byte {offset}: a field's name has more than {max} bytes")]
    LongName {
        /// Byte offset.
        offset: usize,
        /// Maximum length in bytes.
        max: usize,
    },
    /// More values than any legitimate request has: a parsed tree would need many times the memory of the text.
    #[error("byte {offset}: more than {MAX_VALUES} values")]
    TooManyValues {
        /// Byte offset.
        offset: usize,
    },
    /// More fields than any legitimate request has.
    #[error("more than {max} fields")]
    TooManyFields {
        /// Maximum number of fields.
        max: usize,
    },
}

/// Positions of one field in the text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct FieldSpan {
    /// The name without its quotes, still escaped.
    pub(super) name: Range<usize>,
    pub(super) value: Range<usize>,
    pub(super) strings: StringFacts,
    /// Whether no white space stands between the value's tokens.
    pub(super) is_compact: bool,
    /// The end of its elements, if the value is a list that has some.
    pub(super) list_end: Option<ListEnd>,
    /// Offsets after the elements of a list of messages, which are objects.
    pub(super) element_ends: Vec<u32>,
}

/// What the strings of a value say, at any depth.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct StringFacts {
    /// Whether one may be a name of a media part.
    pub(super) names_media: bool,
    /// Whether one may be the name of a media part's id.
    pub(super) names_media_id: bool,
}

impl StringFacts {
    /// Returns the union of both.
    pub(super) fn or(self, other: Self) -> Self {
        Self {
            names_media: self.names_media || other.names_media,
            names_media_id: self.names_media_id || other.names_media_id,
        }
    }
}

/// The end of a list's last element: there the walk of a text goes on that has the same beginning and a longer list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ListEnd {
    /// Offset after the last element.
    pub(super) offset: usize,
    /// Number of elements.
    pub(super) elements: usize,
    /// Values of the text up to there.
    values: usize,
    /// How many of these are objects or arrays.
    containers: usize,
    /// Whether no white space stands between the list's tokens up to there.
    pub(super) is_compact: bool,
}

/// Length in bytes of an escape of four hexadecimal digits, which decodes to at least one byte.
pub(super) const MAX_ESCAPE: usize = 6;

/// Names of the lists whose element ends are noted: conversations.
const CONVERSATIONS: [&[u8]; 2] = [b"messages", b"input"];

/// A cursor over a text.
pub(super) struct JsonWalker<'a> {
    bytes: &'a [u8],
    /// Where the walk began.
    start: usize,
    at: usize,
    values: usize,
    containers: usize,
    /// Bytes of white space between tokens.
    spaces: usize,
    /// What the strings of the current field say.
    strings: StringFacts,
    /// The list that ended last.
    list: WalkedList,
    /// Whether the next list's element ends are noted.
    notes_ends: bool,
}

/// A list that was walked.
#[derive(Default)]
struct WalkedList {
    elements: usize,
    /// Offset after the last element.
    end: usize,
    is_compact: bool,
    element_ends: Vec<u32>,
}

impl<'a> JsonWalker<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self::at(bytes, 0)
    }

    /// Starts at `offset`; what is before was walked in another text.
    fn at(bytes: &'a [u8], offset: usize) -> Self {
        let (strings, list) = (StringFacts::default(), WalkedList::default());
        Self { bytes, start: offset, at: offset, values: 0, containers: 0, spaces: 0, strings, list, notes_ends: false }
    }

    fn peek(&self) -> u8 {
        // A zero byte is no JSON token, so it also marks the end of the text.
        self.bytes.get(self.at).copied().unwrap_or(0)
    }

    fn syntax_error<T>(&self, expected: &'static str) -> Result<T, JsonError> {
        Err(JsonError::Syntax { offset: self.at, expected })
    }

    fn skip_space(&mut self) {
        while matches!(self.peek(), b' ' | b'\n' | b'\r' | b'\t') {
            self.at += 1;
            self.spaces += 1;
        }
    }

    /// Returns the error of a text that is not UTF-8, which goes before any other.
    fn invalid_text(bytes: &[u8], error: JsonError) -> JsonError {
        count_visited(bytes.len());
        match simdutf8::compat::from_utf8(bytes) {
            Err(error) => JsonError::NotUtf8 { offset: error.valid_up_to() },
            Ok(_) => error,
        }
    }

    /// Walks the text, which must be exactly one object, and calls `field` for each of its fields. Returns the offset
    /// after the opening brace, the number of values, and how many of them are objects or arrays.
    pub(super) fn whole_object(
        self,
        mut field: impl FnMut(FieldSpan) -> Result<(), JsonError>,
    ) -> Result<(usize, usize, usize), JsonError> {
        let bytes = self.bytes;
        self.walk_whole(&mut field).map_err(|error| Self::invalid_text(bytes, error))
    }

    fn walk_whole(
        mut self,
        field: &mut dyn FnMut(FieldSpan) -> Result<(), JsonError>,
    ) -> Result<(usize, usize, usize), JsonError> {
        self.skip_space();
        if self.peek() != b'{' {
            return self.syntax_error("an object");
        }
        let open = self.at + 1;
        self.object(MAX_DEPTH, field)?;
        let (values, containers) = self.end_of_text()?;
        Ok((open, values, containers))
    }

    /// Walks the rest of a text whose beginning was walked before, as part of a text with the same bytes up to the end
    /// of `list`, a field at the top level. Calls `field` for that field and each one after it. Returns the number of
    /// values of the whole text, and how many of them are objects or arrays.
    pub(super) fn rest_of_object(
        bytes: &'a [u8],
        list: (&FieldSpan, ListEnd),
        mut field: impl FnMut(FieldSpan) -> Result<(), JsonError>,
    ) -> Result<(usize, usize), JsonError> {
        Self::walk_rest(bytes, list, &mut field).map_err(|error| Self::invalid_text(bytes, error))
    }

    fn walk_rest(
        bytes: &'a [u8],
        (list, end): (&FieldSpan, ListEnd),
        field: &mut dyn FnMut(FieldSpan) -> Result<(), JsonError>,
    ) -> Result<(usize, usize), JsonError> {
        let mut walker = Self::at(bytes, end.offset);
        (walker.values, walker.containers) = (end.values, end.containers);
        let in_object = walker.enter_nested(MAX_DEPTH)?;
        let known_ends = list.element_ends.clone();
        if walker.is_followed(b']', "a comma or a closing bracket")? {
            let spaces = end.is_compact.then_some(0);
            let ends = (known_ends.len() == end.elements).then_some(known_ends);
            walker.list_elements(in_object - 1, (end.elements, spaces), ends)?;
        } else {
            let ListEnd { elements, offset, is_compact, .. } = end;
            walker.list = WalkedList { elements, end: offset, is_compact, element_ends: known_ends };
        }
        field(FieldSpan {
            name: list.name.clone(),
            value: list.value.start..walker.at,
            strings: list.strings.or(walker.strings),
            is_compact: end.is_compact && walker.spaces == 0,
            list_end: walker.list_end(),
            element_ends: std::mem::take(&mut walker.list.element_ends),
        })?;
        if walker.is_followed(b'}', "a comma or a closing brace")? {
            walker.members(in_object, field)?;
        }
        walker.end_of_text()
    }

    fn end_of_text(mut self) -> Result<(usize, usize), JsonError> {
        self.skip_space();
        count_visited(self.at - self.start);
        if self.at < self.bytes.len() {
            return self.syntax_error("the end of the body");
        }
        Ok((self.values, self.containers))
    }

    /// Walks over a comma or the closing `end` after an element; returns whether it was a comma.
    fn is_followed(&mut self, end: u8, expected: &'static str) -> Result<bool, JsonError> {
        self.skip_space();
        let next = self.peek();
        if next != b',' && next != end {
            return self.syntax_error(expected);
        }
        self.at += 1;
        Ok(next == b',')
    }

    fn list_end(&self) -> Option<ListEnd> {
        let Self { list: WalkedList { elements, end: offset, is_compact, .. }, values, containers, .. } = *self;
        (elements > 0).then_some(ListEnd { offset, elements, values, containers, is_compact })
    }

    fn object(
        &mut self,
        depth: u32,
        field: &mut dyn FnMut(FieldSpan) -> Result<(), JsonError>,
    ) -> Result<(), JsonError> {
        let depth = self.enter_nested(depth)?;
        self.at += 1;
        self.skip_space();
        if self.peek() == b'}' {
            self.at += 1;
            return Ok(());
        }
        self.members(depth, field)
    }

    /// Walks the fields of an object from a name on, its end included.
    fn members(
        &mut self,
        depth: u32,
        field: &mut dyn FnMut(FieldSpan) -> Result<(), JsonError>,
    ) -> Result<(), JsonError> {
        loop {
            self.skip_space();
            if self.peek() != b'"' {
                return self.syntax_error("a field name in double quotes");
            }
            let start = self.at;
            self.string()?;
            let name = start + 1..self.at - 1;
            self.skip_space();
            if self.peek() != b':' {
                return self.syntax_error("a colon");
            }
            self.at += 1;
            self.skip_space();
            let (start, spaces) = (self.at, self.spaces);
            // Only the fields of the whole object are reported; those inside add to what their field says.
            let is_top = depth + 1 == MAX_DEPTH;
            if is_top {
                self.strings = StringFacts::default();
                self.notes_ends = CONVERSATIONS.contains(&&self.bytes[name.clone()]);
            }
            self.value(depth)?;
            if is_top {
                self.notes_ends = false;
                let is_list = self.bytes.get(start) == Some(&b'[');
                field(FieldSpan {
                    name,
                    value: start..self.at,
                    strings: self.strings,
                    is_compact: self.spaces == spaces,
                    list_end: if is_list { self.list_end() } else { None },
                    element_ends: if is_list { std::mem::take(&mut self.list.element_ends) } else { Vec::new() },
                })?;
            }
            if !self.is_followed(b'}', "a comma or a closing brace")? {
                return Ok(());
            }
        }
    }

    fn array(&mut self, depth: u32) -> Result<(), JsonError> {
        let depth = self.enter_nested(depth)?;
        let (spaces, ends) = (self.spaces, std::mem::take(&mut self.notes_ends).then(Vec::new));
        self.at += 1;
        self.skip_space();
        if self.peek() == b']' {
            self.at += 1;
            self.list = WalkedList::default();
            return Ok(());
        }
        self.list_elements(depth, (0, Some(spaces)), ends)
    }

    /// Walks the elements of a list after the first `elements`, its end included. `spaces`: how many there were before
    /// the list; `None` where some stand in what was walked of it before.
    fn list_elements(
        &mut self,
        depth: u32,
        (mut elements, spaces): (usize, Option<usize>),
        mut ends: Option<Vec<u32>>,
    ) -> Result<(), JsonError> {
        loop {
            self.skip_space();
            let is_message = self.peek() == b'{';
            self.value(depth)?;
            elements += 1;
            let (end, is_compact) = (self.at, Some(self.spaces) == spaces);
            if let Some(ends) = &mut ends {
                // Bodies are shorter by their limit; of a longer one no end is used.
                ends.push(u32::try_from(end).unwrap_or(u32::MAX));
            }
            // A list of token ids would have as many ends as bytes.
            ends = ends.filter(|_| is_message);
            if !self.is_followed(b']', "a comma or a closing bracket")? {
                let mut element_ends = ends.unwrap_or_default();
                element_ends.shrink_to_fit();
                self.list = WalkedList { elements, end, is_compact, element_ends };
                return Ok(());
            }
        }
    }

    fn enter_nested(&self, depth: u32) -> Result<u32, JsonError> {
        depth.checked_sub(1).ok_or(JsonError::TooDeep { offset: self.at })
    }

    fn value(&mut self, depth: u32) -> Result<(), JsonError> {
        self.values += 1;
        if self.values > MAX_VALUES {
            return Err(JsonError::TooManyValues { offset: self.at });
        }
        self.containers += usize::from(matches!(self.peek(), b'{' | b'['));
        match self.peek() {
            b'"' => self.string(),
            b'{' => self.object(depth, &mut |_| Ok(())),
            b'[' => self.array(depth),
            b'-' | b'0'..=b'9' => self.number(),
            b't' => self.literal(b"true"),
            b'f' => self.literal(b"false"),
            b'n' => self.literal(b"null"),
            _ => self.syntax_error("a value"),
        }
    }

    fn literal(&mut self, word: &'static [u8]) -> Result<(), JsonError> {
        if !self.bytes[self.at..].starts_with(word) {
            return self.syntax_error("a value");
        }
        self.at += word.len();
        Ok(())
    }

    fn digits(&mut self) -> Result<(), JsonError> {
        if !self.peek().is_ascii_digit() {
            return self.syntax_error("a digit");
        }
        while self.peek().is_ascii_digit() {
            self.at += 1;
        }
        Ok(())
    }

    fn number(&mut self) -> Result<(), JsonError> {
        if self.peek() == b'-' {
            self.at += 1;
        }
        if self.peek() == b'0' {
            self.at += 1;
        } else {
            self.digits()?;
        }
        if self.peek() == b'.' {
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.peek(), b'e' | b'E') {
            self.at += 1;
            if matches!(self.peek(), b'+' | b'-') {
                self.at += 1;
            }
            self.digits()?;
        }
        Ok(())
    }

    fn string(&mut self) -> Result<(), JsonError> {
        self.at += 1;
        let (start, mut is_ascii, mut has_escaped_ascii) = (self.at, true, false);
        loop {
            let plain = PlainRun::of(&self.bytes[self.at..]);
            self.at += plain.length;
            is_ascii &= plain.is_ascii;
            match self.bytes.get(self.at) {
                Some(b'"') => break,
                Some(b'\\') => {
                    has_escaped_ascii |= self.bytes[self.at..].starts_with(b"\\u00");
                    self.escape()?;
                }
                Some(_) => return self.syntax_error("an escape in place of a control character"),
                None => return self.syntax_error("a closing double quote"),
            }
        }
        let text = &self.bytes[start..self.at];
        // Whatever stands outside of strings is ASCII.
        if !is_ascii {
            count_visited(text.len());
            simdutf8::basic::from_utf8(text).map_err(|_| JsonError::NotUtf8 { offset: start })?;
        }
        self.strings = self.strings.or(StringFacts {
            names_media: may_name_media(text),
            // An escaped name has such an escape in it, and six bytes for each letter at most.
            names_media_id: text == b"uuid" || (has_escaped_ascii && text.len() <= 4 * MAX_ESCAPE),
        });
        self.at += 1;
        Ok(())
    }

    /// Validates an escape. Lone surrogates are accepted: how to read them is up to the engine.
    fn escape(&mut self) -> Result<(), JsonError> {
        self.at += 1;
        match self.peek() {
            b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => self.at += 1,
            b'u' => {
                let hex = self.bytes.get(self.at + 1..self.at + 5).unwrap_or_default();
                if hex.len() < 4 || !hex.iter().all(u8::is_ascii_hexdigit) {
                    return self.syntax_error("four hexadecimal digits");
                }
                self.at += 5;
            }
            _ => return self.syntax_error("an escape"),
        }
        Ok(())
    }
}

/// Returns whether a string is the name of a message part that is not text, such as `image_url`, or may be one: engines
/// have more of them with each version, so the beginnings and the end of names are compared.
fn may_name_media(string: &[u8]) -> bool {
    const BEGINNINGS: [&[u8]; 5] = [b"image", b"audio", b"video", b"input_", b"file"];
    string.ends_with(b"_url") || BEGINNINGS.iter().any(|beginning| string.starts_with(beginning))
}

/// Bytes that are neither quote, backslash nor control character.
struct PlainRun {
    length: usize,
    /// `false` if one of them may not be ASCII.
    is_ascii: bool,
}

impl PlainRun {
    /// Measures the run at the beginning. Checks eight bytes at a time, and 32 in a long run.
    fn of(bytes: &[u8]) -> Self {
        const ONES: u64 = 0x0101_0101_0101_0101;
        const HIGHS: u64 = 0x8080_8080_8080_8080;
        // The usual zero-byte test (SWAR). False positives occur only above a true one, so the lowest set bit is exact.
        let zeros = |word: u64| word.wrapping_sub(ONES) & !word & HIGHS;
        let stop = |byte: &u8| matches!(byte, b'"' | b'\\' | 0..0x20);
        let (mut at, mut highs) = (0, 0);
        while let Some(chunk) = bytes.get(at..).and_then(|rest| rest.first_chunk::<8>()) {
            let word = u64::from_le_bytes(*chunk);
            let quotes = zeros(word ^ (ONES * u64::from(b'"')));
            let backslashes = zeros(word ^ (ONES * u64::from(b'\\')));
            let controls = word.wrapping_sub(ONES * 0x20) & !word & HIGHS;
            let stops = quotes | backslashes | controls;
            highs |= word & HIGHS;
            if stops != 0 {
                return Self { length: at + stops.trailing_zeros() as usize / 8, is_ascii: highs == 0 };
            }
            at += 8;
            // In a long string the compiler's vector instructions are faster.
            while let Some(chunk) = bytes.get(at..).and_then(|rest| rest.first_chunk::<32>())
                && !chunk.iter().fold(false, |stops, byte| stops | stop(byte))
            {
                highs |= u64::from(chunk.iter().fold(0, |all, byte| all | byte) & 0x80);
                at += 32;
            }
        }
        let rest = bytes[at..].iter().position(stop).unwrap_or(bytes.len() - at);
        let is_ascii = highs == 0 && bytes[at..at + rest].is_ascii();
        Self { length: at + rest, is_ascii }
    }
}

#[cfg(test)]
mod tests;
