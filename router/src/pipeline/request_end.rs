//! The end of a request: commit, receipt, quota and metrics. It runs once per request, however it ends.

use std::sync::Arc;
use std::time::Instant;

use planner::{Action, Handoff, PlanCandidate, PlanningCase, TransferPermission};
use tokio::sync::OwnedSemaphorePermit;
use vocabulary::{Blocks, Bytes, KvIndexState, Micros, Overlap, Tokens, WorkerId, WorkerView};
use workers_shim::engine_api::TokenUsage;
use workers_shim::events::{ChainBasis, ServedPrompts};
use workers_shim::fleet::InFlightRequest;

use super::admission_queue::AdmissionWait;
use super::blame::{AnswerStatus, FailedWorkers, OutlierReporter};
use super::commit::{commit, withdraw};
use super::guardrail_enforcement::enforce_guardrail;
use super::knowledge::is_converted_by_guess;
use super::plan::{ClassifiedStep, PlannedStep, step_facts};
use super::prompts::StoredPrompt;
use super::receipt::{Attempt, PromptSummary, Receipt, RequestOutcome, StepObservation, unix_ms};
use super::routing::RoutingMode;
use crate::app_state::AppState;
use crate::guardrail::{Arm, StepSample};
use crate::prefix_cache::tokenizer_drift::{CacheHitCheck, EVENT_GRACE_PERIOD, PromptTokenCount};
use crate::quotas::RequestCompletion;
use crate::transfer_checker::CompletedTransfer;

/// A request on its way to its end.
pub struct RequestEnd {
    /// The shared application state.
    pub gateway: Arc<AppState>,
    /// The classified step.
    pub step: ClassifiedStep,
    /// The action that the planner chose first, where it was asked.
    pub first_action: Option<Action>,
    /// The plan that serves the step.
    pub planned: PlannedStep,
    /// All attempts, the newest last.
    pub attempts: Vec<Attempt>,
    /// How the step waited for admission, where it did.
    pub admission_wait: Option<AdmissionWait>,
    /// The request as counted in the target's load; `None` when no worker serves it.
    pub in_flight: Option<InFlightRequest>,
    /// When the first byte of the answer arrived.
    pub first_byte: Option<Instant>,
    /// Status of the answer.
    pub status: u16,
    /// Answer tokens received so far, counted by events where the engine does not report them.
    pub delivered: Tokens,
    /// Workers that have failed inside the answer so far.
    pub(super) failures: FailedWorkers,
}

/// Factor over the expected count up to which an engine's count is believed.
const MAX_PLAUSIBLE_RATIO: u64 = 16;
/// Count that is always believed: images that a prompt only names, templates, the answer to a request without a limit.
const ALWAYS_PLAUSIBLE_TOKENS: Tokens = Tokens(65_536);

/// Returns the largest count that an engine is believed to report where `expected` tokens were expected.
pub(crate) fn most_believed(expected: Tokens) -> Tokens {
    Tokens(expected.0.saturating_mul(MAX_PLAUSIBLE_RATIO)).max(ALWAYS_PLAUSIBLE_TOKENS)
}

/// The same limit for an answer whose request sets none.
pub(crate) const UNBOUNDED_ANSWER: Tokens = Tokens(MAX_PLAUSIBLE_RATIO * ALWAYS_PLAUSIBLE_TOKENS.0);

impl RequestEnd {
    /// Returns the worker that answers.
    pub fn target(&self) -> WorkerId {
        self.planned.plan.target()
    }

