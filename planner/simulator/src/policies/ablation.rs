//! Ablations of OwnerServe: one part removed or given wrong information, to measure the worth of each part and the cost
//! of each error.

use engine_model::runs::Seconds;
use planner::Action;
use strum::VariantArray as _;
use vocabulary::WorkerView;

/// Part that is removed or wrong.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "snake_case", prefix = "ownerserve_")]
pub enum Ablation {
    /// No KV is sent between workers before a prompt begins.
    NoFetch,
    /// No prefill worker computes a prompt for another worker.
    NoRemotePrefill,
    /// A session's KV is never sent to a new owner.
    NoMigration,
    /// Sent KV is never a second copy in addition to the owner's.
    NoReplicas,
    /// Evictions caused by a step have no cost.
    NoEvictionCost,
    /// No step queues for memory.
    NoAdmission,
    /// Workers are assumed to compute half as fast as they do.
    UnderestimatedSpeed,
    /// Workers are assumed to compute twice as fast as they do.
    OverestimatedSpeed,
    /// Every other worker is assumed to be twice as fast as it is, the rest half as fast.
    UnevenSpeedError,
    /// Residency is known one second late.
    #[strum(serialize = "index_stale_by_1s")]
    DelayedResidency,
    /// The length of every answer is known in advance, which no router knows.
    KnownOutputLength,
    /// Prefixes of idle sessions are replicated ahead of the next step, where that pays.
    PrefixReplication,
}

impl Ablation {
    /// All ablations.
    pub const ALL: [Self; 12] = *Self::VARIANTS.first_chunk().expect("twelve ablations");

    /// Returns the name on the command line and in reports.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Returns a description for people.
    pub fn description(self) -> &'static str {
        match self {
            Self::NoFetch => "no KV is sent between workers before a prompt begins",
            Self::NoRemotePrefill => "no worker computes a prompt for another one",
            Self::NoMigration => "a session's KV is never sent to a new owner",
            Self::NoReplicas => "sent KV is never a second copy beside the owner's",
            Self::NoEvictionCost => "evictions that a step causes have no cost",
            Self::NoAdmission => "no step queues for memory, whatever it evicts",
            Self::UnderestimatedSpeed => "workers are assumed to compute half as fast as they do",
            Self::OverestimatedSpeed => "workers are assumed to compute twice as fast as they do",
            Self::UnevenSpeedError => {
                "every other worker is assumed to be twice as fast as it is, the rest half as fast"
            }
            Self::DelayedResidency => "what workers hold in device memory is known one second late",
            Self::KnownOutputLength => "the length of every answer is known, which no router knows",
            Self::PrefixReplication => {
                "prefixes of idle sessions are replicated before their next step, where that pays"
            }
        }
    }

    /// Returns the actions that are disabled.
    pub(super) fn disabled(self) -> &'static [Action] {
        use Action::{ArtifactFetch, RemotePrefill, StateMigration, TailRecompute};
        match self {
            Self::NoFetch => &[ArtifactFetch, TailRecompute, StateMigration],
            Self::NoRemotePrefill => &[RemotePrefill],
            Self::NoMigration => &[StateMigration],
            Self::NoReplicas => &[ArtifactFetch, TailRecompute],
            _ => &[],
        }
    }

    /// Falsifies what is known of a worker's speed.
    pub(super) fn falsify_speed(self, place: usize, view: &mut WorkerView) {
        let times = match self {
            Self::UnderestimatedSpeed => 0.5,
            Self::OverestimatedSpeed => 2.0,
            Self::UnevenSpeedError if place.is_multiple_of(2) => 2.0,
            Self::UnevenSpeedError => 0.5,
            _ => return,
        };
        view.speeds.prefill_tokens_per_second *= times;
    }

    /// Returns the delay with which residency is known.
    pub(crate) fn residency_delay(self) -> Option<Seconds> {
        (self == Self::DelayedResidency).then_some(Seconds(1.0))
    }
}
