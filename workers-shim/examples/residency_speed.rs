//! Measures the costs of the residency index: `just bench-residency`.
//!
//! 32 workers hold 2 million copies of blocks; long sessions are at three workers each. Prints the cost of one lookup
//! of 8,192 blocks, of one block in an event and of one held block, by part, and the latency of lookups while a burst
//! of events is applied: in wall-clock time, without the time the thread waited for a core, and as a ratio to the
//! latency before.

use std::fs::{File, read_to_string};
use std::hint::black_box;
use std::io::Write as _;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use residency::{
    BlockMappingRules, BlockStored, DecodeError, DecodeLimits, DepthHint, KvCacheEvent, KvEventBatch, PrefixClosure,
    ResidencyChange, ResidencyFeed, ResidencyIndex, SourceBlocks, SourceSlot, decode,
};
use vocabulary::{
    BlockHash, DpRank, HashSeed, KvIndexState, ModelNamespace, PrefixChain, PrefixId, RequestNamespace, Tier, Tokens,
    WorkerId,
};
use workers_shim::events::SharedIndex;

const WORKERS: u64 = 32;
const REPLICAS: u64 = 3;
const CHAIN: usize = 8192;
const COPIES: usize = 2 << 20;
const SESSIONS: usize = COPIES / (CHAIN * REPLICAS as usize);
/// Blocks that all sessions share, like a system prompt.
const SHARED_BLOCKS: usize = 512;
const LOOKUPS: usize = 20_000;
const BLOCK: u64 = 16;
const BURST_EVENTS: usize = 1 << 20;
/// Blocks in one event: a prefill step of 512 tokens.
const EVENT_BLOCKS: usize = 32;
/// Messages decoded before they are applied, so few that they stay in the CPU cache.
const DECODE_BATCH: usize = 32;
/// Size of the vocabulary, which determines how many bytes token ids take in a message.
const VOCABULARY: u32 = 152_064;

type BoxError = Box<dyn std::error::Error>;

fn main() -> Result<(), BoxError> {
    let before = resident_bytes()?;
    let mut index = ResidencyIndex::new();
    let slots: Vec<SourceSlot> = (0..WORKERS)
        .map(|n| index.add_source(WorkerId(n), DpRank(0), KvIndexState::Exact))
        .collect::<Result<_, _>>()?;
    let sessions: Vec<Vec<BlockHash>> = (0..SESSIONS).map(chain).collect();
    let started = Instant::now();
    fill_index(&mut index, &slots, &sessions);
    let filled = started.elapsed();
    let block_count = SESSIONS * CHAIN * REPLICAS as usize;
    // The chains themselves belong to the sessions, not to the index.
    let own = resident_bytes()?.saturating_sub(before).saturating_sub(SESSIONS * CHAIN * size_of::<BlockHash>());
    print_line(format_args!(
        "{WORKERS} workers hold {} blocks, {block_count} copies, in chains of {CHAIN}",
        index.blocks()
    ))?;
    print_line(format_args!(
        "index: {:.1} bytes a held copy, {:.1} a block of three",
        time_each(own, block_count),
        time_each(own, index.blocks())
    ))?;
    print_line(format_args!("index: {:.0} ns to hold one copy", nanos(filled, block_count)))?;
    measure_lookups(&index, &sessions)?;
    drop((index, sessions));
    measure_burst()
}

/// Returns the shared blocks, then the session's own.
fn chain(session: usize) -> Vec<BlockHash> {
    let own = (session as u64 + 1) << 32;
    (0..CHAIN as u64)
        .map(|at| hash_counter(if at < SHARED_BLOCKS as u64 { at + 1 } else { own + at }))
        .map(BlockHash)
        .collect()
}