    /// Ends the request. `usage` is what the engine counted.
    pub fn end(mut self, ending: RequestOutcome, usage: Option<TokenUsage>) {
        let usage = usage.filter(|usage| self.is_plausible(usage));
        let counted = usage.map(|usage| self.locally_computed(usage));
        // An answer given by two workers says nothing about the speed of one.
        let is_whole = self.attempts.last().is_some() && !self.is_resumed();
        if let (Some(in_flight), Some(counted), true) = (&mut self.in_flight, counted, is_whole) {
            in_flight.complete(&counted);
        }
        let located = &self.step.located;
        match (self.step.mode, ending) {
            // In this mode the ledger is not asked, and so not told either.
            (RoutingMode::Sticky, _) => {}
            // The step was not announced.
            _ if self.attempts.is_empty() => {}
            (_, RequestOutcome::Complete) => {
                let since = Instant::now();
                commit(&self.gateway.ledger, located, &self.planned.plan);
                let seconds = self.gateway.metrics.plans.step.with_label_values(&["commit"]);
                seconds.observe(since.elapsed().as_secs_f64());
            }
            _ => withdraw(&self.gateway.ledger, located),
        }
        if let Some(tenure) = self.planned.reservation.take() {
            match ending {
                RequestOutcome::Complete => tenure.mark_served(usage),
                RequestOutcome::Refused => tenure.mark_refused(),
                RequestOutcome::Failed | RequestOutcome::Broken => tenure.mark_failed(),
                // What was computed until then stays resident.
                RequestOutcome::ClientLeft => drop(tenure),
            }
        }
        if ending == RequestOutcome::Complete {
            let leg = &self.planned.plan.decode;
            let by = located.identified.fallback_reason().map_or(ChainBasis::Tokens, |_| ChainBasis::Bytes);
            let prompts: Vec<_> = located.identified.chains().collect();
            self.gateway.fleet().note_routed(leg.worker, leg.rank, ServedPrompts { prompts: &prompts, basis: by });
            if let Some(attempt) = self.attempts.last() {
                OutlierReporter::of(&self.gateway).record_success(&self.step, &self.planned.plan, attempt);
            }
        }
        let failures = std::mem::take(&mut self.failures);
        match ending {
            RequestOutcome::Complete => {
                OutlierReporter::of(&self.gateway).settle_failures(&self.step, failures, AnswerStatus::Answered)
            }
            // Unknown how the request would have ended.
            RequestOutcome::ClientLeft => drop(failures),
            _ => OutlierReporter::of(&self.gateway).settle_failures(&self.step, failures, AnswerStatus::Unanswered),
        }
        if let Some(at) = self.first_byte {
            self.gateway.metrics.plans.step.with_label_values(&["stream"]).observe(at.elapsed().as_secs_f64());
        }
        self.settle(ending, usage);
        let seen = self.observation(ending, usage);
        self.record_metrics(&seen);
        self.record_prediction(&seen);
        self.record_comparison(&seen);
        let gateway = self.gateway.clone();
        if ending == RequestOutcome::Complete && self.step.ask.transfers == TransferPermission::Allowed {
            let session = self.step.located.session.id;
            if let Some(kept) = StoredPrompt::of(&mut self.step).map(Arc::new) {
                if let Some(transfer) = CompletedTransfer::of(&self.planned.plan).filter(|_| seen.moved > Bytes::ZERO) {
                    gateway.prefix_mover.checker().check_if_due(transfer, &kept);
                }
                gateway.policies.prefix_replication.record_step_end(
                    &gateway,
                    (&self.step, &kept),
                    (self.target(), usage),
                );
                gateway.caches.prompts.insert(session, kept);
            }
        }
        let (receipt, case) = self.receipt(seen);
        gateway.decisions.record(receipt, case);
    }

    fn settle(&self, ending: RequestOutcome, usage: Option<TokenUsage>) {
        let Some(reserved) = &self.step.located.identified.request.incoming.token_reservation else { return };
        // The client may have been disconnected by something in between, or by our own shutdown.
        let came = if ending == RequestOutcome::Complete {
            RequestCompletion::Complete
        } else {
            RequestCompletion::Interrupted
        };
        reserved.settle(self.charged_tokens(ending, usage), came);
    }

