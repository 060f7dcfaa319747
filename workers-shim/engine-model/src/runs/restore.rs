//! How a stored prefix comes back where some layers keep windows, which are not stored everywhere.

use vocabulary::Tokens;

/// A prefix in slower tiers, and what loading it takes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Stored {
    /// Leading tokens that are there, windows included.
    pub held: Tokens,
    /// Leading tokens that are there or stored.
    pub until: Tokens,
    /// Seconds until loading can begin.
    pub wait: f64,
    /// Seconds of a token's worth.
    pub token: f64,
}

/// One way to bring it back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Way {
    /// Leading tokens that are there or loaded afterwards.
    pub loaded: Tokens,
    /// Windows that are loaded with them, in tokens' worth.
    pub windows: Tokens,
    /// Where computing begins; before `loaded` where windows are computed again.
    pub start: Tokens,
}

/// Chooses among the ways that a model has.
pub trait RestoreRule: std::fmt::Debug + Send + Sync {
    /// How this comes back.
    fn way(&self, stored: &Stored) -> Way;
}

/// Every token has its own KV: all that is stored is loaded.
#[derive(Clone, Copy, Debug)]
pub(super) struct All;

impl RestoreRule for All {
    fn way(&self, stored: &Stored) -> Way {
        Way { loaded: stored.until, windows: Tokens::ZERO, start: stored.until }
    }
}
