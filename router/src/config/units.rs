//! Spans and sizes as people write them in configuration: `"30s"`, `"64MiB"`, or a bare number of seconds or bytes.

use std::time::Duration;

use serde::de::{Deserialize, Deserializer, Error, Visitor};
use vocabulary::Bytes;

/// A span of time: `"250ms"`, `"30s"`, `"5m"`, `"1h"`, or a number of seconds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Span(pub Duration);

/// A size in bytes: `"512KiB"`, `"64MiB"`, `"1GiB"`, `"10MB"`, or a number of bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Size(pub usize);

const SPANS: &[(&str, u64)] = &[("us", 1), ("ms", 1_000), ("s", 1_000_000), ("m", 60_000_000), ("h", 3_600_000_000)];
const SIZES: &[(&str, u64)] = &[
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("kB", 1_000),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
];

impl Span {
    /// Whole seconds.
    pub const fn seconds(seconds: u64) -> Self {
        Self(Duration::from_secs(seconds))
    }

    /// Whole milliseconds.
    pub const fn millis(millis: u64) -> Self {
        Self(Duration::from_millis(millis))
    }
}

impl Size {
    /// What is accepted for the bytes of a second.
    pub const ACCEPTED_BANDWIDTH: &str = "accepted is 1MiB and more, a second, for example 500MiB or 4GiB";

    /// Mebibytes.
    pub const fn mebibytes(count: usize) -> Self {
        Self(count << 20)
    }

    /// Whether it can be the bytes of a second.
    pub fn is_bandwidth(self) -> bool {
        self >= Self::mebibytes(1)
    }
}

/// How long so many bytes take at `bandwidth` a second; at most a year.
pub fn paced(bytes: Bytes, bandwidth: u64) -> Duration {
    const LONGEST: f64 = 31_536_000.0;
    Duration::from_secs_f64((bytes.0 as f64 / bandwidth.max(1) as f64).min(LONGEST))
}

/// `number` then a unit of `units`; the product, or `None`.
fn scaled(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit())?;
    let (number, unit) = (text[..split].parse::<u64>().ok()?, text[split..].trim());
    let (_, factor) = units.iter().find(|(name, _)| *name == unit)?;
    number.checked_mul(*factor)
}

struct Scaled {
    units: &'static [(&'static str, u64)],
    expected: &'static str,
    bare: u64,
}

impl Visitor<'_> for Scaled {
    type Value = u64;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.expected)
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<u64, E> {
        number.checked_mul(self.bare).ok_or_else(|| E::custom(format!("{number} is too large")))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<u64, E> {
        let number = u64::try_from(number)
            .map_err(|_| E::custom(format!("{number} is negative; accepted: {}", self.expected)))?;
        self.visit_u64(number)
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<u64, E> {
        let scaled = number * self.bare as f64;
        if scaled.is_finite() && (0.0..1e18).contains(&scaled) {
            return Ok(scaled as u64);
        }
        Err(E::custom(format!("{number} is out of range; accepted: {}", self.expected)))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<u64, E> {
        scaled(text, self.units).ok_or_else(|| E::custom(format!("{text:?} is not {}", self.expected)))
    }
}

/// A text that is no span of time.
#[derive(Debug, thiserror::Error)]
#[error("accepted is a span of time like 250ms, 30s or 5m, or a number of seconds")]
pub struct NotASpan;

impl std::str::FromStr for Span {
    type Err = NotASpan;

    fn from_str(text: &str) -> Result<Self, NotASpan> {
        let seconds = || text.trim().parse::<u64>().ok()?.checked_mul(1_000_000);
        let micros = scaled(text, SPANS).or_else(seconds).ok_or(NotASpan)?;
        Ok(Self(Duration::from_micros(micros)))
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected = "a span of time like \"250ms\", \"30s\", \"5m\" or a number of seconds";
        let micros = deserializer.deserialize_any(Scaled { units: SPANS, expected, bare: 1_000_000 })?;
        Ok(Self(Duration::from_micros(micros)))
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected = "a size like \"512KiB\", \"64MiB\", \"1GiB\" or a number of bytes";
        let bytes = deserializer.deserialize_any(Scaled { units: SIZES, expected, bare: 1 })?;
        usize::try_from(bytes).map(Self).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(serde::Deserialize, Debug)]
    struct Both {
        span: Span,
        size: Size,
    }

    fn read(text: &str) -> Result<Both, toml::de::Error> {
        toml::from_str(text)
    }

    #[test]
    fn so_many_bytes_take_as_long_as_the_bandwidth_says() {
        assert_eq!(paced(Bytes(500), 1000), Duration::from_millis(500));
        assert_eq!(paced(Bytes(0), 0), Duration::ZERO);
        assert_eq!(paced(Bytes(u64::MAX), 1), Duration::from_secs(31_536_000));
    }

    #[test]
    fn spans_and_sizes_read_as_people_write_them() {
        let both = read("span = \"250ms\"\nsize = \"64MiB\"").unwrap();
        assert_eq!((both.span, both.size), (Span::millis(250), Size::mebibytes(64)));
        let both = read("span = 1.5\nsize = 1000").unwrap();
        assert_eq!((both.span, both.size), (Span::millis(1500), Size(1000)));
        assert_eq!(read("span = \"2 h\"\nsize = \"10 MB\"").unwrap().span, Span::seconds(7200));
    }

    #[test]
    fn what_cannot_be_read_says_what_is_accepted() {
        for (text, wanted) in [
            ("span = \"fast\"\nsize = 1", "\"30s\""),
            ("span = \"5 weeks\"\nsize = 1", "\"30s\""),
            ("span = -1\nsize = 1", "negative"),
            ("span = 1\nsize = \"64MiB2\"", "\"64MiB\""),
            ("span = 1\nsize = true", "\"64MiB\""),
            ("span = \"99999999999999999h\"\nsize = 1", "\"30s\""),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }
}
