//! Cache strategies for the tiers below device memory: which tiers exist, and where a hybrid model's windows are stored
//! in them.

use std::str::FromStr;

use planner::CheckpointInterval;
use serde::{Serialize, Serializer};
use vocabulary::Tokens;

/// How the cache below device memory is managed, independently of the routing policy.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum CacheStrategy {
    /// No tiers below device memory.
    Hbm,
    /// Evicted KV goes to every lower tier; windows are stored as the model's description says.
    Lru,
    /// As `Lru`, with the windows of every token.
    Full,
    /// As `Lru`, with windows stored at every multiple of this many tokens.
    #[strum(to_string = "periodic:{0}")]
    Periodic(Tokens),
    /// As `Lru`, without windows: the last n_win x L tokens are recomputed.
    Zero,
    /// As `Lru`, with windows at the cheapest interval; each prefix is restored in the cheapest way.
    Cost,
}

/// The name of no cache strategy.
#[derive(Clone, PartialEq, Eq, thiserror::Error, Debug)]
#[error("there is no cache management `{0}`; accepted: hbm, lru, full, periodic:TOKENS, zero, cost")]
pub struct UnknownCacheStrategy(pub String);

impl CacheStrategy {
    /// Returns where windows are stored; none if the model's description or its costs decide.
    pub(crate) fn checkpoints(self) -> Option<CheckpointInterval> {
        match self {
            Self::Hbm | Self::Lru | Self::Cost => None,
            Self::Full => Some(CheckpointInterval::Full),
            Self::Periodic(period) => Some(CheckpointInterval::Every(period)),
            Self::Zero => Some(CheckpointInterval::None),
        }
    }
}

impl FromStr for CacheStrategy {
    type Err = UnknownCacheStrategy;

    fn from_str(word: &str) -> Result<Self, UnknownCacheStrategy> {
        let unknown = || UnknownCacheStrategy(word.to_owned());
        let period = |tokens: &str| tokens.parse().ok().filter(|tokens| *tokens > 0).map(Tokens);
        match word {
            "hbm" => Ok(Self::Hbm),
            "lru" => Ok(Self::Lru),
            "full" => Ok(Self::Full),
            "zero" => Ok(Self::Zero),
            "cost" => Ok(Self::Cost),
            _ => word.strip_prefix("periodic:").and_then(period).map(Self::Periodic).ok_or_else(unknown),
        }
    }
}

impl Serialize for CacheStrategy {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_strategy_round_trips_through_its_name() {
        for word in ["hbm", "lru", "full", "periodic:4096", "zero", "cost"] {
            assert_eq!(word.parse::<CacheStrategy>().unwrap().to_string(), word);
        }
        for wrong in ["", "periodic", "periodic:", "periodic:0", "periodic:-1", "LRU", "all"] {
            let error = wrong.parse::<CacheStrategy>().unwrap_err().to_string();
            assert!(error.ends_with("accepted: hbm, lru, full, periodic:TOKENS, zero, cost"), "{error}");
        }
    }
}
