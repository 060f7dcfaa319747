//! Waits for resources that the process temporarily lacks: file descriptors, threads, memory.
//!
//! Waiting is safe because nothing was written yet. A failed write or fdatasync is final and is never retried here.

use std::fmt::Display;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use consensus::RetryBackoff;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::peers::log_throttle::LogThrottle;

/// How long a shortage counts as recent.
const RECENT_WINDOW: Duration = Duration::from_secs(30);

/// Resource shortages that one node has met.
#[derive(Debug, Default)]
pub(crate) struct ShortageTracker {
    throttle: LogThrottle,
    last: Mutex<Option<(Instant, String)>>,
    is_stopping: AtomicBool,
}

impl ShortageTracker {
    /// Returns the number of failed attempts.
    pub(crate) fn count(&self) -> u64 {
        self.throttle.count()
    }

    /// Returns what was recently unavailable.
    pub(crate) fn recent(&self) -> Option<String> {
        let last = self.last.lock();
        last.as_ref().filter(|(at, _)| at.elapsed() < RECENT_WINDOW).map(|(_, what)| what.clone())
    }

    /// Stops all retries, because the node is closing.
    pub(crate) fn stop_retrying(&self) {
        self.is_stopping.store(true, Relaxed);
    }

    pub(crate) fn record(&self, what: &impl Display, error: &io::Error) {
        let now = Instant::now();
        *self.last.lock() = Some((now, format!("{what}: {error}")));
        if let Some(suppressed) = self.throttle.record(now) {
            tracing::error!(
                %error, suppressed,
                "{what} cannot be opened or begun now, and is tried again: this process is out of file handles, threads or \
                 memory. Raise its limits (ulimit -n, LimitNOFILE), or see what takes them"
            );
        }
    }

    /// Returns the wait before the next attempt; `None` if there is none.
    fn wait(&self, waits: &mut RetryBackoff, what: &impl Display, error: &io::Error) -> Option<Duration> {
        let wait = waits.after(error).filter(|_| !self.is_stopping.load(Relaxed))?;
        self.record(what, error);
        Some(wait)
    }

    /// Opens something, retrying until the process can. Blocks this thread.
    pub(crate) fn open_retrying<T>(
        &self,
        what: impl Display,
        mut open: impl FnMut() -> io::Result<T>,
    ) -> io::Result<T> {
        let mut waits = RetryBackoff::default();
        loop {
            let opened = open();
            let wait = opened.as_ref().err().and_then(|error| self.wait(&mut waits, &what, error));
            let Some(wait) = wait else { return opened };
            thread::sleep(wait);
        }
    }

    /// Like [`Self::open_retrying`], without blocking the thread between attempts.
    pub(crate) async fn open_retrying_async<T>(
        &self,
        what: String,
        mut open: impl FnMut() -> io::Result<T>,
    ) -> io::Result<T> {
        let mut waits = RetryBackoff::default();
        loop {
            let opened = open();
            let wait = opened.as_ref().err().and_then(|error| self.wait(&mut waits, &what, error));
            let Some(wait) = wait else { return opened };
            tokio::time::sleep(wait).await;
        }
    }

    /// Runs disk work on a thread of its own and waits for it.
    pub(crate) async fn run_blocking<T: Send + 'static>(
        &self,
        what: &'static str,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let (answer, answered) = oneshot::channel();
        let work = DeferredWork::new(move || {
            // The requester may be gone.
            drop(answer.send(work()));
        });
        self.open_retrying_async(format!("a thread for {what}"), || work.spawn(what)).await?;
        answered.await.map_err(|_| io::Error::other(format!("{what} ended in a panic")))?
    }
}

/// Work that waits for a thread; a failed attempt to start one does not lose it.
struct DeferredWork<W>(Arc<Mutex<Option<W>>>);

impl<W: FnOnce() + Send + 'static> DeferredWork<W> {
    fn new(work: W) -> Self {
        Self(Arc::new(Mutex::new(Some(work))))
    }

    fn spawn(&self, name: &str) -> io::Result<()> {
        let waiting = self.0.clone();
        let run = move || {
            let work = waiting.lock().take();
            work.into_iter().for_each(|work| work());
        };
        thread::Builder::new().name(name.to_owned()).spawn(run).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    fn failing<T: Copy>(times: u32, errno: Errno, then: T) -> impl FnMut() -> io::Result<T> {
        let mut left = times;
        move || {
            if left == 0 {
                return Ok(then);
            }
            left -= 1;
            Err(errno.into())
        }
    }

    #[test]
    fn a_resource_shortage_is_retried_and_reported() {
        let shortages = ShortageTracker::default();
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::AGAIN] {
            assert_eq!(shortages.open_retrying("a file", failing(2, errno, 7)).unwrap(), 7);
        }
        assert_eq!(shortages.count(), 8);
        assert!(shortages.recent().unwrap().starts_with("a file: "));
    }

    #[test]
    fn other_errors_and_shortages_at_shutdown_are_final() {
        let shortages = ShortageTracker::default();
        for errno in [Errno::IO, Errno::NOSPC, Errno::NOENT, Errno::ACCESS] {
            assert!(shortages.open_retrying("a file", failing(1, errno, ())).is_err(), "{errno:?}");
        }
        assert_eq!((shortages.count(), shortages.recent()), (0, None));
        shortages.stop_retrying();
        assert!(shortages.open_retrying("a file", failing(1, Errno::MFILE, ())).is_err());
    }

    #[tokio::test]
    async fn deferred_work_that_panics_returns_an_error() {
        let shortages = ShortageTracker::default();
        assert_eq!(shortages.run_blocking("a sum", || Ok(2 + 2)).await.unwrap(), 4);
        let error =
            shortages.run_blocking("a bug", || -> io::Result<()> { panic!("a planted one") }).await.unwrap_err();
        assert!(error.to_string().contains("a bug ended in a panic"), "{error}");
    }
}
