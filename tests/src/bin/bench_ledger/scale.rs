//! One node with many artifacts: memory, lookup latency during writes and a snapshot, and the cost of a snapshot.

use std::fs::File;
use std::io::{IsTerminal, Write};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use futures::StreamExt;
use ledger::{ChainDescriptor, ChainSegment, Command, KvBlockSpec, LedgerLimits, Outcome, Scope, SealBlocks};
use ownership::{Options, OwnershipDirectory};
use serde::{Deserialize, Serialize};
use vocabulary::{Blocks, Bytes, HashSeed, Micros, ModelId, PrefixChain, PrefixId, TenantId, Tokens};

use crate::load::{LoadStats, summarize};
use crate::node::{OWNER, register, submit};
use crate::{LedgerBenchError, load};

const SEALS_PER_BATCH: u64 = 1_000;
const LOOKUP_SAMPLES: u64 = 1 << 16;

/// Results of the scale benchmark.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct ScaleResults {
    pub(crate) artifacts: u64,
    pub(crate) bytes_an_artifact: f64,
    /// Lookups during writes.
    pub(crate) lookups: LoadStats,
    /// The writes during these lookups.
    pub(crate) writes: LoadStats,
    pub(crate) snapshot_seconds: f64,
    pub(crate) snapshot_bytes: u64,
    /// Longest lookup during writes and snapshot in milliseconds, without the time the thread waited for a core.
    pub(crate) stall_ms: f64,
    /// Longest lookup in milliseconds, including that wait.
    pub(crate) longest_ms: f64,
    /// Longest wait for a core during one lookup in milliseconds, as counted by the kernel.
    pub(crate) kept_off_ms: f64,
    /// Peak memory during the snapshot divided by memory before it.
    pub(crate) peak: f64,
}

/// Runs in a process of its own, because it measures that process's memory.
pub(crate) async fn run(artifacts: u64, folder: PathBuf, window: Duration) -> Result<ScaleResults, LedgerBenchError> {
    // Disables all snapshots except the measured one.
    let options = Options { snapshot_entries: u64::MAX / 2, snapshot_bytes: u64::MAX / 2, ..Options::new(folder) };
    let directory = Arc::new(OwnershipDirectory::open(options).await.map_err(LedgerBenchError::ledger)?);
    let limits = LedgerLimits {
        artifacts: u32::try_from(artifacts + artifacts / 2).unwrap_or(u32::MAX),
        artifact_idle: Micros::of(Duration::from_secs(30 * 86_400)),
        ..LedgerLimits::default()
    };
    for command in [Command::RaiseLevel(2), Command::SetLimits(Box::new(limits)), register()] {
        submit(&directory, command).await?;
    }
    let before = memory("VmRSS")?;
    fill(&directory, artifacts).await?;
    let full = memory("VmRSS")?;
    let mut scale = ScaleResults {
        artifacts,
        bytes_an_artifact: (full - before) as f64 / artifacts as f64,
        ..ScaleResults::default()
    };

    let over = Arc::new(AtomicBool::new(false));
    let reader = std::thread::spawn({
        let (directory, over) = (directory.clone(), over.clone());
        move || read(&directory, artifacts, &over)
    });
    let stalls = std::thread::spawn({
        let (directory, over) = (directory.clone(), over.clone());
        move || measure_stalls(&directory, artifacts, &over)
    });
    let writing = tokio::spawn(load::run(16, window, {
        let directory = directory.clone();
        move |client, count| {
            let directory = directory.clone();
            async move {
                let artifact = artifacts + client * 10_000_000 + count;
                submit(&directory, seal(artifact, &chain(artifact))).await.map(drop)
            }
        }
    }));
    std::fs::write("/proc/self/clear_refs", "5")
        .map_err(LedgerBenchError::system("reset the memory's high-water mark"))?;
    let steady = memory("VmRSS")?;
    let started = Instant::now();
    let saved = directory.save_snapshot().await.map_err(LedgerBenchError::ledger)?;
    (scale.snapshot_seconds, scale.snapshot_bytes) = (started.elapsed().as_secs_f64(), saved.bytes);
    scale.peak = memory("VmHWM")? as f64 / steady as f64;
    scale.writes = writing.await.map_err(|error| LedgerBenchError::Usage(error.to_string()))??;
    over.store(true, Relaxed);
    let gone = |_| LedgerBenchError::Usage("a reader panicked".into());
    scale.lookups = reader.join().map_err(gone)?;
    let stalls = stalls.join().map_err(gone)??;
    (scale.stall_ms, scale.longest_ms, scale.kept_off_ms) =
        (stalls.longest_cpu, stalls.longest, stalls.longest_descheduled);
    Ok(scale)
}

fn chain(artifact: u64) -> PrefixChain {
    let tokens = [artifact as u32, (artifact >> 32) as u32];
    PrefixChain::over_tokens(PrefixId(1), HashSeed(1), Tokens(2), &tokens)
}

fn origin() -> ChainDescriptor {
    let shape =
        KvBlockSpec { format: Default::default(), kinds: Default::default(), block: Tokens(2), block_bytes: Bytes(64) };
    ChainDescriptor { tenant: TenantId::default(), model: ModelId::from("bench"), root: PrefixId(1), shape }
}

fn seal(artifact: u64, chain: &PrefixChain) -> Command {
    let run =
        ChainSegment::of(chain, Blocks(0), chain.blocks()).unwrap_or_else(|| panic!("artifact {artifact} has a block"));
    Command::Seal(SealBlocks { session: None, origin: origin(), run, extent: None, owner: OWNER })
}

