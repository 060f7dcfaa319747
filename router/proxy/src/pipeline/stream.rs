//! Stream: passes the answer to the client as it arrives, and classifies its end: complete, broken, or client left.
//!
//! An answer that breaks off resumes at another worker where that loses and repeats nothing. Otherwise an error event
//! says so, and why: a client's stream never just stops.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::error::Error;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::body::Body;
use axum::response::Response;
use bytes::{Bytes, BytesMut};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use futures::stream::poll_fn;
use http::StatusCode;
use http::header::CONTENT_LENGTH;
use http_body::Body as _;
use planner::RequestTransferBlocker;
use prefix::SpecialTokens;
use tracing::Span;
use vocabulary::Tokens;
use workers_shim::engine_api::{ContinuationBlocker, EventRefusal, SseFilter, TokenTranscript, TokenUsage};

use super::blame::OutlierReporter;
use super::end_guard::{EndGuard, RequestEndRecorder, RequestState};
use super::execute::ExecuteStage;
use super::locate::{self, LocateStage};
use super::plan::PlanStage;
use super::planning::StreamBreak;
use super::request_end::RequestEnd;
use super::resume::{ResumeFrom, ResumedAnswer, resume};
use super::resume_recording::with_resume_recording;
use super::streaming::{AnswerCompletion, AnswerEnd, Streaming};
use crate::client_request::GenerationEndpoint;
use crate::error::{ApiError, ErrorRecipient};
use crate::identified_request::ResponseDelivery;
use crate::leg_outcome::LegResponse;
use crate::liveness_watch::LivenessWatch;
use crate::offload_pool::OffloadPool;
use crate::quotas::BYTES_PER_TOKEN;
use crate::receipt::{AttemptEvent, RequestOutcome};
use crate::request_states::ResumeBlocker;
use crate::stored_responses::StoredResponses;
use crate::stored_responses::listener::{BodyFormat, ResponseRecorder};
use crate::telemetry::metrics::RequestMetrics;
use crate::upstream::{WorkerBody, WorkerBodyError, response_headers};
use crate::worker_client::WorkerClient;

/// Events that arrived together leave together, up to this many bytes in one piece. Nothing waits for more.
const MAX_JOINED_BYTES: usize = 16 << 10;
/// Maximum number of resumes: a request that kills its workers must not reach all of them.
const MAX_RESUMES: usize = 3;

/// What passing an answer on uses, and what resuming it does.
#[derive(Debug)]
pub struct StreamStage {
    pub(super) client: WorkerClient,
    pub(super) responses: Arc<StoredResponses>,
    pub(super) offload_pool: Arc<OffloadPool>,
    pub(super) requests: RequestMetrics,
    pub(super) reporter: OutlierReporter,
    pub(super) ends: Arc<dyn RequestEndRecorder>,
    pub(super) locate: Arc<LocateStage>,
    pub(super) plan: Arc<PlanStage>,
    pub(super) execute: Arc<ExecuteStage>,
}

/// Builds the client's response. Its events are passed on within the request's `span`.
pub fn stream(stage: &Arc<StreamStage>, opened: LegResponse, streaming: Streaming, span: Span) -> Response {
    match opened {
        LegResponse::Whole(answer, report) => {
            if let Some(mut listener) = response_listener(stage, &streaming, answer.status(), BodyFormat::Whole) {
                listener.on_chunk(answer.body());
            }
            let delivered = Tokens(answer.body().len() as u64 / BYTES_PER_TOKEN);
            let state = AnswerCompletion::Whole(answer.status());
            stage.ends.record(streaming.ended(AnswerEnd { state, delivered, usage: report.usage }));
            answer.map(Body::from)
        }
        LegResponse::Stream(answer, first) => {
            let (head, rest) = answer.into_parts();
            let mut events = ClientEventStream::new(stage, (head.status, rest), streaming, span);
            events.on_chunk(first);
            let mut response =
                Response::new(Body::from_stream(poll_fn(move |cx| events.guarded(|events| events.poll_chunk(cx)))));
            *response.status_mut() = head.status;
            *response.headers_mut() = response_headers(&head.headers);
            // An event may be removed or added, so the announced length would be wrong.
            response.headers_mut().remove(CONTENT_LENGTH);
            response
        }
    }
}

