//! The watch over a worker whose answer is awaited: a process that was stopped, or a machine that vanished, closes no
//! connection.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::{FutureExt as _, future};
use tokio::time::{Sleep, sleep};
use vocabulary::WorkerId;

use crate::gateway::Gateway;

/// How long a worker may be silent that cannot be reached any more: one that only takes no new connections goes on.
const PATIENCE: Duration = Duration::from_secs(3);

/// A watch over one worker.
pub struct Vigil {
    gateway: Arc<Gateway>,
    worker: WorkerId,
    /// Ends when the fleet says that it cannot be reached.
    lost: BoxFuture<'static, ()>,
    /// How much patience is left, once it is so.
    patience: Option<Pin<Box<Sleep>>>,
}

impl Vigil {
    /// Over this worker from now on.
    pub fn over(gateway: Arc<Gateway>, worker: WorkerId) -> Self {
        let lost = gateway.fleet().lost(worker).boxed();
        Self { gateway, worker, lost, patience: None }
    }

    /// Something came from it.
    pub fn heard(&mut self) {
        if self.patience.take().is_some() {
            self.lost = self.gateway.fleet().lost(self.worker).boxed();
        }
    }

    /// Ready once it is given up.
    pub fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let Some(patience) = &mut self.patience else {
                ready!(self.lost.poll_unpin(cx));
                self.patience = Some(Box::pin(sleep(PATIENCE)));
                continue;
            };
            ready!(patience.as_mut().poll(cx));
            // It may be there again: lost is then not over at once.
            self.heard();
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
