//! The audit log: one line of JSON for every write that an operator asked for, done or refused.
//!
//! It lies in the data directory, is bounded by rotation, and never holds a token. No write is begun before the disk has
//! given the room for its line, and the line is there (fdatasync) before the answer is sent; only a process that dies in the
//! middle of a write leaves none. Where a line is lost all the same, because the disk broke meanwhile, the log of the process
//! has it with an error, `/readyz` says so, and no write is begun until the log takes lines again.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::net::SocketAddr;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use prometheus::IntCounterVec;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use serde::Serialize;
use serde_json::Value;

use super::access::{Role, Who};

/// Most files that are kept: the current one and older ones, `audit.jsonl.1` the newest of them.
const FILES: u32 = 4;

/// Longest body that is kept in a line.
const LONGEST_BODY: usize = 4 << 10;

/// Longest tag that is kept in a line.
const LONGEST_TAG: usize = 256;

/// Room for one line, whatever is in it: path and body are bounded, and escaping makes them a few times as long.
const ROOM: u64 = 64 << 10;

/// Most lines a minute for those who have no token: they must not push the others' lines out of the files.
const STRANGERS: u32 = 60;

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
    if_match: Option<&'a str>,
    /// `done`, `repeated` when it was done before under its key, or the problem's word.
    outcome: &'static str,
    status: u16,
    /// The request's id, as in the answer.
    request: &'a str,
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

/// A tag as the log keeps it.
pub(super) fn kept_tag(tag: &str) -> String {
    tag.chars().take(LONGEST_TAG).collect()
}

/// Whether there is room on the disk for a line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Room {
    /// It was taken before the write was begun.
    Taken,
    /// Nothing was begun, and the line is written if it can be.
    None,
}

/// The file that is written to.
#[derive(Debug)]
pub(super) struct Audit {
    path: PathBuf,
    bound: u64,
    file: Mutex<Open>,
    /// Whether it took no line, or had no room for one, when it was tried last.
    is_broken: AtomicBool,
    strangers: Mutex<Minute>,
    /// `audit_failed_total{what}`.
    failed: IntCounterVec,
}

/// How often something happened within the minute that it began with.
#[derive(Debug)]
struct Minute {
    since: Instant,
    count: u32,
}

impl Minute {
    /// One more at `now`: how many there are.
    fn count(&mut self, now: Instant) -> u32 {
        if now.duration_since(self.since) >= Duration::from_secs(60) {
            *self = Self { since: now, count: 0 };
        }
        self.count = self.count.saturating_add(1);
        self.count
    }
}

#[derive(Debug)]
struct Open {
    file: File,
    /// Whole lines.
    size: u64,
    /// Up to where the disk has given room.
    room: u64,
    /// Of that, for writes that run.
    promised: u64,
    /// Whether a part of a line may stand behind the whole ones.
    is_torn: bool,
}

