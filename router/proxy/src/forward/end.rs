//! The end of a forwarded request: one value, and the list of what takes it.

use std::sync::Arc;
use std::time::Instant;

use http::StatusCode;
use planner::{Action, LegRole};
use prometheus::IntCounter;
use vocabulary::{Epoch, KvIndexState, Micros, SessionId, Tokens, WorkerId};
use workers_shim::engine_api::TokenUsage;

use super::MaxPlausibleUsage;
use crate::decisions::DecisionHistory;
use crate::identified_request::ParsedRequest;
use crate::ledger_access::LedgerAccess;
use crate::quotas::{RequestCompletion, TokenReservation};
use crate::receipt::{
    Attempt, AttemptLeg, LedgerFreshness, LookupEvidence, PromptLookupSummary, Receipt, RequestOutcome,
    StepObservation, unix_ms,
};
use crate::routing::LiveRouting;
use crate::shared_cache::SharedCache;

/// Why nothing is known of the prompt except the received bytes.
const FALLBACK_REASON: &str = "stored_response";
/// Bytes per token, where the engine reports no count.
const BYTES_PER_TOKEN: usize = 4;

/// A forwarded request whose answer has ended.
#[must_use]
pub struct ForwardEnd {
    /// The step that follows a stored response; `None` where the request is no step.
    pub(crate) step: Option<ForwardedContinuation>,
    /// The worker that answered.
    pub(crate) worker: WorkerId,
    /// Status of the answer.
    pub(crate) status: StatusCode,
    /// When the first byte of a stream arrived.
    pub(crate) first_byte: Option<Instant>,
    /// How it ended.
    pub(crate) outcome: RequestOutcome,
    /// What the engine counted.
    pub(crate) usage: Option<TokenUsage>,
    /// Answer tokens delivered, counted by events.
    pub(crate) delivered: Tokens,
    /// Tokens reserved from the tenant's quota.
    pub(crate) reservation: Option<TokenReservation>,
    /// The usage that is believed.
    pub(super) bounds: MaxPlausibleUsage,
}

/// A step that follows a stored response: its history is stored at its worker, so no plan is made for it.
#[derive(Debug)]
pub struct ForwardedContinuation {
    /// The request.
    pub(crate) request: ParsedRequest,
    /// Its session.
    pub(crate) session: SessionId,
    /// The usage that its answer reports.
    pub(crate) usage: Option<TokenUsage>,
}

/// Everything that takes the end of a forwarded request.
#[derive(Debug)]
pub struct ForwardEndSinks {
    quota: ForwardQuotaSink,
    receipt: ForwardReceiptSink,
}

impl ForwardEndSinks {
    /// Connects the sinks; `implausible` counts usage that is not believed.
    pub fn new(
        ledger: LedgerAccess,
        routing: Arc<LiveRouting>,
        (decisions, shared_cache): (Arc<DecisionHistory>, Arc<SharedCache>),
        implausible: IntCounter,
    ) -> Self {
        let receipt = ForwardReceiptSink { ledger, routing, decisions, shared_cache };
        Self { quota: ForwardQuotaSink { implausible }, receipt }
    }

    /// Takes the end of a forwarded request, once for each, however it ended.
    pub(crate) fn record(&self, end: ForwardEnd) {
        self.quota.take(&end);
        self.receipt.take(end);
    }
}

/// Settles the tenant's token reservation.
#[derive(Debug)]
struct ForwardQuotaSink {
    implausible: IntCounter,
}

impl ForwardQuotaSink {
    fn take(&self, end: &ForwardEnd) {
        let Some(reserved) = &end.reservation else { return };
        if !end.status.is_success() {
            // The request may be sent to another worker.
            return reserved.came_to_nothing();
        }
        let believed = end.usage.filter(|usage| end.bounds.covers(usage, end.delivered));
        self.implausible.inc_by(u64::from(end.usage != believed));
        let used = match believed {
            Some(usage) => usage.prompt + usage.completion.max(end.delivered),
            None => reserved.reserved_tokens() + end.delivered,
        };
        reserved.settle(used, RequestCompletion::Complete);
    }
}

