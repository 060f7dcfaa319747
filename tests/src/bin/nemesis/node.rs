//! One process under test: start, signals, exit. Its output goes to a log file of its own.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::process::{Child, ChildStdin, Command};
use tokio::time::Instant;

use crate::NemesisError;

/// Time a program gets to exit by itself.
const EXIT_TIMEOUT: Duration = Duration::from_secs(20);

/// Running program. It always ends with this one: by its drop guard, and because its standard input closes.
pub(crate) struct ProgramProcess {
    name: String,
    child: Child,
    _stdin: Option<ChildStdin>,
    log: PathBuf,
    is_paused: bool,
}

/// How to start a program.
pub(crate) struct LaunchSpec<'a> {
    /// Name in logs and errors.
    pub(crate) name: &'a str,
    /// Command line before the program.
    pub(crate) launcher: Vec<String>,
    /// The program.
    pub(crate) binary: &'a Path,
    /// Arguments.
    pub(crate) arguments: Vec<String>,
    /// Additional environment variables.
    pub(crate) environment: Vec<(&'static str, String)>,
    /// Log file that the output is appended to.
    pub(crate) log: PathBuf,
}

impl ProgramProcess {
    /// Starts the program.
    pub(crate) fn start(launch: LaunchSpec<'_>) -> Result<ProgramProcess, NemesisError> {
        let LaunchSpec { name, launcher, binary, arguments, environment, log: log_file } = launch;
        let what = || format!("start {name}");
        let output = std::fs::File::options().create(true).append(true).open(&log_file);
        let output = output.map_err(NemesisError::system(what()))?;
        let errors = output.try_clone().map_err(NemesisError::system(what()))?;
        let mut line = launcher.into_iter().chain([binary.display().to_string()]).chain(arguments);
        let mut command = Command::new(line.next().unwrap_or_default());
        command.args(line).stdin(Stdio::piped()).stdout(output).stderr(errors).kill_on_drop(true);
        // Info logs of every client write are disabled: they would hide the node's own events.
        let log = std::env::var("RUST_LOG").unwrap_or_else(|_| "info,operator=warn".into());
        command.env("RUST_LOG", log).env("NO_COLOR", "1").envs(environment);
        let mut child = command.spawn().map_err(NemesisError::system(what()))?;
        let stdin = child.stdin.take();
        Ok(ProgramProcess { name: name.to_owned(), child, _stdin: stdin, log: log_file, is_paused: false })
    }

    /// Process id.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// Exit status, if it has exited.
    pub(crate) fn exit_status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Sends kill -9 and waits until the process is gone.
    pub(crate) async fn kill(mut self) -> Result<(), NemesisError> {
        self.child.kill().await.map_err(NemesisError::system(format!("kill {}", self.name)))
    }

    /// Asks the process to exit and waits for it.
    pub(crate) async fn terminate(self) -> Result<ExitStatus, NemesisError> {
        self.signal("TERM").await?;
        self.wait().await
    }

    /// Waits until it exits by itself.
    pub(crate) async fn wait(mut self) -> Result<ExitStatus, NemesisError> {
        let late = |_| NemesisError::Late { what: format!("{} to end", self.name) };
        let ended = tokio::time::timeout(EXIT_TIMEOUT, self.child.wait()).await.map_err(late)?;
        ended.map_err(NemesisError::system(format!("wait for {}", self.name)))
    }

    /// Pauses the process (SIGSTOP).
    pub(crate) async fn pause(&mut self) -> Result<(), NemesisError> {
        self.is_paused = true;
        self.signal("STOP").await
    }

    /// Resumes the process (SIGCONT).
    pub(crate) async fn resume(&mut self) -> Result<(), NemesisError> {
        self.is_paused = false;
        self.signal("CONT").await
    }

    /// Returns whether [`ProgramProcess::pause`] holds it.
    pub(crate) fn is_paused(&self) -> bool {
        self.is_paused
    }

    async fn signal(&self, signal: &str) -> Result<(), NemesisError> {
        let gone =
            || NemesisError::Answer { who: self.name.clone(), got: format!("it has ended: {}", self.log_tail()) };
        let pid = self.pid().ok_or_else(gone)?;
        // The standard library has no safe call for signals; the shell has one built in.
        let sent = Command::new("sh").args(["-c", &format!("kill -{signal} {pid}")]).status().await;
        match sent.map_err(NemesisError::system("run a shell"))?.success() {
            true => Ok(()),
            false => Err(gone()),
        }
    }

    /// Last lines of its log.
    pub(crate) fn log_tail(&self) -> String {
        log_tail_of(&self.log)
    }
}

/// Last lines of a log.
pub(crate) fn log_tail_of(log: &Path) -> String {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().rev().take(6).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join(" | ")
}

/// Returns a port that is currently unused.
pub(crate) fn free_port() -> Result<u16, NemesisError> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").map_err(NemesisError::system("find a free port"))?;
    Ok(listener.local_addr().map_err(NemesisError::system("find a free port"))?.port())
}

/// Waits until something listens at the address, or the program exits.
pub(crate) async fn wait_until_listening(
    process: &mut ProgramProcess,
    address: SocketAddr,
    within: Duration,
) -> Result<(), NemesisError> {
    let deadline = Instant::now() + within;
    loop {
        if tokio::net::TcpStream::connect(address).await.is_ok() {
            return Ok(());
        }
        if let Some(status) = process.exit_status() {
            let detail = format!("it ended ({status}): {}", process.log_tail());
            return Err(NemesisError::Answer { who: process.name.clone(), got: detail });
        }
        if Instant::now() > deadline {
            return Err(NemesisError::Late { what: format!("{} to listen on {address}", process.name) });
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
