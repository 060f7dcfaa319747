//! Times as the API writes them: RFC 3339 in UTC.

use std::fmt;
use std::time::{Duration, UNIX_EPOCH};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::untrusted_text::truncated;

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
    use super::*;

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
}
