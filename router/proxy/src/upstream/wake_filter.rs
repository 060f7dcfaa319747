//! Keeps futures of one task that wake each other from waking the task: it polls them in turn anyway.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::task::{Context, Poll, Wake, Waker};

use futures::task::AtomicWaker;

/// How often a poll is repeated at once because it woke itself. After that the task is woken.
const MAX_REPEATS: usize = 2;

/// A waker that does not wake its task while that is being polled.
#[derive(Debug)]
pub(super) struct WakeFilter {
    state: Arc<WakeState>,
    waker: Waker,
}

#[derive(Debug, Default)]
struct WakeState {
    task: AtomicWaker,
    is_polled: AtomicBool,
    was_woken: AtomicBool,
}

impl Wake for WakeState {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // Either the poll sees this once it has ended, or this sees that it has ended.
        self.was_woken.store(true, SeqCst);
        if !self.is_polled.load(SeqCst) {
            self.task.wake();
        }
    }
}

impl WakeFilter {
    pub(super) fn new() -> Self {
        let state = Arc::new(WakeState::default());
        Self { waker: Waker::from(state.clone()), state }
    }

    /// Forgets the task, whose memory its waker would keep.
    pub(super) fn forget_task(&self) {
        drop(self.state.task.take());
    }

    /// Polls; while that is pending and was woken meanwhile, polls again.
    pub(super) fn poll<T>(&self, cx: &mut Context<'_>, mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> Poll<T> {
        self.state.task.register(cx.waker());
        let mut filtered = Context::from_waker(&self.waker);
        for _ in 0..=MAX_REPEATS {
            // Swapped, not stored: the poll has to see what a waker wrote whose wake-up it replaces.
            self.state.was_woken.swap(false, SeqCst);
            self.state.is_polled.store(true, SeqCst);
            let polled = poll(&mut filtered);
            self.state.is_polled.store(false, SeqCst);
            // After `Ready` the caller polls again, so that no wake-up is needed.
            if polled.is_ready() || !self.state.was_woken.load(SeqCst) {
                return polled;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use futures::task::{ArcWake, waker};

    use super::*;

    #[derive(Default)]
    struct WakeCount(AtomicUsize);

    impl ArcWake for WakeCount {
        fn wake_by_ref(this: &Arc<Self>) {
            this.0.fetch_add(1, SeqCst);
        }
    }

    impl WakeCount {
        fn taken(&self) -> usize {
            self.0.swap(0, SeqCst)
        }
    }

    #[test]
    fn a_poll_that_wakes_itself_is_repeated_and_wakes_no_task() {
        let (count, filter) = (Arc::new(WakeCount::default()), WakeFilter::new());
        let task = waker(count.clone());
        let mut cx = Context::from_waker(&task);
        let mut polls = 0;
        let polled = filter.poll(&mut cx, |cx| {
            polls += 1;
            if polls == 1 {
                cx.waker().wake_by_ref();
            }
            Poll::<()>::Pending
        });
        assert!(polled.is_pending());
        assert_eq!((polls, count.taken()), (2, 0));
    }

    #[test]
    fn a_wake_up_between_two_polls_wakes_the_task_that_polled_last() {
        let (first, last, filter) = (Arc::new(WakeCount::default()), Arc::new(WakeCount::default()), WakeFilter::new());
        let mut inner = None;
        for count in [&first, &last] {
            let task = waker(count.clone());
            let polled = filter.poll(&mut Context::from_waker(&task), |cx| {
                inner = Some(cx.waker().clone());
                Poll::<()>::Pending
            });
            assert!(polled.is_pending());
        }
        inner.unwrap().wake();
        assert_eq!((first.taken(), last.taken()), (0, 1));
    }

    #[test]
    fn a_forgotten_task_is_neither_kept_nor_woken() {
        let (count, filter) = (Arc::new(WakeCount::default()), WakeFilter::new());
        let task = waker(count.clone());
        let mut inner = None;
        let polled = filter.poll(&mut Context::from_waker(&task), |cx| {
            inner = Some(cx.waker().clone());
            Poll::<()>::Pending
        });
        assert!(polled.is_pending());
        drop(task);
        filter.forget_task();
        inner.unwrap().wake();
        assert_eq!((Arc::strong_count(&count), count.taken()), (1, 0));
    }

    #[test]
    fn a_poll_that_always_wakes_itself_leaves_the_thread() {
        let (count, filter) = (Arc::new(WakeCount::default()), WakeFilter::new());
        let task = waker(count.clone());
        let mut polls = 0;
        let polled = filter.poll(&mut Context::from_waker(&task), |cx| {
            polls += 1;
            cx.waker().wake_by_ref();
            Poll::<()>::Pending
        });
        assert!(polled.is_pending());
        assert_eq!((polls, count.taken()), (1 + MAX_REPEATS, 1));
    }

    #[test]
    fn no_wake_up_of_another_thread_is_lost_whenever_it_comes() {
        const VALUES: usize = 20_000;
        let (filter, runtime) = (WakeFilter::new(), tokio::runtime::Builder::new_current_thread().build().unwrap());
        let (written, seen, inner) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicWaker::new());
        std::thread::scope(|threads| {
            threads.spawn(|| {
                for value in 1..=VALUES {
                    while seen.load(SeqCst) + 1 < value {
                        std::hint::spin_loop();
                    }
                    // At another moment of the poll each time.
                    (0..value % 64).for_each(|_| std::hint::spin_loop());
                    written.store(value, SeqCst);
                    inner.wake();
                }
            });
            for value in 1..=VALUES {
                runtime.block_on(std::future::poll_fn(|cx| {
                    filter.poll(cx, |cx| {
                        inner.register(cx.waker());
                        let polled = if written.load(SeqCst) >= value { Poll::Ready(()) } else { Poll::Pending };
                        // The poll goes on for a while after it has found nothing.
                        (0..16).for_each(|_| std::hint::spin_loop());
                        polled
                    })
                }));
                seen.store(value, SeqCst);
            }
        });
        assert_eq!(seen.into_inner(), VALUES);
    }
}
