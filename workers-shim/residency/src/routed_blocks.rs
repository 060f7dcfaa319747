//! The blocks that a worker without events is assumed to hold: those routed there recently, evicted least recently used
//! first.
//!
//! Always [`vocabulary::KvIndexState::Approximate`]; never mixed with blocks known from events.

use std::collections::VecDeque;

use smart_default::SmartDefault;
use vocabulary::{BlockHash, Micros, PrefixChain, Tier};

use crate::fold_hash::FoldHashMap;
use crate::index::ResidencyChange;

/// How much is recorded, and for how long.
#[derive(Clone, Copy, PartialEq, Eq, Debug, SmartDefault)]
pub struct RoutedBlockLimits {
    /// Number of chain blocks: about the capacity of the worker's cache.
    #[default(1 << 16)]
    pub blocks: usize,
    /// Maximum age since the last use.
    #[default(Micros(600_000_000))]
    pub age: Micros,
}

struct BlockTouch {
    hash: BlockHash,
    stamp: u64,
    at: Micros,
}

/// The blocks routed to one rank of one worker.
pub struct RoutedBlocks {
    limits: RoutedBlockLimits,
    stamps: FoldHashMap<BlockHash, u64>,
    /// Uses, oldest first; only the newest use of a block counts.
    touches: VecDeque<BlockTouch>,
    stamp: u64,
}

impl RoutedBlocks {
    /// Creates an empty record.
    pub fn new(limits: RoutedBlockLimits) -> Self {
        Self { limits, stamps: FoldHashMap::default(), touches: VecDeque::new(), stamp: 0 }
    }

    /// Sets how many chain blocks the worker's cache can hold.
    pub fn set_limit(&mut self, blocks: usize) {
        self.limits.blocks = blocks;
    }

    /// Records the prompts of one served step. `now` must not go backwards.
    pub fn record_prompts(&mut self, prompts: &[&PrefixChain], now: Micros, out: &mut Vec<ResidencyChange>) {
        // Deepest first, so that leaves are older than their parents and expire before them.
        let recent = prompts.iter().flat_map(|chain| chain.ids.iter().take(self.limits.blocks).rev());
        for hash in recent.map(|id| id.block_hash()) {
            self.stamp += 1;
            self.touches.push_back(BlockTouch { hash, stamp: self.stamp, at: now });
            if self.stamps.insert(hash, self.stamp).is_none() {
                out.push(ResidencyChange::Added(hash, Tier::Hbm));
            }
        }
        self.expire(now, out);
    }

    /// Removes blocks that are too old or exceed the limit.
    pub fn expire(&mut self, now: Micros, out: &mut Vec<ResidencyChange>) {
        while let Some(touch) = self.touches.front() {
            let newest = self.stamps.get(&touch.hash) == Some(&touch.stamp);
            let goes = self.stamps.len() > self.limits.blocks || now - touch.at > self.limits.age;
            if newest && !goes {
                break;
            }
            if newest {
                self.stamps.remove(&touch.hash);
                out.push(ResidencyChange::Removed(touch.hash, Tier::Hbm));
            }
            self.touches.pop_front();
        }
        // A single old block can keep many outdated uses behind it.
        if self.touches.len() > 2 * self.stamps.len() + 1024 {
            let stamps = &self.stamps;
            self.touches.retain(|touch| stamps.get(&touch.hash) == Some(&touch.stamp));
        }
    }

    /// Removes everything, because the worker restarted.
    pub fn clear(&mut self, out: &mut Vec<ResidencyChange>) {
        self.touches.clear();
        out.extend(self.stamps.drain().map(|(hash, _)| ResidencyChange::Removed(hash, Tier::Hbm)));
    }
}

#[cfg(test)]
mod tests;