    /// Tokens charged to the tenant's quota: what the engine counted, and for an answer whose end was not reported at
    /// least the prompt and what was delivered.
    fn charged_tokens(&self, ending: RequestOutcome, usage: Option<TokenUsage>) -> Tokens {
        match (ending, usage) {
            (RequestOutcome::Complete | RequestOutcome::Refused | RequestOutcome::Failed, Some(usage)) => {
                usage.prompt + usage.completion
            }
            (RequestOutcome::Refused | RequestOutcome::Failed, None) => Tokens::ZERO,
            (_, usage) => {
                let TokenUsage { prompt, completion, .. } = usage.unwrap_or_default();
                prompt.max(self.step.ask.prompt) + completion.max(self.delivered)
            }
        }
    }

    /// Whether an engine can have counted this. An impossible usage is counted in a metric, and treated as if the
    /// engine reported none.
    fn is_plausible(&self, usage: &TokenUsage) -> bool {
        let asked = self.step.located.identified.request.max_answer.unwrap_or_default();
        let is_possible = usage.prompt <= most_believed(self.step.ask.prompt)
            && usage.completion <= most_believed(asked.max(self.delivered)).max(UNBOUNDED_ANSWER);
        if !is_possible {
            self.gateway.metrics.requests.implausible_usage.inc();
            let (prompt, completion) = (usage.prompt.0, usage.completion.0);
            tracing::warn!(worker = %self.target(), prompt, completion, "a worker counts more tokens than a request can have");
        }
        is_possible
    }

    /// Adjusts the usage from which the target's speed is learned: what was pulled from another worker was not computed
    /// here, whatever the engine then reports as cached.
    fn locally_computed(&self, usage: TokenUsage) -> TokenUsage {
        match self.planned.plan.handoff {
            Some(Handoff::RemotePrefill { .. }) => {
                TokenUsage { cached: Some(usage.prompt - self.planned.plan.decode.tokens_computed), ..usage }
            }
            _ => usage,
        }
    }

    /// Whether more than one worker gave the answer.
    fn is_resumed(&self) -> bool {
        self.attempts.iter().any(|attempt| attempt.resumed.is_some())
    }

    fn observation(&self, ending: RequestOutcome, usage: Option<TokenUsage>) -> StepObservation {
        let plan = &self.planned.plan;
        let incoming = &self.step.located.identified.request.incoming;
        let arrived = incoming.arrived;
        StepObservation {
            ending,
            status: self.status,
            // The last plan's price does not predict the first plan's time to first token.
            predicted: self.planned.decision.as_ref().filter(|_| !self.is_resumed()).map(|_| plan.because.total),
            first_token: self.first_byte.map(|at| Micros::of(at - arrived)),
            total: Micros::of(arrived.elapsed()),
            predicted_cached: plan.decode.tokens_cached,
            cached: usage.map(|usage| usage.cached.unwrap_or_default()),
            answered: usage.map(|usage| usage.completion),
            moved: self.planned_transfer_bytes(),
            repeated: incoming.token_reservation.as_ref().is_some_and(|reserved| reserved.is_repeated()),
            engine_disagrees: self.token_count_mismatch(ending, usage),
            cache_disagrees: self.cache_hit_mismatch(ending, usage),
        }
    }

