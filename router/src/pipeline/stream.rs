//! Stream: passes the answer to the client as it arrives, and classifies its end: complete, broken, or client left.
//!
//! An answer that breaks off resumes at another worker where that loses and repeats nothing. Otherwise an error event
//! says so, and why: a client's stream never just stops.

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
use planner::TransferObstacle;
use prefix::SpecialTokens;
use vocabulary::Tokens;
use workers_shim::engine_api::{NotResumable, SseScanner, TokenTranscript, TokenUsage};
use workers_shim::fleet::InFlightRequest;

use super::legs::LegResponse;
use super::liveness_watch::LivenessWatch;
use super::parse::ResponseDelivery;
use super::planning::BrokenAnswer;
use super::receipt::{AttemptEvent, RequestOutcome};
use super::request_end::RequestEnd;
use super::resume::{ResumePrefix, ResumedAnswer, resume};
use super::resume_blocker::{ResumeBlocker, replay_verifier, token_transcript};
use crate::client_request::GenerationEndpoint;
use crate::error::{ApiError, ErrorRecipient};
use crate::quotas::BYTES_PER_TOKEN;
use crate::stored_responses::listener::{BodyFormat, ResponseListener};
use crate::upstream::{WorkerBody, WorkerBodyError, response_headers};

/// Maximum number of resumes: a request that kills its workers must not reach all of them.
const MAX_RESUMES: usize = 3;

/// Builds the client's response.
pub fn stream(opened: LegResponse, mut finish: RequestEnd) -> Response {
    let request = &finish.step.located.identified.request;
    let (delivery, several) = (request.delivery, request.transfer_bar == Some(TransferObstacle::SeveralChoices));
    let client = request.incoming.error_recipient();
    match opened {
        LegResponse::Whole(answer, told) => {
            if let Some(mut listener) = response_listener(&finish, answer.status(), BodyFormat::Whole) {
                listener.on_chunk(answer.body());
            }
            // All tokens came together, so the time of the first one is unknown.
            finish.first_byte = None;
            finish.status = answer.status().as_u16();
            let ending = if answer.status().is_success() { RequestOutcome::Complete } else { RequestOutcome::Refused };
            finish.delivered = Tokens(answer.body().len() as u64 / BYTES_PER_TOKEN);
            finish.end(ending, told.usage);
            answer.map(Body::from)
        }
        LegResponse::Stream(answer, first) => {
            let (head, rest) = answer.into_parts();
            finish.status = head.status.as_u16();
            let listener = response_listener(&finish, head.status, BodyFormat::Events);
            if let Some(in_flight) = &mut finish.in_flight {
                in_flight.record_first_token();
            }
            let scanner = match delivery {
                ResponseDelivery::Stream { usage_wanted: false } => SseScanner::hiding_usage(),
                ResponseDelivery::Stream { usage_wanted: true } | ResponseDelivery::Whole => SseScanner::new(),
            };
            let scanner = with_transcript(scanner.with_budget(finish.gateway.workers.event_budget()), &finish);
            let leg = StreamState::of(rest, finish);
            let mut events = WorkerEventStream {
                client,
                scanner,
                ready: VecDeque::new(),
                has_several_choices: several,
                listener,
                state: leg,
            };
            events.on_chunk(first);
            let mut response = Response::new(Body::from_stream(poll_fn(move |cx| events.poll_guarded(cx))));
            *response.status_mut() = head.status;
            *response.headers_mut() = response_headers(&head.headers);
            // An event may be removed or added, so the announced length would be wrong.
            response.headers_mut().remove(CONTENT_LENGTH);
            response
        }
    }
}

/// Records what is needed to resume the answer at another worker.
fn with_transcript(scanner: SseScanner, finish: &RequestEnd) -> SseScanner {
    let (request, unresumable) = (&finish.step.located.identified.request, finish.step.resume_blocker);
    let scanner = if unresumable.is_none() { scanner.with_transcript(token_transcript(request)) } else { scanner };
    match replay_verifier(request, unresumable, finish.gateway.fleet().engine(finish.target())) {
        Some(retold) => scanner.with_replay_verifier(retold),
        None => scanner,
    }
}

