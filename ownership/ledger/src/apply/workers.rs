//! Workers and their leases. A lease records that some router reached the process; its end affects plans only.

use vocabulary::{Epoch, Owner, WorkerId};

use super::CommandResult;
use crate::command::{ExpireLease, RegisterWorker, RenewLease};
use crate::control::RetireIncarnation;
use crate::ledger::Ledger;
use crate::outcome::{Outcome, Refusal};
use crate::record::{Worker, WorkerLease, WorkerSpec};

impl Ledger {
    /// Registers an incarnation of a worker and grants it a lease. An incarnation that already has the lease keeps its
    /// epoch.
    ///
    /// An older incarnation is refused while a newer one's lease is held. After that it is accepted, because the
    /// worker's clock may have been set back.
    pub(super) fn register_worker(&mut self, epoch: Epoch, register: &RegisterWorker) -> CommandResult {
        let until = self.now().after(register.ttl);
        let spec = WorkerSpec { ranks: register.spec.ranks.max(1), ..register.spec.clone() };
        let known = self.worker(register.worker).filter(|worker| worker.is_live());
        if known.is_some_and(|worker| worker.incarnation > register.incarnation) {
            return Err(Refusal::StaleIncarnation);
        }
        let same = known.filter(|worker| worker.incarnation == register.incarnation);
        let (epoch, until) = match same.map(|worker| (worker.epoch, worker.lease)) {
            Some((granted, WorkerLease::Held { until: held })) => (granted, until.max(held)),
            _ => (epoch, until),
        };
        let full = self.records.workers.len() >= self.records.limits.workers as usize;
        if full && self.worker(register.worker).is_none() && !self.evict_worker() {
            return Err(Refusal::LedgerFull);
        }
        let (id, incarnation) = (register.worker, register.incarnation);
        let draining = self.worker(id).map(|known| known.draining).unwrap_or_default();
        self.put_worker(Worker { id, spec, incarnation, epoch, lease: WorkerLease::Held { until }, draining });
        Ok(Outcome::Granted { epoch })
    }

    pub(super) fn renew_lease(&mut self, renewal: &RenewLease) -> Outcome {
        let until = self.now().after(renewal.ttl);
        let mut refused = Vec::new();
        for (id, incarnation) in &renewal.alive {
            let current = self.worker(*id).filter(|worker| worker.is_live() && worker.incarnation == *incarnation);
            match current.cloned() {
                None => refused.push(*id),
                Some(mut worker) => {
                    if let WorkerLease::Held { until: before } = worker.lease {
                        worker.lease = WorkerLease::Held { until: until.max(before) };
                    }
                    self.put_worker(worker);
                }
            }
        }
        let renewed = (renewal.alive.len() - refused.len()) as u32;
        Outcome::Renewed { renewed, refused }
    }

    /// Expires a lease in O(1): effective owners are derived from the worker table, so no artifact is rewritten.
    pub(super) fn expire(&mut self, expire: ExpireLease) -> CommandResult {
        let mut worker = self.worker(expire.worker).ok_or(Refusal::UnknownWorker)?.clone();
        let seen = worker.lease == WorkerLease::Held { until: expire.deadline } && worker.epoch == expire.epoch;
        if !seen || self.now() < expire.deadline {
            return Err(Refusal::LeaseChanged);
        }
        worker.lease = WorkerLease::Expired { at: self.now() };
        self.put_worker(worker);
        Ok(Outcome::Done)
    }

    pub(super) fn retire_worker(&mut self, id: WorkerId) -> Outcome {
        if let Some(mut worker) =
            self.worker(id).filter(|worker| !matches!(worker.lease, WorkerLease::Retired { .. })).cloned()
        {
            worker.lease = WorkerLease::Retired { at: self.now() };
            self.put_worker(worker);
        }
        Outcome::Done
    }

    pub(super) fn retire_incarnation(&mut self, retire: RetireIncarnation) -> CommandResult {
        match self.worker(retire.worker).map(|worker| worker.epoch) {
            Some(current) if current != retire.seen => Err(Refusal::StaleEpoch { current }),
            _ => Ok(self.retire_worker(retire.worker)),
        }
    }

    /// Checks that `owner` may be granted something new: its worker must not be draining.
    pub(super) fn check_not_draining(&self, owner: Owner) -> Result<(), Refusal> {
        if self.is_draining(owner) { Err(Refusal::WorkerDraining) } else { Ok(()) }
    }

    pub(super) fn is_draining(&self, owner: Owner) -> bool {
        self.worker(owner.worker).is_some_and(|worker| !worker.draining.is_no())
    }

    /// Checks that `owner` is live and may report what it holds.
    pub(super) fn check_live(&self, owner: Owner) -> Result<(), Refusal> {
        let worker = self.worker(owner.worker).ok_or(Refusal::UnknownWorker)?;
        if !worker.matches(owner) {
            return Err(Refusal::StaleIncarnation);
        }
        if worker.is_live() { Ok(()) } else { Err(Refusal::LeaseExpired) }
    }
}
