//! How stored prefixes are restored for models in which some layers keep only windows, which are not stored everywhere.

use vocabulary::Tokens;

/// A prefix in slower tiers, and the cost of loading it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StoredPrefix {
    /// Leading tokens that are available, windows included.
    pub cached_until: Tokens,
    /// Leading tokens that are available or stored.
    pub stored_until: Tokens,
    /// Seconds until loading can start.
    pub wait_seconds: f64,
    /// Seconds per token of KV.
    pub seconds_per_token: f64,
}

/// One way to restore it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RestoreChoice {
    /// Leading tokens that are available after loading.
    pub loaded_until: Tokens,
    /// Size of the windows that are loaded with them, in token equivalents.
    pub windows: Tokens,
    /// Where computing starts; before `loaded_until` if windows are recomputed.
    pub compute_from: Tokens,
}

/// Chooses how a model restores prefixes.
pub trait RestoreRule: std::fmt::Debug + Send + Sync {
    /// Returns how to restore this prefix.
    fn choose(&self, stored: &StoredPrefix) -> RestoreChoice;
}

/// Loads everything that is stored, for models in which every token has its own KV.
#[derive(Clone, Copy, Debug)]
pub(super) struct FullRestore;

impl RestoreRule for FullRestore {
    fn choose(&self, stored: &StoredPrefix) -> RestoreChoice {
        RestoreChoice { loaded_until: stored.stored_until, windows: Tokens::ZERO, compute_from: stored.stored_until }
    }
}
