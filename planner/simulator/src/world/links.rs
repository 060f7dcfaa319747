//! The links between workers: each sends one thing and receives one thing at a time.

use engine_model::runs::Seconds;
use vocabulary::Tokens;

use super::ahead::Aheads;
use crate::spec::LinkSpeed;

/// When each worker's link is free again, out and in.
pub(super) struct Links {
    speed: LinkSpeed,
    out: Vec<Seconds>,
    into: Vec<Seconds>,
    /// Tokens of KV that were sent so far.
    pub(super) moved: Tokens,
    /// What is sent before a step asks for it.
    pub(super) ahead: Aheads,
}

impl Links {
    pub(super) fn new(workers: usize, speed: LinkSpeed) -> Self {
        let free = vec![Seconds::ZERO; workers];
        Self { speed, out: free.clone(), into: free, moved: Tokens::ZERO, ahead: Aheads::default() }
    }

    /// Seconds that so many tokens of KV take on a free link.
    pub(super) fn takes(&self, tokens: Tokens) -> f64 {
        tokens.0 as f64 / self.speed.tokens_per_second + self.speed.fixed
    }

    /// Sends tokens of KV as soon as both ends are free; when they have arrived.
    pub(super) fn send(&mut self, now: Seconds, (from, to): (usize, usize), tokens: Tokens) -> Seconds {
        let begin = now.max(self.out[from]).max(self.into[to]);
        let arrived = begin + Seconds(self.takes(tokens));
        (self.out[from], self.into[to]) = (arrived, arrived);
        self.moved += tokens;
        arrived
    }
}
