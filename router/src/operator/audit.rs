//! The audit log: one line of JSON for every write that an operator asked for, done or refused.
//!
//! It lies in the data directory, is bounded by rotation, and never holds a token. A line is on disk (fdatasync) before
//! the answer is sent; only a process that dies in the middle of a write leaves none. A disk that refuses a line stops no
//! operator: the line is in the log of the process, too, and with it an error.

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use serde::Serialize;
use serde_json::Value;

use super::access::{Role, Who};

/// Most files that are kept: the current one and older ones, `audit.jsonl.1` the newest of them.
const FILES: u32 = 4;

/// Longest body that is kept in a line.
const LONGEST_BODY: usize = 4 << 10;

/// One write.
#[derive(Serialize)]
pub(super) struct Line<'a> {
    /// Wall clock, milliseconds since 1970.
    at_unix_ms: u64,
    /// The token's name.
    who: &'a str,
    /// Its role; none when no token was accepted.
    role: Option<Role>,
    /// What was asked for: method and the path's form.
    what: String,
    /// Of what: the path.
    key: &'a str,
    /// The body as sent; what is too long or not JSON is left out.
    body: Option<Value>,
    /// What it was based on.
    if_match: Option<&'a str>,
    /// `done`, `repeated` when it was done before under its key, or the problem's word.
    outcome: &'static str,
    /// The HTTP status.
    status: u16,
    /// The request's id, as in the answer.
    request: &'a str,
    /// Where it came from.
    remote: Option<SocketAddr>,
}

/// What is known of a write before it runs.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    pub(super) who: Option<Who>,
    pub(super) what: String,
    pub(super) key: String,
    pub(super) body: Option<Value>,
    pub(super) if_match: Option<String>,
    pub(super) request: String,
    pub(super) remote: Option<SocketAddr>,
}

/// A body as the log keeps it.
pub(super) fn kept(body: &[u8]) -> Option<Value> {
    (body.len() <= LONGEST_BODY).then(|| serde_json::from_slice(body).ok()).flatten()
}

/// The file that is written to.
#[derive(Debug)]
pub(super) struct Audit {
    path: PathBuf,
    bound: u64,
    file: Mutex<Open>,
}

#[derive(Debug)]
struct Open {
    file: File,
    size: u64,
}

impl Audit {
    /// Opens `audit.jsonl` in `folder`; all files together stay within about `bound` bytes.
    pub(super) fn open(folder: &Path, bound: u64) -> std::io::Result<Self> {
        fs::create_dir_all(folder)?;
        let path = folder.join("audit.jsonl");
        let file = Mutex::new(open(&path)?);
        Ok(Self { path, bound: (bound / u64::from(FILES)).max(4 << 10), file })
    }

    /// Writes a line to the disk; the log of the process has it with `RUST_LOG=info,ownerserve::audit=debug`. Blocks
    /// while the disk does.
    pub(super) fn write(&self, asked: &Asked, outcome: &'static str, status: u16) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let line = Line {
            at_unix_ms: u64::try_from(now.as_millis()).unwrap_or(u64::MAX),
            who: asked.who.as_ref().map_or("nobody", |who| &who.name),
            role: asked.who.as_ref().map(|who| who.role),
            what: asked.what.clone(),
            key: &asked.key,
            body: asked.body.clone(),
            if_match: asked.if_match.as_deref(),
            outcome,
            status,
            request: &asked.request,
            remote: asked.remote,
        };
        let mut text = serde_json::to_vec(&line).unwrap_or_default();
        tracing::debug!(target: "ownerserve::audit", line = %String::from_utf8_lossy(&text), "an operator wrote");
        text.push(b'\n');
        if let Err(error) = self.append(&text) {
            let line = String::from_utf8_lossy(&text);
            tracing::error!(%error, path = %self.path.display(), %line, "the audit log could not be written");
        }
    }

    fn append(&self, line: &[u8]) -> std::io::Result<()> {
        let mut open_file = self.file.lock();
        if open_file.size > 0 && open_file.size + line.len() as u64 > self.bound {
            self.rotate()?;
            *open_file = open(&self.path)?;
        }
        open_file.file.write_all(line)?;
        open_file.size += line.len() as u64;
        open_file.file.sync_data()
    }

    fn rotate(&self) -> std::io::Result<()> {
        let numbered = |n: u32| match n {
            0 => self.path.clone(),
            n => self.path.with_extension(format!("jsonl.{n}")),
        };
        for n in (0..FILES - 1).rev() {
            match fs::rename(numbered(n), numbered(n + 1)) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                done => done?,
            }
        }
        Ok(())
    }
}

fn open(path: &Path) -> std::io::Result<Open> {
    let file = OpenOptions::new().create(true).append(true).open(path)?;
    let size = file.metadata()?.len();
    Ok(Open { file, size })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(key: &str) -> Asked {
        Asked {
            who: Some(Who { name: "alice".into(), role: Role::Operator, token: None }),
            what: "POST /x/{id}".into(),
            key: key.into(),
            body: kept(b"{\"a\": 1}"),
            if_match: None,
            request: "req-1".into(),
            remote: None,
        }
    }

    #[test]
    fn the_log_is_json_lines_goes_on_after_a_restart_and_stays_within_its_bound() {
        let folder = tempfile::tempdir().unwrap();
        let bound = 4 * (4 << 10);
        for start in 0..3 {
            let audit = Audit::open(folder.path(), bound).unwrap();
            for n in 0..100 {
                audit.write(&asked(&format!("{start}.{n}")), "done", 200);
            }
        }
        let files: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        let size: u64 = files.iter().map(|path| fs::metadata(path).unwrap().len()).sum();
        assert_eq!(files.len(), FILES as usize);
        assert!(size <= bound, "{size} bytes");
        let text = fs::read_to_string(folder.path().join("audit.jsonl")).unwrap();
        let last: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        assert_eq!(
            (last["key"].as_str(), last["who"].as_str(), last["body"]["a"].as_u64()),
            (Some("2.99"), Some("alice"), Some(1))
        );
    }

    #[test]
    fn long_bodies_and_what_is_not_json_are_left_out() {
        assert_eq!(kept(format!("\"{}\"", "x".repeat(LONGEST_BODY)).as_bytes()), None);
        assert_eq!(kept(b"{"), None);
    }
}
