//! Recorded traffic as the simulation replays it: sessions of steps whose prompts are paths of runs.

mod agents;
mod azure;
mod block_ids;
mod budget;
mod error;
mod generate;
mod limits;
mod mooncake;
mod notes;
mod radix;
mod reader;
mod record;
mod text;
mod transcripts;

use std::sync::Arc;

use engine_model::runs::{RunId, RunTree};
use vocabulary::{Micros, Tokens};

pub use error::{TraceError, TraceFault};
pub use generate::{TrafficPattern, Workload};
pub use limits::{ReplayLimits, SessionListError};
pub use notes::{is_truncated, truncation_note};
pub use reader::TraceReader;
pub(crate) use record::MAX_SECONDS;

/// A trace, ready to be replayed.
#[derive(Clone, Debug)]
pub struct Trace {
    /// When its steps arrive.
    pub arrivals: ArrivalProcess,
    /// Tokens in a block of the recording: prompts are equal in whole blocks only.
    pub block: Tokens,
    /// What prompts are made of.
    pub runs: RunTree,
    /// In the order of the files.
    pub sessions: Vec<TraceSession>,
    /// What was left out, and what else must be known of it.
    pub notes: Vec<String>,
}

/// What makes a step arrive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ArrivalProcess {
    /// The end of the steps before it, and a pause: a slow answer delays what follows. Load is sessions at once.
    AfterDependencies,
    /// The clock: every request is on its own. Load is a factor on the recorded rate.
    Recorded,
}

/// One conversation with its sub-agents, or one recording of independent requests.
#[derive(Clone, PartialEq, Debug)]
pub struct TraceSession {
    /// As the recording calls it.
    pub id: Arc<str>,
    /// In the order of the recording.
    pub steps: Vec<TraceStep>,
}

/// One request with its whole prompt, and its answer.
#[derive(Clone, PartialEq, Debug)]
pub struct TraceStep {
    /// 0 for the conversation itself, others for its sub-agents.
    pub agent: u32,
    /// The steps of this session that it waits for.
    pub after: Vec<usize>,
    /// The pause after the last of them.
    pub pause: Micros,
    /// When it was recorded to start.
    pub at: Micros,
    /// Tokens of the whole prompt.
    pub prompt: Tokens,
    /// Tokens of the answer, at least one.
    pub answer: Tokens,
    /// The whole blocks of the prompt.
    pub path: Arc<[RunId]>,
    /// The whole blocks of prompt and answer as the agent's next step resends them; none where it does not.
    pub resent_path: Option<Arc<[RunId]>>,
}

impl Trace {
    /// All its steps.
    pub fn steps(&self) -> impl Iterator<Item = &TraceStep> {
        self.sessions.iter().flat_map(|session| &session.steps)
    }

    /// Device memory that a step takes alone, in tokens' worth.
    pub(crate) fn kv_footprint(&self, step: &TraceStep) -> Tokens {
        let path: Tokens = step.path.iter().map(|run| self.runs.device_size(*run)).sum();
        path + (step.prompt - self.runs.end_depth(&step.path)) + step.answer + self.runs.window_size()
    }
}
