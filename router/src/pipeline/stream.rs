//! Stream: the answer goes to the client as it comes, and its end is told apart: complete, broken, or left.
//!
//! An answer that breaks off goes on at another worker where that can be done without losing or repeating anything. Where
//! it cannot, an error event says so, and why: a client's stream never ends in silence.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use futures::stream::poll_fn;
use http::StatusCode;
use http::header::CONTENT_LENGTH;
use http_body::Body as _;
use planner::TransferBar;
use prefix::SpecialTokens;
use vocabulary::Tokens;
use workers_shim::dialect::{Lost, Said, SseScanner, Usage};
use workers_shim::fleet::InFlight;

use super::finish::Finish;
use super::legs::Opened;
use super::parse::Delivery;
use super::receipt::{Ending, Remark};
use super::resumable::{Unresumable, retold, said};
use super::resume::{Rest, SoFar, resume};
use super::underway::Break;
use super::vigil::Vigil;
use crate::error::{Addressee, ApiError};
use crate::incoming::Endpoint;
use crate::quotas::BYTES_PER_TOKEN;
use crate::resources::listener::{Form, Listener};
use crate::upstream::{WorkerBody, WorkerBodyError, answer_headers};

/// How often an answer goes on elsewhere: a request that kills its workers does not get all of them.
const MOST_BREAKS: usize = 3;

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
            finish.delivered = Tokens(answer.body().len() as u64 / BYTES_PER_TOKEN);
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
            let scanner = keeping(scanner.within(finish.gateway.upstream.events()), &finish);
            let leg = Leg::of(rest, finish);
            let mut events = Events { client, scanner, ready: VecDeque::new(), several, listener, leg };
            events.take(first);
            let mut response = Response::new(Body::from_stream(poll_fn(move |cx| events.poll_guarded(cx))));
            *response.status_mut() = head.status;
            *response.headers_mut() = answer_headers(&head.headers);
            // An event may be left out or added, so no announced length could be kept.
            response.headers_mut().remove(CONTENT_LENGTH);
            response
        }
    }
}

/// Keeps of the answer what is needed to go on with it elsewhere.
fn keeping(scanner: SseScanner, finish: &Finish) -> SseScanner {
    let (request, unresumable) = (&finish.step.located.prefixed.request, finish.step.unresumable);
    let scanner = if unresumable.is_none() { scanner.keeping(said(request)) } else { scanner };
    match retold(request, unresumable, finish.gateway.fleet().engine(finish.server())) {
        Some(retold) => scanner.retelling(retold),
        None => scanner,
    }
}

/// A worker's events on their way to the client. Dropping it before the end is the client leaving.
struct Events {
    client: Addressee,
    scanner: SseScanner,
    ready: VecDeque<Bytes>,
    /// Whether more than one choice was asked for.
    several: bool,
    listener: Option<Listener>,
    leg: Leg,
}

enum Leg {
    Answering(Box<Answering>),
    /// Nobody yet, after it broke off.
    Resuming(BoxFuture<'static, Result<Rest, ApiError>>),
    /// Nobody any more.
    Over,
}

struct Answering {
    rest: WorkerBody,
    vigil: Vigil,
    finish: Finish,
}

enum Came {
    Piece(Bytes),
    End(Remark, Option<WorkerBodyError>),
}

impl Leg {
    fn of(rest: WorkerBody, finish: Finish) -> Self {
        let mut vigil = Vigil::over(finish.gateway.clone(), finish.server());
        // Its first byte is here.
        vigil.heard();
        Leg::Answering(Box::new(Answering { rest, vigil, finish }))
    }
}

impl Answering {
    fn poll_came(&mut self, cx: &mut Context<'_>) -> Poll<Came> {
        Poll::Ready(match Pin::new(&mut self.rest).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                self.vigil.heard();
                Came::Piece(frame.into_data().unwrap_or_default())
            }
            Poll::Ready(Some(Err(error))) => Came::End(Remark::BrokeOff, Some(error)),
            Poll::Ready(None) => Came::End(Remark::BrokeOff, None),
            Poll::Pending => {
                ready!(self.vigil.poll_gone(cx));
                Came::End(Remark::FellSilent, None)
            }
        })
    }
}

