//! A task that ends with its handle, so that nothing runs on behind a node that has ended.

use tokio::task::JoinHandle;

#[derive(Debug)]
pub(crate) struct AbortingTask(pub(crate) JoinHandle<()>);

impl AbortingTask {
    /// Ends it, and waits until it has let go of all that it held.
    pub(crate) async fn abort_and_wait(mut self) {
        self.0.abort();
        // It was aborted, or panicked and said so.
        drop((&mut self.0).await);
    }
}

impl Drop for AbortingTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}
