//! The replicated state machine: a command and a time in, an outcome out, deterministic to the bit.
//!
//! It decides who owns what. It never reads a clock, draws a random number, does IO, or asks what blocks really lie
//! where: residency is observed elsewhere and never enters here.

mod apply;
mod artifact;
mod clients;
mod command;
pub mod invariants;
mod ledger;
mod locate;
mod outcome;
mod point;
mod record;
mod refs;
mod step;
mod tables;

pub use apply::MAX_CLOCK_STEP;
pub use artifact::{Artifact, Attached, Boundary, KvFormat, KvKind, KvKinds, KvShape, Origin, Replica, Scope};
pub use command::{
    Advance, ClaimOwner, Command, DropReplica, Entry, Expire, Fork, Migrate, OpenSession, Place, RegisterWorker,
    Release, RenewLease, ReplicateReadonly, Seal, SetGroup, SetIntent, Subject, Submission,
};
pub use ledger::{Ledger, Limits};
pub use locate::{Lineage, Located, Query, Sealed, Standing};
pub use outcome::{Movement, Outcome, Refusal, Stored};
pub use point::{MAX_POINTS, Point, Run, WAYPOINT};
pub use record::{Head, Intent, Lease, Session, Worker, WorkerKind, WorkerSpec};
pub use refs::Refs;
pub use step::{Custody, StepCommit, StepOutcome};

#[cfg(test)]
mod tests;