impl Audit {
    /// Opens `audit.jsonl` in `folder`; all files together stay within about `bound` bytes.
    pub(super) fn open(folder: &Path, bound: u64, failed: IntCounterVec) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let path = folder.join("audit.jsonl");
        let file = Mutex::new(Open::at(&path)?);
        sync(folder)?;
        let bound = (bound / u64::from(FILES)).max(4 << 10);
        // At zero from the start.
        ["refused", "lost", "skipped"].iter().for_each(|what| drop(failed.with_label_values(&[what])));
        let strangers = Mutex::new(Minute { since: Instant::now(), count: 0 });
        Ok(Self { path, bound, file, is_broken: AtomicBool::new(false), strangers, failed })
    }

    /// Takes room on the disk for the line of a write that is to begin. Blocks while the disk does.
    pub(super) fn make_room(&self) -> io::Result<()> {
        let taken = self.file.lock().take(ROOM);
        self.is_broken.store(taken.is_err(), Ordering::Relaxed);
        if let Err(error) = &taken {
            self.failed.with_label_values(&["refused"]).inc();
            tracing::error!(%error, path = %self.path.display(), "the audit log has no room, so that a write was refused");
        }
        taken
    }

    /// Whether it took no line when it was tried last.
    pub(super) fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::Relaxed)
    }

    /// Finds out whether there is room again, unless somebody is at it. Blocks while the disk does.
    pub(super) fn try_again(&self) {
        let Some(mut file) = self.file.try_lock() else { return };
        if file.take(ROOM).is_ok() {
            file.promised -= ROOM;
            self.is_broken.store(false, Ordering::Relaxed);
        }
    }

    /// Writes a line to the disk; the log of the process has it with `RUST_LOG=info,ownerserve::audit=debug`. Blocks
    /// while the disk does.
    pub(super) fn write(&self, asked: &Asked, (outcome, status): (&'static str, u16), room: Room) {
        if room == Room::None && asked.who.is_none() && self.strangers.lock().count(Instant::now()) > STRANGERS {
            self.failed.with_label_values(&["skipped"]).inc();
            return;
        }
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
        if let Err(error) = self.append(&text, room) {
            self.is_broken.store(true, Ordering::Relaxed);
            // Where nothing was begun, no change goes without its line.
            let what = if room == Room::Taken { "lost" } else { "skipped" };
            self.failed.with_label_values(&[what]).inc();
            let line = String::from_utf8_lossy(&text);
            tracing::error!(%error, path = %self.path.display(), %line, "the audit log could not be written");
        }
    }

    fn append(&self, line: &[u8], room: Room) -> io::Result<()> {
        let mut open = self.file.lock();
        if room == Room::None {
            // What was promised to writes that run is not its to take.
            open.take(ROOM)?;
        }
        if open.size > 0
            && open.size + line.len() as u64 > self.bound
            && let Err(error) = self.rotate(&mut open)
        {
            tracing::warn!(%error, path = %self.path.display(), "the audit log could not be rotated; it grows beyond its bound");
        }
        open.promised = open.promised.saturating_sub(ROOM);
        open.append(line)
    }

    /// A new file, in which what was promised has its room, too.
    fn rotate(&self, open: &mut Open) -> io::Result<()> {
        let numbered = |n: u32| match n {
            0 => self.path.clone(),
            n => self.path.with_extension(format!("jsonl.{n}")),
        };
        let fresh = self.path.with_extension("jsonl.new");
        let there = |done: io::Result<()>| match done {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        };
        there(fs::remove_file(&fresh))?;
        let mut next = Open::at(&fresh)?;
        next.take(open.promised)?;
        for n in (0..FILES - 1).rev() {
            there(fs::rename(numbered(n), numbered(n + 1)))?;
        }
        fs::rename(&fresh, numbered(0))?;
        self.path.parent().map_or(Ok(()), sync)?;
        let old = std::mem::replace(open, next);
        // What is left of its room goes back.
        old.file.set_len(old.size)
    }
}

impl Open {
    /// Goes on behind the last whole line: a part of one that a crash left would spoil the next.
    fn at(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).read(true).append(true).mode(0o600).open(path)?;
        let length = file.metadata()?.len();
        let size = whole_lines(&file, length)?;
        if size < length {
            tracing::warn!(path = %path.display(), bytes = length - size, "the audit log ended within a line, which is cut off");
            file.set_len(size)?;
        }
        Ok(Self { file, size, room: size, promised: 0, is_torn: false })
    }

    /// Takes so many bytes of the disk for lines to come.
    fn take(&mut self, bytes: u64) -> io::Result<()> {
        self.mend()?;
        let end = self.size + self.promised + bytes;
        if end > self.room {
            let wanted = rustix::io::retry_on_intr(|| {
                rustix::fs::fallocate(&self.file, FallocateFlags::KEEP_SIZE, self.size, end - self.size)
            });
            match wanted {
                Ok(()) => self.room = end,
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => self.try_room(end - self.size)?,
                Err(error) => return Err(error.into()),
            }
        }
        self.promised += bytes;
        Ok(())
    }

    /// On a file system that promises nothing: whether there is room now.
    fn try_room(&mut self, bytes: u64) -> io::Result<()> {
        self.is_torn = true;
        let tried = io::copy(&mut io::repeat(b' ').take(bytes), &mut self.file).and_then(|_| self.file.sync_data());
        self.mend()?;
        tried
    }

    /// Writes one whole line, or nothing.
    fn append(&mut self, line: &[u8]) -> io::Result<()> {
        self.mend()?;
        self.is_torn = true;
        let written = self.file.write_all(line).and_then(|()| self.file.sync_data());
        if let Err(error) = written {
            // What cannot be mended now is before the next line.
            let _ = self.mend();
            return Err(error);
        }
        self.is_torn = false;
        self.size += line.len() as u64;
        Ok(())
    }

    /// Cuts off what a failed write left. The room behind it goes with it.
    fn mend(&mut self) -> io::Result<()> {
        if self.is_torn {
            self.file.set_len(self.size)?;
            (self.is_torn, self.room) = (false, self.size);
        }
        Ok(())
    }
}

