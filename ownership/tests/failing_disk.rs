//! Tests with disks that fail or fill up under a running node: it stops with the cause, and restarts with everything
//! that it acknowledged.
//!
//! Each node is a process of its own. A full disk needs a mount, and so root; a failing one needs a C compiler. If one
//! is missing, the test prints that and passes.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command as Process, Stdio};
use std::time::Duration;

use ledger::{Command, OpenSession, Outcome};
use ownership::{Options, OwnershipDirectory, SubmitError};
use vocabulary::{ModelId, SessionId, TenantId};

const DATA_DIR: &str = "OWNERSHIP_TEST_DATA_DIR";

/// Replacement for `fdatasync` that fails like a broken disk while the file named by FAIL_SYNC exists.
const FDATASYNC_SHIM: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>
int fdatasync(int fd) {
    const char *trigger = getenv("FAIL_SYNC");
    if (trigger && access(trigger, F_OK) == 0) { errno = EIO; return -1; }
    return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd);
}
"#;

fn open_session(n: u128) -> Command {
    // Long names fill a small disk quickly.
    let (tenant, model) = (TenantId::default(), ModelId::from("m".repeat(500).as_str()));
    Command::OpenSession(OpenSession { session: SessionId(n), tenant, model, parent: None })
}

fn options(folder: &Path) -> Options {
    Options { tick: Duration::from_millis(50), ..Options::new(folder) }
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").unwrap();
    out.flush().unwrap();
}

/// Child process whose disk fails: prints what was acknowledged, then how it ended.
#[test]
#[ignore = "run by the tests below, in a process of its own"]
fn child_writes_until_disk_fails() {
    let Ok(folder) = std::env::var(DATA_DIR) else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let directory = OwnershipDirectory::open(options(Path::new(&folder))).await.unwrap();
        say(&format!("found {}", directory.view().session_count()));
        let first = directory.view().session_count() as u128;
        for n in first.. {
            match directory.submit(open_session(n)) {
                Ok(ticket) => match ticket.await {
                    Ok(Outcome::Opened { .. }) => say(&format!("acknowledged {n}")),
                    Ok(other) => panic!("{other:?}"),
                    Err(error) => {
                        // If the disk failed before the command was sent, the command is known not to be accepted.
                        assert!(matches!(error, SubmitError::Unavailable | SubmitError::UnknownOutcome), "{error}");
                        break;
                    }
                },
                Err(error) => panic!("{error}"),
            }
        }
        let failure = directory.wait_for_failure().await;
        say(&format!("failed {failure}"));
        // From now on no command is accepted, and none hangs.
        for n in 0..3 {
            if let Ok(ticket) = directory.submit(open_session(n)) {
                assert!(ticket.await.is_err());
            }
        }
        assert!(directory.view().quorum().stale);
        drop(directory.close().await);
        say("ended");
    });
}

struct NodeProcess {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl NodeProcess {
    fn start(mut command: Process) -> Self {
        command.stdout(Stdio::piped()).stderr(Stdio::inherit());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    /// Returns the rest of the next line that contains `word`.
    fn next(&mut self, word: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.lines.read_line(&mut line).unwrap() > 0, "it ended without saying `{word}`");
            if let Some((_, rest)) = line.split_once(&format!("{word} ")) {
                return rest.trim().to_owned();
            }
        }
    }

    /// Returns the remaining lines once the process has ended by itself.
    fn wait_for_end(mut self) -> Vec<String> {
        let mut rest = String::new();
        self.lines.read_to_string(&mut rest).unwrap();
        assert!(self.child.wait().unwrap().success(), "{rest}");
        assert!(rest.contains("ended"), "{rest}");
        rest.lines().map(str::to_owned).collect()
    }
}

fn this_test(child: &str) -> [String; 4] {
    let own = std::env::current_exe().unwrap();
    [own.to_str().unwrap().into(), "--exact".into(), child.into(), "--ignored".into()]
}

fn node(folder: &Path) -> Process {
    let [own, rest @ ..] = this_test("child_writes_until_disk_fails");
    let mut command = Process::new(own);
    command.args(rest).arg("--nocapture").env(DATA_DIR, folder);
    command
}

fn last_acknowledged(lines: &[String]) -> Option<u64> {
    let numbers = lines.iter().filter_map(|line| line.split_once("acknowledged ")?.1.trim().parse().ok());
    numbers.max()
}

#[test]
fn a_failed_fdatasync_stops_the_node_and_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (source, shim) = (folder.path().join("shim.c"), folder.path().join("shim.so"));
    std::fs::write(&source, FDATASYNC_SHIM).unwrap();
    let built = Process::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&shim).arg(&source).arg("-ldl").status();
    if !built.is_ok_and(|status| status.success()) {
        say("not run: there is no C compiler");
        return;
    }
    let (data, trigger) = (folder.path().join("data"), folder.path().join("fail"));
    let mut acknowledged = None;
    for life in 0..2u64 {
        let mut command = node(&data);
        command.env("LD_PRELOAD", &shim).env("FAIL_SYNC", &trigger);
        let mut node = NodeProcess::start(command);
        let found: u64 = node.next("found").parse().unwrap();
        assert!(acknowledged.is_none_or(|last| found > last), "{found} sessions, {acknowledged:?} acknowledged");
        for _ in 0..20 {
            node.next("acknowledged");
        }
        std::fs::write(&trigger, "").unwrap();
        let lines = node.wait_for_end();
        let failed = lines.iter().find(|line| line.contains("failed ")).unwrap_or_else(|| panic!("{lines:?}"));
        assert!(failed.contains("os error 5") && failed.contains("start the node again"), "{failed}");
        acknowledged = last_acknowledged(&lines).or(Some(found + 19));
        std::fs::remove_file(&trigger).unwrap();
        assert!(acknowledged >= Some(20 * (life + 1) - 1));
    }
}

