//! Callers that TLS kept out: counted, and told in the log now and then. Whoever knocks must not fill the disk.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Between two lines of the log.
const EVERY: Duration = Duration::from_secs(10);

/// Callers that did not come in.
#[derive(Debug, Default)]
pub(crate) struct Strangers {
    count: AtomicU64,
    /// When it was said last, and how many there were by then.
    said: Mutex<Option<(Instant, u64)>>,
}

impl Strangers {
    /// How many there were.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }

    /// One more.
    pub(crate) fn came(&self, from: SocketAddr, why: &str) {
        if let Some(unsaid) = self.note(Instant::now()) {
            tracing::warn!(%from, why, unsaid, "a caller did not come in as another node: TLS refused it");
        }
    }

    /// Counts one. How many were not told of before it, where it is time to tell.
    fn note(&self, now: Instant) -> Option<u64> {
        let count = self.count.fetch_add(1, Relaxed) + 1;
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, before) = said.unzip();
        if at.is_some_and(|at| now.saturating_duration_since(at) < EVERY) {
            return None;
        }
        *said = Some((now, count));
        Some(count.saturating_sub(before.unwrap_or(0) + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_one_is_counted_and_the_log_has_a_line_now_and_then() {
        let (strangers, now) = (Strangers::default(), Instant::now());
        let told: Vec<_> = (0..5).map(|_| strangers.note(now)).collect();
        assert_eq!(told, [Some(0), None, None, None, None]);
        assert_eq!(strangers.note(now + EVERY), Some(4), "so many went by untold");
        assert_eq!(strangers.count(), 6);
    }
}
