//! Workers that register, each for a time: who does not say so again in that time is not listed any more. Pure; time is an
//! argument.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use vocabulary::WorkerId;

use crate::config::WorkerConfig;

/// Who is registered, and until when.
#[derive(Debug)]
pub(crate) struct Registered {
    all: BTreeMap<WorkerId, Registration>,
    most: usize,
}

#[derive(Clone, Debug)]
pub(crate) struct Registration {
    pub(crate) worker: WorkerConfig,
    pub(crate) until: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Came {
    New,
    /// It was there, and stays.
    Again,
    /// It was there, and is described otherwise now.
    Otherwise,
}

/// So many are registered that there is no room for another one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct NoRoom {
    pub(crate) most: usize,
}

impl Registered {
    pub(crate) fn new(most: usize) -> Self {
        Self { all: BTreeMap::new(), most }
    }

    pub(crate) fn register(&mut self, worker: WorkerConfig, ttl: Duration, now: Instant) -> Result<Came, NoRoom> {
        let id = WorkerId::of_endpoint(worker.endpoint());
        let came = match self.all.get(&id) {
            None if self.all.len() >= self.most => return Err(NoRoom { most: self.most }),
            None => Came::New,
            Some(known) if known.worker == worker => Came::Again,
            Some(_) => Came::Otherwise,
        };
        self.all.insert(id, Registration { worker, until: now + ttl });
        Ok(came)
    }

    /// The worker is not there any more; whether it was.
    pub(crate) fn withdraw(&mut self, worker: WorkerId) -> bool {
        self.all.remove(&worker).is_some()
    }

    /// Takes out those whose time is over.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<WorkerConfig> {
        self.all.extract_if(.., |_, registration| registration.until <= now).map(|(_, it)| it.worker).collect()
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Registration> {
        self.all.values()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(30);

    fn worker(url: &str) -> WorkerConfig {
        WorkerConfig::at(url.parse().unwrap())
    }

    #[test]
    fn a_worker_stays_as_long_as_it_says_so_again_in_time() {
        let (mut registered, start) = (Registered::new(8), Instant::now());
        assert_eq!(registered.register(worker("http://a:1"), TTL, start), Ok(Came::New));
        assert_eq!(registered.register(worker("http://b:1"), TTL, start), Ok(Came::New));
        assert_eq!(registered.register(worker("http://a:1"), TTL, start + TTL / 2), Ok(Came::Again));
        let gone = registered.expire(start + TTL);
        assert_eq!((gone.len(), &**gone[0].endpoint()), (1, "http://b:1"));
        assert!(registered.expire(start + TTL * 3 / 2 - Duration::from_millis(1)).is_empty());
        assert_eq!(registered.expire(start + TTL * 3 / 2).len(), 1);
        assert_eq!(registered.all().count(), 0);
    }

    #[test]
    fn who_is_described_otherwise_is_told_from_who_only_stays() {
        let (mut registered, now) = (Registered::new(8), Instant::now());
        assert_eq!(registered.register(worker("http://a:1"), TTL, now), Ok(Came::New));
        assert_eq!(registered.register(worker("http://a:1#decode"), TTL, now), Ok(Came::Otherwise));
        assert!(registered.withdraw(WorkerId::of_endpoint("http://a:1")));
        assert!(!registered.withdraw(WorkerId::of_endpoint("http://a:1")));
    }

    #[test]
    fn there_is_room_for_so_many_and_who_is_there_can_always_stay() {
        let (mut registered, now) = (Registered::new(1), Instant::now());
        assert_eq!(registered.register(worker("http://a:1"), TTL, now), Ok(Came::New));
        assert_eq!(registered.register(worker("http://b:1"), TTL, now), Err(NoRoom { most: 1 }));
        assert_eq!(registered.register(worker("http://a:1"), TTL, now), Ok(Came::Again));
    }
}
