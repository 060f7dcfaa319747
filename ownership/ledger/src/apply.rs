//! Applies log entries to the ledger. Every change of the ledger starts here.

pub(crate) mod control;
mod owners;
mod seal;
mod sessions;
mod workers;

use vocabulary::{ClientId, ClientSerial, Epoch, LedgerTime, Micros, NodeId};

use crate::artifact::{Artifact, ParentPoint, Replica};
use crate::clients::{ClientRecord, OutcomeLimits, SerialStatus};
use crate::command::{Command, DropReplica, LedgerEntry, PrefixRef, ReplicateReadonly, Submission};
use crate::ledger::Ledger;
use crate::outcome::{Outcome, Refusal};

/// Maximum advance of the ledger's clock per entry.
pub const MAX_CLOCK_STEP: Micros = Micros(1_000_000);

/// Bytes of outcomes remembered per client. The usual number of step outcomes takes a tenth of it; only batches of
/// hundreds of commands come near it.
const MAX_OUTCOME_BYTES: u64 = 4 << 20;

/// Outcome of a command, or why nothing was changed.
type CommandResult = Result<Outcome, Refusal>;

impl Ledger {
    /// Applies the entry at `index` of the Raft log and returns one outcome per submission, in order.
    ///
    /// The clock is set to the entry's time, but never moves back, nor forward by more than a second. Indexes must
    /// increase.
    pub fn apply(&mut self, index: u64, entry: &LedgerEntry) -> Vec<Outcome> {
        assert!(index > self.records.applied || self.records.applied == 0, "entry {index} is applied twice");
        let clock = self.records.clock;
        self.changes.clear();
        self.records.applied = index;
        self.records.clock = entry.time.clamp(clock, clock.after(MAX_CLOCK_STEP));
        self.sweep();
        let mut epoch = Epoch { generation: self.records.generation, index, position: 0 };
        entry.submissions.iter().map(|submission| self.submit(&mut epoch, submission)).collect()
    }

    /// Records an entry without commands (a new term, a membership), so that every index is accounted for.
    pub fn apply_empty(&mut self, index: u64) {
        self.changes.clear();
        self.records.applied = self.records.applied.max(index);
    }

    /// Executes a command unless its serial was already seen.
    fn submit(&mut self, epoch: &mut Epoch, submission: &Submission) -> Outcome {
        let Submission { client, serial, command } = submission;
        if let Some(known) = self.records.clients.get(client) {
            match known.serial_status(*serial) {
                SerialStatus::Executed(outcome) => return outcome,
                SerialStatus::Forgotten => return Outcome::Forgotten,
                SerialStatus::Fresh => {}
            }
        }
        if let Command::OpenClient(node) = command {
            self.open_client(*epoch, (*client, *serial), *node);
        } else if !self.records.clients.contains_key(client) {
            return Outcome::Refused(Refusal::UnknownClient);
        }
        let outcome = match command {
            Command::Batch(commands) => self.batch(epoch, commands),
            single => self.execute(next_epoch(epoch), single),
        };
        // The release before feature levels bounded only the number of outcomes; a ledger at level 1 must decide the
        // same way.
        let bytes = if self.level() < 2 { u64::MAX } else { MAX_OUTCOME_BYTES };
        let keep = OutcomeLimits { max_outcomes: self.records.limits.outcomes, max_bytes: bytes };
        if let Some(client) = self.records.clients.get_mut(client) {
            client.wrote = *epoch;
            client.record_outcome(*serial, outcome.clone(), keep);
        }
        outcome
    }

    fn batch(&mut self, epoch: &mut Epoch, commands: &[Command]) -> Outcome {
        let nested = commands.iter().any(|command| matches!(command, Command::Batch(_) | Command::OpenClient(_)));
        if nested || commands.len() > self.records.limits.batch as usize {
            return Outcome::Refused(Refusal::InvalidBatch);
        }
        Outcome::Batch(commands.iter().map(|command| self.execute(next_epoch(epoch), command)).collect())
    }

