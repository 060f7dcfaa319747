//! What this node's state machine does, as its counters and its watchers see it.

use std::sync::Arc;

use consensus::{Applied, Feed, Witness};
use ledger::Ledger;
use openraft::impls::TokioRuntime;

use crate::counters::Counters;

/// Changes that are kept for watchers.
const CAPACITY: usize = 1 << 16;

/// Sees what the state machine does, for counters and watchers.
#[derive(Debug)]
pub(crate) struct Observer {
    pub(crate) counters: Arc<Counters>,
    pub(crate) feed: Arc<Feed<TokioRuntime>>,
}

impl Default for Observer {
    fn default() -> Self {
        Self { counters: Arc::default(), feed: Arc::new(Feed::new(CAPACITY)) }
    }
}

impl Witness for Observer {
    fn applied(&self, applied: &Applied<'_>) {
        self.counters.applied(applied);
        self.feed.applied(applied);
    }

    fn installed(&self, ledger: &Ledger) {
        self.feed.installed(ledger);
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

    /// An entry is applied, and not published yet.
    fn apply(observer: &Observer, revision: u64, changes: &[Changed]) -> Ledger {
        let id = LogId::new(<LeaderId<u64, u64> as RaftLeaderIdExt>::new_committed(1, 1), revision);
        let ledger = at(revision);
        observer.applied(&Applied { id, entry: None, outcomes: &[], changes, ledger: &ledger });
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
    async fn a_watch_ends_with_its_directory() {
        let observer = feed(8);
        let mut watch = observer.feed.watch(0).unwrap();
        drop(observer);
        assert_eq!(watch.next().await, None);
    }
}
