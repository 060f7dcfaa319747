//! Records the receipt of a step that continues a stored response: no plan is made for it, because its history is
//! stored at its worker. The receipt is written once, when the answer is over.

use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::StatusCode;
use planner::Action;
use vocabulary::{Epoch, KvIndexState, Micros, SessionId, Tokens, WorkerId};
use workers_shim::engine_api::{EngineResponse, SseScanner, TokenUsage};

use super::listener::BodyFormat;
use crate::app_state::AppState;
use crate::client_request::{ClientRequest, GenerationEndpoint};
use crate::pipeline::locate::{LedgerFreshness, LookupEvidence};
use crate::pipeline::offload_pool::OffloadTask;
use crate::pipeline::parse::{self, ParsedRequest};
use crate::pipeline::receipt::{Attempt, PromptSummary, Receipt, RequestOutcome, StepObservation};

/// Why nothing is known of the prompt except the received bytes.
const FALLBACK_REASON: &str = "stored_response";
/// Bytes per token, where the engine reports no count.
const BYTES_PER_TOKEN: usize = 4;

/// Records one step. Dropping it ends the answer.
pub(crate) struct ReceiptRecorder {
    gateway: Arc<AppState>,
    request: ParsedRequest,
    session: SessionId,
    worker: WorkerId,
    status: StatusCode,
    usage_reader: UsageReader,
    first_byte: Option<Instant>,
    broken: bool,
}

/// Reads the end and the usage from the answer.
enum UsageReader {
    /// One JSON object, as far as it is kept, and the limit for that.
    Whole(Vec<u8>, usize),
    /// Server-sent events.
    Events(Box<SseScanner>),
}

impl UsageReader {
    fn push(&mut self, data: &Bytes) {
        match self {
            // Of what is too long, one byte too many is kept as a marker.
            Self::Whole(kept, most) => {
                let room = (*most + 1).saturating_sub(kept.len());
                kept.extend_from_slice(&data[..data.len().min(room)]);
            }
            Self::Events(scanner) => scanner.push(data.clone(), &mut Vec::new()),
        }
    }

    /// Returns whether the answer was complete, and its usage.
    fn read(&mut self) -> (bool, Option<TokenUsage>) {
        match self {
            // An answer that is too long to be read was passed on all the same.
            Self::Whole(kept, most) if kept.len() > *most => (true, None),
            Self::Whole(kept, _) => match EngineResponse::read(&std::mem::take(kept).into()) {
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

impl ReceiptRecorder {
    /// Records the answer of `worker` to a step that follows a stored response. `None` where the request names no
    /// model, or where the worker does not know that response: then this is no step. A long request is parsed on the
    /// offload pool.
    pub(crate) async fn of(
        gateway: &Arc<AppState>,
        request: &ClientRequest,
        (worker, status, form): (WorkerId, StatusCode, BodyFormat),
    ) -> Option<Self> {
        if status == StatusCode::NOT_FOUND {
            return None;
        }
        let (load, request) = (OffloadTask::of(request), request.clone());
        let read = move || parse::parse(request, GenerationEndpoint::Responses, None);
        let request = load.run(&gateway.offload_pool, read).await.ok()?.ok()?;
        // Only the worker knows which conversation this continues: without a name it is a session of its own.
        let previous = request.body.json_fields().read::<String>("previous_response_id").unwrap_or_default();
        let name = request.session_key.as_ref().map_or(previous.as_str(), |key| &key.name);
        let session = SessionId::of_key(&request.incoming.tenant, &request.model, name);
        let reading = match form {
            BodyFormat::Whole => UsageReader::Whole(Vec::new(), gateway.caches.responses.max_answer_bytes()),
            BodyFormat::Events => UsageReader::Events(Box::new(SseScanner::new())),
        };
        let gateway = gateway.clone();
        Some(Self { gateway, request, session, worker, status, usage_reader: reading, first_byte: None, broken: false })
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

    /// Records that the worker broke off.
    pub(crate) fn on_broken(&mut self) {
        self.broken = true;
    }

    fn receipt(&mut self) -> Receipt {
        let (ended, usage) = self.usage_reader.read();
        let ending = match () {
            () if self.broken => RequestOutcome::Broken,
            () if !self.status.is_success() => RequestOutcome::Refused,
            () if ended => RequestOutcome::Complete,
            () => RequestOutcome::ClientLeft,
        };
        let incoming = &self.request.incoming;
        let seen = self.observation(ending, usage);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let attempt = Attempt {
            asked: Instant::now(),
            action: Action::ColocatedPrefill,
            prefill: self.worker,
            decode: self.worker,
            knowledge: KvIndexState::Fallback,
            ejected: Vec::new(),
            resumed: None,
            unresumable: None,
            remarks: Vec::new(),
        };
        Receipt {
            request: incoming.id,
            at_unix_ms: (now.as_millis() as u64).saturating_sub(seen.total.0 / 1000),
            tenant: incoming.tenant.clone(),
            model: self.request.model.clone(),
            known: self.prompt_summary(usage),
            mode: self.gateway.routing.get().mode_of(self.session),
            control: false,
            soft_state: self.gateway.caches.shared_cache.degraded_health(),
            decision: None,
            waited: None,
            attempts: vec![attempt],
            seen: Some(seen),
        }
    }

    fn prompt_summary(&self, usage: Option<TokenUsage>) -> PromptSummary {
        let counted = usage.map(|usage| usage.prompt).filter(|prompt| *prompt > Tokens::ZERO);
        let estimate = Tokens((self.request.incoming.body.len() / BYTES_PER_TOKEN).max(1) as u64);
        let stale = self.gateway.directory().view().quorum().stale;
        PromptSummary {
            session: self.session,
            named_by: self.request.session_key.as_ref().map(|key| key.source),
            fallback: Some(FALLBACK_REASON),
            rung: None,
            distrusted: false,
            owner: None,
            epoch: Epoch::default(),
            prompt: counted.unwrap_or(estimate),
            estimated: counted.is_none(),
            sealed: Tokens::ZERO,
            deepest_overlap: Tokens::ZERO,
            grounds: LookupEvidence {
                known: Default::default(),
                preamble: Default::default(),
                view: if stale { LedgerFreshness::Stale } else { LedgerFreshness::Current },
                unapplied: false,
                promises: 0,
                routers: 0,
                unread: None,
            },
        }
    }

    fn observation(&self, ending: RequestOutcome, usage: Option<TokenUsage>) -> StepObservation {
        let incoming = &self.request.incoming;
        let arrived = incoming.arrived;
        let is_streamed = matches!(self.usage_reader, UsageReader::Events(_));
        StepObservation {
            ending,
            status: self.status.as_u16(),
            predicted: None,
            first_token: self.first_byte.filter(|_| is_streamed).map(|at| Micros::of(at - arrived)),
            total: Micros::of(arrived.elapsed()),
            predicted_cached: Tokens::ZERO,
            cached: usage.map(|usage| usage.cached.unwrap_or_default()),
            answered: usage.map(|usage| usage.completion),
            moved: Default::default(),
            repeated: incoming.token_reservation.as_ref().is_some_and(|reserved| reserved.is_repeated()),
            engine_disagrees: None,
            cache_disagrees: None,
        }
    }
}

impl Drop for ReceiptRecorder {
    fn drop(&mut self) {
        let receipt = self.receipt();
        self.gateway.decisions.record(receipt, None);
    }
}
