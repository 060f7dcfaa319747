//! Why a step was served as it was: what was known, every candidate and its price, the choice, then what happened.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use planner::{Action, Decision};
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

/// One served step, from decision to outcome.
#[derive(Clone, Serialize, Debug)]
pub struct Receipt {
    /// The request; the client sees it in `x-request-id`.
    pub request: RequestId,
    /// Wall clock at arrival, milliseconds since 1970. For display.
    pub at_unix_ms: u64,
    /// Who asked.
    pub tenant: TenantId,
    /// For which model.
    pub model: ModelId,
    /// What was known before the decision.
    pub known: PromptSummary,
    /// Who decided.
    pub mode: RoutingMode,
    /// Whether its session is of the guardrail's control group: planned, and served by the bypass in mode `own`, too.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub control: bool,
    /// How Redis stood where that was not as it should be; none when all was well.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub soft_state: Option<SharedCacheHealth>,
    /// The choice with all candidates; none in mode `sticky`, where nothing is priced.
    pub decision: Option<Decision>,
    /// That it waited rather than push out others' KV, or would have if there had been a place to wait in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waited: Option<AdmissionWait>,
    /// Every try of this request, the last one served it; none of one that left while it waited.
    pub attempts: Vec<Attempt>,
    /// What came of it; none while it runs.
    pub seen: Option<StepObservation>,
}

/// What was known of the prompt and its session.
#[derive(Clone, Serialize, Debug)]
pub struct PromptSummary {
    /// The session.
    pub session: SessionId,
    /// Where its name came from; none when the prompt's chain decided.
    pub named_by: Option<KeySource>,
    /// Why the prompt is known by its bytes only; none when by token ids. `stored_response` where most of it lies at the
    /// worker that stored the response before: then its tokens are the engine's count, where it gives one.
    pub fallback: Option<&'static str>,
    /// By what a chat prompt was recognised: `session`, `leading`, `segment`, `checkpoint` or `cold`; none where it is known by
    /// its bytes, which recognise nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rung: Option<&'static str>,
    /// Whether prompts of its model are computed as a whole because a look at one found a difference.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub distrusted: bool,
    /// The effective owner.
    pub owner: Option<Owner>,
    /// Since when.
    pub epoch: Epoch,
    /// Prompt tokens, of a batch all of them.
    pub prompt: Tokens,
    /// Whether that number and those below are estimates from the prompt's bytes, four of them a token.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub estimated: bool,
    /// Of these, sealed ones.
    pub sealed: Tokens,
    /// The most that any worker holds.
    pub deepest_overlap: Tokens,
    /// What else counted.
    pub grounds: LookupEvidence,
}

/// One try of a request.
#[derive(Clone, Serialize, Debug)]
pub struct Attempt {
    /// When it began.
    #[serde(skip)]
    pub asked: Instant,
    /// What was tried.
    pub action: Action,
    /// Who was to compute the prompt.
    pub prefill: WorkerId,
    /// Who was to answer.
    pub decode: WorkerId,
    /// How the blocks of these two are known to this step, of both the least: `fallback` where they are guessed from what
    /// was routed there, where the prompt is known by its bytes only or is one that only vLLM is known to make of such a
    /// request, and where the engine's counts of prompts disagree with ours.
    pub knowledge: KvIndexState,
    /// Who took no requests then because requests failed there, and so is no candidate.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ejected: Vec<WorkerId>,
    /// Where it went on with an answer that had broken off at the attempt before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resumed: Option<StreamResumption>,
    /// Why no other worker could go on with its answer, which broke off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unresumable: Option<Arc<str>>,
    /// What went wrong, or was not as planned, in the order it happened. Empty for a plain success.
    pub remarks: Vec<AttemptEvent>,
}

/// How a broken answer went on.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug)]
pub struct StreamResumption {
    /// Tokens of the answer that were kept; those after them were made again.
    pub after: Tokens,
    /// From the break to the first byte that followed.
    pub took: Micros,
}

/// Something that did not go as planned. Each is counted as well.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Debug, AsRefStr, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum AttemptEvent {
    /// No connection to the decode leg's worker.
    DecodeUnreachable,
    /// The decode leg's worker broke off before its first byte, or answered with a server error.
    DecodeFailed,
    /// The decode leg's worker refused for lack of room.
    DecodeBusy,
    /// The decode leg did not answer in time.
    DecodeTimeout,
    /// The decode leg's worker cannot be reached any more, and nothing came of its answer.
    DecodeSilent,
    /// The answer broke off after its first byte.
    BrokeOff,
    /// The worker cannot be reached any more, and nothing more came of its answer after the first byte.
    FellSilent,
    /// The engine told after the answer's first byte that it failed.
    EngineFailed,
    /// The prefill leg failed; the prompt was computed at the target.
    PrefillFailed,
    /// The prefill leg's worker refused for lack of room, or left; the prompt was computed at the target.
    PrefillBusy,
    /// The prefill leg answered without transfer parameters; the prompt was computed at the target.
    NoTransferParameters,
    /// The replicate's source or target failed; the step was served without it.
    ReplicateFailed,
    /// Too many prompts waited to be encoded again for the replicate; the step was served without it.
    NoRoomToEncode,
    /// The prefill leg could not fetch what the last step's target had handed back; it computed that.
    ReadbackFailed,
    /// The source had to compute again what it was believed to hold.
    SourceRecomputed,
}

