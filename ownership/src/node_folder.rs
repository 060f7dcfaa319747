//! The data directory: its identity, and a lock so that only one process uses it.

use std::fs::{self, File, TryLockError};
use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use vocabulary::NodeId;

use crate::error::LedgerNodeError;
use crate::resource_shortages::ShortageTracker;

/// Identity of a cluster, created once by the node that founded it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize, derive_more::Display)]
#[display("cluster-{_0:032x}")]
#[serde(into = "String", try_from = "String")]
pub struct ClusterId(pub u128);

impl From<ClusterId> for String {
    fn from(id: ClusterId) -> Self {
        id.to_string()
    }
}

impl TryFrom<String> for ClusterId {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let digits = text.strip_prefix("cluster-").filter(|digits| digits.len() == 32);
        let id = digits.and_then(|digits| u128::from_str_radix(digits, 16).ok());
        id.map(Self).ok_or("a cluster id is `cluster-` and 32 hexadecimal digits")
    }
}

/// Identity of the node that owns a data directory. Written once; node ids are never reused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NodeIdentity {
    pub(crate) cluster: ClusterId,
    pub(crate) node: NodeId,
}

/// Whether a data directory contains ledger data; if it does, the marks must be there, too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FolderContents {
    /// No log and no snapshot.
    Empty,
    /// A log, a snapshot, or both.
    Ledger,
}

/// File with the identity of the data directory's node.
pub(crate) const IDENTITY_FILE: &str = "identity.json";
/// Directory in which a restore writes until it is complete.
pub(crate) const UNFINISHED_RESTORE_DIR: &str = "unfinished-restore";
/// Lock file of the process that uses the data directory.
pub(crate) const LOCK_FILE: &str = "lock";

/// An opened data directory. Dropping it releases the lock.
#[derive(Debug)]
pub(crate) struct NodeFolder {
    pub(crate) root: PathBuf,
    pub(crate) identity: NodeIdentity,
    _lock: File,
}

/// A data directory that is locked by this process, whoever it belongs to.
#[derive(Debug)]
pub(crate) struct LockedFolder {
    pub(crate) root: PathBuf,
    lock: File,
}

impl LockedFolder {
    /// Locks the directory; creates it if it is missing.
    pub(crate) fn new(root: &Path) -> Result<Self, LedgerNodeError> {
        create_private_folder(root).map_err(LedgerNodeError::io(root))?;
        Ok(Self { root: root.to_owned(), lock: lock(root)? })
    }

    /// Returns the identity; `None` for a new directory. Fails on a directory that has a log but no identity, because
    /// it lost its identity.
    pub(crate) fn identity(&self) -> Result<Option<NodeIdentity>, LedgerNodeError> {
        let path = self.root.join(IDENTITY_FILE);
        let identity = read_json(&path)?;
        let mut orphans = ["log", "snapshot", "committed", UNFINISHED_RESTORE_DIR].into_iter();
        match orphans.find(|orphan| identity.is_none() && self.root.join(orphan).exists()) {
            Some(orphan) => {
                let detail = format!("it is missing, but there is a {orphan}");
                Err(LedgerNodeError::Damaged { path, detail })
            }
            None => Ok(identity),
        }
    }

    /// Writes the identity; durable when this returns.
    pub(crate) fn adopt(self, identity: NodeIdentity) -> Result<NodeFolder, LedgerNodeError> {
        let path = self.root.join(IDENTITY_FILE);
        let bytes = serde_json::to_vec_pretty(&identity).expect("an identity encodes");
        write_durably(&path, |file| file.write_all(&bytes)).map_err(LedgerNodeError::io(path))?;
        Ok(NodeFolder { root: self.root, identity, _lock: self.lock })
    }

    /// Opens the directory as the node that it belongs to.
    pub(crate) fn reopen(
        self,
        identity: NodeIdentity,
        expected: Option<ClusterId>,
    ) -> Result<NodeFolder, LedgerNodeError> {
        let found = identity.cluster;
        match expected {
            Some(expected) if expected != found => {
                Err(LedgerNodeError::OtherCluster { path: self.root.join(IDENTITY_FILE), found, expected })
            }
            _ => Ok(NodeFolder { root: self.root, identity, _lock: self.lock }),
        }
    }
}

/// Returns the identity of a cluster's first node.
pub(crate) fn founder(expected: Option<ClusterId>) -> NodeIdentity {
    NodeIdentity { cluster: expected.unwrap_or_else(|| ClusterId(random_u128())), node: ledger::FOUNDER }
}

impl NodeFolder {
    /// Opens the directory, or founds a cluster in an empty one.
    pub(crate) fn open(root: &Path, expected: Option<ClusterId>) -> Result<Self, LedgerNodeError> {
        let claimed = LockedFolder::new(root)?;
        match claimed.identity()? {
            Some(identity) => claimed.reopen(identity, expected),
            None => claimed.adopt(founder(expected)),
        }
    }