/// Who listens to the answer of a new response.
fn listener(finish: &Finish, status: StatusCode, form: Form) -> Option<Listener> {
    let prefixed = &finish.step.located.prefixed;
    let request = &prefixed.request;
    let is_wanted = request.endpoint == Endpoint::Responses && status.is_success();
    let responses = &finish.gateway.remembered.responses;
    is_wanted.then(|| Listener::new(responses.clone(), (&request.incoming, Some(prefixed.pin)), finish.server(), form))
}

impl Events {
    fn take(&mut self, piece: Bytes) {
        let mut passes = Vec::new();
        self.scanner.push(piece, &mut passes);
        if let Some(listener) = &mut self.listener {
            passes.iter().for_each(|piece| listener.piece(piece));
        }
        self.ready.extend(passes.into_iter().filter(|piece| !piece.is_empty()));
        if self.is_given_up() {
            self.ended(Remark::EngineFailed, None);
        }
    }

    /// The worker's answer is over: complete, or broken off as `remark` says.
    fn ended(&mut self, remark: Remark, error: Option<&WorkerBodyError>) {
        let Leg::Answering(answering) = mem::replace(&mut self.leg, Leg::Over) else { return };
        let mut finish = answering.finish;
        let cut = self.scanner.finish();
        if let Some(closing) = self.scanner.closing() {
            self.ready.push_back(closing);
            count(&finish, "complete");
            return self.close(finish, (Ending::Complete, self.usage()));
        }
        self.settle(&finish);
        let so_far = so_far(&self.scanner, &finish);
        let facts = self.scanner.facts();
        // One choice's finish says nothing about the others.
        let finished = facts.finish.is_some() && !self.several && so_far.is_err();
        if (facts.ended() || finished) && !self.is_given_up() {
            let ending = if facts.error.is_none() { Ending::Complete } else { Ending::Broken };
            if ending == Ending::Broken {
                finish.gateway.metrics.requests.errors.with_label_values(&["worker_broke_off"]).inc();
                note_failure(&mut finish);
            }
            let usage = facts.usage;
            self.ready.extend(cut);
            return self.close(finish, (ending, usage));
        }
        let error = error.map(tracing::field::display);
        tracing::warn!(worker = %finish.server(), how = remark.as_ref(), error, "a worker's stream broke off");
        // One that answers otherwise than another began is well.
        if !self.scanner.differs() {
            note_failure(&mut finish);
        }
        match so_far {
            Ok(so_far) => self.go_on(finish, remark, so_far),
            Err(why) => self.confess(finish, (remark, &why)),
        }
    }

    /// Whether nothing more of this worker's answer is of use: it told that it failed, or it goes on differently.
    fn is_given_up(&self) -> bool {
        self.scanner.differs() || self.scanner.failure().is_some()
    }

    /// With its tokenizer more is known to be delivered, and less is made again.
    fn settle(&mut self, finish: &Finish) {
        if self.scanner.facts().ended() {
            return;
        }
        if let Some(text) = finish.step.located.prefixed.model.identifier.text() {
            self.scanner.settle(|ids| text.decode(ids, SpecialTokens::Without).ok());
        }
    }

    /// Another worker is asked for the rest.
    fn go_on(&mut self, finish: Finish, remark: Remark, so_far: SoFar) {
        let after = so_far.as_ref().map_or(Tokens::ZERO, |(_, said)| Tokens(said.len() as u64));
        let error = ApiError::WorkerFailed {
            detail: "it broke off inside its answer, and no other one could go on with it".into(),
        };
        let broken = Break { remark, error, after, usage: self.usage(), delivered: self.delivered() };
        self.scanner.go_on();
        self.leg = Leg::Resuming(resume(finish, broken, so_far).boxed());
    }

    fn resumed(&mut self, resumed: Result<Rest, ApiError>) {
        match resumed {
            Ok(Rest { first, body, mut finish }) => {
                finish.in_flight.iter_mut().for_each(InFlight::first_token);
                self.leg = Leg::of(body, finish);
                self.take(first);
            }
            Err(error) => {
                self.leg = Leg::Over;
                self.ready.push_back(error.event(self.client, self.number()));
            }
        }
    }

