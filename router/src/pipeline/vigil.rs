//! The watch over a worker whose answer is awaited: a process that was stopped, or a machine that vanished, closes no
//! connection.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use futures::{FutureExt as _, future};
use tokio::time::{Sleep, sleep};
use vocabulary::{Incarnation, WorkerId};

use crate::gateway::Gateway;

/// How long a worker may be silent that cannot be reached any more: one that only takes no new connections goes on.
const PATIENCE: Duration = Duration::from_secs(3);
/// The least of it that is left where an answer has been silent for as long already.
const LEAST: Duration = Duration::from_millis(500);

/// A watch over one worker.
pub struct Vigil {
    gateway: Arc<Gateway>,
    worker: WorkerId,
    /// The life of it that answers, where that is known.
    life: Option<Incarnation>,
    /// Ends when the fleet says that it cannot be reached.
    lost: BoxFuture<'static, ()>,
    /// How much patience is left, once it is so.
    patience: Option<Pin<Box<Sleep>>>,
    /// When something came of the answer; none before its first byte, for which engines may take long.
    heard: Option<Instant>,
}

impl Vigil {
    /// Over this worker from now on.
    pub fn over(gateway: Arc<Gateway>, worker: WorkerId) -> Self {
        let (life, lost) = (gateway.fleet().life(worker), gateway.fleet().lost(worker).boxed());
        Self { gateway, worker, life, lost, patience: None, heard: None }
    }

    /// Something came from it.
    pub fn heard(&mut self) {
        self.heard = Some(Instant::now());
        self.look_again();
    }

    fn look_again(&mut self) {
        if self.patience.take().is_some() {
            self.life = self.gateway.fleet().life(self.worker);
            self.lost = self.gateway.fleet().lost(self.worker).boxed();
        }
    }

    /// Ready once it is given up.
    pub fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let Some(patience) = &mut self.patience else {
                ready!(self.lost.poll_unpin(cx));
                self.patience = Some(Box::pin(sleep(patience(self.heard.map(|heard| heard.elapsed())))));
                continue;
            };
            ready!(patience.as_mut().poll(cx));
            // It may be there again: lost is then not over at once. Who is there instead knows nothing of the answer.
            let now = self.gateway.fleet().life(self.worker);
            if self.life.is_some() && now.is_some() && self.life != now {
                return Poll::Ready(());
            }
            self.look_again();
            if self.lost.poll_unpin(cx).is_ready() {
                return Poll::Ready(());
            }
        }
    }

    /// Returns once it is given up.
    pub async fn gone(mut self) {
        future::poll_fn(|cx| self.poll_gone(cx)).await;
    }
}

/// How long to wait once it cannot be reached, where an answer that has begun has been silent for so long.
fn patience(silent: Option<Duration>) -> Duration {
    PATIENCE.saturating_sub(silent.unwrap_or_default()).max(LEAST)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    use serde_json::json;

    use crate::testing::{Worker, front, post, until};

    #[test]
    fn silence_before_it_was_lost_counts_where_an_answer_has_begun() {
        assert_eq!(patience(None), PATIENCE, "a long prompt is computed in silence");
        assert_eq!(patience(Some(Duration::from_secs(1))), Duration::from_secs(2));
        assert_eq!(patience(Some(Duration::from_secs(20))), LEAST);
    }

    #[tokio::test]
    async fn a_worker_that_is_another_process_now_is_waited_for_no_more() {
        let workers = [Worker::start("one", "tiny").await, Worker::start("two", "tiny").await];
        workers.iter().for_each(|worker| worker.life.store(7, Ordering::Relaxed));
        let front = front(&[&workers[0], &workers[1]], &[]).await;
        let lives = || front.gateway.fleet().snapshot().iter().all(|view| view.incarnation.0 == 7_000_000);
        until("both tell their lives", lives).await;
        let body = json!({"model": "tiny", "messages": [{"role": "user", "content": "q"}], "behave": "hang once"});
        let answer = tokio::spawn(post(front.proxy_address(), "/v1/chat/completions", body.to_string()));
        until("it is asked", || workers.iter().any(|worker| !worker.seen().is_empty())).await;
        // No probe sees it down, and its connection stands.
        workers
            .iter()
            .filter(|worker| !worker.seen().is_empty())
            .for_each(|worker| worker.life.store(8, Ordering::Relaxed));
        let answer = answer.await.unwrap();
        assert_eq!(answer.status, 200);
        assert_eq!(workers.each_ref().map(|worker| worker.seen().len()), [1, 1], "the other one answered");
    }
}