/// Returns the recorder that stores a new response, where the request creates one.
fn response_listener(
    stage: &StreamStage,
    streaming: &Streaming,
    status: StatusCode,
    form: BodyFormat,
) -> Option<ResponseRecorder> {
    let identified = &streaming.step.located.identified;
    let request = &identified.request;
    let is_wanted = request.endpoint == GenerationEndpoint::Responses && status.is_success();
    is_wanted.then(|| {
        ResponseRecorder::new(
            (stage.responses.clone(), stage.offload_pool.clone()),
            (&request.incoming, Some(identified.affinity_key)),
            streaming.target(),
            form,
        )
    })
}

/// A worker's events on their way to the client. Dropping it before the end means that the client left.
struct ClientEventStream {
    stage: Arc<StreamStage>,
    client: ErrorRecipient,
    ready: ReadyEvents,
    /// The end of the worker's answer, until its events have left.
    held_end: Option<(AttemptEvent, Option<WorkerBodyError>)>,
    /// Whether more than one choice was requested.
    has_several_choices: bool,
    listener: Option<ResponseRecorder>,
    state: StreamState,
    /// The request's span.
    span: Span,
}

/// Events that the client gets next, in order.
#[derive(Default)]
struct ReadyEvents {
    pieces: VecDeque<Bytes>,
    /// Bytes of all pieces.
    bytes: usize,
}

impl ReadyEvents {
    fn push(&mut self, piece: Bytes) {
        if !piece.is_empty() {
            self.bytes += piece.len();
            self.pieces.push_back(piece);
        }
    }

    fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Takes the next pieces as one, at most [`MAX_JOINED_BYTES`] of them; a longer piece alone. A single piece is not
    /// copied.
    fn take_joined(&mut self) -> Option<Bytes> {
        let first = self.pieces.pop_front()?;
        self.bytes -= first.len();
        let fits = |length: usize, next: &Bytes| length + next.len() <= MAX_JOINED_BYTES;
        if !self.pieces.front().is_some_and(|next| fits(first.len(), next)) {
            return Some(first);
        }
        let mut joined = BytesMut::with_capacity((first.len() + self.bytes).min(MAX_JOINED_BYTES));
        joined.extend_from_slice(&first);
        while let Some(next) = self.pieces.pop_front_if(|next| fits(joined.len(), next)) {
            self.bytes -= next.len();
            joined.extend_from_slice(&next);
        }
        Some(joined.freeze())
    }
}

impl Extend<Bytes> for ReadyEvents {
    fn extend<T: IntoIterator<Item = Bytes>>(&mut self, pieces: T) {
        pieces.into_iter().for_each(|piece| self.push(piece));
    }
}

