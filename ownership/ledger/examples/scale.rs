//! Benchmark of a ledger with many artifacts: memory per table, lookups during writes, clones, drops, snapshots.
//!
//! `cargo run --release -p ledger --example scale -- 10000000`

#![allow(clippy::print_stdout, reason = "it prints what it measures")]

use std::hint::black_box;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ledger::*;
use vocabulary::*;

const CLIENT: ClientId = ClientId(1);
const WORKERS: u64 = 64;
/// Number of sessions that share one system prompt.
const SESSIONS_PER_SHARED_PREFIX: u64 = 4_096;
const SHARED_PREFIX_BLOCKS: u64 = 128;
/// Number of sessions whose whole chains are kept for lookups: 128K tokens in blocks of 64.
const LONG_SESSIONS: u64 = 512;
const LONG_SESSION_BLOCKS: u64 = 2_048;

fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

fn wide(a: u64, b: u64) -> u128 {
    u128::from(mix(a ^ mix(b))) << 64 | u128::from(mix(b ^ mix(a ^ 0x5555)))
}

fn session_id(n: u64) -> SessionId {
    SessionId(wide(n, 1))
}

fn root() -> PrefixId {
    PrefixId(9)
}

/// Returns the prefix of a session's first blocks; the leading ones belong to its shared prefix.
fn point(session: u64, blocks: u64) -> PrefixPoint {
    let of = if blocks <= SHARED_PREFIX_BLOCKS { session / SESSIONS_PER_SHARED_PREFIX } else { session };
    let id = if blocks == 0 {
        root()
    } else {
        PrefixId(wide(of << 20 | blocks, 2 + u64::from(blocks <= SHARED_PREFIX_BLOCKS)))
    };
    PrefixPoint { blocks: Blocks(blocks), id }
}

fn origin() -> ChainDescriptor {
    let shape = KvBlockSpec {
        format: KvFormatDigest(1),
        kinds: KvKinds::default(),
        block: Tokens(64),
        block_bytes: Bytes(4 << 20),
    };
    ChainDescriptor { tenant: TenantId("tenant".into()), model: ModelId::from("model"), root: root(), shape }
}

fn owner(n: u64) -> Owner {
    Owner { worker: WorkerId(mix(n % WORKERS)), incarnation: Incarnation(1_700_000_000_000_000), rank: DpRank(0) }
}

/// Returns a step of a session from block `base` to block `end`, served by `worker`.
fn step(session: u64, base: u64, end: u64, worker: u64) -> Command {
    let origin = origin();
    let points = (base + 1..=end).filter(|n| n % WAYPOINT == 0 || *n == end).map(|n| point(session, n)).collect();
    let run = ChainSegment { base: point(session, base), points };
    let (id, owner) = (session_id(session), owner(worker));
    let head = PrefixRef { scope: origin.scope(), point: run.end(), extent: None };
    let (tenant, model) = (origin.tenant.clone(), origin.model.clone());
    let claim = Command::ClaimOwner(ClaimOwner { subject: OwnershipSubject::Session(id), owner });
    let mut batch = vec![
        Command::OpenSession(OpenSession { session: id, tenant, model, parent: None }),
        Command::Seal(SealBlocks { session: Some(id), origin, run, extent: None, owner }),
        Command::Advance(AdvanceHead { session: id, head, replaces: None, intent: None }),
    ];
    batch.extend((base == 0).then_some(claim));
    Command::Batch(batch)
}

/// The ledger and the end of its log.
struct LedgerHarness {
    ledger: Ledger,
    index: u64,
    serial: u64,
    slowest_entry: Duration,
    /// The same, without the time in which this thread waited for a CPU.
    slowest_entry_cpu: Duration,
}

/// Returns how long this thread has waited for a CPU so far, according to Linux.
fn scheduler_wait() -> Duration {
    let counts = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    Duration::from_nanos(counts.split_whitespace().nth(1).and_then(|nanos| nanos.parse().ok()).unwrap_or(0))
}

impl LedgerHarness {
    fn entry(&mut self, commands: impl IntoIterator<Item = Command>) {
        let submission = |command| {
            self.serial += 1;
            Submission { client: CLIENT, serial: ClientSerial(self.serial), command }
        };
        let submissions = commands.into_iter().map(submission).collect();
        self.index += 1;
        let entry = LedgerEntry { time: self.ledger.now().after(Micros(10)), submissions };
        let (start, waited) = (Instant::now(), scheduler_wait());
        let outcomes = self.ledger.apply(self.index, &entry);
        let (whole, waited) = (start.elapsed(), self::scheduler_wait().saturating_sub(waited));
        self.slowest_entry = self.slowest_entry.max(whole);
        self.slowest_entry_cpu = self.slowest_entry_cpu.max(whole.saturating_sub(waited));
        let refused = outcomes.iter().find_map(|outcome| outcome.refusals().first().copied());
        assert_eq!(refused, None);
    }