    fn execute(&mut self, epoch: Epoch, command: &Command) -> Outcome {
        let (needed, current) = (command.level(), self.level());
        if needed > current {
            return Outcome::Refused(Refusal::FeatureLevelTooLow { needed, current });
        }
        let answer = match command {
            Command::ClaimOwner(claim) => self.claim_owner(epoch, *claim),
            Command::RenewLease(renewal) => Ok(self.renew_lease(renewal)),
            Command::Release(release) => self.release(epoch, *release),
            Command::ReplicateReadonly(copy) => self.replicate_readonly(*copy),
            Command::DropReplica(copy) => self.drop_replica(*copy),
            Command::Seal(seal) => self.seal(epoch, seal),
            Command::OpenSession(open) => self.open_session(epoch, open),
            Command::Advance(advance) => self.advance(*advance),
            Command::Fork(fork) => self.fork(epoch, *fork),
            Command::CloseSession(id) => {
                self.remove_session(*id);
                Ok(Outcome::Done)
            }
            Command::Migrate(migrate) => self.migrate(epoch, *migrate),
            Command::RegisterWorker(register) => self.register_worker(epoch, register),
            Command::RetireWorker(worker) => Ok(self.retire_worker(*worker)),
            Command::SetGroup(set) => self.set_group(*set),
            Command::Intent(intent) => self.set_intent(*intent),
            Command::ExpireLease(expire) => self.expire(*expire),
            Command::OpenClient(_) | Command::Barrier => Ok(Outcome::Done),
            Command::Batch(_) => Err(Refusal::InvalidBatch),
            Command::AdmitNode(admit) => self.admit_node(admit),
            Command::RetireNode(node) => self.retire_node(*node),
            Command::RaiseLevel(level) => self.raise_level(*level),
            Command::SetLimits(limits) => self.set_limits(limits),
            Command::Pin(pin) => self.pin(*pin),
            Command::Evict(artifact) => self.evict(*artifact),
            Command::DrainWorker(drain) => self.drain_worker(*drain),
            Command::SetQuota(set) => self.set_quota(set),
            Command::RetireLife(retire) => self.retire_incarnation(*retire),
        };
        answer.unwrap_or_else(Outcome::Refused)
    }

    /// Opens a client. If there are too many, the client that has been silent longest is closed.
    fn open_client(&mut self, epoch: Epoch, (client, serial): (ClientId, ClientSerial), node: NodeId) {
        if self.records.clients.contains_key(&client) {
            return;
        }
        if self.records.clients.len() >= self.records.limits.clients as usize {
            let silent = self.records.clients.iter().map(|(id, client)| (client.wrote, *id)).min();
            silent.map(|(_, id)| self.records.clients.remove(&id));
        }
        self.records.clients.insert(client, ClientRecord::new(node, epoch, serial));
    }

    /// Returns the artifact that keeps a prefix as a boundary.
    fn resolve_prefix(&self, prefix: PrefixRef) -> Result<Artifact, UnresolvedPrefix> {
        if let Some(artifact) = self.artifact_with_prefix(prefix.point.id, prefix.scope) {
            let exact =
                artifact.boundary_at_or_before(prefix.point.blocks).is_some_and(|kept| kept.point == prefix.point);
            return if exact { Ok(artifact) } else { Err(UnresolvedPrefix::Refused(Refusal::InvalidBlockRange)) };
        }
        let hint = prefix.extent.and_then(|id| self.artifact(id)).filter(|a| a.origin.scope() == prefix.scope);
        match hint.filter(|extent| extent.from() < prefix.point.blocks && prefix.point.blocks <= extent.end().blocks) {
            None => Err(UnresolvedPrefix::Refused(Refusal::UnknownPrefix)),
            Some(extent) => {
                let boundary = extent.boundary_at_or_before(prefix.point.blocks).map(|kept| kept.point);
                Err(UnresolvedPrefix::Merged(Outcome::Merged { extent: extent.id, kept: boundary }))
            }
        }
    }
}

/// Why a prefix could not be resolved to a boundary.
enum UnresolvedPrefix {
    /// The prefix lies inside an artifact, not at one of its boundaries.
    Merged(Outcome),
    /// The prefix is unknown, or contradicts what is sealed.
    Refused(Refusal),
}

impl From<UnresolvedPrefix> for CommandResult {
    fn from(unresolved: UnresolvedPrefix) -> Self {
        match unresolved {
            UnresolvedPrefix::Merged(outcome) => Ok(outcome),
            UnresolvedPrefix::Refused(refusal) => Err(refusal),
        }
    }
}