    pub(crate) fn contents(&self) -> Result<FolderContents, LedgerNodeError> {
        let log = self.path("log");
        let has_chunks = match fs::read_dir(&log) {
            Ok(mut entries) => entries.any(|entry| entry.is_ok_and(|entry| entry.file_name() != "LOCK")),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => false,
            Err(error) => return Err(LedgerNodeError::io(&log)(error)),
        };
        Ok(if has_chunks || self.path("snapshot").exists() { FolderContents::Ledger } else { FolderContents::Empty })
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }
}

fn lock(root: &Path) -> Result<File, LedgerNodeError> {
    let path = root.join(LOCK_FILE);
    let file = File::options().create(true).truncate(false).write(true).mode(0o600).open(&path);
    let file = file.map_err(LedgerNodeError::io(&path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(LedgerNodeError::Locked { path }),
        Err(TryLockError::Error(error)) => Err(LedgerNodeError::io(&path)(error)),
    }
}

/// Creates a folder, if it is missing, that only its owner can read: a ledger contains names of tenants and what they
/// asked.
pub(crate) fn create_private_folder(path: &Path) -> std::io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Reads a JSON file; `None` if there is no such file.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, LedgerNodeError> {
    match fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|error| LedgerNodeError::Damaged { path: path.to_owned(), detail: error.to_string() }),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(LedgerNodeError::io(path)(error)),
    }
}

/// Replaces a file atomically: after a crash it has either the old or the new content. For files that are written
/// before a node runs; a running node uses [`write_durably_with`].
pub(crate) fn write_durably(path: &Path, write: impl FnOnce(&mut File) -> std::io::Result<()>) -> std::io::Result<()> {
    write_durably_with(&ShortageTracker::default(), path, write)
}

/// Like [`write_durably`], but records resource shortages in `shortages`, where operators can see them.
pub(crate) fn write_durably_with(
    shortages: &ShortageTracker,
    path: &Path,
    write: impl FnOnce(&mut File) -> std::io::Result<()>,
) -> std::io::Result<()> {
    let new = path.with_extension("new");
    let mut options = File::options();
    options.create(true).truncate(true).read(true).write(true).mode(0o600);
    let mut file = shortages.open_retrying(new.display(), || options.open(&new))?;
    // A failed write leaves no file behind.
    write(&mut file).and_then(|()| file.sync_all()).inspect_err(|_| drop(fs::remove_file(&new)))?;
    fs::rename(&new, path)?;
    match path.parent() {
        Some(folder) => shortages.open_retrying(folder.display(), || File::open(folder))?.sync_all(),
        None => Ok(()),
    }
}

/// Returns random bits: the operating system seeds every `RandomState`.
pub(crate) fn random_u128() -> u128 {
    let draw = || u128::from(RandomState::new().hash_one(std::process::id()));
    draw() << 64 | draw()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_data_directory_founds_a_cluster_with_a_lasting_identity() {
        let folder = tempfile::tempdir().unwrap();
        let first = NodeFolder::open(folder.path(), None).unwrap().identity;
        let again = NodeFolder::open(folder.path(), Some(first.cluster)).unwrap().identity;
        assert_eq!(first, again);
        let other = tempfile::tempdir().unwrap();
        assert_ne!(NodeFolder::open(other.path(), None).unwrap().identity.cluster, first.cluster);
    }

    #[test]
    fn a_data_directory_of_another_cluster_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        drop(NodeFolder::open(folder.path(), Some(ClusterId(1))).unwrap());
        let error = NodeFolder::open(folder.path(), Some(ClusterId(2))).unwrap_err();
        assert!(matches!(error, LedgerNodeError::OtherCluster { .. }), "{error}");
    }

    #[test]
    fn a_data_directory_in_use_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let held = NodeFolder::open(folder.path(), None).unwrap();
        let error = NodeFolder::open(folder.path(), None).unwrap_err();
        assert!(matches!(error, LedgerNodeError::Locked { .. }), "{error}");
        drop(held);
        NodeFolder::open(folder.path(), None).unwrap();
    }

    #[test]
    fn a_log_without_an_identity_is_refused_untouched() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("log")).unwrap();
        let error = NodeFolder::open(folder.path(), None).unwrap_err();
        assert!(error.to_string().contains("there is a log"), "{error}");
        fs::remove_dir(folder.path().join("log")).unwrap();
        fs::write(folder.path().join("identity.json"), "{").unwrap();
        let error = NodeFolder::open(folder.path(), None).unwrap_err();
        assert!(matches!(error, LedgerNodeError::Damaged { .. }), "{error}");
    }
}
