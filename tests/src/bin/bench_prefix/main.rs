//! Cost of resolving a step's prompt and looking up its holders: incrementally and in full, on one core, without
//! HTTP.
//!
//!     bench_prefix [--quick] [--json FILE] [--model FOLDER]
//!
//! Every prompt is compared with the fully computed one: a difference, or a step that was not incremental, fails.
//! Times never fail; they are only compared with the goals.

mod conversation;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use prefix::{
    ChatBodyLayout, ConversationCache, ConversationQuery, ExtraPromptInputs, LookupTier, ModelTokenizer,
    ModelTokenizerSource, PrefixError, PromptResolver, PromptResolverOptions, PromptWorkLimits,
};
use residency::{DepthHint, PrefixClosure, ResidencyChange, ResidencyIndex};
use serde::Serialize;
use vocabulary::{
    BlockHash, Bytes, DpRank, HashSeed, KvIndexState, ModelNamespace, Overlap, PrefixChain, Tier, Tokens, WorkerId,
};

use conversation::ConversationText;

/// Tokens per step.
const STEP_TOKENS: u64 = 800;
/// Number of workers that hold blocks.
const WORKERS: u64 = 32;
/// Goal at 128K tokens: median in microseconds, and minimum ratio of a full computation to it.
const GOAL: (f64, f64) = (60.0, 40.0);
const GOAL_TOKENS: u64 = 128 << 10;
/// Goal at 512K tokens: median in microseconds.
const LONG_GOAL: f64 = 200.0;
const LONG_GOAL_TOKENS: u64 = 512 << 10;

/// Errors of the benchmark.
#[derive(Debug, thiserror::Error)]
enum PrefixBenchError {
    /// The command line is wrong.
    #[error("{0}; usage: bench_prefix [--quick] [--json FILE] [--model FOLDER]")]
    Usage(String),
    /// The model's files could not be loaded.
    #[error(transparent)]
    Model(#[from] PrefixError),
    /// A result that must not occur.
    #[error("at {tokens} tokens: {what}")]
    Wrong { tokens: u64, what: String },
    /// The result could not be written.
    #[error("{0}: {1}")]
    Write(PathBuf, std::io::Error),
}

struct Options {
    sizes: Vec<u64>,
    rounds: u64,
    held: u64,
    model: PathBuf,
    json: Option<PathBuf>,
}

impl Options {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, PrefixBenchError> {
        let mut options = Self {
            sizes: [8, 32, 128, 512].map(|size| size << 10).to_vec(),
            rounds: 200,
            held: 2_000_000,
            model: "configs/models/tiny".into(),
            json: None,
        };
        while let Some(argument) = arguments.next() {
            let mut value =
                || arguments.next().ok_or_else(|| PrefixBenchError::Usage(format!("{argument} needs a value")));
            match argument.as_str() {
                "--quick" => (options.sizes, options.rounds, options.held) = (vec![8 << 10, 128 << 10], 20, 100_000),
                "--json" => options.json = Some(value()?.into()),
                "--model" => options.model = value()?.into(),
                _ => return Err(PrefixBenchError::Usage(format!("unknown option {argument}"))),
            }
        }
        Ok(options)
    }
}

/// Result for one context size. Times in microseconds.
#[derive(Debug, Serialize)]
struct ContextSizeResult {
    tokens: u64,
    body_bytes: usize,
    /// Prompt resolution and lookup together.
    p50: f64,
    p99: f64,
    identity_p50: f64,
    lookup_p50: f64,
    /// Full computation of the same body, with all its text segments in the tokenizer's cache.
    cold_p50: f64,
    ratio: f64,
    /// Memory of a session's state, and the part of it that is block hashes.
    state_bytes: u64,
    block_bytes: u64,
}

/// Residency index filled like that of a large fleet.
struct FilledIndex(ResidencyIndex, Vec<residency::SourceSlot>);

impl FilledIndex {
    fn filled_with(held: u64) -> Self {
        let mut index = ResidencyIndex::new();
        let mut slots = Vec::new();
        for worker in 0..WORKERS {
            let slot =
                index.add_source(WorkerId(worker), DpRank(0), KvIndexState::default()).expect("32 are not too many");
            let spread = |n: u64| (n * WORKERS + worker).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let blocks: Vec<ResidencyChange> =
                (0..held / WORKERS).map(|n| ResidencyChange::Added(BlockHash(spread(n)), Tier::Hbm)).collect();
            index.apply(slot, &blocks);
            index.set_closure(slot, PrefixClosure::Whole);
            slots.push(slot);
        }
        Self(index, slots)
    }

