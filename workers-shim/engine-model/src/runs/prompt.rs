//! What the engine by runs is asked.

use std::sync::Arc;

use vocabulary::Tokens;

use super::{RunId, Seconds};

/// A request's name for whoever sent it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Ticket(pub u32);

/// Where the answer is generated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Where {
    /// At the engine that computes the prompt.
    Here,
    /// At another one, which is sent the prompt's KV.
    Elsewhere,
}

/// One request.
#[derive(Clone, PartialEq, Debug)]
pub struct Prompt {
    /// Its name.
    pub ticket: Ticket,
    /// The whole blocks of its prompt.
    pub path: Arc<[RunId]>,
    /// Tokens of the prompt.
    pub tokens: Tokens,
    /// Tokens of the answer.
    pub answer: Tokens,
    /// Blocks of prompt and answer that will be asked for again.
    pub resent: Option<Arc<[RunId]>>,
    /// Where its answer is generated.
    pub answered: Where,
    /// Runs that are sent here before it can begin, in the order of the path.
    pub fetched: Vec<RunId>,
    /// When they are here.
    pub ready: Seconds,
    /// Tokens that were expected to be computed when it was sent.
    pub expected: Tokens,
    /// Seconds that this was expected to take.
    pub expected_work: f64,
}

/// A prompt whose KV waits for the engine that answers it.
#[derive(Clone, PartialEq, Debug)]
pub struct Prefilled {
    /// The request.
    pub prompt: Prompt,
    /// Memory that it holds here besides its path.
    pub(super) reserved: Tokens,
}