    /// The client is told that its answer ends here, and why.
    fn confess(&mut self, mut finish: Finish, (remark, why): (Remark, &str)) {
        let number = self.number();
        self.ready.push_back(match self.scanner.failure() {
            Some(told) => told.clone(),
            None => {
                let detail = format!("it broke off inside its answer, which cannot go on elsewhere because {why}");
                ApiError::WorkerFailed { detail }.event(self.client, number)
            }
        });
        count(&finish, "unresumable");
        if let Some(attempt) = finish.attempts.last_mut() {
            attempt.remarks.push(remark);
            attempt.unresumable = Some(why.into());
        }
        finish.gateway.metrics.requests.errors.with_label_values(&["worker_broke_off"]).inc();
        self.close(finish, (Ending::Broken, self.usage()));
    }

    /// The end of the request, with what was delivered of its answer.
    fn close(&self, finish: Finish, (ending, usage): (Ending, Option<Usage>)) {
        Finish { delivered: self.delivered(), ..finish }.end(ending, usage);
    }

    /// Tokens of the answer so far: engines send one an event, or a few, which show by their bytes.
    fn delivered(&self) -> Tokens {
        let facts = self.scanner.facts();
        Tokens(facts.outputs.saturating_add(facts.unread).max(facts.text / BYTES_PER_TOKEN))
    }

    fn number(&self) -> u64 {
        self.listener.as_ref().map_or(0, Listener::next_number)
    }

    /// What was counted, by the engine where it told.
    fn usage(&self) -> Option<Usage> {
        self.scanner.facts().usage.or_else(|| self.scanner.said().and_then(Said::usage))
    }
}

/// Who answered failed what it was asked last. Whether that is its fault, the end of the request tells.
fn note_failure(finish: &mut Finish) {
    if let Some(asked) = finish.attempts.last().map(|attempt| attempt.asked) {
        let (worker, trials) = (finish.server(), finish.planned.trials.take());
        finish.failures.push((worker, asked, trials));
    }
}

fn count(finish: &Finish, outcome: &str) {
    finish.gateway.metrics.requests.broken.with_label_values(&[outcome]).inc();
}

/// What another worker goes on after; else why none can.
fn so_far(scanner: &SseScanner, finish: &Finish) -> Result<SoFar, Cow<'static, str>> {
    let breaks = finish.attempts.iter().filter(|attempt| attempt.resumed.is_some()).count();
    if breaks >= MOST_BREAKS {
        return Err("it broke off too often".into());
    }
    let lost_ids = scanner.said().and_then(|said| said.so_far().err()).map(Lost::why);
    let without_ids = finish.step.unresumable.map(Unresumable::why).or(lost_ids);
    match (scanner.so_far(), without_ids) {
        (Ok(kept), _) => Ok(kept.map(|(prompt, said)| (prompt.to_vec(), said.to_vec()))),
        (Err(Lost::Drawn), Some(why)) => Err(format!("{why}, and {}", Lost::Drawn.why()).into()),
        (Err(Lost::NoIds), Some(why)) => Err(why.into()),
        (Err(lost), _) => Err(lost.why().into()),
    }
}

impl Events {
    /// A panic of ours ends this answer only, and the client is told.
    fn poll_guarded(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Infallible>>> {
        catch_unwind(AssertUnwindSafe(|| self.poll_piece(cx))).unwrap_or_else(|_| {
            let (request, number) = (self.client.request, self.number());
            tracing::error!(%request, "a panic inside an answer; please report it");
            self.leg = Leg::Over;
            self.ready.clear();
            Poll::Ready(Some(Ok(ApiError::Internal { request: request.to_string() }.event(self.client, number))))
        })
    }

    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Infallible>>> {
        loop {
            if let Some(piece) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(piece)));
            }
            match &mut self.leg {
                Leg::Over => return Poll::Ready(None),
                Leg::Answering(answering) => match ready!(answering.poll_came(cx)) {
                    Came::Piece(piece) => self.take(piece),
                    Came::End(remark, error) => self.ended(remark, error.as_ref()),
                },
                Leg::Resuming(resuming) => {
                    let resumed = ready!(resuming.poll_unpin(cx));
                    self.resumed(resumed);
                }
            }
        }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        // One that is about to go on elsewhere tells of its end itself.
        if let Leg::Answering(answering) = mem::replace(&mut self.leg, Leg::Over) {
            let facts = self.scanner.facts();
            let ending = match (&facts.error, facts.done) {
                (Some(_), _) => Ending::Broken,
                (None, true) => Ending::Complete,
                (None, false) => Ending::ClientLeft,
            };
            self.close(answering.finish, (ending, self.usage()));
        }
    }
}
