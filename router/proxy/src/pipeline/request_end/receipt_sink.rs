//! Files the receipt, and the planner's inputs for the decision log.

use std::sync::Arc;

use planner::RecordedPlanningInputs;
use vocabulary::Blocks;

use super::RequestEnd;
use crate::decisions::DecisionHistory;
use crate::guardrail::ComparisonArm;
use crate::receipt::{PromptLookupSummary, Receipt, StepObservation, unix_ms};
use crate::request_states::{PlannedStep, step_facts};
use crate::shared_cache::SharedCache;

/// Records every request in the decision history.
#[derive(Debug)]
pub(in crate::pipeline) struct ReceiptSink {
    pub(in crate::pipeline) decisions: Arc<DecisionHistory>,
    pub(in crate::pipeline) shared_cache: Arc<SharedCache>,
}

impl ReceiptSink {
    /// Takes the whole value, so that the planning inputs need no copy.
    pub(in crate::pipeline) fn record(&self, end: RequestEnd, observation: StepObservation) {
        let (receipt, case) = self.receipt(end, observation);
        self.decisions.record(receipt, case);
    }

    /// Builds the receipt, and the recorded planning inputs where the planner was asked.
    fn receipt(&self, end: RequestEnd, observation: StepObservation) -> (Receipt, Option<RecordedPlanningInputs>) {
        let RequestEnd { step, planned, attempts, admission_wait, .. } = end;
        let (located, PlannedStep { decision, shortened_ask: shortened, excluded, rank_memory: memory, .. }) =
            (step.located, planned);
        let facts = step_facts(&located);
        let chain = &located.identified.prompt.chain;
        let tokens = |blocks: Blocks| blocks.tokens(chain.block);
        let lookup = PromptLookupSummary {
            session_id: located.session.id,
            session_key_source: located.identified.request.session_key.as_ref().map(|key| key.source),
            token_ids_unavailable: located.identified.fallback_reason().map(Into::into),
            tier: located.identified.tier.map(Into::into),
            disabled_by_spot_check: located.identified.model.is_disabled_by_spot_check(),
            owner: located.session.owner,
            epoch: located.session.epoch,
            prompt_tokens: located.identified.total_tokens(),
            prompt_tokens_estimated: located.identified.fallback_reason().is_some(),
            sealed_tokens: tokens(located.session.sealed),
            max_overlap_tokens: tokens(located.deepest_overlap()),
            evidence: located.evidence,
        };
        let incoming = &located.identified.request.incoming;
        let receipt = Receipt {
            request_id: incoming.id,
            arrived_at: unix_ms().saturating_sub(observation.duration.0 / 1000),
            tenant: incoming.tenant.clone(),
            model: located.identified.request.model.clone(),
            lookup,
            mode: step.mode,
            control_group: step.arm == Some(ComparisonArm::Control),
            shared_cache_state: self.shared_cache.degraded_health(),
            decision,
            admission_wait,
            attempts,
            observed: Some(observation),
        };
        let case = RecordedPlanningInputs {
            step: facts,
            request: shortened.unwrap_or(step.request),
            session: located.session,
            workers: located.workers,
            overlaps: located.overlaps,
            failed_workers: excluded,
            kv_occupancy: Some(memory),
            disabled_actions: step.disabled,
            disabled_links: step.disabled_links,
        };
        let case = receipt.decision.is_some().then_some(case);
        (receipt, case)
    }
}
