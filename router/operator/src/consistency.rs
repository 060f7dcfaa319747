//! Read consistency: which view a read is served from, and the headers that describe it.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{FromRef, FromRequestParts, Query};
use axum::response::{IntoResponse, Response};
use http::header::ETAG;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue};
use ownership::LedgerView;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use vocabulary::NodeId;

use super::entity_tags::EntityTag;
use super::problem::{Problem, ProblemKind};
use super::request_units::DurationInput;
use proxy::ledger_access::LedgerAccess;
use vocabulary::TimeSpan;

/// Revision of the view that a response was served from.
pub(super) const REVISION_HEADER: HeaderName = HeaderName::from_static("ownerserve-revision");
/// Raft term known to this node at that time.
pub(super) const TERM_HEADER: HeaderName = HeaderName::from_static("ownerserve-term");
/// Node id of the leader; absent if none is known.
pub(super) const LEADER_HEADER: HeaderName = HeaderName::from_static("ownerserve-leader");

/// How fresh a read must be.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize, ToSchema, Debug, Default)]
#[serde(rename_all = "lowercase")]
pub(super) enum ConsistencyLevel {
    /// What this node last applied.
    #[default]
    Local,
    /// No older than `max_staleness`.
    Bounded,
    /// Everything that was acknowledged before the read began.
    Linearizable,
}

/// Consistency of a read.
#[derive(Clone, Copy, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct ConsistencyQuery {
    /// `local` (default): what this node last applied. `bounded`: no older than `max_staleness`. `linearizable`:
    /// everything that was acknowledged before the read began, asked of the leader.
    #[param(inline)]
    consistency: Option<ConsistencyLevel>,
    /// With `bounded`: how far the view may be behind, from `1ms` to `10m`.
    #[param(value_type = Option<TimeSpan>)]
    max_staleness: Option<DurationInput>,
}

/// Accepted range of the staleness.
const STALENESS_RANGE: std::ops::RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(600);

impl ConsistencyQuery {
    fn check(self) -> Result<ownership::Consistency, Problem> {
        let accepted = "accepted is 1ms to 10m, and only with consistency=bounded";
        match (self.consistency.unwrap_or_default(), self.max_staleness) {
            (ConsistencyLevel::Local, None) => Ok(ownership::Consistency::Local),
            (ConsistencyLevel::Linearizable, None) => Ok(ownership::Consistency::Linearizable),
            (ConsistencyLevel::Bounded, Some(DurationInput(max))) if STALENESS_RANGE.contains(&max) => {
                Ok(ownership::Consistency::Bounded(max))
            }
            (ConsistencyLevel::Bounded, None) => {
                Err(Problem::bad_query(format!("consistency=bounded needs max_staleness; {accepted}")))
            }
            (_, Some(_)) => Err(Problem::bad_query(format!("max_staleness: {accepted}"))),
        }
    }
}

/// View for a read, as fresh as requested.
pub(super) struct ReadView(pub(super) Arc<LedgerView>);

impl<S> FromRequestParts<S> for ReadView
where
    LedgerAccess: FromRef<S>,
    S: Send + Sync,
{
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let Query(query) = Query::<ConsistencyQuery>::try_from_uri(&parts.uri)
            .map_err(|error| Problem::bad_query(error.body_text()))?;
        let consistency = query.check()?;
        let read = LedgerAccess::from_ref(state).directory().read(consistency).await;
        let kind = match consistency {
            ownership::Consistency::Bounded(_) => ProblemKind::StalenessExceeded,
            _ => ProblemKind::NoQuorum,
        };
        read.map(ReadView).map_err(|error| Problem::new(kind, format!("{error}. Try again shortly.")))
    }
}

/// How fresh an answer is; part of every answer from the ledger.
#[derive(Clone, Copy, Serialize, ToSchema)]
pub(super) struct ViewStamp {
    /// Log index of the last entry in the view.
    revision: u64,
    /// Raft's term.
    term: u64,
    /// The leader's node id; null when none is known.
    #[schema(value_type = Option<u64>)]
    leader: Option<NodeId>,
    /// Whether the view may be out of date: no quorum confirms it.
    stale: bool,
}

impl ViewStamp {
    pub(super) fn of(view: &LedgerView) -> Self {
        let quorum = view.quorum();
        // A leader that lost its quorum, or was not heard from, is not reported.
        let leader = quorum.leader.filter(|_| !quorum.stale);
        Self { revision: view.applied(), term: quorum.term, leader, stale: quorum.stale }
    }

    /// Sets the headers, unless they are already set.
    pub(super) fn write_headers(self, headers: &mut HeaderMap) {
        if headers.contains_key(TERM_HEADER) {
            return;
        }
        headers.entry(REVISION_HEADER).or_insert(HeaderValue::from(self.revision));
        headers.insert(TERM_HEADER, HeaderValue::from(self.term));
        if let Some(leader) = self.leader {
            headers.insert(LEADER_HEADER, HeaderValue::from(leader.0));
        }
    }
}

/// An answer from the ledger, and how fresh it is.
#[derive(Serialize, ToSchema)]
pub(super) struct LedgerResponse<T: ToSchema> {
    #[serde(flatten)]
    at: ViewStamp,
    #[serde(flatten)]
    body: T,
    #[serde(skip)]
    tag: Option<EntityTag>,
}

impl<T: ToSchema> LedgerResponse<T> {
    pub(super) fn new(view: &LedgerView, body: T) -> Self {
        Self { at: ViewStamp::of(view), body, tag: None }
    }

    /// Adds an `ETag`.
    pub(super) fn with_tag(self, tag: EntityTag) -> Self {
        Self { tag: Some(tag), ..self }
    }
}

impl<T: Serialize + ToSchema> IntoResponse for LedgerResponse<T> {
    fn into_response(self) -> Response {
        let (at, tag) = (self.at, self.tag);
        let mut response = Json(self).into_response();
        at.write_headers(response.headers_mut());
        if let Some(tag) = tag {
            response.headers_mut().insert(ETAG, tag.to_header());
        }
        response
    }
}
