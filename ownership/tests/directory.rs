//! Tests of a quorum of one through the public interface: it keeps what it acknowledges, and refuses data that it
//! cannot verify.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command as Process, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ledger::{
    Command, KvBlockSpec, OpenSession, Outcome, OwnershipTransition, RegisterWorker, StepCommit, StepCommitOutcome,
    WorkerKind, WorkerLease, WorkerSpec,
};
use ownership::{ClusterId, LedgerNodeError, Options, OwnershipDirectory, RequestedLedgerLimits, SubmitError};
use vocabulary::{
    Blocks, Bytes, DpRank, HashSeed, Incarnation, Micros, ModelId, NodeId, Owner, PrefixChain, PrefixId, SessionId,
    TenantId, Tokens, WorkerId, WorkerRole,
};

const DATA_DIR: &str = "OWNERSHIP_TEST_DATA_DIR";

fn options(folder: &Path) -> Options {
    Options { tick: Duration::from_millis(50), ..Options::new(folder) }
}

async fn open(folder: &Path) -> OwnershipDirectory {
    OwnershipDirectory::open(options(folder)).await.unwrap()
}

fn open_session(n: u128) -> Command {
    let (tenant, model) = (TenantId::default(), ModelId::from("tiny"));
    Command::OpenSession(OpenSession { session: SessionId(n), tenant, model, parent: None })
}

fn register(n: u64, ttl: Duration) -> Command {
    Command::RegisterWorker(RegisterWorker {
        worker: WorkerId(n),
        incarnation: Incarnation(1),
        spec: WorkerSpec {
            endpoint: "http://worker".into(),
            role: WorkerRole::Hybrid,
            kind: WorkerKind::Engine,
            models: Arc::from([ModelId::from("tiny")]),
            ranks: 1,
        },
        ttl: Micros::of(ttl),
    })
}

fn step(session: u128, blocks: u32, base: u64) -> Command {
    let tokens: Vec<u32> = (0..blocks).map(|block| block ^ (session as u32) << 16).collect();
    let chain = PrefixChain::over_tokens(PrefixId(1), HashSeed(1), Tokens(1), &tokens);
    Command::commit_step(StepCommit {
        session: SessionId(session),
        tenant: &TenantId::default(),
        model: &ModelId::from("tiny"),
        parent: None,
        chain: &chain,
        sealed: chain.blocks(),
        base: Blocks(base),
        replaced_head: None,
        owner: Owner { worker: WorkerId(1), incarnation: Incarnation(1), rank: DpRank(0) },
        ownership: OwnershipTransition::Claim,
        shape: KvBlockSpec {
            format: Default::default(),
            kinds: Default::default(),
            block: Tokens(1),
            block_bytes: Bytes(64),
        },
        router: NodeId(1),
    })
    .unwrap()
}

async fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !done() {
        assert!(Instant::now() < deadline, "waited too long for {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn the_view_contains_every_acknowledged_command() {
    let folder = tempfile::tempdir().unwrap();
    let directory = open(folder.path()).await;
    directory.submit(register(1, Duration::from_secs(60))).unwrap().await.unwrap();
    for n in 1..50 {
        let outcome = directory.submit(step(n, 40, 0)).unwrap().await.unwrap();
        assert!(StepCommitOutcome::of(&outcome).sealed);
        assert!(directory.view().session(SessionId(n)).unwrap().owner.is_some());
    }
    let view = directory.view();
    assert_eq!((view.quorum().leader, view.quorum().stale), (Some(NodeId(1)), false));
    // The node's own tick may be in progress.
    let idle = async {
        while (directory.stats().queue_depth, directory.stats().apply_lag) != (0, 0) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), idle).await.expect("nothing waits");
    let readings = directory.stats();
    assert!(readings.commands >= 50 && readings.log_bytes > 0);
    directory.close().await.unwrap();
    assert_eq!(directory.submit(open_session(99)).err(), Some(SubmitError::Closed));
}

