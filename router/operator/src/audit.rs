//! Audit log: one line of JSON for every write requested by an operator, done or refused.
//!
//! It is in the data directory, bounded by rotation, and never contains a token. Requests refused before execution
//! have files of their own with a rate limit per token, so that they cannot displace writes. A write starts only
//! after disk space for its line is reserved, and the line is synced (fdatasync) before the response is sent; only a
//! process that dies in the middle of a write leaves none. If a line is lost because the disk failed meanwhile, the
//! process log has it as an error, `/readyz` reports it, and no write starts until the log works again.

mod journal;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use std::{fs, io};

use parking_lot::Mutex;
use prometheus::IntCounterVec;
use serde::Serialize;
use serde_json::Value;

use super::access::{Principal, TokenRole};
use journal::Journal;
pub(super) use journal::SpaceReservation;
use proxy::auth::KeyDigest;
use proxy::receipt::unix_ms;
use vocabulary::UtcTime;

/// Maximum size of a body kept in a line.
const MAX_BODY_BYTES: usize = 4 << 10;

/// Maximum length of a tag kept in a line.
const MAX_TAG_BYTES: usize = 256;

/// Maximum length of a path kept in a line.
const MAX_PATH_BYTES: usize = 256;

/// Maximum lines per minute for refused requests, per token and for all requests without a token together.
const MAX_REFUSED_PER_MINUTE: u32 = 60;

/// Maximum number of tokens with their own rate limit; further tokens share one.
const MAX_TRACKED_TOKENS: usize = 1024;

#[derive(Serialize)]
pub(super) struct AuditRecord<'a> {
    /// Wall-clock time.
    time: UtcTime,
    /// Name of the token.
    actor: &'a str,
    /// Role of the token; `None` if no token was accepted.
    role: Option<TokenRole>,
    /// Method and path template.
    operation: String,
    /// Path of the request.
    path: &'a str,
    /// Body as sent; omitted if too long or not JSON.
    body: Option<Value>,
    if_match: Option<&'a str>,
    /// `succeeded`, `replayed` (done before under the same idempotency key), or the problem's word.
    outcome: &'static str,
    status: u16,
    /// Request id, as in the response.
    request_id: &'a str,
    remote_address: Option<SocketAddr>,
}

/// What is known of a write before it runs.
#[derive(Clone, Debug)]
pub(super) struct AuditedRequest {
    pub(super) principal: Option<Principal>,
    pub(super) route: String,
    pub(super) path: String,
    pub(super) body: Option<Value>,
    pub(super) if_match: Option<String>,
    pub(super) request_id: String,
    pub(super) remote_address: Option<SocketAddr>,
}

/// Returns the body as the log keeps it.
pub(super) fn loggable_body(body: &[u8]) -> Option<Value> {
    (body.len() <= MAX_BODY_BYTES).then(|| serde_json::from_slice(body).ok()).flatten()
}

/// Returns the tag as the log keeps it.
pub(super) fn truncate_tag(tag: &str) -> String {
    tag.chars().take(MAX_TAG_BYTES).collect()
}

/// Returns the path as the log keeps it.
pub(super) fn truncate_path(path: &str) -> String {
    path[..path.floor_char_boundary(MAX_PATH_BYTES)].to_owned()
}

/// Files of the audit log.
#[derive(Debug)]
pub(super) struct AuditLog {
    /// Executed writes: `audit.jsonl`.
    write_journal: Journal,
    /// Requests refused before execution: `refused.jsonl`.
    refused_journal: Journal,
    /// Whether the last attempt to write to, or reserve space in, `write_journal` failed.
    is_broken: AtomicBool,
    /// Refused requests in the current minute, by token.
    refused_counts: Mutex<HashMap<Option<KeyDigest>, MinuteCounter>>,
    /// `audit_log_failures_total{kind}`.
    failed: IntCounterVec,
}

/// Number of events within a minute from the first one.
#[derive(Debug)]
struct MinuteCounter {
    window_start: Instant,
    count: u32,
}

impl MinuteCounter {
    fn has_elapsed(&self, now: Instant) -> bool {
        now.duration_since(self.window_start) >= Duration::from_secs(60)
    }

    /// Counts an event at `now` and returns the number so far.
    fn count(&mut self, now: Instant) -> u32 {
        if self.has_elapsed(now) {
            *self = Self { window_start: now, count: 0 };
        }
        self.count = self.count.saturating_add(1);
        self.count
    }
}

