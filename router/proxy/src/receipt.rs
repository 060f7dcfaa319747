//! Receipts explain why a step was served as it was: what was known, every candidate with its price, the choice, and
//! the outcome.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use planner::{Action, Decision, Leg, LegRole, RequestTransferBlocker, StepStartReason};
use prometheus::HistogramVec;
use serde::{Deserialize, Serialize};
use strum::{AsRefStr, IntoStaticStr, VariantArray};
use vocabulary::{
    Blocks, Bytes, Epoch, KvIndexState, Micros, ModelId, Owner, RequestId, SessionId, TenantId, Tokens, WorkerId,
};

use crate::shared_cache::SharedCacheHealth;
use vocabulary::RoutingMode;

/// Wall clock, milliseconds since 1970. For display.
pub fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

/// For `#[serde(with = "rfc3339")]` on a time in milliseconds since 1970: `"2026-11-26T04:05:25.123Z"`.
pub(crate) mod rfc3339 {
    use std::time::{Duration, SystemTime, UNIX_EPOCH};

    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    /// The last millisecond of the year 9999, the latest time that RFC 3339 can write.
    const MAX_UNIX_MS: u64 = 253_402_300_799_999;

    /// Returns a time as text.
    pub(crate) fn text(unix_ms: u64) -> String {
        let at = UNIX_EPOCH + Duration::from_millis(unix_ms.min(MAX_UNIX_MS));
        humantime::format_rfc3339_millis(at).to_string()
    }

    /// Writes a time as text.
    pub(crate) fn serialize<S: Serializer>(unix_ms: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&text(*unix_ms))
    }

    /// Reads a time from text; a part of a millisecond is cut off.
    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        let text = String::deserialize(deserializer)?;
        let at: SystemTime = humantime::parse_rfc3339(&text).map_err(D::Error::custom)?;
        let since = at.duration_since(UNIX_EPOCH).map_err(D::Error::custom)?;
        Ok(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
    }
}

/// One served step, from decision to outcome.
#[derive(Clone, Serialize, Debug)]
pub struct Receipt {
    /// The request's id; the client sees it in `x-request-id`.
    pub request_id: RequestId,
    /// Wall clock at arrival in milliseconds since 1970, written as RFC 3339. For display.
    #[serde(with = "rfc3339")]
    pub arrived_at: u64,
    /// The tenant that sent it.
    pub tenant: TenantId,
    /// The requested model.
    pub model: ModelId,
    /// What was known before the decision.
    pub lookup: PromptLookupSummary,
    /// Routing mode for this step.
    pub mode: RoutingMode,
    /// Whether its session belongs to the guardrail's control group: planned, but served by the fallback policy in mode
    /// `active`, too.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub control_group: bool,
    /// State of Redis where it was not healthy; `None` when it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared_cache_state: Option<SharedCacheHealth>,
    /// The decision with all candidates; `None` in mode `bypass`, where nothing is priced.
    pub decision: Option<Decision>,
    /// How the step waited rather than evict others' KV; with zero time if the queue was full.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub admission_wait: Option<AdmissionWait>,
    /// Every attempt of this request, of which the last one served it; empty if the client left while it was queued.
    pub attempts: Vec<Attempt>,
    /// The outcome; `None` while the request runs.
    pub observed: Option<StepObservation>,
}

/// What was known of the prompt and its session.
#[derive(Clone, Serialize, Debug)]
pub struct PromptLookupSummary {
    /// The session.
    pub session_id: SessionId,
    /// Where the session's name came from; `None` when the prompt's chain decided.
    pub session_key_source: Option<SessionKeySource>,
    /// Why the prompt is identified by its bytes only; `None` when by token ids. `stored_response` where most of it is
    /// stored at the worker that served the previous response: then its tokens are the engine's count, where it reports
    /// one.
    pub token_ids_unavailable: Option<&'static str>,
    /// How a chat prompt was recognised: `session`, `leading`, `segment`, `checkpoint` or `miss`; `None` where it is
    /// identified by its bytes only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tier: Option<&'static str>,
    /// Whether prompts of its model are computed as a whole because a spot check found a difference.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub disabled_by_spot_check: bool,
    /// The session's effective owner.
    pub owner: Option<Owner>,
    /// Epoch of the ownership.
    pub epoch: Epoch,
    /// Prompt tokens, summed over a batch.
    pub prompt_tokens: Tokens,
    /// Whether that number and those below are estimates from the prompt's bytes, at four bytes per token.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub prompt_tokens_estimated: bool,
    /// Prompt tokens that are sealed.
    pub sealed_tokens: Tokens,
    /// Largest overlap that any worker has.
    pub max_overlap_tokens: Tokens,
    /// Further evidence that the lookup used.
    pub evidence: LookupEvidence,
}