    fn register(&mut self) {
        for n in 0..WORKERS {
            self.entry([Command::RegisterWorker(RegisterWorker {
                worker: owner(n).worker,
                incarnation: owner(n).incarnation,
                spec: WorkerSpec {
                    endpoint: "http://worker".into(),
                    role: WorkerRole::Hybrid,
                    kind: WorkerKind::Engine,
                    models: Arc::from([ModelId::from("model")]),
                    ranks: 1,
                },
                ttl: Micros(u64::MAX / 4),
            })]);
        }
    }
}

/// Returns the blocks at which a session's artifacts end: 2.5 artifacts per session on average.
fn artifact_ends(session: u64) -> [u64; 3] {
    let first = SHARED_PREFIX_BLOCKS + 70 + mix(session) % 120;
    let second = first + 30 + mix(session + 1) % 90;
    [first, second, second + 20 + mix(session + 2) % 60]
}

fn extents(session: u64) -> usize {
    2 + (session % 2) as usize
}

fn memory(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) * 1024
}

fn new_harness(artifacts: u64) -> LedgerHarness {
    let mut log = LedgerHarness {
        ledger: Ledger::default(),
        index: 0,
        serial: 0,
        slowest_entry: Duration::ZERO,
        slowest_entry_cpu: Duration::ZERO,
    };
    let usual = LedgerLimits::default();
    let room = (artifacts * 2) as u32;
    let limits = LedgerLimits { artifacts: usual.artifacts.max(room), sessions: usual.sessions.max(room), ..usual };
    log.entry([Command::OpenClient(NodeId(1)), Command::RaiseLevel(LEVEL), Command::SetLimits(Box::new(limits))]);
    log.register();
    log
}

fn percentile(sorted: &[u64], of: usize) -> u64 {
    sorted[(sorted.len() * of / 1_000).min(sorted.len() - 1)]
}

/// Times lookups one by one; the clock itself takes about 20 ns of each.
fn lookups(name: &str, view: &Mutex<Arc<Ledger>>, look: impl Fn(&Ledger, u64)) {
    let mut times = Vec::with_capacity(200_000);
    for round in 0..200u64 {
        let ledger = view.lock().expect("the writer does not panic").clone();
        for n in 0..1_000 {
            let n = mix(round << 32 | n);
            let start = Instant::now();
            look(&ledger, n);
            times.push(start.elapsed().as_nanos() as u64);
        }
    }
    times.sort_unstable();
    let [median, tail] = [500, 990].map(|of| percentile(&times, of));
    println!("  {name:<34} p50 {median:>6} ns   p99 {tail:>6} ns");
}

fn chain_of(session: u64) -> PrefixChain {
    let ids = (1..=LONG_SESSION_BLOCKS).map(|n| point(session, n).id).collect();
    PrefixChain { root: root(), block: Tokens(64), ids, tokens: Tokens(LONG_SESSION_BLOCKS * 64) }
}

fn main() {
    let artifacts: u64 = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(1_000_000);
    let sessions = artifacts * 2 / 5;
    let before = memory("VmRSS");
    let mut log = new_harness(artifacts);
    let start = Instant::now();
    let mut next = 0;
    while next < sessions {
        let upto = (next + 64).min(sessions);
        let steps = (next..upto).flat_map(|session| {
            let ends = artifact_ends(session);
            (0..extents(session)).map(move |n| {
                let base = if n == 0 { 0 } else { ends[n - 1] };
                // Every artifact is computed by another worker, so that they are not joined.
                step(session, base, ends[n], session + n as u64)
            })
        });
        log.entry(steps);
        next = upto;
    }
    let took = start.elapsed();
    let artifacts = log.ledger.artifact_count() as u64;
    let boundaries: usize = log.ledger.artifacts().map(|artifact| artifact.boundaries.len()).sum();
    let steady = memory("VmRSS");
    println!("{artifacts} extents, {sessions} sessions, {boundaries} boundaries, built in {took:.1?}");
    println!(
        "  slowest entry of some 160 steps: {:.2?}, {:.2?} of it on a processor",
        log.slowest_entry, log.slowest_entry_cpu
    );
    println!(
        "  memory {:.2} GiB: {} bytes an extent, sessions and indexes included",
        steady as f64 / (1 << 30) as f64,
        (steady - before) / artifacts
    );

    let chains: Vec<PrefixChain> = (sessions..sessions + LONG_SESSIONS).map(chain_of).collect();
    for session in sessions..sessions + LONG_SESSIONS {
        log.entry([step(session, 0, LONG_SESSION_BLOCKS, session)]);
    }
    measure_lookups(log.ledger.clone(), log, sessions, &chains);
}

