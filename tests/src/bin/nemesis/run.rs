//! A run: the ground is laid, the cluster formed, the load started; then one nemesis after the other; then the verdict.

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::NemesisError;
use crate::arena::{Arena, Pace};
use crate::check::Broken;
use crate::cluster::{Cluster, Setup};
use crate::dice::Dice;
use crate::faults::Nemesis;
use crate::formation;
use crate::ground::{Ground, Levers, Stage};
use crate::history::{History, Seat};
use crate::load::Load;
use crate::options::Options;
use crate::report::{Report, Seen};
use crate::streams::Streams;
use crate::trial::{self, Outcome};
use crate::watch::Watchers;

/// Whose disk is small, of several nodes.
const SMALL_DISK: Seat = Seat(3);
const WORKERS: usize = 2;

/// Runs everything; returns what is wrong, nothing when all held. Ends early, and cleanly, at SIGINT and SIGTERM.
pub(crate) async fn run(options: &Options, without_namespaces: Option<String>) -> Result<String, NemesisError> {
    let mut terminate = signal(SignalKind::terminate()).map_err(NemesisError::system("wait for SIGTERM"))?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(NemesisError::system("wait for SIGINT"))?;
    // Dropping the run ends every process that it started.
    tokio::select! {
        done = all(options, without_namespaces) => done,
        _ = terminate.recv() => Ok("ended by SIGTERM".into()),
        _ = interrupt.recv() => Ok("interrupted".into()),
    }
}

async fn all(options: &Options, without_namespaces: Option<String>) -> Result<String, NemesisError> {
    let began = Instant::now();
    let folder = options.folder.join(format!("seed-{}", options.seed));
    if let Err(error) = std::fs::remove_dir_all(&folder)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        return Err(NemesisError::system(format!("empty {}", folder.display()))(error));
    }
    say(&format!("seed {}; logs and histories in {}", options.seed, folder.display()))?;
    if let Some(why) = &without_namespaces {
        say(&format!("NO NETWORK NAMESPACES ({why}): loopback and relay only"))?;
    }
    let ground = Arc::new(Ground::lay().await?);
    let mut report = Report {
        seed: options.seed,
        stage: ground.stage().as_str(),
        without_namespaces,
        without_levers: None,
        outcomes: Vec::new(),
        broken: Vec::new(),
        seen: Seen::default(),
        folder: folder.display().to_string(),
        took: 0.0,
    };
    let small_disk = if options.voters > 1 { SMALL_DISK } else { Seat(1) };
    let small_disk = (ground.stage() == Stage::Namespaces).then_some(small_disk);
    std::fs::create_dir_all(&folder).map_err(NemesisError::system(folder.display().to_string()))?;
    let levers = Levers::build(&folder);
    if let Err(why) = &levers {
        say(&format!("NO SLOW OR FAILING DISKS AND NO ODD CLOCKS: {why}"))?;
        report.without_levers = Some(why.to_string());
    }
    let (binary, levers) = (options.binary.clone(), levers.ok());
    let setup = Setup { binary, folder: folder.clone(), lease: options.lease, small_disk, levers };
    let mut cluster = Cluster::new(setup, ground.clone(), WORKERS).await?;
    formation::form(&mut cluster, options.voters).await?;
    let mut arena = arena(options, cluster, ground).await?;
    let done = nemeses(options, &mut arena, &mut report).await;
    match last_checks(&mut arena).await {
        Ok(broken) => report.broken.extend(broken.iter().map(ToString::to_string)),
        Err(error) => report.broken.push(error.to_string()),
    }
    arena.history.save(&folder.join("history.jsonl"))?;
    let (changes, resumed) = arena.watchers.count();
    let (carried, streams) = (arena.ground.carried().0, arena.streams.count());
    report.seen = Seen { carried, changes, resumed, streams };
    report.took = began.elapsed().as_secs_f64();
    say(&report.table())?;
    if let Some(path) = &options.json {
        let json = serde_json::to_string_pretty(&report).expect("numbers and names make JSON");
        std::fs::write(path, json).map_err(NemesisError::system(path.display().to_string()))?;
    }
    done?;
    Ok(verdict(&report, options))
}

/// Load, watches and streams over a cluster that is formed.
async fn arena(options: &Options, cluster: Cluster, ground: Arc<Ground>) -> Result<Arena, NemesisError> {
    let history = Arc::new(History::new());
    let dice = Dice::new(options.seed);
    let leader = cluster.leader(crate::arena::PATIENCE).await?;
    let subjects = formation::subjects(&cluster, leader, options.amount.subjects()).await?;
    let (_, owners) = watch::channel(cluster.doors().owners(leader).await?);
    let load = (options.amount, &dice);
    let load = Load::start(load, history.clone(), cluster.doors().clone(), (subjects, owners));
    load.turn_to(cluster.awake());
    let watchers = Watchers::start(cluster.doors(), &cluster.seats()).await?;
    let streams = Streams::start(cluster.doors().clone(), &cluster.seats(), history.clone());
    let (pace, lease) = (options.pace, options.lease);
    Ok(Arena { cluster, ground, history, load, watchers, streams, dice, pace, lease })
}

async fn nemeses(options: &Options, arena: &mut Arena, report: &mut Report) -> Result<(), NemesisError> {
    let all = Nemesis::ALL.into_iter().filter(|nemesis| nemesis.belongs_to(options.pace, options.voters));
    let chosen = if options.only.is_empty() { all.collect() } else { options.only.clone() };
    let until = Instant::now() + Duration::from_secs(60 * options.minutes);
    loop {
        for nemesis in &chosen {
            let outcome = match trial::run(*nemesis, arena).await {
                Ok(outcome) => outcome,
                Err(error) => Outcome::failed(*nemesis, &error),
            };
            let word = match (outcome.holds(), outcome.faults) {
                (false, _) => "BROKEN",
                (true, 0) => "NOT RUN",
                (true, _) => "holds",
            };
            say(&format!("{:<24} {word} {}", outcome.nemesis, outcome.note))?;
            let broken = !outcome.holds();
            report.outcomes.push(outcome);
            // What follows a broken promise shows nothing.
            if broken {
                return Ok(());
            }
            if options.pace == Pace::Long && Instant::now() > until {
                return Ok(());
            }
        }
        if options.pace == Pace::Quick {
            return Ok(());
        }
    }
}

/// What is checked once, when everything is over: the ledger's own invariants in every node's snapshot.
async fn last_checks(arena: &mut Arena) -> Result<Vec<Broken>, NemesisError> {
    let _held = arena.load.pause().await;
    let mut broken = Vec::new();
    for seat in arena.cluster.awake() {
        broken.extend(crate::snapshot::check(arena, seat).await?);
    }
    Ok(broken)
}

fn verdict(report: &Report, options: &Options) -> String {
    let replay = format!(
        "replay with `nemesis {}--seed {}`; logs and histories are kept in {}",
        if options.pace == Pace::Quick { "--quick " } else { "" },
        options.seed,
        report.folder
    );
    match (report.holds(), report.uncounted().as_slice()) {
        (true, []) => String::new(),
        (true, uncounted) => format!("too little load to count during {}; {replay}", uncounted.join(", ")),
        (false, _) => format!("a promise is broken; {replay}"),
    }
}

fn say(text: &str) -> Result<(), NemesisError> {
    writeln!(std::io::stdout(), "{text}").map_err(NemesisError::system("print"))
}
