//! Holds back the answers that hyper itself gives to heads it refuses: they have no body. The connection then sends one
//! that says why.
//!
//! hyper 1.12 has no hook for them: `Server::on_error` in its `proto/h1/role.rs` makes such an answer of a status
//! alone, and its connection writes it without asking the service. But it writes it between two requests. So bytes that
//! come while no answer of the service is in progress are hyper's own.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use http::StatusCode;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::answer_phase::AnswerPhase;

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
        if bytes.is_empty() || self.progress.is_answering() {
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
        if buffer.filled().len() > before {
            self.progress.record_read();
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
    use axum::body::Body;
    use axum::response::Response;
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
