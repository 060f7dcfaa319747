//! Limits connections of callers that have not proven yet that they are members.
//!
//! There are a few places, and fewer per address. A new caller takes the place of the one that has waited longest if
//! all are taken, so that idle callers cannot block others.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;
use tokio::sync::oneshot;
use vocabulary::network_of;

/// Limiter of callers that have not proven that they are members: their places, oldest first.
#[derive(Debug)]
pub(crate) struct UnprovenCallerLimiter {
    max_callers: usize,
    max_per_address: usize,
    waiting: Mutex<Vec<LimitedCaller>>,
    next: AtomicU64,
}

#[derive(Debug)]
struct LimitedCaller {
    id: u64,
    from: IpAddr,
    /// Dropped to evict the caller.
    _evict: oneshot::Sender<Infallible>,
}

/// A caller's place, until it is dropped or given to another caller.
#[derive(Debug)]
pub(crate) struct CallerPermit {
    lobby: Arc<UnprovenCallerLimiter>,
    id: u64,
    evicted: oneshot::Receiver<Infallible>,
}

impl UnprovenCallerLimiter {
    pub(crate) fn new(places: usize, for_one_address: usize) -> Arc<Self> {
        Arc::new(Self {
            max_callers: places,
            max_per_address: for_one_address,
            waiting: Mutex::default(),
            next: AtomicU64::new(0),
        })
    }

    /// Gives a place to a new caller.
    pub(crate) fn admit(self: &Arc<Self>, from: IpAddr) -> CallerPermit {
        let (stays, turned_out) = oneshot::channel();
        let from = network_of(from);
        let id = self.next.fetch_add(1, Relaxed);
        let mut waiting = self.waiting.lock();
        if let Some(leaves) = self.pick_evicted(&waiting, from) {
            waiting.remove(leaves);
        }
        waiting.push(LimitedCaller { id, from, _evict: stays });
        CallerPermit { lobby: self.clone(), id, evicted: turned_out }
    }

    /// Returns the caller to evict: the longest-waiting one of the same address if that has used up its share,
    /// otherwise of the addresses with the most callers.
    fn pick_evicted(&self, waiting: &[LimitedCaller], from: IpAddr) -> Option<usize> {
        let mut connections = BTreeMap::<IpAddr, usize>::new();
        waiting.iter().for_each(|waiting| *connections.entry(waiting.from).or_default() += 1);
        if connections.get(&from).is_some_and(|connections| *connections >= self.max_per_address) {
            return waiting.iter().position(|waiting| waiting.from == from);
        }
        let most = connections.values().max()?;
        let crowds = |waiting: &LimitedCaller| connections.get(&waiting.from) == Some(most);
        (waiting.len() >= self.max_callers).then(|| waiting.iter().position(crowds))?
    }
}

impl CallerPermit {
    /// Returns once the place was given to another caller.
    pub(crate) async fn wait_evicted(&mut self) {
        // Nothing is ever sent; the channel only closes.
        drop((&mut self.evicted).await);
    }
}

impl Drop for CallerPermit {
    fn drop(&mut self) {
        self.lobby.waiting.lock().retain(|waiting| waiting.id != self.id);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn is_evicted(place: &mut CallerPermit) -> bool {
        place.wait_evicted().now_or_never().is_some()
    }

    #[test]
    fn idle_callers_of_one_address_evict_only_each_other() {
        let (lobby, idle, member) =
            (UnprovenCallerLimiter::new(8, 4), IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let mut others = lobby.admit(member);
        let mut all: Vec<CallerPermit> = (0..100).map(|_| lobby.admit(idle)).collect();
        let out = all.iter_mut().map(is_evicted).filter(|out| *out).count();
        assert_eq!((out, is_evicted(&mut others)), (96, false));
        assert!(!all[96..].iter_mut().any(is_evicted), "the last ones have the places");
    }

    #[test]
    fn a_full_limiter_evicts_a_caller_of_the_busiest_address() {
        let lobby = UnprovenCallerLimiter::new(4, 3);
        let from = |n| IpAddr::from([10, 0, 0, n]);
        let mut many: Vec<CallerPermit> = (0..3).map(|_| lobby.admit(from(1))).collect();
        let mut one = lobby.admit(from(2));
        let mut late = lobby.admit(from(3));
        assert_eq!(many.iter_mut().map(is_evicted).collect::<Vec<_>>(), [true, false, false]);
        assert!(!is_evicted(&mut one) && !is_evicted(&mut late));
        drop((one, late));
        let mut again = lobby.admit(from(4));
        assert!(!is_evicted(&mut again) && lobby.waiting.lock().len() == 3, "who leaves makes room");
    }

    #[test]
    fn among_addresses_with_as_many_places_the_longest_waiting_caller_leaves() {
        let lobby = UnprovenCallerLimiter::new(3, 2);
        let from = |n| IpAddr::from([10, 0, 0, n]);
        let mut all: Vec<CallerPermit> = [2, 9, 5, 7].map(|n| lobby.admit(from(n))).into();
        assert_eq!(all.iter_mut().map(is_evicted).collect::<Vec<_>>(), [true, false, false, false]);
    }

    #[test]
    fn the_addresses_of_one_ipv6_network_share_its_places() {
        let lobby = UnprovenCallerLimiter::new(8, 2);
        let from = |network: u128, host: u128| IpAddr::V6((network << 64 | host).into());
        let mut other = lobby.admit(from(2, 1));
        let mut all: Vec<CallerPermit> = (1..6).map(|host| lobby.admit(from(1, host))).collect();
        assert_eq!(all.iter_mut().map(is_evicted).collect::<Vec<_>>(), [true, true, true, false, false]);
        assert!(!is_evicted(&mut other));
    }
}
