//! A run: sets up the network, forms the cluster, starts the load, executes one nemesis after the other, and judges.

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::NemesisError;
use crate::check::GuaranteeViolation;
use crate::cluster::{ClusterSetup, ProcessCluster};
use crate::fault_rng::FaultRng;
use crate::faults::Nemesis;
use crate::formation;
use crate::history::{MemberSlot, OperationHistory};
use crate::load::LoadClients;
use crate::options::Options;
use crate::registers;
use crate::report::{BackgroundTraffic, NemesisReport};
use crate::streams::StreamClients;
use crate::test_network::{NetworkBackend, SyscallFaultInjector, TestNetwork};
use crate::testbed::{RunLength, TrialEnvironment};
use crate::trial::{self, TrialOutcome};
use crate::watch::WatchClients;

/// Slot with the small disk, if there are several nodes.
const SMALL_DISK: MemberSlot = MemberSlot(3);
const WORKERS: usize = 2;
/// Number of artifacts whose pins and groups are written.
const ARTIFACTS: usize = 3;

/// Runs everything and returns the failures; empty if all guarantees held. Ends early and cleanly at SIGINT and
/// SIGTERM.
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
    let ground = Arc::new(TestNetwork::create().await?);
    let mut report = NemesisReport {
        seed: options.seed,
        stage: ground.isolation().as_str(),
        without_namespaces,
        without_levers: None,
        outcomes: Vec::new(),
        broken: Vec::new(),
        seen: BackgroundTraffic::default(),
        folder: folder.display().to_string(),
        took: 0.0,
    };
    let small_disk = if options.voters > 1 { SMALL_DISK } else { MemberSlot(1) };
    let small_disk = (ground.isolation() == NetworkBackend::Namespaces).then_some(small_disk);
    std::fs::create_dir_all(&folder).map_err(NemesisError::system(folder.display().to_string()))?;
    let levers = SyscallFaultInjector::build(&folder);
    if let Err(why) = &levers {
        say(&format!("NO SLOW OR FAILING DISKS AND NO ODD CLOCKS: {why}"))?;
        report.without_levers = Some(why.to_string());
    }
    let (binary, levers) = (options.binary.clone(), levers.ok());
    let setup =
        ClusterSetup { binary, folder: folder.clone(), lease: options.lease, small_disk, syscall_faults: levers };
    let mut cluster = ProcessCluster::new(setup, ground.clone(), WORKERS).await?;
    formation::form(&mut cluster, options.voters).await?;
    let mut environment = build_testbed(options, cluster, ground).await?;
    let done = nemeses(options, &mut environment, &mut report).await;
    match final_checks(&mut environment).await {
        Ok(broken) => report.broken.extend(broken.iter().map(ToString::to_string)),
        Err(error) => report.broken.push(error.to_string()),
    }
    environment.history.save(&folder.join("history.jsonl"))?;
    let (changes, resumed) = environment.watchers.count();
    let (carried, streams) = (environment.network.relay_counts().0, environment.streams.count());
    let registers = environment.history.read(|kept| kept.register_operations.len());
    report.seen = BackgroundTraffic { carried, changes, resumed, streams, registers };
    report.took = began.elapsed().as_secs_f64();
    say(&report.table())?;
    if let Some(path) = &options.json {
        let json = serde_json::to_string_pretty(&report).expect("numbers and names make JSON");
        std::fs::write(path, json).map_err(NemesisError::system(path.display().to_string()))?;
    }
    done?;
    Ok(verdict(&report, options))
}

/// Starts load, watches and streams on a formed cluster.
async fn build_testbed(
    options: &Options,
    cluster: ProcessCluster,
    ground: Arc<TestNetwork>,
) -> Result<TrialEnvironment, NemesisError> {
    let history = Arc::new(OperationHistory::new());
    let dice = FaultRng::new(options.seed);
    let leader = cluster.leader(crate::testbed::OPERATOR_TIMEOUT).await?;
    let subjects = formation::open_sessions(&cluster, leader, options.amount.session_count()).await?;
    let (_, owners) = watch::channel(cluster.addresses().live_owners(leader).await?);
    let load = (options.amount, &dice);
    let mut artifacts = Vec::new();
    for subject in subjects.iter().take(ARTIFACTS) {
        artifacts.extend(cluster.addresses().head_artifact(leader, *subject).await?);
    }
    let registers = registers::registers(&artifacts);
    // Their first values are part of the history, so that no later read is taken for them.
    registers::read_all(&registers, (cluster.addresses(), &[leader]), &history).await?;
    let objects = (subjects, registers, owners);
    let load = LoadClients::start(load, history.clone(), cluster.addresses().clone(), objects);
    load.set_slots(cluster.running_slots());
    let watchers = WatchClients::start(cluster.addresses(), &cluster.seats()).await?;
    let streams = StreamClients::start(cluster.addresses().clone(), &cluster.seats(), history.clone());
    let (pace, lease) = (options.pace, options.lease);
    Ok(TrialEnvironment { cluster, network: ground, history, load, watchers, streams, rng: dice, pace, lease })
}

async fn nemeses(
    options: &Options,
    environment: &mut TrialEnvironment,
    report: &mut NemesisReport,
) -> Result<(), NemesisError> {
    let all = Nemesis::ALL.into_iter().filter(|nemesis| nemesis.applies_to(options.pace, options.voters));
    let chosen = if options.only.is_empty() { all.collect() } else { options.only.clone() };
    let until = Instant::now() + Duration::from_secs(60 * options.minutes);
    loop {
        for nemesis in &chosen {
            let outcome = match trial::run(*nemesis, environment).await {
                Ok(outcome) => outcome,
                Err(error) => TrialOutcome::failed(*nemesis, &error),
            };
            let word = match (outcome.holds(), outcome.faults) {
                (false, _) => "BROKEN",
                (true, 0) => "NOT RUN",
                (true, _) => "holds",
            };
            say(&format!("{:<24} {word} {}", outcome.nemesis, outcome.note))?;
            let broken = !outcome.holds();
            report.outcomes.push(outcome);
            // Trials after a violation prove nothing.
            if broken {
                return Ok(());
            }
            if options.pace == RunLength::Long && Instant::now() > until {
                return Ok(());
            }
        }
        if options.pace == RunLength::Quick {
            return Ok(());
        }
    }
}

/// Checks done once at the end: the ledger's own invariants in every node's snapshot.
async fn final_checks(environment: &mut TrialEnvironment) -> Result<Vec<GuaranteeViolation>, NemesisError> {
    let _held = environment.load.pause().await;
    let mut broken = Vec::new();
    for seat in environment.cluster.running_slots() {
        broken.extend(crate::snapshot::check(environment, seat).await?);
    }
    Ok(broken)
}

fn verdict(report: &NemesisReport, options: &Options) -> String {
    let replay = format!(
        "replay with `nemesis {}--seed {}`; logs and histories are kept in {}",
        if options.pace == RunLength::Quick { "--quick " } else { "" },
        options.seed,
        report.folder
    );
    match (report.holds(), report.inconclusive().as_slice()) {
        (true, []) => String::new(),
        (true, uncounted) => format!("too little load to count during {}; {replay}", uncounted.join(", ")),
        (false, _) => format!("a promise is broken; {replay}"),
    }
}

fn say(text: &str) -> Result<(), NemesisError> {
    writeln!(std::io::stdout(), "{text}").map_err(NemesisError::system("print"))
}