#[tokio::test]
async fn a_restart_restores_the_state_and_epochs_keep_rising() {
    let folder = tempfile::tempdir().unwrap();
    let mut last = None;
    for life in 1..4u128 {
        // Without ticks only submitted commands are written.
        let tick = Duration::from_secs(3_600);
        let directory = OwnershipDirectory::open(Options { tick, ..options(folder.path()) }).await.unwrap();
        let (view, cluster) = (directory.view(), directory.cluster());
        if let Some((hash, sessions, epoch, known)) = last {
            assert_eq!((hash_of(&view), view.session_count(), cluster), (hash, sessions, known));
            let outcome = directory.submit(open_session(1_000 + life)).unwrap().await.unwrap();
            assert!(matches!(outcome, Outcome::Opened { epoch: new } if new > epoch));
        }
        directory.submit(register(1, Duration::from_secs(60))).unwrap().await.unwrap();
        for n in 0..20 {
            directory.submit(step(life * 100 + n, 70, 0)).unwrap().await.unwrap();
        }
        directory.close().await.unwrap();
        let view = directory.view();
        let epoch = view.sessions().map(|session| session.epoch).max().unwrap();
        last = Some((hash_of(&view), view.session_count(), epoch, cluster));
    }

    /// Hashes the ledger; a new term's blank entries only increase the applied index.
    fn hash_of(view: &ownership::LedgerView) -> u128 {
        let mut ledger = view.ledger().clone();
        ledger.apply_empty(1_000_000);
        ledger.state_hash()
    }
}

#[tokio::test]
async fn snapshots_replace_the_log_and_a_restart_needs_both() {
    let folder = tempfile::tempdir().unwrap();
    let directory = open(folder.path()).await;
    directory.submit(register(1, Duration::from_secs(60))).unwrap().await.unwrap();
    for n in 0..1_500 {
        directory.submit(step(n, 3, 0)).unwrap().await.unwrap();
    }
    directory.write_snapshot().await.unwrap();
    for n in 1_500..1_550 {
        directory.submit(step(n, 3, 0)).unwrap().await.unwrap();
    }
    directory.close().await.unwrap();
    drop(directory);
    let directory = open(folder.path()).await;
    assert_eq!(directory.view().session_count(), 1_550);
    directory.close().await.unwrap();
    drop(directory);

    std::fs::remove_file(folder.path().join("snapshot")).unwrap();
    let error = OwnershipDirectory::open(options(folder.path())).await.unwrap_err();
    assert!(matches!(&error, LedgerNodeError::Damaged { path, .. } if path.ends_with("snapshot")), "{error}");
}

#[tokio::test]
async fn concurrent_snapshot_requests_during_writes_are_all_answered() {
    let folder = tempfile::tempdir().unwrap();
    let directory = open(folder.path()).await;
    let asked = async || {
        for _ in 0..10 {
            directory.write_snapshot().await.unwrap();
        }
    };
    let writing = async {
        for n in 0..400 {
            directory.submit(open_session(n)).unwrap().await.unwrap();
        }
    };
    tokio::join!(asked(), asked(), asked(), writing);
    directory.close().await.unwrap();
}

#[tokio::test]
async fn the_ledger_adopts_and_keeps_the_limits_its_leader_configures() {
    let folder = tempfile::tempdir().unwrap();
    let room = RequestedLedgerLimits { artifacts: Some(10_000_000), sessions: Some(4_000_000) };
    let directory = OwnershipDirectory::open(Options { desired_limits: room, ..options(folder.path()) }).await.unwrap();
    let has = |directory: &OwnershipDirectory| {
        let view = directory.view();
        (view.limits().artifacts, view.limits().sessions) == (10_000_000, 4_000_000)
    };
    until("the bounds to be widened", || has(&directory)).await;
    directory.close().await.unwrap();
    drop(directory);
    let directory = open(folder.path()).await;
    assert!(has(&directory), "a node that wants less does not narrow them");
    directory.close().await.unwrap();
}

