//! Durations and sizes as settings, flags and request bodies write them: `"30s"`, `"1.5ms"`, `"64MiB"`, `"20GB"`. The
//! unit is required: a bare number is an error that names the accepted forms.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use bytesize::ByteSize;
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{Bytes, Micros};

/// A duration: `"250ms"`, `"1.5s"`, `"5m"`, `"1h 30m"`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct TimeSpan(pub Duration);

/// A size in bytes, or bytes per second where a setting is a bandwidth: `"512KiB"`, `"64MiB"`, `"1.5GiB"`, `"584B"`.
/// Without the `i` units are decimal: `"20GB"` and `"20G"` are 20,000,000,000 bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ByteCount(pub usize);

/// Longest duration: the largest that a count of microseconds can hold.
const MAX_SPAN: Duration = Duration::from_micros(u64::MAX);

/// Accepted units of a duration. Months and years are left out, because `"5M"` would read as months where `"5m"` was
/// meant.
const UNITS: [&str; 22] = [
    "ns", "nsec", "us", "usec", "ms", "msec", "millis", "s", "sec", "secs", "second", "seconds", "m", "min", "mins",
    "minute", "minutes", "h", "hour", "hours", "d", "days",
];

/// Units with their length in nanoseconds, the largest first.
const WRITTEN_UNITS: [(u64, &str); 7] = [
    (86_400_000_000_000, "d"),
    (3_600_000_000_000, "h"),
    (60_000_000_000, "m"),
    (1_000_000_000, "s"),
    (1_000_000, "ms"),
    (1_000, "us"),
    (1, "ns"),
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

    /// Whole microseconds.
    pub const fn micros(micros: u64) -> Self {
        Self(Duration::from_micros(micros))
    }

    /// Whole milliseconds of a duration, rounded down.
    pub fn whole_millis(duration: Duration) -> Self {
        Self::millis(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX))
    }

    /// Converts to microseconds. Whole nanoseconds convert exactly.
    pub fn as_micros_f64(self) -> f64 {
        self.0.as_nanos() as f64 / 1_000.0
    }
}

impl From<Micros> for TimeSpan {
    fn from(micros: Micros) -> Self {
        Self(micros.duration())
    }
}

impl ByteCount {
    /// What is accepted as a bandwidth.
    pub const ACCEPTED_BANDWIDTH: &str =
        "accepted is 1MiB or more, in bytes per second, for example \"500MiB\" or \"4GiB\"";

    /// Mebibytes.
    pub const fn mebibytes(count: usize) -> Self {
        Self(count << 20)
    }

    /// Returns whether it is accepted as a bandwidth.
    pub fn is_bandwidth(self) -> bool {
        self >= Self::mebibytes(1)
    }
}

/// A way to write a duration: a count of one unit, with up to three decimals.
struct WrittenSpan {
    whole: u64,
    thousandths: u64,
    unit: &'static str,
}

impl WrittenSpan {
    /// Returns the form that writes `nanos` exactly in a unit of `length`; `None` where that needs more than three
    /// decimals or is less than one.
    fn exact(nanos: u64, (length, unit): (u64, &'static str)) -> Option<Self> {
        let (whole, rest) = (nanos / length, nanos % length);
        // A thousand of the longest unit fit into the type.
        let is_exact = whole > 0 && (rest * 1000).is_multiple_of(length);
        is_exact.then(|| Self { whole, thousandths: rest * 1000 / length, unit })
    }

    fn decimals(&self) -> usize {
        match self.thousandths {
            0 => 0,
            hundreds if hundreds % 100 == 0 => 1,
            tens if tens % 10 == 0 => 2,
            _ => 3,
        }
    }

    fn length(&self) -> usize {
        let digits = self.whole.ilog10() as usize + 1;
        let point = usize::from(self.thousandths > 0);
        digits + point + self.decimals() + self.unit.len()
    }
}

impl fmt::Display for WrittenSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { whole, thousandths, unit } = self;
        match self.decimals() {
            0 => write!(f, "{whole}{unit}"),
            1 => write!(f, "{whole}.{}{unit}", thousandths / 100),
            2 => write!(f, "{whole}.{:02}{unit}", thousandths / 10),
            _ => write!(f, "{whole}.{thousandths:03}{unit}"),
        }
    }
}

impl fmt::Display for TimeSpan {
    /// Writes the shortest exact form; of equally short ones that without decimals. Beyond 584 years it writes whole
    /// seconds.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Ok(nanos) = u64::try_from(self.0.as_nanos()) else { return write!(f, "{}s", self.0.as_secs()) };
        let forms = WRITTEN_UNITS.into_iter().filter_map(|unit| WrittenSpan::exact(nanos, unit));
        match forms.min_by_key(|form| (form.length(), form.thousandths > 0)) {
            Some(shortest) => shortest.fmt(f),
            None => f.write_str("0s"),
        }
    }
}