/// Where a session's name came from, the most trusted source first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Debug)]
#[serde(rename_all = "snake_case")]
pub enum SessionKeySource {
    /// `x-session-id`.
    SessionHeader,
    /// `x-claude-code-session-id`, with the agent's id where one is given.
    ClaudeCode,
    /// `session-id` or `session_id` (Codex).
    Codex,
    /// `x-session-affinity` (OpenCode).
    Affinity,
    /// `x-dynamo-session-id`.
    Dynamo,
    /// `x-litellm-session-id`.
    LiteLlm,
    /// A body field: `prompt_cache_key`, `session_params.session_id`, `metadata.session_id`.
    Body,
}

/// Whether the ledger view is known to be fresh.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug)]
#[serde(rename_all = "snake_case")]
pub enum LedgerFreshness {
    /// There is a quorum.
    Current,
    /// This node knows of no quorum: ownership cannot change.
    Stale,
}

/// What a lookup is based on.
#[derive(Clone, Copy, Serialize, Debug)]
pub struct LookupEvidence {
    /// The deepest block of the chain that the ledger knows.
    #[serde(skip)]
    pub known: Blocks,
    /// Leading blocks that many conversations share, where that had to be computed.
    #[serde(skip)]
    pub preamble: Blocks,
    /// Freshness of the ledger view.
    pub ledger_view: LedgerFreshness,
    /// Whether the lookup includes a step of this session that this router served and the view does not show yet.
    pub pending_commit: bool,
    /// Number of intents by other routers for this session.
    pub peer_intents: usize,
    /// Number of other routers whose requests in flight were counted.
    pub peer_routers: usize,
    /// What in the request keeps engines from using their prefix caches, so that overlaps count as zero.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_not_readable: Option<RequestTransferBlocker>,
}

/// How long a step waited for admission and why the wait ended; zero time where the queue was full.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug)]
pub struct AdmissionWait {
    /// Time spent waiting.
    #[serde(with = "vocabulary::micros_with_unit")]
    pub duration: Micros,
    /// Compute time that other sessions would have lost to recomputation if the step had started at once.
    #[serde(with = "vocabulary::micros_with_unit")]
    pub displaced_compute: Micros,
    /// Why the wait ended.
    pub outcome: WaitOutcome,
}

impl AdmissionWait {
    pub(crate) fn record(&self, seconds: &HistogramVec) {
        seconds.with_label_values(&[self.outcome.as_ref()]).observe(self.duration.duration().as_secs_f64());
    }
}

/// Why a wait for admission ended.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Debug, AsRefStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum WaitOutcome {
    /// The step costs others no more than is tolerated, or admission no longer applies: the mode was changed, or the KV
    /// index of its worker is not exact.
    Admitted,
    /// The maximum wait had passed.
    MaxWaitReached,
    /// The queue was full, so the step started at once.
    QueueFull,
    /// The client left, or no worker can serve the step any more.
    Abandoned,
}

impl From<StepStartReason> for WaitOutcome {
    fn from(reason: StepStartReason) -> Self {
        match reason {
            StepStartReason::Tolerated => Self::Admitted,
            StepStartReason::Longest => Self::MaxWaitReached,
            StepStartReason::NoPlace => Self::QueueFull,
        }
    }
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
    /// How reliably the blocks of the legs' workers were known to this step, the least of them: `approximate` where
    /// they are guessed from what was routed there, where the prompt is identified by its bytes only or was converted
    /// as only vLLM is known to do it, and where the engine's prompt token counts disagree with ours.
    pub kv_index_state: KvIndexState,
    /// Workers that were ejected at that time because requests failed there, and so are no candidates.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ejected_workers: Vec<WorkerId>,
    /// How this attempt resumed an answer that had broken off at the attempt before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resume: Option<StreamResumption>,
    /// Why no other worker could resume its answer, which broke off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_resumable_reason: Option<Arc<str>>,
    /// Errors and deviations from the plan, in the order in which they happened. Empty for a plain success.
    pub events: Vec<AttemptEvent>,
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
    pub kept_tokens: Tokens,
    /// Time from the break to the first byte that followed.
    #[serde(with = "vocabulary::micros_with_unit")]
    pub duration: Micros,
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
    DecodeLost,
    /// The memory budget had no room for the body of a leg, which was not sent.
    MemoryBudgetExceeded,
    /// The answer broke off after its first byte.
    StreamInterrupted,
    /// The worker became unreachable, and the answer made no more progress after its first byte.
    StreamLost,
    /// The engine reported an error after the answer's first byte.
    EngineError,
    /// The prefill leg failed; the prompt was computed at the target.
    PrefillFailed,
    /// The prefill leg's worker refused for lack of capacity, or left; the prompt was computed at the target.
    PrefillBusy,
    /// The prefill leg answered without transfer parameters; the prompt was computed at the target.
    MissingKvTransferParams,
    /// The source or the target of the replication failed; the step was served without it.
    ReplicateFailed,
    /// Too many prompts waited to be encoded again for the replication; the step was served without it.
    EncodeQueueFull,
    /// The prefill leg could not fetch what the previous step's target had handed back, and computed it instead.
    ReversePullFailed,
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
                | Self::MissingKvTransferParams
                | Self::ReplicateFailed
                | Self::EncodeQueueFull
                | Self::MemoryBudgetExceeded
        )
    }
}