impl AuditLog {
    /// Opens the log's files in `folder`; together they stay within about `bound` bytes.
    pub(super) fn open(folder: &Path, bound: u64, failed: IntCounterVec) -> io::Result<Self> {
        // The audit log is opened before the ledger and may create the data directory.
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let begun = Journal::open(folder.join("audit.jsonl"), bound / 4 * 3)?;
        let refused = Journal::open(folder.join("refused.jsonl"), bound / 4)?;
        // At zero from the start.
        ["write_rejected", "line_lost", "line_skipped"].iter().for_each(|kind| drop(failed.with_label_values(&[kind])));
        Ok(Self {
            write_journal: begun,
            refused_journal: refused,
            is_broken: AtomicBool::new(false),
            refused_counts: Mutex::default(),
            failed,
        })
    }

    /// Reserves disk space for the line of a write that is about to start. Blocks on disk IO.
    pub(super) fn reserve(&self) -> io::Result<()> {
        let reservation = self.write_journal.reserve();
        self.is_broken.store(reservation.is_err(), Ordering::Relaxed);
        if let Err(error) = &reservation {
            self.failed.with_label_values(&["write_rejected"]).inc();
            tracing::error!(%error, path = %self.write_journal.path.display(), "the audit log has no room, so that a write was refused");
        }
        reservation
    }

    /// Returns whether the last attempt failed.
    pub(super) fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::Relaxed)
    }

    /// Checks whether there is space again, unless somebody else is writing. Blocks on disk IO.
    pub(super) fn probe_space(&self) {
        if self.write_journal.has_space() == Some(true) {
            self.is_broken.store(false, Ordering::Relaxed);
        }
    }

    /// Returns whether a refused request of this token may still get a line in this minute.
    fn allows_refused_record(&self, token: Option<KeyDigest>, now: Instant) -> bool {
        let mut refusals = self.refused_counts.lock();
        if refusals.len() >= MAX_TRACKED_TOKENS {
            refusals.retain(|_, minute| !minute.has_elapsed(now));
        }
        let is_counted = refusals.len() < MAX_TRACKED_TOKENS || refusals.contains_key(&token);
        let minute =
            refusals.entry(token.filter(|_| is_counted)).or_insert(MinuteCounter { window_start: now, count: 0 });
        minute.count(now) <= MAX_REFUSED_PER_MINUTE
    }

    /// Writes a line to disk, and to the process log with `RUST_LOG=info,ownerserve::audit=debug`. Blocks on disk IO.
    pub(super) fn write(
        &self,
        request: &AuditedRequest,
        (outcome, status): (&'static str, u16),
        room: SpaceReservation,
    ) {
        let token = request.principal.as_ref().and_then(|who| who.token);
        if room == SpaceReservation::None && !self.allows_refused_record(token, Instant::now()) {
            self.failed.with_label_values(&["line_skipped"]).inc();
            return;
        }
        let line = AuditRecord {
            time: UtcTime::from_unix_ms(unix_ms()),
            actor: request.principal.as_ref().map_or("nobody", |who| &who.name),
            role: request.principal.as_ref().map(|who| who.role),
            operation: request.route.clone(),
            path: &request.path,
            body: request.body.clone(),
            if_match: request.if_match.as_deref(),
            outcome,
            status,
            request_id: &request.request_id,
            remote_address: request.remote_address,
        };
        let mut text = serde_json::to_vec(&line).unwrap_or_default();
        tracing::debug!(target: "ownerserve::audit", line = %String::from_utf8_lossy(&text), "an operator wrote");
        text.push(b'\n');
        // Where nothing was begun, no change goes without its line.
        let (journal, kind) = match room {
            SpaceReservation::Reserved => (&self.write_journal, "line_lost"),
            SpaceReservation::None => (&self.refused_journal, "line_skipped"),
        };
        if let Err(error) = journal.append(&text, room) {
            self.is_broken.fetch_or(room == SpaceReservation::Reserved, Ordering::Relaxed);
            self.failed.with_label_values(&[kind]).inc();
            let line = String::from_utf8_lossy(&text);
            tracing::error!(%error, path = %journal.path.display(), %line, "the audit log could not be written");
        }
    }
}

#[cfg(test)]
mod tests {
    use journal::{JournalFile, MAX_FILES};

    use super::*;

    fn asked(key: &str) -> AuditedRequest {
        AuditedRequest {
            principal: Some(Principal { name: "alice".into(), role: TokenRole::Operator, token: None }),
            route: "POST /x/{id}".into(),
            path: key.into(),
            body: loggable_body(b"{\"a\": 1}"),
            if_match: None,
            request_id: "req-1".into(),
            remote_address: None,
        }
    }