enum StreamState {
    Answering(Box<EndGuard<AnsweringWorker>>),
    /// The answer broke off and is being resumed. The future ends the request if nobody waits for it any more.
    Resuming(BoxFuture<'static, Result<ResumedAnswer, ApiError>>, Box<SseFilter>),
    /// The stream has ended.
    Over,
}

/// The worker that answers, and what its events have shown so far.
struct AnsweringWorker {
    body: WorkerBody,
    liveness: LivenessWatch,
    scanner: Box<SseFilter>,
    streaming: Streaming,
}

enum StreamItem {
    Chunk(Bytes),
    End(AttemptEvent, Option<WorkerBodyError>),
}

impl StreamState {
    fn of(stage: &StreamStage, (body, scanner): (WorkerBody, Box<SseFilter>), streaming: Streaming) -> Self {
        let mut liveness = LivenessWatch::new(stage.client.fleet().clone(), streaming.target());
        // The first byte has arrived.
        liveness.record_activity();
        let worker = AnsweringWorker { body, liveness, scanner, streaming };
        StreamState::Answering(Box::new(EndGuard::new(worker, &stage.ends)))
    }
}

impl AnsweringWorker {
    fn poll_item(&mut self, cx: &mut Context<'_>) -> Poll<StreamItem> {
        Poll::Ready(match Pin::new(&mut self.body).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                self.liveness.record_activity();
                StreamItem::Chunk(frame.into_data().unwrap_or_default())
            }
            Poll::Ready(Some(Err(error))) => StreamItem::End(AttemptEvent::StreamInterrupted, Some(error)),
            Poll::Ready(None) => StreamItem::End(AttemptEvent::StreamInterrupted, None),
            Poll::Pending => {
                ready!(self.liveness.poll_given_up(cx));
                StreamItem::End(AttemptEvent::StreamLost, None)
            }
        })
    }

    /// Whether the rest of this worker's answer is useless: it reported a failure, its answer diverged, or an event was
    /// refused.
    fn is_abandoned(&self) -> bool {
        self.scanner.has_diverged() || self.scanner.failure().is_some() || self.refusal().is_some()
    }

    /// Returns why an event was refused, unless the answer was already complete.
    fn refusal(&self) -> Option<EventRefusal> {
        self.scanner.refusal().filter(|_| !self.scanner.facts().ended())
    }

    /// Returns whether the break counts against the worker: not if its answer differs from the one that another began,
    /// and not if this router refused an event.
    fn is_at_fault(&self) -> bool {
        !self.scanner.has_diverged() && self.refusal().is_none()
    }

    /// Decodes the recorded ids, so that more of the text is known as delivered and less must be generated again.
    fn settle_text(&mut self) {
        if self.scanner.facts().ended() {
            return;
        }
        if let Some(text) = self.streaming.step.located.identified.model.identifier.text() {
            self.scanner.settle_text(|ids| text.decode(ids, SpecialTokens::Without).ok());
        }
    }

    /// Returns where another worker resumes, or why none can.
    fn resume_from(&self) -> Result<ResumeFrom, Cow<'static, str>> {
        // Another worker would send the same event.
        if let Some(refusal) = self.refusal() {
            return Err(refusal.to_string().into());
        }
        if self.streaming.resume_count() >= MAX_RESUMES {
            return Err("it broke off too often".into());
        }
        let scanner = &self.scanner;
        let lost_ids =
            scanner.transcript().and_then(|transcript| transcript.resume_ids().err()).map(ContinuationBlocker::reason);
        let without_ids = self.streaming.step.resume_blocker.map(ResumeBlocker::reason).or(lost_ids);
        match (scanner.resume_ids(), without_ids) {
            (Ok(None), _) => Ok(ResumeFrom::Beginning),
            (Ok(Some((prompt, answer))), _) => {
                Ok(ResumeFrom::TokenIds { prompt: prompt.to_vec(), answer: answer.to_vec() })
            }
            (Err(ContinuationBlocker::Sampled), Some(why)) => {
                Err(format!("{why}, and {}", ContinuationBlocker::Sampled.reason()).into())
            }
            (Err(ContinuationBlocker::NoIds), Some(why)) => Err(why.into()),
            (Err(defect), _) => Err(defect.reason().into()),
        }
    }

    /// Estimates the answer tokens so far: engines send one token per event, or a few, estimated from their bytes.
    fn delivered_tokens(&self) -> Tokens {
        let facts = self.scanner.facts();
        Tokens(facts.outputs.saturating_add(facts.unread_events).max(facts.text / BYTES_PER_TOKEN))
    }

    /// Returns the usage, as the engine reports it if it does.
    fn usage(&self) -> Option<TokenUsage> {
        self.scanner.facts().usage.or_else(|| self.scanner.transcript().and_then(TokenTranscript::usage))
    }

    fn ended(self, state: AnswerCompletion, usage: Option<TokenUsage>) -> RequestEnd {
        let delivered = self.delivered_tokens();
        self.streaming.ended(AnswerEnd { state, delivered, usage })
    }
}

impl RequestState for AnsweringWorker {
    /// Of a stream that the client has left, the worker's events say how it ended.
    fn into_end(self, outcome: RequestOutcome) -> Option<RequestEnd> {
        let state = match outcome {
            RequestOutcome::ClientDisconnected => AnswerCompletion::of(self.scanner.facts()),
            _ => AnswerCompletion::Interrupted,
        };
        let usage = self.usage();
        Some(self.ended(state, usage))
    }
}

