//! Tests of the model through its face: prompts in, answers and events out.

mod batching;
mod disorder;
mod memory;
mod pool;
mod text;
mod transfers;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use vocabulary::Micros;

use crate::{
    CacheKeys, Ending, Engine, Finish, FinishReason, KvEvent, OutputKind, Profile, Reading, Report, Request, RequestId,
    Sampling, Source, Transfer, Voice,
};

pub(super) const EOS: u32 = 2;

pub(super) fn voice() -> Voice {
    Voice::new(&(10..1000).collect::<Vec<_>>(), EOS, &[0, 1]).unwrap()
}

/// Four tokens a block, sixty-four blocks, round times.
pub(super) fn small() -> Profile {
    Profile {
        prefill_tokens_per_second: 10_000.0,
        step_overhead_us: Micros(0),
        decode_step_us: Micros(1_000),
        decode_slowdown_us: Micros(100),
        block_tokens: 4,
        blocks: 64,
        max_running: 4,
        step_tokens: 32,
        context_tokens: 200,
        kv_bytes_per_token: vocabulary::Bytes(1_000),
        link_bytes_per_second: 1e6,
        link_latency_us: Micros(500),
        ..Profile::default()
    }
}

pub(super) fn prompt(seed: u32, tokens: u32) -> Vec<u32> {
    (0..tokens).map(|at| 10 + (seed * 7919 + at * 31) % 900).collect()
}

pub(super) fn request(prompt: &[u32], max_tokens: u32) -> Request {
    static NAMES: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let number = NAMES.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    Request {
        name: Arc::from(format!("r{number}")),
        prompt: prompt.to_vec(),
        sampling: Sampling { max_tokens, ending: Ending::Ignored, ..Sampling::default() },
        keys: CacheKeys::default(),
        transfer: Transfer::None,
        reading: Reading::Cached,
        report: Report::Added,
    }
}

/// An engine, its clock, and everything that it said.
pub(super) struct Rig {
    pub(super) engine: Engine,
    pub(super) now: Micros,
    pub(super) texts: HashMap<RequestId, Vec<u32>>,
    pub(super) times: HashMap<RequestId, Vec<Micros>>,
    pub(super) finishes: HashMap<RequestId, Finish>,
    pub(super) events: Vec<Vec<KvEvent>>,
    pub(super) pulls: Vec<(RequestId, Source)>,
    pub(super) pulled: Vec<Source>,
}

impl Rig {
    pub(super) fn new(profile: Profile) -> Self {
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

    pub(super) fn submit(&mut self, request: Request) -> RequestId {
        self.engine.submit(self.now, request).unwrap()
    }

    pub(super) fn advance(&mut self, to: Micros) {
        self.now = to;
        for output in self.engine.advance(to) {
            assert!(output.at <= to, "nothing happens before its time");
            match output.kind {
                OutputKind::Token { request, token } => {
                    self.texts.entry(request).or_default().push(token);
                    self.times.entry(request).or_default().push(output.at);
                }
                OutputKind::Finished { request, finish } => {
                    assert!(self.finishes.insert(request, finish).is_none(), "a request ends once");
                }
                OutputKind::Pull { request, source } => self.pulls.push((request, source)),
                OutputKind::Pulled { source, .. } => self.pulled.push(source),
                OutputKind::Events(events) => self.events.push(events),
            }
        }
    }

    /// Until `id` is over, or nothing happens any more.
    pub(super) fn finish(&mut self, id: RequestId) -> Finish {
        self.advance(self.now);
        while !self.finishes.contains_key(&id) {
            let next = self.engine.next_event().expect("the request ends some day");
            self.advance(next);
        }
        self.finishes[&id].clone()
    }

    pub(super) fn answer(&mut self, request: Request) -> Vec<u32> {
        let id = self.submit(request);
        self.finish(id);
        self.texts.remove(&id).unwrap_or_default()
    }

    pub(super) fn all_events(&self) -> Vec<KvEvent> {
        self.events.iter().flatten().cloned().collect()
    }

    /// How many copies of each block a listener counts.
    pub(super) fn copies(&self) -> HashMap<u64, i32> {
        let mut copies = HashMap::new();
        for event in self.all_events() {
            match event {
                KvEvent::Stored(stored) => stored.hashes.iter().for_each(|h| *copies.entry(*h).or_insert(0) += 1),
                KvEvent::Removed(hash) => *copies.entry(hash).or_insert(0) -= 1,
                KvEvent::Cleared => copies.clear(),
            }
        }
        copies.retain(|_, count| *count != 0);
        copies
    }
}

pub(super) fn alone(prompt: &[u32], max_tokens: u32) -> Vec<u32> {
    Rig::new(small()).answer(request(prompt, max_tokens))
}

pub(super) fn reason(finish: &Finish) -> FinishReason {
    finish.reason
}
