//! Several routers as one: what this router has done and the ledger does not show yet, and what routers tell each other.
//!
//! Nothing here is on the way of a request but short reads of memory. Whatever is missing here makes a worse plan, never a
//! wrong answer.

pub mod keeper;
pub mod unapplied;
