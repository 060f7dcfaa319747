//! Links between workers: each sends one transfer and receives one transfer at a time.

use engine_model::runs::Seconds;
use vocabulary::Tokens;

use super::replication_tracker::ReplicationTracker;
use crate::hardware_profile::LinkSpeed;

/// Times at which each worker's link is free again, for sending and receiving.
pub(super) struct LinkSchedule {
    speed: LinkSpeed,
    free_to_send_at: Vec<Seconds>,
    free_to_receive_at: Vec<Seconds>,
    /// Tokens of KV sent so far.
    pub(super) moved_tokens: Tokens,
    /// Prefixes sent before a step asks for them.
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

    /// Returns the seconds that a transfer of `tokens` takes on a free link.
    pub(super) fn transfer_seconds(&self, tokens: Tokens) -> f64 {
        tokens.0 as f64 / self.speed.tokens_per_second + self.speed.fixed
    }

    /// Sends tokens of KV as soon as both ends are free; returns the arrival time.
    pub(super) fn send(&mut self, now: Seconds, (from, to): (usize, usize), tokens: Tokens) -> Seconds {
        let begin = now.max(self.free_to_send_at[from]).max(self.free_to_receive_at[to]);
        let arrived = begin + Seconds(self.transfer_seconds(tokens));
        (self.free_to_send_at[from], self.free_to_receive_at[to]) = (arrived, arrived);
        self.moved_tokens += tokens;
        arrived
    }
}