/// A worker's events on their way to the client. Dropping it before the end means that the client left.
struct WorkerEventStream {
    client: ErrorRecipient,
    scanner: SseScanner,
    ready: VecDeque<Bytes>,
    /// Whether more than one choice was requested.
    has_several_choices: bool,
    listener: Option<ResponseListener>,
    state: StreamState,
}

enum StreamState {
    Streaming(Box<Streaming>),
    /// The answer broke off and is being resumed.
    Resuming(BoxFuture<'static, Result<ResumedAnswer, ApiError>>),
    /// The stream has ended.
    Over,
}

struct Streaming {
    body: WorkerBody,
    liveness: LivenessWatch,
    end: RequestEnd,
}

enum StreamItem {
    Chunk(Bytes),
    End(AttemptEvent, Option<WorkerBodyError>),
}

impl StreamState {
    fn of(rest: WorkerBody, finish: RequestEnd) -> Self {
        let mut vigil = LivenessWatch::new(finish.gateway.fleet().clone(), finish.target());
        // The first byte has arrived.
        vigil.record_activity();
        StreamState::Streaming(Box::new(Streaming { body: rest, liveness: vigil, end: finish }))
    }
}

impl Streaming {
    fn poll_item(&mut self, cx: &mut Context<'_>) -> Poll<StreamItem> {
        Poll::Ready(match Pin::new(&mut self.body).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                self.liveness.record_activity();
                StreamItem::Chunk(frame.into_data().unwrap_or_default())
            }
            Poll::Ready(Some(Err(error))) => StreamItem::End(AttemptEvent::BrokeOff, Some(error)),
            Poll::Ready(None) => StreamItem::End(AttemptEvent::BrokeOff, None),
            Poll::Pending => {
                ready!(self.liveness.poll_given_up(cx));
                StreamItem::End(AttemptEvent::FellSilent, None)
            }
        })
    }
}

/// Returns the listener that stores a new response, where the request creates one.
fn response_listener(finish: &RequestEnd, status: StatusCode, form: BodyFormat) -> Option<ResponseListener> {
    let prefixed = &finish.step.located.identified;
    let request = &prefixed.request;
    let is_wanted = request.endpoint == GenerationEndpoint::Responses && status.is_success();
    let responses = &finish.gateway.caches.responses;
    is_wanted.then(|| {
        ResponseListener::new(
            responses.clone(),
            (&request.incoming, Some(prefixed.affinity_key)),
            finish.target(),
            form,
        )
    })
}

impl WorkerEventStream {
    fn on_chunk(&mut self, piece: Bytes) {
        let mut passes = Vec::new();
        self.scanner.push(piece, &mut passes);
        if let Some(listener) = &mut self.listener {
            passes.iter().for_each(|piece| listener.on_chunk(piece));
        }
        self.ready.extend(passes.into_iter().filter(|piece| !piece.is_empty()));
        if self.is_abandoned() {
            self.on_end(AttemptEvent::EngineFailed, None);
        }
    }

