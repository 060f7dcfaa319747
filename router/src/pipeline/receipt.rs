//! Receipts explain why a step was served as it was: what was known, every candidate with its price, the choice, and
//! the outcome.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use planner::{Action, Decision, Leg, LegRole};
use serde::{Deserialize, Serialize};
use strum::{AsRefStr, IntoStaticStr};
use vocabulary::{
    Bytes, Epoch, KvIndexState, Micros, ModelId, Owner, RequestId, SessionId, TenantId, Tokens, WorkerId,
};

use super::admission_queue::AdmissionWait;
use super::locate::LookupEvidence;
use super::routing::RoutingMode;
use super::session_key::KeySource;
use crate::prefix_cache::tokenizer_drift::{CacheHitCheck, PromptTokenCount};
use crate::shared_cache::SharedCacheHealth;

/// Wall clock, milliseconds since 1970. For display.
pub(crate) fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

/// One served step, from decision to outcome.
#[derive(Clone, Serialize, Debug)]
pub struct Receipt {
    /// The request's id; the client sees it in `x-request-id`.
    pub request: RequestId,
    /// Wall clock at arrival in milliseconds since 1970. For display.
    pub at_unix_ms: u64,
    /// The tenant that sent it.
    pub tenant: TenantId,
    /// The requested model.
    pub model: ModelId,
    /// What was known before the decision.
    pub known: PromptSummary,
    /// Routing mode for this step.
    pub mode: RoutingMode,
    /// Whether its session belongs to the guardrail's control group: planned, but served by the bypass policy in mode
    /// `active`, too.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub control: bool,
    /// State of Redis where it was not healthy; `None` when it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub soft_state: Option<SharedCacheHealth>,
    /// The decision with all candidates; `None` in mode `bypass`, where nothing is priced.
    pub decision: Option<Decision>,
    /// How the step waited rather than evict others' KV; with zero time if the queue was full.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waited: Option<AdmissionWait>,
    /// Every attempt of this request, of which the last one served it; empty if the client left while it was queued.
    pub attempts: Vec<Attempt>,
    /// The outcome; `None` while the request runs.
    pub seen: Option<StepObservation>,
}

/// What was known of the prompt and its session.
#[derive(Clone, Serialize, Debug)]
pub struct PromptSummary {
    /// The session.
    pub session: SessionId,
    /// Where the session's name came from; `None` when the prompt's chain decided.
    pub named_by: Option<KeySource>,
    /// Why the prompt is identified by its bytes only; `None` when by token ids. `stored_response` where most of it is
    /// stored at the worker that served the previous response: then its tokens are the engine's count, where it reports
    /// one.
    pub fallback: Option<&'static str>,
    /// How a chat prompt was recognised: `session`, `leading`, `segment`, `checkpoint` or `cold`; `None` where it is
    /// identified by its bytes only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rung: Option<&'static str>,
    /// Whether prompts of its model are computed as a whole because a spot check found a difference.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub distrusted: bool,
    /// The session's effective owner.
    pub owner: Option<Owner>,
    /// Epoch of the ownership.
    pub epoch: Epoch,
    /// Prompt tokens, summed over a batch.
    pub prompt: Tokens,
    /// Whether that number and those below are estimates from the prompt's bytes, at four bytes per token.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub estimated: bool,
    /// Prompt tokens that are sealed.
    pub sealed: Tokens,
    /// Largest overlap that any worker has.
    pub deepest_overlap: Tokens,
    /// Further evidence that the lookup used.
    pub grounds: LookupEvidence,
}

/// One leg of an attempt.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct AttemptLeg {
    /// What the leg was to do.
    pub role: LegRole,
    /// The worker that was to do it.
    pub worker: WorkerId,
}

impl From<&Leg> for AttemptLeg {
    fn from(leg: &Leg) -> Self {
        Self { role: leg.role, worker: leg.worker }
    }
}

/// One attempt of a request.
#[derive(Clone, Serialize, Debug)]
pub struct Attempt {
    /// When it began.
    #[serde(skip)]
    pub asked: Instant,
    /// The action that was attempted.
    pub action: Action,
    /// The legs of the plan, in order; the last one was to answer.
    pub legs: Vec<AttemptLeg>,
    /// How reliably the blocks of the legs' workers were known to this step, the least of them: `fallback` where they
    /// are guessed from what was routed there, where the prompt is identified by its bytes only or was converted as
    /// only vLLM is known to do it, and where the engine's prompt token counts disagree with ours.
    pub knowledge: KvIndexState,
    /// Workers that were ejected at that time because requests failed there, and so are no candidates.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ejected: Vec<WorkerId>,
    /// How this attempt resumed an answer that had broken off at the attempt before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resumed: Option<StreamResumption>,
    /// Why no other worker could resume its answer, which broke off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unresumable: Option<Arc<str>>,
    /// Errors and deviations from the plan, in the order in which they happened. Empty for a plain success.
    pub remarks: Vec<AttemptEvent>,
}

