//! Observer of this node's state machine, for counters and watchers.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use consensus::{AppliedEntry, ApplyObserver, ChangeFeed, UnsupportedLevel};
use ledger::Ledger;
use openraft::impls::TokioRuntime;
use smart_default::SmartDefault;

use crate::counters::LedgerNodeCounters;
use crate::log_loss::LogLossDetector;
use crate::snapshot_file::SnapshotFile;

/// Number of changes that are kept for watchers.
const FEED_CAPACITY: usize = 1 << 16;

/// State machine of a server, with snapshots in a file.
pub(crate) type NodeStateMachine = consensus::StateMachine<SnapshotFile, NodeApplyObserver>;

/// Updates counters and watchers from what the state machine does.
#[derive(Debug, SmartDefault)]
pub(crate) struct NodeApplyObserver {
    pub(crate) counters: Arc<LedgerNodeCounters>,
    #[default(Arc::new(ChangeFeed::new(FEED_CAPACITY)))]
    pub(crate) feed: Arc<ChangeFeed<TokioRuntime>>,
    /// What stopped the state machine, if this release is too old to read it.
    pub(crate) unreadable: OnceLock<UnsupportedLevel>,
    pub(crate) log_loss: LogLossDetector,
    /// Path of the data directory that is missing.
    pub(crate) missing_path: OnceLock<PathBuf>,
}

impl ApplyObserver for NodeApplyObserver {
    fn on_applied(&self, applied: &AppliedEntry<'_>) {
        self.counters.record_applied(applied);
        self.feed.on_applied(applied);
    }

    fn on_installed(&self, ledger: &Ledger) {
        self.feed.on_installed(ledger);
    }

    fn on_unreadable(&self, level_error: UnsupportedLevel) {
        if self.unreadable.set(level_error).is_ok() {
            tracing::error!(%level_error, "this node applies nothing any more");
        }
    }

    fn on_published(&self, ledger: &Ledger) {
        self.feed.on_published(ledger);
    }
}

#[cfg(test)]
mod tests {
    use consensus::{ChangeStream, CompactedRevision, LogId};
    use futures::StreamExt;
    use ledger::{ChangeOp, RecordKey, RecordUpdate};
    use openraft::impls::leader_id_adv::LeaderId;
    use openraft::vote::RaftLeaderIdExt;
    use vocabulary::SessionId;

    use super::*;

    fn put(n: u128) -> RecordUpdate {
        RecordUpdate { key: RecordKey::Session(SessionId(n)), op: ChangeOp::Put }
    }

    fn feed(capacity: usize) -> NodeApplyObserver {
        NodeApplyObserver { feed: Arc::new(ChangeFeed::new(capacity)), ..NodeApplyObserver::default() }
    }

    fn at(revision: u64) -> Ledger {
        let mut ledger = Ledger::default();
        ledger.apply_empty(revision);
        ledger
    }

    fn id(index: u64) -> LogId {
        LogId::new(<LeaderId<u64, u64> as RaftLeaderIdExt>::new_committed(1, 1), index)
    }

    /// Applies an entry without publishing it.
    fn apply(observer: &NodeApplyObserver, revision: u64, changes: &[RecordUpdate]) -> Ledger {
        let ledger = at(revision);
        observer.on_applied(&AppliedEntry { id: id(revision), entry: None, outcomes: &[], changes, ledger: &ledger });
        ledger
    }

    fn publish(observer: &NodeApplyObserver, revision: u64, changes: &[RecordUpdate]) {
        observer.on_published(&apply(observer, revision, changes));
    }

    async fn revisions(watch: &mut ChangeStream, count: usize) -> Vec<u64> {
        watch.take(count).map(|change| change.unwrap().revision).collect().await
    }

    #[tokio::test]
    async fn a_caught_up_watcher_wakes_at_the_next_publication() {
        let observer = feed(100);
        publish(&observer, 1, &[put(1), put(2)]);
        let mut watch = observer.feed.watch(1).unwrap();
        assert_eq!(revisions(&mut watch, 2).await, [1, 1]);
        assert!(futures::poll!(watch.next()).is_pending());
        let waiting = tokio::spawn(async move { revisions(&mut watch, 1).await });
        tokio::task::yield_now().await;
        publish(&observer, 2, &[]);
        publish(&observer, 3, &[put(3)]);
        assert_eq!(waiting.await.unwrap(), [3]);
    }