    /// Handles the end of the worker's answer: complete, or broken off as `remark` says.
    fn on_end(&mut self, remark: AttemptEvent, error: Option<&WorkerBodyError>) {
        let StreamState::Streaming(answering) = mem::replace(&mut self.state, StreamState::Over) else { return };
        let mut finish = answering.end;
        let cut = self.scanner.finish();
        if let Some(closing) = self.scanner.closing_events() {
            self.ready.push_back(closing);
            count(&finish, "complete");
            return self.close(finish, (RequestOutcome::Complete, self.usage()));
        }
        self.settle(&finish);
        let so_far = resume_prefix(&self.scanner, &finish);
        let facts = self.scanner.facts();
        // The finish of one choice says nothing about the others.
        let finished = facts.finish.is_some() && !self.has_several_choices && so_far.is_err();
        if (facts.ended() || finished) && !self.is_abandoned() {
            let ending = if facts.error.is_none() { RequestOutcome::Complete } else { RequestOutcome::Broken };
            if ending == RequestOutcome::Broken {
                finish.gateway.metrics.requests.errors.with_label_values(&["stream_interrupted"]).inc();
                note_failure(&mut finish);
            }
            let usage = facts.usage;
            self.ready.extend(cut);
            return self.close(finish, (ending, usage));
        }
        let error = error.map(tracing::field::display);
        tracing::warn!(worker = %finish.target(), how = remark.as_ref(), error, "a worker's stream broke off");
        // A worker whose answer differs from the one that another began is healthy.
        if !self.scanner.has_diverged() {
            note_failure(&mut finish);
        }
        match so_far {
            Ok(so_far) => self.start_resume(finish, remark, so_far),
            Err(why) => self.end_with_error(finish, (remark, &why)),
        }
    }

    /// Whether the rest of this worker's answer is useless: it reported a failure, or its answer diverged.
    fn is_abandoned(&self) -> bool {
        self.scanner.has_diverged() || self.scanner.failure().is_some()
    }

    /// Decodes the recorded ids, so that more of the text is known as delivered and less must be generated again.
    fn settle(&mut self, finish: &RequestEnd) {
        if self.scanner.facts().ended() {
            return;
        }
        if let Some(text) = finish.step.located.identified.model.identifier.text() {
            self.scanner.settle_text(|ids| text.decode(ids, SpecialTokens::Without).ok());
        }
    }

    /// Requests the rest of the answer from another worker.
    fn start_resume(&mut self, finish: RequestEnd, remark: AttemptEvent, so_far: ResumePrefix) {
        let after = so_far.as_ref().map_or(Tokens::ZERO, |(_, said)| Tokens(said.len() as u64));
        let error = ApiError::WorkerFailed {
            detail: "it broke off inside its answer, and no other one could go on with it".into(),
        };
        let broken = BrokenAnswer {
            event: remark,
            error,
            kept_tokens: after,
            usage: self.usage(),
            delivered: self.delivered_tokens(),
        };
        self.scanner.switch_engine();
        self.state = StreamState::Resuming(resume(finish, broken, so_far).boxed());
    }

    fn on_resumed(&mut self, resumed: Result<ResumedAnswer, ApiError>) {
        match resumed {
            Ok(ResumedAnswer { first_chunk: first, body, end: mut finish }) => {
                finish.in_flight.iter_mut().for_each(InFlightRequest::record_first_token);
                self.state = StreamState::of(body, finish);
                self.on_chunk(first);
            }
            Err(error) => {
                self.state = StreamState::Over;
                self.ready.push_back(error.stream_event(self.client, self.sequence_number()));
            }
        }
    }

    /// Ends the client's stream with an error event that gives the reason.
    fn end_with_error(&mut self, mut finish: RequestEnd, (remark, why): (AttemptEvent, &str)) {
        let number = self.sequence_number();
        self.ready.push_back(match self.scanner.failure() {
            Some(told) => told.clone(),
            None => {
                let detail = format!("it broke off inside its answer, which cannot go on elsewhere because {why}");
                ApiError::WorkerFailed { detail }.stream_event(self.client, number)
            }
        });
        count(&finish, "not_resumable");
        if let Some(attempt) = finish.attempts.last_mut() {
            attempt.remarks.push(remark);
            attempt.unresumable = Some(why.into());
        }
        finish.gateway.metrics.requests.errors.with_label_values(&["stream_interrupted"]).inc();
        self.close(finish, (RequestOutcome::Broken, self.usage()));
    }

    /// Ends the request with the number of delivered tokens.
    fn close(&self, finish: RequestEnd, (ending, usage): (RequestOutcome, Option<TokenUsage>)) {
        RequestEnd { delivered: self.delivered_tokens(), ..finish }.end(ending, usage);
    }

