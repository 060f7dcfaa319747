//! Compares what was assumed of the workers with what the step has shown: whether they fail, tokenize as this router
//! does, report the blocks that they hold, and answer after the predicted time.

use std::sync::Arc;
use std::time::Instant;

use planner::PlanCandidate;
use tokio::sync::OwnedSemaphorePermit;
use vocabulary::{KvIndexState, Micros, Overlap, Tokens, WorkerId, WorkerView};
use workers_shim::engine_api::TokenUsage;
use workers_shim::events::SharedIndex;
use workers_shim::fleet::Fleet;

use super::RequestEnd;
use crate::calibration::PredictionDriftDetector;
use crate::pipeline::blame::{AnswerOutcome, OutlierReporter};
use crate::prefix_cache::tokenizer_drift::{EVENT_GRACE_PERIOD, TokenizerDrift};
use crate::receipt::{CacheHitCheck, PromptTokenCounts, RequestOutcome, StepObservation};
use crate::telemetry::decision_metrics::DecisionMetrics;

/// How often the index is looked at during [`EVENT_GRACE_PERIOD`].
const GRACE_PERIOD_LOOKS: u32 = 12;

/// Judges workers by the step, and returns what was seen of it.
#[derive(Debug)]
pub(in crate::pipeline) struct ObservationSink {
    pub(in crate::pipeline) reporter: OutlierReporter,
    pub(in crate::pipeline) drift: Arc<TokenizerDrift>,
    pub(in crate::pipeline) fleet: Arc<Fleet>,
    pub(in crate::pipeline) index: SharedIndex,
    pub(in crate::pipeline) calibration: Arc<PredictionDriftDetector>,
    pub(in crate::pipeline) metrics: DecisionMetrics,
}

impl ObservationSink {
    /// Takes the workers that failed out of the end.
    pub(in crate::pipeline) fn record(&self, end: &mut RequestEnd) -> StepObservation {
        let failures = std::mem::take(&mut end.failures);
        match end.outcome {
            RequestOutcome::Complete => {
                if let Some(attempt) = end.attempts.last() {
                    self.reporter.record_success(&end.step, &end.planned.plan, attempt);
                }
                self.reporter.settle_failures(&end.step, failures, AnswerOutcome::Answered);
            }
            // Unknown how the request would have ended.
            RequestOutcome::ClientDisconnected => drop(failures),
            RequestOutcome::Rejected | RequestOutcome::Failed | RequestOutcome::Interrupted => {
                self.reporter.settle_failures(&end.step, failures, AnswerOutcome::Unanswered);
            }
        }
        let observation = self.observation(end);
        self.record_prediction(end, &observation);
        observation
    }

    fn observation(&self, end: &RequestEnd) -> StepObservation {
        let plan = &end.planned.plan;
        let incoming = &end.step.located.identified.request.incoming;
        let (arrived, usage) = (incoming.arrived, end.answer.usage);
        StepObservation {
            outcome: end.outcome,
            http_status: end.answer.status,
            // The last plan's price does not predict the first plan's time to first token.
            predicted_ttft: end
                .planned
                .decision
                .as_ref()
                .filter(|_| !end.is_resumed())
                .map(|_| plan.rationale.total_cost),
            ttft: end.answer.first_byte.map(|at| Micros::of(at - arrived)),
            duration: Micros::of(end.ended_at.saturating_duration_since(arrived)),
            predicted_cached_tokens: plan.answer_leg().cached_tokens,
            cached_tokens: usage.map(|usage| usage.cached.unwrap_or_default()),
            output_tokens: usage.map(|usage| usage.completion),
            transferred_bytes: end.planned_transfer_bytes(),
            idempotent_retry: incoming.token_reservation.as_ref().is_some_and(|reserved| reserved.is_repeated()),
            token_count_mismatch: self.token_count_mismatch(end),
            cache_hit_mismatch: self.cache_hit_mismatch(end),
        }
    }

    /// Compares the time to first token of a step that one worker served alone with its predicted price.
    fn record_prediction(&self, end: &RequestEnd, observation: &StepObservation) {
        let Some(decision) = end.planned.decision.as_ref().filter(|_| end.outcome == RequestOutcome::Complete) else {
            return;
        };
        let plan = &end.planned.plan;
        // In shadow mode the executed plan is not the planner's; its price is among the candidates.
        let is_served = |candidate: &&PlanCandidate| {
            !candidate.sequence.has_handoff() && candidate.sequence.workers().eq(plan.workers())
        };
        let candidate = decision.candidates.iter().find(is_served);
        let (Some(candidate), Some(ttft)) = (candidate, observation.ttft) else { return };
        // Time in the admission queue is due to other sessions, not to this worker.
        let ttft = ttft - end.admission_time();
        let is_alone = !plan.sequence.has_handoff() && end.attempts.len() == 1;
        let worker = end.step.located.workers.iter().find(|view| view.id == plan.target());
        let Some(worker) = worker.filter(|_| is_alone) else { return };
        let predicted = candidate.cost_terms.time_to_first_token();
        let metrics = &self.metrics;
        let ratio = ttft.0 as f64 / predicted.0.max(1) as f64;
        metrics.ttft_prediction_ratio.with_label_values(&[plan.action.as_str()]).observe(ratio);
        let incarnation = (worker.id, worker.incarnation);
        let Some(prediction) = self.calibration.add(incarnation, predicted, ttft) else { return };
        let (worker, ratio) = (&worker.endpoint, format!("{:.2}", prediction.ratio));
        match prediction.drift {
            Some(drift) => tracing::warn!(%worker, drift = drift.as_ref(), %ratio,
                "the worker's TTFT deviates from its predicted cost (drift, ratio): check for other users of its GPU and for reduced clocks"),
            None => tracing::info!(%worker, %ratio, "the worker's TTFT matches its predicted cost again"),
        }
    }

