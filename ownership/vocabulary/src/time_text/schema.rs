//! OpenAPI schemas of durations and times.

use std::borrow::Cow;

use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{KnownFormat, ObjectBuilder, Schema, SchemaFormat, Type};
use utoipa::{PartialSchema, ToSchema};

use super::UtcTime;
use crate::TimeSpan;

/// Pattern of a duration in the API, in answers and in requests.
const DURATION_PATTERN: &str = r"^[0-9]+(\.[0-9]{1,3})?(ns|us|ms|s|m|h|d)$";

impl PartialSchema for TimeSpan {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .schema_type(Type::String)
            .pattern(Some(DURATION_PATTERN))
            .examples([serde_json::json!("1.5s")])
            .description(Some("A duration: a number and its unit, which is ns, us, ms, s, m, h or d."))
            .into()
    }
}

impl ToSchema for TimeSpan {
    fn name() -> Cow<'static, str> {
        "Duration".into()
    }
}

impl PartialSchema for UtcTime {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .schema_type(Type::String)
            .format(Some(SchemaFormat::KnownFormat(KnownFormat::DateTime)))
            .examples([serde_json::json!("2026-11-26T09:30:00.000Z")])
            .description(Some("A time in UTC, RFC 3339."))
            .into()
    }
}

impl ToSchema for UtcTime {
    fn name() -> Cow<'static, str> {
        "Time".into()
    }
}
