//! Snapshots as backups: saving them from a running node, verifying them, and restoring them into a new cluster.

use std::fmt;
use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, SystemTime};

use consensus::{SnapshotContents, StoredMembership};
use futures::future::BoxFuture;
use ledger::{Ledger, RestoreBaseline};
use openraft::storage::RaftLogStorage;
use openraft::type_config::alias::LeaderIdOf;
use openraft::vote::RaftLeaderIdExt;
use openraft::{BasicNode, Membership};
use serde::{Serialize, Serializer};
use vocabulary::{Micros, NodeId};

use crate::directory::OwnershipDirectory;
use crate::error::LedgerNodeError;
use crate::log_store::LogStore;
use crate::node_folder::{
    ClusterId, IDENTITY_FILE, LOCK_FILE, LockedFolder, NodeFolder, UNFINISHED_RESTORE_DIR, random_u128,
};
use crate::raft::{LogId, SnapshotMeta, TokioTypeConfig, Vote};
use crate::snapshot_file::{self, LoadedSnapshot, SnapshotFile};

/// Term in which a restored cluster's log begins; its first leader has a later one.
const FIRST_TERM: u64 = 1;

/// Digest of the whole state: equal for equal states.
#[derive(Clone, Copy, PartialEq, Eq, Debug, derive_more::Display)]
#[display("{_0:032x}")]
pub struct StateHash(pub u128);

impl Serialize for StateHash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Contents of a snapshot of which every byte was read and verified.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SnapshotReport {
    /// Version of the file layout.
    pub layout: u8,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// Cluster that wrote it; layout 1 does not record it.
    pub cluster: Option<ClusterId>,
    /// Log index of the last entry in it.
    pub applied: u64,
    /// Term of that entry.
    pub term: u64,
    /// Feature level.
    pub level: u32,
    /// When its cluster was restored from another snapshot, in seconds since 1970; 0 if it was not.
    pub generation: u32,
    /// When it was written, in seconds since 1970.
    pub written: u64,
    /// Voters at the last entry.
    pub voters: Vec<NodeId>,
    /// Number of records by kind.
    pub entries: Vec<(&'static str, usize)>,
    /// Digest of the whole state.
    pub state_hash: StateHash,
}

/// A cluster that was restored from a snapshot.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct RestoredCluster {
    /// Id of the cluster.
    pub cluster: ClusterId,
    /// Its only node.
    pub node: NodeId,
    /// When it was restored, in seconds since 1970. Its grants outrank those of lower generations.
    pub generation: u32,
    /// Log index at which its log begins.
    pub applied: u64,
}

/// Snapshot of a running node, open for reading.
#[derive(Debug)]
pub struct OpenSnapshotFile {
    /// The file, at its start. Later snapshots do not change its bytes.
    pub file: File,
    /// Size in bytes.
    pub bytes: u64,
    /// Log index of the last entry in it.
    pub applied: u64,
}

impl OwnershipDirectory {
    /// Writes a snapshot now and opens it, for a backup.
    pub fn save_snapshot(&self) -> BoxFuture<'_, Result<OpenSnapshotFile, LedgerNodeError>> {
        Box::pin(self.save_open_snapshot())
    }

    async fn save_open_snapshot(&self) -> Result<OpenSnapshotFile, LedgerNodeError> {
        self.write_snapshot().await?;
        let quorum = |error: &dyn fmt::Display| LedgerNodeError::Quorum(error.to_string());
        let snapshot = self.raft().get_snapshot().await.map_err(|error| quorum(&error))?;
        let snapshot = snapshot.ok_or_else(|| quorum(&"nothing was applied yet"))?;
        let bytes = snapshot.snapshot.metadata().map_err(LedgerNodeError::io("snapshot"))?.len();
        let applied = snapshot.meta.last_log_id.map_or(0, |id| id.index);
        Ok(OpenSnapshotFile { file: snapshot.snapshot, bytes, applied })
    }
}

