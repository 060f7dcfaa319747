//! Cost of restoring a stored prefix at a modelled engine: loaded with its windows, loaded with its windows recomputed,
//! or recomputed as a whole. Picks the cheapest way; loading may overlap with the time that the step is queued.

use planner::{PrefillTimeModel, RestorablePrefix, RestoreSplit, micros, valid_or_zero};
use vocabulary::{Bytes, Micros};

/// Costs of a restore at one engine.
#[derive(Clone, Copy, Debug)]
pub struct RestorePrices {
    /// Prefill rate.
    pub compute: PrefillTimeModel,
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
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PrefetchMode {
    /// Loading begins at once, and occupies memory while the step is queued.
    WhileQueued,
    /// Loading begins when the step leaves the queue.
    Never,
}

/// One way to restore a prefix, with its cost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RestorePlan {
    /// What is loaded and what is recomputed.
    pub split: RestoreSplit,
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

impl RestorePrices {
    /// Returns the plan for one split, with its cost.
    pub fn price(&self, restore: &RestorablePrefix<'_>, split: RestoreSplit, prefetch: PrefetchMode) -> RestorePlan {
        let load = match split.bytes {
            Bytes::ZERO => Micros::ZERO,
            Bytes(bytes) => self.load_fixed + micros(bytes as f64 * valid_or_zero(self.load_byte)),
        };
        // KV loaded early certainly displaces other KV; KV loaded in turn does so as often as memory is full.
        let (wait, displacement_chance) = match prefetch {
            PrefetchMode::WhileQueued => (self.queue.max(load), 1.0),
            PrefetchMode::Never => (self.queue + load, valid_or_zero(self.usage).min(1.0)),
        };
        let recompute = self.compute.span(split.start, restore.until);
        let stored = restore.spec.range_bytes(restore.cached, restore.until).0 as f64;
        let memory = micros(valid_or_zero(self.memory_byte) * displacement_chance * stored);
        RestorePlan { split, prefetch, wait, recompute, memory, total: wait + recompute + memory }
    }

    /// Returns the cheapest plan; among equal costs the one that loads least.
    pub fn cheapest_plan(&self, restore: &RestorablePrefix<'_>) -> RestorePlan {
        let modes = [
            Some(PrefetchMode::Never),
            (self.prefetch == PrefetchMode::WhileQueued).then_some(PrefetchMode::WhileQueued),
        ];
        let loads = restore.load_splits().into_iter().flatten();
        let plans =
            loads.flat_map(|split| modes.into_iter().flatten().map(move |mode| self.price(restore, split, mode)));
        let recompute_all = self.price(restore, restore.without_load(), PrefetchMode::Never);
        plans.fold(recompute_all, |best, next| if next.total < best.total { next } else { best })
    }

    /// Returns what the stored prefix saves here: `C_prefill - C_load - C_recompute - C_stall`. Zero if recomputing it
    /// is as cheap: such a prefix may be dropped.
    pub fn benefit(&self, restore: &RestorablePrefix<'_>) -> Micros {
        let recompute_all = self.price(restore, restore.without_load(), PrefetchMode::Never);
        recompute_all.total - self.cheapest_plan(restore).total
    }
}