    /// Builds the receipt, and the planning case where the planner was asked.
    fn receipt(self, seen: StepObservation) -> (Receipt, Option<PlanningCase>) {
        let (located, PlannedStep { decision, shortened_ask: shortened, excluded, rank_memory: memory, .. }) =
            (self.step.located, self.planned);
        let facts = step_facts(&located);
        let chain = &located.identified.prompt.chain;
        let tokens = |blocks: Blocks| blocks.tokens(chain.block);
        let known = PromptSummary {
            session: located.session.id,
            named_by: located.identified.request.session_key.as_ref().map(|key| key.source),
            fallback: located.identified.fallback_reason().map(Into::into),
            rung: located.identified.tier.map(Into::into),
            distrusted: located.identified.model.is_disabled_by_spot_check(),
            owner: located.session.owner,
            epoch: located.session.epoch,
            prompt: located.identified.total_tokens(),
            estimated: located.identified.fallback_reason().is_some(),
            sealed: tokens(located.session.sealed),
            deepest_overlap: tokens(located.deepest_overlap()),
            grounds: located.evidence,
        };
        let incoming = &located.identified.request.incoming;
        let gateway = &self.gateway;
        let receipt = Receipt {
            request: incoming.id,
            at_unix_ms: unix_ms().saturating_sub(seen.total.0 / 1000),
            tenant: incoming.tenant.clone(),
            model: located.identified.request.model.clone(),
            known,
            mode: self.step.mode,
            control: self.step.arm == Some(Arm::Control),
            soft_state: gateway.caches.shared_cache.degraded_health(),
            decision,
            waited: self.admission_wait,
            attempts: self.attempts,
            seen: Some(seen),
        };
        let case = PlanningCase {
            facts,
            ask: shortened.unwrap_or(self.step.ask),
            session: located.session,
            workers: located.workers,
            overlaps: located.overlaps,
            excluded,
            memory: Some(memory),
            disabled: self.step.disabled,
            barred: self.step.barred_links,
        };
        let case = receipt.decision.is_some().then_some(case);
        (receipt, case)
    }

    fn record_metrics(&self, seen: &StepObservation) {
        // The client left while the step was queued, so nothing was executed.
        if self.attempts.is_empty() {
            return;
        }
        let metrics = &self.gateway.metrics;
        let (plan, located) = (&self.planned.plan, &self.step.located);
        let kind = self.step.kind.as_str();
        if let Some(took) = seen.first_token {
            metrics.requests.first_token.with_label_values(&[kind]).observe(took.duration().as_secs_f64());
            // Observed only beside a measured value, so that the two can be compared.
            if let Some(predicted) = seen.predicted {
                metrics.plans.predicted.observe(predicted.duration().as_secs_f64());
            }
        }
        metrics.plans.actions.with_label_values(&[plan.action.as_str()]).inc();
        metrics.plans.kinds.with_label_values(&[kind]).inc();
        if let Some(owner) = located.session.owner {
            metrics.plans.owner_lookups.inc();
            metrics.plans.owner_hits.inc_by(u64::from(owner.worker == plan.target()));
        }
        for remark in self.attempts.iter().flat_map(|attempt| &attempt.remarks) {
            metrics.plans.fallback.with_label_values(&[remark.as_ref()]).inc();
        }
        if self.is_converted_by_guess() {
            metrics.plans.fallback.with_label_values(&["unverified_conversion"]).inc();
        }
        if let Some(reason) = located.identified.fallback_reason() {
            metrics.plans.fallback.with_label_values(&[reason.as_ref()]).inc();
        }
        if seen.ending == RequestOutcome::Complete {
            self.count_tokens(seen);
        }
    }

    /// Compares the time to first token of a step that one worker served alone with its predicted price.
    fn record_prediction(&self, seen: &StepObservation) {
        let Some(decision) = self.planned.decision.as_ref().filter(|_| seen.ending == RequestOutcome::Complete) else {
            return;
        };
        let plan = &self.planned.plan;
        // In shadow mode the executed plan is not the planner's; its price is among the candidates.
        let legs = (plan.prefill.worker, plan.decode.worker);
        let at = |one: &&PlanCandidate| one.handoff.is_none() && (one.prefill.worker, one.decode.worker) == legs;
        let served = decision.candidates.iter().find(at);
        let (Some(served), Some(first_token)) = (served, seen.first_token) else { return };
        // Time in the admission queue is due to other sessions, not to this worker.
        let first_token = first_token - self.admission_wait();
        let is_alone = plan.handoff.is_none() && self.attempts.len() == 1;
        let worker = self.step.located.workers.iter().find(|view| view.id == plan.target());
        let Some(worker) = worker.filter(|_| is_alone) else { return };
        let foretold = served.terms.time_to_first_token();
        let metrics = &self.gateway.metrics.decisions;
        let ratio = first_token.0 as f64 / foretold.0.max(1) as f64;
        metrics.ttft_prediction_ratio.with_label_values(&[plan.action.as_str()]).observe(ratio);
        let life = (worker.id, worker.incarnation);
        let Some(now) = self.gateway.decisions.calibration.add(life, foretold, first_token) else { return };
        let (worker, ratio) = (&worker.endpoint, format!("{:.2}", now.ratio));
        match now.off {
            Some(off) => tracing::warn!(%worker, off = off.as_ref(), %ratio,
                "its first tokens do not come when prices say: see whether others use it, or its clocks were lowered"),
            None => tracing::info!(%worker, %ratio, "its first tokens come when prices say again"),
        }
    }

