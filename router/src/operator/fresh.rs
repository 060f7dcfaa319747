//! How fresh an answer is: which view a read was promised, and what every answer says of the view it came from.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{FromRequestParts, Query};
use axum::response::{IntoResponse, Response};
use http::header::ETAG;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue};
use ownership::View;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use vocabulary::NodeId;

use super::desk::Desk;
use super::problem::{Kind, Problem};
use super::tags::Tag;

/// Revision of the view that an answer came from.
pub(super) const REVISION: HeaderName = HeaderName::from_static("ownerserve-revision");
/// Raft's term, as this node knew it then.
pub(super) const TERM: HeaderName = HeaderName::from_static("ownerserve-term");
/// The leader's node id; missing when none is known.
pub(super) const LEADER: HeaderName = HeaderName::from_static("ownerserve-leader");

/// How fresh a read must be.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize, ToSchema, Debug, Default)]
#[serde(rename_all = "lowercase")]
pub(super) enum Consistency {
    /// What this node last applied.
    #[default]
    Local,
    /// No older than `max_staleness`.
    Bounded,
    /// Everything that was acknowledged before the read began.
    Linearizable,
}

/// The promise that a read asks for.
#[derive(Clone, Copy, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct FreshQuery {
    /// `local` (default): what this node last applied. `bounded`: no older than `max_staleness`. `linearizable`:
    /// everything that was acknowledged before the read began, asked of the leader.
    #[param(inline)]
    consistency: Option<Consistency>,
    /// With `bounded`: milliseconds that the view may be behind.
    #[param(minimum = 1, maximum = 600_000)]
    max_staleness: Option<u32>,
}

/// Longest staleness that may be asked for, milliseconds.
const MOST_STALENESS: u32 = 600_000;

impl FreshQuery {
    fn check(self) -> Result<ownership::Consistency, Problem> {
        let accepted = "accepted is 1 to 600000, in milliseconds, and only with consistency=bounded";
        match (self.consistency.unwrap_or_default(), self.max_staleness) {
            (Consistency::Local, None) => Ok(ownership::Consistency::Local),
            (Consistency::Linearizable, None) => Ok(ownership::Consistency::Linearizable),
            (Consistency::Bounded, Some(most)) if (1..=MOST_STALENESS).contains(&most) => {
                Ok(ownership::Consistency::Bounded(Duration::from_millis(most.into())))
            }
            (Consistency::Bounded, None) => {
                Err(Problem::bad_query(format!("consistency=bounded needs max_staleness; {accepted}")))
            }
            (_, Some(_)) => Err(Problem::bad_query(format!("max_staleness: {accepted}"))),
        }
    }
}

/// The view that a read works on, as fresh as it asked for.
pub(super) struct Seen(pub(super) Arc<View>);

impl FromRequestParts<Desk> for Seen {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, desk: &Desk) -> Result<Self, Problem> {
        let Query(query) =
            Query::<FreshQuery>::try_from_uri(&parts.uri).map_err(|error| Problem::bad_query(error.body_text()))?;
        let consistency = query.check()?;
        let read = desk.gateway.directory().read(consistency).await;
        let kind = match consistency {
            ownership::Consistency::Bounded(_) => Kind::TooStale,
            _ => Kind::NoQuorum,
        };
        read.map(Seen).map_err(|error| Problem::new(kind, format!("{error}. Try again shortly.")))
    }
}

/// How fresh an answer is; part of every answer from the ledger.
#[derive(Clone, Copy, Serialize, ToSchema)]
pub(super) struct At {
    /// Log index of the last entry in the view.
    revision: u64,
    /// Raft's term.
    term: u64,
    /// The leader's node id; none when none is known.
    #[schema(value_type = Option<u64>)]
    leader: Option<NodeId>,
    /// Whether this node cannot say that its view is fresh.
    stale: bool,
}

impl At {
    pub(super) fn of(view: &View) -> Self {
        let quorum = view.quorum();
        // One that lost its quorum, or was not heard of, leads nobody.
        let leader = quorum.leader.filter(|_| !quorum.stale);
        Self { revision: view.applied(), term: quorum.term, leader, stale: quorum.stale }
    }

    /// Says it in the headers, unless they say it already.
    pub(super) fn mark(self, headers: &mut HeaderMap) {
        if headers.contains_key(TERM) {
            return;
        }
        headers.entry(REVISION).or_insert(HeaderValue::from(self.revision));
        headers.insert(TERM, HeaderValue::from(self.term));
        if let Some(leader) = self.leader {
            headers.insert(LEADER, HeaderValue::from(leader.0));
        }
    }
}

/// An answer from the ledger, and how fresh it is.
#[derive(Serialize, ToSchema)]
pub(super) struct Fresh<T: ToSchema> {
    #[serde(flatten)]
    at: At,
    #[serde(flatten)]
    body: T,
    #[serde(skip)]
    tag: Option<Tag>,
}

impl<T: ToSchema> Fresh<T> {
    pub(super) fn new(view: &View, body: T) -> Self {
        Self { at: At::of(view), body, tag: None }
    }

    /// With an `ETag`.
    pub(super) fn tagged(self, tag: Tag) -> Self {
        Self { tag: Some(tag), ..self }
    }
}

impl<T: Serialize + ToSchema> IntoResponse for Fresh<T> {
    fn into_response(self) -> Response {
        let (at, tag) = (self.at, self.tag);
        let mut response = Json(self).into_response();
        at.mark(response.headers_mut());
        if let Some(tag) = tag {
            response.headers_mut().insert(ETAG, tag.header());
        }
        response
    }
}
