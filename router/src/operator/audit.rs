//! The audit log: one line of JSON for every write that an operator asked for, done or refused.
//!
//! It lies in the data directory, is bounded by rotation, and never holds a token. Requests that were refused before anything
//! began have files of their own and so many lines a minute for each token, so that they push no write out. No write is begun before the disk has
//! given the room for its line, and the line is there (fdatasync) before the answer is sent; only a process that dies in the
//! middle of a write leaves none. Where a line is lost all the same, because the disk broke meanwhile, the log of the process
//! has it with an error, `/readyz` says so, and no write is begun until the log takes lines again.

mod journal;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{fs, io};

use parking_lot::Mutex;
use prometheus::IntCounterVec;
use serde::Serialize;
use serde_json::Value;

use super::access::{Role, Who};
use crate::auth::Digest;
use journal::Journal;
pub(super) use journal::Room;

/// Longest body that is kept in a line.
const LONGEST_BODY: usize = 4 << 10;

/// Longest tag that is kept in a line.
const LONGEST_TAG: usize = 256;

/// Longest path that is kept in a line.
const LONGEST_KEY: usize = 256;

/// Most lines a minute for refused requests of one token, and of all who have none together.
const REFUSED_A_MINUTE: u32 = 60;

/// Most tokens whose refused requests are counted at a time; beyond that, those that are counted anew count as one.
const MOST_COUNTED: usize = 1024;

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

/// A path as the log keeps it.
pub(super) fn kept_key(path: &str) -> String {
    path[..path.floor_char_boundary(LONGEST_KEY)].to_owned()
}

/// The files that are written to.
#[derive(Debug)]
pub(super) struct Audit {
    /// Writes that were begun: `audit.jsonl`.
    begun: Journal,
    /// Requests that were refused before anything began: `refused.jsonl`.
    refused: Journal,
    /// Whether the first took no line, or had no room for one, when it was tried last.
    is_broken: AtomicBool,
    /// Refused requests by token.
    refusals: Mutex<HashMap<Option<Digest>, Minute>>,
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
    fn is_over(&self, now: Instant) -> bool {
        now.duration_since(self.since) >= Duration::from_secs(60)
    }

    /// One more at `now`: how many there are.
    fn count(&mut self, now: Instant) -> u32 {
        if self.is_over(now) {
            *self = Self { since: now, count: 0 };
        }
        self.count = self.count.saturating_add(1);
        self.count
    }
}

impl Audit {
    /// Opens `audit.jsonl` and `refused.jsonl` in `folder`; all files together stay within about `bound` bytes.
    pub(super) fn open(folder: &Path, bound: u64, failed: IntCounterVec) -> io::Result<Self> {
        // It is made before the ledger's, and may make the data directory with it.
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let begun = Journal::open(folder.join("audit.jsonl"), bound / 4 * 3)?;
        let refused = Journal::open(folder.join("refused.jsonl"), bound / 4)?;
        // At zero from the start.
        ["refused", "lost", "skipped"].iter().for_each(|what| drop(failed.with_label_values(&[what])));
        Ok(Self { begun, refused, is_broken: AtomicBool::new(false), refusals: Mutex::default(), failed })
    }

    /// Takes room on the disk for the line of a write that is to begin. Blocks while the disk does.
    pub(super) fn make_room(&self) -> io::Result<()> {
        let taken = self.begun.make_room();
        self.is_broken.store(taken.is_err(), Ordering::Relaxed);
        if let Err(error) = &taken {
            self.failed.with_label_values(&["refused"]).inc();
            tracing::error!(%error, path = %self.begun.path.display(), "the audit log has no room, so that a write was refused");
        }
        taken
    }

