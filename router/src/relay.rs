//! From a worker's answer to the client's: head and body as they came, the end made explicit when it breaks.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http_body::{Body as HttpBody, Frame, SizeHint};

use crate::upstream::{WorkerBody, WorkerBodyError, end_to_end};

/// Sees what passes. Dropping it tells that the answer is over, for whatever reason.
pub trait Observer: Send + 'static {
    /// A piece of the answer's body.
    fn piece(&mut self, data: &Bytes);

    /// The worker broke off; the event that the client gets, in place of silence, when the answer is a stream of them.
    fn broken(&mut self) -> Bytes;
}

/// The client's response of a worker's. Nothing is buffered; pieces go on as they come.
pub fn relay(answer: http::Response<WorkerBody>, observer: impl Observer + Unpin) -> Response {
    let (head, body) = answer.into_parts();
    let events = is_event_stream(&head.headers);
    let mut response = Response::new(Body::new(Relayed { body, observer, events, ended: false }));
    *response.status_mut() = head.status;
    *response.headers_mut() = end_to_end(&head.headers);
    if events {
        // An error event may follow, so that no announced length could be kept.
        response.headers_mut().remove(CONTENT_LENGTH);
    }
    response
}

/// Whether these headers announce server-sent events.
pub fn is_event_stream(headers: &http::HeaderMap) -> bool {
    let value = headers.get(CONTENT_TYPE).map_or(&b""[..], http::HeaderValue::as_bytes);
    value.get(..17).is_some_and(|start| start.eq_ignore_ascii_case(b"text/event-stream"))
}

struct Relayed<O> {
    body: WorkerBody,
    observer: O,
    events: bool,
    ended: bool,
}

impl<O: Observer + Unpin> HttpBody for Relayed<O> {
    type Data = Bytes;
    type Error = WorkerBodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, WorkerBodyError>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let frame = std::task::ready!(Pin::new(&mut self.body).poll_frame(cx));
        Poll::Ready(match frame {
            Some(Ok(frame)) => {
                if let Some(data) = frame.data_ref() {
                    self.observer.piece(data);
                }
                Some(Ok(frame))
            }
            Some(Err(error)) => {
                self.ended = true;
                let told = self.observer.broken();
                tracing::warn!(%error, "a worker's answer broke off");
                if self.events { Some(Ok(Frame::data(told))) } else { Some(Err(error)) }
            }
            None => {
                self.ended = true;
                None
            }
        })
    }

    fn is_end_stream(&self) -> bool {
        self.ended || self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        if self.events { SizeHint::default() } else { self.body.size_hint() }
    }
}
