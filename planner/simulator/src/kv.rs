//! What a model's layers keep: the fleet's memory and links in its tokens, what each run takes of them, and how what is
//! stored comes back.
//!
//! In device memory every run has its windows, as engines keep them. In slower tiers they are where the cache management
//! stores them. A token's worth is what one more token takes for good. How fast tokens are computed stays the profile's.

use std::sync::Arc;

use engine_model::runs::{DiskSpeed, RestoreRule, Room, Sizes, Stored, Timing, Way};
use planner::{AttentionSpec, CheckpointCosts, Checkpoints, ComputeRate, Prefetch, Restore, RestorePrices, SpecError};
use vocabulary::{Bytes, Micros, Tokens};

use crate::cache::Cache;
use crate::spec::Spec;
use crate::trace::Trace;

/// One model on one kind of worker.
#[derive(Clone, Debug)]
pub struct KvModel {
    /// As the planner is told of it: with all windows in device memory.
    planned: AttentionSpec,
    /// As slower tiers store it.
    stored: AttentionSpec,
    worker: Spec,
    ways: Ways,
}

/// Which of the ways to restore a prefix is taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ways {
    /// As much is loaded as can be.
    Load,
    Cheapest,
}

/// Why a model cannot be simulated.
#[derive(Clone, PartialEq, Eq, thiserror::Error, Debug)]
pub enum KvError {
    /// It keeps nothing but windows.
    #[error("the model's layers keep nothing but windows; accepted: at least one that keeps something of every token")]
    OnlyWindows,
    /// Windows of a model without any.
    #[error("the cache management `{0}` is of windows, and the model has none; accepted: hbm, lru, cost")]
    NoWindows(Cache),
    /// A period that does not fit its blocks.
    #[error("the cache management `{0}`: {1}")]
    Checkpoints(Cache, SpecError),
}

impl KvModel {
    /// Of a model on such workers. What a trace is like decides how often windows are worth storing.
    pub fn new(attention: &AttentionSpec, cache: Cache, worker: Spec, trace: &Trace) -> Result<Self, KvError> {
        // A long sequence: windows apart, nothing is kept of one where no layer keeps anything for good.
        if attention.kept(attention.block()) == Bytes::ZERO {
            return Err(KvError::OnlyWindows);
        }
        let wrong = |error| KvError::Checkpoints(cache, error);
        if cache.checkpoints().is_some() && attention.window_depth() == Tokens::ZERO {
            return Err(KvError::NoWindows(cache));
        }
        let with = |checkpoints| attention.clone().with_checkpoints(checkpoints).map_err(wrong);
        let worker = in_tokens_of(worker, attention.bytes_per_token());
        let worker = if cache == Cache::Hbm { Spec { sizes: worker.sizes.device_only(), ..worker } } else { worker };
        let (chosen, ways) = match (cache.checkpoints(), cache) {
            (Some(checkpoints), _) => (checkpoints, Ways::Load),
            (None, Cache::Cost) => (cheapest(attention, &worker, trace), Ways::Cheapest),
            (None, _) => (attention.checkpoints(), Ways::Load),
        };
        Ok(Self { planned: with(Checkpoints::Full)?, stored: with(chosen)?, worker, ways })
    }

    /// The worker, with sizes and speeds in this model's tokens.
    pub fn worker(&self) -> Spec {
        self.worker
    }

    /// Where windows are stored in slower tiers.
    pub fn checkpoints(&self) -> Checkpoints {
        self.stored.checkpoints()
    }

    /// The traffic, of which every run takes what this model keeps of it.
    pub fn weigh(&self, trace: Trace) -> Trace {
        let windows = self.worth(self.planned.windows(Tokens(u64::MAX)));
        let room = |from: Tokens, to: Tokens| Room {
            device: self.worth(self.planned.range(from, to)),
            lower: self.worth(self.planned.kept(to) - self.planned.kept(from) + self.windows_below(from, to)),
        };
        Trace { runs: trace.runs.weighed(windows, room), ..trace }
    }

    /// As the planner is told of it.
    pub(crate) fn planned(&self) -> &AttentionSpec {
        &self.planned
    }

