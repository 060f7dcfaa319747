//! One node with many artifacts: memory, lookups while it writes and snapshots, and what a snapshot costs.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use futures::StreamExt;
use ledger::{Command, KvShape, Limits, Origin, Outcome, Run, Scope, Seal};
use ownership::{Directory, Options};
use serde::{Deserialize, Serialize};
use vocabulary::{Blocks, Bytes, Chain, Micros, ModelId, PrefixId, Seed, TenantId, Tokens};

use crate::load::{Measured, measured};
use crate::node::{OWNER, register, submit};
use crate::{BenchError, load};

const BATCH: u64 = 1_000;
const SAMPLE: u64 = 1 << 16;

/// What was found.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Scale {
    pub(crate) artifacts: u64,
    pub(crate) bytes_an_artifact: f64,
    /// Lookups beside writes.
    pub(crate) lookups: Measured,
    /// The writes beside them.
    pub(crate) writes: Measured,
    pub(crate) snapshot_seconds: f64,
    pub(crate) snapshot_bytes: u64,
    /// Longest lookup during writes and snapshot, in milliseconds.
    pub(crate) stall_ms: f64,
    /// Longest time that a thread which only looks at the clock was kept from running meanwhile.
    pub(crate) kept_off_ms: f64,
    /// Highest memory during the snapshot over that before.
    pub(crate) peak: f64,
}

/// Runs in a process of its own, because it measures that process's memory.
pub(crate) async fn run(artifacts: u64, folder: PathBuf, window: Duration) -> Result<Scale, BenchError> {
    // No snapshot but the one that is measured.
    let options = Options { snapshot_entries: u64::MAX / 2, snapshot_bytes: u64::MAX / 2, ..Options::new(folder) };
    let directory = Arc::new(Directory::open(options).await.map_err(BenchError::ledger)?);
    let limits = Limits {
        artifacts: u32::try_from(artifacts + artifacts / 2).unwrap_or(u32::MAX),
        artifact_idle: Micros::of(Duration::from_secs(30 * 86_400)),
        ..Limits::default()
    };
    for command in [Command::RaiseLevel(2), Command::SetLimits(Box::new(limits)), register()] {
        submit(&directory, command).await?;
    }
    let before = memory("VmRSS")?;
    fill(&directory, artifacts).await?;
    let full = memory("VmRSS")?;
    let mut scale =
        Scale { artifacts, bytes_an_artifact: (full - before) as f64 / artifacts as f64, ..Scale::default() };

    let over = Arc::new(AtomicBool::new(false));
    let reader = std::thread::spawn({
        let (directory, over) = (directory.clone(), over.clone());
        move || read(&directory, artifacts, &over)
    });
    let clock = std::thread::spawn({
        let over = over.clone();
        move || kept_off(&over)
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
    std::fs::write("/proc/self/clear_refs", "5").map_err(BenchError::system("reset the memory's high-water mark"))?;
    let steady = memory("VmRSS")?;
    let started = Instant::now();
    let saved = directory.save_snapshot().await.map_err(BenchError::ledger)?;
    (scale.snapshot_seconds, scale.snapshot_bytes) = (started.elapsed().as_secs_f64(), saved.bytes);
    scale.peak = memory("VmHWM")? as f64 / steady as f64;
    scale.writes = writing.await.map_err(|error| BenchError::Usage(error.to_string()))??;
    over.store(true, Relaxed);
    let gone = |_| BenchError::Usage("a reader panicked".into());
    (scale.lookups, scale.stall_ms) = reader.join().map_err(gone)?;
    scale.kept_off_ms = clock.join().map_err(gone)?;
    Ok(scale)
}

fn chain(artifact: u64) -> Chain {
    let tokens = [artifact as u32, (artifact >> 32) as u32];
    Chain::over_tokens(PrefixId(1), Seed(1), Tokens(2), &tokens)
}

fn origin() -> Origin {
    let shape =
        KvShape { format: Default::default(), kinds: Default::default(), block: Tokens(2), block_bytes: Bytes(64) };
    Origin { tenant: TenantId::default(), model: ModelId::from("bench"), root: PrefixId(1), shape }
}

fn seal(artifact: u64, chain: &Chain) -> Command {
    let run = Run::of(chain, Blocks(0), chain.blocks()).unwrap_or_else(|| panic!("artifact {artifact} has a block"));
    Command::Seal(Seal { session: None, origin: origin(), run, extent: None, owner: OWNER })
}

async fn fill(directory: &Directory, artifacts: u64) -> Result<(), BenchError> {
    let batches = (0..artifacts).step_by(BATCH as usize).map(|first| async move {
        let all = first..(first + BATCH).min(artifacts);
        let outcome = submit(directory, Command::Batch(all.map(|n| seal(n, &chain(n))).collect())).await?;
        match outcome {
            Outcome::Batch(parts) if parts.iter().all(|part| matches!(part, Outcome::Sealed { .. })) => Ok(()),
            other => Err(BenchError::Answer { target: "the ledger".into(), got: format!("{other:?}") }),
        }
    });
    let mut batches = futures::stream::iter(batches).buffer_unordered(8);
    while let Some(done) = batches.next().await {
        done?;
    }
    Ok(())
}

/// Looks prefixes up, one after another: the view, the deepest kept prefix, and who has it.
fn read(directory: &Directory, artifacts: u64, over: &AtomicBool) -> (Measured, f64) {
    let step = (artifacts / SAMPLE).max(1);
    let chains: Vec<Chain> = (0..SAMPLE.min(artifacts)).map(|n| chain(n * step)).collect();
    let scope: Scope = origin().scope();
    let (mut latencies, mut longest, started) = (Vec::new(), Duration::ZERO, Instant::now());
    // An odd stride visits all of them without following their order.
    let mut place = 0usize;
    while !over.load(Relaxed) {
        place = (place + 40_503) % chains.len();
        let before = Instant::now();
        let view = directory.view();
        let found = view.deepest(scope, &chains[place]).map(|(_, artifact)| view.standing(&artifact));
        drop(view);
        let took = before.elapsed();
        assert!(found.is_some_and(|standing| standing.owner() == Some(OWNER)), "every one of them is there");
        longest = longest.max(took);
        if latencies.len() < 4 << 20 {
            latencies.push(took);
        }
    }
    (measured(latencies, started.elapsed()), longest.as_secs_f64() * 1e3)
}

fn kept_off(over: &AtomicBool) -> f64 {
    let (mut longest, mut last) = (Duration::ZERO, Instant::now());
    while !over.load(Relaxed) {
        let now = Instant::now();
        longest = longest.max(now - last);
        last = now;
    }
    longest.as_secs_f64() * 1e3
}

/// A line of this process's memory, in bytes.
fn memory(line: &str) -> Result<u64, BenchError> {
    let status = std::fs::read_to_string("/proc/self/status").map_err(BenchError::system("read memory"))?;
    let found = status.lines().find_map(|found| found.strip_prefix(line)?.strip_prefix(':'));
    let kib = found.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.map(|kib| kib << 10).ok_or_else(|| BenchError::Usage(format!("no {line}")))
}
