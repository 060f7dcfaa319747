//! Work that may scan many records, off the async threads.

use super::problem::{Problem, ProblemKind};

/// Runs work that may scan many records on a blocking thread.
pub(super) async fn run_blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Problem> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|_| {
        Problem::new(ProblemKind::Internal, "The ledger could not be searched; the log of this process has it.")
    })
}
