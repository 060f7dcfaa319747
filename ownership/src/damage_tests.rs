//! Tests with damaged logs on disk: every log either opens with all acknowledged writes, or is refused with file and
//! offset and left unchanged.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ::ledger::{Command, LedgerEntry, Submission};
use consensus::SharedLedgerEntry;
use openraft::entry::RaftEntry;
use openraft::storage::{IOFlushed, RaftLogStorage};
use openraft::type_config::TypeConfigExt;
use openraft::type_config::alias::LeaderIdOf;
use openraft::vote::RaftLeaderIdExt;
use openraft::{EntryPayload, RaftLogReader};
use vocabulary::{ClientId, ClientSerial, LedgerTime, NodeId, SessionId};

use crate::directory::OwnershipDirectory;
use crate::error::LedgerNodeError;
use crate::log_store::LogStore;
use crate::node_folder::NodeFolder;
use crate::node_options::Options;
use crate::raft::{LogEntry, LogId, TokioTypeConfig, Vote};
use crate::wal::MaxChunkSize;

/// Small files, so that a short log has several.
const CHUNK_BYTES: MaxChunkSize = MaxChunkSize(1_500);

fn id(term: u64, index: u64) -> LogId {
    LogId::new(LeaderIdOf::<TokioTypeConfig>::new_committed(term, 1), index)
}

fn entry(index: u64, commands: u64) -> LogEntry {
    let submission = |n| Submission {
        client: ClientId(7),
        serial: ClientSerial(n),
        command: match n {
            0 => Command::OpenClient(NodeId(1)),
            n => Command::CloseSession(SessionId(u128::from(n * index))),
        },
    };
    let entry = LedgerEntry { time: LedgerTime(index), submissions: (0..commands).map(submission).collect() };
    LogEntry::new(id(1, index), EntryPayload::Normal(SharedLedgerEntry(Arc::new(entry))))
}

async fn append(store: &mut LogStore, entries: Vec<LogEntry>) -> std::io::Result<()> {
    let (flushed, done) = TokioTypeConfig::oneshot();
    store.append(entries, IOFlushed::signal(flushed)).await?;
    done.await.unwrap()
}

#[tokio::test]
async fn an_implausible_saved_term_fails_the_start_without_blaming_the_disk() {
    let folder = tempfile::tempdir().unwrap();
    let node = NodeFolder::open(folder.path(), None).unwrap();
    let mut log = LogStore::open(&node).unwrap();
    log.save_vote(&Vote::new(u64::MAX, 9)).await.unwrap();
    drop((log, node));
    let error = OwnershipDirectory::open(Options::new(folder.path())).await.unwrap_err();
    assert!(matches!(error, LedgerNodeError::Term { term: u64::MAX, .. }), "{error}");
    let message = error.to_string();
    assert!(message.contains("The disk is sound") && message.contains("snapshot restore"), "{message}");
}

/// A log of several files that was truncated and purged; every byte was acknowledged.
struct LogFixture {
    _folder: tempfile::TempDir,
    root: PathBuf,
    /// Entries in the log, by index.
    entries: BTreeMap<u64, LogEntry>,
    /// Contents of its files.
    files: BTreeMap<PathBuf, Vec<u8>>,
}

fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let files = entries.filter(|path| path.is_file() && path.file_name().unwrap() != "LOCK");
    files.map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

fn open(root: &Path) -> Result<LogStore, LedgerNodeError> {
    LogStore::open_in(&NodeFolder::open(root, None)?, CHUNK_BYTES)
}

fn run<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(work)
}

