//! Tests of the model through its interface: prompts in, answers and events out.

mod batching;
mod memory;
mod pool;
mod random_order;
mod text;
mod transfers;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use vocabulary::Micros;

use crate::{
    CacheKeys, CacheReadPolicy, Engine, EngineOutputKind, EngineProfile, EngineRequest, EngineRequestId, EosPolicy,
    FinishReason, FinishedRequest, KvEventMode, PrefixCacheChange, RemoteBlocks, SamplingParams, TokenGenerator,
    TransferRole,
};

pub(super) const EOS: u32 = 2;

pub(super) fn voice() -> TokenGenerator {
    TokenGenerator::new(&(10..1000).collect::<Vec<_>>(), EOS, &[0, 1]).unwrap()
}

/// Sixty-four blocks of four tokens, and round times.
pub(super) fn small_profile() -> EngineProfile {
    EngineProfile {
        prefill_tokens_per_second: 10_000.0,
        step_overhead: Micros(0),
        decode_step: Micros(1_000),
        decode_step_per_request: Micros(100),
        block_size: 4,
        num_gpu_blocks: 64,
        max_num_seqs: 4,
        max_num_batched_tokens: 32,
        max_model_len: 200,
        kv_size_per_token: vocabulary::Bytes(1_000),
        link_bandwidth: 1e6,
        link_latency: Micros(500),
        ..EngineProfile::default()
    }
}

pub(super) fn prompt(seed: u32, tokens: u32) -> Vec<u32> {
    (0..tokens).map(|at| 10 + (seed * 7919 + at * 31) % 900).collect()
}

pub(super) fn request(prompt: &[u32], max_tokens: u32) -> EngineRequest {
    static NAMES: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let number = NAMES.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    EngineRequest {
        name: Arc::from(format!("r{number}")),
        prompt: prompt.to_vec(),
        sampling: SamplingParams { max_tokens, eos_policy: EosPolicy::Ignored, ..SamplingParams::default() },
        keys: CacheKeys::default(),
        transfer: TransferRole::None,
        cache_reads: CacheReadPolicy::Cached,
        kv_report: KvEventMode::New,
    }
}

/// An engine, its clock, and all its outputs.
pub(super) struct EngineHarness {
    pub(super) engine: Engine,
    pub(super) now: Micros,
    pub(super) texts: HashMap<EngineRequestId, Vec<u32>>,
    pub(super) times: HashMap<EngineRequestId, Vec<Micros>>,
    pub(super) finishes: HashMap<EngineRequestId, FinishedRequest>,
    pub(super) events: Vec<Vec<PrefixCacheChange>>,
    pub(super) pulls: Vec<(EngineRequestId, RemoteBlocks)>,
    pub(super) pulled: Vec<RemoteBlocks>,
}

impl EngineHarness {
    pub(super) fn new(profile: EngineProfile) -> Self {
        Self {
            engine: Engine::new(Arc::new(profile), voice(), 99).unwrap(),
            now: Micros(0),
            texts: HashMap::new(),
            times: HashMap::new(),
            finishes: HashMap::new(),
            events: Vec::new(),
            pulls: Vec::new(),
            pulled: Vec::new(),
        }
    }

    pub(super) fn submit(&mut self, request: EngineRequest) -> EngineRequestId {
        self.engine.submit(self.now, request).unwrap()
    }

    pub(super) fn advance(&mut self, to: Micros) {
        self.now = to;
        for output in self.engine.advance(to) {
            assert!(output.at <= to, "nothing happens before its time");
            match output.kind {
                EngineOutputKind::Token { request, token } => {
                    self.texts.entry(request).or_default().push(token);
                    self.times.entry(request).or_default().push(output.at);
                }
                EngineOutputKind::Finished { request, finish } => {
                    assert!(self.finishes.insert(request, finish).is_none(), "a request ends once");
                }
                EngineOutputKind::Pull { request, source } => self.pulls.push((request, source)),
                EngineOutputKind::Pulled { source, .. } => self.pulled.push(source),
                EngineOutputKind::Events(events) => self.events.push(events),
            }
        }
    }

    /// Runs until `id` has ended or nothing happens any more.
    pub(super) fn finish(&mut self, id: EngineRequestId) -> FinishedRequest {
        self.advance(self.now);
        while !self.finishes.contains_key(&id) {
            let next = self.engine.next_event().expect("the request ends some day");
            self.advance(next);
        }
        self.finishes[&id].clone()
    }

    pub(super) fn answer(&mut self, request: EngineRequest) -> Vec<u32> {
        let id = self.submit(request);
        self.finish(id);
        self.texts.remove(&id).unwrap_or_default()
    }

    pub(super) fn all_events(&self) -> Vec<PrefixCacheChange> {
        self.events.iter().flatten().cloned().collect()
    }

    /// Returns the number of copies of each block according to the events.
    pub(super) fn copies(&self) -> HashMap<u64, i32> {
        let mut copies = HashMap::new();
        for event in self.all_events() {
            match event {
                PrefixCacheChange::Stored(stored) => {
                    stored.hashes.iter().for_each(|h| *copies.entry(*h).or_insert(0) += 1)
                }
                PrefixCacheChange::Removed(hash) => *copies.entry(hash).or_insert(0) -= 1,
                PrefixCacheChange::Cleared => copies.clear(),
            }
        }
        copies.retain(|_, count| *count != 0);
        copies
    }
}

pub(super) fn answer_of_fresh_engine(prompt: &[u32], max_tokens: u32) -> Vec<u32> {
    EngineHarness::new(small_profile()).answer(request(prompt, max_tokens))
}

pub(super) fn reason(finish: &FinishedRequest) -> FinishReason {
    finish.reason
}
