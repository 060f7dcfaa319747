//! Single flight: concurrent callers with the same key share one run and its outcome.
//!
//! The run is a task of its own, so that it completes even when all callers have left.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use derive_where::derive_where;
use parking_lot::Mutex;
use tokio::sync::watch;

/// Runs in progress by key, each with a receiver of its outcome.
type FlightTable<K, T> = Mutex<HashMap<K, watch::Receiver<Option<T>>>>;

/// The runs in progress, by key.
#[derive(Debug)]
#[derive_where(Default)]
pub struct SingleFlight<K, T> {
    running: Arc<FlightTable<K, T>>,
}

impl<K, T> SingleFlight<K, T>
where
    K: Hash + Eq + Clone + Send + 'static,
    T: Clone + Send + Sync + 'static,
{
    /// Waits for the run with this key, and starts `work` when there is none. `None` when the run panicked.
    pub async fn run<F>(&self, key: K, work: F) -> Option<T>
    where
        F: Future<Output = T> + Send + 'static,
    {
        let mut outcome = self.join_or_start(key, work);
        let arrived = outcome.wait_for(Option::is_some).await.ok()?;
        arrived.clone()
    }

    fn join_or_start<F>(&self, key: K, work: F) -> watch::Receiver<Option<T>>
    where
        F: Future<Output = T> + Send + 'static,
    {
        let mut running = self.running.lock();
        if let Some(outcome) = running.get(&key) {
            return outcome.clone();
        }
        let (sender, receiver) = watch::channel(None);
        running.insert(key.clone(), receiver.clone());
        let landing = FlightGuard { running: self.running.clone(), key };
        tokio::spawn(async move {
            let outcome = work.await;
            drop(landing);
            // All callers may have left.
            let _ = sender.send(Some(outcome));
        });
        receiver
    }
}

/// Removes the run from the table when it ends, even by a panic.
struct FlightGuard<K: Hash + Eq, T> {
    running: Arc<FlightTable<K, T>>,
    key: K,
}

impl<K: Hash + Eq, T> Drop for FlightGuard<K, T> {
    fn drop(&mut self) {
        self.running.lock().remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tokio::sync::Notify;

    #[tokio::test]
    async fn two_callers_share_one_flight() {
        let (flight, runs, go) = (SingleFlight::default(), Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
        let work = || {
            let (runs, go) = (runs.clone(), go.clone());
            async move {
                runs.fetch_add(1, Ordering::SeqCst);
                go.notified().await;
                7
            }
        };
        let release = async {
            tokio::task::yield_now().await;
            go.notify_one();
        };
        let (a, b, ()) = tokio::join!(flight.run("k", work()), flight.run("k", work()), release);
        assert_eq!((a, b, runs.load(Ordering::SeqCst)), (Some(7), Some(7), 1));
        assert!(flight.running.lock().is_empty(), "the next caller starts a new run");
    }

    #[tokio::test]
    async fn a_flight_completes_after_its_caller_left() {
        let (flight, done) = (SingleFlight::<u8, ()>::default(), Arc::new(Notify::new()));
        let finished = done.clone();
        let left = flight.run(1, async move { finished.notify_one() });
        drop(tokio::time::timeout(std::time::Duration::ZERO, left).await);
        done.notified().await;
    }

    #[tokio::test]
    async fn a_panicking_flight_wakes_its_callers_and_leaves_the_table() {
        let flight = SingleFlight::<u8, ()>::default();
        assert_eq!(flight.run(1, async { panic!("planned") }).await, None);
        assert!(flight.running.lock().is_empty());
    }
}