/// Files the receipt of a step.
#[derive(Debug)]
struct ForwardReceiptSink {
    ledger: LedgerAccess,
    routing: Arc<LiveRouting>,
    decisions: Arc<DecisionHistory>,
    shared_cache: Arc<SharedCache>,
}

impl ForwardReceiptSink {
    fn take(&self, end: ForwardEnd) {
        if let Some(step) = &end.step {
            self.decisions.record(self.receipt(&end, step), None);
        }
    }

    fn receipt(&self, end: &ForwardEnd, step: &ForwardedContinuation) -> Receipt {
        let incoming = &step.request.incoming;
        let seen = observation(end, step);
        let attempt = Attempt {
            asked: Instant::now(),
            action: Action::ColocatedPrefill,
            legs: vec![AttemptLeg { role: LegRole::Serve, worker: end.worker }],
            kv_index_state: KvIndexState::Approximate,
            ejected_workers: Vec::new(),
            resume: None,
            not_resumable_reason: None,
            events: Vec::new(),
        };
        Receipt {
            request_id: incoming.id,
            arrived_at: unix_ms().saturating_sub(seen.duration.0 / 1000),
            tenant: incoming.tenant.clone(),
            model: step.request.model.clone(),
            lookup: self.prompt_summary(step),
            mode: self.routing.get().mode_of(step.session),
            control_group: false,
            shared_cache_state: self.shared_cache.degraded_health(),
            decision: None,
            admission_wait: None,
            attempts: vec![attempt],
            observed: Some(seen),
        }
    }

    fn prompt_summary(&self, step: &ForwardedContinuation) -> PromptLookupSummary {
        let counted = step.usage.map(|usage| usage.prompt).filter(|prompt| *prompt > Tokens::ZERO);
        let estimate = Tokens((step.request.incoming.body.len() / BYTES_PER_TOKEN).max(1) as u64);
        let stale = self.ledger.directory().view().quorum().stale;
        PromptLookupSummary {
            session_id: step.session,
            session_key_source: step.request.session_key.as_ref().map(|key| key.source),
            token_ids_unavailable: Some(FALLBACK_REASON),
            tier: None,
            disabled_by_spot_check: false,
            owner: None,
            epoch: Epoch::default(),
            prompt_tokens: counted.unwrap_or(estimate),
            prompt_tokens_estimated: counted.is_none(),
            sealed_tokens: Tokens::ZERO,
            max_overlap_tokens: Tokens::ZERO,
            evidence: LookupEvidence {
                known: Default::default(),
                preamble: Default::default(),
                ledger_view: if stale { LedgerFreshness::Stale } else { LedgerFreshness::Current },
                pending_commit: false,
                peer_intents: 0,
                peer_routers: 0,
                cache_not_readable: None,
            },
        }
    }
}

fn observation(end: &ForwardEnd, step: &ForwardedContinuation) -> StepObservation {
    let incoming = &step.request.incoming;
    let arrived = incoming.arrived;
    StepObservation {
        outcome: end.outcome,
        http_status: end.status.as_u16(),
        predicted_ttft: None,
        ttft: end.first_byte.map(|at| Micros::of(at - arrived)),
        duration: Micros::of(arrived.elapsed()),
        predicted_cached_tokens: Tokens::ZERO,
        cached_tokens: step.usage.map(|usage| usage.cached.unwrap_or_default()),
        output_tokens: step.usage.map(|usage| usage.completion),
        transferred_bytes: Default::default(),
        idempotent_retry: incoming.token_reservation.as_ref().is_some_and(|reserved| reserved.is_repeated()),
        token_count_mismatch: None,
        cache_hit_mismatch: None,
    }
}