impl LogFixture {
    fn with_entries() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().to_owned();
        run(async {
            let mut store = open(&root).unwrap();
            store.save_vote(&Vote::new_committed(1, 1)).await.unwrap();
            for index in 0..70 {
                append(&mut store, vec![entry(index, index % 5)]).await.unwrap();
                store.save_committed(Some(id(1, index.min(60)))).await.unwrap();
            }
            store.truncate_after(Some(id(1, 64))).await.unwrap();
            append(&mut store, (65..75).map(|index| entry(index, 2)).collect()).await.unwrap();
            store.purge(id(1, 20)).await.unwrap();
            store.save_vote(&Vote::new(2, 3)).await.unwrap();
        });
        let entries = (21..75).map(|index| (index, entry(index, if index < 65 { index % 5 } else { 2 }))).collect();
        let files = files(&root.join("log"));
        assert!(files.len() > 3, "several files: {:?}", files.keys());
        Self { _folder: folder, root, entries, files }
    }

    fn newest(&self) -> (&Path, &[u8]) {
        let (path, bytes) = self.files.last_key_value().unwrap();
        (path, bytes)
    }

    /// Opens the log and checks that everything is there.
    fn assert_whole(&self) {
        run(async {
            let mut store = open(&self.root).unwrap();
            let found = store.try_get_log_entries(0..1_000).await.unwrap();
            assert_eq!(found, self.entries.values().cloned().collect::<Vec<_>>());
            assert_eq!(store.read_vote().await.unwrap(), Some(Vote::new(2, 3)));
            assert_eq!(store.read_committed().await.unwrap(), Some(id(1, 60)));
        });
    }

    /// Checks that opening is refused with `file` and an offset, and that nothing is changed.
    fn assert_refused(&self, file: &Path, what: &str) -> String {
        let before = files(&self.root.join("log"));
        let error = match open(&self.root) {
            Ok(_) => panic!("{what} was not noticed"),
            Err(error) => error.to_string(),
        };
        let name = file.file_name().unwrap().to_str().unwrap();
        assert!(error.contains(name), "{what}: {error}");
        assert!(error.contains("offset"), "{what}: {error}");
        assert!(error.contains("ownerserve ctl snapshot restore"), "{what}: {error}");
        assert!(files(&self.root.join("log")) == before, "{what}: something was changed");
        error
    }

    fn restore(&self) {
        for path in files(&self.root.join("log")).keys().filter(|path| !self.files.contains_key(*path)) {
            fs::remove_file(path).unwrap();
        }
        for (path, bytes) in &self.files {
            fs::write(path, bytes).unwrap();
        }
    }
}

#[test]
fn an_undamaged_log_opens_repeatedly() {
    let log = LogFixture::with_entries();
    for _ in 0..3 {
        log.assert_whole();
    }
    assert_eq!(files(&log.root.join("log")), log.files, "opening writes nothing");
}

#[test]
fn every_flipped_byte_is_refused() {
    let log = LogFixture::with_entries();
    let mut flipped = 0;
    for (path, good) in &log.files {
        // The whole checkpoint and the last records, and every third byte in between.
        for at in (0..good.len()).filter(|at| *at < 200 || *at + 200 > good.len() || at % 3 == 0) {
            let mut bad = good.clone();
            bad[at] ^= 1 << (at % 8);
            fs::write(path, &bad).unwrap();
            log.assert_refused(path, &format!("bit {} of byte {at}", at % 8));
            flipped += 1;
        }
        fs::write(path, good).unwrap();
    }
    assert!(flipped > 2_000, "{flipped} bytes");
    log.assert_whole();
}

#[test]
fn every_truncation_inside_or_between_records_is_refused() {
    let log = LogFixture::with_entries();
    for (path, good) in &log.files {
        for length in (0..good.len()).filter(|length| *length < 200 || *length + 400 > good.len() || length % 5 == 0) {
            fs::write(path, &good[..length]).unwrap();
            // A cut between two records is noticed by the next file, a cut inside a record by the file itself, and one
            // at the end by the mark.
            let next = log.files.range(path.clone()..).nth(1).map_or(path, |(next, _)| next);
            let error = open(&log.root).err().unwrap_or_else(|| panic!("cut of {} at {length}", path.display()));
            let error = error.to_string();
            let names = |path: &Path| error.contains(path.file_name().unwrap().to_str().unwrap());
            assert!(error.contains("offset") && (names(path) || names(next)), "{error}");
            assert!(fs::metadata(path).unwrap().len() == length as u64, "nothing was cut further");
        }
        fs::write(path, good).unwrap();
    }
    log.assert_whole();
}

#[test]
fn every_zeroed_tail_is_refused() {
    let log = LogFixture::with_entries();
    let (path, good) = log.newest();
    let mut zeroed = 0;
    for from in 0..good.len() {
        let mut bad = good.to_vec();
        bad[from..].fill(0);
        if bad != good {
            fs::write(path, &bad).unwrap();
            log.assert_refused(path, &format!("zeros from {from}"));
            zeroed += 1;
        }
    }
    assert!(zeroed > 100);
}