/// Makes a folder's entries durable: a line is only there if its file is.
fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Where the last whole line ends.
fn whole_lines(file: &File, length: u64) -> io::Result<u64> {
    let mut end = length;
    let mut piece = [0; 4 << 10];
    while end > 0 {
        let start = end.saturating_sub(piece.len() as u64);
        let piece = &mut piece[..(end - start) as usize];
        file.read_exact_at(piece, start)?;
        if let Some(at) = piece.iter().rposition(|byte| *byte == b'\n') {
            return Ok(start + at as u64 + 1);
        }
        end = start;
    }
    Ok(0)
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
            let audit = Audit::open(folder.path(), bound, counter()).unwrap();
            for n in 0..100 {
                audit.make_room().unwrap();
                audit.write(&asked(&format!("{start}.{n}")), ("done", 200), Room::Taken);
            }
            assert_eq!(audit.file.lock().promised, 0);
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

    fn counter() -> IntCounterVec {
        IntCounterVec::new(prometheus::Opts::new("failed", "failed"), &["what"]).unwrap()
    }

    #[test]
    fn a_line_that_a_crash_tore_is_cut_off_and_spoils_none_after_it() {
        for (before, kept) in [("{\"a\":1}\n{\"b\":", "{\"a\":1}\n"), ("{\"half\":", ""), ("", "")] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("audit.jsonl");
            fs::write(&path, format!("{}{before}", kept.repeat(2_000))).unwrap();
            let audit = Audit::open(folder.path(), 64 << 20, counter()).unwrap();
            audit.write(&asked("next"), ("done", 200), Room::None);
            let text = fs::read_to_string(&path).unwrap();
            let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            assert_eq!(lines.last().unwrap()["key"], "next");
            assert_eq!(lines.len(), if kept.is_empty() { 1 } else { 2_002 });
        }
    }

    #[test]
    fn what_holds_everything_is_for_its_owner_alone() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let audit = Audit::open(folder.path(), 16 << 10, counter()).unwrap();
        for n in 0..50 {
            audit.write(&asked(&n.to_string()), ("done", 200), Room::None);
        }
        let modes = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().metadata().unwrap().permissions());
        let modes: Vec<_> = modes.map(|mode| mode.mode() & 0o777).collect();
        assert!(modes.len() > 1 && modes.iter().all(|mode| *mode == 0o600), "{modes:?}");
    }

    #[test]
    fn a_disk_that_gives_no_room_is_told_before_and_counted_and_tried_again() {
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/dev/full", folder.path().join("audit.jsonl")).unwrap();
        let audit = Audit::open(folder.path(), 64 << 20, counter()).unwrap();
        assert!(!audit.is_broken());
        assert!(audit.make_room().is_err() && audit.is_broken());
        audit.write(&asked("refused"), ("not_ready", 503), Room::None);
        let count = |what: &str| audit.failed.with_label_values(&[what]).get();
        assert_eq!((count("refused"), count("lost"), count("skipped")), (1, 0, 1), "nothing was begun");
        audit.write(&asked("begun"), ("done", 200), Room::Taken);
        assert_eq!((count("refused"), count("lost"), count("skipped")), (1, 1, 1));
        audit.try_again();
        assert!(audit.is_broken(), "it is as full as before");
        *audit.file.lock() = Open::at(&folder.path().join("other")).unwrap();
        audit.try_again();
        assert!(!audit.is_broken() && audit.file.lock().promised == 0, "there is room now");
    }

    #[test]
    fn who_has_no_token_leaves_only_so_many_lines_a_minute() {
        let folder = tempfile::tempdir().unwrap();
        let audit = Audit::open(folder.path(), 64 << 20, counter()).unwrap();
        for n in 0..2 * STRANGERS {
            audit.write(&Asked { who: None, ..asked(&n.to_string()) }, ("unauthorized", 401), Room::None);
        }
        audit.write(&asked("alice's"), ("forbidden", 403), Room::None);
        let text = fs::read_to_string(folder.path().join("audit.jsonl")).unwrap();
        assert_eq!(text.lines().count(), STRANGERS as usize + 1);
        assert!(text.lines().last().unwrap().contains("alice's"));
        assert_eq!(audit.failed.with_label_values(&["skipped"]).get(), u64::from(STRANGERS));
        let mut minute = Minute { since: Instant::now(), count: STRANGERS };
        assert_eq!(minute.count(minute.since + Duration::from_secs(59)), STRANGERS + 1);
        assert_eq!(minute.count(minute.since + Duration::from_secs(60)), 1);
    }

    #[test]
    fn long_bodies_and_what_is_not_json_are_left_out() {
        assert_eq!(kept(format!("\"{}\"", "x".repeat(LONGEST_BODY)).as_bytes()), None);
        assert_eq!(kept(b"{"), None);
    }
}
