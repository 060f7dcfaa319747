//! Registrations: workers register for a limited time, and are removed if they do not register again. Pure: time is an
//! argument.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use vocabulary::WorkerId;

use crate::discovery::WorkerConfig;

/// The registered workers, and until when.
#[derive(Debug)]
pub(crate) struct RegistrationTable {
    registrations: BTreeMap<WorkerId, WorkerRegistration>,
    max: usize,
}

/// A worker that was registered over the operator API, which lists it for the fleet. The ledger's `RegisterWorker` is
/// something else: it makes an incarnation of a listed worker an owner of sessions.
#[derive(Clone, Debug)]
pub struct WorkerRegistration {
    /// The worker.
    pub worker: WorkerConfig,
    /// When it is forgotten unless it is renewed.
    pub expires_at: Instant,
}

/// What a registration changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RegistrationOutcome {
    /// The worker was not registered before.
    New,
    /// It was registered, and stays.
    Renewed,
    /// It was registered, with another description.
    Changed,
}

/// The limit of registrations is reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegistrationsFull {
    /// Most registrations at a time.
    pub max: usize,
}

impl RegistrationTable {
    pub(crate) fn new(max: usize) -> Self {
        Self { registrations: BTreeMap::new(), max }
    }

    pub(crate) fn register(
        &mut self,
        worker: WorkerConfig,
        ttl: Duration,
        now: Instant,
    ) -> Result<RegistrationOutcome, RegistrationsFull> {
        let id = WorkerId::of_endpoint(worker.endpoint());
        let outcome = match self.registrations.get(&id) {
            None if self.registrations.len() >= self.max => return Err(RegistrationsFull { max: self.max }),
            None => RegistrationOutcome::New,
            Some(known) if known.worker == worker => RegistrationOutcome::Renewed,
            Some(_) => RegistrationOutcome::Changed,
        };
        self.registrations.insert(id, WorkerRegistration { worker, expires_at: now + ttl });
        Ok(outcome)
    }

    /// Removes a registration; returns whether it existed.
    pub(crate) fn withdraw(&mut self, worker: WorkerId) -> bool {
        self.registrations.remove(&worker).is_some()
    }

    /// Removes the expired registrations and returns their workers.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<WorkerConfig> {
        self.registrations
            .extract_if(.., |_, registration| registration.expires_at <= now)
            .map(|(_, it)| it.worker)
            .collect()
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &WorkerRegistration> {
        self.registrations.values()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(30);

    fn worker(url: &str) -> WorkerConfig {
        WorkerConfig::from_url(url.parse().unwrap())
    }

    #[test]
    fn a_registration_lasts_until_its_ttl_expires() {
        let (mut registered, start) = (RegistrationTable::new(8), Instant::now());
        assert_eq!(registered.register(worker("http://a:1"), TTL, start), Ok(RegistrationOutcome::New));
        assert_eq!(registered.register(worker("http://b:1"), TTL, start), Ok(RegistrationOutcome::New));
        assert_eq!(registered.register(worker("http://a:1"), TTL, start + TTL / 2), Ok(RegistrationOutcome::Renewed));
        let gone = registered.expire(start + TTL);
        assert_eq!((gone.len(), &**gone[0].endpoint()), (1, "http://b:1"));
        assert!(registered.expire(start + TTL * 3 / 2 - Duration::from_millis(1)).is_empty());
        assert_eq!(registered.expire(start + TTL * 3 / 2).len(), 1);
        assert_eq!(registered.all().count(), 0);
    }

    #[test]
    fn a_renewal_with_another_description_is_a_change() {
        let (mut registered, now) = (RegistrationTable::new(8), Instant::now());
        assert_eq!(registered.register(worker("http://a:1"), TTL, now), Ok(RegistrationOutcome::New));
        assert_eq!(registered.register(worker("http://a:1#decode"), TTL, now), Ok(RegistrationOutcome::Changed));
        assert!(registered.withdraw(WorkerId::of_endpoint("http://a:1")));
        assert!(!registered.withdraw(WorkerId::of_endpoint("http://a:1")));
    }

    #[test]
    fn a_full_table_rejects_new_workers_but_accepts_renewals() {
        let (mut registered, now) = (RegistrationTable::new(1), Instant::now());
        assert_eq!(registered.register(worker("http://a:1"), TTL, now), Ok(RegistrationOutcome::New));
        assert_eq!(registered.register(worker("http://b:1"), TTL, now), Err(RegistrationsFull { max: 1 }));
        assert_eq!(registered.register(worker("http://a:1"), TTL, now), Ok(RegistrationOutcome::Renewed));
    }
}