#[test]
fn a_missing_log_file_is_refused_at_any_position() {
    let log = LogFixture::with_entries();
    let paths: Vec<&PathBuf> = log.files.keys().collect();
    for (place, path) in paths.iter().enumerate() {
        fs::remove_file(path).unwrap();
        let error = open(&log.root).err().unwrap_or_else(|| panic!("{} is not missed", path.display())).to_string();
        let name = path.file_name().unwrap().to_str().unwrap();
        let is_between = place > 0 && place + 1 < paths.len();
        assert!(!is_between || error.contains(name), "{error}");
        assert!(
            error.contains("missing") || error.contains("should be there") || error.contains("acknowledged"),
            "{error}"
        );
        log.restore();
    }
    for path in &paths {
        fs::remove_file(path).unwrap();
    }
    let error = open(&log.root).expect_err("the whole log is missing").to_string();
    assert!(error.contains("acknowledged"), "{error}");
}

#[test]
fn a_foreign_file_in_the_log_directory_is_refused() {
    let log = LogFixture::with_entries();
    let folder = log.root.join("log");
    for name in ["notes.txt", "r-00_000_000_000_000_000_000.wal.bak", "r-00000000000000000000000000.wal", "r-1.wal"] {
        fs::write(folder.join(name), "?").unwrap();
        let error = open(&log.root).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("move it out"), "{error}");
        fs::remove_file(folder.join(name)).unwrap();
    }
    let (path, _) = log.newest();
    fs::remove_file(path).unwrap();
    fs::create_dir(path).unwrap();
    let error = open(&log.root).unwrap_err().to_string();
    assert!(error.contains("is no file"), "{error}");
    fs::remove_dir(path).unwrap();
    log.restore();
    log.assert_whole();
}

#[test]
fn a_log_of_another_node_is_refused() {
    let (log, other) = (LogFixture::with_entries(), LogFixture::with_entries());
    for (path, bytes) in &other.files {
        fs::write(log.root.join("log").join(path.file_name().unwrap()), bytes).unwrap();
    }
    let error = open(&log.root).unwrap_err().to_string();
    assert!(error.contains("another node"), "{error}");
}

#[test]
fn missing_truncated_or_advanced_log_marks_are_refused() {
    let log = LogFixture::with_entries();
    let path = log.root.join("committed");
    let good = fs::read(&path).unwrap();
    for length in [0, 16] {
        fs::write(&path, &good[..length]).unwrap();
        let error = open(&log.root).unwrap_err().to_string();
        assert!(error.contains("committed") && error.contains("offset"), "{error}");
    }
    fs::remove_file(&path).unwrap();
    let error = open(&log.root).unwrap_err().to_string();
    assert!(error.contains("committed") && error.contains("missing"), "{error}");
    fs::create_dir(&path).unwrap();
    let error = open(&log.root).unwrap_err().to_string();
    assert!(error.contains("committed"), "{error}");
    fs::remove_dir(&path).unwrap();
    fs::write(&path, &good).unwrap();
    log.assert_whole();
    fs::remove_file(log.root.join("identity.json")).unwrap();
    let error = open(&log.root).unwrap_err().to_string();
    assert!(error.contains("identity.json"), "{error}");
}

/// Returns a record that could follow the newest file's.
fn next_record(log: &LogFixture) -> Vec<u8> {
    let other = tempfile::tempdir().unwrap();
    run(async {
        let mut store = open(other.path()).unwrap();
        append(&mut store, (0..75).map(|index| entry(index, 2)).collect()).await.unwrap();
        let before = files(&other.path().join("log")).values().map(Vec::len).sum::<usize>();
        append(&mut store, vec![entry(75, 3)]).await.unwrap();
        let all: Vec<u8> = files(&other.path().join("log")).into_values().flatten().collect();
        assert!(log.entries.contains_key(&74));
        all[before..].to_vec()
    })
}

