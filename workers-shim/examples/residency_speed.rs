//! What the residency index costs: `just bench-residency`.
//!
//! 32 workers hold 2 million copies of blocks; long sessions lie at three of them. Says what one lookup of 8,192 blocks,
//! one block of an event and one held block cost, and what lookups take while a burst of events is applied: as the clock
//! shows it, and without what the thread waited for a core of this machine.

use std::fs::{File, read_to_string};
use std::hint::black_box;
use std::io::Write as _;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use residency::{Change, EngineHash, Event, Feed, Index, Near, Removed, Shape, Slot, SourceRules, SpecKind, Stored};
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
    let events: Vec<Event> = (0..2 * BURST / EVENT).map(stored).collect();
    // The first half of each chain is there before anybody looks.
    let (known, coming) = events.split_at(events.len() / 2);
    let index = SharedIndex::new();
    let mut feeds: Vec<Feed> =
        (0..REPLICAS).map(|worker| Feed::new(WorkerId(worker), DpRank(0), rules.clone())).collect();
    let before = resident()?;
    for feed in &mut feeds {
        apply(&index, feed, known)?;
    }
    let own = resident()?.saturating_sub(before);
    say(format_args!(
        "index and sources: {:.1} bytes a held block at {REPLICAS} replicas",
        each(own, feeds.len() * BURST)
    ))?;
    let stop = AtomicBool::new(false);
    let quiet = look(&index, &asked, |seen| seen < LOOKUPS)?;
    let (took, busy) = std::thread::scope(|scope| -> Result<_, Failure> {
        let looking =
            scope.spawn(|| look(&index, &asked, |_| !stop.load(Ordering::Relaxed)).map_err(|error| error.to_string()));
        let took = apply(&index, &mut feeds[0], coming);
        stop.store(true, Ordering::Relaxed);
        Ok((took?, looking.join().map_err(|_| "the looking thread failed")??))
    })?;
    let evicted: Vec<Event> = coming.iter().rev().filter_map(removed).collect();
    let gone = apply(&index, &mut feeds[0], &evicted)?;
    say(format_args!("a burst of {BURST} blocks, stored in events of {EVENT}: {} a block", took.each(BURST)))?;
    say(format_args!("evicted again, leaves first: {} a block", gone.each(BURST)))?;
    for (when, [all, ours]) in [("before", quiet), ("during", busy)] {
        say(format_args!("lookups {when} the burst: {all}"))?;
        say(format_args!("  without waiting for a core: {ours}"))?;
    }
    Ok(())
}

/// What something took.
struct Took {
    clock: Duration,
    /// On a core.
    running: Duration,
}

impl Took {
    fn each(&self, things: usize) -> String {
        format!("{:.0} ns on a core, {:.0} ns by the clock", nanos(self.running, things), nanos(self.clock, things))
    }
}

fn apply(index: &SharedIndex, feed: &mut Feed, events: &[Event]) -> Result<Took, Failure> {
    let schedule = Schedule::new()?;
    let (started, before) = (Instant::now(), schedule.now()?);
    for event in events {
        feed.take(event);
        index.settle(feed)?;
    }
    Ok(Took { clock: started.elapsed(), running: schedule.now()?.running - before.running })
}

/// Lookups as the clock shows them, and without what they waited for a core.
fn look(index: &SharedIndex, asked: &Chain, more: impl Fn(usize) -> bool) -> Result<[Spread; 2], Failure> {
    let schedule = Schedule::new()?;
    let (mut all, mut ours) = (Vec::new(), Vec::new());
    while more(all.len()) {
        let before = schedule.now()?;
        let started = Instant::now();
        black_box(index.read().overlaps_of(asked));
        let took = started.elapsed();
        all.push(took);
        ours.push(took.saturating_sub(schedule.now()?.waited - before.waited));
        // As requests come: not one after the other.
        std::thread::sleep(Duration::from_micros(20));
    }
    Ok([Spread::of(all), Spread::of(ours)])
}

/// What the kernel says of this thread.
struct Schedule(File);

/// How long it ran, and how long it was ready and waited for a core.
struct Times {
    running: Duration,
    waited: Duration,
}

impl Schedule {
    fn new() -> Result<Self, Failure> {
        Ok(Self(File::open("/proc/thread-self/schedstat")?))
    }

    fn now(&self) -> Result<Times, Failure> {
        let mut text = [0; 96];
        let length = self.0.read_at(&mut text, 0)?;
        let mut numbers = std::str::from_utf8(&text[..length])?.split(' ').map(|number| number.trim().parse());
        let mut next = || Ok::<_, Failure>(Duration::from_nanos(numbers.next().ok_or("no schedstat")??));
        Ok(Times { running: next()?, waited: next()? })
    }
}

/// The same blocks removed, last one first.
fn removed(event: &Event) -> Option<Event> {
    let Event::Stored(event) = event else { return None };
    let hashes = event.hashes.iter().rev().copied().collect();
    Some(Event::Removed(Removed { hashes, tier: event.tier, group: event.group, remaining: Vec::new() }))
}

/// The next blocks of one of 128 long chains.
fn stored(number: usize) -> Event {
    let (chain, step) = (number % 128, number / 128);
    let name = |at: usize| EngineHash(spread(((chain as u64 + 1) << 40) + at as u64));
    let first = step * EVENT;
    Event::Stored(Stored {
        hashes: (first..first + EVENT).map(name).collect(),
        parent: first.checked_sub(1).map(name),
        tokens: tokens(chain, first..first + EVENT),
        block_size: BLOCK as u32,
        tier: Tier::Hbm,
        group: 0,
        kind: SpecKind::Full,
        adapter: None,
        salt: None,
        extra: Vec::new(),
    })
}

/// The tokens of some blocks of a chain.
fn tokens(chain: usize, blocks: Range<usize>) -> Vec<u32> {
    let block = BLOCK as usize;
    (blocks.start * block..blocks.end * block).map(|at| spread((chain * CHAIN * block + at) as u64) as u32).collect()
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
