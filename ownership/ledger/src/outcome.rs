//! What the ledger answers.

use serde::{Deserialize, Serialize};
use vocabulary::{ArtifactId, Epoch, NodeId, Owner, WorkerId};

use crate::PrefixPoint;

/// How sealed blocks were stored.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub enum SealResult {
    /// As an extent of their own.
    New,
    /// At the end of the extent before them.
    Joined,
    /// They were sealed before.
    Known,
}

/// What became of a session's heads.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub enum HeadMovement {
    /// The session had no head.
    First,
    /// A head moved forward.
    FastForward,
    /// A head was there already, or further.
    Unchanged,
    /// The session has one head more.
    Diverged,
    /// The rewritten head went, this one came.
    Replaced,
}

/// The answer to a command.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub enum Outcome {
    /// Done, or nothing was to do.
    Done,
    /// The session is open, and was last granted at this epoch.
    Opened {
        /// The fencing token.
        epoch: Epoch,
    },
    /// Ownership or a lease, since this epoch.
    Granted {
        /// The fencing token.
        epoch: Epoch,
    },
    /// The blocks are sealed.
    Sealed {
        /// In which extent.
        artifact: ArtifactId,
        /// Up to where.
        end: PrefixPoint,
        /// How.
        stored: SealResult,
        /// The fencing token of the grant.
        epoch: Epoch,
    },
    /// The named boundary became part of a larger extent; attach at the kept point instead.
    Merged {
        /// That extent.
        extent: ArtifactId,
        /// Its deepest kept point at or before the one that was named; none when only its start is left.
        kept: Option<PrefixPoint>,
    },
    /// The session's heads are as they should be.
    Advanced {
        /// How they moved.
        movement: HeadMovement,
    },
    /// Leases were renewed.
    Renewed {
        /// How many.
        renewed: u32,
        /// Which were not.
        refused: Vec<WorkerId>,
    },
    /// One outcome for each command of a batch.
    Batch(Vec<Outcome>),
    /// The node is a member under this id.
    Admitted {
        /// Its id.
        node: NodeId,
    },
    /// Nothing was changed.
    Refused(Refusal),
    /// `unknown_outcome`: this serial was answered too long ago to remember; it was not executed again.
    Forgotten,
}

impl Outcome {
    /// The bytes that it counts for where outcomes are remembered: the same on every machine, so no size of a type.
    pub(crate) fn counted_bytes(&self) -> u64 {
        const BYTES_PER_OUTCOME: u64 = 96;
        match self {
            Outcome::Batch(outcomes) => BYTES_PER_OUTCOME + outcomes.iter().map(Outcome::counted_bytes).sum::<u64>(),
            Outcome::Renewed { refused, .. } => BYTES_PER_OUTCOME + 8 * refused.len() as u64,
            _ => BYTES_PER_OUTCOME,
        }
    }

    /// The refusals in it, those inside a batch too.
    pub fn refusals(&self) -> Vec<&Refusal> {
        match self {
            Outcome::Refused(refusal) => vec![refusal],
            Outcome::Batch(outcomes) => outcomes.iter().flat_map(Outcome::refusals).collect(),
            _ => Vec::new(),
        }
    }
}

/// Why nothing was changed.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug, thiserror::Error, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Refusal {
    /// The owner is not a rank of the worker's present life.
    #[error("the worker lives another life now")]
    StaleIncarnation,
    /// The worker was never registered.
    #[error("the worker is not registered")]
    UnknownWorker,
    /// The worker's lease is over; it must be registered again.
    #[error("the worker's lease is over")]
    LeaseOver,
    /// The lease was renewed, granted anew or ended meanwhile, or its time has not come.
    #[error("the lease is not the one that was seen, or its time has not come")]
    LeaseChanged,
    /// Somebody live owns it.
    #[error("owned by another worker since {epoch}")]
    Owned {
        /// By whom.
        by: Owner,
        /// Since when.
        epoch: Epoch,
    },
    /// It moved after the writer looked.
    #[error("decided on an old epoch, the current one is {current}")]
    Stale {
        /// The present epoch.
        current: Epoch,
    },
    /// No such session.
    #[error("the session is not open")]
    UnknownSession,
    /// The session is another tenant's or model's.
    #[error("the session belongs to another tenant or model")]
    ForeignSession,
    /// No such extent.
    #[error("the artifact is not known")]
    UnknownArtifact,
    /// The prefix is not known; seal from the root.
    #[error("the prefix is not known here")]
    UnknownPrefix,
    /// The points do not rise, leave a waypoint out, are too many, or contradict what is sealed.
    #[error("the run is malformed")]
    BadRun,
    /// The client did not open, or did so too long ago.
    #[error("the client is not open")]
    UnknownClient,
    /// A batch inside a batch, or too long a one.
    #[error("the batch is nested or too long")]
    BadBatch,
    /// A table is full of entries that may not be evicted.
    #[error("the directory is full")]
    Full,
    /// The cluster's feature level is too low; an operator raises it once every node runs a release that knows it.
    #[error("this needs feature level {needed}, the cluster is at {current}: raise it once every node knows it")]
    Level {
        /// What the command needs.
        needed: u32,
        /// What the cluster has.
        current: u32,
    },
    /// The tenant has as many entries as it may.
    #[error("the tenant has the {quota} entries that it may have")]
    OverQuota {
        /// How many it may have.
        quota: u64,
    },
    /// The worker is being emptied.
    #[error("the worker is draining and is granted nothing more")]
    Draining,
    /// The extent is pinned.
    #[error("the artifact is pinned; take the pin back first")]
    Pinned,
    /// Sessions or children reference the extent.
    #[error("sessions or other artifacts reference the artifact")]
    Referenced,
    /// No node has this id.
    #[error("no node has this id")]
    UnknownNode,
    /// The node was taken out; it joins again with an empty folder, as a new node.
    #[error("node {node} was taken out for good: join with an empty data folder, as a new node")]
    NodeRetired {
        /// Which id it had.
        node: NodeId,
    },
    /// The node's address is empty or too long.
    #[error("the node's address is empty or longer than 256 bytes")]
    BadAddress,
    /// A bound is lower than the present one.
    #[error("bounds can only be widened")]
    BadLimits,
}

impl Refusal {
    /// The word for metrics.
    pub fn cause(&self) -> &'static str {
        self.into()
    }
}
