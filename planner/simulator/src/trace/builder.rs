//! Trace under construction, to which the readers of all formats add.

use std::collections::HashMap;

use engine_model::runs::{RunId, RunTree};

use super::TraceSession;
use super::agents::DecisionLogSessions;
use super::budget::TraceBudget;

/// Contents of the files read so far.
#[derive(Default)]
pub(crate) struct TraceBuilder {
    pub(super) runs: RunTree,
    pub(super) sessions: Vec<TraceSession>,
    /// Runs of the tools at the start of agent sessions, which sessions share.
    pub(super) tool_prefixes: HashMap<(u64, u32, u32), RunId>,
    /// Runs of texts, by the previous run and the hash of the text.
    pub(super) texts: HashMap<(Option<RunId>, u64), RunId>,
    /// Sessions of decision logs.
    pub(super) decision_logs: DecisionLogSessions,
    /// Positions of truncated last lines.
    pub(super) truncated: Vec<String>,
    /// Remaining size that prompts may expand to.
    pub(super) budget: TraceBudget,
}