    #[test]
    fn log_is_json_lines_survives_a_restart_and_respects_its_size_limit() {
        let folder = tempfile::tempdir().unwrap();
        let bound = 4 * (4 << 10);
        for start in 0..3 {
            let audit = AuditLog::open(folder.path(), bound, counter()).unwrap();
            for n in 0..100 {
                audit.reserve().unwrap();
                audit.write(&asked(&format!("{start}.{n}")), ("succeeded", 200), SpaceReservation::Reserved);
            }
            assert_eq!(audit.write_journal.file.lock().reserved, 0);
        }
        let files: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        let size: u64 = files.iter().map(|path| fs::metadata(path).unwrap().len()).sum();
        assert_eq!(files.len(), MAX_FILES as usize + 1, "and an empty one for what is refused");
        assert!(size <= bound, "{size} bytes");
        let text = fs::read_to_string(folder.path().join("audit.jsonl")).unwrap();
        let last: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        assert_eq!(
            (last["path"].as_str(), last["actor"].as_str(), last["body"]["a"].as_u64()),
            (Some("2.99"), Some("alice"), Some(1))
        );
    }

    fn counter() -> IntCounterVec {
        IntCounterVec::new(prometheus::Opts::new("failed", "failed"), &["kind"]).unwrap()
    }

