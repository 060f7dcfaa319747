//! Changes of the ledger as they are applied: a bounded ring that watchers read at their own pace.
//!
//! Applying never waits for a watcher. One that falls out of the ring is cut off and told so; it reads the view and
//! begins again there.

use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use consensus::{Applied, Witness};
use futures::stream::{self, BoxStream};
use futures::{Stream, StreamExt};
use ledger::{Changed, Key, Ledger, Op};
use tokio::sync::watch;

use crate::counters::Counters;

/// Changes that are kept for watchers.
const CAPACITY: usize = 1 << 16;

/// Changes that a watcher takes at once.
const BATCH: usize = 256;

/// One change of a record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Change {
    /// The log index of the entry that made it; several changes may have the same.
    pub revision: u64,
    /// Written or forgotten.
    pub op: Op,
    /// Which record.
    pub key: Key,
}

/// What was asked for is not kept any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("changes before revision {oldest} are not kept any more; read the records anew and watch from there")]
pub struct Compacted {
    /// The first revision that is still complete.
    pub oldest: u64,
}

/// Changes in order and without a gap, from a revision on. Ends after an error, or when the directory is gone.
pub struct Watch(BoxStream<'static, Result<Change, Compacted>>);

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watch")
    }
}

impl Stream for Watch {
    type Item = Result<Change, Compacted>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_next_unpin(context)
    }
}

/// Where changes wait to be read.
#[derive(Debug)]
pub(crate) struct Feed {
    ring: Mutex<Ring>,
    /// The last revision that the view shows.
    published: watch::Sender<u64>,
}

impl Default for Feed {
    fn default() -> Self {
        Self { ring: Mutex::new(Ring::new(CAPACITY)), published: watch::Sender::new(0) }
    }
}

impl Feed {
    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All changes from revision `from` on.
    pub(crate) fn watch(self: &Arc<Self>, from: u64) -> Result<Watch, Compacted> {
        let ring = self.ring();
        if from < ring.oldest {
            return Err(Compacted { oldest: ring.oldest });
        }
        // Only a weak handle: a watch must not keep a closed directory's changes alive, and ends with it.
        let reading =
            Reading { feed: Arc::downgrade(self), published: self.published.subscribe(), from, next: ring.first };
        drop(ring);
        let batches = stream::unfold(Some(reading), |reading| async move { reading?.next().await });
        Ok(Watch(batches.map(stream::iter).flatten().boxed()))
    }
}

/// How far a watcher has read.
struct Reading {
    feed: std::sync::Weak<Feed>,
    published: watch::Receiver<u64>,
    from: u64,
    /// The place of the next change in the sequence of all.
    next: u64,
}

type Batch = Vec<Result<Change, Compacted>>;

impl Reading {
    async fn next(mut self) -> Option<(Batch, Option<Self>)> {
        loop {
            let upto = *self.published.borrow_and_update();
            let read = self.feed.upgrade()?.ring().read(self.next, upto);
            match read {
                Err(compacted) => {
                    tracing::warn!(oldest = compacted.oldest, "a watcher was too slow and is cut off");
                    return Some((vec![Err(compacted)], None));
                }
                Ok(changes) if !changes.is_empty() => {
                    self.next += changes.len() as u64;
                    let wanted = changes.into_iter().filter(|change| change.revision >= self.from).map(Ok);
                    return Some((wanted.collect(), Some(self)));
                }
                Ok(_) => self.published.changed().await.ok()?,
            }
        }
    }
}

/// The last changes, in order.
#[derive(Debug)]
struct Ring {
    changes: VecDeque<Change>,
    capacity: usize,
    /// The place of the first kept change in the sequence of all.
    first: u64,
    /// The first revision of which everything is kept.
    oldest: u64,
}

impl Ring {
    fn new(capacity: usize) -> Self {
        Self { changes: VecDeque::new(), capacity, first: 0, oldest: 0 }
    }

    fn push(&mut self, revision: u64, changes: &[Changed]) {
        self.changes.extend(changes.iter().map(|Changed { key, op }| Change { revision, op: *op, key: key.clone() }));
        while self.changes.len() > self.capacity {
            // A revision goes as a whole.
            let Some(gone) = self.changes.front().map(|change| change.revision) else { return };
            while self.changes.front().is_some_and(|change| change.revision == gone) {
                self.changes.pop_front();
                self.first += 1;
            }
            self.oldest = gone + 1;
        }
    }

    /// Forgets everything: what happened up to `revision` came as a whole.
    fn compact(&mut self, revision: u64) {
        self.first += self.changes.len() as u64 + 1;
        self.changes.clear();
        self.oldest = revision + 1;
    }

