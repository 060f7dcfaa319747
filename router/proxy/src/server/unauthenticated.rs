//! Limits for connections that have not authenticated yet: in total, per address, and in time.
//!
//! If there are too many, the oldest one is closed: a legitimate client sends its key at once, so the one that has
//! waited longest is the least likely to do so.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use prometheus::{IntCounter, IntCounterVec};
use tokio::sync::oneshot;
use vocabulary::network_of;

/// A listener's limits for unauthenticated connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UnauthenticatedLimits {
    /// Maximum number at once.
    pub connections: usize,
    /// Maximum number per address at once.
    pub per_address: usize,
    /// How long a connection may stay unauthenticated, including its TLS handshake.
    pub timeout: Duration,
}

/// Counters of connections that were closed before they had authenticated, by cause.
#[derive(Clone, Debug)]
pub struct ClosedConnections {
    evicted_total: IntCounter,
    evicted_address: IntCounter,
    timeout: IntCounter,
}

impl ClosedConnections {
    /// Values of the cause label.
    pub(crate) const CAUSES: [&str; 3] = ["evicted_total", "evicted_address", "timeout"];

    /// Returns the counters of `listener` in a family with the labels listener and cause.
    pub fn of(family: &IntCounterVec, listener: &str) -> Self {
        let [evicted_total, evicted_address, timeout] =
            Self::CAUSES.map(|cause| family.with_label_values(&[listener, cause]));
        Self { evicted_total, evicted_address, timeout }
    }

    /// Returns counters that are not exported.
    pub(super) fn unseen() -> Self {
        let [evicted_total, evicted_address, timeout] =
            Self::CAUSES.map(|cause| IntCounter::new(cause, "not shown").expect("a valid name"));
        Self { evicted_total, evicted_address, timeout }
    }
}

/// The unauthenticated connections of one listener.
#[derive(Debug)]
pub(super) struct UnauthenticatedConnections {
    limits: UnauthenticatedLimits,
    closed: ClosedConnections,
    open: Mutex<OpenConnectionIndex>,
}

#[derive(Debug, Default)]
struct OpenConnectionIndex {
    next_id: u64,
    /// Ordered by age, the oldest first.
    by_age: BTreeMap<u64, (IpAddr, oneshot::Sender<()>)>,
    by_address: HashMap<IpAddr, usize>,
}

impl OpenConnectionIndex {
    fn remove(&mut self, id: u64) -> Option<oneshot::Sender<()>> {
        let (address, close) = self.by_age.remove(&id)?;
        if let Some(count) = self.by_address.get_mut(&address) {
            *count -= 1;
            if *count == 0 {
                self.by_address.remove(&address);
            }
        }
        Some(close)
    }

    fn oldest_of(&self, address: IpAddr) -> Option<u64> {
        self.by_age.iter().find(|(_, (of, _))| *of == address).map(|(id, _)| *id)
    }

    fn oldest(&self) -> Option<u64> {
        self.by_age.first_key_value().map(|(id, _)| *id)
    }
}

impl UnauthenticatedConnections {
    pub(super) fn new(limits: UnauthenticatedLimits, closed: ClosedConnections) -> Arc<Self> {
        Arc::new(Self { limits, closed, open: Mutex::default() })
    }

    pub(super) fn timeout(&self) -> Duration {
        self.limits.timeout
    }

    /// Adds a connection of `address`. Another one may be evicted for it, whose receiver then gets a message.
    pub(super) fn add(self: &Arc<Self>, address: IpAddr) -> (UnauthenticatedPermit, oneshot::Receiver<()>) {
        let (close, closed) = oneshot::channel();
        let address = network_of(address);
        let mut open = self.open.lock();
        let surplus = if open.by_address.get(&address).is_some_and(|count| *count >= self.limits.per_address) {
            open.oldest_of(address).map(|id| (id, &self.closed.evicted_address))
        } else if open.by_age.len() >= self.limits.connections {
            open.oldest().map(|id| (id, &self.closed.evicted_total))
        } else {
            None
        };
        if let Some((id, counted)) = surplus
            && let Some(close) = open.remove(id)
            // Its task may have ended already.
            && close.send(()).is_ok()
        {
            counted.inc();
        }
        let id = open.next_id;
        open.next_id += 1;
        open.by_age.insert(id, (address, close));
        *open.by_address.entry(address).or_default() += 1;
        let slot = UnauthenticatedSlot { id, is_held: AtomicBool::new(true), connections: self.clone() };
        (UnauthenticatedPermit(Some(Arc::new(slot))), closed)
    }
}