    /// Compares the engine's prompt token count with ours. Returns both where they disagree.
    fn token_count_mismatch(&self, end: &RequestEnd) -> Option<PromptTokenCounts> {
        let usage = end.complete_usage()?;
        let identified = &end.step.located.identified;
        let computed = identified.comparable_tokens().filter(|_| !end.is_converted_by_guess(&self.fleet));
        let counted = Some(usage.prompt).filter(|counted| *counted > Tokens::ZERO);
        let counts = computed.zip(counted).map(|(router, engine)| PromptTokenCounts { router, engine });
        let model_at_worker = (&identified.request.model, end.target());
        self.drift.record_token_count(model_at_worker, counts, Instant::now())
    }

    /// Compares the engine's cache hit with what its events reported. Returns both where they disagree by now.
    fn cache_hit_mismatch(&self, end: &RequestEnd) -> Option<CacheHitCheck> {
        let usage = end.complete_usage()?;
        let model_at_worker = (&end.step.located.identified.request.model, end.target());
        let check = self.cache_hit_check(end, usage);
        let mismatch = check.filter(|check| !check.agree());
        match (mismatch, self.drift.reserve_deferred_check()) {
            (Some(mismatch), Some(permit)) => self.recheck_later(end, mismatch, permit),
            (Some(_), None) => _ = self.drift.record_cache_hit(model_at_worker, None, Instant::now()),
            (None, _) => _ = self.drift.record_cache_hit(model_at_worker, check, Instant::now()),
        }
        mismatch
    }

    /// Waits for late events before the difference counts as a sign of another prompt. Looks several times meanwhile,
    /// because a small cache evicts blocks soon after they were reported.
    fn recheck_later(&self, end: &RequestEnd, mismatch: CacheHitCheck, permit: OwnedSemaphorePermit) {
        let identified = &end.step.located.identified;
        let (drift, index, worker) = (self.drift.clone(), self.index.clone(), end.target());
        let (model, chain) = (identified.request.model.clone(), identified.prompt.chain.clone());
        tokio::spawn(async move {
            let mut check = mismatch;
            for _ in 0..GRACE_PERIOD_LOOKS {
                if check.agree() {
                    break;
                }
                tokio::time::sleep(EVENT_GRACE_PERIOD / GRACE_PERIOD_LOOKS).await;
                let reported = reported_overlap(worker, chain.block, &index.read().overlaps_of_chain(&chain));
                check.reported = check.reported.max(reported);
            }
            drift.record_cache_hit((&model, worker), Some(check), Instant::now());
            drop(permit);
        });
    }

    /// Returns the cache hit and the reported overlap. `None` where the prompt is uncertain or one of a batch, where
    /// its blocks may have come from another worker, where not all of the worker's blocks are known, and where the
    /// engine does not report its cache hit.
    fn cache_hit_check(&self, end: &RequestEnd, usage: TokenUsage) -> Option<CacheHitCheck> {
        let located = &end.step.located;
        let identified = &located.identified;
        let is_plain =
            end.attempts.len() == 1 && !end.planned.plan.sequence.has_handoff() && identified.other_chains.is_empty();
        identified.comparable_tokens().filter(|_| is_plain && !end.is_converted_by_guess(&self.fleet))?;
        let fleet = self.fleet.snapshot();
        let is_exact_target =
            |worker: &&WorkerView| worker.id == end.target() && worker.kv_index_state == KvIndexState::Exact;
        let capacity = fleet.iter().find(is_exact_target)?.capacity;
        let chain = &identified.prompt.chain;
        let reported = |overlaps: &[Overlap]| reported_overlap(end.target(), chain.block, overlaps);
        let before = CacheHitCheck {
            reported: reported(&located.overlaps),
            cached_tokens: usage.cached?,
            block_size: capacity.block.max(chain.block),
        };
        // Blocks that other requests had computed there meanwhile have been reported by now.
        let reported_now = || reported(&self.index.read().overlaps_of_chain(chain));
        let check = match before.agree() {
            true => before,
            false => CacheHitCheck { reported: before.reported.max(reported_now()), ..before },
        };
        check.conclusive()
    }
}

/// Returns how much of a prompt the worker has reported to hold.
fn reported_overlap(worker: WorkerId, block: Tokens, overlaps: &[Overlap]) -> Tokens {
    let at_worker = overlaps.iter().filter(|overlap| overlap.worker == worker);
    at_worker.map(|overlap| overlap.blocks).max().unwrap_or_default().tokens(block)
}
