//! What a client's connection is doing: sending a head, waiting for its answer, or nothing, and for how long.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use http_body_util::BodyExt as _;
use tokio::time::Instant;

/// All answers were sent, and no byte of another request has come.
const IDLE: u8 = 0;
/// The service has a request, or its answer is not complete.
const ANSWERING: u8 = 1;
/// The answer is complete, and hyper has it to send.
const BUFFERED: u8 = 2;
/// The head of a request is on its way.
const HEAD: u8 = 3;

/// Whether an answer of the service is in progress on a connection. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct AnswerPhase(Arc<AnswerPhaseState>);

#[derive(Debug)]
struct AnswerPhaseState {
    phase: AtomicU8,
    /// When the connection was opened.
    opened: Instant,
    /// Milliseconds from there to the end of the last answer.
    ended_ms: AtomicU64,
}

impl AnswerPhase {
    /// Returns the phase of a connection that has sent no request so far.
    pub(super) fn new() -> Self {
        let (opened, ended_ms) = (Instant::now(), AtomicU64::new(0));
        Self(Arc::new(AnswerPhaseState { phase: AtomicU8::new(IDLE), opened, ended_ms }))
    }

    /// Records that the service got a request.
    pub(super) fn begin(&self) {
        self.0.phase.store(ANSWERING, Ordering::Relaxed);
    }

    /// Returns the time since the last answer, or since the connection was opened; `None` while a request or its answer
    /// is in progress.
    pub(super) fn idle_time(&self) -> Option<Duration> {
        let AnswerPhaseState { phase, opened, ended_ms } = &*self.0;
        let ended = Duration::from_millis(ended_ms.load(Ordering::Relaxed));
        (phase.load(Ordering::Relaxed) == IDLE).then(|| opened.elapsed().saturating_sub(ended))
    }

    /// Records bytes from the client: between two answers they begin a head.
    pub(super) fn record_read(&self) {
        let _ = self.0.phase.compare_exchange(IDLE, HEAD, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Records the end of the answer when hyper drops its body.
    pub(super) fn wrap(&self, answer: Response) -> Response {
        let body_end = AnswerPhaseGuard(self.clone());
        answer.map(|body| {
            Body::new(body.map_err(move |error| {
                // Moves the guard into the closure, so that it lives as long as the body.
                let _ = &body_end;
                error
            }))
        })
    }

    /// Whether what hyper writes now is an answer of the service.
    pub(super) fn is_answering(&self) -> bool {
        matches!(self.0.phase.load(Ordering::Relaxed), ANSWERING | BUFFERED)
    }

    /// Records that hyper has sent all that it had.
    pub(super) fn record_flush(&self) {
        let AnswerPhaseState { phase, opened, ended_ms } = &*self.0;
        if phase.compare_exchange(BUFFERED, IDLE, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            ended_ms.store(u64::try_from(opened.elapsed().as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
        }
    }
}

struct AnswerPhaseGuard(AnswerPhase);

impl Drop for AnswerPhaseGuard {
    fn drop(&mut self) {
        self.0.0.phase.store(BUFFERED, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_is_idle_only_between_an_answer_and_the_next_head() {
        let phase = AnswerPhase::new();
        let state = || (phase.idle_time().is_some(), phase.is_answering());
        assert_eq!(state(), (true, false));
        phase.record_read();
        assert_eq!(state(), (false, false), "a head has begun");
        phase.begin();
        let answer = phase.wrap(Response::new(Body::from("x")));
        phase.record_read();
        phase.record_flush();
        assert_eq!(state(), (false, true), "the answer is on its way");
        drop(answer);
        assert_eq!(state(), (false, true), "it is not sent yet");
        phase.record_flush();
        assert_eq!(state(), (true, false));
    }
}
