//! How well the blocks of a step's prompt are known at a worker: never better than the worker's own blocks are, and never
//! better than the prompt itself.

use std::sync::Arc;

use vocabulary::{Knowledge, WorkerId, WorkerView};
use workers_shim::scrape::Engine;

use super::identify::Prefixed;
use crate::gateway::Gateway;
use crate::incoming::Endpoint;

/// The fleet as this step knows it. What is planned and what receipts say come from here.
pub(super) fn of_step(gateway: &Gateway, prefixed: &Prefixed, workers: Arc<[WorkerView]>) -> Arc<[WorkerView]> {
    let is_guess = |worker: &WorkerView| {
        worker.knowledge != Knowledge::Fallback
            && (prefixed.fallback().is_some()
                || is_converted_by_guess(gateway, prefixed, worker.id)
                || gateway.remembered.identity.agreement.doubts(&prefixed.request.model, worker.id))
    };
    if !workers.iter().any(is_guess) {
        return workers;
    }
    let known = |worker: &WorkerView| match is_guess(worker) {
        true => WorkerView { knowledge: Knowledge::Fallback, ..worker.clone() },
        false => worker.clone(),
    };
    workers.iter().map(known).collect()
}

/// Whether the worker's engine may read the request otherwise than it was read here: what comes in the words of these
/// endpoints is known as vLLM reads it; how another engine does is a guess.
pub(super) fn is_converted_by_guess(gateway: &Gateway, prefixed: &Prefixed, worker: WorkerId) -> bool {
    match prefixed.request.endpoint {
        Endpoint::ChatCompletions | Endpoint::Completions => false,
        Endpoint::Messages | Endpoint::Responses => gateway.fleet().engine(worker) != Engine::Vllm,
    }
}

#[cfg(test)]
mod tests;
