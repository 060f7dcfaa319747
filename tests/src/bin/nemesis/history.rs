//! History of client requests and replies. Only records; the checkers judge it.

use std::io::Write;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use serde::Serialize;
use vocabulary::{ArtifactId, Epoch, Owner, SessionId, WorkerId};

use crate::NemesisError;

/// Microseconds since the start of the run.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug, Serialize)]
#[serde(transparent)]
pub(crate) struct RunInstant(pub(crate) u64);

impl RunInstant {
    /// Seconds from `earlier` to this moment.
    pub(crate) fn since(self, earlier: RunInstant) -> f64 {
        self.0.saturating_sub(earlier.0) as f64 / 1e6
    }
}

/// Number of a member in this program, from 1. A wiped node keeps its slot and gets a new id in the cluster.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(transparent)]
pub(crate) struct MemberSlot(pub(crate) u8);

/// A client's request about a session.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum OwnershipRequest {
    /// Claim ownership while no live worker owns the session.
    Claim(Owner),
    /// Release ownership.
    Release {
        /// Current owner.
        owner: Owner,
        /// Epoch of the grant that the client saw.
        seen: Epoch,
    },
    /// Migrate the session.
    Migrate {
        /// New owner.
        to: Owner,
        /// Epoch that the client saw.
        seen: Epoch,
    },
    /// Read the owner, linearizably.
    Read,
}

/// Owner of a session, and since which epoch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct SessionOwner {
    /// `None` if the session was released.
    pub(crate) owner: Option<Owner>,
    /// Epoch of that decision.
    pub(crate) epoch: Epoch,
}

/// Reply to a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum OwnershipReply {
    /// Acknowledged: owned since this epoch.
    Granted(Epoch),
    /// Acknowledged: released.
    Released,
    /// Result of a read.
    Found(SessionOwner),
    /// Refused by the ledger; nothing changed.
    Refused,
    /// Not accepted by the node; nothing changed.
    Unavailable,
    /// Sent, outcome unknown: it may take effect at any later time.
    Unknown,
}

/// One request and its reply. It is never repeated; a retry is a new operation.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct ClientOperation {
    /// Client that sent it.
    pub(crate) client: u32,
    /// Node that it was sent to.
    pub(crate) seat: MemberSlot,
    /// Session it is about.
    pub(crate) subject: SessionId,
    /// The request.
    pub(crate) asked: OwnershipRequest,
    /// Just before the request was written.
    pub(crate) invoked: RunInstant,
    /// Just after the reply was read, or the request was given up.
    pub(crate) completed: RunInstant,
    /// The reply.
    pub(crate) answer: OwnershipReply,
    /// The node's applied index in the reply.
    pub(crate) revision: Option<u64>,
}

impl ClientOperation {
    /// Returns whether this is a write.
    pub(crate) fn is_write(&self) -> bool {
        self.asked != OwnershipRequest::Read
    }

    /// Returns whether this is an acknowledged write.
    pub(crate) fn is_acknowledged(&self) -> bool {
        self.is_write() && matches!(self.answer, OwnershipReply::Granted(_) | OwnershipReply::Released)
    }
}

/// A value in the ledger that operators set without a fence.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Register {
    /// Quota of the tenant with this number.
    Quota(u8),
    /// Whether an artifact is pinned: 1 or 0.
    Pin(ArtifactId),
    /// Group of an artifact.
    Group(ArtifactId),
}

/// Value of a register; `None` is no quota and no group.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(transparent)]
pub(crate) struct RegisterValue(pub(crate) Option<u128>);

/// A client's request about a register.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum RegisterRequest {
    /// Set the value.
    Write(RegisterValue),
    /// Read the value, linearizably.
    Read,
}

/// Reply about a register.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum RegisterReply {
    /// Acknowledged write.
    Written,
    /// Result of a read.
    Found(RegisterValue),
    /// Refused by the ledger; nothing changed.
    Refused,
    /// Not accepted by the node; nothing changed.
    Unavailable,
    /// Sent, outcome unknown: it may take effect at any later time.
    Unknown,
}

/// One request about a register and its reply. It is never repeated; a retry is a new operation.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct RegisterOperation {
    /// Client that sent it.
    pub(crate) client: u32,
    /// Node that it was sent to.
    pub(crate) seat: MemberSlot,
    /// Register it is about.
    pub(crate) register: Register,
    /// The request.
    pub(crate) asked: RegisterRequest,
    /// Just before the request was written.
    pub(crate) invoked: RunInstant,
    /// Just after the reply was read, or the request was given up.
    pub(crate) completed: RunInstant,
    /// The reply.
    pub(crate) answer: RegisterReply,
}