impl fmt::Display for ByteCount {
    /// Exact, in the unit with the smallest number: `64MiB`, `20GB`, `584B`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [
            (1 << 30, "GiB"),
            (1 << 20, "MiB"),
            (1 << 10, "KiB"),
            (1_000_000_000, "GB"),
            (1_000_000, "MB"),
            (1_000, "KB"),
        ];
        let exact = units.into_iter().filter(|(unit, _)| self.0 > 0 && self.0.is_multiple_of(*unit));
        let (count, name) = exact.map(|(unit, name)| (self.0 / unit, name)).min().unwrap_or((self.0, "B"));
        write!(f, "{count}{name}")
    }
}

/// Returns how long `bytes` take at `bandwidth` bytes per second; at most a year.
pub fn transfer_time(bytes: Bytes, bandwidth: u64) -> Duration {
    const MAX_SECONDS: f64 = 31_536_000.0;
    Duration::from_secs_f64((bytes.0 as f64 / bandwidth.max(1) as f64).min(MAX_SECONDS))
}

/// A text that is not a duration.
#[derive(Debug, thiserror::Error)]
#[error("accepted is a duration with its unit, for example \"250ms\", \"1.5s\" or \"5m\"")]
pub struct TimeSpanError;

/// A text that is not a size.
#[derive(Debug, thiserror::Error)]
#[error("accepted is a size with its unit, for example \"512KiB\", \"64MiB\" or \"1GB\"")]
pub struct ByteCountError;

impl FromStr for TimeSpan {
    type Err = TimeSpanError;

    fn from_str(text: &str) -> Result<Self, TimeSpanError> {
        let mut units = text.split(|c: char| !c.is_alphabetic()).filter(|unit| !unit.is_empty()).peekable();
        if units.peek().is_none() || !units.all(|unit| UNITS.contains(&unit)) {
            return Err(TimeSpanError);
        }
        let span = humantime::parse_duration(text).ok().filter(|span| *span <= MAX_SPAN);
        span.map(Self).ok_or(TimeSpanError)
    }
}

impl FromStr for ByteCount {
    type Err = ByteCountError;

    fn from_str(text: &str) -> Result<Self, ByteCountError> {
        let size = text.contains(char::is_alphabetic).then(|| text.trim().parse::<ByteSize>().ok()).flatten();
        // Larger sizes saturate.
        let size = size.map(|size| size.as_u64()).filter(|size| *size < u64::MAX);
        size.and_then(|size| usize::try_from(size).ok()).map(Self).ok_or(ByteCountError)
    }
}

/// Reads a text with a unit, and says of a number that the unit is missing.
struct UnitVisitor<T>(std::marker::PhantomData<T>);

/// A value that is written with its unit.
trait WithUnit: FromStr<Err: fmt::Display> {
    const EXPECTED: &str;
    const ERROR: Self::Err;
}

impl WithUnit for TimeSpan {
    const EXPECTED: &str = "a duration with its unit, for example \"250ms\", \"1.5s\" or \"5m\"";
    const ERROR: TimeSpanError = TimeSpanError;
}

impl WithUnit for ByteCount {
    const EXPECTED: &str = "a size with its unit, for example \"512KiB\", \"64MiB\" or \"1GB\"";
    const ERROR: ByteCountError = ByteCountError;
}

impl<T: WithUnit> Visitor<'_> for UnitVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(T::EXPECTED)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(|error| E::custom(format!("{text:?}: {error}")))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<T, E> {
        Err(E::custom(format!("{number} has no unit; {}", T::ERROR)))
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<T, E> {
        Err(E::custom(format!("{number} has no unit; {}", T::ERROR)))
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<T, E> {
        Err(E::custom(format!("{number} has no unit; {}", T::ERROR)))
    }
}

impl<'de> Deserialize<'de> for TimeSpan {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UnitVisitor(std::marker::PhantomData))
    }
}

impl<'de> Deserialize<'de> for ByteCount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UnitVisitor(std::marker::PhantomData))
    }
}

impl Serialize for TimeSpan {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Serialize for ByteCount {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// For `#[serde(with = "vocabulary::micros_with_unit")]` on a setting of type [`Micros`].
pub mod micros_with_unit {
    use super::*;