    /// Makes three workers hold a prompt up to its last step.
    fn hold_prompt(&mut self, number: u64, chain: &PrefixChain) {
        let blocks: Vec<ResidencyChange> =
            chain.ids.iter().map(|id| ResidencyChange::Added(id.block_hash(), Tier::Hbm)).collect();
        (0..3).for_each(|n| self.0.apply(self.1[((number + n) % WORKERS) as usize], &blocks));
    }

    /// Looks up as routers do, starting at the depths where the session's holders ended last time. Returns the time,
    /// too.
    fn lookup(&self, chain: &PrefixChain, before: DepthHint) -> (Vec<Overlap>, Duration) {
        let since = Instant::now();
        let found = self.0.overlaps_with_hint(chain, &before.depths());
        std::hint::black_box(DepthHint::from_depths(&found));
        (found, since.elapsed())
    }
}

fn main() -> ExitCode {
    let done = Options::parse(std::env::args().skip(1)).and_then(|options| run(&options));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("bench_prefix: {error}"));
            ExitCode::FAILURE
        }
    }
}

#[expect(clippy::print_stdout, reason = "a program's answer")]
fn say(line: &str) {
    println!("{line}");
}

fn run(options: &Options) -> Result<(), PrefixBenchError> {
    let text = Arc::new(ModelTokenizer::load(ModelTokenizerSource::Folder(options.model.clone()))?);
    let namespace = ModelNamespace { model: "m".into(), revision: "".into(), tokenizer: "".into() };
    let limits = PromptWorkLimits::default();
    let made_of =
        PromptResolverOptions { namespace, seed: HashSeed(1), block_size: Tokens(16), text: Some(text), limits };
    let identifier = PromptResolver::new(made_of);
    say(" context      body   identity + lookup, us            cold, us   ratio   state without block names");
    let mut rows = Vec::new();
    for tokens in &options.sizes {
        let row = measure(&identifier, *tokens, options)?;
        say(&format!(
            "{:>7}K {:>6} KB   p50 {:>6.1} ({:.1} + {:.1}), p99 {:>6.1}   {:>8.0}  {:>5.0} x   {:.1} KB (and {:.0} KB)",
            row.tokens >> 10,
            row.body_bytes >> 10,
            row.p50,
            row.identity_p50,
            row.lookup_p50,
            row.p99,
            row.cold_p50,
            row.ratio,
            (row.state_bytes - row.block_bytes) as f64 / 1024.0,
            row.block_bytes as f64 / 1024.0,
        ));
        rows.push(row);
    }
    let met = |is: bool| if is { "met" } else { "not met" };
    if let Some(row) = rows.iter().find(|row| row.tokens == GOAL_TOKENS) {
        say(&format!("at 128K: {} us at the median {}", GOAL.0, met(row.p50 <= GOAL.0)));
        say(&format!("at 128K: at most 1/{} of a cold step {}", GOAL.1, met(row.ratio >= GOAL.1)));
    }
    if let Some(row) = rows.iter().find(|row| row.tokens == LONG_GOAL_TOKENS) {
        say(&format!("at 512K: {LONG_GOAL} us at the median {}", met(row.p50 <= LONG_GOAL)));
    }
    if let Some(file) = &options.json {
        let json = serde_json::to_vec_pretty(&rows).expect("numbers are JSON");
        std::fs::write(file, json).map_err(|error| PrefixBenchError::Write(file.clone(), error))?;
    }
    Ok(())
}

