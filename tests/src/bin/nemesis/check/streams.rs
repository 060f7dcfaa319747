//! Checks that every response stream ends with a reason that its client can read.

use super::violation::GuaranteeViolation;
use crate::history::RunInstant;

/// How a response stream ended for its client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ResponseStreamEnd {
    /// With a finish reason and `[DONE]`.
    Whole,
    /// With an error event.
    Error,
    /// The connection was closed without an orderly end.
    Cut,
    /// In order, but without a finish reason or an error.
    Silent,
}

/// A finished stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamEnding {
    /// How it ended.
    pub(crate) end: ResponseStreamEnd,
    /// When it ended.
    pub(crate) at: RunInstant,
}

/// Checks that no stream ended silently. A connection cut by a killed router is not silent.
pub(crate) fn check_streams(streamed: &[StreamEnding]) -> Vec<GuaranteeViolation> {
    let silent = streamed.iter().find(|stream| stream.end == ResponseStreamEnd::Silent);
    let detail = |stream: &StreamEnding| format!("one ended without a word at {} us", stream.at.0);
    let broken = |stream| GuaranteeViolation { guarantee: "every stream ends with a reason", detail: detail(stream) };
    silent.map(broken).into_iter().collect()
}
