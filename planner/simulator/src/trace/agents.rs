//! Recorded agent sessions with sub-agents: one JSON document per session, or JSON lines with the delta of each
//! request.
//!
//! A parent waits for its sub-agents; a sub-agent may have sub-agents of its own.

mod decision_log;
mod formats;
mod session_builder;

pub(super) use decision_log::{BLOCK as DECIDED_BLOCK, DecisionLogSessions, read as decisions};
pub(super) use formats::{document, read_delta_lines};

pub(super) const BLOCK: u32 = 64;
