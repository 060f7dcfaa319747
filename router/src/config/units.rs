//! Spans and sizes as people write them in configuration: `"30s"`, `"64MiB"`, or a bare number of seconds or bytes.

use std::time::Duration;

use bytesize::ByteSize;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use vocabulary::Bytes;

/// A span of time: `"250ms"`, `"30s"`, `"5m"`, `"1h"`, or a number of seconds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct TimeSpan(pub Duration);

/// A size in bytes: `"512KiB"`, `"64MiB"`, `"1GiB"`, `"10MB"`, or a number of bytes. Without the `i`, `"64M"` and `"64MB"` are
/// 64,000,000 bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ByteCount(pub usize);

/// Longest span: what the clock and counts of microseconds can hold.
const MAX_SPAN: Duration = Duration::from_micros(u64::MAX);

/// Units of a span. A month or a year would be a slip: `"5M"` is read as months, where `"5m"` was meant.
const UNITS: [&str; 22] = [
    "ns", "nsec", "us", "usec", "ms", "msec", "millis", "s", "sec", "secs", "second", "seconds", "m", "min", "mins",
    "minute", "minutes", "h", "hour", "hours", "d", "days",
];

impl TimeSpan {
    /// Whole seconds.
    pub const fn seconds(seconds: u64) -> Self {
        Self(Duration::from_secs(seconds))
    }

    /// Whole milliseconds.
    pub const fn millis(millis: u64) -> Self {
        Self(Duration::from_millis(millis))
    }
}

impl ByteCount {
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

impl std::fmt::Display for ByteCount {
    /// As people write it, exactly.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
        match units.into_iter().find(|(bits, _)| self.0 > 0 && self.0.trailing_zeros() >= *bits) {
            Some((bits, unit)) => write!(f, "{}{unit}", self.0 >> bits),
            None => write!(f, "{} bytes", self.0),
        }
    }
}

/// How long so many bytes take at `bandwidth` a second; at most a year.
pub fn transfer_time(bytes: Bytes, bandwidth: u64) -> Duration {
    const MAX_SECONDS: f64 = 31_536_000.0;
    Duration::from_secs_f64((bytes.0 as f64 / bandwidth.max(1) as f64).min(MAX_SECONDS))
}

#[derive(Deserialize)]
#[serde(untagged)]
enum NumberOrText {
    Number(f64),
    Text(String),
}

/// A text that is no span of time.
#[derive(Debug, thiserror::Error)]
#[error("accepted is a span of time like \"250ms\", \"30s\" or \"5m\", or a number of seconds")]
pub struct TimeSpanError;

impl std::str::FromStr for TimeSpan {
    type Err = TimeSpanError;

    fn from_str(text: &str) -> Result<Self, TimeSpanError> {
        let mut units = text.split(|c: char| !c.is_alphabetic()).filter(|unit| !unit.is_empty());
        if !units.all(|unit| UNITS.contains(&unit)) {
            return Err(TimeSpanError);
        }
        let span = humantime::parse_duration(text).or_else(|_| text.trim().parse().map(Duration::from_secs));
        span.ok().filter(|span| *span <= MAX_SPAN).map(Self).ok_or(TimeSpanError)
    }
}

impl<'de> Deserialize<'de> for TimeSpan {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match NumberOrText::deserialize(deserializer).map_err(|_| D::Error::custom(TimeSpanError))? {
            NumberOrText::Number(number) => match Duration::try_from_secs_f64(number) {
                Ok(span) if span <= MAX_SPAN => Ok(Self(span)),
                _ => Err(D::Error::custom(format!("{number} is negative or too large; {TimeSpanError}"))),
            },
            NumberOrText::Text(text) => text.parse().map_err(|error| D::Error::custom(format!("{text:?}: {error}"))),
        }
    }
}

impl<'de> Deserialize<'de> for ByteCount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        const ACCEPTED: &str = "a size like \"512KiB\", \"64MiB\", \"1GiB\" or a number of bytes";
        let (size, written) = match NumberOrText::deserialize(deserializer) {
            Ok(NumberOrText::Number(number)) => {
                ((0.0..1e18).contains(&number).then_some(number as u64), number.to_string())
            }
            Ok(NumberOrText::Text(text)) => (
                text.trim().parse::<ByteSize>().ok().map(|size| size.as_u64()).filter(|size| *size < u64::MAX),
                format!("{text:?}"),
            ),
            Err(_) => (None, "this".into()),
        };
        let size = size.and_then(|size| usize::try_from(size).ok()).map(Self);
        size.ok_or_else(|| D::Error::custom(format!("{written} is not {ACCEPTED}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(serde::Deserialize, Debug)]
    struct SpanAndSize {
        span: TimeSpan,
        size: ByteCount,
    }

    fn read(text: &str) -> Result<SpanAndSize, toml::de::Error> {
        toml::from_str(text)
    }

    #[test]
    fn transfer_time_follows_from_bandwidth() {
        assert_eq!(transfer_time(Bytes(500), 1000), Duration::from_millis(500));
        assert_eq!(transfer_time(Bytes(0), 0), Duration::ZERO);
        assert_eq!(transfer_time(Bytes(u64::MAX), 1), Duration::from_secs(31_536_000));
    }

    #[test]
    fn durations_and_sizes_parse_from_human_readable_text() {
        let both = read("span = \"250ms\"\nsize = \"64MiB\"").unwrap();
        assert_eq!((both.span, both.size), (TimeSpan::millis(250), ByteCount::mebibytes(64)));
        let both = read("span = 1.5\nsize = 1000").unwrap();
        assert_eq!((both.span, both.size), (TimeSpan::millis(1500), ByteCount(1000)));
        assert_eq!(read("span = \" 1h 30m \"\nsize = 1").unwrap().span, TimeSpan::seconds(5400));
        assert_eq!(read("span = \"2 h\"\nsize = \"10 MB\"").unwrap().span, TimeSpan::seconds(7200));
    }

    #[test]
    fn parse_errors_name_the_accepted_forms() {
        for (text, wanted) in [
            ("span = \"fast\"\nsize = 1", "\"30s\""),
            ("span = \"5 fortnights\"\nsize = 1", "\"30s\""),
            ("span = \"5M\"\nsize = 1", "\"5m\""),
            ("span = \"1y\"\nsize = 1", "\"5m\""),
            ("span = -1\nsize = 1", "negative"),
            ("span = 1\nsize = \"64MiB2\"", "\"64MiB\""),
            ("span = 1\nsize = true", "\"64MiB\""),
            ("span = 1\nsize = -1", "\"64MiB\""),
            ("span = 1e300\nsize = 1", "too large"),
            ("span = \"99999999999999999h\"\nsize = 1", "\"30s\""),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }
}
