//! What can be asked of the ledger. Every command is idempotent and carries what it was decided on.

use serde::{Deserialize, Serialize};
use vocabulary::{
    ArtifactId, ClientId, ClientSerial, Epoch, GroupId, Incarnation, LedgerTime, Micros, ModelId, NodeId, Owner,
    PrefixId, SessionId, TenantId, WorkerId,
};

use crate::artifact::{KvOrigin, Scope};
use crate::control::{AdmitNode, DrainWorker, PinArtifact, RetireIncarnation, SetQuota};
use crate::limits::LedgerLimits;
use crate::record::WorkerSpec;
use crate::{ChainSegment, PrefixPoint};

/// What lies in one slot of the Raft log: commands of several clients, and the leader's clock.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct LedgerEntry {
    /// The ledger clock that the leader proposes; `apply` takes it back into its bounds.
    pub time: LedgerTime,
    /// The commands, in order.
    pub submissions: Vec<Submission>,
}

impl LedgerEntry {
    /// The feature level that a binary must know to read and execute this.
    pub fn required_level(&self) -> u32 {
        self.submissions.iter().map(|submission| submission.command.required_level()).max().unwrap_or(1)
    }
}

/// One command of one client.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Submission {
    /// Who asks: one boot of one node.
    pub client: ClientId,
    /// Its number; a repeated one returns the first outcome.
    pub serial: ClientSerial,
    /// What is asked.
    pub command: Command,
}

/// A session or an extent, where a command may name either.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub enum OwnershipSubject {
    /// A session's decode ownership.
    Session(SessionId),
    /// An extent.
    Artifact(ArtifactId),
}

/// A change to the ledger.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Command {
    /// Take ownership of what nobody live owns.
    ClaimOwner(ClaimOwner),
    /// Some router reached these workers.
    RenewLease(RenewLease),
    /// Give ownership back.
    Release(ReleaseOwner),
    /// A worker holds a read-only copy of a prefix.
    ReplicateReadonly(ReplicateReadonly),
    /// A worker no longer holds its copy.
    DropReplica(DropReplica),
    /// Blocks became immutable.
    Seal(SealBlocks),
    /// A conversation begins.
    OpenSession(OpenSession),
    /// A session's head moves.
    Advance(AdvanceHead),
    /// A new session begins at a prefix of another.
    Fork(ForkSession),
    /// A conversation ended.
    CloseSession(SessionId),
    /// A session's ownership moves to a worker that has the blocks.
    Migrate(MigrateSession),
    /// A life of a worker begins, or is confirmed.
    RegisterWorker(RegisterWorker),
    /// A worker is taken out, whatever it was granted since somebody looked.
    RetireWorker(WorkerId),
    /// An extent is put into a group, or out of any.
    SetGroup(SetGroup),
    /// A step was dispatched, or will not come.
    Intent(SetIntent),
    /// A lease ran out.
    Expire(ExpireLease),
    /// A boot of a node begins to write.
    OpenClient(NodeId),
    /// Several at once; one outcome each, not atomic, not nested.
    Batch(Vec<Command>),
    /// A node joins the cluster.
    AdmitNode(AdmitNode),
    /// A node is taken out of the cluster for good.
    RetireNode(NodeId),
    /// The cluster's feature level rises, once every member knows it.
    RaiseLevel(u32),
    /// The tables' bounds widen.
    SetLimits(Box<LedgerLimits>),
    /// An extent is kept, or no longer.
    Pin(PinArtifact),
    /// An extent that nothing references is forgotten.
    Evict(ArtifactId),
    /// A worker is emptied, or no longer.
    DrainWorker(DrainWorker),
    /// A tenant's entries are bounded, or no longer.
    SetQuota(SetQuota),
    /// A life of a worker is taken out, unless another grant was made since.
    RetireLife(RetireIncarnation),
    /// Nothing changes. Whoever is answered knows that a quorum writes, and everything before is applied.
    Barrier,
}

impl Command {
    /// The word for logs and metrics.
    pub fn name(&self) -> &'static str {
        self.into()
    }

    /// The feature level that the ledger must have for this; below it the command is refused. To raise the level takes
    /// none.
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

    /// The feature level that a binary must know to read and execute this: whoever knows less must stop, not skip it.
    pub fn required_level(&self) -> u32 {
        match self {
            Command::RaiseLevel(level) => (*level).max(2),
            Command::Batch(commands) => commands.iter().map(Command::required_level).max().unwrap_or(1),
            other => other.level(),
        }
    }
}

