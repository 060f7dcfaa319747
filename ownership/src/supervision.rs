//! Supervision of tasks that run as long as the node. A task that panics is logged, counted and restarted with backoff.

use std::any::Any;
use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// Wait before the first restart; doubles with each restart.
const MIN_BACKOFF: Duration = Duration::from_millis(20);

/// Maximum wait.
const MAX_BACKOFF: Duration = Duration::from_secs(30);

/// Running time after which a task counts as healthy again.
const MIN_HEALTHY_RUN: Duration = Duration::from_secs(60);

/// How long an unexpected end of a task counts as an alarm.
const ALARM_WINDOW: Duration = Duration::from_secs(300);

/// Tasks that ended unexpectedly.
#[derive(Debug, Default)]
pub struct SupervisedTasks {
    task_ends: Mutex<BTreeMap<&'static str, UnexpectedTaskEnds>>,
    /// Fail points by which tests end a task.
    fail_points: Mutex<BTreeMap<&'static str, Arc<Notify>>>,
}

/// Number of unexpected ends, and the time of the last one.
#[derive(Clone, Copy, Debug)]
struct UnexpectedTaskEnds {
    times: u64,
    last: Instant,
}

impl SupervisedTasks {
    /// Returns how often each task ended unexpectedly.
    pub fn unexpected_ends(&self) -> BTreeMap<&'static str, u64> {
        self.task_ends.lock().iter().map(|(name, ends)| (*name, ends.times)).collect()
    }

    /// Returns the tasks that ended unexpectedly in the last five minutes.
    pub fn recently_ended(&self) -> Vec<&'static str> {
        let ended = self.task_ends.lock();
        ended.iter().filter(|(_, ends)| ends.last.elapsed() < ALARM_WINDOW).map(|(name, _)| *name).collect()
    }

    /// Returns all tasks that have started and not returned.
    pub fn tasks(&self) -> Vec<&'static str> {
        self.fail_points.lock().keys().copied().collect()
    }

    /// Ends a task as a panic would, for tests.
    pub fn inject_failure(&self, name: &str) {
        if let Some(point) = self.fail_points.lock().get(name) {
            point.notify_one();
        }
    }

    fn record_end(&self, name: &'static str) {
        let (mut ended, last) = (self.task_ends.lock(), Instant::now());
        let times = ended.get(name).map_or(0, |ends| ends.times);
        ended.insert(name, UnexpectedTaskEnds { times: times + 1, last });
    }

    /// Runs a task until it returns, which means that its work is complete. If aborted, it drops everything it holds.
    pub fn supervise<F: Future<Output = ()> + Send>(
        self: &Arc<Self>,
        name: &'static str,
        begin: impl FnMut() -> F + Send + 'static,
    ) -> JoinHandle<()> {
        tokio::spawn(self.kept(name, begin))
    }

    /// Runs a task that should never return: a return counts as an unexpected end, too.
    pub fn supervise_forever<F: Future<Output = ()> + Send>(
        self: &Arc<Self>,
        name: &'static str,
        mut begin: impl FnMut() -> F + Send + 'static,
    ) -> JoinHandle<()> {
        let begin = move || {
            let task = begin();
            async move {
                task.await;
                panic!("it returned, and has no end");
            }
        };
        tokio::spawn(self.kept(name, begin))
    }

    /// Like [`SupervisedTasks::supervise`], but the caller spawns the returned future. Several tasks may share a name.
    pub fn kept<F: Future<Output = ()> + Send>(
        self: &Arc<Self>,
        name: &'static str,
        mut begin: impl FnMut() -> F + Send + 'static,
    ) -> impl Future<Output = ()> + Send + 'static {
        let own = self.clone();
        let fail_point = self.fail_points.lock().entry(name).or_default().clone();
        async move {
            let mut wait = MIN_BACKOFF;
            loop {
                let begun = Instant::now();
                // Shared state is behind locks or created anew.
                let running = AssertUnwindSafe(async { begin().await }).catch_unwind();
                let ended: Result<(), Box<dyn Any + Send>> = tokio::select! {
                    ended = running => ended,
                    () = fail_point.notified() => Err(Box::new("a fail point")),
                };
                let Err(panic) = ended else {
                    let mut fail_points = own.fail_points.lock();
                    // One reference is the map's, the other this one.
                    if Arc::strong_count(&fail_point) == 2 {
                        fail_points.remove(name);
                    }
                    return;
                };
                own.record_end(name);
                if begun.elapsed() >= MIN_HEALTHY_RUN {
                    wait = MIN_BACKOFF;
                }
                let why = panic_message(&*panic);
                tracing::error!(
                    task = name,
                    reason = why,
                    ?wait,
                    "a background task panicked and is restarted after the wait; please report this"
                );
                tokio::time::sleep(wait).await;
                wait = (wait * 2).min(MAX_BACKOFF);
            }
        }
    }
}

/// Returns the message of a panic.
fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without words")
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn a_panicking_task_is_counted_and_restarted_until_it_returns() {
        let (supervision, (sender, mut receiver)) = (Arc::new(SupervisedTasks::default()), mpsc::channel(8));
        let mut life = 0;
        let task = supervision.supervise("ticker", move || {
            let sender = sender.clone();
            life += 1;
            async move {
                sender.send(life).await.unwrap();
                assert!(life == 3, "life {life} ends");
            }
        });
        task.await.unwrap();
        for life in 1..=3 {
            assert_eq!(receiver.recv().await, Some(life));
        }
        assert_eq!(receiver.recv().await, None, "what a life held is gone");
        assert_eq!(
            (supervision.unexpected_ends(), supervision.recently_ended()),
            (BTreeMap::from([("ticker", 2)]), vec!["ticker"])
        );
    }

    #[tokio::test]
    async fn a_task_without_an_end_that_returns_is_counted_and_begun_anew() {
        let (supervision, (sender, mut receiver)) = (Arc::new(SupervisedTasks::default()), mpsc::channel(8));
        let task = supervision.supervise_forever("ticker", move || {
            let sender = sender.clone();
            async move { sender.send(()).await.unwrap() }
        });
        for _ in 0..3 {
            receiver.recv().await.unwrap();
        }
        task.abort();
        assert!(supervision.unexpected_ends()["ticker"] >= 2);
    }

    #[tokio::test]
    async fn a_name_is_known_as_long_as_one_task_has_it() {
        let (supervision, (hold, held)) = (Arc::new(SupervisedTasks::default()), mpsc::channel::<()>(1));
        let long = supervision.supervise("probes", move || {
            let hold = hold.clone();
            async move { hold.closed().await }
        });
        supervision.supervise("probes", || async {}).await.unwrap();
        assert_eq!(supervision.tasks(), ["probes"]);
        drop(held);
        long.await.unwrap();
        assert!(supervision.tasks().is_empty());
    }

    #[tokio::test]
    async fn an_aborted_task_does_not_count_as_an_unexpected_end() {
        let (supervision, (hold, mut held)) = (Arc::new(SupervisedTasks::default()), mpsc::channel::<()>(1));
        let task = supervision.supervise("ticker", move || {
            let hold = hold.clone();
            async move { hold.closed().await }
        });
        tokio::task::yield_now().await;
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
        held.close();
        assert_eq!(held.recv().await, None);
        assert_eq!(supervision.unexpected_ends(), BTreeMap::new());
    }
}
