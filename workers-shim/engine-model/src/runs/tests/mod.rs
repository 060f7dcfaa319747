//! The engine by runs: alone by its formulas, part by part, and beside the engine by blocks.

mod beside;
mod disk;
mod engine;
mod pool;
mod recency;
mod restore;
mod soak;
mod timing;

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore as _, SeedableRng as _};
use vocabulary::Tokens;

use crate::runs::{
    Around, DiskSpeed, Happening, Load, Memory, Prompt, RunEngine, RunId, Runs, Seconds, SharedPool, Sizes, Ticket,
    Timing, Where,
};

const TIMING: Timing = Timing {
    token: 1e-3,
    pair: 1e-6,
    chunk: Tokens(100),
    chunk_overhead: 0.0,
    step: 0.01,
    step_beside_chunk: 0.0,
    context_token: 1e-5,
    request: 0.0,
};

fn sizes(device: u64, host: u64) -> Sizes {
    let disk_speed = DiskSpeed { read: 1_000.0, written: 500.0 };
    Sizes {
        device: Tokens(device),
        host: Tokens(host),
        host_tokens_per_second: 10_000.0,
        disk: Tokens::ZERO,
        disk_speed,
    }
}

fn with_disk(device: u64, host: u64, disk: u64) -> Sizes {
    Sizes { disk: Tokens(disk), ..sizes(device, host) }
}

/// An engine by runs, and what it said when.
struct Bench {
    runs: Runs,
    engine: RunEngine,
    shared: Option<SharedPool>,
    now: Seconds,
    said: Vec<(f64, Happening)>,
}

impl Bench {
    fn new(runs: Runs, timing: Timing, sizes: Sizes) -> Self {
        let engine = RunEngine::new(timing, sizes, runs.len());
        Self { runs, engine, shared: None, now: Seconds::ZERO, said: Vec::new() }
    }

    /// Lets time pass, and everything happen that happens meanwhile.
    fn until(&mut self, to: f64) {
        // Far more than any test has events: an engine that announces the same one for ever fails here.
        for _ in 0..100_000 {
            let around = Around { runs: &self.runs, shared: self.shared.as_mut() };
            self.engine.settle(self.now, &around);
            let Some(next) = self.engine.next_event(&around).filter(|next| next.0 <= to) else {
                self.now = Seconds(to);
                return self.happen();
            };
            self.now = next;
            self.happen();
        }
        panic!("the clock stands at {:?}", self.now);
    }

    fn happen(&mut self) {
        let mut out = Vec::new();
        let mut around = Around { runs: &self.runs, shared: self.shared.as_mut() };
        self.engine.settle(self.now, &around);
        self.engine.happen(&mut around, &mut out);
        self.said.extend(out.into_iter().map(|happening| (self.now.0, happening)));
    }

    fn submit(&mut self, prompt: Prompt) {
        self.engine.expect_answer(prompt.tokens);
        self.engine.submit(prompt);
        self.happen();
    }

    fn at(&self, is: impl Fn(&Happening) -> bool) -> f64 {
        self.said.iter().find(|(_, happening)| is(happening)).expect("it happened").0
    }

    fn first_token(&self, ticket: u32) -> f64 {
        self.at(|said| *said == Happening::FirstToken(Ticket(ticket)))
    }

    fn finished(&self, ticket: u32) -> f64 {
        self.at(|said| *said == Happening::Finished(Ticket(ticket)))
    }

    fn started(&self, ticket: u32) -> [u64; 4] {
        let own = |said: &(f64, Happening)| match said.1 {
            Happening::Started(started) if started.ticket == Ticket(ticket) => Some(started),
            _ => None,
        };
        let started = self.said.iter().find_map(own).expect("it has begun");
        [started.local, started.fetched, started.restored, started.computed].map(|tokens| tokens.0)
    }
}

fn asked(ticket: u32, path: &[RunId], tokens: u64, answer: u64) -> Prompt {
    Prompt {
        ticket: Ticket(ticket),
        path: path.into(),
        tokens: Tokens(tokens),
        answer: Tokens(answer),
        resent: None,
        answered: Where::Here,
        fetched: Vec::new(),
        ready: Seconds::ZERO,
        expected: Tokens(tokens),
        expected_work: 0.0,
    }
}

/// Runs after each other from the root.
fn chain(runs: &mut Runs, lengths: &[u32]) -> Vec<RunId> {
    let mut path: Vec<RunId> = Vec::new();
    for length in lengths {
        path.push(runs.add(path.last().copied(), *length));
    }
    path
}

fn near(seen: f64, expected: f64) {
    assert!((seen - expected).abs() < 1e-6 * expected.max(1.0), "{seen} is not {expected}");
}

/// Numbers drawn from a seed.
struct Chance(SplitMix64);

impl Chance {
    fn new(seed: u64) -> Self {
        Self(SplitMix64::from_seed(seed.to_le_bytes()))
    }

    fn below(&mut self, end: u64) -> u64 {
        self.0.next_u64() % end.max(1)
    }
}
