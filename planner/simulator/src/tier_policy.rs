//! Policies of the tiers below device memory: which tiers exist, and where a hybrid model's windows are stored
//! in them.

use std::str::FromStr;

use planner::WindowCheckpointInterval;
use serde::{Serialize, Serializer};
use vocabulary::Tokens;

/// How the cache below device memory is managed, independently of the routing policy.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, strum::Display)]
#[strum(serialize_all = "snake_case")]
pub enum TierPolicy {
    /// No tiers below device memory.
    #[strum(to_string = "none")]
    DeviceOnly,
    /// Evicted KV goes to every lower tier; windows are stored as the model's description says.
    Lru,
    /// As `Lru`, with the windows of every token.
    Full,
    /// As `Lru`, with windows stored at every multiple of this many tokens.
    #[strum(to_string = "periodic:{0}")]
    Periodic(Tokens),
    /// As `Lru`, without windows: the last n_win x L tokens are recomputed.
    NoWindows,
    /// As `Lru`, with windows at the cheapest interval; each prefix is restored in the cheapest way.
    LowestCost,
}

/// The name of no tier policy.
#[derive(Clone, PartialEq, Eq, thiserror::Error, Debug)]
#[error("there is no tier policy `{0}`; accepted: none, lru, full, periodic:TOKENS, no_windows, lowest_cost")]
pub struct UnknownTierPolicy(pub String);

impl TierPolicy {
    /// Returns where windows are stored; none if the model's description or its costs decide.
    pub(crate) fn checkpoints(self) -> Option<WindowCheckpointInterval> {
        match self {
            Self::DeviceOnly | Self::Lru | Self::LowestCost => None,
            Self::Full => Some(WindowCheckpointInterval::Full),
            Self::Periodic(period) => Some(WindowCheckpointInterval::EveryTokens(period)),
            Self::NoWindows => Some(WindowCheckpointInterval::None),
        }
    }
}

impl FromStr for TierPolicy {
    type Err = UnknownTierPolicy;

    fn from_str(word: &str) -> Result<Self, UnknownTierPolicy> {
        let unknown = || UnknownTierPolicy(word.to_owned());
        let period = |tokens: &str| tokens.parse().ok().filter(|tokens| *tokens > 0).map(Tokens);
        match word {
            "none" => Ok(Self::DeviceOnly),
            "lru" => Ok(Self::Lru),
            "full" => Ok(Self::Full),
            "no_windows" => Ok(Self::NoWindows),
            "lowest_cost" => Ok(Self::LowestCost),
            _ => word.strip_prefix("periodic:").and_then(period).map(Self::Periodic).ok_or_else(unknown),
        }
    }
}

impl Serialize for TierPolicy {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tier_policy_round_trips_through_its_name() {
        for word in ["none", "lru", "full", "periodic:4096", "no_windows", "lowest_cost"] {
            assert_eq!(word.parse::<TierPolicy>().unwrap().to_string(), word);
        }
        for wrong in ["", "periodic", "periodic:", "periodic:0", "periodic:-1", "LRU", "all"] {
            let error = wrong.parse::<TierPolicy>().unwrap_err().to_string();
            assert!(error.ends_with("accepted: none, lru, full, periodic:TOKENS, no_windows, lowest_cost"), "{error}");
        }
    }
}