    /// Estimates the answer tokens so far: engines send one token per event, or a few, estimated from their bytes.
    fn delivered_tokens(&self) -> Tokens {
        let facts = self.scanner.facts();
        Tokens(facts.outputs.saturating_add(facts.unread_events).max(facts.text / BYTES_PER_TOKEN))
    }

    fn sequence_number(&self) -> u64 {
        self.listener.as_ref().map_or(0, ResponseListener::next_sequence_number)
    }

    /// Returns the usage, as the engine reports it if it does.
    fn usage(&self) -> Option<TokenUsage> {
        self.scanner.facts().usage.or_else(|| self.scanner.transcript().and_then(TokenTranscript::usage))
    }
}

/// Records a failure of the answering worker. Whether it is at fault is decided at the end of the request.
fn note_failure(finish: &mut RequestEnd) {
    if let Some(asked) = finish.attempts.last().map(|attempt| attempt.asked) {
        let (worker, trials) = (finish.target(), finish.planned.trials.take());
        finish.failures.push((worker, asked, trials));
    }
}

fn count(finish: &RequestEnd, outcome: &str) {
    finish.gateway.metrics.requests.broken_streams.with_label_values(&[outcome]).inc();
}

/// Returns the ids after which another worker resumes, or why none can.
fn resume_prefix(scanner: &SseScanner, finish: &RequestEnd) -> Result<ResumePrefix, Cow<'static, str>> {
    let breaks = finish.attempts.iter().filter(|attempt| attempt.resumed.is_some()).count();
    if breaks >= MAX_RESUMES {
        return Err("it broke off too often".into());
    }
    let lost_ids = scanner.transcript().and_then(|said| said.resume_ids().err()).map(NotResumable::reason);
    let without_ids = finish.step.resume_blocker.map(ResumeBlocker::reason).or(lost_ids);
    match (scanner.resume_ids(), without_ids) {
        (Ok(kept), _) => Ok(kept.map(|(prompt, said)| (prompt.to_vec(), said.to_vec()))),
        (Err(NotResumable::Sampled), Some(why)) => Err(format!("{why}, and {}", NotResumable::Sampled.reason()).into()),
        (Err(NotResumable::NoIds), Some(why)) => Err(why.into()),
        (Err(lost), _) => Err(lost.reason().into()),
    }
}

impl WorkerEventStream {
    /// Polls, and turns a panic of ours into an error event: it ends only this answer.
    fn poll_guarded(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Infallible>>> {
        catch_unwind(AssertUnwindSafe(|| self.poll_chunk(cx))).unwrap_or_else(|_| {
            let (request, number) = (self.client.request, self.sequence_number());
            tracing::error!(%request, "a panic inside an answer; please report it");
            self.state = StreamState::Over;
            self.ready.clear();
            Poll::Ready(Some(Ok(ApiError::Internal { request: request.to_string() }.stream_event(self.client, number))))
        })
    }

    fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Infallible>>> {
        loop {
            if let Some(piece) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(piece)));
            }
            match &mut self.state {
                StreamState::Over => return Poll::Ready(None),
                StreamState::Streaming(answering) => match ready!(answering.poll_item(cx)) {
                    StreamItem::Chunk(piece) => self.on_chunk(piece),
                    StreamItem::End(remark, error) => self.on_end(remark, error.as_ref()),
                },
                StreamState::Resuming(resuming) => {
                    let resumed = ready!(resuming.poll_unpin(cx));
                    self.on_resumed(resumed);
                }
            }
        }
    }
}

impl Drop for WorkerEventStream {
    fn drop(&mut self) {
        // An answer that is being resumed reports its end itself.
        if let StreamState::Streaming(answering) = mem::replace(&mut self.state, StreamState::Over) {
            let facts = self.scanner.facts();
            let ending = match (&facts.error, facts.done) {
                (Some(_), _) => RequestOutcome::Broken,
                (None, true) => RequestOutcome::Complete,
                (None, false) => RequestOutcome::ClientLeft,
            };
            self.close(answering.end, (ending, self.usage()));
        }
    }
}
