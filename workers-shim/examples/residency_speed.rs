//! What the residency index costs: `just bench-residency`.
//!
//! 32 workers hold 2 million copies of blocks; long sessions lie at three of them. Says what one lookup of 8,192 blocks,
//! one block of an event and one held block cost, by part, and what lookups take while a burst of events is applied: as the
//! clock shows it, without what the thread waited for a core of this machine, and how many times as much as before.

use std::fs::{File, read_to_string};
use std::hint::black_box;
use std::io::Write as _;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use residency::{
    Batch, Change, DecodeError, Event, Feed, Index, Limits, Near, Shape, Slot, Source, SourceRules, Stored, decode,
};
use vocabulary::{BlockHash, Chain, DpRank, Knowledge, Namespace, PrefixId, RootKeys, Seed, Tier, Tokens, WorkerId};
use workers_shim::events::SharedIndex;

const WORKERS: u64 = 32;
const REPLICAS: u64 = 3;
const CHAIN: usize = 8192;
const COPIES: usize = 2 << 20;
const SESSIONS: usize = COPIES / (CHAIN * REPLICAS as usize);
/// Blocks that all sessions share, as a system prompt is.
const SHARED: usize = 512;
const LOOKUPS: usize = 20_000;
const BLOCK: u64 = 16;
const BURST: usize = 1 << 20;
/// Blocks in one event: a prefill step of 512 tokens.
const EVENT: usize = 32;
/// Messages that are decoded, then applied, while they are in the processor's cache.
const TURN: usize = 32;
/// Ids of tokens, which say how long they are in a message.
const VOCABULARY: u32 = 152_064;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let before = resident()?;
    let mut index = Index::new();
    let slots: Vec<Slot> =
        (0..WORKERS).map(|n| index.join(WorkerId(n), DpRank(0), Knowledge::Exact)).collect::<Result<_, _>>()?;
    let sessions: Vec<Vec<BlockHash>> = (0..SESSIONS).map(chain).collect();
    let started = Instant::now();
    fill(&mut index, &slots, &sessions);
    let filled = started.elapsed();
    let held = SESSIONS * CHAIN * REPLICAS as usize;
    // The chains themselves are the sessions', not the index's.
    let own = resident()?.saturating_sub(before).saturating_sub(SESSIONS * CHAIN * size_of::<BlockHash>());
    say(format_args!("{WORKERS} workers hold {} blocks, {held} copies, in chains of {CHAIN}", index.blocks()))?;
    say(format_args!(
        "index: {:.1} bytes a held copy, {:.1} a block of three",
        each(own, held),
        each(own, index.blocks())
    ))?;
    say(format_args!("index: {:.0} ns to hold one copy", nanos(filled, held)))?;
    lookups(&index, &sessions)?;
    drop((index, sessions));
    burst()
}

/// Shared blocks first, then the session's own.
fn chain(session: usize) -> Vec<BlockHash> {
    let own = (session as u64 + 1) << 32;
    (0..CHAIN as u64).map(|at| spread(if at < SHARED as u64 { at + 1 } else { own + at })).map(BlockHash).collect()
}

