//! What can go wrong, whose fault it is, and what to do.

use std::io;
use std::path::{Path, PathBuf};

use crate::node_folder::ClusterId;

/// What helps against a data directory that lost something. Whatever is left in it stays as it is.
const REPAIR_ADVICE: &str = "Nothing was changed or skipped. Move this data directory aside and keep it; then let the \
    node join again as a new one, or, if it was the only one, start from a saved snapshot (`ownerserve ctl snapshot \
    restore FILE --data-dir DIR`)";

/// Why a directory could not be opened or kept running.
#[derive(Debug, thiserror::Error)]
pub enum OwnershipError {
    /// The disk or its rights.
    #[error("{path}: {source}. Check the disk, its free space and the rights of this file; nothing is skipped", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Another process works in the data directory.
    #[error("{path} is in use by another process; every node needs a data directory of its own", path = path.display())]
    Locked {
        /// The lock file.
        path: PathBuf,
    },
    /// A snapshot can only be restored where nothing is.
    #[error("{path} is not empty; name a directory that is empty or does not exist yet", path = path.display())]
    NotEmpty {
        /// The directory.
        path: PathBuf,
    },
    /// This machine's clock says that a backup is of the future.
    #[error(
        "this machine's clock stands at {now} s since 1970 and is {behind} s behind the time at which the snapshot was written. \
         Grants of the restored cluster are ordered by that clock, and those of the lost cluster would outrank them. Set the \
         clock, then restore again; nothing was made",
        behind = written.saturating_sub(*now)
    )]
    ClockBehind {
        /// Seconds since 1970 by the clock.
        now: u64,
        /// Seconds since 1970 when the snapshot was written.
        written: u64,
    },
    /// The data directory belongs to another cluster.
    #[error("{path} belongs to cluster {found}, not to {expected}", path = path.display())]
    OtherCluster {
        /// The identity file.
        path: PathBuf,
        /// Whose it is.
        found: ClusterId,
        /// Whose it should be.
        expected: ClusterId,
    },
    /// A file does not hold what was written. Nothing is skipped or repaired.
    #[error("{path} is damaged: {detail}. {REPAIR_ADVICE}", path = path.display())]
    Damaged {
        /// The file, or the folder of the log.
        path: PathBuf,
        /// Where in it and how.
        detail: String,
    },
    /// The log ends before what it had committed.
    #[error("{path} ends at entry {last}, but entry {committed} was committed: acknowledged writes are missing. {REPAIR_ADVICE}", path = path.display())]
    EntriesMissing {
        /// The folder of the log.
        path: PathBuf,
        /// The last entry that is there.
        last: u64,
        /// The last entry that must be there.
        committed: u64,
    },
    /// This node cannot keep its ledger any more.
    #[error("this node's ledger has stopped: {0}. Free space on its disk, or check it, and start the node again")]
    Failed(String),
    /// The address for the other nodes cannot be used.
    #[error("cannot listen for other nodes at {address}: {why}")]
    Listen {
        /// The address.
        address: String,
        /// Why.
        why: String,
    },
    /// No member let this node in.
    #[error("this node could not join through {seeds}: {why}")]
    NotJoined {
        /// Who was asked.
        seeds: String,
        /// The last answer.
        why: String,
    },
    /// The ledger is at a level that this binary does not know.
    #[error("the ledger works at feature level {level}, this binary up to {highest}; install the newer release")]
    Level {
        /// The ledger's.
        level: u32,
        /// The binary's.
        highest: u32,
    },
    /// The log lacks what this node has acknowledged.
    #[error(
        "{path}: the log ends at entry {last}, but this node has acknowledged entries up to {acknowledged}: an older copy \
         of the folder was put back, or its disk lost what it had synced. Nobody can rely on it: let a learner take its \
         place (`ownerserve ctl member replace`), remove it, empty the folder, and let it join again",
        path = path.display()
    )]
    Reverted {
        /// The data directory.
        path: PathBuf,
        /// The last entry that is there.
        last: u64,
        /// The last one that the leader knows to be here.
        acknowledged: u64,
    },
    /// The data directory, or the log in it, was moved or removed while the node ran.
    #[error(
        "{path} is gone from the disk, or something else lies there now: what this node wrote from then on is kept nowhere, \
         so it has left the quorum. If it was moved, stop this node, put it back, and start it. Else its disk is lost: \
         started by its own configuration with an empty folder it would found a second cluster. Start it with an empty \
         folder and --join, let it take the old one's place (`ownerserve ctl member replace OLD NEW`), and remove the old \
         one; one that was alone starts from a saved snapshot",
        path = path.display()
    )]
    FolderGone {
        /// What is gone.
        path: PathBuf,
    },
    /// A vote of an absurd term was kept.
    #[error(
        "{path}: the vote that was kept there is of term {term}, and no elections lead to such a term: somebody who reached \
         this node's address for other nodes sent it to an earlier release. The disk is sound, and nothing was changed. This \
         node cannot take part again: where most voters still work, let a learner take its place (`ownerserve ctl member \
         replace`), remove it, empty the folder, and let it join again. Where they do not, start from a saved snapshot \
         (`ownerserve ctl snapshot restore FILE --data-dir DIR`). Set cluster.tls",
        path = path.display()
    )]
    Term {
        /// The folder of the log.
        path: PathBuf,
        /// The term.
        term: u64,
    },
    /// The options do not fit together.
    #[error("{0}")]
    Options(String),
    /// The quorum did not come up, or stopped.
    #[error("the quorum is not running: {0}")]
    Quorum(String),
}

impl OwnershipError {
    pub(crate) fn io(path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Self {
        let path = path.as_ref().to_owned();
        move |source| Self::Io { path, source }
    }
}

/// Why a command was not taken, or its outcome is not known.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum SubmitError {
    /// The queue is full: the quorum is slower than its writers, or gone. The command was not taken.
    #[error("the commit queue is full")]
    QueueFull,
    /// It is larger than an entry of the log may be. The command was not taken, and would not be another time.
    #[error(
        "the command is larger than 4 MiB, the most that one entry of the log may hold; seal a shorter run, or cut the batch"
    )]
    TooLarge,
    /// The directory is closed. The command was not taken.
    #[error("the directory is closed")]
    Closed,
    /// No leader took it in time. It was not executed.
    #[error("no leader took the command in time")]
    Unavailable,
    /// It was sent and not answered in time: it may or may not have been executed.
    #[error("the outcome is unknown")]
    UnknownOutcome,
}

impl SubmitError {
    /// The word for metrics.
    pub fn cause(self) -> &'static str {
        self.into()
    }
}