    /// Adds the step of a compared session to the guardrail. It counts for the action that was chosen first: that it
    /// failed and was replaced is part of its effect on the session.
    fn record_comparison(&self, seen: &StepObservation) {
        let (Some(arm), Some(action)) = (self.step.arm, self.first_action) else { return };
        if seen.ending != RequestOutcome::Complete {
            return;
        }
        let session = self.step.located.affinity_key;
        // No action is to blame for the wait.
        let took = seen.first_token.unwrap_or(seen.total) - self.admission_wait();
        enforce_guardrail(&self.gateway, &StepSample { action, session, arm, latency: took, at_unix_ms: unix_ms() });
    }

    /// Returns how long the step waited before it started.
    fn admission_wait(&self) -> Micros {
        self.admission_wait.map_or(Micros::ZERO, |waited| waited.time)
    }

    /// Whether the engine that served the request may have converted it differently than this router did.
    fn is_converted_by_guess(&self) -> bool {
        is_converted_by_guess(self.gateway.fleet(), &self.step.located.identified, self.target())
    }

    /// Compares the engine's prompt token count with ours. Returns both where they disagree.
    fn token_count_mismatch(&self, ending: RequestOutcome, usage: Option<TokenUsage>) -> Option<PromptTokenCount> {
        let usage = usage.filter(|_| ending == RequestOutcome::Complete)?;
        let prefixed = &self.step.located.identified;
        let computed = prefixed.comparable_tokens().filter(|_| !self.is_converted_by_guess());
        let counted = Some(usage.prompt).filter(|counted| *counted > Tokens::ZERO);
        let counts = computed.zip(counted).map(|(computed, counted)| PromptTokenCount { computed, counted });
        let at = (&prefixed.request.model, self.target());
        self.gateway.caches.prefix_cache.tokenizer_drift.record_token_count(at, counts, Instant::now())
    }

    /// Compares the engine's cache hit with what its events reported. Returns both where they disagree by now.
    fn cache_hit_mismatch(&self, ending: RequestOutcome, usage: Option<TokenUsage>) -> Option<CacheHitCheck> {
        let usage = usage.filter(|_| ending == RequestOutcome::Complete)?;
        let (model, server) = (&self.step.located.identified.request.model, self.target());
        let agreement = &self.gateway.caches.prefix_cache.tokenizer_drift;
        let finds = self.cache_hit_check(usage);
        match (finds.filter(|finds| !finds.agree()), agreement.reserve_deferred_check()) {
            (Some(disagreeing), Some(place)) => self.recheck_later(disagreeing, place),
            (Some(_), None) => _ = agreement.record_cache_hit((model, server), None, Instant::now()),
            (None, _) => _ = agreement.record_cache_hit((model, server), finds, Instant::now()),
        }
        finds.filter(|finds| !finds.agree())
    }

