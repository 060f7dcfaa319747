//! Recorded agent sessions with their sub-agents: one JSON document a session, or JSON lines of what each request adds.
//!
//! The parent waits for a sub-agent; a sub-agent may have sub-agents of its own.

mod decision_log;
mod formats;
mod session_builder;

pub(super) use decision_log::{BLOCK as DECIDED_BLOCK, DecisionLogSessions, read as decisions};
pub(super) use formats::{document, read_delta_lines};

pub(super) const BLOCK: u32 = 64;
