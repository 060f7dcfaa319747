//! The links between workers: each sends one thing and receives one thing at a time.

use engine_model::runs::Seconds;
use vocabulary::Tokens;

use super::prefix_replication::ReplicationTracker;
use crate::hardware_profile::LinkSpeed;

/// When each worker's link is free again, out and in.
pub(super) struct LinkSchedule {
    speed: LinkSpeed,
    free_to_send_at: Vec<Seconds>,
    free_to_receive_at: Vec<Seconds>,
    /// Tokens of KV that were sent so far.
    pub(super) moved_tokens: Tokens,
    /// What is sent before a step asks for it.
    pub(super) replication: ReplicationTracker,
}

impl LinkSchedule {
    pub(super) fn new(workers: usize, speed: LinkSpeed) -> Self {
        let free = vec![Seconds::ZERO; workers];
        Self {
            speed,
            free_to_send_at: free.clone(),
            free_to_receive_at: free,
            moved_tokens: Tokens::ZERO,
            replication: ReplicationTracker::default(),
        }
    }

    /// Seconds that so many tokens of KV take on a free link.
    pub(super) fn transfer_seconds(&self, tokens: Tokens) -> f64 {
        tokens.0 as f64 / self.speed.tokens_per_second + self.speed.fixed
    }

    /// Sends tokens of KV as soon as both ends are free; when they have arrived.
    pub(super) fn send(&mut self, now: Seconds, (from, to): (usize, usize), tokens: Tokens) -> Seconds {
        let begin = now.max(self.free_to_send_at[from]).max(self.free_to_receive_at[to]);
        let arrived = begin + Seconds(self.transfer_seconds(tokens));
        (self.free_to_send_at[from], self.free_to_receive_at[to]) = (arrived, arrived);
        self.moved_tokens += tokens;
        arrived
    }
}