/// What became of parameters that were handed back.
#[derive(Clone, Copy, PartialEq, Eq, Debug, AsRefStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum ReversePullOutcome {
    /// The next step's prefill leg was answered with them.
    Pulled,
    /// It was not.
    Failed,
    /// The next step's prompt begins otherwise, or is not known by its tokens.
    PromptMismatch,
    /// Nobody could fetch with them: the step was served without a prefill leg, they came too late, or a worker is
    /// gone.
    Unusable,
}

/// How a step ended.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub enum RequestOutcome {
    /// The whole answer was delivered.
    Complete,
    /// The worker rejected the request as the client's error.
    Rejected,
    /// The worker failed in the middle of the answer; the client got an error event.
    Interrupted,
    /// The client left.
    ClientDisconnected,
    /// No worker could serve it.
    Failed,
}

/// Observed outcome of a step.
#[derive(Clone, Copy, Serialize, Debug)]
pub struct StepObservation {
    /// How the step ended.
    pub outcome: RequestOutcome,
    /// HTTP status of the answer.
    pub http_status: u16,
    /// Predicted time to first token: the price of the plan.
    #[serde(with = "vocabulary::optional_micros_with_unit")]
    pub predicted_ttft: Option<Micros>,
    /// Time from arrival to the first byte of the answer; `None` for an answer that came whole.
    #[serde(with = "vocabulary::optional_micros_with_unit")]
    pub ttft: Option<Micros>,
    /// Time from arrival to the last byte.
    #[serde(with = "vocabulary::micros_with_unit")]
    pub duration: Micros,
    /// Prompt tokens that the plan expected to be cached at the target.
    pub predicted_cached_tokens: Tokens,
    /// Prompt tokens that the engine reports as cached (usage); `None` when it does not report them.
    pub cached_tokens: Option<Tokens>,
    /// Answer tokens.
    pub output_tokens: Option<Tokens>,
    /// Bytes that were moved between workers for it, as planned.
    pub transferred_bytes: Bytes,
    /// Whether it had been sent before under its `Idempotency-Key` without completing, and so counts once.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub idempotent_retry: bool,
    /// Our and the engine's prompt token count, where they differ: the tokenizer or template here is not the engine's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_count_mismatch: Option<PromptTokenCounts>,
    /// The engine's cache hit and what its events had reported of the prompt when the answer was over, where the hit is
    /// smaller: its events are late, or its prompts differ from ours, which `/readyz` reports if it persists. Prompts
    /// that the worker computed meanwhile for others are reported by events, but do not count as a difference.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_hit_mismatch: Option<CacheHitCheck>,
}

/// Two counts of the tokens in one request's prompts.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug)]
pub struct PromptTokenCounts {
    /// The count computed here.
    pub router: Tokens,
    /// The count in the engine's usage.
    pub engine: Tokens,
}

impl PromptTokenCounts {
    pub(crate) fn agree(self) -> bool {
        self.router == self.engine
    }
}

/// Two reports by an engine about how many tokens of one prompt were in its cache.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug)]
pub struct CacheHitCheck {
    /// What its events had reported of the prompt as computed here: before the step, until its answer was over, or
    /// `EVENT_GRACE_PERIOD` after that.
    pub reported: Tokens,
    /// What its usage reports.
    pub cached_tokens: Tokens,
    /// Size of one engine block: a difference up to this may be due to rounding.
    pub block_size: Tokens,
}

impl CacheHitCheck {
    /// Returns `None` where the check could only agree, and so shows nothing: a prompt that is new to the engine
    /// neither raises nor clears a suspicion.
    pub fn conclusive(self) -> Option<Self> {
        (self.cached_tokens > self.block_size).then_some(self)
    }

