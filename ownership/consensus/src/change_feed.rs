//! Feed of ledger changes for watchers that read at their own pace.
//!
//! Applying never waits for a watcher. A watcher that falls behind the ring gets an error; it then reads the view and
//! watches again from there.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};

use futures::stream::{self, BoxStream};
use futures::{Stream, StreamExt};
use ledger::Ledger;
use openraft::AsyncRuntime;
use openraft::async_runtime::watch::{Watch as _, WatchReceiver as _, WatchSender as _};

use crate::change_ring::{ChangeCursor, ChangeEvent, ChangeRing, CompactedRevision};
use crate::state_machine::{AppliedEntry, ApplyObserver};

type RevisionSender<R> = <<R as AsyncRuntime>::Watch as openraft::async_runtime::watch::Watch>::Sender<u64>;
type RevisionReceiver<R> = <<R as AsyncRuntime>::Watch as openraft::async_runtime::watch::Watch>::Receiver<u64>;

/// Stream of changes in order and without gaps, from a given revision on. Ends after an error, or when the node is
/// closed.
pub struct ChangeStream {
    changes: BoxStream<'static, Result<ChangeEvent, CompactedRevision>>,
    published: Box<dyn Fn() -> Option<u64> + Send + Sync>,
}

impl ChangeStream {
    /// Returns the last revision that the view shows; `None` if the node is closed.
    ///
    /// If the stream is polled after this call and is pending, it has delivered everything up to that revision.
    pub fn published(&self) -> Option<u64> {
        (self.published)()
    }
}

impl fmt::Debug for ChangeStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watch")
    }
}

impl Stream for ChangeStream {
    type Item = Result<ChangeEvent, CompactedRevision>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.changes.poll_next_unpin(context)
    }
}

/// Buffer of changes that watchers have not read yet.
pub struct ChangeFeed<R: AsyncRuntime>(Mutex<FeedState<R>>);

struct FeedState<R: AsyncRuntime> {
    ring: ChangeRing,
    /// The last revision that the view shows.
    published: RevisionSender<R>,
}

impl<R: AsyncRuntime> FeedState<R> {
    fn published(&self) -> u64 {
        *self.published.borrow_watched()
    }
}

impl<R: AsyncRuntime> fmt::Debug for ChangeFeed<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ChangeFeed").field(&self.lock_state().ring).finish()
    }
}

impl<R: AsyncRuntime> ChangeFeed<R> {
    /// Creates an empty feed for `capacity` changes.
    pub fn new(capacity: usize) -> Self {
        let (published, _) = R::Watch::channel(0);
        Self(Mutex::new(FeedState { ring: ChangeRing::new(capacity), published }))
    }

    fn lock_state(&self) -> MutexGuard<'_, FeedState<R>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a cursor that reads all changes from revision `from` on.
    pub fn cursor(&self, from: u64) -> Result<ChangeCursor, CompactedRevision> {
        self.lock_state().ring.cursor(from)
    }

    /// Reads the next whole revisions, at most up to what the view shows. Returns nothing if all is read.
    pub fn read(&self, cursor: &mut ChangeCursor) -> Result<Vec<ChangeEvent>, CompactedRevision> {
        let state = self.lock_state();
        let upto = state.published();
        state.ring.read(cursor, upto)
    }

    /// Streams all changes from revision `from` on.
    pub fn watch(self: &Arc<Self>, from: u64) -> Result<ChangeStream, CompactedRevision> {
        let (cursor, published) = {
            let state = self.lock_state();
            (state.ring.cursor(from)?, state.published.subscribe())
        };
        // Weak, because a watch must not keep the changes of a closed node alive; the stream ends with the node.
        let reading = FeedReader::<R> { feed: Arc::downgrade(self), published, cursor };
        let batches = stream::unfold(Some(reading), |reading| async move { reading?.next().await });
        let feed = Arc::downgrade(self);
        let published = Box::new(move || feed.upgrade().map(|feed| feed.lock_state().published()));
        Ok(ChangeStream { changes: batches.map(stream::iter).flatten().boxed(), published })
    }
}

impl<R: AsyncRuntime> ApplyObserver for ChangeFeed<R> {
    fn on_applied(&self, applied: &AppliedEntry<'_>) {
        self.lock_state().ring.push(applied.id.index, applied.changes);
    }

    fn on_installed(&self, ledger: &Ledger) {
        self.lock_state().ring.compact(ledger.applied());
    }

    fn on_published(&self, ledger: &Ledger) {
        let index = ledger.applied();
        self.lock_state().published.send_if_modified(|shown| {
            *shown = index;
            true
        });
    }
}

struct FeedReader<R: AsyncRuntime> {
    feed: Weak<ChangeFeed<R>>,
    published: RevisionReceiver<R>,
    cursor: ChangeCursor,
}

type FeedItems = Vec<Result<ChangeEvent, CompactedRevision>>;

impl<R: AsyncRuntime> FeedReader<R> {
    async fn next(mut self) -> Option<(FeedItems, Option<Self>)> {
        loop {
            drop(self.published.borrow_and_update());
            let read = self.feed.upgrade()?.read(&mut self.cursor);
            match read {
                Err(compacted) => {
                    tracing::warn!(oldest = compacted.oldest, "a watcher was too slow and is cut off");
                    return Some((vec![Err(compacted)], None));
                }
                Ok(changes) if !changes.is_empty() => {
                    return Some((changes.into_iter().map(Ok).collect(), Some(self)));
                }
                Ok(_) => self.published.changed().await.ok()?,
            }
        }
    }
}
