//! Durations and times as the API writes them: durations as text with a unit, times as RFC 3339 in UTC.

use std::fmt;
use std::time::{Duration, UNIX_EPOCH};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::Micros;
use crate::untrusted_text::truncated;

/// Units with their length in nanoseconds, the largest first.
const UNITS: [(u128, &str); 7] = [
    (86_400_000_000_000, "d"),
    (3_600_000_000_000, "h"),
    (60_000_000_000, "m"),
    (1_000_000_000, "s"),
    (1_000_000, "ms"),
    (1_000, "us"),
    (1, "ns"),
];

/// Duration as an answer writes it: `"1.5s"`, `"330ms"`, `"10m"`. `TimeSpan` reads it back without loss.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct DurationText(pub Duration);

impl DurationText {
    /// Duration in whole milliseconds, rounded down.
    pub fn whole_millis(duration: Duration) -> Self {
        Self(Duration::from_millis(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)))
    }
}

impl From<Micros> for DurationText {
    fn from(micros: Micros) -> Self {
        Self(micros.duration())
    }
}

/// Writes `nanos` in a unit, exactly; `None` where that needs more than three decimals or is less than one.
fn in_unit(nanos: u128, (length, unit): (u128, &str)) -> Option<String> {
    let (whole, rest) = (nanos / length, nanos % length);
    if whole == 0 || rest * 1000 % length != 0 {
        return None;
    }
    let decimals = format!("{:03}", rest * 1000 / length);
    let decimals = decimals.trim_end_matches('0');
    Some(if decimals.is_empty() { format!("{whole}{unit}") } else { format!("{whole}.{decimals}{unit}") })
}

impl fmt::Display for DurationText {
    /// Writes the shortest exact form; of equally short ones that without decimals.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let forms = UNITS.into_iter().filter_map(|unit| in_unit(self.0.as_nanos(), unit));
        let shortest = forms.min_by_key(|text| (text.len(), text.contains('.')));
        f.write_str(shortest.as_deref().unwrap_or("0s"))
    }
}

impl Serialize for DurationText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Time as an answer writes it: RFC 3339 in UTC with milliseconds, `"2026-11-26T09:30:00.000Z"`. Milliseconds since 1970.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct UtcTime(u64);

/// Last time that RFC 3339 can write, in milliseconds since 1970.
const MAX_UNIX_MS: u64 = 253_402_300_799_999;

impl UtcTime {
    /// Time of these milliseconds since 1970.
    pub fn from_unix_ms(millis: u64) -> Self {
        Self(millis.min(MAX_UNIX_MS))
    }

    /// Time this long before, 1970 at the earliest.
    pub fn before(self, span: Duration) -> Self {
        Self(self.0.saturating_sub(u64::try_from(span.as_millis()).unwrap_or(u64::MAX)))
    }

    /// Milliseconds since 1970.
    pub fn unix_ms(self) -> u64 {
        self.0
    }
}

/// The text is not a time.
#[derive(Debug, thiserror::Error)]
#[error("accepted is a time in UTC like \"2026-11-26T09:30:00Z\"")]
pub struct UtcTimeError;

impl std::str::FromStr for UtcTime {
    type Err = UtcTimeError;

    fn from_str(text: &str) -> Result<Self, UtcTimeError> {
        let time = humantime::parse_rfc3339(text).map_err(|_| UtcTimeError)?;
        // A time before 1970 counts as 1970.
        let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        Ok(Self::from_unix_ms(u64::try_from(since.as_millis()).unwrap_or(u64::MAX)))
    }
}

impl fmt::Display for UtcTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        humantime::format_rfc3339_millis(UNIX_EPOCH + Duration::from_millis(self.0)).fmt(f)
    }
}

impl Serialize for UtcTime {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for UtcTime {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(|error| serde::de::Error::custom(format!("{:?}: {error}", truncated(&text))))
    }
}

#[cfg(feature = "openapi")]
mod schema;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::TimeSpan;

    #[test]
    fn durations_are_written_in_their_shortest_exact_form() {
        for (micros, text) in [
            (0, "0s"),
            (1, "1us"),
            (1_500, "1.5ms"),
            (20_000, "20ms"),
            (330_000, "330ms"),
            (1_500_000, "1.5s"),
            (15_000_000, "15s"),
            (90_000_000, "90s"),
            (600_000_000, "10m"),
            (5_400_000_000, "90m"),
            (86_400_000_000, "1d"),
            (1_234_567, "1234567us"),
            (1_000_001, "1000001us"),
        ] {
            assert_eq!(DurationText::from(Micros(micros)).to_string(), text);
        }
        assert_eq!(DurationText(Duration::from_nanos(1_500)).to_string(), "1.5us");
        assert_eq!(DurationText::whole_millis(Duration::from_micros(14_999_999)).to_string(), "14999ms");
    }

    #[test]
    fn times_are_written_and_read_in_utc() {
        let time = UtcTime::from_unix_ms(1_795_685_400_250);
        assert_eq!(time.to_string(), "2026-11-26T09:30:00.250Z");
        assert_eq!((time.to_string().parse().ok(), time.unix_ms()), (Some(time), 1_795_685_400_250));
        assert_eq!(UtcTime::from_unix_ms(u64::MAX).to_string(), "9999-12-31T23:59:59.999Z");
        for bad in ["", "1795685400250", "2026-11-26", "2026-11-26T09:30:00", "2026-11-26T09:30:00+01:00"] {
            let error = bad.parse::<UtcTime>().unwrap_err().to_string();
            assert!(error.contains("2026-11-26T09:30:00Z"), "{bad}: {error}");
        }
    }

    /// 584 years: the reader counts nanoseconds in 64 bits.
    const MAX_READ_MICROS: u64 = u64::MAX / 1_000;

    proptest! {
        #[test]
        fn any_written_duration_is_read_back_exactly(micros in 0..MAX_READ_MICROS, shift in 0u32..64) {
            let text = DurationText::from(Micros(micros >> shift)).to_string();
            prop_assert_eq!(text.parse::<TimeSpan>().ok(), Some(TimeSpan(Duration::from_micros(micros >> shift))), "{}", text);
        }
    }
}
