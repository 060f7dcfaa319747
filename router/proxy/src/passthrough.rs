//! Relays a worker's answer to the client: head and body unchanged, and an explicit end when it breaks.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::Body;
use axum::response::Response;
use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http_body::{Body as HttpBody, Frame, SizeHint};
use vocabulary::Tokens;
use workers_shim::engine_api::{EventBufferBudget, EventRefusal, SseFilter, TokenUsage, usage_at_end};

use crate::quotas::BYTES_PER_TOKEN;
use crate::upstream::{WorkerBody, WorkerBodyError, response_headers};

/// Observes a relayed answer. Dropping it ends the answer, for whatever reason.
pub trait ResponseObserver: Send + 'static {
    /// Called with each chunk of the worker's body.
    fn on_chunk(&mut self, data: &Bytes);

    /// Called once, at the end of the answer, complete or not.
    fn on_end(&mut self, facts: PassthroughOutcome);

    /// Called when the worker broke off; returns the error event with which a stream of events ends.
    fn on_broken(&mut self) -> Bytes;

    /// Called when an event of the worker was refused, which ends the answer; returns the error event that says so.
    fn on_refused(&mut self, refusal: EventRefusal) -> Bytes;
}

/// Outcome of a relayed answer: what it has shown by its end.
#[derive(Clone, Copy, Debug)]
pub struct PassthroughOutcome {
    /// The usage that the worker reported.
    pub usage: Option<TokenUsage>,
    /// Tokens delivered, counted by events.
    pub delivered: Tokens,
    /// Whether the worker's body was read to its end, or to where it broke off.
    pub is_over: bool,
}

/// Builds the client's response from a worker's. Chunks are relayed as they come, events as soon as they are complete.
///
/// Trailers are not relayed: no engine API uses any, and clients would attribute them to this proxy.
pub fn relay(
    answer: http::Response<WorkerBody>,
    budget: EventBufferBudget,
    observer: impl ResponseObserver + Unpin,
) -> Response {
    let (head, body) = answer.into_parts();
    let events = is_event_stream(&head.headers);
    let scanner = events.then(|| SseFilter::new().with_budget(budget));
    let (ready, tail) = (VecDeque::new(), BytesMut::new());
    let mut response =
        Response::new(Body::new(PassthroughResponseBody { body, observer, scanner, tail, ready, ended: false }));
    *response.status_mut() = head.status;
    *response.headers_mut() = response_headers(&head.headers);
    if events {
        // An error event may follow, so the announced length would be wrong.
        response.headers_mut().remove(CONTENT_LENGTH);
    }
    response
}

/// Whether these headers announce server-sent events.
pub fn is_event_stream(headers: &http::HeaderMap) -> bool {
    let value = headers.get(CONTENT_TYPE).map_or(&b""[..], http::HeaderValue::as_bytes);
    value.get(..17).is_some_and(|start| start.eq_ignore_ascii_case(b"text/event-stream"))
}

struct PassthroughResponseBody<O: ResponseObserver> {
    body: WorkerBody,
    observer: O,
    /// Filter of a stream of events: after half an event a client could not parse the error event.
    scanner: Option<SseFilter>,
    /// End of an answer that is not a stream; it contains the usage.
    tail: BytesMut,
    ready: VecDeque<Bytes>,
    ended: bool,
}

/// Bytes at the end of an answer in which its usage is searched.
const TAIL_BYTES: usize = 16 << 10;

impl<O: ResponseObserver> Drop for PassthroughResponseBody<O> {
    fn drop(&mut self) {
        let (usage, delivered) = match &self.scanner {
            Some(scanner) => {
                let facts = scanner.facts();
                (
                    facts.usage,
                    Tokens(facts.outputs.saturating_add(facts.unread_events).max(facts.text / BYTES_PER_TOKEN)),
                )
            }
            None => (usage_at_end(&self.tail), Tokens::ZERO),
        };
        self.observer.on_end(PassthroughOutcome { usage, delivered, is_over: self.ended });
    }
}

impl<O: ResponseObserver> PassthroughResponseBody<O> {
    fn keep_tail(&mut self, data: &Bytes) {
        let tail = &data[data.len().saturating_sub(TAIL_BYTES)..];
        let surplus = (self.tail.len() + tail.len()).saturating_sub(TAIL_BYTES);
        let _ = self.tail.split_to(surplus.min(self.tail.len()));
        self.tail.extend_from_slice(tail);
    }

    fn push_chunk(&mut self, data: Bytes) {
        self.observer.on_chunk(&data);
        match &mut self.scanner {
            Some(scanner) => {
                if let Err(refusal) = scanner.push(data, &mut self.ready) {
                    self.ended = true;
                    // A complete answer needs no error event.
                    if !scanner.facts().ended() {
                        self.ready.push_back(self.observer.on_refused(refusal));
                    }
                }
            }
            None => {
                self.keep_tail(&data);
                self.ready.push_back(data);
            }
        }
    }
}

impl<O: ResponseObserver + Unpin> HttpBody for PassthroughResponseBody<O> {
    type Data = Bytes;
    type Error = WorkerBodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, WorkerBodyError>>> {
        self.guarded(|body| body.poll_unguarded(cx))
    }

