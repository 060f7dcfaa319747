//! Requests to the run-level engine.

use std::sync::Arc;

use vocabulary::Tokens;

use super::{RunId, Seconds};

/// Id of a request, chosen by its sender.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct RunRequestId(pub u32);

/// Where the answer is generated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DecodeLocation {
    /// At the engine that computes the prompt.
    Local,
    /// At another engine, to which the prompt's KV is sent.
    Remote,
}

/// A request.
#[derive(Clone, PartialEq, Debug)]
pub struct RunRequest {
    /// Its id.
    pub ticket: RunRequestId,
    /// The complete blocks of its prompt.
    pub path: Arc<[RunId]>,
    /// Prompt tokens.
    pub tokens: Tokens,
    /// Answer tokens.
    pub answer: Tokens,
    /// Blocks of prompt and answer that later requests will contain.
    pub expected_history: Option<Arc<[RunId]>>,
    /// Where its answer is generated.
    pub decode_location: DecodeLocation,
    /// Runs that are sent here before it can start, in the order of the path.
    pub fetched_runs: Vec<RunId>,
    /// When these arrive.
    pub ready_at: Seconds,
    /// Tokens that its sender expected to be computed.
    pub expected: Tokens,
    /// Seconds of work that its sender expected.
    pub expected_work: f64,
}

/// A computed prompt whose KV waits for the engine that generates the answer.
#[derive(Clone, PartialEq, Debug)]
pub struct PrefillHandoff {
    /// The request.
    pub prompt: RunRequest,
    /// Memory that it holds here besides its path.
    pub(super) reserved: Tokens,
}