/// A connection's slot among the unauthenticated ones; attached to its requests as an extension. Clones share the slot,
/// and the last one releases it.
#[derive(Clone, Debug)]
pub struct UnauthenticatedPermit(Option<Arc<UnauthenticatedSlot>>);

#[derive(Debug)]
struct UnauthenticatedSlot {
    id: u64,
    is_held: AtomicBool,
    connections: Arc<UnauthenticatedConnections>,
}

impl UnauthenticatedPermit {
    /// Returns a permit for a listener whose peers are known.
    pub(super) fn not_required() -> Self {
        Self(None)
    }

    /// Releases the slot once a request of this connection has authenticated.
    pub fn mark_authenticated(&self) {
        if let Some(slot) = &self.0 {
            slot.release();
        }
    }

    /// Counts a connection that is closed because none of its requests has authenticated in time.
    pub(super) fn timed_out(&self) {
        if let Some(slot) = self.0.as_ref().filter(|slot| slot.is_held.load(Ordering::Relaxed)) {
            slot.connections.closed.timeout.inc();
        }
    }
}

impl UnauthenticatedSlot {
    fn release(&self) {
        if self.is_held.swap(false, Ordering::Relaxed) {
            self.connections.open.lock().remove(self.id);
        }
    }
}

impl Drop for UnauthenticatedSlot {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: UnauthenticatedLimits =
        UnauthenticatedLimits { connections: 4, per_address: 2, timeout: Duration::from_secs(5) };

    fn address(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    #[test]
    fn address_evicts_only_its_own_oldest_connection() {
        let all = UnauthenticatedConnections::new(LIMITS, ClosedConnections::unseen());
        let (_other, mut other) = all.add(address(1));
        let (_first, mut first) = all.add(address(2));
        let (_second, mut second) = all.add(address(2));
        let (_third, mut third) = all.add(address(2));
        assert_eq!(first.try_recv(), Ok(()), "closed");
        assert_eq!((all.closed.evicted_address.get(), all.closed.evicted_total.get()), (1, 0));
        for open in [&mut other, &mut second, &mut third] {
            assert_eq!(open.try_recv(), Err(oneshot::error::TryRecvError::Empty));
        }
    }

    #[test]
    fn oldest_connection_is_closed_when_all_slots_are_taken() {
        let all = UnauthenticatedConnections::new(LIMITS, ClosedConnections::unseen());
        let mut kept: Vec<_> = (1..=4).map(|last| all.add(address(last))).collect();
        let _fifth = all.add(address(5));
        let closed: Vec<_> = kept.iter_mut().map(|(_, closed)| closed.try_recv().is_ok()).collect();
        assert_eq!(closed, [true, false, false, false]);
        assert_eq!((all.closed.evicted_address.get(), all.closed.evicted_total.get()), (0, 1));
    }

    #[test]
    fn authenticated_and_closed_connections_free_their_slots() {
        let all = UnauthenticatedConnections::new(LIMITS, ClosedConnections::unseen());
        let (authentication, mut closed) = all.add(address(1));
        authentication.mark_authenticated();
        authentication.mark_authenticated();
        assert_eq!(closed.try_recv(), Err(oneshot::error::TryRecvError::Closed), "never closed for another");
        drop(all.add(address(1)));
        assert!(all.open.lock().by_age.is_empty() && all.open.lock().by_address.is_empty());
    }

    #[test]
    fn hosts_of_one_ipv6_network_count_as_one() {
        let all = UnauthenticatedConnections::new(LIMITS, ClosedConnections::unseen());
        let add = |text: &str| all.add(text.parse().unwrap());
        let (_other, mut other) = add("2001:db8:0:1::1");
        let (_first, mut first) = add("2001:db8::1");
        let (_second, mut second) = add("2001:db8::2");
        let _third = add("2001:db8::ffff:3");
        let closed = [&mut other, &mut first, &mut second].map(|closed| closed.try_recv().is_ok());
        assert_eq!(closed, [false, true, false]);
    }
}
