//! KV that leaves an engine and KV that arrives. How long that takes is the links' affair.

use vocabulary::Tokens;

use super::RunEngine;
use crate::runs::{PrefilledRequest, RunId, RunRequest, RunTree};

/// What is being sent.
#[derive(Clone, PartialEq, Debug)]
pub struct OutboundTransfer {
    /// Those that stay in device memory until then.
    pub pinned: Vec<RunId>,
    /// Seconds until the others are read from slower tiers.
    pub load_seconds: f64,
}

impl RunEngine {
    /// Keeps runs until they are sent; what lies in slower tiers is read first.
    pub fn pin_for_transfer(&mut self, runs: &RunTree, path: &[RunId]) -> OutboundTransfer {
        let (kept, below): (Vec<RunId>, Vec<RunId>) = path.iter().partition(|run| self.pool.has(**run));
        self.pool.pin(runs, &kept);
        OutboundTransfer { pinned: kept, load_seconds: self.pool.read_for_transfer(runs, &below) }
    }

    /// They were sent.
    pub fn transfer_sent(&mut self, runs: &RunTree, path: &[RunId]) {
        self.pool.unpin(runs, path);
    }

    /// KV that no request waits for is here: it stays cached if it fits, and is evicted as all the rest is. Whether it does.
    pub fn cache_received(&mut self, runs: &RunTree, path: &[RunId]) -> bool {
        self.cache_path(runs, path)
    }

    /// The KV of a prompt that was computed elsewhere is here, and its answer begins; given back if there is no room.
    pub fn receive_prefilled(&mut self, runs: &RunTree, mut prompt: RunRequest) -> Result<(), RunRequest> {
        let (present, missing): (Vec<RunId>, Vec<RunId>) = prompt.path.iter().partition(|run| self.pool.has(**run));
        let sum: Tokens = missing.iter().map(|run| runs.device_size(*run)).sum();
        let reserved = prompt.tokens - runs.end_depth(&prompt.path) + prompt.answer + runs.window_size();
        self.pool.pin(runs, &present);
        if !self.pool.reserve(runs, sum + reserved) {
            self.pool.unpin(runs, &present);
            return Err(prompt);
        }
        missing.iter().for_each(|run| _ = self.pool.fill(runs, *run));
        self.pool.pin(runs, &missing);
        self.pool.touch(&prompt.path);
        prompt.decode_location = crate::runs::DecodeLocation::Local;
        self.join_batch(prompt, reserved);
        Ok(())
    }

    /// A prompt that was computed here is answered elsewhere: its memory is free again, its runs stay cached.
    pub fn release_prefilled(&mut self, runs: &RunTree, prefilled: &PrefilledRequest) {
        self.pool.unpin(runs, &prefilled.prompt.path);
        self.pool.unreserve(prefilled.reserved);
        self.load.requests -= 1;
    }

    /// A prompt that was to be answered elsewhere is answered here after all.
    pub fn decode_locally(&mut self, mut prefilled: PrefilledRequest) {
        prefilled.prompt.decode_location = crate::runs::DecodeLocation::Local;
        self.load.context += prefilled.prompt.tokens;
        self.join_batch(prefilled.prompt, prefilled.reserved);
    }

    /// A request that was expected here is answered elsewhere.
    pub fn cancel_expected(&mut self, context: Tokens) {
        self.load.requests -= 1;
        self.load.context -= context;
    }
}
