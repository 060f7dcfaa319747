//! How a stored prefix comes back where some layers keep windows, which are not stored everywhere.

use vocabulary::Tokens;

/// A prefix in slower tiers, and what loading it takes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StoredPrefix {
    /// Leading tokens that are there, windows included.
    pub cached_until: Tokens,
    /// Leading tokens that are there or stored.
    pub stored_until: Tokens,
    /// Seconds until loading can begin.
    pub wait_seconds: f64,
    /// Seconds of a token's worth.
    pub seconds_per_token: f64,
}

/// One way to bring it back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RestoreChoice {
    /// Leading tokens that are there or loaded afterwards.
    pub loaded_until: Tokens,
    /// Windows that are loaded with them, in tokens' worth.
    pub windows: Tokens,
    /// Where computing begins; before `loaded` where windows are computed again.
    pub compute_from: Tokens,
}

/// Chooses among the ways that a model has.
pub trait RestoreRule: std::fmt::Debug + Send + Sync {
    /// How this comes back.
    fn choose(&self, stored: &StoredPrefix) -> RestoreChoice;
}

/// Every token has its own KV: all that is stored is loaded.
#[derive(Clone, Copy, Debug)]
pub(super) struct FullRestore;

impl RestoreRule for FullRestore {
    fn choose(&self, stored: &StoredPrefix) -> RestoreChoice {
        RestoreChoice { loaded_until: stored.stored_until, windows: Tokens::ZERO, compute_from: stored.stored_until }
    }
}