    /// Whether the cache hit is what the engine reported, or less because of evictions. A larger hit belongs to another
    /// prompt.
    pub fn agree(self) -> bool {
        self.cached_tokens <= self.reported + self.block_size
    }
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
        // Freed after the lock is released.
        let mut dropped = Vec::new();
        let mut ring = self.ring.lock();
        ring.candidates += receipt.candidates();
        ring.receipts.push_back(receipt);
        while ring.receipts.len() > self.capacity || ring.candidates > self.capacity * MAX_CANDIDATES_PER_RECEIPT {
            let Some(oldest) = ring.receipts.pop_front() else { break };
            ring.candidates -= oldest.candidates();
            dropped.push(oldest);
        }
        drop(ring);
    }

    /// Returns at most `limit` receipts that `wanted` accepts, newest first.
    pub fn newest(&self, limit: usize, wanted: impl Fn(&Receipt) -> bool) -> Vec<Arc<Receipt>> {
        self.ring.lock().receipts.iter().rev().filter(|receipt| wanted(receipt)).take(limit).cloned().collect()
    }

    /// Returns the receipt of this request.
    pub fn find_request(&self, request: RequestId) -> Option<Arc<Receipt>> {
        self.ring.lock().receipts.iter().rev().find(|receipt| receipt.request_id == request).cloned()
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// A receipt of session 0 or 1 whose step was not planned.
    pub(crate) fn receipt(n: u128) -> Receipt {
        Receipt {
            request_id: RequestId(n),
            arrived_at: 0,
            tenant: TenantId::default(),
            model: "m".into(),
            lookup: PromptLookupSummary {
                session_id: SessionId(n % 2),
                session_key_source: None,
                token_ids_unavailable: None,
                tier: None,
                disabled_by_spot_check: false,
                owner: None,
                epoch: Epoch::default(),
                prompt_tokens: Tokens(1),
                prompt_tokens_estimated: false,
                sealed_tokens: Tokens(0),
                max_overlap_tokens: Tokens(0),
                evidence: LookupEvidence {
                    known: Default::default(),
                    preamble: Default::default(),
                    ledger_view: LedgerFreshness::Current,
                    pending_commit: false,
                    peer_intents: 0,
                    peer_routers: 0,
                    cache_not_readable: None,
                },
            },
            mode: RoutingMode::Bypass,
            control_group: false,
            shared_cache_state: None,
            decision: None,
            admission_wait: None,
            attempts: Vec::new(),
            observed: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use planner::{LegSequence, Plan, PlanRationale, WorkerRank};

    use super::testing::receipt;
    use super::*;

    #[test]
    fn the_oldest_receipt_is_evicted() {
        let receipts = ReceiptBuffer::new(3);
        (0..5).for_each(|n| receipts.push(receipt(n).into()));
        let newest = |limit| receipts.newest(limit, |_| true).iter().map(|r| r.request_id.0).collect::<Vec<_>>();
        assert_eq!(newest(10), [4, 3, 2]);
        assert_eq!(newest(1), [4]);
        assert_eq!(receipts.find_request(RequestId(1)).map(|r| r.request_id), None);
        assert_eq!(receipts.find_request(RequestId(3)).map(|r| r.request_id), Some(RequestId(3)));
    }

    #[test]
    fn a_receipt_with_many_candidates_evicts_several_short_ones() {
        let receipts = ReceiptBuffer::new(4);
        let long = |n| {
            let worker_rank = WorkerRank { worker: WorkerId(1), rank: Default::default() };
            let sequence = LegSequence::serve(Leg::new(LegRole::Serve, worker_rank));
            let candidate = planner::PlanCandidate {
                action: Action::ColocatedPrefill,
                sequence,
                ownership: planner::OwnershipEffect::Claim,
                cost_terms: Default::default(),
                total_cost: Micros(0),
                refusal: None,
            };
            let rationale = PlanRationale {
                policy: planner::SelectionRule::LowestCost,
                cost_terms: Default::default(),
                total_cost: Micros(0),
                runner_up: None,
            };
            let plan = Plan {
                action: Action::ColocatedPrefill,
                sequence,
                ownership: planner::OwnershipEffect::Claim,
                rationale,
            };
            let candidates = vec![candidate; 2 * MAX_CANDIDATES_PER_RECEIPT];
            Receipt {
                decision: Some(Decision { step_kind: planner::StepKind::SmallIncrement, plan, candidates }),
                ..receipt(n)
            }
        };
        (0..4).for_each(|n| receipts.push(receipt(n).into()));
        (4..7).for_each(|n| receipts.push(long(n).into()));
        let newest = receipts.newest(10, |_| true);
        assert_eq!(newest.iter().map(|r| r.request_id.0).collect::<Vec<_>>(), [6, 5], "two fill the place of four");
    }

    #[test]
    fn receipts_are_found_by_filter() {
        let receipts = ReceiptBuffer::new(8);
        (0..5).for_each(|n| receipts.push(receipt(n).into()));
        let odd = receipts.newest(8, |receipt| receipt.lookup.session_id == SessionId(1));
        assert_eq!(odd.iter().map(|r| r.request_id.0).collect::<Vec<_>>(), [3, 1]);
    }
}
