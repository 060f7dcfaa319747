//! Value parsers of command-line flags. A duration or a size has a unit; a bare number is refused.

use std::ops::RangeInclusive;

use serde::Deserialize as _;
use serde::de::value::{Error as ValueError, StrDeserializer};

use crate::{ByteCount, TimeSpan};

/// The text is not an accepted value of a flag.
#[derive(Debug, thiserror::Error)]
pub enum FlagValueError {
    /// Not a duration.
    #[error("accepted is a duration with a unit, for example 250ms, 30s, 5m or 1h")]
    Duration,
    #[error(
        "accepted is a duration with a unit, {} to {}",
        humantime::format_duration(.0.start().0),
        humantime::format_duration(.0.end().0)
    )]
    /// A duration outside of this range.
    DurationRange(RangeInclusive<TimeSpan>),
    /// Not a bandwidth.
    #[error("accepted is a size per second with a unit, 1MiB to 10TB, for example 500MiB or 20GB")]
    Bandwidth,
}

/// Most bytes per second that a flag accepts.
const MAX_BANDWIDTH: usize = 10_000_000_000_000;

/// Parses a duration, as `30s`.
pub fn duration(text: &str) -> Result<TimeSpan, FlagValueError> {
    let has_unit = text.trim_end().ends_with(char::is_alphabetic);
    text.parse().ok().filter(|_| has_unit).ok_or(FlagValueError::Duration)
}

/// Parses a duration within a range.
pub fn duration_within(text: &str, range: RangeInclusive<TimeSpan>) -> Result<TimeSpan, FlagValueError> {
    duration(text).ok().filter(|duration| range.contains(duration)).ok_or(FlagValueError::DurationRange(range))
}

/// Parses bytes per second, as `20GB`.
pub fn bandwidth(text: &str) -> Result<ByteCount, FlagValueError> {
    let has_unit = text.trim_end().ends_with(char::is_alphabetic);
    let size = ByteCount::deserialize(StrDeserializer::<ValueError>::new(text)).ok();
    size.filter(|size| has_unit && size.is_bandwidth() && size.0 <= MAX_BANDWIDTH).ok_or(FlagValueError::Bandwidth)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_need_a_unit() {
        assert_eq!(duration("250ms").unwrap(), TimeSpan::millis(250));
        assert_eq!(duration("0s").unwrap(), TimeSpan::seconds(0));
        for bad in ["30", "0", "", "soon", "5M"] {
            assert!(duration(bad).unwrap_err().to_string().contains("30s"), "{bad}");
        }
    }

    #[test]
    fn durations_outside_the_range_name_its_ends() {
        let within = |text| duration_within(text, TimeSpan::seconds(1)..=TimeSpan::seconds(60));
        assert_eq!(within("1m").unwrap(), TimeSpan::seconds(60));
        for bad in ["61s", "0s", "7"] {
            let error = within(bad).unwrap_err().to_string();
            assert_eq!(error, "accepted is a duration with a unit, 1s to 1m", "{bad}");
        }
    }

    #[test]
    fn bandwidths_need_a_unit() {
        assert_eq!(bandwidth("20GB").unwrap(), ByteCount(20_000_000_000));
        assert_eq!(bandwidth("1MiB").unwrap(), ByteCount::mebibytes(1));
        for bad in ["20", "20000000000", "1KiB", "11TB", "fast", ""] {
            assert!(bandwidth(bad).unwrap_err().to_string().contains("20GB"), "{bad}");
        }
    }
}
