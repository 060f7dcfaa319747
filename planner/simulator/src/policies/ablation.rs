//! OwnerServe with one part of it gone, or told something wrong: what each part is worth, and what each error costs.

use engine_model::runs::Seconds;
use planner::Action;
use strum::VariantArray as _;
use vocabulary::WorkerView;

/// What is gone or wrong.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "snake_case", prefix = "ownerserve_")]
pub enum Ablation {
    /// Nothing is sent from a worker to another before a prompt begins.
    NoFetch,
    /// Nobody computes a prompt for somebody else.
    NoRemotePrefill,
    /// A session's state is never sent to a new owner.
    NoMigration,
    /// What is sent is never a copy beside its owner's.
    NoReplicas,
    /// What a step pushes out of memory has no price.
    NoEvictionPrice,
    /// No step waits, whoever's KV it pushes out.
    NoAdmission,
    /// Workers are believed to compute half as fast as they do.
    SlowBelief,
    /// Workers are believed to compute twice as fast as they do.
    FastBelief,
    /// Every other worker is believed to be twice as fast as it is, those between them half as fast.
    UnevenBelief,
    /// What workers hold is known a second late.
    #[strum(serialize = "late_by_1s")]
    DelayedResidency,
    /// The length of every answer is known, which no router knows.
    ToldLength,
    /// What sessions keep is sent ahead while they are between two steps, where that pays.
    Ahead,
}

impl Ablation {
    /// All of them.
    pub const ALL: [Self; 12] = *Self::VARIANTS.first_chunk().expect("twelve ablations");

    /// The word on the command line and in reports.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// What it does, for people.
    pub fn description(self) -> &'static str {
        match self {
            Self::NoFetch => "nothing is sent between workers before a prompt begins",
            Self::NoRemotePrefill => "nobody computes a prompt for somebody else",
            Self::NoMigration => "a session's state is never sent to a new owner",
            Self::NoReplicas => "what is sent is never a copy beside its owner's",
            Self::NoEvictionPrice => "what a step pushes out of memory has no price",
            Self::NoAdmission => "no step waits, whoever's KV it pushes out",
            Self::SlowBelief => "workers are believed to compute half as fast as they do",
            Self::FastBelief => "workers are believed to compute twice as fast as they do",
            Self::UnevenBelief => "every other worker is believed twice as fast as it is, those between half as fast",
            Self::DelayedResidency => "what workers hold in device memory is known a second late",
            Self::ToldLength => "the length of every answer is known, which no router knows",
            Self::Ahead => "what sessions keep is sent ahead while they are between two steps, where that pays",
        }
    }

    /// Actions that are switched off.
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

    /// Makes what is known of a worker wrong.
    pub(super) fn falsify_speed(self, place: usize, view: &mut WorkerView) {
        let times = match self {
            Self::SlowBelief => 0.5,
            Self::FastBelief => 2.0,
            Self::UnevenBelief if place.is_multiple_of(2) => 2.0,
            Self::UnevenBelief => 0.5,
            _ => return,
        };
        view.speeds.prefill_tokens_per_second *= times;
    }

    /// How long ago that was which is known of what workers hold.
    pub(crate) fn residency_delay(self) -> Option<Seconds> {
        (self == Self::DelayedResidency).then_some(Seconds(1.0))
    }
}