#[tokio::test]
async fn leases_last_while_reported_and_then_expire() {
    let folder = tempfile::tempdir().unwrap();
    let lease = Duration::from_millis(600);
    let directory = OwnershipDirectory::open(Options { lease, ..options(folder.path()) }).await.unwrap();
    for n in [1, 2] {
        directory.submit(register(n, lease)).unwrap().await.unwrap();
    }
    let live = |n| directory.view().worker(WorkerId(n)).unwrap().is_live();
    until("the silent worker's lease to end", || {
        assert!(directory.report_alive(WorkerId(1), Incarnation(1)));
        !live(2)
    })
    .await;
    assert!(live(1), "the reported one goes on");
    let readings = directory.stats();
    assert!(readings.renewals > 2, "{readings:?}");
    let WorkerLease::Expired { at } = directory.view().worker(WorkerId(2)).unwrap().lease else { panic!("expired") };
    assert!(at.0 >= 600_000, "not before its deadline on the ledger's clock: {at}");
    until("the end to be counted", || directory.stats().expired >= 1).await;
    directory.close().await.unwrap();
}

#[tokio::test]
async fn a_full_queue_refuses_at_once_and_counts_the_refusal() {
    let folder = tempfile::tempdir().unwrap();
    let directory = OwnershipDirectory::open(Options { queue: 8, ..options(folder.path()) }).await.unwrap();
    // The runtime has one thread and this test does not yield, so nothing drains the queue meanwhile.
    let results: Vec<_> = (0..100).map(|n| directory.submit(open_session(n))).collect();
    let refused = results.iter().filter(|result| matches!(result, Err(SubmitError::QueueFull))).count();
    assert_eq!(refused, 92);
    assert_eq!(directory.stats().queue_depth, 8);
    for ticket in results.into_iter().flatten() {
        assert!(matches!(ticket.await, Ok(Outcome::Opened { .. })));
    }
    assert_eq!(directory.stats().failures.get("queue_full"), Some(&92));
    directory.close().await.unwrap();
}

#[tokio::test]
async fn a_data_directory_in_use_or_of_another_cluster_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let cluster = Some(ClusterId(7));
    let directory = OwnershipDirectory::open(Options { cluster, ..options(folder.path()) }).await.unwrap();
    let error = OwnershipDirectory::open(options(folder.path())).await.unwrap_err();
    assert!(matches!(error, LedgerNodeError::Locked { .. }), "{error}");
    directory.close().await.unwrap();
    drop(directory);
    let other = Some(ClusterId(8));
    let error = OwnershipDirectory::open(Options { cluster: other, ..options(folder.path()) }).await.unwrap_err();
    assert!(matches!(error, LedgerNodeError::OtherCluster { .. }), "{error}");
}

fn newest_chunk(folder: &Path) -> PathBuf {
    let chunks = std::fs::read_dir(folder.join("log")).unwrap().map(|entry| entry.unwrap().path());
    chunks.filter(|path| path.extension().is_some_and(|e| e == "wal")).max().unwrap()
}

async fn written(folder: &Path) {
    let directory = open(folder).await;
    for n in 0..30 {
        directory.submit(open_session(n)).unwrap().await.unwrap();
    }
    directory.close().await.unwrap();
}

#[tokio::test]
async fn a_log_that_lost_committed_entries_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    written(folder.path()).await;
    let chunk = newest_chunk(folder.path());
    let bytes = std::fs::read(&chunk).unwrap();
    std::fs::write(&chunk, &bytes[..bytes.len() / 2]).unwrap();
    let error = OwnershipDirectory::open(options(folder.path())).await.unwrap_err();
    assert!(error.to_string().contains("acknowledged"), "{error}");
    assert_eq!(std::fs::metadata(&chunk).unwrap().len() as usize, bytes.len() / 2, "nothing was cut further");
}

#[tokio::test]
async fn a_flipped_bit_in_the_log_is_refused_with_file_and_offset() {
    let folder = tempfile::tempdir().unwrap();
    written(folder.path()).await;
    let chunk = newest_chunk(folder.path());
    let mut bytes = std::fs::read(&chunk).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x20;
    std::fs::write(&chunk, &bytes).unwrap();
    let error = OwnershipDirectory::open(options(folder.path())).await.unwrap_err().to_string();
    assert!(error.contains(".wal") && error.contains("offset"), "{error}");
}

