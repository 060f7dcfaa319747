//! One thread per node that drops objects that must not be dropped where they were used.
//!
//! A large view takes long to free, and closing the log joins the log's writer thread. The thread starts with the node,
//! so that it exists even if the process cannot start threads later. It needs no resource that the process may lack.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant};
use std::{io, thread};

use consensus::LedgerView;

use crate::peers::log_throttle::LogThrottle;

/// Maximum number of queued objects.
const QUEUE: usize = 256;

/// Maximum number of queued views; the remaining places are for the log.
const VIEWS: usize = 192;

/// Interval at which views that still have readers are checked again.
const RECHECK_INTERVAL: Duration = Duration::from_millis(20);

type Work = Box<dyn FnOnce() + Send>;

enum DeferredDropJob {
    View(Arc<LedgerView>),
    Work(Work),
}

/// Handle of the thread, which ends with the last handle.
#[derive(Clone, Debug)]
pub(crate) struct DropThread {
    queue: SyncSender<DeferredDropJob>,
    views: Arc<AtomicUsize>,
    full: Arc<LogThrottle>,
}

impl DropThread {
    pub(crate) fn begin() -> io::Result<Self> {
        let (queue, discarded) = mpsc::sync_channel(QUEUE);
        let views = Arc::<AtomicUsize>::default();
        let waiting = views.clone();
        thread::Builder::new().name("deferred-drop".into()).spawn(move || drop_queued(&discarded, &waiting))?;
        Ok(Self { queue, views, full: Arc::default() })
    }

    /// Frees a view once it has no readers. If too many are queued, its last holder frees it.
    pub(crate) fn free(&self, view: Arc<LedgerView>) {
        let is_taken =
            self.views.fetch_add(1, Relaxed) < VIEWS && self.queue.try_send(DeferredDropJob::View(view)).is_ok();
        if is_taken {
            return;
        }
        self.views.fetch_sub(1, Relaxed);
        if let Some(suppressed) = self.full.record(Instant::now()) {
            tracing::warn!(
                suppressed,
                "{VIEWS} old views of the ledger wait to be freed; one was freed where others wait"
            );
        }
    }

    /// Runs work that must not run on the caller's thread. Never waits.
    pub(crate) fn run(&self, work: impl FnOnce() + Send + 'static) {
        // Closing one log queues two or three objects, fewer than the reserved places.
        if let Err(mpsc::TrySendError::Full(work) | mpsc::TrySendError::Disconnected(work)) =
            self.queue.try_send(DeferredDropJob::Work(Box::new(work)))
        {
            tracing::error!("the thread that ends the log is gone; the log stays open as long as this process runs");
            std::mem::forget(work);
        }
    }
}

fn drop_queued(queue: &Receiver<DeferredDropJob>, views: &AtomicUsize) {
    let mut read: Vec<Arc<LedgerView>> = Vec::new();
    loop {
        let next = if read.is_empty() {
            queue.recv().map_err(RecvTimeoutError::from)
        } else {
            queue.recv_timeout(RECHECK_INTERVAL)
        };
        match next {
            Ok(DeferredDropJob::View(view)) => read.push(view),
            Ok(DeferredDropJob::Work(work)) => work(),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let before = read.len();
        read = read.into_iter().filter_map(|view| Arc::try_unwrap(view).err()).collect();
        views.fetch_sub(before - read.len(), Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(drop_thread: &DropThread) -> mpsc::Receiver<()> {
        let (sender, receiver) = mpsc::channel();
        drop_thread.run(move || sender.send(()).unwrap());
        receiver
    }

    #[test]
    fn a_view_that_is_still_read_keeps_nothing_else_waiting_and_is_freed_in_the_end() {
        let drop_thread = DropThread::begin().unwrap();
        let view = Arc::new(LedgerView::default());
        let (reader, freed) = (view.clone(), Arc::downgrade(&view));
        drop_thread.free(view);
        done(&drop_thread).recv().unwrap();
        assert_eq!((freed.strong_count(), drop_thread.views.load(Relaxed)), (2, 1));
        drop(reader);
        while freed.strong_count() > 0 || drop_thread.views.load(Relaxed) > 0 {
            done(&drop_thread).recv().unwrap();
        }
    }

    #[test]
    fn more_views_than_may_wait_are_counted_and_leave_room_for_the_log() {
        let drop_thread = DropThread::begin().unwrap();
        let view = Arc::new(LedgerView::default());
        (0..QUEUE).for_each(|_| drop_thread.free(view.clone()));
        assert_eq!(drop_thread.full.count(), (QUEUE - VIEWS) as u64);
        done(&drop_thread).recv().unwrap();
        assert_eq!(Arc::strong_count(&view), 1 + VIEWS);
    }
}