/// Returns a uniform hash of a counter (splitmix64).
fn hash_counter(counter: u64) -> u64 {
    let mixed = (counter ^ (counter >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

fn fill_index(index: &mut ResidencyIndex, slots: &[SourceSlot], sessions: &[Vec<BlockHash>]) {
    for (number, session) in sessions.iter().enumerate() {
        for replica in 0..REPLICAS as usize {
            let slot = slots[(number * 7 + replica * 11) % slots.len()];
            for part in session.chunks(EVENT_BLOCKS) {
                let changes: Vec<ResidencyChange> =
                    part.iter().map(|hash| ResidencyChange::Added(*hash, Tier::Hbm)).collect();
                index.apply(slot, &changes);
            }
        }
    }
    slots.iter().for_each(|slot| index.set_closure(*slot, PrefixClosure::Whole));
}

/// Measures lookups of a different session each time, whose blocks are in no CPU cache, and then repeatedly of one.
fn measure_lookups(index: &ResidencyIndex, sessions: &[Vec<BlockHash>]) -> Result<(), BoxError> {
    let of = |which: &dyn Fn(usize) -> usize| {
        let took = (0..LOOKUPS).map(|round| {
            let session = &sessions[which(round)];
            // The session is between two steps: its newest blocks are not held by any worker yet.
            let length = CHAIN - (round * 97) % 64;
            let started = Instant::now();
            black_box(index.overlaps(black_box(&session[..length])));
            started.elapsed()
        });
        LatencySamples::of(took.collect())
    };
    print_line(format_args!(
        "lookup of {CHAIN} blocks, another session each time: {}",
        of(&|round| (round * 31) % sessions.len())
    ))?;
    print_line(format_args!("lookup of {CHAIN} blocks, the same session again: {}", of(&|_| 3)))?;
    let chains: Vec<PrefixChain> = sessions.iter().map(|session| prompt(session)).collect();
    let near = DepthHint::from_depths(&index.overlaps(&sessions[0])).depths();
    let time = |which: &dyn Fn(usize) -> usize| {
        let took = (0..LOOKUPS).map(|round| {
            let chain = &chains[which(round)];
            let started = Instant::now();
            black_box(index.overlaps_with_hint(black_box(chain), &near));
            started.elapsed()
        });
        LatencySamples::of(took.collect())
    };
    print_line(format_args!(
        "told where its holders ended, another session each time: {}",
        time(&|round| (round * 31) % chains.len())
    ))?;
    print_line(format_args!("told where its holders ended, the same session again: {}", time(&|_| 3)))
}

/// Returns a session's next prompt, with some blocks that no worker holds yet.
fn prompt(session: &[BlockHash]) -> PrefixChain {
    let new = (1..=50).map(|at| BlockHash(hash_counter(at << 50)));
    let ids = session.iter().copied().chain(new).map(|hash| PrefixId(u128::from(hash.0))).collect();
    PrefixChain { root: PrefixId(0), block: Tokens(BLOCK), ids, tokens: Tokens(0) }
}

/// Measures events of three workers with the same blocks, and then of one worker while another thread does lookups.
fn measure_burst() -> Result<(), BoxError> {
    let namespace = ModelNamespace { model: "m".into(), revision: "".into(), tokenizer: "t".into() };
    let rules = BlockMappingRules::new(Tokens(BLOCK), HashSeed(1), namespace);
    let root = rules.namespace.root(rules.seed, RequestNamespace::default());
    let chain = PrefixChain::over_tokens(root, rules.seed, rules.block, &tokens(0, 0..CHAIN));
    let messages: Vec<Vec<u8>> = (0..2 * BURST_EVENTS / EVENT_BLOCKS).map(stored).collect::<Result<_, _>>()?;
    // The first half of each chain is applied before the lookups start.
    let (known, coming) = messages.split_at(messages.len() / 2);
    measure_ingest_stages(&rules, known)?;
    let index = SharedIndex::new();
    let mut feeds: Vec<ResidencyFeed> =
        (0..REPLICAS).map(|worker| ResidencyFeed::new(WorkerId(worker), DpRank(0), rules.clone())).collect();
    let before = resident_bytes()?;
    let first = feeds.iter_mut().map(|feed| apply_messages(&index, feed, known)).collect::<Result<Vec<_>, _>>()?;
    let own = resident_bytes()?.saturating_sub(before);
    print_line(format_args!(
        "index and sources: {:.1} bytes a copy at {REPLICAS} replicas",
        time_each(own, feeds.len() * BURST_EVENTS)
    ))?;
    for (replica, took) in first.iter().enumerate() {
        print_line(format_args!("replica {} of {BURST_EVENTS} blocks: {took}", replica + 1))?;
    }
    let stop = AtomicBool::new(false);
    let quiet = time_lookups(&index, &chain, |seen| seen < LOOKUPS)?;
    let (took, busy) = std::thread::scope(|scope| -> Result<_, BoxError> {
        let looking = scope.spawn(|| {
            time_lookups(&index, &chain, |_| !stop.load(Ordering::Relaxed)).map_err(|error| error.to_string())
        });
        let took = apply_messages(&index, &mut feeds[0], coming);
        stop.store(true, Ordering::Relaxed);
        Ok((took?, looking.join().map_err(|_| "the looking thread failed")??))
    })?;
    print_line(format_args!("a burst of {BURST_EVENTS} more, in events of {EVENT_BLOCKS}: {took}"))?;
    let evicted: Vec<Vec<u8>> = (messages.len() / 2..messages.len()).rev().map(removed).collect::<Result<_, _>>()?;
    print_line(format_args!("evicted again, leaves first: {}", apply_messages(&index, &mut feeds[0], &evicted)?))?;
    print_line(format_args!("stored again, where nothing grows: {}", apply_messages(&index, &mut feeds[0], coming)?))?;
    measure_during_burst(&quiet, &busy)
}

/// Prints the latency of lookups before and during a burst.
fn measure_during_burst(quiet: &[LatencySamples; 3], busy: &[LatencySamples; 3]) -> Result<(), BoxError> {
    let how = ["by the clock", "without waiting for a core", "nor for who applies to get one"];
    for (place, how) in how.into_iter().enumerate() {
        print_line(format_args!("lookups before the burst, {how}: {}", quiet[place]))?;
        print_line(format_args!("lookups during the burst, {how}: {}", busy[place]))?;
        let [p50, p99] = [500, 990].map(|at| busy[place].at(at).as_secs_f64() / quiet[place].at(at).as_secs_f64());
        print_line(format_args!("  times as long: p50 {p50:.2}, p99 {p99:.2}"))?;
    }
    Ok(())
}

/// Measures the cost per block of a stored event, by stage, each over the same events.
fn measure_ingest_stages(rules: &BlockMappingRules, messages: &[Vec<u8>]) -> Result<(), BoxError> {
    let root = rules.namespace.root(rules.seed, RequestNamespace::default());
    let (mut source, schedule, mut changes) = (SourceBlocks::new(rules.clone()), SchedStat::new()?, Vec::new());
    let mut all = vec![ResidencyChange::Removed(BlockHash(1), Tier::Hbm); BURST_EVENTS];
    all.clear();
    let [mut decoding, mut chaining, mut naming, mut holding] = [PhaseTime::default(); 4];
    let before = resident_bytes()?;
    for messages in messages.chunks(DECODE_BATCH) {
        let batches = decoding.of(&schedule, || decoded(messages))??;
        let stored: Vec<&BlockStored> = batches.iter().flat_map(|batch| &batch.events).filter_map(as_stored).collect();
        chaining.of(&schedule, || {
            for event in &stored {
                black_box(PrefixChain::over_tokens(root, rules.seed, rules.block, &event.tokens));
            }
        })?;
        naming.of(&schedule, || {
            for batch in &batches {
                source.warm_cpu_cache(&batch.events);
                batch.events.iter().filter_map(as_stored).for_each(|event| source.store(event, &mut changes));
            }
        })?;
        all.append(&mut changes);
    }
    let (mut index, between) = (ResidencyIndex::new(), resident_bytes()?);
    let slot = index.add_source(WorkerId(0), DpRank(0), KvIndexState::Exact)?;
    holding.of(&schedule, || {
        for changes in all.chunks(EVENT_BLOCKS) {
            index.warm_cpu_cache(changes);
            index.apply(slot, changes);
        }
    })?;
    let [source, index] = [between - before, resident_bytes()? - between].map(|bytes| time_each(bytes, all.len()));
    let each = |phase: PhaseTime| nanos(phase.running, all.len());
    print_line(format_args!("{} blocks of one source: {source:.1} bytes each, in the index {index:.1}", all.len()))?;
    print_line(format_args!(
        "one of them, on a core: decoded {:.0} ns, its chain {:.0} ns, chain and name {:.0} ns, holder {:.0} ns",
        each(decoding),
        each(chaining),
        each(naming),
        each(holding)
    ))
}

fn decoded(messages: &[Vec<u8>]) -> Result<Vec<KvEventBatch>, DecodeError> {
    messages.iter().map(|message| decode(message, &DecodeLimits::default())).collect()
}

fn as_stored(event: &KvCacheEvent) -> Option<&BlockStored> {
    if let KvCacheEvent::Stored(event) = event { Some(event) } else { None }
}

/// Time that a phase took.
#[derive(Clone, Copy, Default)]
struct PhaseTime {
    clock: Duration,
    /// CPU time.
    running: Duration,
}

impl PhaseTime {
    fn of<T>(&mut self, schedule: &SchedStat, act: impl FnOnce() -> T) -> Result<T, BoxError> {
        let (started, before) = (Instant::now(), schedule.waited()?);
        let result = act();
        let took = started.elapsed();
        self.clock += took;
        self.running += took.saturating_sub(schedule.waited()? - before);
        Ok(result)
    }
}

/// Time that events took, by stage.
#[derive(Default)]
struct IngestTiming {
    blocks: usize,
    decoding: PhaseTime,
    applying: PhaseTime,
}

impl std::fmt::Display for IngestTiming {
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

/// Applies messages one by one, as a follower does.
fn apply_messages(
    index: &SharedIndex,
    feed: &mut ResidencyFeed,
    messages: &[Vec<u8>],
) -> Result<IngestTiming, BoxError> {
    let (schedule, mut took) =
        (SchedStat::new()?, IngestTiming { blocks: messages.len() * EVENT_BLOCKS, ..IngestTiming::default() });
    for messages in messages.chunks(DECODE_BATCH) {
        let batches = took.decoding.of(&schedule, || decoded(messages))??;
        took.applying.of(&schedule, || {
            for batch in &batches {
                feed.ingest_all(&batch.events);
                index.apply_feed(feed)?;
            }
            Ok::<_, BoxError>(())
        })??;
    }
    Ok(took)
}

/// Measures lookups in wall-clock time, then without the time that this thread waited for a core, then also without the
/// time that the main thread waited for one.
fn time_lookups(
    index: &SharedIndex,
    chain: &PrefixChain,
    more: impl Fn(usize) -> bool,
) -> Result<[LatencySamples; 3], BoxError> {
    let (own, main) = (SchedStat::new()?, SchedStat(File::open("/proc/self/schedstat")?));
    let mut all: [Vec<Duration>; 3] = Default::default();
    while more(all[0].len()) {
        let before = (own.waited()?, main.waited()?);
        let started = Instant::now();
        black_box(index.read().overlaps_of_chain(chain));
        let took = started.elapsed();
        let waited = own.waited()? - before.0;
        let either = waited + main.waited()? - before.1;
        for (all, waited) in all.iter_mut().zip([Duration::ZERO, waited, either]) {
            all.push(took.saturating_sub(waited));
        }
        // Spaced, as requests arrive.
        std::thread::sleep(Duration::from_micros(20));
    }
    Ok(all.map(LatencySamples::of))
}

/// A thread's scheduling statistics from the kernel.
struct SchedStat(File);

impl SchedStat {
    fn new() -> Result<Self, BoxError> {
        Ok(Self(File::open("/proc/thread-self/schedstat")?))
    }

    /// Returns how long the thread was runnable and waited for a core.
    fn waited(&self) -> Result<Duration, BoxError> {
        let mut text = [0; 96];
        let length = self.0.read_at(&mut text, 0)?;
        let waited = std::str::from_utf8(&text[..length])?.split(' ').nth(1).ok_or("no schedstat")?;
        Ok(Duration::from_nanos(waited.trim().parse()?))
    }
}

fn name(chain: usize, at: usize) -> u64 {
    hash_counter(((chain as u64 + 1) << 40) + at as u64)
}

/// Encodes an event that stores the next blocks of one of 128 long chains, in vLLM's format.
fn stored(number: usize) -> Result<Vec<u8>, rmp_serde::encode::Error> {
    let (chain, first) = (number % 128, number / 128 * EVENT_BLOCKS);
    let names: Vec<u64> = (first..first + EVENT_BLOCKS).map(|at| name(chain, at)).collect();
    let (parent, tokens) = (first.checked_sub(1).map(|at| name(chain, at)), tokens(chain, first..first + EVENT_BLOCKS));
    rmp_serde::to_vec(&(1.5, [("BlockStored", names, parent, tokens, BLOCK, (), "GPU", ())], 0))
}

/// Encodes the event that removes them, last one first.
fn removed(number: usize) -> Result<Vec<u8>, rmp_serde::encode::Error> {
    let (chain, first) = (number % 128, number / 128 * EVENT_BLOCKS);
    let names: Vec<u64> = (first..first + EVENT_BLOCKS).rev().map(|at| name(chain, at)).collect();
    rmp_serde::to_vec(&(1.5, [("BlockRemoved", names, "GPU")], 0))
}

/// Returns the tokens of some blocks of a chain.
fn tokens(chain: usize, blocks: Range<usize>) -> Vec<u32> {
    let block = BLOCK as usize;
    let token = |at: usize| hash_counter((2 * chain * CHAIN * block + at) as u64) as u32 % VOCABULARY;
    (blocks.start * block..blocks.end * block).map(token).collect()
}

/// Durations of repeated measurements.
struct LatencySamples(Vec<Duration>);

impl LatencySamples {
    fn of(mut took: Vec<Duration>) -> Self {
        took.sort_unstable();
        Self(took)
    }

    fn at(&self, thousandth: usize) -> Duration {
        self.0.get((self.0.len() * thousandth / 1000).min(self.0.len().saturating_sub(1))).copied().unwrap_or_default()
    }
}

impl std::fmt::Display for LatencySamples {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [p50, p99, most] = [500, 990, 1000].map(|at| self.at(at));
        write!(f, "p50 {p50:?}, p99 {p99:?}, most {most:?} of {}", self.0.len())
    }
}

/// Returns the resident memory of this process in bytes.
fn resident_bytes() -> Result<usize, BoxError> {
    let status = read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<usize>()? * 1024)
}

fn time_each(bytes: usize, things: usize) -> f64 {
    bytes as f64 / things as f64
}

fn nanos(took: Duration, things: usize) -> f64 {
    took.as_nanos() as f64 / things as f64
}

fn print_line(line: std::fmt::Arguments<'_>) -> Result<(), BoxError> {
    Ok(writeln!(std::io::stdout(), "{line}")?)
}
