//! What the engine by runs is asked.

use std::sync::Arc;

use vocabulary::Tokens;

use super::{RunId, Seconds};

/// A request's name for whoever sent it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct RunRequestId(pub u32);

/// Where the answer is generated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DecodeLocation {
    /// At the engine that computes the prompt.
    Local,
    /// At another one, which is sent the prompt's KV.
    Remote,
}

/// One request.
#[derive(Clone, PartialEq, Debug)]
pub struct RunRequest {
    /// Its name.
    pub ticket: RunRequestId,
    /// The whole blocks of its prompt.
    pub path: Arc<[RunId]>,
    /// Tokens of the prompt.
    pub tokens: Tokens,
    /// Tokens of the answer.
    pub answer: Tokens,
    /// Blocks of prompt and answer that will be asked for again.
    pub expected_history: Option<Arc<[RunId]>>,
    /// Where its answer is generated.
    pub decode_location: DecodeLocation,
    /// Runs that are sent here before it can begin, in the order of the path.
    pub fetched_runs: Vec<RunId>,
    /// When they are here.
    pub ready_at: Seconds,
    /// Tokens that were expected to be computed when it was sent.
    pub expected: Tokens,
    /// Seconds that this was expected to take.
    pub expected_work: f64,
}

/// A prompt whose KV waits for the engine that answers it.
#[derive(Clone, PartialEq, Debug)]
pub struct PrefilledRequest {
    /// The request.
    pub prompt: RunRequest,
    /// Memory that it holds here besides its path.
    pub(super) reserved: Tokens,
}
