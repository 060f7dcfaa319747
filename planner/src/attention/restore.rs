//! How a stored prefix comes back at a worker: loaded with its windows, loaded with its windows computed again, or
//! computed as a whole. The cheapest of these, where what is loaded may come while the step waits for its turn.

use serde::Serialize;
use vocabulary::{Bytes, Micros, Tokens};

use super::AttentionSpec;
use crate::micros::{ComputeRate, micros, valid_or_zero};

/// A prefix to be brought back.
#[derive(Clone, Copy, Debug)]
pub struct PrefixRestore<'a> {
    /// Of which model.
    pub spec: &'a AttentionSpec,
    /// Leading tokens that the worker has, windows included.
    pub held: Tokens,
    /// Leading tokens that are stored elsewhere: a multiple of `unit`.
    pub until: Tokens,
    /// What can be loaded ends at multiples of this: the blocks of both ends.
    pub unit: Tokens,
}

/// One way to bring it back.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug)]
pub struct RestoreSplit {
    /// Leading tokens whose blocks are there afterwards.
    pub loaded: Tokens,
    /// Bytes that are loaded.
    pub bytes: Bytes,
    /// Where computing begins; before `loaded` where windows are computed again.
    pub start: Tokens,
}

impl RestoreSplit {
    /// Whether blocks are loaded whose last windows are computed again.
    pub fn recomputes_windows(&self) -> bool {
        self.start < self.loaded
    }
}

/// What it costs at one worker.
#[derive(Clone, Copy, Debug)]
pub struct RestorePrices {
    /// To compute.
    pub compute: ComputeRate,
    /// To load anything.
    pub load_fixed: Micros,
    /// Microseconds to load a byte more.
    pub load_byte: f64,
    /// Until the step's turn comes.
    pub queue: Micros,
    /// `lambda`: microseconds for a byte of device memory taken from others.
    pub memory_byte: f64,
    /// Share of the memory that is in use, 0 to 1.
    pub usage: f64,
    /// Whether loading may begin before.
    pub prefetch: PrefetchMode,
}

/// Whether what is loaded may come while the step waits.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug)]
#[serde(rename_all = "snake_case")]
pub enum PrefetchMode {
    /// Loading begins at once and holds its memory while the step waits.
    WhileQueued,
    /// Loading begins when the step's turn comes.
    Never,
}

/// The cheapest way, with its price.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug)]
pub struct RestorePlan {
    /// Which way.
    pub way: RestoreSplit,
    /// When it is loaded.
    pub prefetch: PrefetchMode,
    /// Until everything is loaded and the step's turn has come.
    pub wait: Micros,
    /// To compute what is not loaded.
    pub recompute: Micros,
    /// Device memory that others lose.
    pub memory: Micros,
    /// Their sum.
    pub total: Micros,
}

impl PrefixRestore<'_> {
    /// Nothing is loaded.
    pub fn without_load(&self) -> RestoreSplit {
        RestoreSplit { loaded: self.held, bytes: Bytes::ZERO, start: self.held }
    }

    /// The ways to load that can be the cheapest: up to the last stored windows, and to the end with the windows computed
    /// again.
    ///
    /// Loading less cannot be cheaper than both these and nothing: a byte costs the same wherever it is and a later token
    /// costs no less to compute than an earlier one, so that the price of loading a part is concave in its length.
    pub fn load_splits(&self) -> [Option<RestoreSplit>; 2] {
        let Self { spec, held, until, unit } = *self;
        let depth = spec.window_depth();
        let stored = if depth == Tokens::ZERO { until } else { spec.checkpoints().last_stored(until, unit) };
        let with_windows = RestoreSplit { loaded: stored, bytes: spec.range_bytes(held, stored), start: stored };
        let start = until - depth;
        let without = RestoreSplit { loaded: until, bytes: spec.entry_bytes(until) - spec.entry_bytes(held), start };
        [(stored > held).then_some(with_windows), (start > held && start < until).then_some(without)]
    }

    /// The price of one way.
    pub fn price(&self, way: RestoreSplit, prefetch: PrefetchMode, prices: &RestorePrices) -> RestorePlan {
        let load = match way.bytes {
            Bytes::ZERO => Micros::ZERO,
            Bytes(bytes) => prices.load_fixed + micros(bytes as f64 * valid_or_zero(prices.load_byte)),
        };
        // What is there early displaces others for sure; what comes in its turn does so as often as memory is full.
        let (wait, chance) = match prefetch {
            PrefetchMode::WhileQueued => (prices.queue.max(load), 1.0),
            PrefetchMode::Never => (prices.queue + load, valid_or_zero(prices.usage).min(1.0)),
        };
        let recompute = prices.compute.span(way.start, self.until);
        let stored = self.spec.range_bytes(self.held, self.until).0 as f64;
        let memory = micros(valid_or_zero(prices.memory_byte) * chance * stored);
        RestorePlan { way, prefetch, wait, recompute, memory, total: wait + recompute + memory }
    }

    /// The cheapest way; of equal ones the one that loads least.
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

    /// What keeping the stored prefix is worth here: `C_prefill - C_load - C_recompute - C_stall`. Nothing where it is as
    /// cheap to compute it again: such a prefix may be dropped.
    pub fn benefit(&self, prices: &RestorePrices) -> Micros {
        self.price(self.without_load(), PrefetchMode::Never, prices).total - self.plan(prices).total
    }
}
