//! Answer streams: each ends with a reason, as its client reads it.

use super::GuaranteeViolation;
use crate::history::RunInstant;

/// An answer stream of a model, as its client saw it end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StreamEnd {
    /// With a finish reason and `[DONE]`.
    Whole,
    /// With an error that the client could read.
    Error,
    /// The connection went away.
    Cut,
    /// It ended as if it were whole, but said nothing.
    Silent,
}

/// A stream and when it ran.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamRecord {
    /// How it ended.
    pub(crate) end: StreamEnd,
    /// When it ended.
    pub(crate) at: RunInstant,
}

/// No stream ends in silence. A connection to a router that was killed is cut, which is no silence.
pub(crate) fn check_streams(streamed: &[StreamRecord]) -> Vec<GuaranteeViolation> {
    let silent = streamed.iter().find(|stream| stream.end == StreamEnd::Silent);
    let detail = |stream: &StreamRecord| format!("one ended without a word at {} us", stream.at.0);
    let broken = |stream| GuaranteeViolation { guarantee: "every stream ends with a reason", detail: detail(stream) };
    silent.map(broken).into_iter().collect()
}
