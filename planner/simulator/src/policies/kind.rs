//! The policies by name.

use std::str::FromStr;

use engine_model::runs::{RunEngine, Seconds};

use super::{Ablation, RoutingPolicy, disaggregated, dynamo, least_work, owner_serve, plain, scored, thunder_agent};

/// Every policy that is simulated.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum PolicyKind {
    /// One worker after the other.
    RoundRobin,
    /// Where the fewest requests are.
    LeastLoaded,
    /// Of two random workers the one with fewer requests.
    PowerOfTwo,
    /// A session stays where its first step went, which is where the fewest sessions were.
    SessionPinning,
    /// Where most of the prompt is cached.
    PrefixAffinity,
    /// The share of the prompt that is cached minus the load relative to the busiest worker's.
    MatchRateMinusLoad,
    /// The fewest requests among those that hold nearly as much of the prompt as the deepest one.
    MultiOwner,
    /// SGLang's cache-aware router: its own tree of what it sent where, and balance by requests beyond a threshold.
    Sglang,
    /// llm-d's scorers: prefix 3, queue 2, free memory 2.
    #[strum(serialize = "llm_d")]
    Llmd,
    /// Dynamo's cost: prompt tokens to compute plus tokens being decoded, overlap weight 1.
    Dynamo,
    /// Half the workers compute prompts and send all of each to the other half.
    StaticPd,
    /// Dynamo's conditional disaggregation: long new prompts are computed by the other half, and what lacks is sent.
    ConditionalPd,
    /// ThunderAgent's program-aware admission: programs are pinned, and wait while their contexts do not fit.
    #[strum(serialize = "thunder_agent")]
    ThunderAgent,
    /// The planner, as routers run it.
    #[strum(serialize = "ownerserve")]
    OwnerServe,
    /// A bound: one cache of all workers' size, from which everything is there at once, and no interference.
    #[strum(serialize = "pooled_memory")]
    PooledMemory,
    /// A bound: the same without end.
    Oracle,
    /// OwnerServe with one part gone or wrong.
    Ablated(Ablation),
    /// For the cross-check: llm-d's scorers with cached memory counted as taken, as the reference has it.
    #[strum(serialize = "llm_d_cached_counts")]
    LlmdCachedCounts,
}

/// A name that no policy has.
#[derive(Clone, PartialEq, Eq, thiserror::Error, Debug)]
#[error("there is no policy `{0}`; accepted: {names}", names = names())]
pub struct UnknownPolicy(pub String);

impl PolicyKind {
    /// All of them, baselines first.
    pub const ALL: [Self; 16] = [
        Self::RoundRobin,
        Self::LeastLoaded,
        Self::PowerOfTwo,
        Self::SessionPinning,
        Self::PrefixAffinity,
        Self::MatchRateMinusLoad,
        Self::MultiOwner,
        Self::Sglang,
        Self::Llmd,
        Self::Dynamo,
        Self::StaticPd,
        Self::ConditionalPd,
        Self::ThunderAgent,
        Self::OwnerServe,
        Self::PooledMemory,
        Self::Oracle,
    ];

    /// Variants that one has to ask for: `ALL` is without them.
    pub fn opt_in() -> impl Iterator<Item = Self> {
        Ablation::ALL.into_iter().map(Self::Ablated).chain([Self::LlmdCachedCounts])
    }

    /// OwnerServe whole, and with each part gone or wrong.
    pub fn ablations() -> impl Iterator<Item = Self> {
        std::iter::once(Self::OwnerServe).chain(Ablation::ALL.into_iter().map(Self::Ablated))
    }

    /// The word on the command line and in reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ablated(ablation) => ablation.as_str(),
            kind => kind.into(),
        }
    }

    /// Whether OwnerServe is held against it: it is neither OwnerServe nor a bound nor an ablation.
    pub fn is_baseline(self) -> bool {
        Self::ALL.contains(&self) && !matches!(self, Self::OwnerServe | Self::PooledMemory | Self::Oracle)
    }

    /// Whether workers compute prompts and answer.
    pub(crate) fn is_colocated(self) -> bool {
        !matches!(self, Self::StaticPd | Self::ConditionalPd)
    }

    /// How long ago that was which it is shown of what workers hold.
    pub(crate) fn residency_delay(self) -> Option<Seconds> {
        match self {
            Self::Ablated(ablation) => ablation.residency_delay(),
            _ => None,
        }
    }

    /// The shared cache of a bound, by the workers' memory in all; none where workers have their own.
    pub(crate) fn shared_pool_capacity(self, all: vocabulary::Tokens) -> Option<Option<vocabulary::Tokens>> {
        match self {
            Self::PooledMemory => Some(Some(all)),
            Self::Oracle => Some(None),
            _ => None,
        }
    }

    /// A policy that has seen nothing yet.
    pub(crate) fn build(self, seed: u64) -> Box<dyn RoutingPolicy> {
        match self {
            Self::RoundRobin => Box::new(plain::RoundRobin::default()),
            Self::LeastLoaded => Box::new(plain::LeastLoaded),
            Self::PowerOfTwo => Box::new(plain::PowerOfTwo::new(seed)),
            Self::SessionPinning => Box::new(plain::SessionPinning::default()),
            Self::PrefixAffinity => Box::new(plain::PrefixAffinity),
            Self::MatchRateMinusLoad => Box::new(scored::MatchRateMinusLoad),
            Self::MultiOwner => Box::new(scored::MultiOwner),
            Self::Sglang => Box::new(scored::Sglang::default()),
            Self::Llmd => Box::new(scored::Llmd { used_memory: RunEngine::memory_in_use }),
            Self::LlmdCachedCounts => Box::new(scored::Llmd { used_memory: RunEngine::memory_used }),
            Self::Dynamo => Box::new(dynamo::Dynamo),
            Self::StaticPd => Box::new(disaggregated::StaticPd),
            Self::ConditionalPd => Box::new(disaggregated::ConditionalPd),
            Self::ThunderAgent => Box::new(thunder_agent::ThunderAgent::default()),
            Self::OwnerServe => Box::new(owner_serve::OwnerServe::default()),
            Self::Ablated(ablation) => Box::new(owner_serve::OwnerServe::without(ablation)),
            Self::PooledMemory | Self::Oracle => Box::new(least_work::LeastWork),
        }
    }
}

/// All of them, those that have to be asked for last.
pub(crate) fn all_policies() -> impl Iterator<Item = PolicyKind> {
    PolicyKind::ALL.into_iter().chain(PolicyKind::opt_in())
}

fn names() -> String {
    all_policies().map(PolicyKind::as_str).collect::<Vec<_>>().join(", ")
}

impl FromStr for PolicyKind {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        all_policies().find(|kind| kind.as_str() == name).ok_or_else(|| UnknownPolicy(name.to_owned()))
    }
}
