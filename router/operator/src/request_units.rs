//! Durations and sizes in requests: text with a unit. A bare number is refused, because its unit would be a guess.

use std::borrow::Cow;
use std::time::Duration;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

use vocabulary::truncated;
use vocabulary::{ByteCount, TimeSpan};

const TIME_UNITS: [&str; 7] = ["ns", "us", "ms", "s", "m", "h", "d"];
const SIZE_UNITS: [&str; 9] = ["B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"];
const SIZE_PATTERN: &str = r"^[0-9]+(\.[0-9]{1,3})?(B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)$";

/// Duration in a request: `"500ms"`, `"1.5s"`, `"10m"`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct DurationInput(pub(super) Duration);

/// Size in a request: `"500MB"`, `"1GiB"`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ByteSizeInput(pub(super) u64);

/// Whether the text is a number of at most three decimals and one of these units.
fn has_unit(text: &str, units: &[&str]) -> bool {
    let end = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let is_digits = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let is_number = match number.split_once('.') {
        Some((whole, decimals)) => is_digits(whole) && is_digits(decimals) && decimals.len() <= 3,
        None => is_digits(number),
    };
    is_number && units.contains(&unit)
}

/// Reads a text with a unit; the error quotes what was given and says what is accepted.
fn read<'de, D: Deserializer<'de>, T>(
    given: D,
    parse: impl FnOnce(&str) -> Option<T>,
    accepted: &str,
) -> Result<T, D::Error> {
    let value = Value::deserialize(given)?;
    let parsed = value.as_str().and_then(parse);
    parsed.ok_or_else(|| D::Error::custom(format!("{}: accepted is {accepted}", truncated(&value.to_string()))))
}

impl<'de> Deserialize<'de> for DurationInput {
    fn deserialize<D: Deserializer<'de>>(given: D) -> Result<Self, D::Error> {
        let parse = |text: &str| text.parse::<TimeSpan>().ok().filter(|_| has_unit(text, &TIME_UNITS));
        read(given, parse, "a duration with its unit like \"500ms\", \"1.5s\" or \"10m\"").map(|span| Self(span.0))
    }
}

impl<'de> Deserialize<'de> for ByteSizeInput {
    fn deserialize<D: Deserializer<'de>>(given: D) -> Result<Self, D::Error> {
        let parse = |text: &str| {
            let size = has_unit(text, &SIZE_UNITS).then(|| ByteCount::deserialize(Value::from(text)).ok())?;
            size.map(|size| Self(size.0 as u64))
        };
        read(given, parse, "a size with its unit like \"500MB\" or \"1GiB\"")
    }
}

impl PartialSchema for ByteSizeInput {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .schema_type(Type::String)
            .pattern(Some(SIZE_PATTERN))
            .examples([serde_json::json!("1GiB")])
            .description(Some("A size: a number and its unit, which is B, kB, MB, GB, TB, KiB, MiB, GiB or TiB."))
            .into()
    }
}

impl ToSchema for ByteSizeInput {
    fn name() -> Cow<'static, str> {
        "Size".into()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    #[test]
    fn durations_and_sizes_are_read_with_their_unit() {
        let duration = |text: &str| from_value::<DurationInput>(json!(text)).unwrap().0;
        assert_eq!((duration("500ms"), duration("1.5s")), (Duration::from_millis(500), Duration::from_millis(1_500)));
        assert_eq!(duration("10m"), Duration::from_secs(600));
        let size = |text: &str| from_value::<ByteSizeInput>(json!(text)).unwrap().0;
        assert_eq!((size("1GiB"), size("500MB"), size("1.5KiB"), size("7B")), (1 << 30, 500_000_000, 1_536, 7));
    }

    #[test]
    fn values_without_a_unit_are_refused_with_the_accepted_form() {
        for bad in [json!("30"), json!(30), json!("30 s"), json!("1h 30m"), json!("1.2345s"), json!("5M"), json!(null)]
        {
            let error = from_value::<DurationInput>(bad.clone()).unwrap_err().to_string();
            assert!(error.contains(&bad.to_string()) && error.contains("\"500ms\""), "{error}");
        }
        for bad in [json!("1024"), json!(1024), json!("1 GiB"), json!("1gib"), json!(".5GiB"), json!("-1MB")] {
            let error = from_value::<ByteSizeInput>(bad.clone()).unwrap_err().to_string();
            assert!(error.contains(&bad.to_string()) && error.contains("\"1GiB\""), "{error}");
        }
    }
}