#[test]
fn a_full_disk_stops_the_node_and_freed_space_restores_it() {
    let folder = tempfile::tempdir().unwrap();
    let mount = folder.path().to_str().unwrap();
    // In its own mount namespace, so that nothing is left behind. Three runs: until full, still full, and until full
    // again after space was freed.
    let own = this_test("child_writes_until_disk_fails").join(" ");
    let script = format!(
        "mount -t tmpfs -o size=3m ownerserve {mount} || exit 77
         export {DATA_DIR}={mount}/data
         head -c 1000000 /dev/zero > {mount}/ballast
         {own} --nocapture || exit 1
         echo again; {own} --nocapture 2>&1; echo status $?
         rm {mount}/ballast
         echo freed; {own} --nocapture || exit 1"
    );
    let ran = Process::new("unshare").args(["--mount", "sh", "-c", &script]).output();
    let Ok(ran) = ran.map_err(|error| say(&format!("not run: {error}"))) else { return };
    let text = String::from_utf8_lossy(&ran.stdout).into_owned();
    let errors = String::from_utf8_lossy(&ran.stderr).into_owned();
    if ran.status.code() == Some(77) || errors.contains("unshare failed") {
        say("not run: a small disk cannot be mounted here");
        return;
    }
    assert!(ran.status.success(), "{text}\n{errors}");
    let (first, rest) = text.split_once("again").unwrap();
    let (still_full, freed) = rest.split_once("freed").unwrap();
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    let failed = first.lines().find(|line| line.contains("failed ")).unwrap_or_else(|| panic!("{text}"));
    assert!(failed.contains("No space left") && failed.contains("Free space"), "{failed}");
    let acknowledged = last_acknowledged(&lines(first)).unwrap();
    // On a full disk it reports that when it is opened or at the next write; it never loses data or hangs.
    assert!(still_full.contains("No space left"), "{still_full}\n{errors}");
    let acknowledged = last_acknowledged(&lines(still_full)).unwrap_or(acknowledged).max(acknowledged);
    let found = freed.lines().find_map(|line| line.split_once("found ")?.1.trim().parse::<u64>().ok()).unwrap();
    assert!(found > acknowledged, "{found} sessions, {acknowledged} acknowledged");
    assert!(last_acknowledged(&lines(freed)).unwrap() > acknowledged + 100, "it went on");
}

/// Limits the process's file descriptors, so that it can open no file or socket while this exists.
struct OpenFileLimitGuard(rustix::process::Rlimit);

impl OpenFileLimitGuard {
    fn exhaust() -> Self {
        let before = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let used = rustix::process::Rlimit { current: Some(0), ..before };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, used).unwrap();
        assert!(std::fs::File::open("/dev/null").is_err(), "there are file handles yet");
        Self(before)
    }
}

impl Drop for OpenFileLimitGuard {
    fn drop(&mut self) {
        rustix::process::setrlimit(rustix::process::Resource::Nofile, self.0).unwrap();
    }
}

/// Child process that temporarily runs out of file descriptors: it continues to write, and takes its snapshot later.
#[test]
#[ignore = "run by the test below, in a process of its own"]
fn child_writes_without_file_handles() {
    let Ok(folder) = std::env::var(DATA_DIR) else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        // Each takes about 3 MiB of the log, whose files have 64.
        let large = |n: u128| {
            let (tenant, model) = (TenantId::default(), ModelId::from("m".repeat(3 << 20).as_str()));
            Command::OpenSession(OpenSession { session: SessionId(n), tenant, model, parent: None })
        };
        let directory = std::sync::Arc::new(OwnershipDirectory::open(options(Path::new(&folder))).await.unwrap());
        let files = || std::fs::read_dir(Path::new(&folder).join("log")).unwrap().count();
        let before = files();
        let exhausted = OpenFileLimitGuard::exhaust();
        let snapshot = tokio::spawn({
            let directory = directory.clone();
            async move { directory.write_snapshot().await }
        });
        for n in 0..30 {
            directory.submit(large(n)).unwrap().await.unwrap();
        }
        for n in 0..30 {
            directory.submit(open_session(100 + n)).unwrap().await.unwrap();
        }
        let readings = directory.stats();
        assert!(readings.shortage_retries > 1, "it did not have to wait: {readings:?}");
        assert!(directory.resource_shortage().unwrap().contains("Too many open files"));
        assert!(!snapshot.is_finished(), "a snapshot without a file");
        drop(exhausted);
        snapshot.await.unwrap().unwrap();
        directory.submit(open_session(200)).unwrap().await.unwrap();
        assert!(files() > before, "the log went on in its next file");
        let sessions = directory.view().session_count();
        directory.write_snapshot().await.unwrap();
        assert!(!directory.view().quorum().stale);
        directory.close().await.unwrap();
        drop(directory);
        let directory = OwnershipDirectory::open(options(Path::new(&folder))).await.unwrap();
        assert_eq!(directory.view().session_count(), sessions);
        directory.close().await.unwrap();
        say("ended");
    });
}

#[test]
fn a_process_without_file_handles_keeps_writing_and_snapshots_later() {
    let folder = tempfile::tempdir().unwrap();
    let [own, rest @ ..] = this_test("child_writes_without_file_handles");
    let mut command = Process::new(own);
    command.args(rest).arg("--nocapture").env(DATA_DIR, folder.path().join("data"));
    NodeProcess::start(command).wait_for_end();
}