    /// Writes a text with a unit.
    pub fn serialize<S: Serializer>(micros: &Micros, serializer: S) -> Result<S::Ok, S::Error> {
        TimeSpan(micros.duration()).serialize(serializer)
    }

    /// Reads a text with a unit; the duration must be a whole number of microseconds.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Micros, D::Error> {
        let span = TimeSpan::deserialize(deserializer)?;
        match span.0.subsec_nanos().is_multiple_of(1_000) {
            true => Ok(Micros::of(span.0)),
            false => {
                Err(D::Error::custom(format!("{span} is finer than a microsecond; accepted is, for example, \"1us\"")))
            }
        }
    }
}

/// For `#[serde(with = "vocabulary::optional_micros_with_unit")]` on an `Option` of [`Micros`]; `None` is written as null.
pub mod optional_micros_with_unit {
    use super::*;

    #[derive(Serialize, Deserialize)]
    struct MicrosWithUnit(#[serde(with = "micros_with_unit")] Micros);

    /// Writes a text with a unit, or null.
    pub fn serialize<S: Serializer>(micros: &Option<Micros>, serializer: S) -> Result<S::Ok, S::Error> {
        micros.map(MicrosWithUnit).serialize(serializer)
    }

    /// Reads a text with a unit, or null.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Micros>, D::Error> {
        Ok(Option::<MicrosWithUnit>::deserialize(deserializer)?.map(|MicrosWithUnit(micros)| micros))
    }
}

/// For `#[serde(with = "vocabulary::bytes_with_unit")]` on a setting of type [`Bytes`].
pub mod bytes_with_unit {
    use super::*;

    /// Writes a text with a unit.
    pub fn serialize<S: Serializer>(bytes: &Bytes, serializer: S) -> Result<S::Ok, S::Error> {
        ByteCount(bytes.0 as usize).serialize(serializer)
    }

    /// Reads a text with a unit.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
        Ok(Bytes(ByteCount::deserialize(deserializer)?.0 as u64))
    }
}

/// For `#[serde(with = "vocabulary::micros_f64_with_unit")]` on a setting in microseconds that may have a fraction.
pub mod micros_f64_with_unit {
    use super::*;

    /// Writes a text with a unit, to the nanosecond; what is negative or not a number is written as zero.
    pub fn serialize<S: Serializer>(micros: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        TimeSpan(Duration::from_nanos((micros * 1_000.0).round() as u64)).serialize(serializer)
    }

    /// Reads a text with a unit.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        Ok(TimeSpan::deserialize(deserializer)?.as_micros_f64())
    }
}

/// For `#[serde(with = "vocabulary::bandwidth_with_unit")]` on a setting in bytes per second.
pub mod bandwidth_with_unit {
    use super::*;

    /// Writes the bytes of a second as a text with a unit; what is negative or not a number is written as zero.
    pub fn serialize<S: Serializer>(bytes_per_second: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        ByteCount(bytes_per_second.round() as usize).serialize(serializer)
    }

    /// Reads a text with a unit.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        Ok(ByteCount::deserialize(deserializer)?.0 as f64)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Serialize, Deserialize, PartialEq, Debug)]
    struct SpanAndSize {
        span: TimeSpan,
        size: ByteCount,
    }

    #[derive(Serialize, Deserialize, PartialEq, Debug)]
    struct FieldsWithUnits {
        #[serde(with = "micros_with_unit")]
        micros: Micros,
        #[serde(with = "optional_micros_with_unit")]
        wait: Option<Micros>,
        #[serde(with = "optional_micros_with_unit")]
        idle: Option<Micros>,
        #[serde(with = "bytes_with_unit")]
        bytes: Bytes,
        #[serde(with = "micros_f64_with_unit")]
        cost: f64,
        #[serde(with = "bandwidth_with_unit")]
        bandwidth: f64,
    }