    /// Waits for late events before the difference counts as a sign of another prompt.
    fn recheck_later(&self, finds: CacheHitCheck, place: OwnedSemaphorePermit) {
        let prefixed = &self.step.located.identified;
        let (gateway, server) = (self.gateway.clone(), self.target());
        let (model, chain) = (prefixed.request.model.clone(), prefixed.prompt.chain.clone());
        tokio::spawn(async move {
            tokio::time::sleep(EVENT_GRACE_PERIOD).await;
            let told = reported_overlap(server, chain.block, &gateway.index().read().overlaps_of_chain(&chain));
            let finds = CacheHitCheck { told: finds.told.max(told), ..finds };
            gateway.caches.prefix_cache.tokenizer_drift.record_cache_hit((&model, server), Some(finds), Instant::now());
            drop(place);
        });
    }

    /// Returns the cache hit and the reported overlap. `None` where the prompt is uncertain or one of a batch, where
    /// its blocks may have come from another worker, where not all of the worker's blocks are known, and where the
    /// engine does not report its cache hit.
    fn cache_hit_check(&self, usage: TokenUsage) -> Option<CacheHitCheck> {
        let located = &self.step.located;
        let prefixed = &located.identified;
        let is_plain =
            self.attempts.len() == 1 && self.planned.plan.handoff.is_none() && prefixed.other_chains.is_empty();
        prefixed.comparable_tokens().filter(|_| is_plain && !self.is_converted_by_guess())?;
        let fleet = self.gateway.fleet().snapshot();
        let is_it = |worker: &&WorkerView| worker.id == self.target() && worker.knowledge == KvIndexState::Exact;
        let capacity = fleet.iter().find(is_it)?.capacity;
        let chain = &prefixed.prompt.chain;
        let told = |overlaps: &[Overlap]| reported_overlap(self.target(), chain.block, overlaps);
        let before = CacheHitCheck {
            told: told(&located.overlaps),
            found: usage.cached?,
            block: capacity.block.max(chain.block),
        };
        // Blocks that other requests had computed there meanwhile have been reported by now.
        let now = || told(&self.gateway.index().read().overlaps_of_chain(chain));
        let finds = if before.agree() { before } else { CacheHitCheck { told: before.told.max(now()), ..before } };
        finds.conclusive()
    }

    fn count_tokens(&self, seen: &StepObservation) {
        let plans = &self.gateway.metrics.plans;
        let prompt = self.step.ask.prompt;
        let transferred = self.transferred_tokens();
        let cached = (seen.cached.unwrap_or(seen.predicted_cached) - transferred).min(prompt - transferred);
        let computed = prompt - cached - transferred;
        for (source, tokens) in [("cached", cached), ("computed", computed), ("transferred", transferred)] {
            plans.prompt_tokens.with_label_values(&[source]).inc_by(tokens.0);
        }
        plans.overlap.observe(cached.0 as f64);
        plans.completion_tokens.inc_by(seen.answered.unwrap_or_default().0);
        plans.moved_bytes.inc_by(seen.moved.0);
    }

    /// Prompt tokens whose KV came from another worker, as planned.
    fn transferred_tokens(&self) -> Tokens {
        let Bytes(token) = self.step.located.identified.model.kv_bytes_per_token;
        Tokens(self.planned_transfer_bytes().0 / token.max(1)).min(self.step.ask.prompt)
    }

    /// Bytes that the executed plan was to move between workers; zero if the transfer failed.
    fn planned_transfer_bytes(&self) -> Bytes {
        let served = self.attempts.last().map_or(&[][..], |attempt| &attempt.remarks);
        match &self.planned.plan.handoff {
            Some(handoff) if !served.iter().any(|remark| remark.prevented_transfer()) => handoff.bytes(),
            _ => Bytes::ZERO,
        }
    }
}

/// Returns how much of a prompt the worker has reported to hold.
fn reported_overlap(worker: WorkerId, block: Tokens, overlaps: &[Overlap]) -> Tokens {
    let there = overlaps.iter().filter(|overlap| overlap.worker == worker);
    there.map(|overlap| overlap.blocks).max().unwrap_or_default().tokens(block)
}

#[cfg(test)]
mod tests;
