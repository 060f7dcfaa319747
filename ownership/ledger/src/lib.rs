//! The replicated state machine: a command and a time in, an outcome out, deterministic to the bit.
//!
//! It decides who owns what. It never reads a clock, draws a random number, does IO, or asks what blocks really lie
//! where: residency is observed elsewhere and never enters here.

mod apply;
mod artifact;
mod boundaries;
mod changes;
mod clients;
mod command;
mod control;
mod families;
mod interned;
pub mod invariants;
mod ledger;
mod limits;
mod listing;
mod locate;
mod node;
mod outcome;
mod packed;
mod point;
mod radix;
mod record;
mod refs;
mod sessions;
mod step;
mod stored;
mod tables;

pub use apply::MAX_CLOCK_STEP;
pub use artifact::{Artifact, Attached, Boundary, KvFormat, KvKind, KvKinds, KvShape, Origin, Replica, Scope};
pub use changes::{Changed, Key, Op};
pub use command::{
    Advance, ClaimOwner, Command, DropReplica, Entry, Expire, Fork, Migrate, OpenSession, Place, RegisterWorker,
    Release, RenewLease, ReplicateReadonly, Seal, SetGroup, SetIntent, Subject, Submission,
};
pub use control::{AdmitNode, DrainWorker, Draining, LEVEL, NEXT_LEVEL, Pin, Pinned, RetireLife, SetQuota};
pub use ledger::{Ledger, Restore, Usage};
pub use limits::Limits;
pub use locate::{Lineage, Located, Query, Sealed, Standing, Whose};
pub use node::{FOUNDER, Membership, Node};
pub use outcome::{Movement, Outcome, Refusal, Stored};
pub use point::{MAX_POINTS, Point, Run, WAYPOINT};
pub use record::{Head, Intent, Lease, Session, Worker, WorkerKind, WorkerSpec};
pub use refs::{Member, Refs};
pub use step::{Custody, StepCommit, StepOutcome};
pub use stored::Kept;

#[cfg(test)]
mod tests;
