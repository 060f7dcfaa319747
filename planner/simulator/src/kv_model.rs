//! KV model: scales the fleet's memory and links to tokens of one model, gives the size of each run, and decides how
//! stored KV is restored.
//!
//! In device memory every run has its windows, as engines keep them. In slower tiers windows are stored where the tier
//! policy says. A token of memory is what one more token takes permanently. The prefill speed is that of the profile.

use std::sync::Arc;

use engine_model::runs::{DiskSpeed, EngineTiming, KvSize, MemorySizes, OffloadedPrefix, RestoreChoice, RestoreRule};
use planner::{
    AttentionSpec, PrefillTimeModel, RestorablePrefix, SpecError, WindowCheckpointCosts, WindowCheckpointInterval,
};
use vocabulary::{Bytes, Micros, Tokens};

use crate::hardware_profile::HardwareProfile;
use crate::restore_plan::{PrefetchMode, RestorePrices};
use crate::tier_policy::TierPolicy;
use crate::trace::Trace;

/// One model on one hardware profile.
#[derive(Clone, Debug)]
pub struct KvModel {
    /// Specification given to the planner: all windows are in device memory.
    planner_spec: AttentionSpec,
    /// Specification as slower tiers store it.
    stored_spec: AttentionSpec,
    worker: HardwareProfile,
    restore_strategy: RestoreStrategy,
}

/// How the way to restore a prefix is chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RestoreStrategy {
    /// Loads as much as possible.
    LoadAll,
    Cheapest,
}

/// Why a model cannot be simulated.
#[derive(Clone, PartialEq, Eq, thiserror::Error, Debug)]
pub enum KvModelError {
    /// The model keeps nothing but windows.
    #[error("the model's layers keep nothing but windows; accepted: at least one that keeps something of every token")]
    OnlyWindows,
    /// The tier policy is about windows, but the model has none.
    #[error("tier policy `{0}` stores windows, and the model has none; accepted: none, lru, lowest_cost")]
    NoWindows(TierPolicy),
    /// The checkpoint interval does not fit the model's blocks.
    #[error("tier policy `{0}`: {1}")]
    Checkpoints(TierPolicy, SpecError),
}

impl KvModel {
    /// Builds the KV model for such workers. The trace determines how often storing windows pays.
    pub fn new(
        attention: &AttentionSpec,
        cache: TierPolicy,
        worker: HardwareProfile,
        trace: &Trace,
    ) -> Result<Self, KvModelError> {
        // A model without permanent entries keeps nothing of a long sequence except its windows.
        if attention.entry_bytes(attention.block()) == Bytes::ZERO {
            return Err(KvModelError::OnlyWindows);
        }
        let wrong = |error| KvModelError::Checkpoints(cache, error);
        if cache.checkpoints().is_some() && attention.window_depth() == Tokens::ZERO {
            return Err(KvModelError::NoWindows(cache));
        }
        let with = |checkpoints| attention.clone().with_checkpoints(checkpoints).map_err(wrong);
        let worker = rescale_profile(worker, attention.bytes_per_token());
        let worker = if cache == TierPolicy::DeviceOnly {
            HardwareProfile { sizes: worker.sizes.device_only(), ..worker }
        } else {
            worker
        };
        let (checkpoints, restore_strategy) = match (cache.checkpoints(), cache) {
            (Some(set), _) => (set, RestoreStrategy::LoadAll),
            (None, TierPolicy::LowestCost) => {
                (cheapest_checkpoints(attention, &worker, trace), RestoreStrategy::Cheapest)
            }
            (None, _) => (attention.checkpoints(), RestoreStrategy::LoadAll),
        };
        Ok(Self {
            planner_spec: with(WindowCheckpointInterval::Full)?,
            stored_spec: with(checkpoints)?,
            worker,
            restore_strategy,
        })
    }

    /// Returns the hardware profile, with sizes and speeds in tokens of this model.
    pub fn worker(&self) -> HardwareProfile {
        self.worker
    }

    /// Returns where windows are stored in slower tiers.
    pub fn checkpoints(&self) -> WindowCheckpointInterval {
        self.stored_spec.checkpoints()
    }

    /// Returns the trace with the size of every run set to what this model keeps of it.
    pub fn scale_trace(&self, trace: Trace) -> Trace {
        let windows = self.equivalent_tokens(self.planner_spec.window_bytes(Tokens(u64::MAX)));
        let room = |from: Tokens, to: Tokens| KvSize {
            device: self.equivalent_tokens(self.planner_spec.range_bytes(from, to)),
            lower: self.equivalent_tokens(
                self.planner_spec.entry_bytes(to) - self.planner_spec.entry_bytes(from)
                    + self.stored_window_bytes(from, to),
            ),
        };
        Trace { runs: trace.runs.with_kv_sizes(windows, room), ..trace }
    }

    /// Returns the specification given to the planner.
    pub(crate) fn planned(&self) -> &AttentionSpec {
        &self.planner_spec
    }

