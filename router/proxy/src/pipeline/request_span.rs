//! Span of a request, by whose id its log lines are found.

use tracing::Span;
use vocabulary::RequestId;

/// Returns the span of a request. One for all stages: a span costs as much as a stage.
pub(super) fn request_span(request: RequestId) -> Span {
    tracing::info_span!("request", id = %request)
}