/// A worker's lease as a node reported it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct LeaseSighting {
    /// Worker that holds the lease.
    pub(crate) worker: WorkerId,
    /// Epoch at which the lease was granted.
    pub(crate) granted: Epoch,
    /// Whether the lease is held.
    pub(crate) is_live: bool,
    /// Applied index of the report.
    pub(crate) revision: u64,
}

impl LeaseSighting {
    /// Returns whether this shows that the lease valid at epoch `granted` has ended.
    pub(crate) fn shows_ended(&self, granted: Epoch) -> bool {
        // In another generation, indexes start anew.
        let is_later = self.revision >= granted.index || self.granted.generation != granted.generation;
        self.granted > granted || !self.is_live && is_later
    }

    /// Returns whether this shows that the lease was held without interruption up to `until`.
    pub(crate) fn shows_held(&self, granted: Epoch, until: Epoch) -> bool {
        let is_later = self.revision >= until.index && self.granted.generation == until.generation;
        self.is_live && self.granted <= granted && is_later
    }
}

/// Record of a run, shared by all clients, which only append to it.
pub(crate) struct OperationHistory {
    began: Instant,
    records: Mutex<HistoryRecords>,
}

/// Contents of a history.
#[derive(Clone, Default, Debug)]
pub(crate) struct HistoryRecords {
    /// Operations, in order of completion.
    pub(crate) operations: Vec<ClientOperation>,
    /// Operations on registers, in order of completion.
    pub(crate) register_operations: Vec<RegisterOperation>,
    /// Leases, in order of observation.
    pub(crate) sightings: Vec<LeaseSighting>,
}

/// Maximum number of operations kept: hours of load.
const MAX_OPERATIONS: usize = 20_000_000;

impl OperationHistory {
    /// Starts a history now.
    pub(crate) fn new() -> OperationHistory {
        OperationHistory { began: Instant::now(), records: Mutex::default() }
    }

    /// Current moment.
    pub(crate) fn now(&self) -> RunInstant {
        RunInstant(u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX))
    }

    /// Records an operation. Returns `false` if there is no room, which a run must not ignore.
    pub(crate) fn record(&self, operation: ClientOperation) -> bool {
        push_bounded(&mut self.lock().operations, operation)
    }

    /// Records an operation on a register. Returns `false` if there is no room, which a run must not ignore.
    pub(crate) fn record_register(&self, operation: RegisterOperation) -> bool {
        push_bounded(&mut self.lock().register_operations, operation)
    }

    /// Records a lease, unless its last sighting was equal.
    pub(crate) fn record_lease(&self, sighting: LeaseSighting) {
        let sightings = &mut self.lock().sightings;
        let alike = |seen: &LeaseSighting| (seen.worker, seen.granted, seen.is_live);
        match sightings.iter_mut().rev().find(|seen| seen.worker == sighting.worker) {
            Some(last) if alike(last) == alike(&sighting) => last.revision = last.revision.max(sighting.revision),
            _ => sightings.push(sighting),
        }
    }

    /// Reads without copying. Clients are blocked meanwhile, so this is for times without load, or for short reads.
    pub(crate) fn read<T>(&self, look: impl FnOnce(&HistoryRecords) -> T) -> T {
        look(&self.lock())
    }

    /// Copies the contents for long checks while clients continue.
    pub(crate) fn snapshot(&self) -> HistoryRecords {
        self.lock().clone()
    }

    /// Writes every operation as one line of JSON.
    pub(crate) fn save(&self, path: &Path) -> Result<(), NemesisError> {
        let what = || format!("write {}", path.display());
        let file = std::fs::File::create(path).map_err(NemesisError::system(what()))?;
        let mut file = std::io::BufWriter::new(file);
        let kept = self.lock();
        for operation in &kept.operations {
            write_line(&mut file, operation).map_err(NemesisError::system(what()))?;
        }
        for operation in &kept.register_operations {
            write_line(&mut file, operation).map_err(NemesisError::system(what()))?;
        }
        file.flush().map_err(NemesisError::system(what()))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HistoryRecords> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn push_bounded<T>(operations: &mut Vec<T>, operation: T) -> bool {
    let fits = operations.len() < MAX_OPERATIONS;
    if fits {
        operations.push(operation);
    }
    fits
}

fn write_line(file: &mut impl Write, operation: &impl Serialize) -> std::io::Result<()> {
    serde_json::to_writer(&mut *file, operation)?;
    file.write_all(b"\n")
}
