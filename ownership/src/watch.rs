//! What this node's state machine does, as its counters and its watchers see it.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use consensus::{Applied, Feed, Unreadable, Witness};
use ledger::Ledger;
use openraft::impls::TokioRuntime;
use smart_default::SmartDefault;

use crate::counters::Counters;
use crate::failure::Reversion;

/// Changes that are kept for watchers.
const CAPACITY: usize = 1 << 16;

/// Sees what the state machine does, for counters and watchers.
#[derive(Debug, SmartDefault)]
pub(crate) struct Observer {
    pub(crate) counters: Arc<Counters>,
    #[default(Arc::new(Feed::new(CAPACITY)))]
    pub(crate) feed: Arc<Feed<TokioRuntime>>,
    /// What ended it, if this release is too old.
    pub(crate) unreadable: OnceLock<Unreadable>,
    pub(crate) reversion: Reversion,
    /// What of the data directory is gone.
    pub(crate) gone: OnceLock<PathBuf>,
}

impl Witness for Observer {
    fn applied(&self, applied: &Applied<'_>) {
        self.counters.applied(applied);
        self.feed.applied(applied);
    }

    fn installed(&self, ledger: &Ledger) {
        self.feed.installed(ledger);
    }

    fn unreadable(&self, unreadable: Unreadable) {
        if self.unreadable.set(unreadable).is_ok() {
            tracing::error!(%unreadable, "this node applies nothing any more");
        }
    }

    fn published(&self, ledger: &Ledger) {
        self.feed.published(ledger);
    }
}

#[cfg(test)]
mod tests {
    use consensus::{Compacted, LogId, Watch};
    use futures::StreamExt;
    use ledger::{Changed, Key, Op};
    use openraft::impls::leader_id_adv::LeaderId;
    use openraft::vote::RaftLeaderIdExt;
    use vocabulary::SessionId;

    use super::*;

    fn put(n: u128) -> Changed {
        Changed { key: Key::Session(SessionId(n)), op: Op::Put }
    }

    fn feed(capacity: usize) -> Observer {
        Observer { feed: Arc::new(Feed::new(capacity)), ..Observer::default() }
    }

    fn at(revision: u64) -> Ledger {
        let mut ledger = Ledger::default();
        ledger.skip(revision);
        ledger
    }

    fn id(index: u64) -> LogId {
        LogId::new(<LeaderId<u64, u64> as RaftLeaderIdExt>::new_committed(1, 1), index)
    }

    /// An entry is applied, and not published yet.
    fn apply(observer: &Observer, revision: u64, changes: &[Changed]) -> Ledger {
        let ledger = at(revision);
        observer.applied(&Applied { id: id(revision), entry: None, outcomes: &[], changes, ledger: &ledger });
        ledger
    }

    fn publish(observer: &Observer, revision: u64, changes: &[Changed]) {
        observer.published(&apply(observer, revision, changes));
    }

    async fn revisions(watch: &mut Watch, count: usize) -> Vec<u64> {
        watch.take(count).map(|change| change.unwrap().revision).collect().await
    }

    #[tokio::test]
    async fn a_watcher_that_has_read_all_is_woken_by_what_is_published_next() {
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
    async fn a_watcher_with_nothing_to_read_knows_how_far_it_is() {
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
    async fn what_the_view_does_not_show_yet_is_not_told() {
        let observer = feed(100);
        let ledger = apply(&observer, 1, &[put(1)]);
        let mut watch = observer.feed.watch(0).unwrap();
        assert!(futures::poll!(watch.next()).is_pending());
        observer.published(&ledger);
        assert_eq!(revisions(&mut watch, 1).await, [1]);
    }

    #[tokio::test]
    async fn a_slow_watcher_is_cut_off_and_told_where_to_begin() {
        let observer = feed(8);
        let mut slow = observer.feed.watch(0).unwrap();
        (1..=10).for_each(|revision| publish(&observer, revision, &[put(1), put(2)]));
        assert_eq!(slow.next().await, Some(Err(Compacted { oldest: 7 })));
        assert_eq!(slow.next().await, None);
        assert_eq!(observer.feed.watch(6).unwrap_err(), Compacted { oldest: 7 });
        assert_eq!(revisions(&mut observer.feed.watch(7).unwrap(), 2).await, [7, 7]);
    }

    #[tokio::test]
    async fn a_snapshot_from_another_node_compacts_everything_before_it() {
        let observer = feed(8);
        publish(&observer, 1, &[put(1)]);
        let mut watch = observer.feed.watch(1).unwrap();
        assert_eq!(revisions(&mut watch, 1).await, [1]);
        observer.installed(&at(50));
        observer.published(&at(50));
        assert_eq!(watch.next().await, Some(Err(Compacted { oldest: 51 })));
        assert_eq!(observer.feed.watch(50).unwrap_err(), Compacted { oldest: 51 });
        let mut anew = observer.feed.watch(51).unwrap();
        publish(&observer, 51, &[put(2)]);
        assert_eq!(revisions(&mut anew, 1).await, [51]);
    }

    #[tokio::test]
    async fn an_entry_that_a_newer_release_wrote_stops_the_machine_and_is_not_skipped() {
        use consensus::{Levels, Payload, Proposal, Publisher};
        use ledger::{Command, Entry, Submission};
        use openraft::storage::RaftStateMachine;
        use vocabulary::{ClientId, ClientSerial, LedgerTime, NodeId};

        use crate::raft::{LogEntry, Machine, Types};
        use crate::snapshots::SnapshotFile;

        let (folder, observer) = (tempfile::tempdir().unwrap(), Arc::new(Observer::default()));
        let snapshots = SnapshotFile::at(folder.path().join("snapshot"), crate::ClusterId(1));
        let levels = Levels { lowest: 1, highest: 1 };
        let mut machine = Machine::new(snapshots, Arc::<Publisher>::default(), (observer.clone(), levels));
        let entry = |index, command| {
            let submissions = vec![Submission { client: ClientId(1), serial: ClientSerial(index), command }];
            let proposal = Proposal(Arc::new(Entry { time: LedgerTime(0), submissions }));
            Ok((LogEntry { log_id: id(index), payload: Payload::Normal(proposal) }, None))
        };
        let entries = [entry(1, Command::OpenClient(NodeId(1))), entry(2, Command::RaiseLevel(u32::MAX))];
        let applied = RaftStateMachine::<Types>::apply(&mut machine, futures::stream::iter(entries)).await;
        let why = applied.unwrap_err().to_string();
        assert!(why.contains("install the newer release"), "{why}");
        assert_eq!(observer.unreadable.get().map(|found| found.level), Some(u32::MAX));
        let (upto, _) = RaftStateMachine::<Types>::applied_state(&mut machine).await.unwrap();
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
