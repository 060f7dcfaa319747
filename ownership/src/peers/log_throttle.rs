//! Rate-limited logging of counted events, so that a caller cannot fill the disk with log lines.

use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Minimum time between two log lines.
pub(crate) const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Counter of an event that may happen at any rate.
#[derive(Debug, Default)]
pub(crate) struct LogThrottle {
    count: AtomicU64,
    /// When it was last logged, and the count at that time.
    last_logged: Mutex<Option<(Instant, u64)>>,
}

impl LogThrottle {
    /// Returns the number of events.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }

    /// Counts an event. If it should be logged, returns how many were not logged before it.
    pub(crate) fn record(&self, now: Instant) -> Option<u64> {
        let count = self.count.fetch_add(1, Relaxed) + 1;
        let mut last_logged = self.last_logged.lock();
        let (at, before) = last_logged.unzip();
        if at.is_some_and(|at| now.saturating_duration_since(at) < LOG_INTERVAL) {
            return None;
        }
        *last_logged = Some((now, count));
        Some(count.saturating_sub(before.unwrap_or(0) + 1))
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_throttled_log_counts_every_event() {
        let (throttle, now) = (LogThrottle::default(), Instant::now());
        let logged: Vec<_> = (0..5).map(|_| throttle.record(now)).collect();
        assert_eq!(logged, [Some(0), None, None, None, None]);
        assert_eq!(throttle.record(now + LOG_INTERVAL), Some(4), "so many went by untold");
        assert_eq!(throttle.count(), 6);
    }
}