impl AttemptEvent {
    /// Whether the plan's transfer did not take place.
    pub fn prevented_transfer(self) -> bool {
        matches!(
            self,
            Self::PrefillFailed
                | Self::PrefillBusy
                | Self::NoTransferParameters
                | Self::ReplicateFailed
                | Self::NoRoomToEncode
        )
    }
}

/// How a step ended.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub enum RequestOutcome {
    /// The whole answer was delivered.
    Complete,
    /// The worker answered with an error of the client's making.
    Refused,
    /// The worker died in the middle; the client got an error event.
    Broken,
    /// The client left.
    ClientLeft,
    /// Nobody could serve it.
    Failed,
}

/// What was observed.
#[derive(Clone, Copy, Serialize, Debug)]
pub struct StepObservation {
    /// How it ended.
    pub ending: RequestOutcome,
    /// HTTP status of the answer.
    pub status: u16,
    /// Predicted time to the first token: the plan's price.
    pub predicted: Option<Micros>,
    /// From arrival to the first byte of the answer; none for one that came whole.
    pub first_token: Option<Micros>,
    /// From arrival to the last byte.
    pub total: Micros,
    /// Prompt tokens that the plan expected to find at the target.
    pub predicted_cached: Tokens,
    /// Prompt tokens that the engine says it found (usage); none when it does not say.
    pub cached: Option<Tokens>,
    /// Tokens of the answer.
    pub answered: Option<Tokens>,
    /// Bytes that were moved between workers for it, as planned.
    pub moved: Bytes,
    /// Whether it was sent before under its `Idempotency-Key` without coming to its end, and so counts once.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub repeated: bool,
    /// Prompt tokens by both counts, where the engine's is another than ours: tokenizer or template here are not its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine_disagrees: Option<PromptTokenCount>,
    /// What the engine found of the prompt beside what its events had told of it when the answer was over, where that is less:
    /// they are late, or its prompts are other ones than ours, which is said by `/readyz` where it stays so. Prompts that
    /// were computed there meanwhile for others are told, and not meant.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_disagrees: Option<CacheHitCheck>,
}

/// The newest receipts, bounded in their number and in the candidates that they list: many workers make long ones.
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

/// Most candidates that are kept for each receipt of the capacity; about 5 KB.
const MAX_CANDIDATES_PER_RECEIPT: usize = 24;

impl Receipt {
    fn candidates(&self) -> usize {
        self.decision.as_ref().map_or(0, |decision| decision.candidates.len())
    }
}

impl ReceiptBuffer {
    /// Keeps the newest `capacity` of them.
    pub fn new(capacity: usize) -> Self {
        Self { ring: Mutex::default(), capacity: capacity.max(1) }
    }

    /// Files a finished one.
    pub fn push(&self, receipt: Arc<Receipt>) {
        let mut ring = self.ring.lock();
        ring.candidates += receipt.candidates();
        ring.receipts.push_back(receipt);
        while ring.receipts.len() > self.capacity || ring.candidates > self.capacity * MAX_CANDIDATES_PER_RECEIPT {
            let Some(oldest) = ring.receipts.pop_front() else { break };
            ring.candidates -= oldest.candidates();
        }
    }

    /// The newest `limit` that `wanted` accepts, newest first.
    pub fn newest(&self, limit: usize, wanted: impl Fn(&Receipt) -> bool) -> Vec<Arc<Receipt>> {
        self.ring.lock().receipts.iter().rev().filter(|receipt| wanted(receipt)).take(limit).cloned().collect()
    }

    /// The one of this request.
    pub fn find_request(&self, request: RequestId) -> Option<Arc<Receipt>> {
        self.ring.lock().receipts.iter().rev().find(|receipt| receipt.request == request).cloned()
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;
    use crate::pipeline::locate::LedgerFreshness;

    /// One of session 0 or 1, whose step was not planned.
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
            mode: RoutingMode::Sticky,
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
    use planner::{Leg, Plan, PlanRationale};

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
            let leg = Leg {
                worker: WorkerId(1),
                rank: Default::default(),
                tokens_cached: Tokens(0),
                tokens_computed: Tokens(0),
            };
            let candidate = planner::PlanCandidate {
                action: Action::ColocatedPrefill,
                prefill: leg,
                decode: leg,
                handoff: None,
                claim: planner::OwnershipClaim::Open,
                terms: Default::default(),
                total: Micros(0),
                refused: None,
            };
            let because = PlanRationale {
                rule: planner::SelectionRule::Own,
                terms: Default::default(),
                total: Micros(0),
                runner_up: None,
            };
            let plan = Plan {
                action: Action::ColocatedPrefill,
                prefill: leg,
                decode: leg,
                handoff: None,
                claim: planner::OwnershipClaim::Open,
                because,
            };
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
