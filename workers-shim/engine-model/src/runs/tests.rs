//! Tests of the run-level engine: against its formulas, by part, and in comparison with the block-level engine.

mod block_engine_comparison;
mod disk_tier;
mod lru_list;
mod restore;
mod run_engine;
mod run_pool;
mod soak;
mod timing;

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore as _, SeedableRng as _};
use vocabulary::Tokens;

use crate::runs::{
    DecodeLocation, DiskSpeed, EngineTiming, IdealSharedCache, MemorySizes, OutstandingRequests, PromptTierDepths,
    RunEngine, RunId, RunRequest, RunRequestEvent, RunRequestId, RunTree, Seconds, SharedEngineState,
};

const TIMING: EngineTiming = EngineTiming {
    prefill_token: 1e-3,
    attention_pair: 1e-6,
    chunk_tokens: Tokens(100),
    chunk_overhead: 0.0,
    decode_step: 0.01,
    step_beside_chunk: 0.0,
    context_token: 1e-5,
    decode_request: 0.0,
};

fn sizes(device: u64, host: u64) -> MemorySizes {
    let disk_speed = DiskSpeed { read: 1_000.0, write: 500.0 };
    MemorySizes {
        device: Tokens(device),
        host: Tokens(host),
        host_tokens_per_second: 10_000.0,
        disk: Tokens::ZERO,
        disk_speed,
    }
}

fn with_disk(device: u64, host: u64, disk: u64) -> MemorySizes {
    MemorySizes { disk: Tokens(disk), ..sizes(device, host) }
}

/// A run-level engine and its events with their times.
struct RunEngineHarness {
    runs: RunTree,
    engine: RunEngine,
    shared: Option<IdealSharedCache>,
    now: Seconds,
    events: Vec<(f64, RunRequestEvent)>,
}

impl RunEngineHarness {
    fn new(runs: RunTree, timing: EngineTiming, sizes: MemorySizes) -> Self {
        let engine = RunEngine::new(timing, sizes, runs.len());
        Self { runs, engine, shared: None, now: Seconds::ZERO, events: Vec::new() }
    }

    /// Advances the time to `to` and handles all events until then.
    fn run_until(&mut self, to: f64) {
        // Far more than any test has events: an engine that returns the same event forever fails here.
        for _ in 0..100_000 {
            let around = SharedEngineState { runs: &self.runs, shared: self.shared.as_mut() };
            self.engine.advance_clock(self.now, &around);
            let Some(next) = self.engine.next_event(&around).filter(|next| next.0 <= to) else {
                self.now = Seconds(to);
                return self.handle_due_work();
            };
            self.now = next;
            self.handle_due_work();
        }
        panic!("the clock stands at {:?}", self.now);
    }

    fn handle_due_work(&mut self) {
        let mut out = Vec::new();
        let mut around = SharedEngineState { runs: &self.runs, shared: self.shared.as_mut() };
        self.engine.advance_clock(self.now, &around);
        self.engine.handle_due_work(&mut around, &mut out);
        self.events.extend(out.into_iter().map(|happening| (self.now.0, happening)));
    }

    fn submit(&mut self, prompt: RunRequest) {
        self.engine.expect_answer(prompt.tokens);
        self.engine.submit(prompt);
        self.handle_due_work();
    }

    fn time_of(&self, is: impl Fn(&RunRequestEvent) -> bool) -> f64 {
        self.events.iter().find(|(_, happening)| is(happening)).expect("it happened").0
    }

    fn first_token(&self, ticket: u32) -> f64 {
        self.time_of(|said| *said == RunRequestEvent::FirstToken(RunRequestId(ticket)))
    }

    fn finished(&self, ticket: u32) -> f64 {
        self.time_of(|said| *said == RunRequestEvent::Finished(RunRequestId(ticket)))
    }

    fn started(&self, ticket: u32) -> [u64; 4] {
        let own = |said: &(f64, RunRequestEvent)| match said.1 {
            RunRequestEvent::Started(started) if started.ticket == RunRequestId(ticket) => Some(started),
            _ => None,
        };
        let started = self.events.iter().find_map(own).expect("it has begun");
        [started.local, started.fetched, started.restored, started.computed].map(|tokens| tokens.0)
    }
}

fn run_request(ticket: u32, path: &[RunId], tokens: u64, answer: u64) -> RunRequest {
    RunRequest {
        ticket: RunRequestId(ticket),
        path: path.into(),
        tokens: Tokens(tokens),
        answer: Tokens(answer),
        expected_history: None,
        decode_location: DecodeLocation::Local,
        fetched_runs: Vec::new(),
        ready_at: Seconds::ZERO,
        expected: Tokens(tokens),
        expected_work: 0.0,
    }
}

/// Adds consecutive runs from the root.
fn chain(runs: &mut RunTree, lengths: &[u32]) -> Vec<RunId> {
    let mut path: Vec<RunId> = Vec::new();
    for length in lengths {
        path.push(runs.add(path.last().copied(), *length));
    }
    path
}

fn assert_near(seen: f64, expected: f64) {
    assert!((seen - expected).abs() < 1e-6 * expected.max(1.0), "{seen} is not {expected}");
}

/// Seeded random numbers.
struct PromptRng(SplitMix64);

impl PromptRng {
    fn new(seed: u64) -> Self {
        Self(SplitMix64::from_seed(seed.to_le_bytes()))
    }

    fn below(&mut self, end: u64) -> u64 {
        self.0.next_u64() % end.max(1)
    }
}
