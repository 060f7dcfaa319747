//! Liveness watch over a worker whose answer is awaited: a process that was stopped, or a machine that vanished, closes
//! no connection.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use futures::{FutureExt as _, future};
use tokio::time::{Sleep, sleep};
use vocabulary::{Incarnation, WorkerId};
use workers_shim::fleet::Fleet;

/// How long an unreachable worker may be silent: one that only refuses new connections keeps answering.
const LOST_WORKER_TIMEOUT: Duration = Duration::from_secs(3);
/// Minimum timeout where an answer has already been silent for longer.
const MIN_TIMEOUT: Duration = Duration::from_millis(500);

/// A watch over one worker.
pub struct LivenessWatch {
    fleet: Arc<Fleet>,
    worker: WorkerId,
    /// The incarnation that is answering, where it is known.
    incarnation: Option<Incarnation>,
    /// Completes when the fleet reports the worker as unreachable.
    unreachable: BoxFuture<'static, ()>,
    /// Remaining timeout, once the worker is unreachable.
    timeout: Option<Pin<Box<Sleep>>>,
    /// When the answer last made progress; `None` before its first byte, for which engines may take long.
    last_activity: Option<Instant>,
}

impl LivenessWatch {
    /// Starts watching this worker.
    pub fn new(fleet: Arc<Fleet>, worker: WorkerId) -> Self {
        let (incarnation, unreachable) = (fleet.incarnation(worker), fleet.wait_lost(worker).boxed());
        Self { fleet, worker, incarnation, unreachable, timeout: None, last_activity: None }
    }

    /// Records that the worker sent something.
    pub fn record_activity(&mut self) {
        self.last_activity = Some(Instant::now());
        self.restart();
    }

    fn restart(&mut self) {
        if self.timeout.take().is_some() {
            self.incarnation = self.fleet.incarnation(self.worker);
            self.unreachable = self.fleet.wait_lost(self.worker).boxed();
        }
    }

    /// Ready once the worker is given up.
    pub fn poll_given_up(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let Some(patience) = &mut self.timeout else {
                ready!(self.unreachable.poll_unpin(cx));
                self.timeout = Some(Box::pin(sleep(lost_timeout(self.last_activity.map(|heard| heard.elapsed())))));
                continue;
            };
            ready!(patience.as_mut().poll(cx));
            // The worker may be back, since its loss is noticed late. A new incarnation knows nothing of the answer.
            let now = self.fleet.incarnation(self.worker);
            if self.incarnation.is_some() && now.is_some() && self.incarnation != now {
                return Poll::Ready(());
            }
            self.restart();
            if self.unreachable.poll_unpin(cx).is_ready() {
                return Poll::Ready(());
            }
        }
    }

    /// Returns once the worker is given up.
    pub async fn given_up(mut self) {
        future::poll_fn(|cx| self.poll_given_up(cx)).await;
    }
}

/// Returns the timeout for an unreachable worker whose answer has already been silent for `silent`.
fn lost_timeout(silent: Option<Duration>) -> Duration {
    LOST_WORKER_TIMEOUT.saturating_sub(silent.unwrap_or_default()).max(MIN_TIMEOUT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    use serde_json::json;

    use crate::testing::{StubWorker, post, start_router, wait_until};

    #[test]
    fn silence_before_the_loss_shortens_the_patience_of_a_begun_answer() {
        assert_eq!(lost_timeout(None), LOST_WORKER_TIMEOUT, "a long prompt is computed in silence");
        assert_eq!(lost_timeout(Some(Duration::from_secs(1))), Duration::from_secs(2));
        assert_eq!(lost_timeout(Some(Duration::from_secs(20))), MIN_TIMEOUT);
    }

    #[tokio::test]
    async fn a_restarted_worker_is_given_up() {
        let workers = [StubWorker::start("one", "tiny").await, StubWorker::start("two", "tiny").await];
        workers.iter().for_each(|worker| worker.process_start.store(7, Ordering::Relaxed));
        let router = start_router(&[&workers[0], &workers[1]], &[]).await;
        let lives = || router.gateway.fleet().snapshot().iter().all(|view| view.incarnation.0 == 7_000_000);
        wait_until("both tell their lives", lives).await;
        let body = json!({"model": "tiny", "messages": [{"role": "user", "content": "q"}], "behave": "hang once"});
        let answer = tokio::spawn(post(router.proxy_address(), "/v1/chat/completions", body.to_string()));
        wait_until("it is asked", || workers.iter().any(|worker| !worker.requests().is_empty())).await;
        // No probe sees it as down, and its connection stays open.
        workers
            .iter()
            .filter(|worker| !worker.requests().is_empty())
            .for_each(|worker| worker.process_start.store(8, Ordering::Relaxed));
        let answer = answer.await.unwrap();
        assert_eq!(answer.status, 200);
        assert_eq!(workers.each_ref().map(|worker| worker.requests().len()), [1, 1], "the other one answered");
    }
}
