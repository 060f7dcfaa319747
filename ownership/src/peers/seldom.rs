//! What is counted each time and told in the log now and then: whoever knocks must not fill the disk.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
/// Between two lines of the log.
pub(crate) const EVERY: Duration = Duration::from_secs(10);

/// Something that may happen at any rate.
#[derive(Debug, Default)]
pub(crate) struct Seldom {
    count: AtomicU64,
    /// When it was told last, and how often it had happened by then.
    told: Mutex<Option<(Instant, u64)>>,
}

impl Seldom {
    /// How often it happened.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }

    /// Counts one. How many were not told of before it, where it is time to tell.
    pub(crate) fn note(&self, now: Instant) -> Option<u64> {
        let count = self.count.fetch_add(1, Relaxed) + 1;
        let mut told = self.told.lock();
        let (at, before) = told.unzip();
        if at.is_some_and(|at| now.saturating_duration_since(at) < EVERY) {
            return None;
        }
        *told = Some((now, count));
        Some(count.saturating_sub(before.unwrap_or(0) + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_one_is_counted_and_the_log_has_a_line_now_and_then() {
        let (seldom, now) = (Seldom::default(), Instant::now());
        let told: Vec<_> = (0..5).map(|_| seldom.note(now)).collect();
        assert_eq!(told, [Some(0), None, None, None, None]);
        assert_eq!(seldom.note(now + EVERY), Some(4), "so many went by untold");
        assert_eq!(seldom.count(), 6);
    }
}