    fn read(span: &str, size: &str) -> Result<SpanAndSize, serde_json::Error> {
        serde_json::from_str(&format!(r#"{{"span": {span}, "size": {size}}}"#))
    }

    #[test]
    fn transfer_time_follows_from_bandwidth() {
        assert_eq!(transfer_time(Bytes(500), 1000), Duration::from_millis(500));
        assert_eq!(transfer_time(Bytes(0), 0), Duration::ZERO);
        assert_eq!(transfer_time(Bytes(u64::MAX), 1), Duration::from_secs(31_536_000));
    }

    #[test]
    fn durations_and_sizes_parse_from_text_with_units() {
        for (text, micros) in [
            ("250ms", 250_000),
            ("1.5ms", 1_500),
            ("18.8s", 18_800_000),
            ("150us", 150),
            (" 1h 30m ", 5_400_000_000),
            ("2 h", 7_200_000_000),
            ("0s", 0),
        ] {
            assert_eq!(text.parse::<TimeSpan>().unwrap(), TimeSpan::micros(micros), "{text}");
        }
        for (text, bytes) in [
            ("64MiB", 64 << 20),
            ("1.5GiB", 1_610_612_736),
            ("20GB", 20_000_000_000),
            ("20G", 20_000_000_000),
            ("10 MB", 10_000_000),
            ("584B", 584),
            ("0B", 0),
        ] {
            assert_eq!(text.parse::<ByteCount>().unwrap(), ByteCount(bytes), "{text}");
        }
    }

    #[test]
    fn numbers_without_a_unit_and_other_texts_are_refused_with_the_accepted_forms() {
        for span in ["30", "-1", "1.5", "\"30\"", "\"0\"", "\"fast\"", "\"5 fortnights\"", "\"5M\"", "\"1y\"", "true"] {
            let error = read(span, "\"1B\"").unwrap_err().to_string();
            assert!(error.contains("a duration with its unit, for example \"250ms\""), "{span}: {error}");
        }
        for size in ["1000", "-1", "1e9", "\"1000\"", "\"0\"", "\"64MiB2\"", "\"big\"", "true", "\"1e30B\""] {
            let error = read("\"1s\"", size).unwrap_err().to_string();
            assert!(error.contains("a size with its unit, for example \"512KiB\""), "{size}: {error}");
        }
        assert!(read("30", "\"1B\"").unwrap_err().to_string().contains("30 has no unit"));
        assert!("99999999999999999h".parse::<TimeSpan>().is_err());
    }

    #[test]
    fn shown_values_are_exact_and_parse_again() {
        for (span, shown) in [
            (TimeSpan::micros(0), "0s"),
            (TimeSpan::micros(1_500), "1.5ms"),
            (TimeSpan::micros(18_800_000), "18.8s"),
            (TimeSpan::seconds(90), "90s"),
            (TimeSpan::seconds(300), "5m"),
            (TimeSpan::seconds(7_200), "2h"),
            (TimeSpan(Duration::from_nanos(1_000_000_001)), "1000000001ns"),
            (TimeSpan(Duration::from_nanos(7)), "7ns"),
        ] {
            assert_eq!((span.to_string().as_str(), span.to_string().parse::<TimeSpan>().unwrap()), (shown, span));
        }
        for (bytes, shown) in [
            (0, "0B"),
            (584, "584B"),
            (1_000, "1KB"),
            (131_072, "128KiB"),
            (64 << 20, "64MiB"),
            (100_000_000, "100MB"),
            (20_000_000_000, "20GB"),
        ] {
            let size = ByteCount(bytes);
            assert_eq!((size.to_string().as_str(), size.to_string().parse::<ByteCount>().unwrap()), (shown, size));
        }
    }

    #[test]
    fn amounts_of_other_types_are_written_with_units() {
        let (wait, idle) = (Some(Micros(7)), None);
        let value =
            FieldsWithUnits { micros: Micros(1_500), wait, idle, bytes: Bytes(512), cost: 0.25, bandwidth: 2e10 };
        let text = serde_json::to_string(&value).unwrap();
        assert_eq!(
            text,
            r#"{"micros":"1.5ms","wait":"7us","idle":null,"bytes":"512B","cost":"250ns","bandwidth":"20GB"}"#
        );
        assert_eq!(serde_json::from_str::<FieldsWithUnits>(&text).unwrap(), value);
        let fine = serde_json::from_str::<FieldsWithUnits>(&text.replace("1.5ms", "1500ns")).unwrap_err();
        assert!(fine.to_string().contains("finer than a microsecond"), "{fine}");
    }

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
            assert_eq!(TimeSpan::from(Micros(micros)).to_string(), text);
        }
        assert_eq!(TimeSpan(Duration::from_nanos(1_500)).to_string(), "1.5us");
        assert_eq!(TimeSpan::whole_millis(Duration::from_micros(14_999_999)).to_string(), "14999ms");
    }

    /// 584 years: the reader counts nanoseconds in 64 bits.
    const MAX_READ_MICROS: u64 = u64::MAX / 1_000;

    proptest! {
        #[test]
        fn any_written_duration_is_read_back_exactly(micros in 0..MAX_READ_MICROS, shift in 0u32..64) {
            let text = TimeSpan::from(Micros(micros >> shift)).to_string();
            let written = TimeSpan(Duration::from_micros(micros >> shift));
            prop_assert_eq!(text.parse::<TimeSpan>().ok(), Some(written), "{}", text);
        }
    }
}
