//! Commands of the ledger. Every command is idempotent and carries the state that it was decided on.

use serde::{Deserialize, Serialize};
use vocabulary::{
    ArtifactGroupId, ArtifactId, ClientId, ClientSerial, Epoch, Incarnation, LedgerTime, Micros, ModelId, NodeId,
    Owner, PrefixId, SessionId, TenantId, WorkerId,
};

use crate::artifact::{ChainDescriptor, Scope};
use crate::control::{AdmitNode, DrainWorker, PinArtifact, RetireIncarnation, SetQuota};
use crate::limits::LedgerLimits;
use crate::record::WorkerSpec;
use crate::{ChainSegment, PrefixPoint};

/// Contents of one entry of the Raft log: commands of several clients, and the leader's clock.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct LedgerEntry {
    /// Ledger time that the leader proposes; `apply` clamps it.
    pub time: LedgerTime,
    /// The commands, in order.
    pub submissions: Vec<Submission>,
}

impl LedgerEntry {
    /// Returns the feature level that a release must support to read and execute this entry.
    pub fn required_level(&self) -> u32 {
        self.submissions.iter().map(|submission| submission.command.required_level()).max().unwrap_or(1)
    }
}

/// One command of one client.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Submission {
    /// Client: one boot of one node.
    pub client: ClientId,
    /// Serial of the command; a repeated serial returns the first outcome.
    pub serial: ClientSerial,
    /// Command to execute.
    pub command: Command,
}

/// A session or an artifact, for commands that accept either.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub enum OwnershipSubject {
    /// Decode ownership of a session.
    Session(SessionId),
    /// An artifact.
    Artifact(ArtifactId),
}

/// A change to the ledger.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Command {
    /// Claims ownership of something that has no live owner.
    ClaimOwner(ClaimOwner),
    /// Renews the leases of workers that some router reached.
    RenewLease(RenewLease),
    /// Releases ownership.
    Release(ReleaseOwner),
    /// Records that a worker holds a read-only copy of a prefix.
    ReplicateReadonly(ReplicateReadonly),
    /// Records that a worker no longer holds its copy.
    DropReplica(DropReplica),
    /// Seals blocks, which makes them immutable.
    Seal(SealBlocks),
    /// Opens a session.
    OpenSession(OpenSession),
    /// Advances a session's head.
    Advance(AdvanceHead),
    /// Opens a new session at a prefix of another one.
    Fork(ForkSession),
    /// Closes a session.
    CloseSession(SessionId),
    /// Migrates a session's ownership to a worker that has its blocks.
    Migrate(MigrateSession),
    /// Registers an incarnation of a worker, or confirms it.
    RegisterWorker(RegisterWorker),
    /// Retires a worker unconditionally, even if it was granted a new lease since the operator looked.
    RetireWorker(WorkerId),
    /// Assigns an artifact to a group, or removes it from its group.
    SetGroup(SetGroup),
    /// Announces that a step was dispatched, or withdraws the announcement.
    Intent(SetIntent),
    /// Expires a lease. Keeps its earlier name in the log and in metrics.
    #[serde(rename = "Expire")]
    #[strum(serialize = "expire")]
    ExpireLease(ExpireLease),
    /// Opens a client for one boot of a node.
    OpenClient(NodeId),
    /// Executes several commands, with one outcome each. Neither atomic nor nested.
    Batch(Vec<Command>),
    /// Admits a node to the cluster.
    AdmitNode(AdmitNode),
    /// Retires a node from the cluster for good.
    RetireNode(NodeId),
    /// Raises the cluster's feature level, once every member supports it.
    RaiseLevel(u32),
    /// Widens the limits of the tables.
    SetLimits(Box<LedgerLimits>),
    /// Pins or unpins an artifact.
    Pin(PinArtifact),
    /// Evicts an artifact that nothing references.
    Evict(ArtifactId),
    /// Starts or stops draining a worker.
    DrainWorker(DrainWorker),
    /// Sets or removes the quota of a tenant.
    SetQuota(SetQuota),
    /// Retires an incarnation of a worker, unless it was granted anew since the operator looked.
    RetireLife(RetireIncarnation),
    /// Changes nothing. Its answer proves that a quorum accepts writes and that everything before it is applied.
    Barrier,
}

impl Command {
    /// Returns the name used in logs and metrics.
    pub fn name(&self) -> &'static str {
        self.into()
    }

    /// Returns the feature level that the ledger must have for this command; below it the command is refused.
    /// `RaiseLevel` itself needs none.
    pub fn level(&self) -> u32 {
        match self {
            Command::AdmitNode(_)
            | Command::RetireNode(_)
            | Command::SetLimits(_)
            | Command::Pin(_)
            | Command::Evict(_)
            | Command::DrainWorker(_)
            | Command::SetQuota(_)
            | Command::RetireLife(_) => 2,
            Command::Barrier => 3,
            Command::Batch(commands) => commands.iter().map(Command::level).max().unwrap_or(1),
            _ => 1,
        }
    }

    /// Returns the feature level that a release must support to read and execute this command. A release that supports
    /// less must stop and must not skip it.
    pub fn required_level(&self) -> u32 {
        match self {
            Command::RaiseLevel(level) => (*level).max(2),
            Command::Batch(commands) => commands.iter().map(Command::required_level).max().unwrap_or(1),
            other => other.level(),
        }
    }
}

