//! What the ledger remembers of workers and sessions.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vocabulary::{
    ArtifactId, DpRank, Epoch, Incarnation, LedgerTime, ModelId, NodeId, Owner, PrefixId, SessionId, TenantId,
    WorkerId, WorkerRole,
};

use crate::PrefixPoint;
use crate::artifact::Scope;
use crate::control::DrainFlag;

/// Whether a worker computes or only keeps.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug, Default)]
pub enum WorkerKind {
    /// An engine.
    #[default]
    Engine,
    /// A store that engines load from; the last resort after replicas at engines.
    Store,
}

/// What a worker says of itself.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct WorkerSpec {
    /// Its base URL.
    pub endpoint: Arc<str>,
    /// What it is for.
    pub role: WorkerRole,
    /// Engine or store.
    pub kind: WorkerKind,
    /// Models and adapters it serves.
    pub models: Arc<[ModelId]>,
    /// Data-parallel ranks, at least 1.
    pub ranks: u16,
}

/// Whether some router reached this life of a worker lately.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub enum Lease {
    /// Yes; it may be ended once the ledger's clock reaches `until`.
    Held {
        /// The deadline.
        until: LedgerTime,
    },
    /// Its deadline passed.
    Expired {
        /// When that was applied.
        at: LedgerTime,
    },
    /// An operator took the worker out.
    Retired {
        /// When.
        at: LedgerTime,
    },
}

/// An engine endpoint and the life of it that is current.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Worker {
    /// Its id.
    pub id: WorkerId,
    /// What it says of itself.
    pub spec: WorkerSpec,
    /// Which life.
    pub incarnation: Incarnation,
    /// When this life was granted its lease.
    pub epoch: Epoch,
    /// The lease.
    pub lease: Lease,
    /// Whether it is being emptied.
    #[serde(default, skip_serializing_if = "DrainFlag::is_no")]
    pub draining: DrainFlag,
}

impl Worker {
    /// Whether the lease is held.
    pub fn is_live(&self) -> bool {
        matches!(self.lease, Lease::Held { .. })
    }

    /// Whether `owner` is a rank of this life.
    pub fn matches(&self, owner: Owner) -> bool {
        self.id == owner.worker && self.incarnation == owner.incarnation && owner.rank < DpRank(self.spec.ranks)
    }
}

/// One end of a session: where its next step may go on.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Head {
    /// The prefix.
    pub point: PrefixPoint,
    /// The extent that covers it.
    pub artifact: ArtifactId,
    /// In which scope it is found by prefix.
    pub scope: Scope,
    /// When it last moved or was confirmed.
    pub touched: LedgerTime,
}

/// A user's conversation. No head is an ancestor of another.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Session {
    /// Its id.
    pub id: SessionId,
    /// Whose it is.
    pub tenant: TenantId,
    /// Which model it talks to.
    pub model: ModelId,
    /// The session that it was forked from.
    pub parent: Option<SessionId>,
    /// Its ends, the one that moved last at the end.
    pub heads: Vec<Head>,
    /// Who decodes it; none when nobody claimed it yet or the owner gave it back.
    pub owner: Option<Owner>,
    /// When the owner was granted, or the session opened.
    pub epoch: Epoch,
    /// When it was opened.
    pub opened: LedgerTime,
    /// When it was last written.
    pub touched: LedgerTime,
}

impl Session {
    /// The head that moved last.
    pub fn head(&self) -> Option<Head> {
        self.heads.last().copied()
    }

    /// Its key among all sessions in the order of their last writes.
    pub(crate) fn touch_key(&self) -> [u64; 3] {
        [self.touched.0, (self.id.0 >> 64) as u64, self.id.0 as u64]
    }
}

/// Advice to the other routers: a step of this session is on its way. It owns nothing.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Intent {
    /// The head that the step extends; the chain's root for a first step.
    pub base: PrefixId,
    /// Where it was sent.
    pub worker: Owner,
    /// The router that sent it.
    pub router: NodeId,
    /// When it is forgotten.
    pub expires: LedgerTime,
}
