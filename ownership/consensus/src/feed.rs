//! Changes of the ledger as they are applied, for watchers who read at their own pace.
//!
//! Applying never waits for a watcher. One that falls out of the ring is cut off and told so; it reads the view and
//! begins again there.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};

use futures::stream::{self, BoxStream};
use futures::{Stream, StreamExt};
use ledger::Ledger;
use openraft::AsyncRuntime;
use openraft::async_runtime::watch::{Watch as _, WatchReceiver as _, WatchSender as _};

use crate::changes::{Change, Compacted, Cursor, Ring};
use crate::machine::{Applied, Witness};

type Sender<R> = <<R as AsyncRuntime>::Watch as openraft::async_runtime::watch::Watch>::Sender<u64>;
type Receiver<R> = <<R as AsyncRuntime>::Watch as openraft::async_runtime::watch::Watch>::Receiver<u64>;

/// Changes in order and without a gap, from a revision on. Ends after an error, or when the node is gone.
pub struct Watch {
    changes: BoxStream<'static, Result<Change, Compacted>>,
    published: Box<dyn Fn() -> Option<u64> + Send + Sync>,
}

impl Watch {
    /// The last revision that the view shows, unless the node is gone: a watch that is polled after this and has nothing to
    /// tell has told all up to it.
    pub fn published(&self) -> Option<u64> {
        (self.published)()
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watch")
    }
}

impl Stream for Watch {
    type Item = Result<Change, Compacted>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.changes.poll_next_unpin(context)
    }
}

/// Where changes wait to be read.
pub struct Feed<R: AsyncRuntime>(Mutex<Kept<R>>);

struct Kept<R: AsyncRuntime> {
    ring: Ring,
    /// The last revision that the view shows.
    published: Sender<R>,
}

impl<R: AsyncRuntime> Kept<R> {
    fn published(&self) -> u64 {
        *self.published.borrow_watched()
    }
}

impl<R: AsyncRuntime> fmt::Debug for Feed<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Feed").field(&self.kept().ring).finish()
    }
}

impl<R: AsyncRuntime> Feed<R> {
    /// An empty one, for so many changes.
    pub fn new(capacity: usize) -> Self {
        let (published, _) = R::Watch::channel(0);
        Self(Mutex::new(Kept { ring: Ring::new(capacity), published }))
    }

    fn kept(&self) -> MutexGuard<'_, Kept<R>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A reader of everything from revision `from` on.
    pub fn cursor(&self, from: u64) -> Result<Cursor, Compacted> {
        self.kept().ring.cursor(from)
    }

    /// What comes next for a reader, up to what the view shows: whole revisions, nothing when all is read.
    pub fn read(&self, cursor: &mut Cursor) -> Result<Vec<Change>, Compacted> {
        let kept = self.kept();
        let upto = kept.published();
        kept.ring.read(cursor, upto)
    }

    /// All changes from revision `from` on.
    pub fn watch(self: &Arc<Self>, from: u64) -> Result<Watch, Compacted> {
        let (cursor, published) = {
            let kept = self.kept();
            (kept.ring.cursor(from)?, kept.published.subscribe())
        };
        // Only a weak handle: a watch must not keep a closed node's changes alive, and ends with it.
        let reading = Reading::<R> { feed: Arc::downgrade(self), published, cursor };
        let batches = stream::unfold(Some(reading), |reading| async move { reading?.next().await });
        let feed = Arc::downgrade(self);
        let published = Box::new(move || feed.upgrade().map(|feed| feed.kept().published()));
        Ok(Watch { changes: batches.map(stream::iter).flatten().boxed(), published })
    }
}

impl<R: AsyncRuntime> Witness for Feed<R> {
    fn applied(&self, applied: &Applied<'_>) {
        self.kept().ring.push(applied.id.index, applied.changes);
    }

    fn installed(&self, ledger: &Ledger) {
        self.kept().ring.compact(ledger.applied());
    }

    fn published(&self, ledger: &Ledger) {
        let index = ledger.applied();
        self.kept().published.send_if_modified(|shown| {
            *shown = index;
            true
        });
    }
}

struct Reading<R: AsyncRuntime> {
    feed: Weak<Feed<R>>,
    published: Receiver<R>,
    cursor: Cursor,
}

type Batch = Vec<Result<Change, Compacted>>;

impl<R: AsyncRuntime> Reading<R> {
    async fn next(mut self) -> Option<(Batch, Option<Self>)> {
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