/// Claims ownership. Refused while another owner is live.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct ClaimOwner {
    /// What is claimed.
    pub subject: OwnershipSubject,
    /// Claiming rank.
    pub owner: Owner,
}

/// Renews leases: one command per tick for all workers.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct RenewLease {
    /// Incarnations that were reached.
    pub alive: Vec<(WorkerId, Incarnation)>,
    /// Lease duration, from this entry's time on.
    pub ttl: Micros,
}

/// Releases ownership. Does nothing unless `owner` still owns the subject since `seen`.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct ReleaseOwner {
    /// What is released.
    pub subject: OwnershipSubject,
    /// Releasing rank.
    pub owner: Owner,
    /// Grant that is released.
    pub seen: Epoch,
}

/// Reference to a prefix by its id, in whatever artifact it lies.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct PrefixRef {
    /// Tenant and format.
    pub scope: Scope,
    /// Prefix.
    pub point: PrefixPoint,
    /// Artifact in which the writer saw the prefix, used if its boundary is no longer kept.
    pub extent: Option<ArtifactId>,
}

/// Records a read-only copy on every artifact from the root to `place`.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct ReplicateReadonly {
    /// Deepest prefix that was copied.
    pub place: PrefixRef,
    /// Rank that holds the copy.
    pub holder: Owner,
    /// How long the record is valid.
    pub ttl: Micros,
}

/// Removes a read-only copy from every artifact from the root to `place`.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct DropReplica {
    /// Deepest prefix that was copied.
    pub place: PrefixRef,
    /// Rank that held the copy.
    pub holder: Owner,
}

/// Seals blocks that `owner` holds. `owner` also holds the whole prefix before them, but those blocks keep their
/// owners.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct SealBlocks {
    /// Session whose step computed the blocks, if any. An artifact that only this session references may be extended.
    pub session: Option<SessionId>,
    /// Tenant, model, root and block spec of its chain.
    pub origin: ChainDescriptor,
    /// Blocks to seal.
    pub run: ChainSegment,
    /// Artifact in which the writer saw the base.
    pub extent: Option<ArtifactId>,
    /// Rank that holds the blocks.
    pub owner: Owner,
}

/// Opens a session. Does nothing if it is open.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct OpenSession {
    /// Id of the session.
    pub session: SessionId,
    /// Tenant.
    pub tenant: TenantId,
    /// Model.
    pub model: ModelId,
    /// Session that it was forked from.
    pub parent: Option<SessionId>,
}

/// Advances a session's head. Decided by chain: a descendant of a head fast-forwards it, a head or an ancestor of one
/// changes nothing, anything else adds a head.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct AdvanceHead {
    /// Session.
    pub session: SessionId,
    /// Sealed prefix that the session reached.
    pub head: PrefixRef,
    /// Head whose history the client rewrote; it is removed.
    pub replaces: Option<PrefixId>,
    /// Head that the step extended and the router that ran the step; this intent is withdrawn.
    pub intent: Option<(PrefixId, NodeId)>,
}

/// Opens `child` with its head at a sealed prefix of `parent`.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct ForkSession {
    /// Existing session.
    pub parent: SessionId,
    /// New session.
    pub child: SessionId,
    /// Prefix at which the child forks.
    pub at: PrefixRef,
}

/// Moves the session, and the artifacts up to `head` that only it references.
///
/// Refused if the session has a live owner that was granted it after `seen`. If there is no live owner, it acts as a
/// claim.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct MigrateSession {
    /// Session.
    pub session: SessionId,
    /// Rank that has the blocks now.
    pub to: Owner,
    /// Head whose blocks are there; without one, only the decode ownership moves.
    pub head: Option<PrefixId>,
    /// Epoch of the session on which this was decided.
    pub seen: Epoch,
}

/// Registers an incarnation of a worker, so that it can own sessions and holds a lease. Registering the same process
/// twice returns the same outcome.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct RegisterWorker {
    /// Id of the worker.
    pub worker: WorkerId,
    /// Incarnation.
    pub incarnation: Incarnation,
    /// Properties that the worker reports.
    pub spec: WorkerSpec,
    /// Duration of the first lease.
    pub ttl: Micros,
}

/// Assigns an artifact to a group. Groups serve operators and eviction; they affect nothing else.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct SetGroup {
    /// Artifact.
    pub artifact: ArtifactId,
    /// Group; `None` removes the artifact from its group.
    pub group: Option<ArtifactGroupId>,
}

/// Announces or withdraws the step that `router` runs on `base`.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct SetIntent {
    /// Session.
    pub session: SessionId,
    /// Head that the step extends.
    pub base: PrefixId,
    /// Router that dispatched the step.
    pub router: NodeId,
    /// Destination and validity of the announcement; `None` withdraws it.
    pub step: Option<(Owner, Micros)>,
}

/// Expires a lease. Applies only while the lease is the one that was seen and its deadline has passed.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct ExpireLease {
    /// Worker whose lease it is.
    pub worker: WorkerId,
    /// Grant that was seen.
    pub epoch: Epoch,
    /// Deadline that was seen.
    pub deadline: LedgerTime,
}