impl Attempt {
    /// Returns the worker that was to answer.
    pub fn target(&self) -> Option<WorkerId> {
        self.legs.last().map(|leg| leg.worker)
    }
}

/// How a broken answer resumed.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug)]
pub struct StreamResumption {
    /// Answer tokens that were kept; those after them were generated again.
    pub after: Tokens,
    /// Time from the break to the first byte that followed.
    pub took: Micros,
}

/// A deviation from the plan. Each is also counted in a metric.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Debug, AsRefStr, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum AttemptEvent {
    /// No connection to the decode leg's worker.
    DecodeUnreachable,
    /// The decode leg's worker broke off before its first byte, or answered with a server error.
    DecodeFailed,
    /// The decode leg's worker refused for lack of capacity.
    DecodeBusy,
    /// The decode leg did not answer in time.
    DecodeTimeout,
    /// The decode leg's worker became unreachable, and its answer made no progress.
    DecodeSilent,
    /// The memory budget had no room for the body of a leg, which was not sent.
    MemoryBudgetExceeded,
    /// The answer broke off after its first byte.
    BrokeOff,
    /// The worker became unreachable, and the answer made no more progress after its first byte.
    FellSilent,
    /// The engine reported an error after the answer's first byte.
    EngineFailed,
    /// The prefill leg failed; the prompt was computed at the target.
    PrefillFailed,
    /// The prefill leg's worker refused for lack of capacity, or left; the prompt was computed at the target.
    PrefillBusy,
    /// The prefill leg answered without transfer parameters; the prompt was computed at the target.
    NoTransferParameters,
    /// The source or the target of the replication failed; the step was served without it.
    ReplicateFailed,
    /// Too many prompts waited to be encoded again for the replication; the step was served without it.
    NoRoomToEncode,
    /// The prefill leg could not fetch what the previous step's target had handed back, and computed it instead.
    ReadbackFailed,
    /// The source had to recompute what it was believed to hold.
    SourceRecomputed,
}

impl AttemptEvent {
    /// Whether this event means that the plan's transfer did not take place.
    pub fn prevented_transfer(self) -> bool {
        matches!(
            self,
            Self::PrefillFailed
                | Self::PrefillBusy
                | Self::NoTransferParameters
                | Self::ReplicateFailed
                | Self::NoRoomToEncode
                | Self::MemoryBudgetExceeded
        )
    }
}

/// How a step ended.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub enum RequestOutcome {
    /// The whole answer was delivered.
    Complete,
    /// The worker rejected the request as the client's error.
    Refused,
    /// The worker failed in the middle of the answer; the client got an error event.
    Broken,
    /// The client left.
    ClientLeft,
    /// No worker could serve it.
    Failed,
}

/// Observed outcome of a step.
#[derive(Clone, Copy, Serialize, Debug)]
pub struct StepObservation {
    /// How the step ended.
    pub ending: RequestOutcome,
    /// HTTP status of the answer.
    pub status: u16,
    /// Predicted time to first token: the price of the plan.
    pub predicted: Option<Micros>,
    /// Time from arrival to the first byte of the answer; `None` for an answer that came whole.
    pub first_token: Option<Micros>,
    /// Time from arrival to the last byte.
    pub total: Micros,
    /// Prompt tokens that the plan expected to be cached at the target.
    pub predicted_cached: Tokens,
    /// Prompt tokens that the engine reports as cached (usage); `None` when it does not report them.
    pub cached: Option<Tokens>,
    /// Answer tokens.
    pub answered: Option<Tokens>,
    /// Bytes that were moved between workers for it, as planned.
    pub moved: Bytes,
    /// Whether it had been sent before under its `Idempotency-Key` without completing, and so counts once.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub repeated: bool,
    /// Our and the engine's prompt token count, where they differ: the tokenizer or template here is not the engine's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine_disagrees: Option<PromptTokenCount>,
    /// The engine's cache hit and what its events had reported of the prompt when the answer was over, where the hit is
    /// smaller: its events are late, or its prompts differ from ours, which `/readyz` reports if it persists. Prompts
    /// that the worker computed meanwhile for others are reported by events, but do not count as a difference.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_disagrees: Option<CacheHitCheck>,
}

/// The newest receipts, bounded in number and in the candidates that they list: with many workers a receipt is large.
#[derive(Debug)]
pub struct ReceiptBuffer {
    ring: Mutex<ReceiptRing>,
    capacity: usize,
}

#[derive(Debug, Default)]
struct ReceiptRing {
    receipts: VecDeque<Arc<Receipt>>,
    candidates: usize,
}

/// Average number of candidates kept per receipt of the capacity; about 5 KB.
const MAX_CANDIDATES_PER_RECEIPT: usize = 24;

impl Receipt {
    fn candidates(&self) -> usize {
        self.decision.as_ref().map_or(0, |decision| decision.candidates.len())
    }
}