/// Returns the epoch of the next command in an entry.
fn next_epoch(epoch: &mut Epoch) -> Epoch {
    let current = *epoch;
    epoch.position += 1;
    current
}

impl Ledger {
    /// Records a read-only copy on every artifact on its path, up to where the copy reaches.
    fn replicate_readonly(&mut self, copy: ReplicateReadonly) -> CommandResult {
        self.check_live(copy.holder)?;
        self.check_not_draining(copy.holder)?;
        let artifact = match self.resolve_prefix(copy.place) {
            Ok(artifact) => artifact.id,
            Err(unresolved) => return unresolved.into(),
        };
        let expires = self.now().after(copy.ttl);
        for here in self.path(artifact, copy.place.point) {
            self.add_replica(here, Replica { holder: copy.holder, upto: here.at, expires });
        }
        Ok(Outcome::Done)
    }

    fn add_replica(&mut self, here: ParentPoint, mut replica: Replica) {
        let owned = |holder| move |artifact: &crate::Artifact| artifact.owner != Some(holder);
        let Some(mut artifact) = self.artifact(here.artifact).filter(owned(replica.holder)) else { return };
        if let Some(known) = artifact.replicas.iter().find(|known| known.holder == replica.holder) {
            replica.expires = replica.expires.max(known.expires);
            replica.upto = if known.upto.blocks > replica.upto.blocks { known.upto } else { replica.upto };
        }
        let now = self.now();
        artifact.replicas.retain(|known| known.holder != replica.holder && known.expires > now);
        if artifact.replicas.len() >= self.records.limits.replicas.max(1) as usize {
            let first = artifact.replicas.iter().map(|known| (known.expires, known.holder)).min();
            artifact.replicas.retain(|known| Some((known.expires, known.holder)) != first);
        }
        let place = artifact.replicas.partition_point(|known| known.holder < replica.holder);
        artifact.replicas.insert(place, replica);
        artifact.touched = now;
        self.put_artifact(artifact);
    }

    fn drop_replica(&mut self, copy: DropReplica) -> CommandResult {
        let artifact = match self.resolve_prefix(copy.place) {
            Ok(artifact) => artifact.id,
            Err(unresolved) => return unresolved.into(),
        };
        for here in self.path(artifact, copy.place.point) {
            let found = self.artifact(here.artifact).filter(|a| a.replicas.iter().any(|r| r.holder == copy.holder));
            if let Some(mut artifact) = found {
                artifact.replicas.retain(|known| known.holder != copy.holder);
                self.put_artifact(artifact);
            }
        }
        Ok(Outcome::Done)
    }
}

impl Ledger {
    /// Forgets expired intents and copies, and sessions and unreferenced artifacts that were idle too long.
    fn sweep(&mut self) {
        let mut budget = self.records.limits.sweep;
        while budget > 0 && self.sweep_one() {
            budget -= 1;
        }
    }

    /// Forgets one record; returns false if there is none to forget.
    fn sweep_one(&mut self) -> bool {
        let now = self.now();
        let limits = self.records.limits;
        if let Some((_, session)) = self.index.intents.get_min().filter(|(end, _)| *end <= now).copied() {
            let intents = self.intents(session).copied().collect();
            self.put_intents(session, intents);
        } else if let Some((_, id, holder)) = self.index.replicas.get_min().filter(|(end, ..)| *end <= now).copied() {
            if let Some(mut artifact) = self.artifact(id) {
                artifact.replicas.retain(|copy| copy.holder != holder);
                self.put_artifact(artifact);
            }
        } else if self
            .index
            .sessions
            .first()
            .is_some_and(|([touched, ..], ())| is_idle(LedgerTime(*touched), limits.session_idle, now))
        {
            self.close_coldest_session();
        } else if self
            .index
            .idle_artifacts
            .get_min()
            .is_some_and(|(touched, _)| is_idle(*touched, limits.artifact_idle, now))
        {
            self.evict_coldest_artifact();
        } else {
            return false;
        }
        true
    }
}

fn is_idle(touched_at: LedgerTime, after: Micros, now: LedgerTime) -> bool {
    touched_at.after(after) <= now
}