/// Refused while another owner is live.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct ClaimOwner {
    /// What is claimed.
    pub subject: OwnershipSubject,
    /// By whom.
    pub owner: Owner,
}

/// One for all workers, once a tick.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct RenewLease {
    /// The lives that were reached.
    pub alive: Vec<(WorkerId, Incarnation)>,
    /// For how long from this entry's time on.
    pub ttl: Micros,
}

/// Does nothing unless `owner` still owns it since `seen`.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct ReleaseOwner {
    /// What is given back.
    pub subject: OwnershipSubject,
    /// By whom.
    pub owner: Owner,
    /// The grant that is given back.
    pub seen: Epoch,
}

/// A prefix by its name, wherever in whatever extent it lies.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct PrefixRef {
    /// Tenant and format.
    pub scope: Scope,
    /// The prefix.
    pub point: PrefixPoint,
    /// The extent in which the writer saw it, in case that its boundary is no longer kept.
    pub extent: Option<ArtifactId>,
}

/// Recorded on every extent from the root to the place.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct ReplicateReadonly {
    /// The deepest prefix that was copied.
    pub place: PrefixRef,
    /// Who has the copy.
    pub holder: Owner,
    /// For how long it is believed.
    pub ttl: Micros,
}

/// Forgets the copy on every extent from the root to the place.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct DropReplica {
    /// The deepest prefix that was copied.
    pub place: PrefixRef,
    /// Who had it.
    pub holder: Owner,
}

/// The run's blocks lie at `owner`; its whole prefix does too, but keeps the owners it has.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct SealBlocks {
    /// The session whose step computed them, if any: its extents may be joined.
    pub session: Option<SessionId>,
    /// Whose they are and what they are made of.
    pub origin: KvOrigin,
    /// Which blocks.
    pub run: ChainSegment,
    /// The extent in which the writer saw the base.
    pub extent: Option<ArtifactId>,
    /// Who has them.
    pub owner: Owner,
}

/// Does nothing when the session is open.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct OpenSession {
    /// Its id.
    pub session: SessionId,
    /// Whose.
    pub tenant: TenantId,
    /// With which model.
    pub model: ModelId,
    /// What it was forked from.
    pub parent: Option<SessionId>,
}

/// Decided by chain: descends from a head, fast-forward; is one or an ancestor of one, nothing; else one head more.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct AdvanceHead {
    /// The session.
    pub session: SessionId,
    /// The sealed prefix that it reached.
    pub head: PrefixRef,
    /// A head whose history the client rewrote: it goes.
    pub replaces: Option<PrefixId>,
    /// The head that the step extended, and the router that ran it: that intent is over.
    pub intent: Option<(PrefixId, NodeId)>,
}

/// Opens `child` with its head at a sealed prefix of `parent`.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct ForkSession {
    /// The known session.
    pub parent: SessionId,
    /// The new one.
    pub child: SessionId,
    /// Where they part.
    pub at: PrefixRef,
}

/// Moves the session, and the extents up to `head` that only it references.
///
/// Refused when it has a live owner who was granted it after `seen`; of what nobody has, it is a claim.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct MigrateSession {
    /// The session.
    pub session: SessionId,
    /// Who has the blocks now.
    pub to: Owner,
    /// The head whose blocks are there; without one, only the decode ownership moves.
    pub head: Option<PrefixId>,
    /// The session's epoch that this was decided on.
    pub seen: Epoch,
}

/// The same process registered twice is one outcome.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct RegisterWorker {
    /// Its id.
    pub worker: WorkerId,
    /// Which life.
    pub incarnation: Incarnation,
    /// What it says of itself.
    pub spec: WorkerSpec,
    /// The first lease.
    pub ttl: Micros,
}

/// Groups are for people and for eviction; they change nothing else.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct SetGroup {
    /// Which extent.
    pub artifact: ArtifactId,
    /// Which group.
    pub group: Option<GroupId>,
}

/// Announces or withdraws the step that `router` runs on `base`.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct SetIntent {
    /// The session.
    pub session: SessionId,
    /// The head that the step extends.
    pub base: PrefixId,
    /// Who dispatched it.
    pub router: NodeId,
    /// Where to and for how long it is believed; none withdraws it.
    pub step: Option<(Owner, Micros)>,
}

/// Applies only while the lease is the one that was seen and its time has come.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct ExpireLease {
    /// Whose lease.
    pub worker: WorkerId,
    /// The grant that was seen.
    pub epoch: Epoch,
    /// The deadline that was seen.
    pub deadline: LedgerTime,
}
