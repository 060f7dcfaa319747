//! How slower tiers are kept: which there are, and where the windows of a hybrid model are stored in them.

use std::str::FromStr;

use planner::CheckpointInterval;
use serde::{Serialize, Serializer};
use vocabulary::Tokens;

/// One way to manage the cache below device memory, whatever the policy.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum CacheStrategy {
    /// There is nothing below device memory.
    Hbm,
    /// What is evicted falls into every tier; windows as the model's description says.
    Lru,
    /// The same, with every token's windows.
    Full,
    /// The same, with the windows at every so many tokens.
    #[strum(to_string = "periodic:{0}")]
    Periodic(Tokens),
    /// The same, without windows: the last n_win x L tokens are computed again.
    Zero,
    /// The same, with the windows at as many tokens as is cheapest, and each prefix restored in the cheapest way.
    Cost,
}

/// A word that is none of them.
#[derive(Clone, PartialEq, Eq, thiserror::Error, Debug)]
#[error("there is no cache management `{0}`; accepted: hbm, lru, full, periodic:TOKENS, zero, cost")]
pub struct UnknownCacheStrategy(pub String);

impl CacheStrategy {
    /// Where windows are stored; none where the model's description or its costs say so.
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