fn read_snapshot(path: &Path) -> Result<LoadedSnapshot, LedgerNodeError> {
    let mut file = File::open(path).map_err(LedgerNodeError::io(path))?;
    snapshot_file::read(&mut file, path)
}

/// Reads and verifies a whole snapshot and returns its ledger.
pub fn load(path: &Path) -> Result<Ledger, LedgerNodeError> {
    read_snapshot(path).map(|whole| whole.ledger)
}

/// Reads and verifies a whole snapshot and reports its contents.
pub fn verify(path: &Path) -> Result<SnapshotReport, LedgerNodeError> {
    let LoadedSnapshot { head, ledger, layout, bytes } = read_snapshot(path)?;
    let voters = head.meta.last_membership.membership().voter_ids().map(NodeId).collect();
    let entries = vec![
        ("workers", ledger.workers().count()),
        ("sessions", ledger.session_count()),
        ("artifacts", ledger.artifact_count()),
        ("nodes", ledger.nodes().count()),
    ];
    Ok(SnapshotReport {
        layout,
        bytes,
        cluster: head.cluster,
        applied: ledger.applied(),
        term: head.meta.last_log_id.map_or(0, |id| id.committed_leader_id().term),
        level: ledger.level(),
        generation: ledger.generation(),
        written: head.written,
        voters,
        entries,
        state_hash: StateHash(ledger.state_hash()),
    })
}

/// Creates the data directory of a new one-node cluster from a snapshot.
///
/// The cluster gets a new id, so that no node of the old cluster talks to it. It gets a later generation, so that its
/// grants outrank all that the old cluster granted after the snapshot, and all grants of another restore of the same
/// snapshot. The generation is the time of the restore, so a clock that is behind the snapshot's time is refused. The
/// directory must be empty or missing and may be a mounted volume. Its identity is written last, so that no node starts
/// on an incomplete restore.
pub fn restore<'a>(snapshot: &'a Path, data_dir: &'a Path) -> BoxFuture<'a, Result<RestoredCluster, LedgerNodeError>> {
    Box::pin(restore_into(snapshot, data_dir))
}

async fn restore_into(snapshot: &Path, data_dir: &Path) -> Result<RestoredCluster, LedgerNodeError> {
    let LoadedSnapshot { head, ledger, .. } = read_snapshot(snapshot)?;
    // Checked before anything is created, and again when the directory is locked.
    refuse_non_empty(data_dir)?;
    let claimed = LockedFolder::new(data_dir)?;
    refuse_non_empty(data_dir)?;
    let unfinished = data_dir.join(UNFINISHED_RESTORE_DIR);
    match fs::remove_dir_all(&unfinished) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(LedgerNodeError::io(&unfinished)(error));
        }
        _ => {}
    }
    let since = unix_time();
    let generation = generation_at(since.as_secs(), head.written)?;
    let age = since.saturating_sub(Duration::from_secs(head.written));
    let applied = ledger.applied();
    // The old cluster may have continued since; its clock never runs faster than real time.
    let ledger = ledger.restored(RestoreBaseline { applied, clock: ledger.now().after(Micros::of(age)), generation });
    let restored = RestoredCluster {
        cluster: ClusterId(random_u128()),
        node: ledger::FOUNDER,
        generation: ledger.generation(),
        applied,
    };
    let written = match write(&unfinished, restored.cluster, ledger).await {
        Ok(()) => {
            // Waits for the next second, so that a restore that begins after this one gets a later generation.
            while unix_time().as_secs() == since.as_secs() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            move_into_place(&unfinished, data_dir).map_err(LedgerNodeError::io(data_dir))
        }
        Err(error) => Err(error),
    };
    // A failed restore leaves no files behind.
    let cleared = fs::remove_dir_all(&unfinished).map_err(LedgerNodeError::io(&unfinished));
    drop(claimed);
    written.and(cleared).map(|()| restored)
}

