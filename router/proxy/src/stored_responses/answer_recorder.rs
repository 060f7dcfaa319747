//! Reads the answer to a step that continues a stored response: no plan is made for it, because its history is at its
//! worker. Its receipt is written once, when the answer is over. A long answer is read on the offload pool.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http::StatusCode;
use vocabulary::{SessionId, Tokens};
use workers_shim::engine_api::{AnswerSummary, SseFilter, TokenUsage};

use super::StoredResponses;
use super::listener::BodyFormat;
use crate::client_request::{ClientRequest, GenerationEndpoint};
use crate::forward::ForwardedContinuation;
use crate::identified_request::ParsedRequest;
use crate::memory_budget::MemoryReservation;
use crate::offload_pool::{OffloadPool, OffloadSpec};
use crate::request_parser::parse;

/// Reader of the answer to one forwarded step.
pub(crate) struct ForwardedAnswerReader {
    request: ParsedRequest,
    session: SessionId,
    usage_reader: UsageReader,
    first_byte: Option<Instant>,
    load: OffloadSpec,
    /// Memory for reading the answer.
    memory: Option<MemoryReservation>,
}

/// What was read of a step's answer.
pub(crate) struct ObservedAnswer {
    /// The step, with the usage that the answer reports.
    pub(crate) step: ForwardedContinuation,
    /// Whether the answer was complete.
    pub(crate) is_complete: bool,
    /// When the first byte of a stream arrived.
    pub(crate) first_byte: Option<Instant>,
}

/// Reads the end and the usage from the answer.
enum UsageReader {
    /// One JSON object, as far as it is kept, and the limit for that.
    Whole(Vec<u8>, usize),
    /// Server-sent events.
    Events(Box<SseFilter>),
}

impl UsageReader {
    fn push(&mut self, data: &Bytes) {
        match self {
            // Of what is too long, one byte too many is kept as a marker.
            Self::Whole(kept, most) => {
                let room = (*most + 1).saturating_sub(kept.len());
                kept.extend_from_slice(&data[..data.len().min(room)]);
            }
            Self::Events(scanner) => {
                // A refusal ends the relayed stream, too, so nothing follows.
                let _ = scanner.push(data.clone(), &mut Vec::new());
            }
        }
    }

    /// Bytes that are still to be read.
    fn bytes(&self) -> usize {
        match self {
            Self::Whole(kept, _) => kept.len(),
            Self::Events(_) => 0,
        }
    }

    /// Returns whether the answer was complete, and its usage.
    fn read(&mut self) -> (bool, Option<TokenUsage>) {
        match self {
            // An answer that is too long to be read was passed on all the same.
            Self::Whole(kept, most) if kept.len() > *most => (true, None),
            Self::Whole(kept, _) => match AnswerSummary::read(&std::mem::take(kept).into()) {
                Ok(answer) => (true, answer.usage),
                Err(_) => (false, None),
            },
            Self::Events(scanner) => {
                scanner.finish();
                let facts = scanner.facts();
                (facts.ended() && facts.error.is_none(), facts.usage)
            }
        }
    }
}

impl ForwardedAnswerReader {
    /// Reads the answer to a step that follows a stored response. `None` where the request names no
    /// model, or where its worker does not know that response: then this is no step. A long request is parsed on the
    /// offload pool.
    pub(crate) async fn of(
        (offload_pool, responses): (&OffloadPool, &StoredResponses),
        request: &ClientRequest,
        (status, form): (StatusCode, BodyFormat),
    ) -> Option<Self> {
        if status == StatusCode::NOT_FOUND {
            return None;
        }
        let (load, request) = (OffloadSpec::of(request), request.clone());
        let memory = request.memory.as_deref().map(MemoryReservation::sibling);
        let read = move || parse(request, GenerationEndpoint::Responses, None);
        let request = load.clone().run(offload_pool, read).await.ok()?.ok()?;
        // Only the worker knows which conversation this continues: without a name it is a session of its own.
        let previous = request.body.scanned_json().read::<String>("previous_response_id").unwrap_or_default();
        let name = request.session_key.as_ref().map_or(previous.as_str(), |key| &key.name);
        let session = SessionId::of_key(&request.incoming.tenant, &request.model, name);
        let reading = match form {
            BodyFormat::Whole => UsageReader::Whole(Vec::new(), responses.max_answer_bytes()),
            BodyFormat::Events => UsageReader::Events(Box::new(SseFilter::new())),
        };
        Some(Self { request, session, usage_reader: reading, first_byte: None, load, memory })
    }

    /// Returns the session, if the client names it.
    pub(crate) fn session(&self) -> Option<SessionId> {
        self.request.session_key.as_ref().map(|_| self.session)
    }

    /// Returns the maximum answer length, if the client sets one.
    pub(crate) fn asked(&self) -> Option<Tokens> {
        self.request.max_answer
    }

    pub(crate) fn on_chunk(&mut self, data: &Bytes) {
        self.first_byte.get_or_insert_with(Instant::now);
        self.usage_reader.push(data);
    }

    /// Reads the answer, which is over, and passes what it reports to `then`.
    pub(crate) fn finish(self, pool: &Arc<OffloadPool>, then: impl FnOnce(ObservedAnswer) + Send + 'static) {
        let Self { request, session, mut usage_reader, first_byte, load, memory } = self;
        let first_byte = first_byte.filter(|_| matches!(usage_reader, UsageReader::Events(_)));
        let load = load.on(usage_reader.bytes());
        load.run_detached(
            (pool, memory),
            move || usage_reader.read(),
            move |read| {
                // Without memory or a place on the pool, the usage stays unknown.
                let (is_complete, usage) = read.unwrap_or((true, None));
                then(ObservedAnswer {
                    step: ForwardedContinuation { request, session, usage },
                    is_complete,
                    first_byte,
                });
            },
        );
    }
}