#[tokio::test]
async fn an_uncommitted_tail_is_cut_off() {
    let folder = tempfile::tempdir().unwrap();
    written(folder.path()).await;
    let chunk = newest_chunk(folder.path());
    let mut bytes = std::fs::read(&chunk).unwrap();
    // The start of one more record, as a crash during a write leaves it.
    let torn = bytes[..7].to_vec();
    bytes.extend(torn);
    std::fs::write(&chunk, &bytes).unwrap();
    let directory = open(folder.path()).await;
    assert_eq!(directory.view().session_count(), 30);
    directory.close().await.unwrap();
}

/// Child process that is killed: writes as fast as it can and prints what was acknowledged.
#[test]
#[ignore = "run by the test below, in a process of its own"]
fn child_writes_until_killed() {
    let Ok(folder) = std::env::var(DATA_DIR) else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let tick = Duration::from_millis(5);
        let options = Options { snapshot_entries: 10, tick, ..options(Path::new(&folder)) };
        let directory = Arc::new(OwnershipDirectory::open(options).await.unwrap());
        directory.submit(register(1, Duration::from_secs(600))).unwrap().await.unwrap();
        let first = directory.view().session_count() as u128;
        for round in 0u128.. {
            let tickets: Vec<_> = (0..8)
                .map(|lane| first + round * 8 + lane)
                .map(|n| (n, directory.submit(step(n, 40, 0)).unwrap()))
                .collect();
            for (n, ticket) in tickets {
                let granted = StepCommitOutcome::of(&ticket.await.unwrap()).granted.unwrap();
                use std::io::Write;
                let mut out = std::io::stdout().lock();
                writeln!(out, "acknowledged {n} {granted}").unwrap();
                out.flush().unwrap();
            }
        }
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_writes_survive_kill_9() {
    let folder = tempfile::tempdir().unwrap();
    let mut acknowledged: Vec<(u128, String)> = Vec::new();
    for life in 1..=4 {
        let mut child = Process::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_writes_until_killed", "--ignored", "--nocapture"])
            .env(DATA_DIR, folder.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        let wanted = acknowledged.len() + 200 * life;
        let mut read = |line: &mut String| lines.read_line(line).unwrap();
        let mut line = String::new();
        while acknowledged.len() < wanted && read(&mut line) > 0 {
            parse_acknowledged(&mut acknowledged, &line);
            line.clear();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        // What it printed before it was killed counts, too.
        let mut rest = String::new();
        lines.read_to_string(&mut rest).unwrap();
        rest.split_inclusive('\n')
            .filter(|line| line.ends_with('\n'))
            .for_each(|line| parse_acknowledged(&mut acknowledged, line));
        assert!(acknowledged.len() >= wanted, "life {life} acknowledged too little");

        let directory = open(folder.path()).await;
        let view = directory.view();
        for (n, epoch) in &acknowledged {
            let session = view.session(SessionId(*n)).unwrap_or_else(|| panic!("session {n} was acknowledged"));
            assert_eq!((&session.epoch.to_string(), session.heads.len()), (epoch, 1));
        }
        ledger::invariants::check(&view).unwrap();
        directory.close().await.unwrap();
    }
    assert!(folder.path().join("snapshot").exists(), "snapshots were written on the way");
}

fn parse_acknowledged(acknowledged: &mut Vec<(u128, String)>, line: &str) {
    let mut words = line.split_whitespace().skip_while(|word| *word != "acknowledged").skip(1);
    if let (Some(n), Some(epoch)) = (words.next(), words.next()) {
        acknowledged.push((n.parse().unwrap(), epoch.to_owned()));
    }
}

#[tokio::test]
async fn a_flipped_byte_in_a_snapshot_is_refused_with_file_and_offset() {
    let folder = tempfile::tempdir().unwrap();
    let directory = open(folder.path()).await;
    for n in 0..50 {
        directory.submit(open_session(n)).unwrap().await.unwrap();
    }
    directory.write_snapshot().await.unwrap();
    directory.close().await.unwrap();
    drop(directory);
    let path = folder.path().join("snapshot");
    let good = std::fs::read(&path).unwrap();
    for at in [0, 9, 20, good.len() / 2, good.len() - 1] {
        let mut bad = good.clone();
        bad[at] ^= 2;
        std::fs::write(&path, &bad).unwrap();
        let error = OwnershipDirectory::open(options(folder.path())).await.unwrap_err().to_string();
        let named = error.contains(path.to_str().unwrap()) && error.contains("offset");
        assert!(named && error.contains("snapshot restore"), "byte {at}: {error}");
        assert!(error.starts_with(&path.display().to_string()), "in this room's words, not in Raft's: {error}");
    }
    std::fs::write(&path, &good).unwrap();
    let directory = open(folder.path()).await;
    assert_eq!(directory.view().session_count(), 50);
    directory.close().await.unwrap();
}

#[tokio::test]
async fn a_cluster_restored_from_a_snapshot_outranks_the_old_grants() {
    use std::io::Read;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    let folder = tempfile::tempdir().unwrap();
    // Without ticks only submitted commands are written.
    let tick = Duration::from_secs(3_600);
    let old = Options { tick, ..options(&folder.path().join("old")) };
    let directory = OwnershipDirectory::open(old).await.unwrap();
    directory.submit(register(1, Duration::from_secs(60))).unwrap().await.unwrap();
    for n in 0..20 {
        directory.submit(step(n, 70, 0)).unwrap().await.unwrap();
    }
    let mut saved = directory.save_snapshot().await.unwrap();
    let last = directory.view();
    directory.submit(step(99, 70, 0)).unwrap().await.unwrap();
    let epoch = directory.view().session(SessionId(99)).unwrap().epoch;
    let mut bytes = Vec::new();
    saved.file.read_to_end(&mut bytes).unwrap();
    assert_eq!((bytes.len() as u64, saved.applied), (saved.bytes, last.applied()));
    let file = folder.path().join("backup");
    std::fs::write(&file, &bytes).unwrap();
    let report = ownership::verify(&file).unwrap();
    assert_eq!((report.applied, report.state_hash.0), (last.applied(), last.state_hash()));
    assert!(report.entries.contains(&("sessions", 20)), "{report:?}");
    assert_eq!(report.voters, [NodeId(1)]);
    directory.close().await.unwrap();

    let used = ownership::restore(&file, &folder.path().join("old")).await.unwrap_err();
    assert!(matches!(used, LedgerNodeError::NotEmpty { .. }), "{used}");
    // The data directory is a mounted volume, which contains a folder of its own.
    let new = folder.path().join("new");
    std::fs::create_dir_all(new.join("lost+found")).unwrap();
    // An earlier restore was killed: a node must not found a cluster beside its leftovers.
    std::fs::create_dir_all(new.join("unfinished-restore/log")).unwrap();
    let founded = OwnershipDirectory::open(options(&new)).await.unwrap_err();
    assert!(matches!(founded, LedgerNodeError::Damaged { .. }), "{founded}");
    let place = std::fs::metadata(&new).unwrap().ino();
    let restored = ownership::restore(&file, &new).await.unwrap();
    assert_eq!(std::fs::metadata(&new).unwrap().ino(), place);
    assert!(!new.join("unfinished-restore").exists());
    let private = |name: &str| std::fs::metadata(new.join(name)).unwrap().permissions().mode() & 0o077;
    assert_eq!(["identity.json", "snapshot", "log", "lock"].map(private), [0; 4]);
    assert_ne!(restored.cluster, directory.cluster());
    for life in 0..3u128 {
        let directory = open(&new).await;
        let view = directory.view();
        assert_eq!((directory.cluster(), directory.node()), (restored.cluster, NodeId(1)));
        assert_eq!(view.session_count() as u128, 20 + life);
        assert!(view.applied() >= last.applied() && view.now() >= last.now());
        ledger::invariants::check(&view).unwrap();
        directory.submit(register(1, Duration::from_secs(60))).unwrap().await.unwrap();
        directory.submit(step(200 + life, 70, 0)).unwrap().await.unwrap();
        let granted = directory.view().session(SessionId(200 + life)).unwrap().epoch;
        assert!(granted > epoch && granted.generation == restored.generation, "{granted} {epoch}");
        directory.close().await.unwrap();
    }
}

#[tokio::test]
async fn a_backup_restored_twice_outranks_grants_of_the_first_restore() {
    use std::io::Read;

    let folder = tempfile::tempdir().unwrap();
    let directory = open(&folder.path().join("old")).await;
    directory.submit(register(1, Duration::from_secs(60))).unwrap().await.unwrap();
    directory.submit(step(0, 70, 0)).unwrap().await.unwrap();
    let mut bytes = Vec::new();
    directory.save_snapshot().await.unwrap().file.read_to_end(&mut bytes).unwrap();
    directory.close().await.unwrap();
    let file = folder.path().join("backup");
    std::fs::write(&file, &bytes).unwrap();
    // The first cluster's log grows longer than the second one's ever will.
    let mut granted = Vec::new();
    for (life, sessions) in [("first", 50), ("second", 1)] {
        let at = folder.path().join(life);
        ownership::restore(&file, &at).await.unwrap();
        let directory = open(&at).await;
        directory.submit(register(1, Duration::from_secs(60))).unwrap().await.unwrap();
        for n in 0..sessions {
            directory.submit(step(100 + n, 70, 0)).unwrap().await.unwrap();
            granted.push(directory.view().session(SessionId(100 + n)).unwrap().epoch);
        }
        directory.close().await.unwrap();
    }
    assert!(granted.is_sorted_by(|earlier, later| earlier < later), "{granted:?}");
}

/// Writes a data directory as the last release before feature level 2 left it: 12 sessions in a snapshot, 8 more in the
/// log.
fn write_last_release_data(folder: &Path) {
    let files: std::collections::BTreeMap<String, String> = serde_json::from_str(include_str!("level_1.json")).unwrap();
    std::fs::create_dir_all(folder.join("log")).unwrap();
    for (name, hex) in files {
        let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        let bytes: Vec<u8> = (0..hex.len()).step_by(2).map(byte).collect();
        std::fs::write(folder.join(name), bytes).unwrap();
    }
}

#[tokio::test]
async fn a_data_directory_of_the_last_release_opens_and_stays_readable_by_it() {
    let folder = tempfile::tempdir().unwrap();
    write_last_release_data(folder.path());
    for life in 0..3 {
        let directory = open(folder.path()).await;
        let view = directory.view();
        assert_eq!((view.session_count(), view.level()), (20 + life, 1));
        assert!((0..20).all(|n| view.session(SessionId(n)).is_some()));
        directory.submit(open_session(100 + life as u128)).unwrap().await.unwrap();
        directory.write_snapshot().await.unwrap();
        directory.close().await.unwrap();
        let report = ownership::verify(&folder.path().join("snapshot")).unwrap();
        assert_eq!((report.layout, report.level), (1, 1), "the last release reads this layout only");
    }
    let chunk = newest_chunk(folder.path());
    let bytes = std::fs::read(&chunk).unwrap();
    std::fs::write(&chunk, &bytes[..bytes.len() - 60]).unwrap();
    let error = OwnershipDirectory::open(options(folder.path())).await.unwrap_err();
    assert!(error.to_string().contains("acknowledged"), "it is guarded from its first opening on: {error}");
}

#[tokio::test]
async fn a_log_of_the_last_release_that_lost_committed_entries_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    write_last_release_data(folder.path());
    let chunk = newest_chunk(folder.path());
    let bytes = std::fs::read(&chunk).unwrap();
    std::fs::write(&chunk, &bytes[..bytes.len() - 400]).unwrap();
    let error = OwnershipDirectory::open(options(folder.path())).await.unwrap_err();
    assert!(matches!(error, LedgerNodeError::EntriesMissing { .. }), "{error}");
}

#[tokio::test]
async fn an_old_emptied_ledger_is_not_mistaken_for_a_new_ledger() {
    let folder = tempfile::tempdir().unwrap();
    let old = Options { max_level: Some(1), ..options(folder.path()) };
    let directory = OwnershipDirectory::open(old).await.unwrap();
    assert!(matches!(directory.submit(open_session(1)).unwrap().await, Ok(Outcome::Opened { .. })));
    assert_eq!(directory.submit(Command::CloseSession(SessionId(1))).unwrap().await, Ok(Outcome::Done));
    directory.write_snapshot().await.unwrap();
    directory.close().await.unwrap();
    drop(directory);
    let directory = OwnershipDirectory::open(options(folder.path())).await.unwrap();
    assert_eq!(directory.view().level(), 1, "an operator raises it: there is no way back");
    directory.close().await.unwrap();
}
