//! Detects that the data directory or its log was moved or removed while the node runs.
//!
//! A file that was removed, or whose folder was moved away, accepts every write and fdatasync without an error, but the
//! data would not be found after a restart.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{MissedTickBehavior, interval};

use crate::chunks;
use crate::error::LedgerNodeError;
use crate::node_core::NodeCore;
use crate::node_folder::NodeFolder;

/// Time between two checks.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// Consecutive failed checks until the loss counts as real, because a network file system may fail once.
const CHECKS_TO_CONFIRM: u32 = 2;
/// Maximum time until a loss is detected.
pub(crate) const MAX_DETECTION_TIME: Duration = Duration::from_millis(500 * (CHECKS_TO_CONFIRM as u64 + 1));

/// A file or folder in use, and its path. Held open, so that its inode number is not reused.
#[derive(Debug)]
struct OpenPath {
    path: PathBuf,
    file: File,
}

impl OpenPath {
    fn open(path: PathBuf) -> io::Result<Self> {
        File::open(&path).map(|file| Self { path, file })
    }

    /// Returns whether the path still refers to this file itself and not to a copy.
    fn is_in_place(&self) -> io::Result<bool> {
        let metadata = self.file.metadata()?;
        match fs::metadata(&self.path) {
            Ok(found) => Ok((found.dev(), found.ino()) == (metadata.dev(), metadata.ino())),
            Err(error) if is_not_found(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Returns whether an error means that the path does not exist. Other errors, such as too many open files, prove
/// nothing.
fn is_not_found(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

/// Watch over the paths that must stay in place: the data directory and the files of the log.
#[derive(Debug)]
pub(crate) struct DataDirWatch {
    /// The directory, the log's folder and the marks file.
    open_paths: Vec<OpenPath>,
    log: PathBuf,
    newest: Option<NewestLogFile>,
}

/// The file to which the log currently appends.
#[derive(Debug)]
struct NewestLogFile {
    start: u64,
    open_path: OpenPath,
}

impl DataDirWatch {
    /// Creates the watch of a data directory whose log is open.
    pub(crate) fn of(folder: &NodeFolder) -> Result<Self, LedgerNodeError> {
        let open = |path: PathBuf| OpenPath::open(path.clone()).map_err(LedgerNodeError::io(path));
        let fixed = [folder.root.clone(), folder.path("log"), folder.path("committed")].map(open);
        Ok(Self { open_paths: fixed.into_iter().collect::<Result<_, _>>()?, log: folder.path("log"), newest: None })
    }

    /// Returns a path that is not in place, if there is one. The log up to `durable` was on disk before this check
    /// began.
    fn missing_path(&mut self, durable: u64) -> io::Result<Option<PathBuf>> {
        for held in &self.open_paths {
            if !held.is_in_place()? {
                return Ok(Some(held.path.clone()));
            }
        }
        match self.missing_newest_file(durable) {
            Err(error) if is_not_found(&error) => Ok(Some(self.log.clone())),
            found => found,
        }
    }

    /// Returns the newest log file if it is not the expected one or is shorter than the durable log.
    fn missing_newest_file(&mut self, durable: u64) -> io::Result<Option<PathBuf>> {
        let Some((start, path)) = newest_log_file(&self.log)? else { return Ok(Some(self.log.clone())) };
        let newest = match self.newest.take() {
            // The log never removes its newest file.
            Some(before) if before.start > start => return Ok(Some(before.open_path.path)),
            Some(before) if before.start == start => before,
            _ => NewestLogFile { start, open_path: OpenPath::open(path)? },
        };
        let lock_file = &self.newest.insert(newest).open_path;
        let reaches = start + lock_file.file.metadata()?.len();
        let is_whole = lock_file.is_in_place()? && reaches >= durable;
        Ok((!is_whole).then(|| lock_file.path.clone()))
    }
}

/// Returns the newest file of a log: its start offset and its path.
fn newest_log_file(log: &Path) -> io::Result<Option<(u64, PathBuf)>> {
    let mut newest = None;
    for entry in fs::read_dir(log)? {
        let entry = entry?;
        if let Some(start) = entry.file_name().to_str().and_then(chunks::start_of) {
            newest = newest.max(Some((start, entry.path())));
        }
    }
    Ok(newest)
}

/// Checks periodically; once a path stays missing, this node leaves the quorum.
pub(crate) async fn watch(core: Arc<NodeCore>, place: Arc<Mutex<DataDirWatch>>) {
    let mut look = interval(CHECK_INTERVAL);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut in_a_row = 0;
    loop {
        look.tick().await;
        let durable = core.log.durable_end();
        let looking = place.clone();
        let looked = tokio::task::spawn_blocking(move || looking.lock().missing_path(durable));
        match looked.await.unwrap_or_else(|error| Err(io::Error::other(error))) {
            Ok(None) => in_a_row = 0,
            Ok(Some(path)) if in_a_row + 1 == CHECKS_TO_CONFIRM => return core.leave_quorum(path),
            Ok(Some(_)) => in_a_row += 1,
            Err(error) => tracing::debug!(%error, "the data directory could not be checked; the next check tells"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use raft_log::ChunkId;
    use raft_log::chunked_wal::Config;
    use tempfile::TempDir;

    use super::*;
    use crate::log_store::LogStore;

    fn chunk(folder: &TempDir, start: u64) -> PathBuf {
        folder.path().join("log").join(Config::chunk_file_name(ChunkId(start)))
    }

    /// Opens a data directory; returns it with the end of its durable log and a watch that found nothing missing.
    fn opened() -> (TempDir, u64, DataDirWatch) {
        let folder = tempfile::tempdir().unwrap();
        let node = NodeFolder::open(folder.path(), None).unwrap();
        let durable = LogStore::open(&node).unwrap().durable_end();
        let mut place = DataDirWatch::of(&node).unwrap();
        assert_eq!(place.missing_path(durable).unwrap(), None);
        (folder, durable, place)
    }

    #[test]
    fn a_moved_or_removed_path_is_reported_as_missing() {
        for what in ["", "log", "committed"] {
            let (folder, durable, mut place) = opened();
            let (path, aside) = (folder.path().join(what), tempfile::tempdir().unwrap());
            fs::rename(&path, aside.path().join("moved")).unwrap();
            assert_eq!(place.missing_path(durable).unwrap(), Some(path.clone()));
            fs::rename(aside.path().join("moved"), &path).unwrap();
            assert_eq!(place.missing_path(durable).unwrap(), None, "it is itself again");
        }
        let (folder, durable, mut place) = opened();
        fs::remove_file(chunk(&folder, 0)).unwrap();
        assert_eq!(place.missing_path(durable).unwrap(), Some(folder.path().join("log")));
    }

    #[test]
    fn a_copied_log_file_is_reported_as_missing() {
        let (folder, durable, mut place) = opened();
        let copy = folder.path().join("copy");
        fs::copy(chunk(&folder, 0), &copy).unwrap();
        fs::rename(&copy, chunk(&folder, 0)).unwrap();
        assert_eq!(place.missing_path(durable).unwrap(), Some(chunk(&folder, 0)));
    }

    #[test]
    fn the_log_may_continue_in_a_new_file_but_never_shrink() {
        let (folder, durable, mut place) = opened();
        let begin = || File::create(chunk(&folder, durable)).unwrap();
        begin().write_all(b"more").unwrap();
        assert_eq!(place.missing_path(durable + 4).unwrap(), None);
        assert_eq!(place.missing_path(durable + 5).unwrap(), Some(chunk(&folder, durable)), "it does not reach so far");
        // A purge removes the first files.
        fs::remove_file(chunk(&folder, 0)).unwrap();
        assert_eq!(place.missing_path(durable + 4).unwrap(), None);
        fs::write(chunk(&folder, 0), vec![0; durable as usize + 4]).unwrap();
        fs::remove_file(chunk(&folder, durable)).unwrap();
        assert_eq!(place.missing_path(durable + 4).unwrap(), Some(chunk(&folder, durable)));
    }
}
