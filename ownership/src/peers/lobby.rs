//! Where callers wait that have not shown yet that they are members: a few places, fewer for one address. Whoever comes when
//! all are taken gets the place of who has waited longest, so that idle callers keep nobody out.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;
use tokio::sync::oneshot;

/// Places for callers, oldest first.
#[derive(Debug)]
pub(crate) struct Lobby {
    places: usize,
    for_one_address: usize,
    waiting: Mutex<Vec<Waiting>>,
    next: AtomicU64,
}

#[derive(Debug)]
struct Waiting {
    id: u64,
    from: IpAddr,
    /// Dropped to turn the caller out.
    _stays: oneshot::Sender<Infallible>,
}

/// A caller's place, until it is dropped or given to somebody else.
#[derive(Debug)]
pub(crate) struct Place {
    lobby: Arc<Lobby>,
    id: u64,
    turned_out: oneshot::Receiver<Infallible>,
}

impl Lobby {
    pub(crate) fn new(places: usize, for_one_address: usize) -> Arc<Self> {
        Arc::new(Self { places, for_one_address, waiting: Mutex::default(), next: AtomicU64::new(0) })
    }

    /// Gives a place to whoever comes.
    pub(crate) fn enter(self: &Arc<Self>, from: IpAddr) -> Place {
        let (stays, turned_out) = oneshot::channel();
        let from = network_of(from);
        let id = self.next.fetch_add(1, Relaxed);
        let mut waiting = self.waiting.lock();
        if let Some(leaves) = self.who_leaves(&waiting, from) {
            waiting.remove(leaves);
        }
        waiting.push(Waiting { id, from, _stays: stays });
        Place { lobby: self.clone(), id, turned_out }
    }

    /// The one that has waited longest: of the same address where that has its share, else of those that have most.
    fn who_leaves(&self, waiting: &[Waiting], from: IpAddr) -> Option<usize> {
        let mut held = BTreeMap::<IpAddr, usize>::new();
        waiting.iter().for_each(|waiting| *held.entry(waiting.from).or_default() += 1);
        if held.get(&from).is_some_and(|held| *held >= self.for_one_address) {
            return waiting.iter().position(|waiting| waiting.from == from);
        }
        let most = held.values().max()?;
        let crowds = |waiting: &Waiting| held.get(&waiting.from) == Some(most);
        (waiting.len() >= self.places).then(|| waiting.iter().position(crowds))?
    }
}

/// Who counts as one address: an IPv6 host has a whole /64.
fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6((u128::from(v6) & !u128::from(u64::MAX)).into()),
        v4 => v4,
    }
}

impl Place {
    /// Returns once somebody else has it.
    pub(crate) async fn turned_out(&mut self) {
        // Nothing is ever sent: it only ends.
        drop((&mut self.turned_out).await);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.lobby.waiting.lock().retain(|waiting| waiting.id != self.id);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn is_out(place: &mut Place) -> bool {
        place.turned_out().now_or_never().is_some()
    }

    #[test]
    fn idle_callers_of_one_address_only_turn_each_other_out() {
        let (lobby, idle, member) = (Lobby::new(8, 4), IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let mut others = lobby.enter(member);
        let mut all: Vec<Place> = (0..100).map(|_| lobby.enter(idle)).collect();
        let out = all.iter_mut().map(is_out).filter(|out| *out).count();
        assert_eq!((out, is_out(&mut others)), (96, false));
        assert!(!all[96..].iter_mut().any(is_out), "the last ones have the places");
    }

    #[test]
    fn beyond_all_places_the_address_with_most_gives_one_up() {
        let lobby = Lobby::new(4, 3);
        let from = |n| IpAddr::from([10, 0, 0, n]);
        let mut many: Vec<Place> = (0..3).map(|_| lobby.enter(from(1))).collect();
        let mut one = lobby.enter(from(2));
        let mut late = lobby.enter(from(3));
        assert_eq!(many.iter_mut().map(is_out).collect::<Vec<_>>(), [true, false, false]);
        assert!(!is_out(&mut one) && !is_out(&mut late));
        drop((one, late));
        let mut again = lobby.enter(from(4));
        assert!(!is_out(&mut again) && lobby.waiting.lock().len() == 3, "who leaves makes room");
    }

    #[test]
    fn among_addresses_with_as_many_places_the_longest_waiting_caller_leaves() {
        let lobby = Lobby::new(3, 2);
        let from = |n| IpAddr::from([10, 0, 0, n]);
        let mut all: Vec<Place> = [2, 9, 5, 7].map(|n| lobby.enter(from(n))).into();
        assert_eq!(all.iter_mut().map(is_out).collect::<Vec<_>>(), [true, false, false, false]);
    }

    #[test]
    fn the_addresses_of_one_ipv6_network_share_its_places() {
        let lobby = Lobby::new(8, 2);
        let from = |network: u128, host: u128| IpAddr::V6((network << 64 | host).into());
        let mut other = lobby.enter(from(2, 1));
        let mut all: Vec<Place> = (1..6).map(|host| lobby.enter(from(1, host))).collect();
        assert_eq!(all.iter_mut().map(is_out).collect::<Vec<_>>(), [true, true, true, false, false]);
        assert!(!is_out(&mut other));
    }
}