async fn fill(directory: &OwnershipDirectory, artifacts: u64) -> Result<(), LedgerBenchError> {
    let batches = (0..artifacts).step_by(SEALS_PER_BATCH as usize).map(|first| async move {
        let all = first..(first + SEALS_PER_BATCH).min(artifacts);
        let outcome = submit(directory, Command::Batch(all.map(|n| seal(n, &chain(n))).collect())).await?;
        match outcome {
            Outcome::Batch(parts) if parts.iter().all(|part| matches!(part, Outcome::Sealed { .. })) => Ok(()),
            other => Err(LedgerBenchError::Answer { target: "the ledger".into(), got: format!("{other:?}") }),
        }
    });
    let mut batches = futures::stream::iter(batches).buffer_unordered(8);
    let mut filled = 0;
    while let Some(done) = batches.next().await {
        done?;
        filled += SEALS_PER_BATCH.min(artifacts - filled);
        if filled % (artifacts / 100).max(SEALS_PER_BATCH) < SEALS_PER_BATCH {
            progress(&format!("filling: {filled} of {artifacts} artifacts"));
        }
    }
    progress("");
    Ok(())
}

/// Shows progress if stderr is a terminal.
pub(crate) fn progress(line: &str) {
    let mut terminal = std::io::stderr();
    if terminal.is_terminal() {
        // Progress output is optional.
        let _ = write!(terminal, "\r\x1b[K{line}").and_then(|()| terminal.flush());
    }
}

/// Prefix lookups through the read view: the deepest kept boundary of a chain, and its owner.
struct LookupLoad<'a> {
    directory: &'a OwnershipDirectory,
    scope: Scope,
    chains: Vec<PrefixChain>,
    place: usize,
}

impl<'a> LookupLoad<'a> {
    fn new(directory: &'a OwnershipDirectory, artifacts: u64) -> Self {
        let step = (artifacts / LOOKUP_SAMPLES).max(1);
        let chains = (0..LOOKUP_SAMPLES.min(artifacts)).map(|n| chain(n * step)).collect();
        Self { directory, scope: origin().scope(), chains, place: 0 }
    }

    /// Looks up the next chain. An odd stride visits all of them out of order.
    fn next(&mut self) -> Duration {
        self.place = (self.place + 40_503) % self.chains.len();
        let before = Instant::now();
        let view = self.directory.view();
        let found = view.deepest_boundary(self.scope, &self.chains[self.place]).map(|kept| view.boundary_status(&kept));
        drop(view);
        let took = before.elapsed();
        assert!(found.is_some_and(|standing| standing.owner() == Some(OWNER)), "every one of them is there");
        took
    }
}

/// Looks up prefixes one after another until `over` is set.
fn read(directory: &OwnershipDirectory, artifacts: u64, over: &AtomicBool) -> LoadStats {
    let mut lookups = LookupLoad::new(directory, artifacts);
    let (mut latencies, started) = (Vec::new(), Instant::now());
    while !over.load(Relaxed) {
        let took = lookups.next();
        if latencies.len() < 4 << 20 {
            latencies.push(took);
        }
    }
    summarize(latencies, started.elapsed())
}

/// Longest lookups in milliseconds.
#[derive(Default)]
struct LookupStalls {
    longest_cpu: f64,
    longest: f64,
    longest_descheduled: f64,
}

/// Looks up prefixes and, for each, asks the kernel how long this thread waited for a core.
fn measure_stalls(
    directory: &OwnershipDirectory,
    artifacts: u64,
    over: &AtomicBool,
) -> Result<LookupStalls, LedgerBenchError> {
    let (mut lookups, mut found) = (LookupLoad::new(directory, artifacts), LookupStalls::default());
    let waits = File::open("/proc/thread-self/schedstat").map_err(LedgerBenchError::system("read a thread's waits"))?;
    while !over.load(Relaxed) {
        let before = scheduler_wait(&waits)?;
        let took = lookups.next();
        let kept_off = scheduler_wait(&waits)?.saturating_sub(before);
        let longer = |than: f64, one: Duration| than.max(one.as_secs_f64() * 1e3);
        found.longest_cpu = longer(found.longest_cpu, took.saturating_sub(kept_off));
        found.longest = longer(found.longest, took);
        found.longest_descheduled = longer(found.longest_descheduled, kept_off.min(took));
    }
    Ok(found)
}

/// Total time this thread has waited for a core: the second number in its `schedstat`.
fn scheduler_wait(schedstat: &File) -> Result<Duration, LedgerBenchError> {
    let mut line = [0; 96];
    let length = schedstat.read_at(&mut line, 0).map_err(LedgerBenchError::system("read a thread's waits"))?;
    let nanos = std::str::from_utf8(&line[..length]).ok().and_then(|line| line.split(' ').nth(1)?.parse().ok());
    nanos.map(Duration::from_nanos).ok_or_else(|| LedgerBenchError::Usage("schedstat has no second number".into()))
}

/// Returns a line of this process's `/proc/self/status`, in bytes.
fn memory(line: &str) -> Result<u64, LedgerBenchError> {
    let status = std::fs::read_to_string("/proc/self/status").map_err(LedgerBenchError::system("read memory"))?;
    let found = status.lines().find_map(|found| found.strip_prefix(line)?.strip_prefix(':'));
    let kib = found.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.map(|kib| kib << 10).ok_or_else(|| LedgerBenchError::Usage(format!("no {line}")))
}
