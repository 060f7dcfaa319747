//! Work that takes as long as its request is long: of a long one on a thread that may block, so that others need not wait.

use tokio::task::spawn_blocking;
use vocabulary::RequestId;

use crate::error::ApiError;
use crate::incoming::Incoming;

/// Bodies from this on are converted, rendered and tokenized aside.
const LONG_BODY: usize = 256 << 10;

/// Whose work, and how much.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    request: RequestId,
    bytes: usize,
}

impl Load {
    /// Of this request.
    pub fn of(incoming: &Incoming) -> Self {
        Self { request: incoming.id, bytes: incoming.body.len() }
    }

    /// What `work` gives.
    pub async fn done<T: Send + 'static>(self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, ApiError> {
        if self.bytes < LONG_BODY {
            return Ok(work());
        }
        spawn_blocking(work).await.map_err(|_| ApiError::Internal { request: self.request.to_string() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_of_a_long_body_is_done_on_another_thread_and_that_of_a_short_one_here() {
        let done_on = |bytes| Load { request: RequestId(1), bytes }.done(|| std::thread::current().id());
        let here = std::thread::current().id();
        assert_eq!(done_on(LONG_BODY - 1).await, Ok(here));
        assert_ne!(done_on(LONG_BODY).await, Ok(here));
        let broken = Load { request: RequestId(1), bytes: LONG_BODY }.done(|| panic!("a bug")).await;
        assert_eq!(broken, Err::<(), _>(ApiError::Internal { request: RequestId(1).to_string() }));
    }
}
