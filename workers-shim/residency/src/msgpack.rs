//! A strict msgpack reader for a byte slice. Every length is checked against the remaining bytes before it is used.

use crate::decode::DecodeError;

/// Maximum nesting of skipped values.
const MAX_DEPTH: u32 = 16;

/// The next value, with its head already read.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum MsgpackItem<'a> {
    Nil,
    Bool(bool),
    Unsigned(u64),
    Negative(i64),
    Float(f64),
    Text(&'a [u8]),
    Bytes(&'a [u8]),
    Array(u32),
    Map(u32),
    Extension,
}

/// A position in a message.
#[derive(Clone, Copy)]
pub(crate) struct MsgpackCursor<'a> {
    rest: &'a [u8],
}

impl<'a> MsgpackCursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(crate) fn remaining(&self) -> usize {
        self.rest.len()
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], DecodeError> {
        let (head, rest) = self.rest.split_at_checked(count).ok_or(DecodeError::Truncated)?;
        self.rest = rest;
        Ok(head)
    }

    /// Reads a big-endian number of `N` bytes.
    fn number<const N: usize>(&mut self) -> Result<u64, DecodeError> {
        let (head, rest) = self.rest.split_first_chunk::<N>().ok_or(DecodeError::Truncated)?;
        self.rest = rest;
        Ok(head.iter().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }

    fn text<const N: usize>(&mut self) -> Result<MsgpackItem<'a>, DecodeError> {
        let length = self.number::<N>()? as usize;
        Ok(MsgpackItem::Text(self.take(length)?))
    }

    fn bytes<const N: usize>(&mut self) -> Result<MsgpackItem<'a>, DecodeError> {
        let length = self.number::<N>()? as usize;
        Ok(MsgpackItem::Bytes(self.take(length)?))
    }

    /// Reads a number of entries, each of at least `each` bytes. A number that exceeds the remaining bytes is rejected
    /// before it is used.
    fn entries<const N: usize>(&mut self, each: usize) -> Result<u32, DecodeError> {
        let count = self.number::<N>()?;
        self.check_fits(count, each)
    }

    fn check_fits(&self, count: u64, each: usize) -> Result<u32, DecodeError> {
        if count.saturating_mul(each as u64) > self.rest.len() as u64 {
            return Err(DecodeError::Truncated);
        }
        Ok(count as u32)
    }

    fn signed(value: i64) -> MsgpackItem<'a> {
        if value < 0 { MsgpackItem::Negative(value) } else { MsgpackItem::Unsigned(value as u64) }
    }

    pub(crate) fn item(&mut self) -> Result<MsgpackItem<'a>, DecodeError> {
        let head = self.take(1)?[0];
        Ok(match head {
            0x00..=0x7f => MsgpackItem::Unsigned(u64::from(head)),
            0x80..=0x8f => MsgpackItem::Map(self.check_fits(u64::from(head & 0x0f), 2)?),
            0x90..=0x9f => MsgpackItem::Array(self.check_fits(u64::from(head & 0x0f), 1)?),
            0xa0..=0xbf => MsgpackItem::Text(self.take(usize::from(head & 0x1f))?),
            0xc0 => MsgpackItem::Nil,
            0xc1 => return Err(DecodeError::Malformed),
            0xc2 => MsgpackItem::Bool(false),
            0xc3 => MsgpackItem::Bool(true),
            0xc4 => self.bytes::<1>()?,
            0xc5 => self.bytes::<2>()?,
            0xc6 => self.bytes::<4>()?,
            0xc7..=0xc9 => self.extension(head)?,
            0xca => MsgpackItem::Float(f64::from(f32::from_bits(self.number::<4>()? as u32))),
            0xcb => MsgpackItem::Float(f64::from_bits(self.number::<8>()?)),
            0xcc => MsgpackItem::Unsigned(self.number::<1>()?),
            0xcd => MsgpackItem::Unsigned(self.number::<2>()?),
            0xce => MsgpackItem::Unsigned(self.number::<4>()?),
            0xcf => MsgpackItem::Unsigned(self.number::<8>()?),
            0xd0 => Self::signed(i64::from(self.number::<1>()? as i8)),
            0xd1 => Self::signed(i64::from(self.number::<2>()? as i16)),
            0xd2 => Self::signed(i64::from(self.number::<4>()? as i32)),
            0xd3 => Self::signed(self.number::<8>()? as i64),
            0xd4..=0xd8 => self.extension(head)?,
            0xd9 => self.text::<1>()?,
            0xda => self.text::<2>()?,
            0xdb => self.text::<4>()?,
            0xdc => MsgpackItem::Array(self.entries::<2>(1)?),
            0xdd => MsgpackItem::Array(self.entries::<4>(1)?),
            0xde => MsgpackItem::Map(self.entries::<2>(2)?),
            0xdf => MsgpackItem::Map(self.entries::<4>(2)?),
            0xe0..=0xff => MsgpackItem::Negative(i64::from(head as i8)),
        })
    }

    /// Reads the next numbers into `tokens`, as long as they are valid tokens; returns how many.
    ///
    /// Small and large ids alternate unpredictably for the branch predictor. So the loop has no branch on their
    /// lengths, and each head is taken from the eight bytes already loaded for the number before it.
    pub(crate) fn tokens(&mut self, tokens: &mut [u32]) -> usize {
        let (rest, mut at, mut read) = (self.rest, 0, 0);
        let mut head = rest.first().copied().unwrap_or_default();
        for token in &mut *tokens {
            let Some(bytes) = rest.get(at..).and_then(|rest| rest.first_chunk::<8>()) else { break };
            // All ones if the head itself is the number, all zeros if 1, 2 or 4 bytes follow it.
            let is_head = u32::from(head >> 7).wrapping_sub(1);
            if is_head == 0 && !(0xcc..=0xce).contains(&head) {
                break;
            }
            let bits = (8 << (head & 3)) & !is_head;
            *token = (u64::from_be_bytes(*bytes) << (8 & !is_head) >> (64 - bits - (8 & is_head))) as u32;
            head = (u64::from_le_bytes(*bytes) >> 8 >> bits) as u8;
            at += 1 + bits as usize / 8;
            read += 1;
        }
        self.rest = rest.get(at..).unwrap_or_default();
        while let Some(slot) = tokens.get_mut(read)
            && let Some(token) = self.token()
        {
            *slot = token;
            read += 1;
        }
        read
    }

    /// Reads the next item if it is a valid token; otherwise reads nothing.
    fn token(&mut self) -> Option<u32> {
        let (token, rest) = match *self.rest {
            [token @ 0x00..=0x7f, ref rest @ ..] | [0xcc, token, ref rest @ ..] => (u32::from(token), rest),
            [0xcd, a, b, ref rest @ ..] => (u32::from(u16::from_be_bytes([a, b])), rest),
            [0xce, a, b, c, d, ref rest @ ..] => (u32::from_be_bytes([a, b, c, d]), rest),
            _ => return None,
        };
        self.rest = rest;
        Some(token)
    }

    /// Reads the next item if it is an 8-byte number, as hashes are; otherwise reads nothing.
    #[inline]
    pub(crate) fn wide_number(&mut self) -> Option<u64> {
        let [0xcf, rest @ ..] = self.rest else { return None };
        let (number, rest) = rest.split_first_chunk()?;
        self.rest = rest;
        Some(u64::from_be_bytes(*number))
    }

    /// Skips an extension of any type: engines send none.
    fn extension(&mut self, head: u8) -> Result<MsgpackItem<'a>, DecodeError> {
        let length = match head {
            0xc7 => self.number::<1>()? as usize,
            0xc8 => self.number::<2>()? as usize,
            0xc9 => self.number::<4>()? as usize,
            fixed => 1 << (fixed - 0xd4),
        };
        self.take(1)?;
        self.take(length)?;
        Ok(MsgpackItem::Extension)
    }

    /// Skips one value.
    pub(crate) fn skip(&mut self) -> Result<(), DecodeError> {
        self.skip_within(MAX_DEPTH)
    }

    fn skip_within(&mut self, depth: u32) -> Result<(), DecodeError> {
        let values = match self.item()? {
            MsgpackItem::Array(count) => u64::from(count),
            MsgpackItem::Map(count) => 2 * u64::from(count),
            _ => return Ok(()),
        };
        let depth = depth.checked_sub(1).ok_or(DecodeError::TooDeep)?;
        for _ in 0..values {
            self.skip_within(depth)?;
        }
        Ok(())
    }

    /// Skips one value and returns its encoding.
    pub(crate) fn raw(&mut self) -> Result<&'a [u8], DecodeError> {
        let start = self.rest;
        self.skip()?;
        Ok(&start[..start.len() - self.rest.len()])
    }
}