impl ReceiptBuffer {
    /// Returns a buffer for the newest `capacity` receipts.
    pub fn new(capacity: usize) -> Self {
        Self { ring: Mutex::default(), capacity: capacity.max(1) }
    }

    /// Adds a finished receipt and drops the oldest ones beyond the limits.
    pub fn push(&self, receipt: Arc<Receipt>) {
        let mut ring = self.ring.lock();
        ring.candidates += receipt.candidates();
        ring.receipts.push_back(receipt);
        while ring.receipts.len() > self.capacity || ring.candidates > self.capacity * MAX_CANDIDATES_PER_RECEIPT {
            let Some(oldest) = ring.receipts.pop_front() else { break };
            ring.candidates -= oldest.candidates();
        }
    }

    /// Returns at most `limit` receipts that `wanted` accepts, newest first.
    pub fn newest(&self, limit: usize, wanted: impl Fn(&Receipt) -> bool) -> Vec<Arc<Receipt>> {
        self.ring.lock().receipts.iter().rev().filter(|receipt| wanted(receipt)).take(limit).cloned().collect()
    }

    /// Returns the receipt of this request.
    pub fn find_request(&self, request: RequestId) -> Option<Arc<Receipt>> {
        self.ring.lock().receipts.iter().rev().find(|receipt| receipt.request == request).cloned()
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;
    use crate::pipeline::locate::LedgerFreshness;

    /// A receipt of session 0 or 1 whose step was not planned.
    pub(crate) fn receipt(n: u128) -> Receipt {
        Receipt {
            request: RequestId(n),
            at_unix_ms: 0,
            tenant: TenantId::default(),
            model: "m".into(),
            known: PromptSummary {
                session: SessionId(n % 2),
                named_by: None,
                fallback: None,
                rung: None,
                distrusted: false,
                owner: None,
                epoch: Epoch::default(),
                prompt: Tokens(1),
                estimated: false,
                sealed: Tokens(0),
                deepest_overlap: Tokens(0),
                grounds: LookupEvidence {
                    known: Default::default(),
                    preamble: Default::default(),
                    view: LedgerFreshness::Current,
                    unapplied: false,
                    promises: 0,
                    routers: 0,
                    unread: None,
                },
            },
            mode: RoutingMode::Bypass,
            control: false,
            soft_state: None,
            decision: None,
            waited: None,
            attempts: Vec::new(),
            seen: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use planner::{Plan, PlanRationale, PlanSequence, WorkerRank};

    use super::testing::receipt;
    use super::*;

    #[test]
    fn the_oldest_receipt_is_evicted() {
        let receipts = ReceiptBuffer::new(3);
        (0..5).for_each(|n| receipts.push(receipt(n).into()));
        let newest = |limit| receipts.newest(limit, |_| true).iter().map(|r| r.request.0).collect::<Vec<_>>();
        assert_eq!(newest(10), [4, 3, 2]);
        assert_eq!(newest(1), [4]);
        assert_eq!(receipts.find_request(RequestId(1)).map(|r| r.request), None);
        assert_eq!(receipts.find_request(RequestId(3)).map(|r| r.request), Some(RequestId(3)));
    }

    #[test]
    fn a_receipt_with_many_candidates_evicts_several_short_ones() {
        let receipts = ReceiptBuffer::new(4);
        let long = |n| {
            let place = WorkerRank { worker: WorkerId(1), rank: Default::default() };
            let sequence = PlanSequence::serve(Leg::new(LegRole::Serve, place));
            let candidate = planner::PlanCandidate {
                action: Action::ColocatedPrefill,
                sequence,
                claim: planner::OwnershipEffect::Open,
                terms: Default::default(),
                total: Micros(0),
                refused: None,
            };
            let because = PlanRationale {
                rule: planner::SelectionRule::LowestCost,
                terms: Default::default(),
                total: Micros(0),
                runner_up: None,
            };
            let plan =
                Plan { action: Action::ColocatedPrefill, sequence, claim: planner::OwnershipEffect::Open, because };
            let candidates = vec![candidate; 2 * MAX_CANDIDATES_PER_RECEIPT];
            Receipt {
                decision: Some(Decision { step: planner::StepKind::SmallIncrement, plan, candidates }),
                ..receipt(n)
            }
        };
        (0..4).for_each(|n| receipts.push(receipt(n).into()));
        (4..7).for_each(|n| receipts.push(long(n).into()));
        let newest = receipts.newest(10, |_| true);
        assert_eq!(newest.iter().map(|r| r.request.0).collect::<Vec<_>>(), [6, 5], "two fill the place of four");
    }

    #[test]
    fn receipts_are_found_by_filter() {
        let receipts = ReceiptBuffer::new(8);
        (0..5).for_each(|n| receipts.push(receipt(n).into()));
        let odd = receipts.newest(8, |receipt| receipt.known.session == SessionId(1));
        assert_eq!(odd.iter().map(|r| r.request.0).collect::<Vec<_>>(), [3, 1]);
    }
}
