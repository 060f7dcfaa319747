//! The blocks that a worker without events is assumed to hold: those routed there recently, evicted least recently used
//! first, and of one use the deepest first, so that no block is held without its parent.
//!
//! Blocks are kept in runs. A prompt is found by bisection and one use is recorded for all of it, so that a step costs
//! what is new in it. Always [`vocabulary::KvIndexState::Approximate`]; never mixed with blocks known from events.

use std::collections::BTreeMap;

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

/// Blocks for which a run keeps memory beyond twice its length.
const SPARE_BLOCKS: usize = 64;

/// Index of a run in its slab.
type RunIndex = u32;

/// One use of a prompt's blocks. Later uses are greater.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct BlockUse {
    number: u64,
    at: Micros,
}

/// Blocks that follow each other in one chain.
#[derive(Default)]
struct BlockRun {
    hashes: Vec<BlockHash>,
    /// The run that this one continues, and after how many of its blocks.
    parent: Option<(RunIndex, u32)>,
    /// Number of runs that continue this one, by the number of its blocks before them.
    children: BTreeMap<u32, u32>,
    /// Uses, each with the number of blocks it covers from the run's start. A use that covers more blocks is older.
    /// Uses of a run that continues this one are added once that run is evicted.
    uses: Vec<(u32, BlockUse)>,
}

impl BlockRun {
    /// Returns the oldest use of blocks that no other run continues.
    fn oldest_use(&self) -> Option<BlockUse> {
        let needed = self.children.keys().next_back().copied().unwrap_or(0);
        self.uses.last().filter(|(length, _)| *length > needed).map(|(_, last)| *last)
    }

    /// Records that the first `length` blocks were used.
    fn record_use(&mut self, length: u32, used: BlockUse) {
        let deeper = self.uses.partition_point(|(other, _)| *other < length);
        if self.uses[deeper..].iter().any(|(_, other)| *other >= used) {
            return;
        }
        // Of the blocks that this use covers, only later uses still count.
        let later = self.uses[..deeper].partition_point(|(_, other)| *other > used);
        let same = usize::from(self.uses.get(deeper).is_some_and(|(other, _)| *other == length));
        self.uses.splice(later..deeper + same, [(length, used)]);
    }
}

/// The blocks routed to one rank of one worker.
pub struct RoutedBlocks {
    limits: RoutedBlockLimits,
    /// The run of each block, and its place there.
    blocks: FoldHashMap<BlockHash, (RunIndex, u32)>,
    runs: Vec<BlockRun>,
    free: Vec<RunIndex>,
    /// Runs whose last blocks can be evicted, by the oldest use of these.
    evictable: BTreeMap<BlockUse, RunIndex>,
    use_count: u64,
}

impl RoutedBlocks {
    /// Creates an empty record.
    pub fn new(limits: RoutedBlockLimits) -> Self {
        Self {
            limits,
            blocks: FoldHashMap::default(),
            runs: Vec::new(),
            free: Vec::new(),
            evictable: BTreeMap::new(),
            use_count: 0,
        }
    }

    /// Sets how many chain blocks the worker's cache can hold.
    pub fn set_limit(&mut self, blocks: usize) {
        self.limits.blocks = blocks;
    }

    /// Records the prompts of one served step. `now` must not go backwards.
    pub fn record_prompts(&mut self, prompts: &[&PrefixChain], now: Micros, out: &mut Vec<ResidencyChange>) {
        for chain in prompts {
            self.use_count += 1;
            self.record_prompt(chain, BlockUse { number: self.use_count, at: now }, out);
        }
        self.expire(now, out);
    }

    fn record_prompt(&mut self, chain: &PrefixChain, used: BlockUse, out: &mut Vec<ResidencyChange>) {
        let ids = &chain.ids[..chain.ids.len().min(self.limits.blocks).min(u32::MAX as usize)];
        let known = ids.partition_point(|id| self.blocks.contains_key(&id.block_hash()));
        // A block that is known although its parent is not has the hash of another one by chance.
        let new = ids[known..].iter().map(|id| id.block_hash()).take_while(|hash| !self.blocks.contains_key(hash));
        let new: Vec<BlockHash> = new.collect();
        let last = known.checked_sub(1).and_then(|last| self.blocks.get(&ids[last].block_hash()).copied());
        let Some((at, length)) = self.run_after(last, new.len()) else { return };
        let before = self.runs[at as usize].oldest_use();
        for (hash, place) in new.iter().zip(length..) {
            self.blocks.insert(*hash, (at, place));
            out.push(ResidencyChange::Added(*hash, Tier::Hbm));
        }
        let run = &mut self.runs[at as usize];
        let length = length + new.len() as u32;
        run.hashes.extend(new);
        run.record_use(length, used);
        self.requeue(at, before);
    }

