//! The replicated state machine: takes a command and a time, returns an outcome, and is bit-for-bit deterministic.
//!
//! The ledger decides who owns what. It never reads a clock, draws a random number or does IO. It does not know which
//! blocks a worker really holds: residency is observed elsewhere and never enters the ledger.

mod apply;
mod artifact;
mod artifact_table;
mod boundary_index;
mod changes;
mod clients;
mod cluster_records;
mod command;
mod control;
pub mod invariants;
mod ledger;
mod limits;
mod listing;
mod locate;
mod origin_interner;
mod outcome;
mod packed_codec;
mod point;
mod radix;
mod record;
mod ref_set;
mod session_families;
mod session_table;
mod step_commit;
mod tables;

pub use apply::MAX_CLOCK_STEP;
pub use artifact::{
    Artifact, ChainDescriptor, KvBlockSpec, KvFormatDigest, KvKind, KvKinds, ParentPoint, PrefixBoundary, Replica,
    Scope,
};
pub use artifact_table::BoundaryArtifactView;
pub use changes::{ChangeOp, RecordKey, RecordUpdate};
pub use cluster_records::{FOUNDER, Node, NodeLifecycle};
pub use command::{
    AdvanceHead, ClaimOwner, Command, DropReplica, ExpireLease, ForkSession, LedgerEntry, MigrateSession, OpenSession,
    OwnershipSubject, PrefixRef, RegisterWorker, ReleaseOwner, RenewLease, ReplicateReadonly, SealBlocks, SetGroup,
    SetIntent, Submission,
};
pub use control::{
    AdmitNode, ArtifactPinFlag, DrainFlag, DrainWorker, LEVEL, NEXT_LEVEL, PinArtifact, RetireIncarnation, SetQuota,
};
pub use ledger::{Ledger, RestoreBaseline, TenantUsage};
pub use limits::LedgerLimits;
pub use locate::{LocateQuery, LocateResult, OwnershipStatus, ResolvedSession, SealedPrefixMatch, SessionMatch};
pub use outcome::{HeadMovement, Outcome, Refusal, SealResult};
pub use point::{ChainSegment, MAX_POINTS, PrefixPoint, WAYPOINT};
pub use record::{Intent, Session, SessionHead, Worker, WorkerKind, WorkerLease, WorkerSpec};
pub use ref_set::{RefSet, RefSetMember};
pub use step_commit::{OwnershipTransition, StepCommit, StepCommitOutcome};

#[cfg(test)]
mod tests;
