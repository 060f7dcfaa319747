//! An accepted request: its tokens, its blocks, and how many tokens are computed.

use std::ops::Range;
use std::sync::Arc;
use xxhash_rust::xxh3::Xxh3;

use vocabulary::Micros;

use crate::pool::{BlockContent, BlockId, BlockPool};
use crate::token_generator::{KvFingerprint, TokenGenerator};
use crate::{
    BlockImage, CacheKeys, CacheReadPolicy, EngineRequest, FinishReason, FinishedRequest, KvEventMode,
    PrefixCacheChange, SamplingParams, StoredBlocks, TransferRole,
};

/// A live request.
pub(crate) struct Sequence {
    pub(crate) name: Arc<str>,
    pub(crate) sampling: SamplingParams,
    pub(crate) transfer: TransferRole,
    cache_reads: CacheReadPolicy,
    kv_report: KvEventMode,
    pub(crate) tokens: Vec<u32>,
    pub(crate) memory: SequenceBlocks,
    pub(crate) counts: SequenceStats,
}

pub(crate) struct SequenceBlocks {
    keys: CacheKeys,
    root: u64,
    block_tokens: usize,
    /// Hashes of the complete blocks of its tokens, computed on demand.
    block_keys: Vec<u64>,
    pub(crate) blocks: Vec<BlockId>,
    /// Tokens whose KV is computed.
    pub(crate) computed: usize,
    /// Leading blocks that are in the prefix cache.
    sealed: usize,
    /// The fingerprint over all complete blocks.
    context: KvFingerprint,
}

#[derive(Clone, Default)]
pub(crate) struct SequenceStats {
    pub(crate) prompt: usize,
    /// None until the cache was looked up.
    pub(crate) cached: Option<usize>,
    pub(crate) external: usize,
    pub(crate) created: usize,
    pub(crate) arrived: Micros,
    pub(crate) first_token: Option<Micros>,
}

impl Sequence {
    pub(crate) fn new(request: EngineRequest, root: u64, block_tokens: u32, arrived: Micros) -> Self {
        let counts = SequenceStats { prompt: request.prompt.len(), arrived, ..SequenceStats::default() };
        let memory = SequenceBlocks {
            context: KvFingerprint::root(request.keys.adapter.as_deref()),
            keys: request.keys,
            root,
            block_tokens: block_tokens as usize,
            block_keys: Vec::new(),
            blocks: Vec::new(),
            computed: 0,
            sealed: 0,
        };
        Self {
            name: request.name,
            sampling: request.sampling,
            transfer: request.transfer,
            cache_reads: request.cache_reads,
            kv_report: request.kv_report,
            tokens: request.prompt,
            memory,
            counts,
        }
    }

    /// Returns the number of generated tokens.
    pub(crate) fn generated(&self) -> usize {
        self.tokens.len() - self.counts.prompt
    }

    /// Returns the tokens whose KV must be computed before the next one can be sampled.
    pub(crate) fn pending_tokens(&self) -> usize {
        self.tokens.len() - self.memory.computed
    }

    /// Returns whether only the last token is still to be computed.
    pub(crate) fn is_decoding(&self) -> bool {
        self.pending_tokens() == 1 && self.generated() > 0
    }

    /// Takes over the longest cached prefix, except for the last token, which must be computed to sample the next one.
    /// Returns an event about blocks found, if the request asked for these to be reported.
    pub(crate) fn adopt_prefix(&mut self, pool: &mut BlockPool) -> Option<PrefixCacheChange> {
        let most = match self.cache_reads {
            CacheReadPolicy::Cached => (self.tokens.len() - 1) / self.memory.block_tokens,
            CacheReadPolicy::Ignored => 0,
        };
        self.memory.adopt_cached(&self.tokens, most, pool);
        let found = self.memory.computed.min(self.counts.prompt);
        let first = self.counts.cached.is_none();
        self.counts.cached.get_or_insert(found);
        let all = 0..self.memory.sealed;
        let reports_all = first && self.kv_report == KvEventMode::Full && !all.is_empty();
        reports_all.then(|| PrefixCacheChange::Stored(self.memory.describe_stored(all, &self.tokens)))
    }

