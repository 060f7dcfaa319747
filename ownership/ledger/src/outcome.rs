//! Outcomes of commands.

use serde::{Deserialize, Serialize};
use vocabulary::{ArtifactId, Epoch, NodeId, Owner, WorkerId};

use crate::PrefixPoint;

/// How sealed blocks were stored.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub enum SealResult {
    /// As a new artifact.
    New,
    /// At the end of the previous artifact.
    Joined,
    /// They were already sealed.
    Known,
}

/// How a session's heads changed.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub enum HeadMovement {
    /// The session got its first head.
    First,
    /// A head moved forward.
    FastForward,
    /// A head was already there or beyond.
    Unchanged,
    /// The session got an additional head.
    Diverged,
    /// The rewritten head was replaced by this one.
    Replaced,
}

/// Outcome of a command.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub enum Outcome {
    /// Done, or nothing had to be done.
    Done,
    /// The session is open.
    Opened {
        /// Fencing token of its last grant.
        epoch: Epoch,
    },
    /// Ownership or a lease is granted.
    Granted {
        /// Fencing token.
        epoch: Epoch,
    },
    /// The blocks are sealed.
    Sealed {
        /// Artifact that contains them.
        artifact: ArtifactId,
        /// End of the sealed prefix.
        end: PrefixPoint,
        /// How they were stored.
        stored: SealResult,
        /// Fencing token of the grant.
        epoch: Epoch,
    },
    /// The given boundary became part of a larger artifact; attach at the kept boundary instead.
    Merged {
        /// That artifact.
        extent: ArtifactId,
        /// Its deepest boundary at or before the given one; `None` if only its start is left.
        kept: Option<PrefixPoint>,
    },
    /// The session's heads are up to date.
    Advanced {
        /// How they changed.
        movement: HeadMovement,
    },
    /// Leases were renewed.
    Renewed {
        /// Number of renewed leases.
        renewed: u32,
        /// Workers whose lease was not renewed.
        refused: Vec<WorkerId>,
    },
    /// One outcome per command of a batch.
    Batch(Vec<Outcome>),
    /// The node is a member under this id.
    Admitted {
        /// Id of the node.
        node: NodeId,
    },
    /// Nothing was changed.
    Refused(Refusal),
    /// `unknown_outcome`: the outcome of this serial is no longer remembered. The command was not executed again.
    Forgotten,
}

impl Outcome {
    /// Returns the bytes that the outcome counts for in the outcome memory. Equal on every machine, so no type sizes.
    pub(crate) fn counted_bytes(&self) -> u64 {
        const BYTES_PER_OUTCOME: u64 = 96;
        match self {
            Outcome::Batch(outcomes) => BYTES_PER_OUTCOME + outcomes.iter().map(Outcome::counted_bytes).sum::<u64>(),
            Outcome::Renewed { refused, .. } => BYTES_PER_OUTCOME + 8 * refused.len() as u64,
            _ => BYTES_PER_OUTCOME,
        }
    }

    /// Returns the refusals in this outcome, including those inside a batch.
    pub fn refusals(&self) -> Vec<&Refusal> {
        match self {
            Outcome::Refused(refusal) => vec![refusal],
            Outcome::Batch(outcomes) => outcomes.iter().flat_map(Outcome::refusals).collect(),
            _ => Vec::new(),
        }
    }
}

/// Why nothing was changed.
#[derive(
    Clone, PartialEq, Eq, Serialize, Deserialize, Debug, thiserror::Error, strum::IntoStaticStr, strum::VariantNames,
)]
#[strum(serialize_all = "snake_case")]
pub enum Refusal {
    /// The owner is not a rank of the worker's current incarnation.
    #[error("the worker has restarted since: the owner names an old incarnation")]
    StaleIncarnation,
    /// The worker was never registered.
    #[error("the worker is not registered")]
    UnknownWorker,
    /// The worker's lease is over; it must be registered again.
    #[error("the worker's lease is over")]
    #[serde(rename = "LeaseOver")]
    LeaseExpired,
    /// The lease was renewed, granted again or ended since, or its deadline has not passed.
    #[error("the lease changed since it was read, or its deadline has not passed")]
    LeaseChanged,
    /// Another live owner owns it.
    #[error("owned by another worker since {epoch}")]
    #[serde(rename = "Owned")]
    AlreadyOwned {
        /// The owner.
        by: Owner,
        /// When it was granted.
        epoch: Epoch,
    },
    /// The ownership changed after the writer looked.
    #[error("decided on an old epoch, the current one is {current}")]
    #[serde(rename = "Stale")]
    StaleEpoch {
        /// Current epoch.
        current: Epoch,
    },
    /// There is no such session.
    #[error("the session is not open")]
    UnknownSession,
    /// The session belongs to another tenant or model.
    #[error("the session belongs to another tenant or model")]
    #[serde(rename = "ForeignSession")]
    SessionScopeMismatch,
    /// There is no such artifact.
    #[error("the artifact is not known")]
    UnknownArtifact,
    /// The prefix is not known; seal from the root.
    #[error("the prefix is not known here")]
    UnknownPrefix,
    /// The points do not increase, leave a waypoint out, are too many, or contradict what is sealed.
    #[error("the block range is malformed")]
    #[serde(rename = "BadRun")]
    InvalidBlockRange,
    /// The client is not open, or was closed to make room.
    #[error("the client is not open")]
    UnknownClient,
    /// A batch inside a batch, or a batch that is too long.
    #[error("the batch is nested or too long")]
    #[serde(rename = "BadBatch")]
    InvalidBatch,
    /// A table is full of records that may not be evicted.
    #[error("the ledger is full")]
    #[serde(rename = "Full")]
    LedgerFull,
    /// The cluster's feature level is too low; an operator raises it once every node runs a release that supports it.
    #[error("this needs feature level {needed}, the cluster is at {current}: raise it once every node knows it")]
    #[serde(rename = "Level")]
    FeatureLevelTooLow {
        /// Level that the command needs.
        needed: u32,
        /// Level of the cluster.
        current: u32,
    },
    /// The tenant has reached its quota.
    #[error("the tenant has the {quota} entries that it may have")]
    #[serde(rename = "OverQuota")]
    QuotaExceeded {
        /// The quota.
        quota: u64,
    },
    /// The worker is draining.
    #[error("the worker is draining and is granted nothing more")]
    #[serde(rename = "Draining")]
    WorkerDraining,
    /// The artifact is pinned.
    #[error("the artifact is pinned; unpin it first")]
    Pinned,
    /// Sessions or children reference the artifact.
    #[error("sessions or other artifacts reference the artifact")]
    Referenced,
    /// No node has this id.
    #[error("no node has this id")]
    UnknownNode,
    /// The node was retired; it can join again with an empty folder, as a new node.
    #[error("node {node} was taken out for good: join with an empty data folder, as a new node")]
    #[serde(rename = "NodeRetired")]
    NodeRemoved {
        /// Id that it had.
        node: NodeId,
    },
    /// The node's address is empty or too long.
    #[error("the node's address is empty or longer than 256 bytes")]
    #[serde(rename = "BadAddress")]
    InvalidAddress,
    /// A limit is lower than the current one.
    #[error("bounds can only be widened")]
    #[serde(rename = "BadLimits")]
    InvalidLimits,
}

impl Refusal {
    /// Returns the reason used in metrics and the operator API.
    pub fn reason(&self) -> &'static str {
        self.into()
    }
}
