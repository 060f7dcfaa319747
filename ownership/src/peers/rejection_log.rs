//! Counter and rate-limited log of rejected callers and messages.

use std::fmt::Display;
use std::time::Instant;

use crate::peers::log_throttle::LogThrottle;

/// Rejections for one reason.
#[derive(Debug)]
pub(crate) struct RejectionLog {
    /// Reason, for the log.
    reason: &'static str,
    throttle: LogThrottle,
}

impl RejectionLog {
    pub(crate) fn new(reason: &'static str) -> Self {
        Self { reason, throttle: LogThrottle::default() }
    }

    pub(crate) fn count(&self) -> u64 {
        self.throttle.count()
    }

    pub(crate) fn record(&self, from: &impl Display, why: &str) {
        if let Some(suppressed) = self.throttle.record(Instant::now()) {
            tracing::warn!(%from, reason = why, suppressed, "{}", self.reason);
        }
    }
}
