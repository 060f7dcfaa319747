//! Recorded agent sessions with their sub-agents: one JSON document a session, or JSON lines of what each request adds.
//!
//! The parent waits for a sub-agent; a sub-agent may have sub-agents of its own.

mod decided;
mod forms;
mod weave;

pub(super) use decided::{BLOCK as DECIDED_BLOCK, DecisionLogSessions, read as decisions};
pub(super) use forms::{document, read_delta_lines};

pub(super) const BLOCK: u32 = 64;
