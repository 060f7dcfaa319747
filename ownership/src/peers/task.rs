//! A task that ends with its handle, so that nothing runs on behind a node that has ended.

use tokio::task::JoinHandle;

#[derive(Debug)]
pub(crate) struct Task(pub(crate) JoinHandle<()>);

impl Task {
    /// Ends it, and waits until it has let go of all that it held.
    pub(crate) async fn end(mut self) {
        self.0.abort();
        // It was aborted, or panicked and said so.
        drop((&mut self.0).await);
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}