#[test]
fn an_unacknowledged_torn_tail_is_cut_off_at_every_length() {
    let log = LogFixture::with_entries();
    let (path, good) = log.newest();
    let record = next_record(&log);
    assert!(record.len() > 30);
    for length in 1..record.len() {
        let torn = [good, &record[..length]].concat();
        fs::write(path, &torn).unwrap();
        log.assert_whole();
        assert_eq!(fs::read(path).unwrap(), good, "cut back to the last whole record");
        assert_eq!(fs::read(log.root.join("torn-log-end")).unwrap(), &record[..length], "what was cut off is kept");
    }
    // The file's length was written, but its data was not, or only the first sectors.
    for zeros in [1, 511, 512, 4_096, 70_000] {
        fs::write(path, [good, &vec![0; zeros]].concat()).unwrap();
        log.assert_whole();
        fs::write(path, [good, &record[..9], &vec![0; zeros.max(1_024)]].concat()).unwrap();
        log.assert_whole();
    }
    // The next file was created, and perhaps begun.
    let next = |end: usize| {
        let start =
            path.file_name().unwrap().to_str().unwrap().chars().filter(char::is_ascii_digit).collect::<String>();
        let start = start.parse::<u64>().unwrap() + end as u64;
        path.with_file_name(raft_log::chunked_wal::Config::chunk_file_name(start.into()))
    };
    for begun in [&[][..], &record[..10], &[0; 600]] {
        fs::write(next(good.len()), begun).unwrap();
        log.assert_whole();
        fs::write(path, [good, &record[..20]].concat()).unwrap();
        fs::write(next(good.len() + record.len()), begun).unwrap();
        log.assert_whole();
        assert_eq!(files(&log.root.join("log")), log.files);
    }
}

#[test]
fn a_whole_unacknowledged_record_is_retained_and_made_durable() {
    let mut log = LogFixture::with_entries();
    let (path, good) = log.newest();
    let (path, good) = (&path.to_owned(), &good.to_vec()[..]);
    fs::write(path, [good, &next_record(&log)].concat()).unwrap();
    let marks = fs::read(log.root.join("committed")).unwrap();
    log.entries.insert(75, entry(75, 3));
    log.assert_whole();
    assert_ne!(fs::read(log.root.join("committed")).unwrap(), marks, "from now on it would be missed");
    fs::write(path, good).unwrap();
    log.assert_refused(path, "the loss of a record that Raft has vouched for since");
}

#[test]
fn an_unacknowledged_tail_that_no_crash_explains_is_refused() {
    let log = LogFixture::with_entries();
    let (path, good) = log.newest();
    let record = next_record(&log);
    let mut flipped = record.clone();
    flipped[record.len() / 2] ^= 4;
    // A complete record with a wrong byte; garbage; a whole record after a broken one.
    let garbage: Vec<u8> = (1..200).collect();
    for bad in [flipped.clone(), garbage, [&record[..20], &record[..]].concat(), [&flipped[..], &record[..]].concat()] {
        fs::write(path, [good, &bad].concat()).unwrap();
        log.assert_refused(path, "garbage behind the mark");
    }
}

#[test]
fn an_entry_of_a_newer_release_is_refused_with_its_level() {
    use raft_log::codeq::config::CodeqConfig;
    use raft_log::types::Checksum;

    let log = LogFixture::with_entries();
    let (path, good) = log.newest();
    let mut record = next_record(&log);
    // A payload variant that this release does not know.
    let place = record.windows(6).position(|bytes| bytes == b"Normal").expect("an entry names its variant");
    record[place..place + 6].copy_from_slice(b"Newest");
    let covered = record.len() - 8;
    let sum = Checksum::hash(&record[..covered]);
    record[covered..].copy_from_slice(&sum.to_be_bytes());
    fs::write(path, [good, &record].concat()).unwrap();
    let error = log.assert_refused(path, "an entry that cannot be read");
    assert!(error.contains("newer release"), "{error}");
}

#[test]
fn writes_during_a_flush_share_the_next_flush() {
    let folder = tempfile::tempdir().unwrap();
    run(async {
        let mut store = open(folder.path()).unwrap();
        let mut waiting = Vec::new();
        for index in 0..200 {
            let (flushed, done) = TokioTypeConfig::oneshot();
            store.append(vec![entry(index, 1)], IOFlushed::signal(flushed)).await.unwrap();
            waiting.push(done);
        }
        for done in waiting {
            done.await.unwrap().unwrap();
        }
        assert_eq!(store.try_get_log_entries(0..1_000).await.unwrap().len(), 200);
    });
    run(async { assert_eq!(open(folder.path()).unwrap().bounds().unwrap().1, 199) });
}