    /// Returns the number of blocks to allocate for `tokens` more tokens.
    pub(crate) fn missing_blocks(&self, tokens: usize) -> usize {
        (self.memory.computed + tokens).div_ceil(self.memory.block_tokens).saturating_sub(self.memory.blocks.len())
    }

    /// Computes `count` tokens, whose blocks must be allocated. Returns what was added to the prefix cache.
    pub(crate) fn compute(
        &mut self,
        count: usize,
        pool: &mut BlockPool,
        generator: &TokenGenerator,
    ) -> Option<PrefixCacheChange> {
        let to = self.memory.computed + count;
        self.memory.fill(&self.tokens[..to], pool, generator);
        self.seal(pool)
    }

    /// Adds complete blocks to the prefix cache.
    pub(crate) fn seal(&mut self, pool: &mut BlockPool) -> Option<PrefixCacheChange> {
        let stored = self.memory.seal(&self.tokens, pool)?;
        let in_prompt = self.counts.prompt.min(self.memory.sealed * self.memory.block_tokens);
        let had = self.memory.sealed * self.memory.block_tokens - stored.tokens.len();
        self.counts.created += in_prompt.saturating_sub(had);
        Some(PrefixCacheChange::Stored(stored))
    }

    /// Completes a transfer of the next `count` tokens and adds their blocks to the prefix cache. At least the last
    /// token remains to be computed.
    pub(crate) fn receive(
        &mut self,
        count: usize,
        images: Vec<BlockImage>,
        (pool, voice): (&mut BlockPool, &TokenGenerator),
    ) -> Option<PrefixCacheChange> {
        let received = self.memory.computed + count;
        let used = received.min(self.tokens.len() - 1);
        self.memory.receive((received, used), images, pool, voice);
        let stored = self.seal(pool);
        self.memory.computed = used;
        stored
    }

    /// Returns the fingerprint of the KV so far.
    pub(crate) fn state(&self, pool: &BlockPool) -> KvFingerprint {
        self.memory.state(pool)
    }

    /// Returns whether sampling `token` ends the answer.
    pub(crate) fn ends_with(&self, token: u32, eos: u32, context: u32) -> Option<FinishReason> {
        let length = self.generated();
        let may_stop = length >= self.sampling.min_tokens as usize;
        if may_stop && self.sampling.eos_policy == crate::EosPolicy::Natural && token == eos {
            return Some(FinishReason::Stop);
        }
        if may_stop && self.sampling.stop.contains(&token) {
            return Some(FinishReason::Stop);
        }
        let full = length >= self.sampling.max_tokens as usize || self.tokens.len() >= context as usize;
        full.then_some(FinishReason::Length)
    }

    /// Drops all KV in order to start again.
    pub(crate) fn reset_kv(&mut self, pool: &mut BlockPool) {
        pool.release(&self.memory.take_blocks());
    }

    pub(crate) fn finish(&self, reason: FinishReason, at: Micros) -> FinishedRequest {
        FinishedRequest {
            reason,
            prompt: self.counts.prompt as u32,
            cached: self.counts.cached.unwrap_or(0) as u32,
            external: self.counts.external as u32,
            created: self.counts.created as u32,
            generated: self.generated() as u32,
            arrived: self.counts.arrived,
            first_token: self.counts.first_token.unwrap_or(at),
            handoff: None,
        }
    }
}

impl SequenceBlocks {
    fn block_key_at(&mut self, block: usize, tokens: &[u32]) -> u64 {
        while self.block_keys.len() <= block {
            let at = self.block_keys.len() * self.block_tokens;
            let parent = self.block_keys.last().copied();
            self.block_keys.push(block_key(self.root, parent, &tokens[at..at + self.block_tokens], &self.keys));
        }
        self.block_keys[block]
    }

