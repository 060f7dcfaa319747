//! How well the blocks of a step's prompt are known at a worker: never better than the worker's own blocks are, and never
//! better than the prompt itself.

use std::sync::Arc;

use vocabulary::{KvIndexState, WorkerId, WorkerView};
use workers_shim::scrape::EngineKind;

use super::identify::IdentifiedRequest;
use crate::app_state::AppState;
use crate::client_request::GenerationEndpoint;

/// The fleet as this step knows it. What is planned and what receipts say come from here.
pub(super) fn workers_for_step(
    gateway: &AppState,
    prefixed: &IdentifiedRequest,
    workers: Arc<[WorkerView]>,
) -> Arc<[WorkerView]> {
    let is_guess = |worker: &WorkerView| {
        worker.knowledge != KvIndexState::Fallback
            && (prefixed.fallback_reason().is_some()
                || is_converted_by_guess(gateway, prefixed, worker.id)
                || gateway
                    .caches
                    .prefix_cache
                    .tokenizer_drift
                    .is_suspected_mismatch(&prefixed.request.model, worker.id))
    };
    if !workers.iter().any(is_guess) {
        return workers;
    }
    let known = |worker: &WorkerView| match is_guess(worker) {
        true => WorkerView { knowledge: KvIndexState::Fallback, ..worker.clone() },
        false => worker.clone(),
    };
    workers.iter().map(known).collect()
}

/// Whether the worker's engine may read the request otherwise than it was read here: what comes in the words of these
/// endpoints is known as vLLM reads it; how another engine does is a guess.
pub(super) fn is_converted_by_guess(gateway: &AppState, prefixed: &IdentifiedRequest, worker: WorkerId) -> bool {
    match prefixed.request.endpoint {
        GenerationEndpoint::ChatCompletions | GenerationEndpoint::Completions => false,
        GenerationEndpoint::Messages | GenerationEndpoint::Responses => {
            gateway.fleet().engine(worker) != EngineKind::Vllm
        }
    }
}

#[cfg(test)]
mod tests;
