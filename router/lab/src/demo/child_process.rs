//! Child process of this binary: keeps its last log lines and never outlives its parent.
//!
//! A child's standard input is the reading end of a pipe from its parent. When the parent ends in any way, kill -9
//! included, the pipe closes and [`exit_with_parent`] ends the child.

use std::collections::VecDeque;
use std::io::Read;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, ChildStdin, Command};

/// Flag that makes `serve` and `sim-worker` exit with their parent.
pub(super) const EXIT_WITH_PARENT: &str = "--exit-with-parent";
const MAX_LOG_LINES: usize = 20;
const MAX_LINE_BYTES: usize = 400;
/// Timeout for a killed child to exit.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// Exits this process when its standard input closes. Call once, at the start of a child.
pub fn exit_with_parent() {
    std::thread::spawn(|| {
        let mut input = std::io::stdin().lock();
        let mut ignored = [0; 64];
        while !matches!(input.read(&mut ignored), Ok(0) | Err(_)) {}
        std::process::exit(0);
    });
}

pub(super) struct ChildProcess {
    /// Name for messages.
    pub name: String,
    child: Child,
    log: Arc<Mutex<VecDeque<String>>>,
    _lifeline: ChildStdin,
}

impl ChildProcess {
    /// Starts this binary with `args`.
    pub(super) fn spawn(name: String, args: &[String]) -> std::io::Result<ChildProcess> {
        ChildProcess::spawn_program(name, &std::env::current_exe()?, args)
    }

    fn spawn_program(name: String, program: &std::path::Path, args: &[String]) -> std::io::Result<ChildProcess> {
        let mut child = Command::new(program)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let log = Arc::new(Mutex::new(VecDeque::new()));
        // Cannot fail: all three were requested above.
        let (lifeline, out, err) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(lifeline), Some(out), Some(err)) = (lifeline, out, err) else {
            return Err(std::io::ErrorKind::BrokenPipe.into());
        };
        tokio::spawn(collect_lines(out, log.clone()));
        tokio::spawn(collect_lines(err, log.clone()));
        Ok(ChildProcess { name, child, log, _lifeline: lifeline })
    }

    /// Exit status, if it has exited.
    pub(super) fn exit_status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Last log lines, oldest first.
    pub(super) fn last_lines(&self) -> Vec<String> {
        self.log.lock().iter().cloned().collect()
    }

    /// Kills the child and waits until it is gone.
    pub(super) async fn stop(mut self) {
        // Both calls fail only if the process is already gone.
        let _ = self.child.start_kill();
        let _ = tokio::time::timeout(KILL_TIMEOUT, self.child.wait()).await;
    }
}

async fn collect_lines(stream: impl AsyncRead + Unpin, log: Arc<Mutex<VecDeque<String>>>) {
    let mut lines = BufReader::new(stream).split(b'\n');
    while let Ok(Some(line)) = lines.next_segment().await {
        let line = String::from_utf8_lossy(&line[..line.len().min(MAX_LINE_BYTES)]).into_owned();
        let mut log = log.lock();
        if log.len() == MAX_LOG_LINES {
            log.pop_front();
        }
        log.push_back(line);
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn shell(script: &str) -> ChildProcess {
        ChildProcess::spawn_program("shell".into(), Path::new("/bin/sh"), &["-c".into(), script.into()]).unwrap()
    }

    async fn ended(process: &mut ChildProcess) -> ExitStatus {
        for _ in 0..500 {
            if let Some(status) = process.exit_status() {
                return status;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("still running");
    }

    #[tokio::test]
    async fn last_output_lines_of_a_failed_child_are_retained() {
        let mut child = shell("for i in $(seq 30); do echo line $i; done; echo address in use >&2; exit 3");
        assert_eq!(ended(&mut child).await.code(), Some(3));
        for _ in 0..100 {
            if child.last_lines().len() == MAX_LOG_LINES && child.last_lines().concat().contains("in use") {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let lines = child.last_lines();
        assert_eq!(lines.len(), MAX_LOG_LINES);
        assert!(lines.iter().any(|line| line == "address in use"));
        assert!(lines.iter().any(|line| line == "line 30") && !lines.iter().any(|line| line == "line 1"));
    }

    #[tokio::test]
    async fn child_stdin_closes_when_the_parent_drops_it() {
        let child = shell("cat; touch \"$0\"");
        let ChildProcess { mut child, _lifeline: lifeline, .. } = child;
        assert!(child.try_wait().unwrap().is_none(), "waits while the parent lives");
        drop(lifeline);
        assert!(tokio::time::timeout(Duration::from_secs(5), child.wait()).await.is_ok());
    }

    #[tokio::test]
    async fn stopped_child_has_exited() {
        let child = shell("sleep 100");
        let id = child.child.id().unwrap();
        child.stop().await;
        assert!(!Path::new(&format!("/proc/{id}")).exists());
    }
}