    fn adopt_cached(&mut self, tokens: &[u32], most: usize, pool: &mut BlockPool) {
        for block in 0..most {
            let Some(id) = ({ pool.acquire_cached(self.block_key_at(block, tokens)) }) else { break };
            self.blocks.push(id);
            self.context = self.context.extend_block(pool.content(id).end);
            self.sealed += 1;
            self.computed += self.block_tokens;
        }
    }

    fn fill(&mut self, tokens: &[u32], pool: &mut BlockPool, generator: &TokenGenerator) {
        for (at, token) in tokens.iter().enumerate().skip(self.computed) {
            let (block, offset) = (at / self.block_tokens, at % self.block_tokens);
            let content = pool.content_mut(self.blocks[block]);
            match offset {
                0 => *content = BlockContent::empty(self.context),
                _ => content.truncate(offset, generator),
            }
            content.push(*token, generator);
            if offset + 1 == self.block_tokens {
                self.context = self.context.extend_block(content.end);
            }
        }
        self.computed = tokens.len();
    }

    fn seal(&mut self, tokens: &[u32], pool: &mut BlockPool) -> Option<StoredBlocks> {
        let (from, to) = (self.sealed, self.computed / self.block_tokens);
        if to <= from {
            return None;
        }
        let stored = self.describe_stored(from..to, tokens);
        for (id, hash) in self.blocks[from..to].iter().zip(&stored.hashes) {
            pool.seal(*id, *hash);
        }
        self.sealed = to;
        Some(stored)
    }

    fn describe_stored(&mut self, blocks: Range<usize>, tokens: &[u32]) -> StoredBlocks {
        StoredBlocks {
            parent: blocks.start.checked_sub(1).map(|block| self.block_key_at(block, tokens)),
            hashes: blocks.clone().map(|block| self.block_key_at(block, tokens)).collect(),
            tokens: tokens[blocks.start * self.block_tokens..blocks.end * self.block_tokens].to_vec(),
            salt: self.keys.salt.clone().filter(|_| blocks.start == 0),
            adapter: self.keys.adapter.clone(),
        }
    }

    fn state(&self, pool: &BlockPool) -> KvFingerprint {
        match self.computed % self.block_tokens {
            0 => self.context,
            _ => self.context.extend_block(pool.content(self.blocks[self.computed / self.block_tokens]).end),
        }
    }

    /// Writes transferred contents into the blocks that were not found here, up to `received` tokens, of which the
    /// first `used` are not computed again. Parts that were not transferred stay garbage, like memory that was never
    /// written.
    pub(crate) fn receive(
        &mut self,
        (received, used): (usize, usize),
        images: Vec<BlockImage>,
        pool: &mut BlockPool,
        generator: &TokenGenerator,
    ) {
        let mut images = images.into_iter();
        let whole = used / self.block_tokens;
        for block in self.sealed..received.div_ceil(self.block_tokens) {
            let content = pool.content_mut(self.blocks[block]);
            if let Some(image) = images.next() {
                *content = BlockContent::of(image.start, &image.tokens, generator);
            }
            if block < whole {
                content.truncate(self.block_tokens, generator);
                self.context = self.context.extend_block(content.end);
            }
        }
        self.computed = received;
    }

    pub(crate) fn take_blocks(&mut self) -> Vec<BlockId> {
        self.computed = 0;
        self.sealed = 0;
        self.context = KvFingerprint::root(self.keys.adapter.as_deref());
        std::mem::take(&mut self.blocks)
    }
}

/// Returns the engine's hash of the block that holds `tokens` and follows `parent`. Opaque to everybody else, because
/// the root differs per engine.
fn block_key(root: u64, parent: Option<u64>, tokens: &[u32], keys: &CacheKeys) -> u64 {
    let mut hash = Xxh3::with_seed(root);
    hash.update(&parent.unwrap_or(root).to_le_bytes());
    for token in tokens {
        hash.update(&token.to_le_bytes());
    }
    if let (None, Some(salt)) = (parent, &keys.salt) {
        hash.update(b"salt");
        hash.update(salt.as_bytes());
    }
    if let Some(adapter) = &keys.adapter {
        hash.update(b"adapter");
        hash.update(adapter.as_bytes());
    }
    hash.digest()
}
