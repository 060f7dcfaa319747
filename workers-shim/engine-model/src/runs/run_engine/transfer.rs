//! KV that leaves an engine and KV that arrives. The duration of transfers is modelled elsewhere, by the links.

use vocabulary::Tokens;

use super::RunEngine;
use crate::runs::{PrefillHandoff, RunId, RunRequest, RunTree};

/// An outgoing transfer.
#[derive(Clone, PartialEq, Debug)]
pub struct OutgoingTransfer {
    /// Runs that are pinned in device memory until it is sent.
    pub pinned: Vec<RunId>,
    /// Seconds until the other runs are read from slower tiers.
    pub load_seconds: f64,
}

impl RunEngine {
    /// Pins runs until they are sent; runs in slower tiers are read first.
    pub fn pin_for_transfer(&mut self, runs: &RunTree, path: &[RunId]) -> OutgoingTransfer {
        let (on_device, lower): (Vec<RunId>, Vec<RunId>) = path.iter().partition(|run| self.pool.has(**run));
        self.pool.pin(runs, &on_device);
        OutgoingTransfer { pinned: on_device, load_seconds: self.pool.read_for_transfer(runs, &lower) }
    }

    /// Unpins runs that were sent.
    pub fn transfer_sent(&mut self, runs: &RunTree, path: &[RunId]) {
        self.pool.unpin(runs, path);
    }

    /// Caches received KV that no request waits for, if it fits; it can be evicted like all other runs. Returns whether
    /// it fitted.
    pub fn cache_received(&mut self, runs: &RunTree, path: &[RunId]) -> bool {
        self.cache_path(runs, path)
    }

    /// Starts the answer of a prompt that was computed elsewhere and whose KV has arrived. Returns the request if there
    /// is no room.
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

    /// Releases a prompt that was computed here and is answered elsewhere: its memory is free again, its runs stay
    /// cached.
    pub fn release_prefilled(&mut self, runs: &RunTree, prefilled: &PrefillHandoff) {
        self.pool.unpin(runs, &prefilled.prompt.path);
        self.pool.unreserve(prefilled.reserved);
        self.load.requests -= 1;
    }

    /// Answers a prompt here that should have been answered elsewhere.
    pub fn decode_locally(&mut self, mut prefilled: PrefillHandoff) {
        prefilled.prompt.decode_location = crate::runs::DecodeLocation::Local;
        self.load.context += prefilled.prompt.tokens;
        self.join_batch(prefilled.prompt, prefilled.reserved);
    }

    /// Removes a request from the load that was expected here and is answered elsewhere.
    pub fn cancel_expected(&mut self, context: Tokens) {
        self.load.requests -= 1;
        self.load.context -= context;
    }
}
