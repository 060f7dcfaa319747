//! Applies one event message to a rank's blocks, and updates how exactly those are known.

use std::time::SystemTime;

use residency::{DecodeError, DecodeLimits, KvCacheEvent, KvEventBatch, decode};
use vocabulary::{DpRank, Micros, Tier, Tokens};

use super::rank::{FollowEnd, RankFollower};
use crate::events::replay::EventMessage;

impl RankFollower {
    /// Applies a message that is next in sequence.
    pub(super) fn apply(&mut self, message: &EventMessage) -> Result<(), FollowEnd> {
        match decode(&message.payload, &DecodeLimits::default()) {
            Err(error) => self.record_undecodable(error),
            // One socket can carry several ranks; each follower reads only its own.
            Ok(batch) if batch.rank.is_some_and(|rank| rank != self.source.rank && rank != DpRank(0)) => {}
            Ok(batch) => self.ingest(&batch)?,
        }
        self.publish_state();
        Ok(())
    }

    fn ingest(&mut self, batch: &KvEventBatch) -> Result<(), FollowEnd> {
        let before = self.feed.counts();
        if batch.events.contains(&KvCacheEvent::Cleared) {
            self.stream.cache_cleared();
        }
        self.feed.ingest_all(&batch.events);
        let after = self.feed.counts();
        let orphans = after.orphans - before.orphans;
        let mut counts = self.worker.member.events.counts.lock();
        counts.unknown_blocks += orphans + after.unknown_removals - before.unknown_removals;
        counts.events += batch.events.len() as u64;
        counts.batches += 1;
        counts.lag = Micros(clock_lag(batch.timestamp));
        drop(counts);
        if orphans > 0 {
            self.stream.record_orphan();
        } else {
            self.record_turnover(batch);
        }
        // Last, because a loss in this message must not be cleared by the message itself.
        if after.over_limit > before.over_limit {
            self.stream.record_loss();
        }
        if after.indivisible > before.indivisible {
            return Err(FollowEnd::Misfit(misfit_block(batch, self.feed.rules().block)));
        }
        Ok(())
    }

    /// Counts stored blocks: after a full turnover of the cache, lost events no longer matter.
    fn record_turnover(&mut self, batch: &KvEventBatch) {
        let stored = || batch.events.iter().filter_map(KvCacheEvent::stored_copies);
        self.is_tiered |= stored().any(|(tier, _)| tier != Tier::Hbm);
        // If more blocks are known than fit, removals were lost, too, and some of the known blocks do not exist any
        // more.
        let most = self.max_blocks().filter(|most| self.feed.blocks() as u64 <= *most);
        self.stream.record_stored(stored().map(|(_, blocks)| blocks).sum(), most);
    }

    fn record_undecodable(&mut self, error: DecodeError) {
        tracing::warn!(worker = %self.worker.member.spec.endpoint, %error, "an event message cannot be read");
        self.worker.member.events.counts.lock().undecodable += 1;
        self.stream.record_loss();
    }
}

/// Returns the size in tokens of the first block that is not a multiple of the chain block.
fn misfit_block(batch: &KvEventBatch, chain: Tokens) -> Tokens {
    let sizes = batch.events.iter().filter_map(|event| match event {
        KvCacheEvent::Stored(stored) => Some(u64::from(stored.block_size)),
        _ => None,
    });
    let mut odd = sizes.filter(|size| *size == 0 || !size.is_multiple_of(chain.0));
    Tokens(odd.next().unwrap_or_default())
}

/// Returns the microseconds from an engine's timestamp to now; 0 where its clock is ahead.
fn clock_lag(timestamp: f64) -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    ((now.as_secs_f64() - timestamp) * 1e6).max(0.0) as u64
}