    /// Whether it took no line when it was tried last.
    pub(super) fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::Relaxed)
    }

    /// Finds out whether there is room again, unless somebody is at it. Blocks while the disk does.
    pub(super) fn try_again(&self) {
        if self.begun.has_room() == Some(true) {
            self.is_broken.store(false, Ordering::Relaxed);
        }
    }

    /// Whether a refused request of this token still gets a line in this minute.
    fn has_turn(&self, token: Option<Digest>, now: Instant) -> bool {
        let mut refusals = self.refusals.lock();
        if refusals.len() >= MOST_COUNTED {
            refusals.retain(|_, minute| !minute.is_over(now));
        }
        let is_counted = refusals.len() < MOST_COUNTED || refusals.contains_key(&token);
        let minute = refusals.entry(token.filter(|_| is_counted)).or_insert(Minute { since: now, count: 0 });
        minute.count(now) <= REFUSED_A_MINUTE
    }

    /// Writes a line to the disk; the log of the process has it with `RUST_LOG=info,ownerserve::audit=debug`. Blocks
    /// while the disk does.
    pub(super) fn write(&self, asked: &Asked, (outcome, status): (&'static str, u16), room: Room) {
        let token = asked.who.as_ref().and_then(|who| who.token);
        if room == Room::None && !self.has_turn(token, Instant::now()) {
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
        // Where nothing was begun, no change goes without its line.
        let (journal, what) = match room {
            Room::Taken => (&self.begun, "lost"),
            Room::None => (&self.refused, "skipped"),
        };
        if let Err(error) = journal.append(&text, room) {
            self.is_broken.fetch_or(room == Room::Taken, Ordering::Relaxed);
            self.failed.with_label_values(&[what]).inc();
            let line = String::from_utf8_lossy(&text);
            tracing::error!(%error, path = %journal.path.display(), %line, "the audit log could not be written");
        }
    }
}

#[cfg(test)]
mod tests {
    use journal::{FILES, Open};

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
            assert_eq!(audit.begun.file.lock().promised, 0);
        }
        let files: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        let size: u64 = files.iter().map(|path| fs::metadata(path).unwrap().len()).sum();
        assert_eq!(files.len(), FILES as usize + 1, "and an empty one for what is refused");
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
            audit.make_room().unwrap();
            audit.write(&asked("next"), ("done", 200), Room::Taken);
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
            audit.make_room().unwrap();
            audit.write(&asked(&n.to_string()), ("done", 200), Room::Taken);
            audit.write(&asked(&n.to_string()), ("forbidden", 403), Room::None);
        }
        let modes = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().metadata().unwrap().permissions());
        let modes: Vec<_> = modes.map(|mode| mode.mode() & 0o777).collect();
        assert!(modes.len() > 3 && modes.iter().all(|mode| *mode == 0o600), "{modes:?}");
    }

    #[test]
    fn a_disk_that_gives_no_room_is_told_before_and_counted_and_tried_again() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["audit.jsonl", "refused.jsonl"] {
            std::os::unix::fs::symlink("/dev/full", folder.path().join(name)).unwrap();
        }
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
        *audit.begun.file.lock() = Open::at(&folder.path().join("other")).unwrap();
        audit.try_again();
        assert!(!audit.is_broken() && audit.begun.file.lock().promised == 0, "there is room now");
        audit.write(&asked("refused"), ("not_ready", 503), Room::None);
        assert!(!audit.is_broken(), "a line of a refused request keeps no write from being done");
    }

    fn of_token(token: Option<u8>, key: &str) -> Asked {
        let token = token.map(|byte| [byte; 32]);
        Asked { who: Some(Who { name: "alice".into(), role: Role::Read, token }), ..asked(key) }
    }

    #[test]
    fn folders_that_it_makes_are_its_owners_alone() {
        let folder = tempfile::tempdir().unwrap();
        let data = folder.path().join("data");
        Audit::open(&data.join("audit"), 64 << 20, counter()).unwrap();
        for made in [data.clone(), data.join("audit")] {
            let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&made).unwrap().permissions());
            assert_eq!(mode & 0o777, 0o700, "{}", made.display());
        }
    }

    #[test]
    fn refused_requests_of_a_token_leave_only_so_many_lines_a_minute() {
        let folder = tempfile::tempdir().unwrap();
        let audit = Audit::open(folder.path(), 64 << 20, counter()).unwrap();
        for n in 0..2 * REFUSED_A_MINUTE {
            audit.write(&of_token(Some(1), &n.to_string()), ("forbidden", 403), Room::None);
            audit.write(&Asked { who: None, ..asked(&n.to_string()) }, ("unauthorized", 401), Room::None);
        }
        audit.write(&of_token(Some(2), "another's"), ("forbidden", 403), Room::None);
        let text = fs::read_to_string(folder.path().join("refused.jsonl")).unwrap();
        assert_eq!(text.lines().count(), 2 * REFUSED_A_MINUTE as usize + 1);
        assert!(text.lines().last().unwrap().contains("another's"));
        assert_eq!(audit.failed.with_label_values(&["skipped"]).get(), 2 * u64::from(REFUSED_A_MINUTE));
        assert!(!audit.has_turn(Some([1; 32]), Instant::now()));
        assert!(audit.has_turn(Some([1; 32]), Instant::now() + Duration::from_secs(60)), "the next minute");
    }

    #[test]
    fn tokens_that_come_and_go_are_counted_within_a_bound() {
        let folder = tempfile::tempdir().unwrap();
        let audit = Audit::open(folder.path(), 64 << 20, counter()).unwrap();
        let now = Instant::now();
        let token = |n: usize| Some(crate::auth::digest(&n.to_le_bytes()));
        let taken = (0..2 * MOST_COUNTED).filter(|n| audit.has_turn(token(*n), now)).count();
        assert_eq!(taken, MOST_COUNTED + REFUSED_A_MINUTE as usize, "those beyond the bound share one turn");
        assert!(audit.refusals.lock().len() <= MOST_COUNTED + 1);
        assert!(audit.has_turn(token(9_999), now + Duration::from_secs(60)));
        assert_eq!(audit.refusals.lock().len(), 1, "the others' minutes are over");
    }

    #[test]
    fn refused_requests_push_no_write_out_of_the_files() {
        let folder = tempfile::tempdir().unwrap();
        let audit = Audit::open(folder.path(), 16 << 10, counter()).unwrap();
        audit.make_room().unwrap();
        audit.write(&asked("alice's write"), ("done", 200), Room::Taken);
        for token in 0..32 {
            for n in 0..REFUSED_A_MINUTE / 10 {
                audit.write(&of_token(Some(token), &format!("{n}{}", "x".repeat(200))), ("forbidden", 403), Room::None);
            }
        }
        assert!(folder.path().join("refused.jsonl.3").exists(), "these were turned over");
        let text = fs::read_to_string(folder.path().join("audit.jsonl")).unwrap();
        assert_eq!(text.lines().count(), 1);
        assert!(text.contains("alice's write"));
    }

    #[test]
    fn a_path_is_kept_up_to_its_bound() {
        assert_eq!(kept_key("/ownerserve/v1/mode"), "/ownerserve/v1/mode");
        assert_eq!(kept_key(&"x".repeat(7_900)).len(), LONGEST_KEY);
        assert_eq!(kept_key(&"\u{e9}".repeat(200)).len(), LONGEST_KEY);
        assert_eq!(kept_key(&format!("x{}", "\u{e9}".repeat(200))).len(), LONGEST_KEY - 1, "no letter is cut in two");
    }

    #[test]
    fn long_bodies_and_what_is_not_json_are_left_out() {
        assert_eq!(kept(format!("\"{}\"", "x".repeat(LONGEST_BODY)).as_bytes()), None);
        assert_eq!(kept(b"{"), None);
    }
}