impl ClientEventStream {
    fn new(
        stage: &Arc<StreamStage>,
        (status, body): (StatusCode, WorkerBody),
        mut streaming: Streaming,
        span: Span,
    ) -> Self {
        let request = &streaming.step.located.identified.request;
        let has_several_choices = request.transfer_bar == Some(RequestTransferBlocker::SeveralChoices);
        let client = request.incoming.error_recipient();
        let scanner = match request.delivery {
            ResponseDelivery::Stream { usage_wanted: false } => SseFilter::hiding_usage(),
            ResponseDelivery::Stream { usage_wanted: true } | ResponseDelivery::Whole => SseFilter::new(),
        };
        let scanner = scanner.with_budget(stage.client.event_budget());
        let engine = stage.client.fleet().engine(streaming.target());
        let scanner = Box::new(with_resume_recording(scanner, &streaming.step, engine));
        let listener = response_listener(stage, &streaming, status, BodyFormat::Events);
        streaming.record_first_token();
        Self {
            stage: stage.clone(),
            client,
            ready: ReadyEvents::default(),
            held_end: None,
            has_several_choices,
            listener,
            state: StreamState::of(stage, (body, scanner), streaming),
            span,
        }
    }

    fn on_chunk(&mut self, piece: Bytes) {
        let StreamState::Answering(answering) = &mut self.state else { return };
        let ready_before = self.ready.pieces.len();
        let refused = answering.scanner.push(piece, &mut self.ready);
        let is_abandoned = answering.is_abandoned();
        if let Some(listener) = &mut self.listener {
            self.ready.pieces.range(ready_before..).for_each(|piece| listener.on_chunk(piece));
        }
        match refused {
            Err(refusal) => {
                self.stage.requests.refused_events.with_label_values(&[refusal.as_ref()]).inc();
                self.on_end(AttemptEvent::StreamInterrupted, Some(&refusal));
            }
            Ok(()) if is_abandoned => self.on_end(AttemptEvent::EngineError, None),
            Ok(()) => {}
        }
    }

    /// Handles the end of the worker's answer: complete, or broken off as `event` says.
    fn on_end(&mut self, event: AttemptEvent, error: Option<&dyn Error>) {
        let StreamState::Answering(mut answering) = mem::replace(&mut self.state, StreamState::Over) else { return };
        let cut = answering.scanner.finish();
        if let Some(closing) = answering.scanner.closing_events() {
            self.ready.push(closing);
            self.count("complete");
            let usage = answering.usage();
            return answering.end_with(|worker| worker.ended(AnswerCompletion::Complete, usage));
        }
        answering.settle_text();
        let resume_from = answering.resume_from();
        let facts = answering.scanner.facts();
        // The finish of one choice says nothing about the others.
        let finished = facts.finish.is_some() && !self.has_several_choices && resume_from.is_err();
        if (facts.ended() || finished) && !answering.is_abandoned() {
            let (usage, is_broken) = (facts.usage, facts.error.is_some());
            let state = if is_broken { AnswerCompletion::Interrupted } else { AnswerCompletion::Complete };
            if is_broken {
                self.count_interrupted();
                answering.streaming.record_failure();
            }
            cut.into_iter().for_each(|piece| self.ready.push(piece));
            return answering.end_with(|worker| worker.ended(state, usage));
        }
        let error = error.map(tracing::field::display);
        let worker = answering.streaming.target();
        tracing::warn!(%worker, event = event.as_ref(), error, "a worker's stream broke off");
        if answering.is_at_fault() {
            answering.streaming.record_failure();
        }
        match resume_from {
            Ok(from) => self.start_resume(*answering, event, from),
            Err(why) => self.end_with_error(*answering, (event, &why)),
        }
    }

    /// Requests the rest of the answer from another worker.
    fn start_resume(&mut self, answering: EndGuard<AnsweringWorker>, event: AttemptEvent, from: ResumeFrom) {
        let error = ApiError::WorkerFailed {
            detail: "it broke off inside its answer, and no other one could go on with it".into(),
        };
        let broken = StreamBreak {
            event,
            error: error.clone(),
            kept_tokens: from.kept_tokens(),
            usage: answering.usage(),
            delivered: answering.delivered_tokens(),
        };
        let AnsweringWorker { mut scanner, streaming, .. } = answering.take();
        scanner.switch_engine();
        let planning = streaming.broke_off(broken, |located| locate::refresh_broken(&self.stage.locate, located));
        let planning = EndGuard::new(planning, &self.stage.ends);
        let resuming = resume(self.stage.clone(), planning, (error, from)).boxed();
        self.state = StreamState::Resuming(resuming, scanner);
    }