    /// Its rule for what comes back.
    pub(crate) fn rule(self: &Arc<Self>) -> Arc<dyn RestoreRule> {
        self.clone()
    }

    /// Bytes of windows that are stored with a range.
    fn windows_below(&self, from: Tokens, to: Tokens) -> Bytes {
        match self.stored.checkpoints() {
            Checkpoints::Full => self.stored.window_token() * (to - from).0,
            Checkpoints::Every(Tokens(period)) => {
                self.stored.windows(Tokens(u64::MAX)) * (to.0 / period - from.0 / period)
            }
            Checkpoints::None => Bytes::ZERO,
        }
    }

    fn worth(&self, bytes: Bytes) -> Tokens {
        Tokens(bytes.0.div_ceil(self.worker.kv_bytes))
    }
}

impl RestoreRule for KvModel {
    fn way(&self, stored: &Stored) -> Way {
        let (spec, held, unit) = (&self.stored, stored.held, self.stored.block());
        let until = stored.until.whole_blocks(unit).tokens(unit);
        let restore = Restore { spec, held, until, unit };
        let way = match self.ways {
            _ if until <= held => restore.nothing(),
            Ways::Load => restore.ways().into_iter().flatten().next().unwrap_or_else(|| restore.nothing()),
            Ways::Cheapest => restore.plan(&self.prices(stored)).way,
        };
        let kept = spec.kept(way.loaded) - spec.kept(held);
        Way { loaded: way.loaded, windows: self.worth(way.bytes - kept), start: way.start }
    }
}

impl KvModel {
    fn prices(&self, stored: &Stored) -> RestorePrices {
        RestorePrices {
            compute: rate(&self.worker.timing),
            load_fixed: Micros((stored.wait * 1e6) as u64),
            load_byte: stored.token * 1e6 / self.worker.kv_bytes as f64,
            queue: Micros::ZERO,
            memory_byte: 0.0,
            usage: 0.0,
            prefetch: Prefetch::Never,
        }
    }
}

fn rate(timing: &Timing) -> ComputeRate {
    let doubles_at = if timing.pair > 0.0 { (timing.token / timing.pair) as u64 } else { 0 };
    ComputeRate::new(timing.token * 1e6, Tokens(doubles_at))
}

/// The same bytes, in tokens of so many.
fn in_tokens_of(worker: Spec, kv_bytes: Bytes) -> Spec {
    let times = worker.kv_bytes as f64 / kv_bytes.0 as f64;
    let tokens = |tokens: Tokens| Tokens((tokens.0 as f64 * times) as u64);
    let Sizes { device, host, host_tokens_per_second, disk, disk_speed } = worker.sizes;
    let mut scaled = Spec { kv_bytes: kv_bytes.0, ..worker };
    scaled.sizes = Sizes {
        device: tokens(device),
        host: tokens(host),
        host_tokens_per_second: host_tokens_per_second * times,
        disk: tokens(disk),
        disk_speed: DiskSpeed { read: disk_speed.read * times, written: disk_speed.written * times },
    };
    scaled.link.tokens_per_second *= times;
    scaled
}

/// Where windows are stored at the least cost, if every step is restored once from the lowest tier.
fn cheapest(attention: &AttentionSpec, worker: &Spec, trace: &Trace) -> Checkpoints {
    let byte = |tokens_per_second: f64| 1e6 / (tokens_per_second * worker.kv_bytes as f64);
    let Sizes { disk, disk_speed, host_tokens_per_second, .. } = worker.sizes;
    let (write, load) = match disk {
        Tokens::ZERO => (byte(host_tokens_per_second), byte(host_tokens_per_second)),
        _ => (byte(disk_speed.written), byte(disk_speed.read)),
    };
    let steps = trace.steps().count().max(1) as f64;
    let prompt = trace.steps().map(|step| step.prompt.0).sum::<u64>() as f64 / steps;
    let grown: u64 = (0..trace.runs.len() as u32).map(|run| trace.runs.tokens(engine_model::runs::RunId(run)).0).sum();
    let compute = (worker.timing.token + worker.timing.pair * prompt) * 1e6;
    let costs = CheckpointCosts { write, load, compute, restores: steps / grown.max(1) as f64 };
    Checkpoints::choose(attention, attention.block(), &costs).0
}