    #[tokio::test]
    async fn an_idle_watcher_knows_the_published_revision() {
        let observer = feed(100);
        publish(&observer, 1, &[put(1)]);
        let mut watch = observer.feed.watch(1).unwrap();
        assert_eq!(revisions(&mut watch, 1).await, [1]);
        publish(&observer, 7, &[]);
        apply(&observer, 8, &[]);
        assert_eq!(watch.published(), Some(7), "8 is not shown yet");
        assert!(futures::poll!(watch.next()).is_pending());
        drop(observer);
        assert_eq!(watch.published(), None);
    }

    #[tokio::test]
    async fn changes_not_yet_in_the_view_are_not_delivered() {
        let observer = feed(100);
        let ledger = apply(&observer, 1, &[put(1)]);
        let mut watch = observer.feed.watch(0).unwrap();
        assert!(futures::poll!(watch.next()).is_pending());
        observer.on_published(&ledger);
        assert_eq!(revisions(&mut watch, 1).await, [1]);
    }

    #[tokio::test]
    async fn a_slow_watcher_is_cut_off_with_a_resume_revision() {
        let observer = feed(8);
        let mut slow = observer.feed.watch(0).unwrap();
        (1..=10).for_each(|revision| publish(&observer, revision, &[put(1), put(2)]));
        assert_eq!(slow.next().await, Some(Err(CompactedRevision { oldest: 7 })));
        assert_eq!(slow.next().await, None);
        assert_eq!(observer.feed.watch(6).unwrap_err(), CompactedRevision { oldest: 7 });
        assert_eq!(revisions(&mut observer.feed.watch(7).unwrap(), 2).await, [7, 7]);
    }

    #[tokio::test]
    async fn installing_a_foreign_snapshot_compacts_all_earlier_changes() {
        let observer = feed(8);
        publish(&observer, 1, &[put(1)]);
        let mut watch = observer.feed.watch(1).unwrap();
        assert_eq!(revisions(&mut watch, 1).await, [1]);
        observer.on_installed(&at(50));
        observer.on_published(&at(50));
        assert_eq!(watch.next().await, Some(Err(CompactedRevision { oldest: 51 })));
        assert_eq!(observer.feed.watch(50).unwrap_err(), CompactedRevision { oldest: 51 });
        let mut anew = observer.feed.watch(51).unwrap();
        publish(&observer, 51, &[put(2)]);
        assert_eq!(revisions(&mut anew, 1).await, [51]);
    }

    #[tokio::test]
    async fn an_entry_of_a_newer_release_stops_the_state_machine() {
        use consensus::{Payload, SharedLedgerEntry, SupportedLevels, ViewPublisher};
        use ledger::{Command, LedgerEntry, Submission};
        use openraft::storage::RaftStateMachine;
        use vocabulary::{ClientId, ClientSerial, LedgerTime, NodeId};

        use crate::raft::{LogEntry, TokioTypeConfig};

        let (folder, observer) = (tempfile::tempdir().unwrap(), Arc::new(NodeApplyObserver::default()));
        let snapshots = SnapshotFile::at(folder.path().join("snapshot"), crate::ClusterId(1));
        let levels = SupportedLevels { lowest: 1, highest: 1 };
        let mut machine = NodeStateMachine::new(snapshots, Arc::<ViewPublisher>::default(), (observer.clone(), levels));
        let entry = |index, command| {
            let submissions = vec![Submission { client: ClientId(1), serial: ClientSerial(index), command }];
            let proposal = SharedLedgerEntry(Arc::new(LedgerEntry { time: LedgerTime(0), submissions }));
            Ok((LogEntry { log_id: id(index), payload: Payload::Normal(proposal) }, None))
        };
        let entries = [entry(1, Command::OpenClient(NodeId(1))), entry(2, Command::RaiseLevel(u32::MAX))];
        let applied = RaftStateMachine::<TokioTypeConfig>::apply(&mut machine, futures::stream::iter(entries)).await;
        let why = applied.unwrap_err().to_string();
        assert!(why.contains("install the newer release"), "{why}");
        assert_eq!(observer.unreadable.get().map(|found| found.level), Some(u32::MAX));
        let (upto, _) = RaftStateMachine::<TokioTypeConfig>::applied_state(&mut machine).await.unwrap();
        assert_eq!(upto, Some(id(1)), "what came before is kept");
    }

    #[tokio::test]
    async fn a_watch_ends_with_its_directory() {
        let observer = feed(8);
        let mut watch = observer.feed.watch(0).unwrap();
        drop(observer);
        assert_eq!(watch.next().await, None);
    }
}