    fn on_resumed(&mut self, resumed: Result<ResumedAnswer, ApiError>) {
        let StreamState::Resuming(_, scanner) = mem::replace(&mut self.state, StreamState::Over) else { return };
        match resumed {
            Ok(ResumedAnswer { first_chunk, body, mut streaming }) => {
                streaming.record_first_token();
                self.state = StreamState::of(&self.stage, (body, scanner), streaming);
                self.on_chunk(first_chunk);
            }
            Err(error) => self.ready.push(error.stream_event(self.client, self.sequence_number())),
        }
    }

    /// Ends the client's stream with an error event that gives the reason.
    fn end_with_error(&mut self, mut answering: EndGuard<AnsweringWorker>, (event, why): (AttemptEvent, &str)) {
        let number = self.sequence_number();
        self.ready.push(match answering.scanner.failure() {
            Some(error_event) => error_event.clone(),
            None => {
                let error = match answering.refusal() {
                    Some(refusal) => refusal.into(),
                    None => ApiError::WorkerFailed {
                        detail: format!("it broke off inside its answer, which cannot go on elsewhere because {why}"),
                    },
                };
                error.stream_event(self.client, number)
            }
        });
        self.count("not_resumable");
        answering.streaming.record_not_resumable(event, why);
        self.count_interrupted();
        answering.end(RequestOutcome::Interrupted);
    }

    fn count(&self, outcome: &str) {
        self.stage.requests.broken_streams.with_label_values(&[outcome]).inc();
    }

    fn count_interrupted(&self) {
        self.stage.requests.errors.with_label_values(&["stream_interrupted"]).inc();
    }

    fn sequence_number(&self) -> u64 {
        self.listener.as_ref().map_or(0, ResponseRecorder::next_sequence_number)
    }

    /// Polls, and turns a panic of ours into an error event: it ends only this answer, as broken.
    fn guarded(
        &mut self,
        poll: impl FnOnce(&mut Self) -> Poll<Option<Result<Bytes, Infallible>>>,
    ) -> Poll<Option<Result<Bytes, Infallible>>> {
        // Taken for the poll: a clone is counted, for each event.
        let span = mem::replace(&mut self.span, Span::none());
        let polled = span.in_scope(|| self.poll_guarded(poll));
        self.span = span;
        polled
    }

    fn poll_guarded(
        &mut self,
        poll: impl FnOnce(&mut Self) -> Poll<Option<Result<Bytes, Infallible>>>,
    ) -> Poll<Option<Result<Bytes, Infallible>>> {
        catch_unwind(AssertUnwindSafe(|| poll(self))).unwrap_or_else(|_| {
            let (request, number) = (self.client.request, self.sequence_number());
            tracing::error!(%request, "a panic inside an answer; please report it");
            if let StreamState::Answering(answering) = mem::replace(&mut self.state, StreamState::Over) {
                answering.end(RequestOutcome::Interrupted);
            }
            // What came before it counts as delivered.
            self.ready.push(ApiError::Internal { request: request.to_string() }.stream_event(self.client, number));
            Poll::Ready(self.ready.take_joined().map(Ok))
        })
    }

    fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Infallible>>> {
        let mut read = 0;
        // Ready events wait for nothing: neither for the end of an answer, nor for another worker, nor for input that may
        // hold none.
        while self.ready.bytes < MAX_JOINED_BYTES && (self.ready.is_empty() || read < MAX_JOINED_BYTES) {
            match &mut self.state {
                StreamState::Over => return Poll::Ready(self.ready.take_joined().map(Ok)),
                StreamState::Answering(answering) => {
                    let end = match self.held_end.take() {
                        Some(end) => end,
                        None => match answering.poll_item(cx) {
                            Poll::Ready(StreamItem::Chunk(piece)) => {
                                read += piece.len().max(1);
                                self.on_chunk(piece);
                                continue;
                            }
                            Poll::Ready(StreamItem::End(event, error)) => (event, error),
                            Poll::Pending => break,
                        },
                    };
                    if !self.ready.is_empty() {
                        self.held_end = Some(end);
                        break;
                    }
                    self.on_end(end.0, end.1.as_ref().map(|error| error as &dyn Error));
                }
                StreamState::Resuming(..) if !self.ready.is_empty() => break,
                StreamState::Resuming(resuming, _) => {
                    let resumed = ready!(resuming.poll_unpin(cx));
                    self.on_resumed(resumed);
                }
            }
        }
        self.ready.take_joined().map_or(Poll::Pending, |piece| Poll::Ready(Some(Ok(piece))))
    }
}

#[cfg(test)]
mod tests;
