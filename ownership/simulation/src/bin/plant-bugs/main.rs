//! `plant-bugs`: proves that the simulation finds every bug of `planted/bugs.toml`.
//!
//! The real sources never contain a bug: they are copied, the copy is edited and built once, and each bug is enabled in
//! a run of its own. The seed that is known to find a bug is replayed; `--hunt` searches from seed 1.

mod bugs;
mod copy;
mod trial;

use std::io::{Write, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc;
use std::time::Instant;

use clap::Parser;

use bugs::{BUGS_FILE, BugList, Finding};
use trial::{TrialEnd, advice, deviation};

/// Number of seeds to search if a bug's known seed no longer finds it.
const SHORT_HUNT_SEEDS: u64 = 50;

/// Plants bugs, and replays the seeds that find them.
#[derive(Parser)]
struct Options {
    /// Look for each bug from seed 1 on, whatever seed is known.
    #[arg(long)]
    hunt: bool,
    /// Seeds that a bug may take in a hunt; one that is not found by then was missed.
    #[arg(long, default_value_t = 2_000, requires = "hunt")]
    seeds: u64,
    /// Seeds that the copy must pass with no bug switched on.
    #[arg(long, default_value_t = 40)]
    control: u64,
    /// Only these.
    bugs: Vec<String>,
}

/// What prevents bugs from being planted, and what to do about it.
type PlantError = Box<dyn std::error::Error + Send + Sync>;

type Result<T, E = PlantError> = std::result::Result<T, E>;

/// Wraps an I/O error with the path that could not be read, written or started.
fn io_error_at(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> PlantError {
    let path = path.into();
    move |error| format!("{}: {error}", path.display()).into()
}

/// A bug, and the seed that is known to find it.
type KnownBug<'a> = (&'a str, Option<&'a Finding>);

fn main() -> ExitCode {
    match replay_all(&Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            say(&format!("the bugs could not be planted: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// Returns true if every bug is found, and nothing is found without a bug.
fn replay_all(options: &Options) -> Result<bool> {
    let started = Instant::now();
    let (binary, bugs) = copy::plant()?;
    let selected = selected_bugs(options, &bugs)?;
    say(&format!("the copy is built, {:.1} s", started.elapsed().as_secs_f64()));
    let started = Instant::now();
    let control = trial::hunt(&binary, None, options.control)?;
    match &control {
        TrialEnd::Passed => {}
        TrialEnd::Failed(Finding { seed, check }) => {
            say(&format!("without any bug: seed {seed}: {check}; `just simulate 1 --seed {seed}` tells all of it"));
        }
        TrialEnd::Crashed(why) => say(&format!("without any bug: the simulation ended: {why}")),
    }
    let found = if options.hunt { hunt(options, &binary, &selected)? } else { replay(&binary, &selected)? };
    say(&format!(
        "{found} of {} planted bugs found; without any, {} of {} seeds; {:.1} s",
        selected.len(),
        if control == TrialEnd::Passed { "all" } else { "not all" },
        options.control,
        started.elapsed().as_secs_f64()
    ));
    Ok(found == selected.len() && control == TrialEnd::Passed)
}

fn selected_bugs<'a>(options: &Options, bugs: &'a BugList) -> Result<Vec<KnownBug<'a>>> {
    if let Some(name) = options.bugs.iter().find(|name| !bugs.findings.contains_key(*name)) {
        return Err(format!("there is no bug named {name}; {BUGS_FILE} names them all").into());
    }
    let all = bugs.findings.iter().map(|(name, finding)| (name.as_str(), finding.as_ref()));
    Ok(all.filter(|(name, _)| options.bugs.is_empty() || options.bugs.iter().any(|wanted| wanted == name)).collect())
}

/// Replays the known seeds, one per core at a time, and searches for bugs whose seed has changed. Returns how many are
/// found as known.
fn replay(binary: &Path, wanted: &[KnownBug<'_>]) -> Result<usize> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let (next, (sender, results)) = (AtomicUsize::new(0), mpsc::channel());
    let changes: Vec<(&str, Option<String>)> = std::thread::scope(|scope| {
        for _ in 0..cores {
            let (sender, next) = (sender.clone(), &next);
            scope.spawn(move || {
                while let Some((name, finding)) = wanted.get(next.fetch_add(1, Relaxed)) {
                    drop(sender.send(replay_bug(binary, name, *finding).map(|change| (*name, change))));
                }
            });
        }
        drop(sender);
        results.into_iter().collect::<Result<_, _>>()
    })?;
    for (name, change) in changes.iter().filter_map(|(name, change)| Some((name, change.as_ref()?))) {
        let hunted = trial::hunt(binary, Some(name), SHORT_HUNT_SEEDS)?;
        say(&format!("CHANGED {name}: {change}; {}", advice(name, &hunted, SHORT_HUNT_SEEDS)));
    }
    Ok(changes.iter().filter(|(_, change)| change.is_none()).count())
}

/// Replays a bug's known seed; returns how the result differs.
fn replay_bug(binary: &Path, name: &str, finding: Option<&Finding>) -> Result<Option<String>> {
    let Some(finding) = finding else { return Ok(Some(format!("{BUGS_FILE} knows no seed that finds it"))) };
    let started = Instant::now();
    let change = deviation(finding, &trial::replay(binary, name, finding.seed)?);
    if change.is_none() {
        say_found(name, finding, started);
    }
    Ok(change)
}

/// Runs seeds for each bug until one fails. Returns how many bugs are found.
fn hunt(options: &Options, binary: &Path, wanted: &[KnownBug<'_>]) -> Result<usize> {
    let mut found = 0;
    for (name, _) in wanted {
        let started = Instant::now();
        let hunted = trial::hunt(binary, Some(name), options.seeds)?;
        let seconds = started.elapsed().as_secs_f64();
        match &hunted {
            TrialEnd::Failed(finding) => {
                found += 1;
                say_found(name, finding, started);
            }
            TrialEnd::Passed => say(&format!(
                "MISSED  {name:40} in {} seeds, {seconds:.1} s: add the check that would see it, or raise --seeds",
                options.seeds
            )),
            TrialEnd::Crashed(why) => {
                say(&format!("MISSED  {name:40} the simulation ended ({why}): correct its `replace` in {BUGS_FILE}"));
            }
        }
    }
    Ok(found)
}

fn say_found(name: &str, Finding { seed, check }: &Finding, started: Instant) {
    say(&format!("found   {name:40} seed {seed:4} {:5.1} s  {check}", started.elapsed().as_secs_f64()));
}

/// Prints a line; ignores a closed output.
fn say(line: &str) {
    drop(writeln!(stdout(), "{line}"));
}
