//! The blocks that a worker without events is assumed to hold: those routed there recently, evicted least recently used
//! first, and of one use the deepest first, so that no block is held without its parent.
//!
//! Blocks are kept in runs, of which only the first block is in a map: a prompt is found by bisection within its runs,
//! and one use is recorded for all of it, so that a step costs what is new in it. Always
//! [`vocabulary::KvIndexState::Approximate`]; never mixed with blocks known from events.

use std::collections::BTreeMap;

use smart_default::SmartDefault;
use vocabulary::{BlockHash, Micros, PrefixChain, PrefixId};

use crate::fold_hash::FoldHashMap;
use crate::residency_feed::ApplyProgress;

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

/// A change of the first blocks of the prompts that are held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FirstBlockChange {
    /// Prompts that begin with this block are held now.
    Added(BlockHash),
    /// None is held any more.
    Removed(BlockHash),
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
pub(crate) struct RoutedBlocks {
    limits: RoutedBlockLimits,
    /// Maximum number of blocks.
    max_blocks: usize,
    /// The run that begins with a block.
    starts: FoldHashMap<BlockHash, RunIndex>,
    /// Number of blocks in all runs.
    count: usize,
    runs: Vec<BlockRun>,
    free: Vec<RunIndex>,
    /// Runs whose last blocks can be evicted, by the oldest use of these.
    evictable: BTreeMap<BlockUse, RunIndex>,
    use_count: u64,
}

impl RoutedBlocks {
    /// Creates an empty record.
    pub(crate) fn new(limits: RoutedBlockLimits) -> Self {
        Self {
            limits,
            max_blocks: limits.blocks,
            starts: FoldHashMap::default(),
            count: 0,
            runs: Vec::new(),
            free: Vec::new(),
            evictable: BTreeMap::new(),
            use_count: 0,
        }
    }

    /// Sets how many chain blocks the worker's cache can hold. The limit given to [`Self::new`] stays the maximum.
    pub(crate) fn set_limit(&mut self, blocks: usize) {
        self.max_blocks = blocks.min(self.limits.blocks);
    }

    /// Returns the number of blocks.
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// Returns the first blocks of the prompts that are held.
    pub(crate) fn first_blocks(&self) -> impl Iterator<Item = BlockHash> {
        self.runs.iter().filter(|run| run.parent.is_none()).filter_map(|run| run.hashes.first().copied())
    }

    /// Returns how many leading blocks of a chain are held.
    pub(crate) fn depth(&self, chain: &PrefixChain) -> usize {
        self.known_blocks(&chain.ids).0
    }

    /// Records the prompts of one served step. `now` must not go backwards.
    pub(crate) fn record_prompts(&mut self, prompts: &[&PrefixChain], now: Micros, out: &mut Vec<FirstBlockChange>) {
        for chain in prompts {
            self.use_count += 1;
            self.record_prompt(chain, BlockUse { number: self.use_count, at: now }, out);
        }
        self.expire(now, usize::MAX, out);
    }

    fn record_prompt(&mut self, chain: &PrefixChain, used: BlockUse, out: &mut Vec<FirstBlockChange>) {
        let ids = &chain.ids[..chain.ids.len().min(self.max_blocks).min(u32::MAX as usize)];
        let (known, last) = self.known_blocks(ids);
        // A run that begins with the next block but continues another one has the hash of another block by chance.
        let is_taken = ids.get(known).is_some_and(|id| self.starts.contains_key(&id.block_hash()));
        let new = if is_taken { &[] } else { &ids[known..] };
        let Some((at, length)) = self.run_after(last, new) else { return };
        if last.is_none() {
            out.extend(new.first().map(|first| FirstBlockChange::Added(first.block_hash())));
        }
        let before = self.runs[at as usize].oldest_use();
        self.count += new.len();
        let run = &mut self.runs[at as usize];
        run.hashes.extend(new.iter().map(|id| id.block_hash()));
        run.record_use(length + new.len() as u32, used);
        self.requeue(at, before);
    }

