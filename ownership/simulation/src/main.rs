//! `simulate-quorum`: runs seeds, and reports which of them violate a property.

use std::io::{IsTerminal, Write, stdout};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc;
use std::time::Instant;

use clap::Parser;
use simulation::report::{SeedTotals, describe, verdict};
use simulation::{SeedReport, run, run_with_log};

/// Deterministic simulation of the quorum under faults.
#[derive(Parser)]
struct Options {
    /// Replay this seed alone, whatever --seeds and --from say, and tell all that happened.
    #[arg(long)]
    seed: Option<u64>,
    /// How many seeds.
    #[arg(long, default_value_t = 1_000)]
    seeds: u64,
    /// The first of them.
    #[arg(long, default_value_t = 1)]
    from: u64,
    /// Stop at the first seed that fails.
    #[arg(long)]
    until_failure: bool,
    /// Seeds that run at once; all cores when not given.
    #[arg(long)]
    threads: Option<u64>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let failed = match options.seed {
        Some(seed) => {
            let (report, story) = run_with_log(seed);
            story.iter().for_each(|line| say(line));
            say(&describe(&report));
            report.violation.is_some()
        }
        None => run_seeds(&options),
    };
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Runs many seeds on all threads. Returns whether one failed.
fn run_seeds(options: &Options) -> bool {
    let cores = || std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    let threads = options.threads.unwrap_or_else(cores).clamp(1, 256);
    let (next, end) = (AtomicU64::new(options.from), options.from.saturating_add(options.seeds));
    let (sender, reports) = mpsc::channel();
    let started = Instant::now();
    let totals = std::thread::scope(|scope| {
        for thread in 0..threads {
            let (sender, next) = (sender.clone(), &next);
            let work = move || {
                let seeds = std::iter::from_fn(|| Some(next.fetch_add(1, Relaxed)).filter(|seed| *seed < end));
                // The receiver stays until all senders are gone.
                for seed in seeds {
                    let report = run(seed);
                    if options.until_failure && report.violation.is_some() {
                        next.store(end, Relaxed);
                    }
                    drop(sender.send(report));
                }
            };
            let builder = std::thread::Builder::new().name(format!("seeds-{thread}"));
            drop(builder.spawn_scoped(scope, work));
        }
        drop(sender);
        collect_reports(&reports, options.seeds, started)
    });
    let rate = totals.seeds as f64 / started.elapsed().as_secs_f64();
    say(&format!("{totals}\n{rate:.1} seeds/s on {threads} threads, {:.0} s", started.elapsed().as_secs_f64()));
    if totals.seeds < options.seeds && totals.failed.is_empty() {
        say("not every seed ran: a thread ended early");
        return true;
    }
    !totals.failed.is_empty()
}

fn collect_reports(reports: &mpsc::Receiver<SeedReport>, all: u64, started: Instant) -> SeedTotals {
    let mut totals = SeedTotals::default();
    let is_terminal = stdout().is_terminal();
    for report in reports {
        if report.violation.is_some() {
            say(&verdict(&report));
        }
        totals.add(report);
        let rate = totals.seeds as f64 / started.elapsed().as_secs_f64();
        if is_terminal {
            let (done, all_done) = (totals.seeds, totals.seeds == all);
            let filled = (done * 40 / all.max(1)) as usize;
            let bar = format!("\r[{}{}] {done}/{all} {rate:.1} seeds/s", "#".repeat(filled), ".".repeat(40 - filled));
            let end = if all_done { "\n" } else { "" };
            drop(write!(stdout(), "{bar}{end}").and_then(|()| stdout().flush()));
        } else if totals.seeds.is_multiple_of(100) {
            say(&format!("{}/{all} seeds, {} failed, {rate:.1} seeds/s", totals.seeds, totals.failed.len()));
        }
    }
    totals
}

/// Prints a line; ignores a closed output.
fn say(line: &str) {
    drop(writeln!(stdout(), "{line}"));
}