    /// Returns the rule that decides how prefixes are restored.
    pub(crate) fn rule(self: &Arc<Self>) -> Arc<dyn RestoreRule> {
        self.clone()
    }

    /// Returns the bytes of the windows that are stored with a range.
    fn stored_window_bytes(&self, from: Tokens, to: Tokens) -> Bytes {
        match self.stored_spec.checkpoints() {
            WindowCheckpointInterval::Full => self.stored_spec.window_bytes_per_token() * (to - from).0,
            WindowCheckpointInterval::EveryTokens(Tokens(period)) => {
                self.stored_spec.window_bytes(Tokens(u64::MAX)) * (to.0 / period - from.0 / period)
            }
            WindowCheckpointInterval::None => Bytes::ZERO,
        }
    }

    fn equivalent_tokens(&self, bytes: Bytes) -> Tokens {
        Tokens(bytes.0.div_ceil(self.worker.kv_bytes))
    }
}

impl RestoreRule for KvModel {
    fn choose(&self, stored: &OffloadedPrefix) -> RestoreChoice {
        let (spec, cached, unit) = (&self.stored_spec, stored.cached_until, self.stored_spec.block());
        let until = stored.stored_until.whole_blocks(unit).tokens(unit);
        let restore = RestorablePrefix { spec, cached, until, unit };
        let split = match self.restore_strategy {
            _ if until <= cached => restore.without_load(),
            RestoreStrategy::LoadAll => {
                restore.load_splits().into_iter().flatten().next().unwrap_or_else(|| restore.without_load())
            }
            RestoreStrategy::Cheapest => self.prices(stored).cheapest_plan(&restore).split,
        };
        let stored_bytes = spec.entry_bytes(split.loaded) - spec.entry_bytes(cached);
        RestoreChoice {
            loaded_until: split.loaded,
            windows: self.equivalent_tokens(split.bytes - stored_bytes),
            compute_from: split.start,
        }
    }
}

impl KvModel {
    fn prices(&self, stored: &OffloadedPrefix) -> RestorePrices {
        RestorePrices {
            compute: rate(&self.worker.timing),
            load_fixed: Micros((stored.wait_seconds * 1e6) as u64),
            load_byte: stored.seconds_per_token * 1e6 / self.worker.kv_bytes as f64,
            queue: Micros::ZERO,
            memory_byte: 0.0,
            usage: 0.0,
            prefetch: PrefetchMode::Never,
        }
    }
}

fn rate(timing: &EngineTiming) -> PrefillTimeModel {
    let doubles_at =
        if timing.attention_pair > 0.0 { (timing.prefill_token / timing.attention_pair) as u64 } else { 0 };
    PrefillTimeModel::new(timing.prefill_token * 1e6, Tokens(doubles_at))
}

/// Converts sizes and speeds to tokens of `kv_bytes` each; bytes stay the same.
fn rescale_profile(worker: HardwareProfile, kv_bytes: Bytes) -> HardwareProfile {
    let times = worker.kv_bytes as f64 / kv_bytes.0 as f64;
    let tokens = |tokens: Tokens| Tokens((tokens.0 as f64 * times) as u64);
    let MemorySizes { device, host, host_tokens_per_second, disk, disk_speed } = worker.sizes;
    let mut scaled = HardwareProfile { kv_bytes: kv_bytes.0, ..worker };
    scaled.sizes = MemorySizes {
        device: tokens(device),
        host: tokens(host),
        host_tokens_per_second: host_tokens_per_second * times,
        disk: tokens(disk),
        disk_speed: DiskSpeed { read: disk_speed.read * times, write: disk_speed.write * times },
    };
    scaled.link.tokens_per_second *= times;
    scaled
}

/// Returns the cheapest interval of window checkpoints if every step is restored once from the lowest tier.
fn cheapest_checkpoints(
    attention: &AttentionSpec,
    worker: &HardwareProfile,
    trace: &Trace,
) -> WindowCheckpointInterval {
    let byte = |tokens_per_second: f64| 1e6 / (tokens_per_second * worker.kv_bytes as f64);
    let MemorySizes { disk, disk_speed, host_tokens_per_second, .. } = worker.sizes;
    let (write, load) = match disk {
        Tokens::ZERO => (byte(host_tokens_per_second), byte(host_tokens_per_second)),
        _ => (byte(disk_speed.write), byte(disk_speed.read)),
    };
    let steps = trace.steps().count().max(1) as f64;
    let prompt = trace.steps().map(|step| step.prompt.0).sum::<u64>() as f64 / steps;
    let grown: u64 = (0..trace.runs.len() as u32).map(|run| trace.runs.tokens(engine_model::runs::RunId(run)).0).sum();
    let compute = (worker.timing.prefill_token + worker.timing.attention_pair * prompt) * 1e6;
    let costs = WindowCheckpointCosts { write, load, compute, restores: steps / grown.max(1) as f64 };
    WindowCheckpointInterval::choose(attention, attention.block(), &costs).0
}
