//! Names of the policies.

use std::str::FromStr;

use engine_model::runs::{RunEngine, Seconds};

use super::{
    Ablation, ConditionalPd, Dynamo, LeastWork, RoutingPolicy, StaticPd, owner_serve, plain, scored, thunder_agent,
};

/// Every simulated policy.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum PolicyKind {
    /// Each worker in turn.
    RoundRobin,
    /// Worker with the fewest requests.
    LeastLoaded,
    /// Of two random workers, the one with fewer requests.
    PowerOfTwo,
    /// A session stays at the worker of its first step, which is the one with the fewest sessions.
    SessionPinning,
    /// Worker with the longest cached prefix.
    PrefixAffinity,
    /// Highest cached share of the prompt minus the load relative to the busiest worker's.
    MatchRateMinusLoad,
    /// Fewest requests among the workers that hold nearly as much of the prompt as the one with the longest prefix.
    MultiOwner,
    /// SGLang's cache-aware router: a tree of what it sent where, and load balancing by requests beyond a threshold.
    Sglang,
    /// llm-d's scorers: prefix 3, queue 2, free memory 2.
    #[strum(serialize = "llm_d")]
    Llmd,
    /// Dynamo's cost: prompt tokens to compute plus tokens being decoded, overlap weight 1.
    Dynamo,
    /// Half of the workers compute prompts and send all KV to the other half.
    StaticPd,
    /// Dynamo's conditional disaggregation: long new prompts are computed in the other half, and the missing KV is
    /// sent.
    ConditionalPd,
    /// ThunderAgent's program-aware admission: programs are pinned, and queue while their contexts do not fit.
    #[strum(serialize = "thunder_agent")]
    ThunderAgent,
    /// OwnerServe's planner, used as routers use it.
    #[strum(serialize = "ownerserve")]
    OwnerServe,
    /// Bound: one cache as large as all workers' memory, in which every hit is local and instant, without interference.
    #[strum(serialize = "pooled_memory")]
    PooledMemory,
    /// Bound: the same with unlimited memory.
    Oracle,
    /// OwnerServe with one part removed or wrong.
    Ablated(Ablation),
    /// Cross-check only: llm-d's scorers with cached memory counted as used, as in the reference implementation.
    #[strum(serialize = "llm_d_cached_counts")]
    LlmdCachedCounts,
}

/// The name of no policy.
#[derive(Clone, PartialEq, Eq, thiserror::Error, Debug)]
#[error("there is no policy `{0}`; accepted: {names}", names = names())]
pub struct UnknownPolicy(pub String);

impl PolicyKind {
    /// All default policies, baselines first.
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

    /// Returns the variants that must be requested explicitly and are not in `ALL`.
    pub fn opt_in() -> impl Iterator<Item = Self> {
        Ablation::ALL.into_iter().map(Self::Ablated).chain([Self::LlmdCachedCounts])
    }

    /// Returns complete OwnerServe and every ablation of it.
    pub fn ablations() -> impl Iterator<Item = Self> {
        std::iter::once(Self::OwnerServe).chain(Ablation::ALL.into_iter().map(Self::Ablated))
    }

    /// Returns the name on the command line and in reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ablated(ablation) => ablation.as_str(),
            kind => kind.into(),
        }
    }

    /// Returns whether OwnerServe is compared with this policy: it is not OwnerServe, a bound or an ablation.
    pub fn is_baseline(self) -> bool {
        Self::ALL.contains(&self) && !matches!(self, Self::OwnerServe | Self::PooledMemory | Self::Oracle)
    }

    /// Returns whether all workers both compute prompts and generate answers.
    pub(crate) fn is_colocated(self) -> bool {
        !matches!(self, Self::StaticPd | Self::ConditionalPd)
    }

    /// Returns the delay with which the policy sees residency.
    pub(crate) fn residency_delay(self) -> Option<Seconds> {
        match self {
            Self::Ablated(ablation) => ablation.residency_delay(),
            _ => None,
        }
    }

    /// Returns the capacity of a bound's shared cache (none within: unlimited), given all workers' memory; none if
    /// workers have their own.
    pub(crate) fn shared_cache_capacity(self, all: vocabulary::Tokens) -> Option<Option<vocabulary::Tokens>> {
        match self {
            Self::PooledMemory => Some(Some(all)),
            Self::Oracle => Some(None),
            _ => None,
        }
    }

    /// Builds a policy in its initial state.
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
            Self::Dynamo => Box::new(Dynamo),
            Self::StaticPd => Box::new(StaticPd),
            Self::ConditionalPd => Box::new(ConditionalPd),
            Self::ThunderAgent => Box::new(thunder_agent::ThunderAgent::default()),
            Self::OwnerServe => Box::new(owner_serve::OwnerServe::default()),
            Self::Ablated(ablation) => Box::new(owner_serve::OwnerServe::without(ablation)),
            Self::PooledMemory | Self::Oracle => Box::new(LeastWork),
        }
    }
}

/// Returns all policies, opt-in ones last.
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