/// Returns the time since 1970 by this machine's clock.
fn unix_time() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// Returns the generation for a restore at `now` of a snapshot written at `written`, both in seconds since 1970. Pure.
fn generation_at(now: u64, written: u64) -> Result<u32, LedgerNodeError> {
    if now < written {
        return Err(LedgerNodeError::ClockBehind { now, written });
    }
    u32::try_from(now).map_err(|_| LedgerNodeError::ClockBehind { now, written })
}

/// Moves the restored files to the data directory; the identity comes last, because no node starts without it.
fn move_into_place(unfinished: &Path, data_dir: &Path) -> std::io::Result<()> {
    let names = fs::read_dir(unfinished)?.map(|entry| Ok(entry?.file_name()));
    let names = names.collect::<std::io::Result<Vec<_>>>()?;
    let (identity, others): (Vec<_>, Vec<_>) = names.into_iter().partition(|name| name == IDENTITY_FILE);
    for name in others.iter().filter(|name| *name != LOCK_FILE) {
        fs::rename(unfinished.join(name), data_dir.join(name))?;
    }
    File::open(data_dir)?.sync_all()?;
    for name in &identity {
        fs::rename(unfinished.join(name), data_dir.join(name))?;
    }
    File::open(data_dir)?.sync_all()?;
    // The directory itself may be new, so its parent is synced, too.
    match fs::canonicalize(data_dir)?.parent() {
        Some(parent) => File::open(parent)?.sync_all(),
        None => Ok(()),
    }
}

/// Refuses a directory with anything in it except what a new volume contains and what a killed restore left.
fn refuse_non_empty(data_dir: &Path) -> Result<(), LedgerNodeError> {
    let is_used = |entry: std::io::Result<fs::DirEntry>| {
        entry.map_or(true, |entry| {
            ![LOCK_FILE, UNFINISHED_RESTORE_DIR, "lost+found"].iter().any(|name| entry.file_name() == *name)
        })
    };
    let used = match fs::read_dir(data_dir) {
        Ok(mut entries) => entries.any(is_used),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => false,
        Err(error) => return Err(LedgerNodeError::io(data_dir)(error)),
    };
    if used { Err(LedgerNodeError::NotEmpty { path: data_dir.to_owned() }) } else { Ok(()) }
}

async fn write(folder: &Path, cluster: ClusterId, ledger: ledger::Ledger) -> Result<(), LedgerNodeError> {
    let node = NodeFolder::open(folder, Some(cluster))?;
    let id = node.identity.node.0;
    let last = LogId::new(LeaderIdOf::<TokioTypeConfig>::new_committed(FIRST_TERM, id), ledger.applied());
    let members = std::collections::BTreeMap::from([(id, BasicNode::new(""))]);
    let membership = Membership::new(vec![[id].into()], members);
    let membership = membership.map_err(|error| LedgerNodeError::Quorum(error.to_string()))?;
    let meta = SnapshotMeta { last_log_id: Some(last), last_membership: StoredMembership::new(Some(last), membership) };
    let io = |error| LedgerNodeError::io(node.path("log"))(error);
    let mut log = LogStore::open(&node)?;
    log.save_vote(&Vote::new(FIRST_TERM, id)).await.map_err(io)?;
    log.purge(last).await.map_err(io)?;
    log.marks_sync_handle()?.sync_all().map_err(LedgerNodeError::io(node.path("committed")))?;
    let snapshots = SnapshotFile::at(node.path("snapshot"), cluster);
    snapshots.write(&SnapshotContents { meta, ledger }).map_err(LedgerNodeError::io(node.path("snapshot")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_behind_the_backup_is_refused_with_advice() {
        assert_eq!(generation_at(1_800_000_000, 1_800_000_000).unwrap(), 1_800_000_000);
        assert_eq!(generation_at(1_800_000_000, 0).unwrap(), 1_800_000_000);
        let error = generation_at(1_700_000_000, 1_800_000_000).unwrap_err().to_string();
        assert!(error.contains("100000000 s behind") && error.contains("Set the clock"), "{error}");
    }
}
