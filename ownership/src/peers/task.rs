//! A task that is aborted when its handle is dropped, so that nothing outlives a closed node.

use tokio::task::JoinHandle;

#[derive(Debug)]
pub(crate) struct AbortingTask(pub(crate) JoinHandle<()>);

impl AbortingTask {
    /// Aborts the task and waits until it has released everything.
    pub(crate) async fn abort_and_wait(mut self) {
        self.0.abort();
        // It was aborted, or it panicked and logged that.
        drop((&mut self.0).await);
    }
}

impl Drop for AbortingTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}