fn measure_lookups(ledger: Ledger, mut log: LedgerHarness, sessions: u64, chains: &[PrefixChain]) {
    let view = Mutex::new(Arc::new(ledger));
    let (done, scope) = (AtomicBool::new(false), origin().scope());
    println!("lookups while steps are written:");
    let written = std::thread::scope(|threads| {
        let writer = threads.spawn(|| {
            let (mut written, start) = (0u64, Instant::now());
            (log.slowest_entry, log.slowest_entry_cpu) = (Duration::ZERO, Duration::ZERO);
            while !done.load(Relaxed) {
                let old = written % sessions;
                let end = artifact_ends(old)[extents(old) - 1];
                log.entry((0..16).map(|n| {
                    let session = (old + n) % sessions;
                    let end = artifact_ends(session)[extents(session) - 1];
                    step(session, end, end + 5, session + extents(session) as u64 - 1)
                }));
                black_box(end);
                written += 16;
                let next = Arc::new(log.ledger.clone());
                let old = std::mem::replace(&mut *view.lock().expect("no reader panics"), next);
                drop(old);
            }
            (written, start.elapsed(), log)
        });
        lookups("a session by its id", &view, |ledger, n| {
            black_box(ledger.session(session_id(n % sessions)));
        });
        lookups("who owns a prefix", &view, |ledger, n| {
            let session = n % sessions;
            let found = ledger.prefix_status(point(session, artifact_ends(session)[0]).id, scope);
            assert!(black_box(found).is_some());
        });
        let pick = |n: u64| (sessions + n % LONG_SESSIONS, &chains[(n % LONG_SESSIONS) as usize]);
        lookups("a 128K-token chain, session known", &view, |ledger, n| {
            let (session, chain) = pick(n);
            let query = LocateQuery { scope, session: Some(session_id(session)), chain, shared_prefix: Blocks(0) };
            assert!(black_box(ledger.locate(query)).known_blocks() == Blocks(LONG_SESSION_BLOCKS));
        });
        lookups("a 128K-token chain by itself", &view, |ledger, n| {
            let (_, chain) = pick(n);
            let query = LocateQuery { scope, session: None, chain, shared_prefix: Blocks(0) };
            assert!(black_box(ledger.locate(query)).known_blocks() == Blocks(LONG_SESSION_BLOCKS));
        });
        done.store(true, Relaxed);
        writer.join().expect("the writer does not panic")
    });
    let (steps, took, log) = written;
    println!(
        "  {:.0} steps/s written meanwhile, slowest entry {:.2?}, {:.2?} of it on a processor",
        steps as f64 / took.as_secs_f64(),
        log.slowest_entry,
        log.slowest_entry_cpu
    );
    measure_views(view, log);
}

fn measure_views(view: Mutex<Arc<Ledger>>, mut log: LedgerHarness) {
    drop(view);
    let start = Instant::now();
    let old = log.ledger.clone();
    println!("a clone takes {:.2?}", start.elapsed());
    for n in 0..1_000u64 {
        log.entry((0..16).map(|k| step(mix(n << 8 | k) % 1_000, SHARED_PREFIX_BLOCKS, SHARED_PREFIX_BLOCKS + 5, n)));
    }
    let start = Instant::now();
    drop(old);
    println!("dropping a view that 16000 steps have left behind takes {:.2?}", start.elapsed());
    let start = Instant::now();
    black_box(log.ledger.state_hash());
    println!("the state hash takes {:.2?}", start.elapsed());
    let steady = memory("VmRSS");
    let (start, clone) = (Instant::now(), log.ledger.clone());
    let mut to = ByteCounter(0);
    clone.encode(&mut to).expect("a ledger encodes");
    drop(clone);
    let peak = memory("VmHWM").max(memory("VmRSS"));
    println!("a snapshot of {:.2} GiB takes {:.1?}", to.0 as f64 / (1 << 30) as f64, start.elapsed());
    println!(
        "memory at its peak is {:.3} of the steady {:.2} GiB",
        peak as f64 / steady as f64,
        steady as f64 / (1 << 30) as f64
    );
    let start = Instant::now();
    drop(log);
    println!("dropping the whole takes {:.1?}", start.elapsed());
}

/// Counts written bytes.
struct ByteCounter(u64);

impl Write for ByteCounter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