/// An even hash of a counter (splitmix64).
fn spread(counter: u64) -> u64 {
    let mixed = (counter ^ (counter >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

fn fill(index: &mut Index, slots: &[Slot], sessions: &[Vec<BlockHash>]) {
    for (number, session) in sessions.iter().enumerate() {
        for replica in 0..REPLICAS as usize {
            let slot = slots[(number * 7 + replica * 11) % slots.len()];
            for part in session.chunks(EVENT) {
                let changes: Vec<Change> = part.iter().map(|hash| Change::Held(*hash, Tier::Hbm)).collect();
                index.apply(slot, &changes);
            }
        }
    }
    slots.iter().for_each(|slot| index.shape(*slot, Shape::Whole));
}

/// Each lookup asks for another session, so that its blocks are in no cache of the processor's; then again for one.
fn lookups(index: &Index, sessions: &[Vec<BlockHash>]) -> Result<(), Failure> {
    let of = |which: &dyn Fn(usize) -> usize| {
        let took = (0..LOOKUPS).map(|round| {
            let session = &sessions[which(round)];
            // A session is somewhere between its steps: its newest blocks are held by nobody yet.
            let length = CHAIN - (round * 97) % 64;
            let started = Instant::now();
            black_box(index.overlaps(black_box(&session[..length])));
            started.elapsed()
        });
        Spread::of(took.collect())
    };
    say(format_args!(
        "lookup of {CHAIN} blocks, another session each time: {}",
        of(&|round| (round * 31) % sessions.len())
    ))?;
    say(format_args!("lookup of {CHAIN} blocks, the same session again: {}", of(&|_| 3)))?;
    let chains: Vec<Chain> = sessions.iter().map(|session| prompt(session)).collect();
    let near = Near::of(&index.overlaps(&sessions[0])).depths();
    let told = |which: &dyn Fn(usize) -> usize| {
        let took = (0..LOOKUPS).map(|round| {
            let chain = &chains[which(round)];
            let started = Instant::now();
            black_box(index.overlaps_near(black_box(chain), &near));
            started.elapsed()
        });
        Spread::of(took.collect())
    };
    say(format_args!(
        "told where its holders ended, another session each time: {}",
        told(&|round| (round * 31) % chains.len())
    ))?;
    say(format_args!("told where its holders ended, the same session again: {}", told(&|_| 3)))
}

/// A session's next prompt, with some blocks that nobody holds yet.
fn prompt(session: &[BlockHash]) -> Chain {
    let new = (1..=50).map(|at| BlockHash(spread(at << 50)));
    let ids = session.iter().copied().chain(new).map(|hash| PrefixId(u128::from(hash.0))).collect();
    Chain { root: PrefixId(0), block: Tokens(BLOCK), ids, tokens: Tokens(0) }
}

/// Events of three workers that hold the same, then of one while another thread looks.
fn burst() -> Result<(), Failure> {
    let namespace = Namespace { model: "m".into(), revision: "".into(), tokenizer: "t".into() };
    let rules = SourceRules::new(Tokens(BLOCK), Seed(1), namespace);
    let root = rules.namespace.root(rules.seed, RootKeys::default());
    let asked = Chain::over_tokens(root, rules.seed, rules.block, &tokens(0, 0..CHAIN));
    let messages: Vec<Vec<u8>> = (0..2 * BURST / EVENT).map(stored).collect::<Result<_, _>>()?;
    // The first half of each chain is there before anybody looks.
    let (known, coming) = messages.split_at(messages.len() / 2);
    parts(&rules, known)?;
    let index = SharedIndex::new();
    let mut feeds: Vec<Feed> =
        (0..REPLICAS).map(|worker| Feed::new(WorkerId(worker), DpRank(0), rules.clone())).collect();
    let before = resident()?;
    let first = feeds.iter_mut().map(|feed| apply(&index, feed, known)).collect::<Result<Vec<_>, _>>()?;
    let own = resident()?.saturating_sub(before);
    say(format_args!("index and sources: {:.1} bytes a copy at {REPLICAS} replicas", each(own, feeds.len() * BURST)))?;
    for (replica, took) in first.iter().enumerate() {
        say(format_args!("replica {} of {BURST} blocks: {took}", replica + 1))?;
    }
    let stop = AtomicBool::new(false);
    let quiet = look(&index, &asked, |seen| seen < LOOKUPS)?;
    let (took, busy) = std::thread::scope(|scope| -> Result<_, Failure> {
        let looking =
            scope.spawn(|| look(&index, &asked, |_| !stop.load(Ordering::Relaxed)).map_err(|error| error.to_string()));
        let took = apply(&index, &mut feeds[0], coming);
        stop.store(true, Ordering::Relaxed);
        Ok((took?, looking.join().map_err(|_| "the looking thread failed")??))
    })?;
    say(format_args!("a burst of {BURST} more, in events of {EVENT}: {took}"))?;
    let evicted: Vec<Vec<u8>> = (messages.len() / 2..messages.len()).rev().map(removed).collect::<Result<_, _>>()?;
    say(format_args!("evicted again, leaves first: {}", apply(&index, &mut feeds[0], &evicted)?))?;
    say(format_args!("stored again, where nothing grows: {}", apply(&index, &mut feeds[0], coming)?))?;
    compared(&quiet, &busy)
}

/// Lookups before and during a burst.
fn compared(quiet: &[Spread; 3], busy: &[Spread; 3]) -> Result<(), Failure> {
    let how = ["by the clock", "without waiting for a core", "nor for who applies to get one"];
    for (place, how) in how.into_iter().enumerate() {
        say(format_args!("lookups before the burst, {how}: {}", quiet[place]))?;
        say(format_args!("lookups during the burst, {how}: {}", busy[place]))?;
        let [p50, p99] = [500, 990].map(|at| busy[place].at(at).as_secs_f64() / quiet[place].at(at).as_secs_f64());
        say(format_args!("  times as long: p50 {p50:.2}, p99 {p99:.2}"))?;
    }
    Ok(())
}

/// What a block of a stored event costs, step by step, each over the same events.
fn parts(rules: &SourceRules, messages: &[Vec<u8>]) -> Result<(), Failure> {
    let root = rules.namespace.root(rules.seed, RootKeys::default());
    let (mut source, schedule, mut changes) = (Source::new(rules.clone()), Schedule::new()?, Vec::new());
    let mut all = vec![Change::Gone(BlockHash(1), Tier::Hbm); BURST];
    all.clear();
    let [mut decoding, mut chaining, mut naming, mut holding] = [Phase::default(); 4];
    let before = resident()?;
    for messages in messages.chunks(TURN) {
        let batches = decoding.of(&schedule, || decoded(messages))??;
        let stored: Vec<&Stored> = batches.iter().flat_map(|batch| &batch.events).filter_map(as_stored).collect();
        chaining.of(&schedule, || {
            for event in &stored {
                black_box(Chain::over_tokens(root, rules.seed, rules.block, &event.tokens));
            }
        })?;
        naming.of(&schedule, || {
            for batch in &batches {
                source.glance(&batch.events);
                batch.events.iter().filter_map(as_stored).for_each(|event| source.store(event, &mut changes));
            }
        })?;
        all.append(&mut changes);
    }
    let (mut index, between) = (Index::new(), resident()?);
    let slot = index.join(WorkerId(0), DpRank(0), Knowledge::Exact)?;
    holding.of(&schedule, || {
        for changes in all.chunks(EVENT) {
            index.glance(changes);
            index.apply(slot, changes);
        }
    })?;
    let [source, index] = [between - before, resident()? - between].map(|bytes| each(bytes, all.len()));
    let each = |phase: Phase| nanos(phase.running, all.len());
    say(format_args!("{} blocks of one source: {source:.1} bytes each, in the index {index:.1}", all.len()))?;
    say(format_args!(
        "one of them, on a core: decoded {:.0} ns, its chain {:.0} ns, chain and name {:.0} ns, holder {:.0} ns",
        each(decoding),
        each(chaining),
        each(naming),
        each(holding)
    ))
}

fn decoded(messages: &[Vec<u8>]) -> Result<Vec<Batch>, DecodeError> {
    messages.iter().map(|message| decode(message, &Limits::default())).collect()
}

fn as_stored(event: &Event) -> Option<&Stored> {
    if let Event::Stored(event) = event { Some(event) } else { None }
}

/// What something took.
#[derive(Clone, Copy, Default)]
struct Phase {
    clock: Duration,
    /// On a core.
    running: Duration,
}

impl Phase {
    fn of<T>(&mut self, schedule: &Schedule, act: impl FnOnce() -> T) -> Result<T, Failure> {
        let (started, before) = (Instant::now(), schedule.waited()?);
        let made = act();
        let took = started.elapsed();
        self.clock += took;
        self.running += took.saturating_sub(schedule.waited()? - before);
        Ok(made)
    }
}

/// What events took.
#[derive(Default)]
struct Took {
    blocks: usize,
    decoding: Phase,
    applying: Phase,
}

impl std::fmt::Display for Took {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let each = |took: Duration| nanos(took, self.blocks);
        write!(
            f,
            "{:.0} ns a block on a core, {:.0} by the clock, after {:.0} ns of decoding",
            each(self.applying.running),
            each(self.applying.clock),
            each(self.decoding.running)
        )
    }
}

/// As a follower does it, message by message.
fn apply(index: &SharedIndex, feed: &mut Feed, messages: &[Vec<u8>]) -> Result<Took, Failure> {
    let (schedule, mut took) = (Schedule::new()?, Took { blocks: messages.len() * EVENT, ..Took::default() });
    for messages in messages.chunks(TURN) {
        let batches = took.decoding.of(&schedule, || decoded(messages))??;
        took.applying.of(&schedule, || {
            for batch in &batches {
                feed.take_all(&batch.events);
                index.settle(feed)?;
            }
            Ok::<_, Failure>(())
        })??;
    }
    Ok(took)
}

/// Lookups as the clock shows them, without what they waited for a core, and without what the main thread did, too.
fn look(index: &SharedIndex, asked: &Chain, more: impl Fn(usize) -> bool) -> Result<[Spread; 3], Failure> {
    let (own, main) = (Schedule::new()?, Schedule(File::open("/proc/self/schedstat")?));
    let mut all: [Vec<Duration>; 3] = Default::default();
    while more(all[0].len()) {
        let before = (own.waited()?, main.waited()?);
        let started = Instant::now();
        black_box(index.read().overlaps_of(asked));
        let took = started.elapsed();
        let waited = own.waited()? - before.0;
        let either = waited + main.waited()? - before.1;
        for (all, waited) in all.iter_mut().zip([Duration::ZERO, waited, either]) {
            all.push(took.saturating_sub(waited));
        }
        // As requests come: not one after the other.
        std::thread::sleep(Duration::from_micros(20));
    }
    Ok(all.map(Spread::of))
}

/// What the kernel says of a thread.
struct Schedule(File);

impl Schedule {
    fn new() -> Result<Self, Failure> {
        Ok(Self(File::open("/proc/thread-self/schedstat")?))
    }

    /// How long it was ready and waited for a core.
    fn waited(&self) -> Result<Duration, Failure> {
        let mut text = [0; 96];
        let length = self.0.read_at(&mut text, 0)?;
        let waited = std::str::from_utf8(&text[..length])?.split(' ').nth(1).ok_or("no schedstat")?;
        Ok(Duration::from_nanos(waited.trim().parse()?))
    }
}

fn name(chain: usize, at: usize) -> u64 {
    spread(((chain as u64 + 1) << 40) + at as u64)
}

/// The next blocks of one of 128 long chains, as vLLM says that they are stored.
fn stored(number: usize) -> Result<Vec<u8>, rmp_serde::encode::Error> {
    let (chain, first) = (number % 128, number / 128 * EVENT);
    let names: Vec<u64> = (first..first + EVENT).map(|at| name(chain, at)).collect();
    let (parent, tokens) = (first.checked_sub(1).map(|at| name(chain, at)), tokens(chain, first..first + EVENT));
    rmp_serde::to_vec(&(1.5, [("BlockStored", names, parent, tokens, BLOCK, (), "GPU", ())], 0))
}

/// The same, removed, last one first.
fn removed(number: usize) -> Result<Vec<u8>, rmp_serde::encode::Error> {
    let (chain, first) = (number % 128, number / 128 * EVENT);
    let names: Vec<u64> = (first..first + EVENT).rev().map(|at| name(chain, at)).collect();
    rmp_serde::to_vec(&(1.5, [("BlockRemoved", names, "GPU")], 0))
}

/// The tokens of some blocks of a chain.
fn tokens(chain: usize, blocks: Range<usize>) -> Vec<u32> {
    let block = BLOCK as usize;
    let token = |at: usize| spread((2 * chain * CHAIN * block + at) as u64) as u32 % VOCABULARY;
    (blocks.start * block..blocks.end * block).map(token).collect()
}

/// What a number of tries took.
struct Spread(Vec<Duration>);

impl Spread {
    fn of(mut took: Vec<Duration>) -> Self {
        took.sort_unstable();
        Self(took)
    }

    fn at(&self, thousandth: usize) -> Duration {
        self.0.get((self.0.len() * thousandth / 1000).min(self.0.len().saturating_sub(1))).copied().unwrap_or_default()
    }
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [p50, p99, most] = [500, 990, 1000].map(|at| self.at(at));
        write!(f, "p50 {p50:?}, p99 {p99:?}, most {most:?} of {}", self.0.len())
    }
}

/// Bytes of this process that are in memory.
fn resident() -> Result<usize, Failure> {
    let status = read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<usize>()? * 1024)
}

fn each(bytes: usize, things: usize) -> f64 {
    bytes as f64 / things as f64
}

fn nanos(took: Duration, things: usize) -> f64 {
    took.as_nanos() as f64 / things as f64
}

fn say(line: std::fmt::Arguments<'_>) -> Result<(), Failure> {
    Ok(writeln!(std::io::stdout(), "{line}")?)
}