    /// Returns how many of a chain's blocks are held, and the run of the last of them with the number of the run's blocks
    /// up to it.
    fn known_blocks(&self, ids: &[PrefixId]) -> (usize, Option<(RunIndex, u32)>) {
        let (mut known, mut last) = (0, None);
        while let Some(run) = ids.get(known).and_then(|id| self.starts.get(&id.block_hash()))
            && self.runs[*run as usize].parent == last
        {
            let (hashes, rest) = (&self.runs[*run as usize].hashes, &ids[known..]);
            // A block's hash covers all blocks before it, so nothing is equal after the first difference.
            let (mut equal, mut end) = (1, hashes.len().min(rest.len()));
            // Most prompts grow, and contain the whole run.
            if hashes[end - 1] == rest[end - 1].block_hash() {
                equal = end;
            }
            while equal < end {
                let middle = equal.midpoint(end);
                match hashes[middle] == rest[middle].block_hash() {
                    true => equal = middle + 1,
                    false => end = middle,
                }
            }
            known += equal;
            last = Some((*run, equal as u32));
        }
        (known, last)
    }

    /// Returns the run to which the `new` blocks behind `parent` are added, and how many of its blocks come before them;
    /// `None` where there are no blocks at all.
    fn run_after(&mut self, parent: Option<(RunIndex, u32)>, new: &[PrefixId]) -> Option<(RunIndex, u32)> {
        let Some(first) = new.first() else { return parent };
        if let Some((run, length)) = parent {
            if self.runs[run as usize].hashes.len() == length as usize {
                return parent;
            }
            let before = self.runs[run as usize].oldest_use();
            *self.runs[run as usize].children.entry(length).or_default() += 1;
            self.requeue(run, before);
        }
        let added = self.free.pop().unwrap_or_else(|| {
            self.runs.push(BlockRun::default());
            (self.runs.len() - 1) as RunIndex
        });
        self.runs[added as usize].parent = parent;
        self.starts.insert(first.block_hash(), added);
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

    /// Removes blocks that are too old or exceed the limit, in at most `max_evictions` evictions of a run's last blocks.
    pub(crate) fn expire(
        &mut self,
        now: Micros,
        max_evictions: usize,
        out: &mut Vec<FirstBlockChange>,
    ) -> ApplyProgress {
        let mut evictions = 0;
        while let Some((used, &run)) = self.evictable.first_key_value() {
            let excess = match now - used.at > self.limits.age {
                true => usize::MAX,
                false => self.count.saturating_sub(self.max_blocks),
            };
            if excess == 0 {
                break;
            }
            if evictions == max_evictions {
                return ApplyProgress::More;
            }
            evictions += 1;
            self.evict_last_blocks(run, *used, excess, out);
        }
        ApplyProgress::Done
    }

    /// Evicts the last blocks of a run, of which `used` is the oldest use: those that no later use covers and no run
    /// continues, at most `most`.
    fn evict_last_blocks(&mut self, at: RunIndex, used: BlockUse, most: usize, out: &mut Vec<FirstBlockChange>) {
        let run = &mut self.runs[at as usize];
        let covered = run.uses.iter().rev().nth(1).map_or(0, |(shorter, _)| *shorter);
        let continued = run.children.keys().next_back().copied().unwrap_or(0);
        let kept = (covered.max(continued) as usize).max(run.hashes.len().saturating_sub(most));
        let start = run.hashes.first().copied();
        self.count -= run.hashes.len() - kept;
        run.hashes.truncate(kept);
        // A long run of which little is left must not keep its memory.
        if run.hashes.capacity() > 2 * run.hashes.len() + SPARE_BLOCKS {
            run.hashes.shrink_to_fit();
        }
        let length = kept as u32;
        match run.uses.last_mut() {
            Some(last) if length > covered => last.0 = length,
            _ => drop(run.uses.pop()),
        }
        self.requeue(at, Some(used));
        if length == 0 {
            if self.runs[at as usize].parent.is_none() {
                out.extend(start.map(FirstBlockChange::Removed));
            }
            start.map(|start| self.starts.remove(&start));
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
}

#[cfg(test)]
mod tests;
