//! Callers and messages that were kept out: counted, and told of in the log now and then.

use std::fmt::Display;
use std::time::Instant;

use crate::peers::seldom::Seldom;

/// What was kept out for one reason.
#[derive(Debug)]
pub(crate) struct KeptOut {
    /// The reason, for the log.
    reason: &'static str,
    all: Seldom,
}

impl KeptOut {
    pub(crate) fn new(reason: &'static str) -> Self {
        Self { reason, all: Seldom::default() }
    }

    pub(crate) fn count(&self) -> u64 {
        self.all.count()
    }

    pub(crate) fn note(&self, from: &impl Display, why: &str) {
        if let Some(unsaid) = self.all.note(Instant::now()) {
            tracing::warn!(%from, why, unsaid, "{}", self.reason);
        }
    }
}
