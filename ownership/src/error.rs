//! Errors of a ledger node: what went wrong, whose fault it is, and what to do.

use std::io;
use std::path::{Path, PathBuf};

use crate::node_folder::ClusterId;

/// Advice for a data directory that lost data. The remaining files are left unchanged.
const REPAIR_ADVICE: &str = "Nothing was changed or skipped. Move this data directory aside and keep it; then let the \
    node join again as a new one, or, if it was the only one, start from a saved snapshot (`ownerserve ctl snapshot \
    restore FILE --data-dir DIR`)";

/// Why a ledger node could not be opened or kept running.
#[derive(Debug, thiserror::Error)]
pub enum LedgerNodeError {
    /// I/O error: the disk or its permissions.
    #[error("{path}: {source}. Check the disk, its free space and the rights of this file; nothing is skipped", path = path.display())]
    Io {
        /// File that failed.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// Another process uses the data directory.
    #[error("{path} is in use by another process; every node needs a data directory of its own", path = path.display())]
    Locked {
        /// Lock file.
        path: PathBuf,
    },
    /// A snapshot can only be restored into an empty directory.
    #[error("{path} is not empty; name a directory that is empty or does not exist yet", path = path.display())]
    NotEmpty {
        /// Directory.
        path: PathBuf,
    },
    /// This machine's clock is behind the time at which the backup was written.
    #[error(
        "this machine's clock stands at {now} s since 1970 and is {behind} s behind the time at which the snapshot was written. \
         Grants of the restored cluster are ordered by that clock, and those of the lost cluster would outrank them. Set the \
         clock, then restore again; nothing was made",
        behind = written.saturating_sub(*now)
    )]
    ClockBehind {
        /// Current time of the clock, in seconds since 1970.
        now: u64,
        /// When the snapshot was written, in seconds since 1970.
        written: u64,
    },
    /// The data directory belongs to another cluster.
    #[error("{path} belongs to cluster {found}, not to {expected}", path = path.display())]
    OtherCluster {
        /// Identity file.
        path: PathBuf,
        /// Cluster that it belongs to.
        found: ClusterId,
        /// Cluster that was expected.
        expected: ClusterId,
    },
    /// A file does not contain what was written. Nothing is skipped or repaired.
    #[error("{path} is damaged: {detail}. {REPAIR_ADVICE}", path = path.display())]
    Damaged {
        /// File, or the folder of the log.
        path: PathBuf,
        /// Position and kind of the damage.
        detail: String,
    },
    /// The log ends before its last committed entry.
    #[error("{path} ends at entry {last}, but entry {committed} was committed: acknowledged writes are missing. {REPAIR_ADVICE}", path = path.display())]
    EntriesMissing {
        /// Folder of the log.
        path: PathBuf,
        /// Last entry in the log.
        last: u64,
        /// Last committed entry.
        committed: u64,
    },
    /// This node can no longer maintain its ledger.
    #[error("this node's ledger has stopped: {0}. Free space on its disk, or check it, and start the node again")]
    Failed(String),
    /// The node port cannot be opened.
    #[error("cannot listen for other nodes at {address}: {why}")]
    Listen {
        /// Address of the node port.
        address: String,
        /// Cause.
        why: String,
    },
    /// No member admitted this node.
    #[error("this node could not join through {seeds}: {why}")]
    NotJoined {
        /// Join addresses that were asked.
        seeds: String,
        /// Last answer.
        why: String,
    },
    /// The ledger is at a feature level that this release does not support.
    #[error("the ledger works at feature level {level}, this binary up to {highest}; install the newer release")]
    Level {
        /// Level of the ledger.
        level: u32,
        /// Highest level of this release.
        highest: u32,
    },
    /// The log lacks entries that this node has acknowledged.
    #[error(
        "{path}: the log ends at entry {last}, but this node has acknowledged entries up to {acknowledged}: an older copy \
         of the folder was put back, or its disk lost what it had synced. Nobody can rely on it: let a learner take its \
         place (`ownerserve ctl member replace`), remove it, empty the folder, and let it join again",
        path = path.display()
    )]
    Reverted {
        /// Data directory.
        path: PathBuf,
        /// Last entry in the log.
        last: u64,
        /// Last entry that the leader knows to be on this node.
        acknowledged: u64,
    },
    /// The data directory, or the log in it, was moved or removed while the node ran.
    #[error(
        "{path} is gone from the disk, or was replaced: whatever this node wrote since then is lost, \
         so it has left the quorum. If it was moved, stop this node, put it back, and start it. Else its disk is lost: \
         started by its own configuration with an empty folder it would found a second cluster. Start it with an empty \
         folder and --join, let it take the old one's place (`ownerserve ctl member replace OLD NEW`), and remove the old \
         one; one that was alone starts from a saved snapshot",
        path = path.display()
    )]
    FolderGone {
        /// Path that is missing.
        path: PathBuf,
    },
    /// The log contains a vote with an implausible term.
    #[error(
        "{path}: the vote that was kept there is of term {term}, and no elections lead to such a term: somebody who reached \
         this node's address for other nodes sent it to an earlier release. The disk is sound, and nothing was changed. This \
         node cannot take part again: where most voters still work, let a learner take its place (`ownerserve ctl member \
         replace`), remove it, empty the folder, and let it join again. Where they do not, start from a saved snapshot \
         (`ownerserve ctl snapshot restore FILE --data-dir DIR`). Set cluster.tls",
        path = path.display()
    )]
    Term {
        /// Folder of the log.
        path: PathBuf,
        /// Term of the vote.
        term: u64,
    },
    /// The options contradict each other.
    #[error("{0}")]
    Options(String),
    /// The quorum did not start, or stopped.
    #[error("the quorum is not running: {0}")]
    Quorum(String),
}

impl LedgerNodeError {
    pub(crate) fn io(path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Self {
        let path = path.as_ref().to_owned();
        move |source| Self::Io { path, source }
    }
}

/// Why a command was not accepted, or why its outcome is unknown.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum SubmitError {
    /// The queue is full: the quorum is slower than its writers, or lost. The command was not accepted.
    #[error("the commit queue is full")]
    QueueFull,
    /// The command is larger than a log entry may be. It was not accepted, and a retry would not help.
    #[error(
        "the command is larger than 4 MiB, the most that one entry of the log may hold; seal a shorter run, or cut the batch"
    )]
    TooLarge,
    /// The directory is closed. The command was not accepted.
    #[error("the directory is closed")]
    Closed,
    /// No leader accepted the command in time. It was not executed.
    #[error("no leader took the command in time")]
    Unavailable,
    /// The command was sent and not answered in time: it may or may not have been executed.
    #[error("the outcome is unknown")]
    UnknownOutcome,
}

impl SubmitError {
    /// Returns the reason used in metrics and the operator API.
    pub fn reason(self) -> &'static str {
        self.into()
    }
}
