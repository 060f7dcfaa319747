//! Ways to bring a stored prefix to a worker: loaded with its windows, or loaded with its windows recomputed.

use serde::Serialize;
use vocabulary::{Bytes, Tokens};

use super::AttentionSpec;

/// A prefix to bring to a worker, in bytes to load and tokens to recompute; the cost term `T_restore` is only the time
/// to load what the worker itself holds in slower tiers.
#[derive(Clone, Copy, Debug)]
pub struct RestorablePrefix<'a> {
    /// Specification of the model.
    pub spec: &'a AttentionSpec,
    /// Leading tokens that the worker already has, including windows.
    pub cached: Tokens,
    /// Leading tokens stored elsewhere: a multiple of `unit`.
    pub until: Tokens,
    /// Granularity of loading, from the block sizes of both ends.
    pub unit: Tokens,
}

/// One way to restore a prefix: how much is loaded and where computation begins, not how long that takes (`T_restore`).
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug)]
pub struct RestoreSplit {
    /// Leading tokens whose blocks are present afterwards.
    pub loaded: Tokens,
    /// Bytes to load.
    pub bytes: Bytes,
    /// Position at which computation begins; less than `loaded` if windows are recomputed.
    pub start: Tokens,
}

impl RestoreSplit {
    /// Returns whether blocks are loaded whose last windows are recomputed.
    pub fn recomputes_windows(&self) -> bool {
        self.start < self.loaded
    }
}

impl RestorablePrefix<'_> {
    /// Returns the way that loads nothing.
    pub fn without_load(&self) -> RestoreSplit {
        RestoreSplit { loaded: self.cached, bytes: Bytes::ZERO, start: self.cached }
    }

    /// Returns the ways to load that can be the cheapest: up to the last stored windows, and up to the end with
    /// recomputed windows.
    ///
    /// Loading less is never cheaper than both of these and loading nothing: every byte costs the same, and a later
    /// token costs no less to compute than an earlier one, so the cost of a partial load is concave in its length.
    pub fn load_splits(&self) -> [Option<RestoreSplit>; 2] {
        let Self { spec, cached, until, unit } = *self;
        let depth = spec.window_depth();
        let stored = if depth == Tokens::ZERO { until } else { spec.checkpoints().last_stored(until, unit) };
        let with_windows = RestoreSplit { loaded: stored, bytes: spec.range_bytes(cached, stored), start: stored };
        let start = until - depth;
        let without_windows =
            RestoreSplit { loaded: until, bytes: spec.entry_bytes(until) - spec.entry_bytes(cached), start };
        [(stored > cached).then_some(with_windows), (start > cached && start < until).then_some(without_windows)]
    }
}
