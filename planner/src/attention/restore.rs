//! How a stored prefix is restored at a worker: loaded with its windows, loaded with its windows recomputed, or
//! recomputed as a whole. Picks the cheapest way; loading may overlap with the time that the step is queued.

use serde::Serialize;
use vocabulary::{Bytes, Micros, Tokens};

use super::AttentionSpec;
use crate::micros::{ComputeRate, micros, valid_or_zero};

/// A prefix to restore.
#[derive(Clone, Copy, Debug)]
pub struct PrefixRestore<'a> {
    /// Specification of the model.
    pub spec: &'a AttentionSpec,
    /// Leading tokens that the worker already has, including windows.
    pub cached: Tokens,
    /// Leading tokens stored elsewhere: a multiple of `unit`.
    pub until: Tokens,
    /// Granularity of loading, from the block sizes of both ends.
    pub unit: Tokens,
}

/// One way to restore a prefix: how much is loaded, and where computation begins.
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

/// Costs of a restore at one worker.
#[derive(Clone, Copy, Debug)]
pub struct RestorePrices {
    /// Prefill rate.
    pub compute: ComputeRate,
    /// Fixed time of any load.
    pub load_fixed: Micros,
    /// Microseconds per loaded byte.
    pub load_byte: f64,
    /// Time until the step leaves the queue.
    pub queue: Micros,
    /// `lambda`: cost in microseconds per byte of device memory taken from other sessions.
    pub memory_byte: f64,
    /// Share of the memory in use, 0 to 1.
    pub usage: f64,
    /// Whether loading may begin while the step is queued.
    pub prefetch: PrefetchMode,
}

/// Whether KV is loaded while the step is queued.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug)]
#[serde(rename_all = "snake_case")]
pub enum PrefetchMode {
    /// Loading begins at once, and occupies memory while the step is queued.
    WhileQueued,
    /// Loading begins when the step leaves the queue.
    Never,
}

/// The cheapest way to restore a prefix, with its cost.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug)]
pub struct RestorePlan {
    /// What is loaded and what is recomputed.
    pub way: RestoreSplit,
    /// When loading begins.
    pub prefetch: PrefetchMode,
    /// Time until everything is loaded and the step has left the queue.
    pub wait: Micros,
    /// Time to compute what is not loaded.
    pub recompute: Micros,
    /// Cost of the device memory taken from other sessions.
    pub memory: Micros,
    /// Sum of the three.
    pub total: Micros,
}

impl PrefixRestore<'_> {
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
        let Self { spec, cached: held, until, unit } = *self;
        let depth = spec.window_depth();
        let stored = if depth == Tokens::ZERO { until } else { spec.checkpoints().last_stored(until, unit) };
        let with_windows = RestoreSplit { loaded: stored, bytes: spec.range_bytes(held, stored), start: stored };
        let start = until - depth;
        let without = RestoreSplit { loaded: until, bytes: spec.entry_bytes(until) - spec.entry_bytes(held), start };
        [(stored > held).then_some(with_windows), (start > held && start < until).then_some(without)]
    }

    /// Returns the cost of one way.
    pub fn price(&self, split: RestoreSplit, prefetch: PrefetchMode, prices: &RestorePrices) -> RestorePlan {
        let load = match split.bytes {
            Bytes::ZERO => Micros::ZERO,
            Bytes(bytes) => prices.load_fixed + micros(bytes as f64 * valid_or_zero(prices.load_byte)),
        };
        // KV loaded early certainly displaces other KV; KV loaded in turn does so as often as memory is full.
        let (wait, chance) = match prefetch {
            PrefetchMode::WhileQueued => (prices.queue.max(load), 1.0),
            PrefetchMode::Never => (prices.queue + load, valid_or_zero(prices.usage).min(1.0)),
        };
        let recompute = prices.compute.span(split.start, self.until);
        let stored = self.spec.range_bytes(self.cached, self.until).0 as f64;
        let memory = micros(valid_or_zero(prices.memory_byte) * chance * stored);
        RestorePlan { way: split, prefetch, wait, recompute, memory, total: wait + recompute + memory }
    }

    /// Returns the cheapest way; among equal costs the one that loads least.
    pub fn plan(&self, prices: &RestorePrices) -> RestorePlan {
        let times = [
            Some(PrefetchMode::Never),
            (prices.prefetch == PrefetchMode::WhileQueued).then_some(PrefetchMode::WhileQueued),
        ];
        let loads = self.load_splits().into_iter().flatten();
        let priced = loads.flat_map(|way| times.into_iter().flatten().map(move |time| self.price(way, time, prices)));
        let computed = self.price(self.without_load(), PrefetchMode::Never, prices);
        priced.fold(computed, |best, next| if next.total < best.total { next } else { best })
    }

    /// Returns what the stored prefix saves here: `C_prefill - C_load - C_recompute - C_stall`. Zero if recomputing it
    /// is as cheap: such a prefix may be dropped.
    pub fn benefit(&self, prices: &RestorePrices) -> Micros {
        self.price(self.without_load(), PrefetchMode::Never, prices).total - self.plan(prices).total
    }
}
