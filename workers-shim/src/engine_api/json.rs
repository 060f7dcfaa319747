//! Strict JSON validator that walks the text once. It stores no values and allocates nothing, whatever the text
//! contains.

use std::ops::Range;

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
    /// Whether a string in the value may be a name of a media part.
    pub(super) names_media: bool,
    /// The end of its elements, if the value is a list that has some.
    pub(super) list_end: Option<ListEnd>,
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
}

/// A cursor over text that is known to be UTF-8.
pub(super) struct JsonWalker<'a> {
    bytes: &'a [u8],
    at: usize,
    values: usize,
    containers: usize,
    /// Strings so far that may be names of media parts.
    media_names: usize,
    /// Number of elements of the list that ended last.
    elements: usize,
    /// Offset after the last element of the list that ended last.
    elements_end: usize,
}

impl<'a> JsonWalker<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Result<Self, JsonError> {
        Self::at(bytes, 0)
    }

    /// Starts at `offset`, up to which the text is known to be UTF-8.
    fn at(bytes: &'a [u8], offset: usize) -> Result<Self, JsonError> {
        simdutf8::compat::from_utf8(&bytes[offset..])
            .map_err(|error| JsonError::NotUtf8 { offset: offset + error.valid_up_to() })?;
        Ok(Self { bytes, at: offset, values: 0, containers: 0, media_names: 0, elements: 0, elements_end: 0 })
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
        }
    }

    /// Walks the text, which must be exactly one object, and calls `field` for each of its fields. Returns the offset
    /// after the opening brace, the number of values, and how many of them are objects or arrays.
    pub(super) fn whole_object(
        mut self,
        mut field: impl FnMut(FieldSpan) -> Result<(), JsonError>,
    ) -> Result<(usize, usize, usize), JsonError> {
        self.skip_space();
        if self.peek() != b'{' {
            return self.syntax_error("an object");
        }
        let open = self.at + 1;
        self.object(MAX_DEPTH, &mut field)?;
        let (values, containers) = self.end_of_text()?;
        Ok((open, values, containers))
    }

    /// Walks the rest of a text whose beginning was walked before, as part of a text with the same bytes up to the end
    /// of `list`, a field at the top level. Calls `field` for that field and each one after it. Returns the number of
    /// values of the whole text, and how many of them are objects or arrays.
    pub(super) fn rest_of_object(
        bytes: &'a [u8],
        (list, end): (&FieldSpan, ListEnd),
        mut field: impl FnMut(FieldSpan) -> Result<(), JsonError>,
    ) -> Result<(usize, usize), JsonError> {
        let mut walker = Self::at(bytes, end.offset)?;
        (walker.values, walker.containers) = (end.values, end.containers);
        (walker.elements, walker.elements_end) = (end.elements, end.offset);
        let in_object = walker.enter_nested(MAX_DEPTH)?;
        if walker.is_followed(b']', "a comma or a closing bracket")? {
            walker.list_elements(in_object - 1, end.elements)?;
        }
        field(FieldSpan {
            name: list.name.clone(),
            value: list.value.start..walker.at,
            names_media: list.names_media || walker.media_names > 0,
            list_end: walker.list_end(),
        })?;
        if walker.is_followed(b'}', "a comma or a closing brace")? {
            walker.members(in_object, &mut field)?;
        }
        walker.end_of_text()
    }

    fn end_of_text(mut self) -> Result<(usize, usize), JsonError> {
        self.skip_space();
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
        let Self { elements_end: offset, elements, values, containers, .. } = *self;
        (elements > 0).then_some(ListEnd { offset, elements, values, containers })
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
            let (start, media_names) = (self.at, self.media_names);
            self.value(depth)?;
            let is_list = self.bytes.get(start) == Some(&b'[');
            field(FieldSpan {
                name,
                value: start..self.at,
                names_media: self.media_names > media_names,
                list_end: if is_list { self.list_end() } else { None },
            })?;
            if !self.is_followed(b'}', "a comma or a closing brace")? {
                return Ok(());
            }
        }
    }

    fn array(&mut self, depth: u32) -> Result<(), JsonError> {
        let depth = self.enter_nested(depth)?;
        self.at += 1;
        self.skip_space();
        self.elements = 0;
        if self.peek() == b']' {
            self.at += 1;
            return Ok(());
        }
        self.list_elements(depth, 0)
    }

    /// Walks the elements of a list after the first `elements`, its end included.
    fn list_elements(&mut self, depth: u32, mut elements: usize) -> Result<(), JsonError> {
        loop {
            self.skip_space();
            self.value(depth)?;
            elements += 1;
            let end = self.at;
            if !self.is_followed(b']', "a comma or a closing bracket")? {
                (self.elements, self.elements_end) = (elements, end);
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
        let start = self.at;
        loop {
            self.at += plain_length(&self.bytes[self.at..]);
            match self.bytes.get(self.at) {
                Some(b'"') => break,
                Some(b'\\') => self.escape()?,
                Some(_) => return self.syntax_error("an escape in place of a control character"),
                None => return self.syntax_error("a closing double quote"),
            }
        }
        self.media_names += usize::from(may_name_media(&self.bytes[start..self.at]));
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

/// Returns how many bytes from here on are neither quote, backslash nor control character. Checks eight bytes at a
/// time, and 32 in a long run of them.
fn plain_length(bytes: &[u8]) -> usize {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const HIGHS: u64 = 0x8080_8080_8080_8080;
    // The usual zero-byte test (SWAR). False positives occur only above a true one, so the lowest set bit is exact.
    let zeros = |word: u64| word.wrapping_sub(ONES) & !word & HIGHS;
    let stop = |byte: &u8| matches!(byte, b'"' | b'\\' | 0..0x20);
    let mut at = 0;
    while let Some(chunk) = bytes.get(at..).and_then(|rest| rest.first_chunk::<8>()) {
        let word = u64::from_le_bytes(*chunk);
        let quotes = zeros(word ^ (ONES * u64::from(b'"')));
        let backslashes = zeros(word ^ (ONES * u64::from(b'\\')));
        let controls = word.wrapping_sub(ONES * 0x20) & !word & HIGHS;
        let stops = quotes | backslashes | controls;
        if stops != 0 {
            return at + stops.trailing_zeros() as usize / 8;
        }
        at += 8;
        // In a long string the compiler's vector instructions are faster.
        while let Some(chunk) = bytes.get(at..).and_then(|rest| rest.first_chunk::<32>())
            && !chunk.iter().fold(false, |stops, byte| stops | stop(byte))
        {
            at += 32;
        }
    }
    at + bytes[at..].iter().position(stop).unwrap_or(bytes.len() - at)
}

#[cfg(test)]
mod tests;
