//! KV that leaves an engine and KV that arrives. How long that takes is the links' affair.

use vocabulary::Tokens;

use super::RunEngine;
use crate::runs::{Prefilled, Prompt, RunId, Runs};

/// What is being sent.
#[derive(Clone, PartialEq, Debug)]
pub struct Lent {
    /// Those that stay in device memory until then.
    pub kept: Vec<RunId>,
    /// Seconds until the others are read from slower tiers.
    pub loads: f64,
}

impl RunEngine {
    /// Keeps runs until they are sent; what lies in slower tiers is read first.
    pub fn lend(&mut self, runs: &Runs, path: &[RunId]) -> Lent {
        let (kept, below): (Vec<RunId>, Vec<RunId>) = path.iter().partition(|run| self.pool.has(**run));
        self.pool.pin(runs, &kept);
        Lent { kept, loads: self.pool.read_out(runs, &below) }
    }

    /// They were sent.
    pub fn lent(&mut self, runs: &Runs, path: &[RunId]) {
        self.pool.unpin(runs, path);
    }

    /// KV that no request waits for is here: it stays cached if it fits, and is evicted as all the rest is. Whether it does.
    pub fn bring(&mut self, runs: &Runs, path: &[RunId]) -> bool {
        self.keep(runs, path)
    }

    /// The KV of a prompt that was computed elsewhere is here, and its answer begins; given back if there is no room.
    pub fn receive(&mut self, runs: &Runs, mut prompt: Prompt) -> Result<(), Prompt> {
        let (present, missing): (Vec<RunId>, Vec<RunId>) = prompt.path.iter().partition(|run| self.pool.has(**run));
        let sum: Tokens = missing.iter().map(|run| runs.room(*run)).sum();
        let reserved = prompt.tokens - runs.end(&prompt.path) + prompt.answer + runs.windows();
        self.pool.pin(runs, &present);
        if !self.pool.reserve(runs, sum + reserved) {
            self.pool.unpin(runs, &present);
            return Err(prompt);
        }
        missing.iter().for_each(|run| _ = self.pool.fill(runs, *run));
        self.pool.pin(runs, &missing);
        self.pool.touch(&prompt.path);
        prompt.answered = crate::runs::Where::Here;
        self.answer(prompt, reserved);
        Ok(())
    }

    /// A prompt that was computed here is answered elsewhere: its memory is free again, its runs stay cached.
    pub fn release(&mut self, runs: &Runs, prefilled: &Prefilled) {
        self.pool.unpin(runs, &prefilled.prompt.path);
        self.pool.unreserve(prefilled.reserved);
        self.load.requests -= 1;
    }

    /// A prompt that was to be answered elsewhere is answered here after all.
    pub fn answer_here(&mut self, mut prefilled: Prefilled) {
        prefilled.prompt.answered = crate::runs::Where::Here;
        self.load.context += prefilled.prompt.tokens;
        self.answer(prefilled.prompt, prefilled.reserved);
    }

    /// A request that was expected here is answered elsewhere.
    pub fn expect_no_more(&mut self, context: Tokens) {
        self.load.requests -= 1;
        self.load.context -= context;
    }
}
