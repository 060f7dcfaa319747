//! The receipt of a step that goes on from a stored response: no plan is made for it, because what it is prompted with lies
//! at its worker. It is filed once, when its answer is over.

use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::StatusCode;
use planner::Action;
use vocabulary::{Epoch, Knowledge, Micros, SessionId, Tokens, WorkerId};
use workers_shim::dialect::{Answer, SseScanner, Usage};

use super::listener::Form;
use crate::gateway::Gateway;
use crate::incoming::{Endpoint, Incoming};
use crate::pipeline::aside::Load;
use crate::pipeline::locate::{Freshness, Grounds};
use crate::pipeline::parse::{self, Request};
use crate::pipeline::receipt::{Attempt, Ending, Known, Receipt, Seen};

/// Why nothing is known of the prompt but the bytes that came.
const REASON: &str = "stored_response";
/// Bytes of a token, where the engine does not count.
const BYTES: usize = 4;

/// What is filed of one step. Dropping it is the answer's end.
pub(crate) struct Filing {
    gateway: Arc<Gateway>,
    request: Request,
    session: SessionId,
    worker: WorkerId,
    status: StatusCode,
    reading: Reading,
    first_byte: Option<Instant>,
    broken: bool,
}

/// What the answer says of its end and its cost.
enum Reading {
    /// One JSON object, as much of it as is kept; and how much that may be.
    Whole(Vec<u8>, usize),
    /// Server-sent events.
    Events(Box<SseScanner>),
}

impl Reading {
    fn piece(&mut self, data: &Bytes) {
        match self {
            // Of what is too long, one byte too many is kept, as a sign.
            Self::Whole(kept, most) => {
                let room = (*most + 1).saturating_sub(kept.len());
                kept.extend_from_slice(&data[..data.len().min(room)]);
            }
            Self::Events(scanner) => scanner.push(data.clone(), &mut Vec::new()),
        }
    }

    /// Whether the answer came to its end, and what it cost.
    fn read(&mut self) -> (bool, Option<Usage>) {
        match self {
            // One that is too long to be read was passed on all the same.
            Self::Whole(kept, most) if kept.len() > *most => (true, None),
            Self::Whole(kept, _) => match Answer::read(&std::mem::take(kept).into()) {
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

impl Filing {
    /// For the answer of `worker` to a step that follows a stored response. None where the request names no model, or
    /// where the worker does not know that response: then this is no step. A long request is read aside.
    pub(crate) async fn of(
        gateway: &Arc<Gateway>,
        request: &Incoming,
        (worker, status, form): (WorkerId, StatusCode, Form),
    ) -> Option<Self> {
        if status == StatusCode::NOT_FOUND {
            return None;
        }
        let (load, request) = (Load::of(request), request.clone());
        let read = move || parse::parse(request, Endpoint::Responses, None);
        let request = load.done(&gateway.aside, read).await.ok()?.ok()?;
        // Which conversation it goes on only its worker knows: without a name it is a session of its own.
        let previous = request.body.fields().read::<String>("previous_response_id").unwrap_or_default();
        let name = request.session_key.as_ref().map_or(previous.as_str(), |key| &key.name);
        let session = SessionId::of_key(&request.incoming.tenant, &request.model, name);
        let reading = match form {
            Form::Whole => Reading::Whole(Vec::new(), gateway.remembered.responses.longest_answer()),
            Form::Events => Reading::Events(Box::new(SseScanner::new())),
        };
        let gateway = gateway.clone();
        Some(Self { gateway, request, session, worker, status, reading, first_byte: None, broken: false })
    }

    /// The session, where the client names it.
    pub(crate) fn session(&self) -> Option<SessionId> {
        self.request.session_key.as_ref().map(|_| self.session)
    }

    /// The most tokens of the answer, where the client says.
    pub(crate) fn asked(&self) -> Option<Tokens> {
        self.request.answer
    }

    pub(crate) fn piece(&mut self, data: &Bytes) {
        self.first_byte.get_or_insert_with(Instant::now);
        self.reading.piece(data);
    }

    /// The worker broke off.
    pub(crate) fn broken(&mut self) {
        self.broken = true;
    }

    fn receipt(&mut self) -> Receipt {
        let (ended, usage) = self.reading.read();
        let ending = match () {
            () if self.broken => Ending::Broken,
            () if !self.status.is_success() => Ending::Refused,
            () if ended => Ending::Complete,
            () => Ending::ClientLeft,
        };
        let incoming = &self.request.incoming;
        let seen = self.seen(ending, usage);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let attempt = Attempt {
            asked: Instant::now(),
            action: Action::ColocatedPrefill,
            prefill: self.worker,
            decode: self.worker,
            knowledge: Knowledge::Fallback,
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
            known: self.known(usage),
            mode: self.gateway.steering.get().mode_of(self.session),
            control: false,
            soft_state: self.gateway.remembered.state.trouble(),
            decision: None,
            waited: None,
            attempts: vec![attempt],
            seen: Some(seen),
        }
    }

    fn known(&self, usage: Option<Usage>) -> Known {
        let counted = usage.map(|usage| usage.prompt).filter(|prompt| *prompt > Tokens::ZERO);
        let estimate = Tokens((self.request.incoming.body.len() / BYTES).max(1) as u64);
        let stale = self.gateway.directory().view().quorum().stale;
        Known {
            session: self.session,
            named_by: self.request.session_key.as_ref().map(|key| key.source),
            fallback: Some(REASON),
            rung: None,
            distrusted: false,
            owner: None,
            epoch: Epoch::default(),
            prompt: counted.unwrap_or(estimate),
            estimated: counted.is_none(),
            sealed: Tokens::ZERO,
            deepest_overlap: Tokens::ZERO,
            grounds: Grounds {
                known: Default::default(),
                preamble: Default::default(),
                view: if stale { Freshness::Stale } else { Freshness::Current },
                unapplied: false,
                promises: 0,
                routers: 0,
                unread: None,
            },
        }
    }

    fn seen(&self, ending: Ending, usage: Option<Usage>) -> Seen {
        let incoming = &self.request.incoming;
        let arrived = incoming.arrived;
        let is_streamed = matches!(self.reading, Reading::Events(_));
        Seen {
            ending,
            status: self.status.as_u16(),
            predicted: None,
            first_token: self.first_byte.filter(|_| is_streamed).map(|at| Micros::of(at - arrived)),
            total: Micros::of(arrived.elapsed()),
            predicted_cached: Tokens::ZERO,
            cached: usage.map(|usage| usage.cached.unwrap_or_default()),
            answered: usage.map(|usage| usage.completion),
            moved: Default::default(),
            repeated: incoming.reserved.as_ref().is_some_and(|reserved| reserved.is_repeated()),
            engine_disagrees: None,
            cache_disagrees: None,
        }
    }
}

impl Drop for Filing {
    fn drop(&mut self) {
        let receipt = self.receipt();
        self.gateway.decisions.file(receipt, None);
    }
}
