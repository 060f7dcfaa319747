//! The workers as one step sees them: where the hashes of its prompt's blocks may differ from the engine's, the worker's
//! index state counts as approximate for this step.

use std::sync::Arc;

use vocabulary::{KvIndexState, WorkerId, WorkerView};
use workers_shim::fleet::Fleet;
use workers_shim::scrape::EngineKind;

use crate::client_request::GenerationEndpoint;
use crate::identified_request::IdentifiedRequest;
use crate::prefix_cache::tokenizer_drift::TokenizerDrift;

/// Returns the fleet as seen by this step. Planning and receipts both use this view.
pub(super) fn workers_for_step(
    (drift, fleet): (&TokenizerDrift, &Fleet),
    identified: &IdentifiedRequest,
    workers: Arc<[WorkerView]>,
) -> Arc<[WorkerView]> {
    let is_guess = |worker: &WorkerView| {
        worker.kv_index_state != KvIndexState::Approximate
            && (identified.fallback_reason().is_some()
                || is_converted_by_guess(fleet, identified, worker.id)
                || drift.is_suspected_mismatch(&identified.request.model, worker.id))
    };
    if !workers.iter().any(is_guess) {
        return workers;
    }
    let as_seen = |worker: &WorkerView| match is_guess(worker) {
        true => WorkerView { kv_index_state: KvIndexState::Approximate, ..worker.clone() },
        false => worker.clone(),
    };
    workers.iter().map(as_seen).collect()
}

/// Whether the worker's engine may convert the request differently than this router did. The conversion of these
/// endpoints follows vLLM; for other engines it is a guess.
pub(super) fn is_converted_by_guess(fleet: &Fleet, identified: &IdentifiedRequest, worker: WorkerId) -> bool {
    match identified.request.endpoint {
        GenerationEndpoint::ChatCompletions | GenerationEndpoint::Completions => false,
        GenerationEndpoint::Messages | GenerationEndpoint::Responses => fleet.engine(worker) != EngineKind::Vllm,
    }
}

#[cfg(test)]
mod tests;
