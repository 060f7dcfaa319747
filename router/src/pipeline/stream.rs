//! Stream: the answer goes to the client as it comes, and its end is told apart: complete, broken, or left.
//!
//! A client's stream never ends in silence: where the worker broke off, an error event says so.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http::StatusCode;
use http::header::CONTENT_LENGTH;
use http_body::{Body as HttpBody, Frame};
use planner::TransferBar;
use workers_shim::dialect::SseScanner;

use super::finish::Finish;
use super::legs::Opened;
use super::parse::Delivery;
use super::receipt::Ending;
use crate::error::{Addressee, ApiError};
use crate::incoming::Endpoint;
use crate::resources::listener::{Form, Listener};
use crate::upstream::{WorkerBody, WorkerBodyError, end_to_end};

/// The client's response.
pub fn stream(opened: Opened, mut finish: Finish) -> Response {
    let request = &finish.step.located.prefixed.request;
    let (delivery, several) = (request.delivery, request.bar == Some(TransferBar::SeveralChoices));
    let client = request.incoming.addressee();
    match opened {
        Opened::Whole(answer, told) => {
            if let Some(mut listener) = listener(&finish, answer.status(), Form::Whole) {
                listener.piece(answer.body());
            }
            // Its first and its last token came together: when the first one was there is not known.
            finish.first_byte = None;
            finish.status = answer.status().as_u16();
            let ending = if answer.status().is_success() { Ending::Complete } else { Ending::Refused };
            finish.end(ending, told.usage);
            answer.map(Body::from)
        }
        Opened::Stream(answer, first) => {
            let (head, rest) = answer.into_parts();
            finish.status = head.status.as_u16();
            let listener = listener(&finish, head.status, Form::Events);
            if let Some(in_flight) = &mut finish.in_flight {
                in_flight.first_token();
            }
            let scanner = match delivery {
                Delivery::Stream { usage_wanted: false } => SseScanner::hiding_usage(),
                Delivery::Stream { usage_wanted: true } | Delivery::Whole => SseScanner::new(),
            };
            let (ready, finish) = (VecDeque::new(), Some(finish));
            let mut events = Events { client, rest, scanner, ready, finish, several, listener, over: false };
            events.take(first);
            let mut response = Response::new(Body::new(events));
            *response.status_mut() = head.status;
            *response.headers_mut() = end_to_end(&head.headers);
            // An event may be left out or added, so no announced length could be kept.
            response.headers_mut().remove(CONTENT_LENGTH);
            response
        }
    }
}

/// A worker's events on their way to the client. Dropping it before the end is the client leaving.
struct Events {
    client: Addressee,
    rest: WorkerBody,
    scanner: SseScanner,
    ready: VecDeque<Bytes>,
    finish: Option<Finish>,
    /// Whether more than one choice was asked for.
    several: bool,
    listener: Option<Listener>,
    over: bool,
}

/// Who listens to the answer of a new response.
fn listener(finish: &Finish, status: StatusCode, form: Form) -> Option<Listener> {
    let request = &finish.step.located.prefixed.request;
    let is_wanted = request.endpoint == Endpoint::Responses && status.is_success();
    let responses = &finish.gateway.remembered.responses;
    is_wanted.then(|| Listener::new(responses.clone(), &request.incoming, finish.server(), form))
}

impl Events {
    fn take(&mut self, piece: Bytes) {
        if let Some(listener) = &mut self.listener {
            listener.piece(&piece);
        }
        let mut passes = Vec::new();
        self.scanner.push(piece, &mut passes);
        self.ready.extend(passes.into_iter().filter(|piece| !piece.is_empty()));
    }

    fn ended(&mut self, error: Option<&WorkerBodyError>) {
        self.over = true;
        let mut rest = Vec::new();
        self.scanner.finish(&mut rest);
        self.ready.extend(rest);
        let facts = self.scanner.facts();
        // One choice's finish says nothing about the others.
        let finished = facts.finish.is_some() && !self.several;
        let told = facts.ended() || finished;
        if !told {
            let at = self.finish.as_ref().map(Finish::server);
            let error = error.map(tracing::field::display);
            tracing::warn!(worker = at.map(tracing::field::display), error, "a worker's stream broke off");
            let error = ApiError::WorkerFailed { detail: "it broke off inside its answer".into() };
            let number = self.listener.as_ref().map_or(0, Listener::next_number);
            self.ready.push_back(error.event(self.client, number));
        }
        let ending = if told && facts.error.is_none() { Ending::Complete } else { Ending::Broken };
        let usage = facts.usage;
        if let Some(finish) = self.finish.take() {
            if ending == Ending::Broken {
                finish.gateway.metrics.requests.errors.with_label_values(&["worker_broke_off"]).inc();
            }
            finish.end(ending, usage);
        }
    }
}

impl HttpBody for Events {
    type Data = Bytes;
    type Error = WorkerBodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, WorkerBodyError>>> {
        loop {
            if let Some(piece) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(Frame::data(piece))));
            }
            if self.over {
                return Poll::Ready(None);
            }
            match ready!(Pin::new(&mut self.rest).poll_frame(cx)) {
                Some(Ok(frame)) => {
                    if let Ok(piece) = frame.into_data() {
                        self.take(piece);
                    }
                }
                Some(Err(error)) => self.ended(Some(&error)),
                None => self.ended(None),
            }
        }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        if let Some(finish) = self.finish.take() {
            let facts = self.scanner.facts();
            let ending = match (&facts.error, facts.done) {
                (Some(_), _) => Ending::Broken,
                (None, true) => Ending::Complete,
                (None, false) => Ending::ClientLeft,
            };
            finish.end(ending, facts.usage);
        }
    }
}
