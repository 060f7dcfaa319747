//! What clients did and were told. Checkers read it; nothing here judges.

use std::io::Write;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use serde::Serialize;
use vocabulary::{Epoch, Owner, SessionId, WorkerId};

use crate::NemesisError;

/// Microseconds since the run began.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug, Serialize)]
#[serde(transparent)]
pub(crate) struct RunInstant(pub(crate) u64);

impl RunInstant {
    /// Seconds from `earlier` to here.
    pub(crate) fn since(self, earlier: RunInstant) -> f64 {
        self.0.saturating_sub(earlier.0) as f64 / 1e6
    }
}

/// A member as this program numbers them, from 1. A wiped node keeps its number here and gets a new id in the cluster.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(transparent)]
pub(crate) struct MemberSlot(pub(crate) u8);

/// What a client asked about a session.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum OwnershipRequest {
    /// Its ownership, while nobody live has it.
    Claim(Owner),
    /// To take its ownership back.
    Release {
        /// From whom.
        owner: Owner,
        /// The grant that the client saw.
        seen: Epoch,
    },
    /// To move it.
    Migrate {
        /// To whom.
        to: Owner,
        /// The epoch that the client saw.
        seen: Epoch,
    },
    /// Who has it, linearizably.
    Read,
}

/// Who has a session, since when.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct SessionHolder {
    /// Nobody, when it was given back.
    pub(crate) owner: Option<Owner>,
    /// When that was decided.
    pub(crate) epoch: Epoch,
}

/// What a client was told.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum OwnershipReply {
    /// Acknowledged: owned since this epoch.
    Granted(Epoch),
    /// Acknowledged: no longer owned by the one who gave it back.
    Released,
    /// The answer to a read.
    Found(SessionHolder),
    /// Refused by the ledger; nothing was changed.
    Refused,
    /// Not taken; nothing was changed.
    Unavailable,
    /// Sent, and nothing is known of it: it may happen at any later time.
    Unknown,
}

/// One request: it is not repeated, what comes after it is another one.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct ClientOperation {
    /// Who asked.
    pub(crate) client: u32,
    /// Where.
    pub(crate) seat: MemberSlot,
    /// About what.
    pub(crate) subject: SessionId,
    /// What.
    pub(crate) asked: OwnershipRequest,
    /// Just before the request was written.
    pub(crate) invoked: RunInstant,
    /// Just after its answer was read, or it was given up.
    pub(crate) completed: RunInstant,
    /// The answer.
    pub(crate) answer: OwnershipReply,
    /// The node's applied index that came with it.
    pub(crate) revision: Option<u64>,
}

impl ClientOperation {
    /// Whether it changes something.
    pub(crate) fn is_write(&self) -> bool {
        self.asked != OwnershipRequest::Read
    }

    /// Whether it is a write that was acknowledged.
    pub(crate) fn is_acknowledged(&self) -> bool {
        self.is_write() && matches!(self.answer, OwnershipReply::Granted(_) | OwnershipReply::Released)
    }
}

/// A worker's lease as a node showed it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct LeaseSighting {
    /// Whose lease.
    pub(crate) worker: WorkerId,
    /// When the lease was granted.
    pub(crate) granted: Epoch,
    /// Whether it is held.
    pub(crate) is_live: bool,
    /// The applied index of that view.
    pub(crate) revision: u64,
}

impl LeaseSighting {
    /// Whether the lease under which something was granted then has ended, by this.
    pub(crate) fn shows_ended(&self, granted: Epoch) -> bool {
        // In another generation indexes begin anew.
        let is_later = self.revision >= granted.index || self.granted.generation != granted.generation;
        self.granted > granted || !self.is_live && is_later
    }

    /// Whether it went on without an end up to `until`.
    pub(crate) fn shows_held(&self, granted: Epoch, until: Epoch) -> bool {
        let is_later = self.revision >= until.index && self.granted.generation == until.generation;
        self.is_live && self.granted <= granted && is_later
    }
}

/// Everything that was seen. Shared by all clients; pushing is all they do with it.
pub(crate) struct OperationHistory {
    began: Instant,
    records: Mutex<HistoryRecords>,
}

/// What a history holds.
#[derive(Clone, Default, Debug)]
pub(crate) struct HistoryRecords {
    /// Attempts, in the order in which they ended.
    pub(crate) operations: Vec<ClientOperation>,
    /// Leases, in the order in which they were seen.
    pub(crate) sightings: Vec<LeaseSighting>,
}

/// More than this is not kept: hours of load.
const MAX_OPERATIONS: usize = 20_000_000;

impl OperationHistory {
    /// Begins now.
    pub(crate) fn new() -> OperationHistory {
        OperationHistory { began: Instant::now(), records: Mutex::default() }
    }

    /// The present moment.
    pub(crate) fn now(&self) -> RunInstant {
        RunInstant(u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX))
    }

    /// Notes an attempt. False when there is no room, which a run must not pass over.
    pub(crate) fn record(&self, operation: ClientOperation) -> bool {
        let operations = &mut self.lock().operations;
        let fits = operations.len() < MAX_OPERATIONS;
        if fits {
            operations.push(operation);
        }
        fits
    }

    /// Notes a lease, unless it was seen like that last.
    pub(crate) fn record_lease(&self, sighting: LeaseSighting) {
        let sightings = &mut self.lock().sightings;
        let alike = |seen: &LeaseSighting| (seen.worker, seen.granted, seen.is_live);
        match sightings.iter_mut().rev().find(|seen| seen.worker == sighting.worker) {
            Some(last) if alike(last) == alike(&sighting) => last.revision = last.revision.max(sighting.revision),
            _ => sightings.push(sighting),
        }
    }

    /// Reads it without copying; clients wait meanwhile, so this is for moments without load, or short looks.
    pub(crate) fn read<T>(&self, look: impl FnOnce(&HistoryRecords) -> T) -> T {
        look(&self.lock())
    }

    /// What it holds now, for whoever looks at it for long while clients go on.
    pub(crate) fn snapshot(&self) -> HistoryRecords {
        self.lock().clone()
    }

    /// Writes every attempt, one JSON text a line.
    pub(crate) fn save(&self, path: &Path) -> Result<(), NemesisError> {
        let what = || format!("write {}", path.display());
        let file = std::fs::File::create(path).map_err(NemesisError::system(what()))?;
        let mut file = std::io::BufWriter::new(file);
        let kept = self.lock();
        for operation in &kept.operations {
            serde_json::to_writer(&mut file, operation).map_err(|error| NemesisError::system(what())(error.into()))?;
            file.write_all(b"\n").map_err(NemesisError::system(what()))?;
        }
        file.flush().map_err(NemesisError::system(what()))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HistoryRecords> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
