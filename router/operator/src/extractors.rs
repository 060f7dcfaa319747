//! Extractors for path, query and body: parse into types, or refuse with a problem that tells what is accepted.

use std::fmt::Display;
use std::str::FromStr;
use std::sync::Arc;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use http::request::Parts;
use serde::Deserialize as _;
use serde::de::DeserializeOwned;
use vocabulary::TenantId;

use super::problem::{Problem, ProblemKind};
use super::schemas::MAX_TENANT_CHARS;
use proxy::error::ApiError;
use proxy::memory_budget::MemoryBudget;
use proxy::offload_pool::OffloadPool;
use proxy::request_id::new_request_id;
use proxy::server::{BodyLimits, read_body};

pub(super) struct QueryParams<T>(pub(super) T);

impl<T: DeserializeOwned, S: Sync> FromRequestParts<S> for QueryParams<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Problem> {
        let query = Query::try_from_uri(&parts.uri);
        query.map(|Query(query)| Self(query)).map_err(|error| Problem::bad_query(error.body_text()))
    }
}

/// The id in the path.
pub(super) struct PathId<T>(pub(super) T);

impl<T, S> FromRequestParts<S> for PathId<T>
where
    T: FromStr<Err: Display>,
    S: Send + Sync,
{
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let path = Path::<String>::from_request_parts(parts, state).await;
        let Path(text) = path.map_err(|error| Problem::new(ProblemKind::InvalidId, error.body_text()))?;
        text.parse().map(Self).map_err(|error: T::Err| Problem::bad_id(&error))
    }
}

/// The two ids in the path.
pub(super) struct PathIds<A, B>(pub(super) A, pub(super) B);

impl<A, B, S> FromRequestParts<S> for PathIds<A, B>
where
    A: FromStr<Err: Display>,
    B: FromStr<Err: Display>,
    S: Send + Sync,
{
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let path = Path::<(String, String)>::from_request_parts(parts, state).await;
        let Path((first, second)) = path.map_err(|error| Problem::new(ProblemKind::InvalidId, error.body_text()))?;
        let first = first.parse().map_err(|error: A::Err| Problem::bad_id(&error))?;
        let second = second.parse().map_err(|error: B::Err| Problem::bad_id(&error))?;
        Ok(Self(first, second))
    }
}

/// JSON body.
pub(super) struct JsonBody<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let body = Bytes::from_request(request, state).await;
        let body = body.map_err(|error| Problem::bad_body(error.body_text()))?;
        // Serde would accept an array as an object's fields in order.
        if body.trim_ascii_start().first() != Some(&b'{') {
            return Err(Problem::bad_body("Send one JSON object as GET /ownerserve/v1/openapi.json says."));
        }
        Json::from_bytes(&body).map(|Json(told)| Self(told)).map_err(|error| Problem::bad_body(error.body_text()))
    }
}

/// Limits of an operator request's body.
pub(super) const BODY_LIMITS: BodyLimits = BodyLimits {
    bytes: 64 << 10,
    pause: std::time::Duration::from_secs(10),
    total: std::time::Duration::from_secs(30),
};

/// Reads the whole body of a write within this memory.
pub(super) async fn read_write_body(
    (budget, aside): (&Arc<MemoryBudget>, &OffloadPool),
    parts: &Parts,
    body: Body,
) -> Result<Bytes, Problem> {
    let mut memory = budget.reservation(&TenantId("".into()));
    let request = new_request_id();
    read_body(&parts.headers, body, (BODY_LIMITS, &mut memory, (aside, request))).await.map_err(|error| {
        let kind = match &error {
            ApiError::BodyTooLarge { .. } => ProblemKind::BodyTooLarge,
            ApiError::BodyTimeout => ProblemKind::BodyTimeout,
            ApiError::UnknownEncoding { .. } => ProblemKind::UnsupportedMediaType,
            ApiError::Overloaded { .. } | ApiError::TooMuchMemory { .. } => ProblemKind::TooManyRequests,
            _ => ProblemKind::InvalidBody,
        };
        match kind {
            ProblemKind::TooManyRequests => Problem::new(
                kind,
                "Operators' requests in work hold all the memory there is for them. Try again shortly.",
            ),
            ProblemKind::BodyTooLarge => {
                Problem::new(kind, format!("The body is larger than {} bytes.", BODY_LIMITS.bytes))
            }
            _ => Problem::new(kind, error.to_string()),
        }
    })
}

/// Tenant name in a path.
pub(super) struct TenantName(pub(super) TenantId);

impl FromStr for TenantName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_name = !text.is_empty() && text.chars().count() <= MAX_TENANT_CHARS;
        if is_name { Ok(Self(TenantId(text.into()))) } else { Err("A tenant's name has 1 to 128 characters.") }
    }
}

/// Deserializes a field that may be null but must not be omitted.
pub(super) fn required_nullable<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: serde::Deserializer<'de>,
    T: serde::Deserialize<'de>,
{
    Option::deserialize(deserializer)
}
