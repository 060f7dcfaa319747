//! Recorded traffic for the simulator: sessions of steps whose prompts are paths of runs.

mod agents;
mod azure;
mod block_ids;
mod error;
mod generate;
mod line_parsing;
mod mooncake;
mod reader;
mod replay_limits;
mod run_builder;
mod text;
mod transcripts;

use std::collections::HashMap;
use std::sync::Arc;

use engine_model::runs::{RunId, RunTree};
use smart_default::SmartDefault;
use vocabulary::{Micros, Tokens};

use self::agents::DecisionLogSessions;
use self::error::TraceLocation;

pub use error::{TraceError, TraceFault};
pub use generate::{SharingPattern, Workload};
pub(crate) use line_parsing::MAX_SECONDS;
pub use line_parsing::{is_truncated, truncation_note};
pub use reader::TraceLoader;
pub use replay_limits::{ReplayLimits, SessionListError};

/// A trace that can be replayed.
#[derive(Clone, Debug)]
pub struct Trace {
    /// How the arrival of steps is determined.
    pub arrivals: ArrivalProcess,
    /// Tokens per block of the recording: prompts are compared in whole blocks only.
    pub block: Tokens,
    /// Runs that prompts consist of.
    pub runs: RunTree,
    /// Sessions, in the order of the files.
    pub sessions: Vec<TraceSession>,
    /// Notes on what was left out, and other caveats.
    pub notes: Vec<String>,
}

/// How the arrival of steps is determined.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ArrivalProcess {
    /// A step arrives a pause after its predecessors end, so a slow answer delays the next step. Load is concurrent
    /// sessions.
    AfterDependencies,
    /// Requests are independent and arrive at recorded times. Load is a factor on the recorded rate.
    Recorded,
}

/// One conversation with its sub-agents, or one recording of independent requests.
#[derive(Clone, PartialEq, Debug)]
pub struct TraceSession {
    /// Id in the recording.
    pub id: Arc<str>,
    /// Steps, in the order of the recording.
    pub steps: Vec<TraceStep>,
}

/// One request with its whole prompt and its answer.
#[derive(Clone, PartialEq, Debug)]
pub struct TraceStep {
    /// Agent number: 0 for the conversation itself, others for its sub-agents.
    pub agent: u32,
    /// Indices of the steps in this session that must end first.
    pub after: Vec<usize>,
    /// Pause after the last of them.
    pub pause: Micros,
    /// Recorded start time.
    pub at: Micros,
    /// Tokens of the whole prompt.
    pub prompt: Tokens,
    /// Tokens of the answer, at least one.
    pub answer: Tokens,
    /// Runs of the whole blocks of the prompt.
    pub path: Arc<[RunId]>,
    /// Runs of the whole blocks of prompt and answer as the agent's next step resends them; none if it does not.
    pub resent_path: Option<Arc<[RunId]>>,
}

impl Trace {
    /// Returns all steps.
    pub fn steps(&self) -> impl Iterator<Item = &TraceStep> {
        self.sessions.iter().flat_map(|session| &session.steps)
    }

    /// Returns the device memory of a step alone, in tokens.
    pub(crate) fn kv_footprint(&self, step: &TraceStep) -> Tokens {
        let path: Tokens = step.path.iter().map(|run| self.runs.device_size(*run)).sum();
        path + (step.prompt - self.runs.end_depth(&step.path)) + step.answer + self.runs.window_size()
    }
}

/// Most path entries and ranges of block ids in all files together: at most half a gigabyte of ranges, and eight times
/// the size of five hundred recorded sessions of coding agents.
const MAX_ENTRIES: usize = 1 << 25;

#[derive(Debug, SmartDefault)]
pub(crate) struct TraceEntryBudget {
    #[default(MAX_ENTRIES)]
    left: usize,
}

impl TraceEntryBudget {
    /// Takes `entries` from the budget for a prompt.
    pub(crate) fn take(&mut self, location: TraceLocation<'_>, entries: usize) -> Result<(), TraceError> {
        let accepted = "prompts of 33554432 runs in all; split the trace";
        let over = || location.out_of_range("the prompts", "more than can be held", accepted);
        self.left = self.left.checked_sub(entries).ok_or_else(over)?;
        Ok(())
    }
}

/// Contents of the files read so far.
#[derive(Default)]
pub(crate) struct TraceBuilder {
    runs: RunTree,
    sessions: Vec<TraceSession>,
    /// Runs of the tools at the start of agent sessions, which sessions share.
    tool_prefixes: HashMap<(u64, u32, u32), RunId>,
    /// Runs of texts, by the previous run and the hash of the text.
    texts: HashMap<(Option<RunId>, u64), RunId>,
    /// Sessions of decision logs.
    decision_logs: DecisionLogSessions,
    /// Positions of truncated last lines.
    truncated: Vec<String>,
    /// Remaining size that prompts may expand to.
    budget: TraceEntryBudget,
}