/// Average bytes per token of this text.
fn bytes_per_token(resolver: &PromptResolver) -> f64 {
    let mut talk = ConversationText::begin(u64::MAX);
    talk.step(100_000);
    let prompt = resolver.resolve_chat(talk.body().as_bytes(), ExtraPromptInputs::default());
    talk.bytes() as f64 / prompt.chain.tokens.0 as f64
}

fn read_layout(tokens: u64, body: &str) -> Result<ChatBodyLayout<'_>, PrefixBenchError> {
    ChatBodyLayout::read(body.as_bytes()).ok_or_else(|| PrefixBenchError::Wrong { tokens, what: "no messages".into() })
}

fn measure(resolver: &PromptResolver, tokens: u64, options: &Options) -> Result<ContextSizeResult, PrefixBenchError> {
    let wrong = |what: String| PrefixBenchError::Wrong { tokens, what };
    let size = bytes_per_token(resolver);
    let step = (STEP_TOKENS as f64 * size) as usize;
    let mut fleet = FilledIndex::filled_with(options.held);
    let conversations = ConversationCache::new(Bytes(256 << 20));
    let (mut all, mut identities, mut lookups, mut colds) = (vec![], vec![], vec![], vec![]);
    let (mut body_bytes, mut state, mut blocks) = (0, 0, 0);
    for number in 0..options.rounds {
        conversations.clear();
        let memory = ConversationQuery { cache: &conversations, tenant: "t", session: Some(u128::from(number)) };
        let mut talk = ConversationText::begin(number);
        while (talk.bytes() as f64) < tokens as f64 * size {
            talk.step(step);
        }
        // Prepares a running conversation: one step in full, one extended from it.
        let known =
            resolver.resolve_and_cache(read_layout(tokens, &talk.body())?, ExtraPromptInputs::default(), None, memory);
        talk.step(step);
        resolver.extend(read_layout(tokens, &talk.body())?, ExtraPromptInputs::default(), memory);
        fleet.hold_prompt(number, &known.prompt.chain);
        let before = DepthHint::from_depths(&fleet.0.overlaps_of_chain(&known.prompt.chain));
        talk.step(step);
        let body = talk.body();
        // Scanning the request is not measured; routers do it for every request anyway.
        let layout = read_layout(tokens, &body)?;
        let since = Instant::now();
        let grown = resolver.extend(layout, ExtraPromptInputs::default(), memory);
        let identity = since.elapsed();
        let grown = grown.filter(|grown| grown.tier == LookupTier::Session);
        let grown = grown.ok_or_else(|| wrong("the step was not gone on with where the last one ended".into()))?;
        let (found, lookup) = fleet.lookup(&grown.prompt.chain, before);
        let since = Instant::now();
        let whole = resolver.resolve_chat(body.as_bytes(), ExtraPromptInputs::default());
        let cold_found = fleet.0.overlaps_of_chain(&whole.chain);
        colds.push(since.elapsed().as_secs_f64() * 1e6);
        if grown.prompt.chain != whole.chain || found != cold_found || found.len() < 3 {
            return Err(wrong(format!("session {number} differs from what the whole prompt is")));
        }
        identities.push(identity.as_secs_f64() * 1e6);
        lookups.push(lookup.as_secs_f64() * 1e6);
        all.push((identity + lookup).as_secs_f64() * 1e6);
        (body_bytes, state, blocks) = (body.len(), conversations.memory_bytes().0, 16 * whole.chain.blocks().0);
    }
    let (p50, cold_p50) = (quantile(&mut all, 0.5), quantile(&mut colds, 0.5));
    Ok(ContextSizeResult {
        tokens,
        body_bytes,
        p50,
        p99: quantile(&mut all, 0.99),
        identity_p50: quantile(&mut identities, 0.5),
        lookup_p50: quantile(&mut lookups, 0.5),
        cold_p50,
        ratio: cold_p50 / p50,
        state_bytes: state,
        block_bytes: blocks.min(state),
    })
}

fn quantile(times: &mut [f64], part: f64) -> f64 {
    times.sort_by(f64::total_cmp);
    times[((times.len() - 1) as f64 * part).round() as usize]
}