    #[test]
    fn line_torn_by_a_crash_is_truncated() {
        for (before, kept) in [("{\"a\":1}\n{\"b\":", "{\"a\":1}\n"), ("{\"half\":", ""), ("", "")] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("audit.jsonl");
            fs::write(&path, format!("{}{before}", kept.repeat(2_000))).unwrap();
            let audit = AuditLog::open(folder.path(), 64 << 20, counter()).unwrap();
            audit.reserve().unwrap();
            audit.write(&asked("next"), ("succeeded", 200), SpaceReservation::Reserved);
            let text = fs::read_to_string(&path).unwrap();
            let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            assert_eq!(lines.last().unwrap()["path"], "next");
            assert_eq!(lines.len(), if kept.is_empty() { 1 } else { 2_002 });
        }
    }

    #[test]
    fn log_files_are_readable_only_by_their_owner() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let audit = AuditLog::open(folder.path(), 16 << 10, counter()).unwrap();
        for n in 0..50 {
            audit.reserve().unwrap();
            audit.write(&asked(&n.to_string()), ("succeeded", 200), SpaceReservation::Reserved);
            audit.write(&asked(&n.to_string()), ("forbidden", 403), SpaceReservation::None);
        }
        let modes = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().metadata().unwrap().permissions());
        let modes: Vec<_> = modes.map(|mode| mode.mode() & 0o777).collect();
        assert!(modes.len() > 3 && modes.iter().all(|mode| *mode == 0o600), "{modes:?}");
    }

    #[test]
    fn full_disk_is_detected_before_a_write_counted_and_retried() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["audit.jsonl", "refused.jsonl"] {
            std::os::unix::fs::symlink("/dev/full", folder.path().join(name)).unwrap();
        }
        let audit = AuditLog::open(folder.path(), 64 << 20, counter()).unwrap();
        assert!(!audit.is_broken());
        assert!(audit.reserve().is_err() && audit.is_broken());
        audit.write(&asked("refused"), ("not_ready", 503), SpaceReservation::None);
        let count = |kind: &str| audit.failed.with_label_values(&[kind]).get();
        assert_eq!(
            (count("write_rejected"), count("line_lost"), count("line_skipped")),
            (1, 0, 1),
            "nothing was begun"
        );
        audit.write(&asked("begun"), ("succeeded", 200), SpaceReservation::Reserved);
        assert_eq!((count("write_rejected"), count("line_lost"), count("line_skipped")), (1, 1, 1));
        audit.probe_space();
        assert!(audit.is_broken(), "it is as full as before");
        *audit.write_journal.file.lock() = JournalFile::open(&folder.path().join("other")).unwrap();
        audit.probe_space();
        assert!(!audit.is_broken() && audit.write_journal.file.lock().reserved == 0, "there is room now");
        audit.write(&asked("refused"), ("not_ready", 503), SpaceReservation::None);
        assert!(!audit.is_broken(), "a line of a refused request keeps no write from being done");
    }

    fn of_token(token: Option<u8>, key: &str) -> AuditedRequest {
        let token = token.map(|byte| [byte; 32]);
        AuditedRequest {
            principal: Some(Principal { name: "alice".into(), role: TokenRole::Read, token }),
            ..asked(key)
        }
    }

    #[test]
    fn folders_that_it_makes_are_its_owners_alone() {
        let folder = tempfile::tempdir().unwrap();
        let data = folder.path().join("data");
        AuditLog::open(&data.join("audit"), 64 << 20, counter()).unwrap();
        for made in [data.clone(), data.join("audit")] {
            let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&made).unwrap().permissions());
            assert_eq!(mode & 0o777, 0o700, "{}", made.display());
        }
    }

    #[test]
    fn refused_requests_are_logged_at_a_limited_rate_per_token() {
        let folder = tempfile::tempdir().unwrap();
        let audit = AuditLog::open(folder.path(), 64 << 20, counter()).unwrap();
        for n in 0..2 * MAX_REFUSED_PER_MINUTE {
            audit.write(&of_token(Some(1), &n.to_string()), ("forbidden", 403), SpaceReservation::None);
            audit.write(
                &AuditedRequest { principal: None, ..asked(&n.to_string()) },
                ("unauthorized", 401),
                SpaceReservation::None,
            );
        }
        audit.write(&of_token(Some(2), "another's"), ("forbidden", 403), SpaceReservation::None);
        let text = fs::read_to_string(folder.path().join("refused.jsonl")).unwrap();
        assert_eq!(text.lines().count(), 2 * MAX_REFUSED_PER_MINUTE as usize + 1);
        assert!(text.lines().last().unwrap().contains("another's"));
        assert_eq!(audit.failed.with_label_values(&["line_skipped"]).get(), 2 * u64::from(MAX_REFUSED_PER_MINUTE));
        assert!(!audit.allows_refused_record(Some([1; 32]), Instant::now()));
        assert!(
            audit.allows_refused_record(Some([1; 32]), Instant::now() + Duration::from_secs(60)),
            "the next minute"
        );
    }

    #[test]
    fn tokens_with_refused_requests_are_tracked_up_to_a_limit() {
        let folder = tempfile::tempdir().unwrap();
        let audit = AuditLog::open(folder.path(), 64 << 20, counter()).unwrap();
        let now = Instant::now();
        let token = |n: usize| Some(proxy::auth::digest(&n.to_le_bytes()));
        let taken = (0..2 * MAX_TRACKED_TOKENS).filter(|n| audit.allows_refused_record(token(*n), now)).count();
        assert_eq!(
            taken,
            MAX_TRACKED_TOKENS + MAX_REFUSED_PER_MINUTE as usize,
            "those beyond the bound share one turn"
        );
        assert!(audit.refused_counts.lock().len() <= MAX_TRACKED_TOKENS + 1);
        assert!(audit.allows_refused_record(token(9_999), now + Duration::from_secs(60)));
        assert_eq!(audit.refused_counts.lock().len(), 1, "the others' minutes are over");
    }

    #[test]
    fn refused_requests_do_not_rotate_out_write_records() {
        let folder = tempfile::tempdir().unwrap();
        let audit = AuditLog::open(folder.path(), 16 << 10, counter()).unwrap();
        audit.reserve().unwrap();
        audit.write(&asked("alice's write"), ("succeeded", 200), SpaceReservation::Reserved);
        for token in 0..32 {
            for n in 0..MAX_REFUSED_PER_MINUTE / 10 {
                audit.write(
                    &of_token(Some(token), &format!("{n}{}", "x".repeat(200))),
                    ("forbidden", 403),
                    SpaceReservation::None,
                );
            }
        }
        assert!(folder.path().join("refused.jsonl.3").exists(), "these were turned over");
        let text = fs::read_to_string(folder.path().join("audit.jsonl")).unwrap();
        assert_eq!(text.lines().count(), 1);
        assert!(text.contains("alice's write"));
    }

    #[test]
    fn long_paths_are_truncated() {
        assert_eq!(truncate_path("/ownerserve/v1/routing"), "/ownerserve/v1/routing");
        assert_eq!(truncate_path(&"x".repeat(7_900)).len(), MAX_PATH_BYTES);
        assert_eq!(truncate_path(&"\u{e9}".repeat(200)).len(), MAX_PATH_BYTES);
        assert_eq!(
            truncate_path(&format!("x{}", "\u{e9}".repeat(200))).len(),
            MAX_PATH_BYTES - 1,
            "no letter is cut in two"
        );
    }

    #[test]
    fn long_and_non_json_bodies_are_omitted() {
        assert_eq!(loggable_body(format!("\"{}\"", "x".repeat(MAX_BODY_BYTES)).as_bytes()), None);
        assert_eq!(loggable_body(b"{"), None);
    }
}