    /// Changes from the place `next` on, up to the revision `upto`.
    fn read(&self, next: u64, upto: u64) -> Result<Vec<Change>, Compacted> {
        let skip = next.checked_sub(self.first).ok_or(Compacted { oldest: self.oldest })?;
        let rest = self.changes.iter().skip(skip as usize).take(BATCH);
        Ok(rest.take_while(|change| change.revision <= upto).cloned().collect())
    }
}

/// Sees what the state machine does, for counters and watchers.
#[derive(Debug, Default)]
pub(crate) struct Observer {
    pub(crate) counters: Arc<Counters>,
    pub(crate) feed: Arc<Feed>,
}

impl Witness for Observer {
    fn applied(&self, applied: &Applied<'_>) {
        self.counters.applied(applied);
        self.feed.ring().push(applied.id.index, applied.changes);
    }

    fn installed(&self, ledger: &Ledger) {
        self.feed.ring().compact(ledger.applied());
    }

    fn published(&self, ledger: &Ledger) {
        self.feed.published.send_replace(ledger.applied());
    }
}

#[cfg(test)]
mod tests {
    use vocabulary::SessionId;

    use super::*;

    fn put(n: u128) -> Changed {
        Changed { key: Key::Session(SessionId(n)), op: Op::Put }
    }

    fn feed(capacity: usize) -> Arc<Feed> {
        Arc::new(Feed { ring: Mutex::new(Ring::new(capacity)), published: watch::Sender::new(0) })
    }

    fn apply(feed: &Feed, revision: u64, changes: &[Changed]) {
        feed.ring().push(revision, changes);
        feed.published.send_replace(revision);
    }

    async fn revisions(watch: &mut Watch, count: usize) -> Vec<u64> {
        watch.take(count).map(|change| change.unwrap().revision).collect().await
    }

    #[tokio::test]
    async fn changes_come_in_order_without_a_gap_from_where_was_asked() {
        let feed = feed(100);
        for revision in 1..=10 {
            apply(&feed, revision, &[put(1), put(2)]);
        }
        let mut watch = feed.watch(8).unwrap();
        assert_eq!(revisions(&mut watch, 6).await, [8, 8, 9, 9, 10, 10]);
        apply(&feed, 11, &[]);
        apply(&feed, 12, &[put(3)]);
        assert_eq!(revisions(&mut watch, 1).await, [12]);
        let mut later = feed.watch(14).unwrap();
        apply(&feed, 13, &[put(3)]);
        apply(&feed, 14, &[put(4)]);
        assert_eq!(revisions(&mut later, 1).await, [14]);
    }

    #[tokio::test]
    async fn what_the_view_does_not_show_yet_is_not_told() {
        let feed = feed(100);
        feed.ring().push(1, &[put(1)]);
        let mut watch = feed.watch(0).unwrap();
        assert!(futures::poll!(watch.next()).is_pending());
        feed.published.send_replace(1);
        assert_eq!(revisions(&mut watch, 1).await, [1]);
    }

    #[tokio::test]
    async fn a_slow_watcher_is_cut_off_and_told_where_to_begin() {
        let feed = feed(8);
        let mut slow = feed.watch(0).unwrap();
        for revision in 1..=10 {
            apply(&feed, revision, &[put(1), put(2)]);
        }
        assert_eq!(slow.next().await, Some(Err(Compacted { oldest: 7 })));
        assert_eq!(slow.next().await, None);
        assert_eq!(feed.watch(6).unwrap_err(), Compacted { oldest: 7 });
        assert_eq!(revisions(&mut feed.watch(7).unwrap(), 2).await, [7, 7]);
    }

    #[tokio::test]
    async fn a_snapshot_from_another_node_compacts_everything_before_it() {
        let feed = feed(8);
        apply(&feed, 1, &[put(1)]);
        let mut watch = feed.watch(1).unwrap();
        assert_eq!(revisions(&mut watch, 1).await, [1]);
        feed.ring().compact(50);
        feed.published.send_replace(50);
        assert_eq!(watch.next().await, Some(Err(Compacted { oldest: 51 })));
        assert_eq!(feed.watch(50).unwrap_err(), Compacted { oldest: 51 });
        let mut anew = feed.watch(51).unwrap();
        apply(&feed, 51, &[put(2)]);
        assert_eq!(revisions(&mut anew, 1).await, [51]);
    }

    #[tokio::test]
    async fn a_watch_ends_with_its_directory() {
        let feed = feed(8);
        let mut watch = feed.watch(0).unwrap();
        drop(feed);
        assert_eq!(watch.next().await, None);
    }
}
