//! Spans of the stages of a request.

use tracing::Span;
use vocabulary::RequestId;

/// Returns the span of one stage of a request.
pub(super) fn stage_span(request: RequestId, stage: &'static str) -> Span {
    tracing::info_span!("stage", %request, stage)
}
