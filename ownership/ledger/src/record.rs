//! Records of workers and sessions.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vocabulary::{
    ArtifactId, DpRank, Epoch, Incarnation, LedgerTime, ModelId, NodeId, Owner, PrefixId, SessionId, TenantId,
    WorkerId, WorkerRole,
};

use crate::PrefixPoint;
use crate::artifact::Scope;
use crate::control::DrainFlag;

/// Whether a worker computes or only stores KV.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug, Default)]
pub enum WorkerKind {
    /// Inference engine.
    #[default]
    Engine,
    /// Store that engines load from; used only if no engine has a replica.
    Store,
}

/// Properties that a worker reports.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct WorkerSpec {
    /// Base URL.
    pub endpoint: Arc<str>,
    /// Role in disaggregated serving.
    pub role: WorkerRole,
    /// Engine or store.
    pub kind: WorkerKind,
    /// Models and adapters that it serves.
    pub models: Arc<[ModelId]>,
    /// Data-parallel ranks, at least 1.
    pub ranks: u16,
}

/// State of a worker's lease: whether some router reached this incarnation recently.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub enum WorkerLease {
    /// The lease is held; it may be expired once the ledger's clock reaches `until`.
    Held {
        /// Deadline.
        until: LedgerTime,
    },
    /// The deadline passed.
    Expired {
        /// When the expiry was applied.
        at: LedgerTime,
    },
    /// An operator retired the worker.
    Retired {
        /// When it was retired.
        at: LedgerTime,
    },
}

/// An engine endpoint with its current incarnation.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Worker {
    /// Id of the worker.
    pub id: WorkerId,
    /// Properties that it reports.
    pub spec: WorkerSpec,
    /// Current incarnation.
    pub incarnation: Incarnation,
    /// When this incarnation was granted its lease.
    pub epoch: Epoch,
    /// Lease of this incarnation.
    pub lease: WorkerLease,
    /// Whether it is draining.
    #[serde(default, skip_serializing_if = "DrainFlag::is_no")]
    pub draining: DrainFlag,
}

impl Worker {
    /// Returns whether this incarnation holds a lease that has neither expired nor been retired.
    pub fn is_live(&self) -> bool {
        matches!(self.lease, WorkerLease::Held { .. })
    }

    /// Returns whether `owner` names this incarnation and one of its ranks.
    pub fn matches(&self, owner: Owner) -> bool {
        self.id == owner.worker && self.incarnation == owner.incarnation && owner.rank < DpRank(self.spec.ranks)
    }
}

/// Head of a session: a prefix that its next step may extend.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct SessionHead {
    /// Prefix.
    pub point: PrefixPoint,
    /// Artifact that contains the prefix.
    pub artifact: ArtifactId,
    /// Scope in which the prefix can be looked up.
    pub scope: Scope,
    /// When the head last moved or was confirmed.
    pub touched: LedgerTime,
}

/// A user's conversation. No head is an ancestor of another.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Session {
    /// Id of the session.
    pub id: SessionId,
    /// Tenant.
    pub tenant: TenantId,
    /// Model.
    pub model: ModelId,
    /// Session that it was forked from.
    pub parent: Option<SessionId>,
    /// Heads; the one that moved last is at the end.
    pub heads: Vec<SessionHead>,
    /// Owner of its decoding; `None` if nobody claimed it yet or the owner released it.
    pub owner: Option<Owner>,
    /// When the owner was granted, or the session was opened.
    pub epoch: Epoch,
    /// When it was opened.
    pub opened: LedgerTime,
    /// When it was last written.
    pub touched: LedgerTime,
}

impl Session {
    /// Returns the head that moved last.
    pub fn head(&self) -> Option<SessionHead> {
        self.heads.last().copied()
    }

    /// Returns the session's key in the index by last write.
    pub(crate) fn touch_key(&self) -> [u64; 3] {
        [self.touched.0, (self.id.0 >> 64) as u64, self.id.0 as u64]
    }
}

/// Advisory notice to the other routers that a step of this session is in flight. Grants no ownership.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Intent {
    /// Head that the step extends; the chain's root for a first step.
    pub base: PrefixId,
    /// Rank to which it was sent.
    pub worker: Owner,
    /// Router that sent it.
    pub router: NodeId,
    /// When the intent is forgotten.
    pub expires: LedgerTime,
}