    /// Returns the run to which `count` blocks behind this block are added, and how many of its blocks come before
    /// them; `None` where there are no blocks at all.
    fn run_after(&mut self, last: Option<(RunIndex, u32)>, count: usize) -> Option<(RunIndex, u32)> {
        let parent = last.map(|(run, place)| (run, place + 1));
        match parent {
            None if count == 0 => return None,
            Some((run, length)) if count == 0 || self.runs[run as usize].hashes.len() == length as usize => {
                return Some((run, length));
            }
            _ => {}
        }
        if let Some((run, length)) = parent {
            let before = self.runs[run as usize].oldest_use();
            *self.runs[run as usize].children.entry(length).or_default() += 1;
            self.requeue(run, before);
        }
        let added = self.free.pop().unwrap_or_else(|| {
            self.runs.push(BlockRun::default());
            (self.runs.len() - 1) as RunIndex
        });
        self.runs[added as usize].parent = parent;
        Some((added, 0))
    }

    /// Puts a run that changed in its place among those that can be evicted.
    fn requeue(&mut self, run: RunIndex, before: Option<BlockUse>) {
        let now = self.runs[run as usize].oldest_use();
        if before != now {
            before.map(|before| self.evictable.remove(&before));
            now.map(|now| self.evictable.insert(now, run));
        }
    }

    /// Removes blocks that are too old or exceed the limit.
    pub fn expire(&mut self, now: Micros, out: &mut Vec<ResidencyChange>) {
        while let Some((used, &run)) = self.evictable.first_key_value() {
            if self.blocks.len() <= self.limits.blocks && now - used.at <= self.limits.age {
                break;
            }
            self.evict_last_block(run, *used, out);
        }
    }

    /// Evicts the last block of a run, of which `used` is the oldest use.
    fn evict_last_block(&mut self, at: RunIndex, used: BlockUse, out: &mut Vec<ResidencyChange>) {
        let run = &mut self.runs[at as usize];
        if let Some(hash) = run.hashes.pop() {
            self.blocks.remove(&hash);
            out.push(ResidencyChange::Removed(hash, Tier::Hbm));
        }
        // A long run of which little is left must not keep its memory.
        if run.hashes.capacity() > 2 * run.hashes.len() + SPARE_BLOCKS {
            run.hashes.shrink_to_fit();
        }
        let length = run.hashes.len() as u32;
        let is_covered = run.uses.iter().rev().nth(1).is_some_and(|(shorter, _)| *shorter == length) || length == 0;
        match run.uses.last_mut() {
            Some(last) if !is_covered => last.0 = length,
            _ => drop(run.uses.pop()),
        }
        self.requeue(at, Some(used));
        if length == 0 {
            self.remove_empty_run(at, used);
        }
    }

    /// Removes a run without blocks. Its last use counts for the blocks that it continued.
    fn remove_empty_run(&mut self, at: RunIndex, used: BlockUse) {
        let run = std::mem::take(&mut self.runs[at as usize]);
        self.free.push(at);
        let Some((parent, length)) = run.parent else { return };
        let continued = &mut self.runs[parent as usize];
        let before = continued.oldest_use();
        if let Some(count) = continued.children.get_mut(&length) {
            *count -= 1;
            if *count == 0 {
                continued.children.remove(&length);
            }
        }
        continued.record_use(length, used);
        self.requeue(parent, before);
    }

    /// Removes everything, because the worker restarted.
    pub fn clear(&mut self, out: &mut Vec<ResidencyChange>) {
        out.extend(self.blocks.drain().map(|(hash, _)| ResidencyChange::Removed(hash, Tier::Hbm)));
        *self = Self::new(self.limits);
    }
}

#[cfg(test)]
mod tests;
