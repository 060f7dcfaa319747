//! Holds back the answers that hyper itself gives to heads it refuses: they have no body. The connection then sends one
//! that says why.
//!
//! hyper 1.12 has no hook for them: `Server::on_error` in its `proto/h1/role.rs` makes such an answer of a status
//! alone, and its connection writes it without asking the service. But it writes it between two requests. So bytes that
//! come while no answer of the service is in progress are hyper's own.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use http::StatusCode;
use http_body_util::BodyExt as _;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

/// All answers were sent.
const IDLE: u8 = 0;
/// The service has a request, or its answer is not complete.
const ANSWERING: u8 = 1;
/// The answer is complete, and hyper has it to send.
const BUFFERED: u8 = 2;

/// Whether an answer of the service is in progress on a connection. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct AnswerPhase(Arc<AnswerPhaseState>);

#[derive(Debug)]
struct AnswerPhaseState {
    phase: AtomicU8,
    /// When the connection was opened.
    opened: Instant,
    /// Milliseconds from there to the last byte of an answer, or of a head that is on its way.
    active_ms: AtomicU64,
}

impl AnswerPhase {
    /// Returns the phase of a connection that has sent no request so far.
    pub(super) fn new() -> Self {
        let (opened, active_ms) = (Instant::now(), AtomicU64::new(0));
        Self(Arc::new(AnswerPhaseState { phase: AtomicU8::new(IDLE), opened, active_ms }))
    }

    /// Records that the service got a request.
    pub(super) fn begin(&self) {
        self.0.phase.store(ANSWERING, Ordering::Relaxed);
    }

    /// Returns the time since the last byte of an answer or of a request's head, or since the connection was opened;
    /// `None` while an answer is in progress.
    pub(super) fn idle_time(&self) -> Option<Duration> {
        let active = Duration::from_millis(self.0.active_ms.load(Ordering::Relaxed));
        self.is_idle().then(|| self.0.opened.elapsed().saturating_sub(active))
    }

    fn record_activity(&self) {
        let AnswerPhaseState { opened, active_ms, .. } = &*self.0;
        active_ms.store(u64::try_from(opened.elapsed().as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
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

    fn is_idle(&self) -> bool {
        self.0.phase.load(Ordering::Relaxed) == IDLE
    }

    fn record_flush(&self) {
        let phase = &self.0.phase;
        if phase.compare_exchange(BUFFERED, IDLE, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            self.record_activity();
        }
    }
}

struct AnswerPhaseGuard(AnswerPhase);

impl Drop for AnswerPhaseGuard {
    fn drop(&mut self) {
        let AnswerPhaseState { phase, .. } = &*self.0.0;
        phase.store(BUFFERED, Ordering::Relaxed);
    }
}

/// A connection's stream, without hyper's own answers.
#[derive(Debug)]
pub(super) struct HyperResponseFilter<S> {
    stream: S,
    progress: AnswerPhase,
    refused: Option<StatusCode>,
}

impl<S> HyperResponseFilter<S> {
    pub(super) fn new(stream: S, progress: AnswerPhase) -> Self {
        Self { stream, progress, refused: None }
    }

    /// Returns the stream, and the status of the answer that was held back, if there was one.
    pub(super) fn into_parts(self) -> (S, Option<StatusCode>) {
        (self.stream, self.refused)
    }

    /// Holds back bytes that are not the service's.
    fn hold_back(&mut self, bytes: &[u8]) -> bool {
        if bytes.is_empty() || !self.progress.is_idle() {
            return false;
        }
        let status = bytes.strip_prefix(b"HTTP/1.1 ").and_then(|rest| StatusCode::from_bytes(rest.get(..3)?).ok());
        self.refused = self.refused.or(Some(status.unwrap_or(StatusCode::BAD_REQUEST)));
        true
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for HyperResponseFilter<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        if buffer.filled().len() > before && self.progress.is_idle() {
            self.progress.record_activity();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for HyperResponseFilter<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.hold_back(bytes) {
            return Poll::Ready(Ok(bytes.len()));
        }
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let first = parts.iter().find(|part| !part.is_empty());
        if first.is_some_and(|first| self.hold_back(first)) {
            return Poll::Ready(Ok(parts.iter().map(|part| part.len()).sum()));
        }
        Pin::new(&mut self.stream).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // hyper flushes when it has nothing more to write.
        ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
        self.progress.record_flush();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    #[test]
    fn only_bytes_between_two_answers_are_held_back() {
        let progress = AnswerPhase::new();
        let mut filter = HyperResponseFilter::new(Vec::new(), progress.clone());
        let write = |filter: &mut HyperResponseFilter<Vec<u8>>, bytes: &[u8], flushes: bool| {
            filter.write_all(bytes).now_or_never().unwrap().unwrap();
            if flushes {
                filter.flush().now_or_never().unwrap().unwrap();
            }
        };
        progress.begin();
        write(&mut filter, b"HTTP/1.1 100 Continue\r\n\r\n", true);
        let answer = progress.wrap(Response::new(Body::from("x")));
        write(&mut filter, b"head,", true);
        drop(answer);
        write(&mut filter, b"body,", false);
        // The next request came before the answer was flushed.
        progress.begin();
        let answer = progress.wrap(Response::new(Body::empty()));
        write(&mut filter, b"", true);
        drop(answer);
        write(&mut filter, b"second", true);
        assert_eq!(filter.refused, None);
        write(&mut filter, b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\n\r\n", true);
        let (sent, refused) = filter.into_parts();
        assert_eq!(String::from_utf8(sent).unwrap(), "HTTP/1.1 100 Continue\r\n\r\nhead,body,second");
        assert_eq!(refused, Some(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE));
    }
}