    fn is_end_stream(&self) -> bool {
        self.ready.is_empty() && (self.ended || self.scanner.is_none() && self.body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        if self.scanner.is_some() { SizeHint::default() } else { self.body.size_hint() }
    }
}

impl<O: ResponseObserver> PassthroughResponseBody<O> {
    /// Polls, and turns a panic of ours into a broken answer.
    fn guarded(
        &mut self,
        poll: impl FnOnce(&mut Self) -> Poll<Option<Result<Frame<Bytes>, WorkerBodyError>>>,
    ) -> Poll<Option<Result<Frame<Bytes>, WorkerBodyError>>> {
        catch_unwind(AssertUnwindSafe(|| poll(self))).unwrap_or_else(|_| {
            tracing::error!("a panic inside a relayed answer; please report it");
            self.ended = true;
            self.ready.clear();
            let last_event = self.observer.on_broken();
            Poll::Ready(Some(match self.scanner {
                Some(_) => Ok(Frame::data(last_event)),
                None => Err(WorkerBodyError::Broken("a fault of this proxy".into())),
            }))
        })
    }

    fn poll_unguarded(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, WorkerBodyError>>> {
        loop {
            if let Some(data) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
            if self.ended {
                return Poll::Ready(None);
            }
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.push_chunk(data);
                    }
                }
                Some(Err(error)) => {
                    self.ended = true;
                    let last_event = self.observer.on_broken();
                    tracing::warn!(%error, "a worker's answer broke off");
                    if self.scanner.is_none() {
                        return Poll::Ready(Some(Err(error)));
                    }
                    self.ready.push_back(last_event);
                }
                None => {
                    self.ended = true;
                    let cut = self.scanner.as_mut().and_then(SseFilter::finish);
                    self.ready.extend(cut);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use http::{HeaderMap, Method};
    use http_body_util::BodyExt as _;
    use workers_shim::engine_api::LegBody;

    use super::*;
    use crate::testing::StubWorker;
    use crate::upstream::{Upstream, UpstreamConfig, WorkerRequest};

    /// Records how the answer ended.
    #[derive(Default)]
    struct EndRecorder {
        broken: usize,
        refused: Vec<EventRefusal>,
    }

    impl ResponseObserver for EndRecorder {
        fn on_chunk(&mut self, _: &Bytes) {}

        fn on_end(&mut self, facts: PassthroughOutcome) {
            assert!(facts.is_over);
        }

        fn on_broken(&mut self) -> Bytes {
            self.broken += 1;
            Bytes::from_static(b"data: broken\n\n")
        }

        fn on_refused(&mut self, refusal: EventRefusal) -> Bytes {
            self.refused.push(refusal);
            Bytes::from_static(b"data: refused\n\n")
        }
    }

    #[tokio::test]
    async fn a_refused_event_ends_the_answer_unless_it_is_complete() {
        let worker = StubWorker::start("one", "tiny").await;
        let upstream = Upstream::new(UpstreamConfig::default());
        let half_event = Bytes::from(format!("data: {{}}\n\ndata: {}", "x".repeat(100 << 10)));
        let complete = Bytes::from([b"data: [DONE]\n\n", &half_event[..]].concat());
        for (chunk, events, refusals) in [
            (half_event, &["data: {}\n\n", "data: refused\n\n"][..], &[EventRefusal::NoMemory][..]),
            (complete, &["data: [DONE]\n\ndata: {}\n\n"][..], &[][..]),
        ] {
            let (method, path) = (Method::GET, "/v1/models".into());
            let request = WorkerRequest { method, path, headers: HeaderMap::new(), body: LegBody::default() };
            let body = upstream.send(&worker.url(), request).await.unwrap().into_body();
            let scanner = Some(SseFilter::new().with_budget(EventBufferBudget::of(1)));
            let (observer, tail, ready) = (EndRecorder::default(), BytesMut::new(), VecDeque::new());
            let mut relayed = PassthroughResponseBody { body, observer, scanner, tail, ready, ended: false };
            relayed.push_chunk(chunk);
            let mut told = Vec::new();
            while let Some(frame) = relayed.frame().await {
                told.push(String::from_utf8(frame.unwrap().into_data().unwrap().to_vec()).unwrap());
            }
            assert_eq!(told, events);
            assert_eq!(relayed.observer.refused, refusals);
        }
    }

    #[tokio::test]
    async fn a_relayed_answer_with_a_panic_ends_as_broken() {
        let worker = StubWorker::start("one", "tiny").await;
        let upstream = Upstream::new(UpstreamConfig::default());
        for (scanner, shown) in [(Some(SseFilter::new()), Some("data: broken\n\n")), (None, None)] {
            let (method, path) = (Method::GET, "/v1/models".into());
            let request = WorkerRequest { method, path, headers: HeaderMap::new(), body: LegBody::default() };
            let body = upstream.send(&worker.url(), request).await.unwrap().into_body();
            let (observer, tail, ready) = (EndRecorder::default(), BytesMut::new(), VecDeque::from([Bytes::new()]));
            let mut relayed = PassthroughResponseBody { body, observer, scanner, tail, ready, ended: false };
            let Poll::Ready(Some(told)) = relayed.guarded(|_| panic!("a bug")) else { panic!("the client is told") };
            let text = told.ok().map(|frame| String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap());
            assert_eq!((text.as_deref(), relayed.observer.broken), (shown, 1));
            assert!(matches!(relayed.frame().now_or_never(), Some(None)), "it is over");
        }
    }
}
