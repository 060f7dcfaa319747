//! Figures of runs, their summary over seeds, and output formats: a table and a page for people, JSON and CSV for
//! programs.

mod ablations;
mod cells;
mod document;
mod metrics;
mod notes;
mod page;
mod prediction;
mod seed_mean;
mod step_breakdown;
mod times;
mod verdicts;

use std::collections::BTreeMap;

use serde::Serialize;

use crate::tier_policy::TierPolicy;

pub use ablations::{AblationResult, ablation_table, ablations};
pub use cells::{PolicySummary, summarize_policies, summary_table, tier_policy_table};
pub use document::{DecisionLatency, ReportSubject, SimulationReport};
pub use metrics::{Metric, TermDefinition, csv, definitions};
pub use notes::notes;
pub use page::page;
pub use prediction::PredictionQuality;
pub(crate) use prediction::PredictionSamples;
pub use seed_mean::{SeedMean, student_t};
pub use step_breakdown::StepBreakdown;
pub use times::{TimeDistribution, percentile};
pub use verdicts::{FigureVerdict, verdict_table, verdicts};

/// Figures of one run. Times are seconds of virtual time; step times are no longer measured once fewer sessions run
/// than were requested.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct RunStats {
    /// Name of the policy.
    pub policy: &'static str,
    /// Parameters of the run.
    pub traffic: RunParameters,
    /// Number of served steps.
    pub steps: usize,
    /// Number of steps that were never served.
    pub unserved: usize,
    /// Time from a step's arrival to its first token.
    pub ttft: TimeDistribution,
    /// The same for steps that add at most 1,024 tokens to their session.
    pub small_step_ttft: TimeDistribution,
    /// Time from a step's arrival to the end of its answer.
    pub step: TimeDistribution,
    /// Sum of the step times of each session.
    pub session: TimeDistribution,
    /// Time per output token after the first one.
    pub tpot: TimeDistribution,
    /// Computed and reused tokens.
    pub reuse: ReuseStats,
    /// Location and transfers of KV.
    pub memory: MemoryStats,
    /// Work of the fleet.
    pub service: FleetWorkStats,
}

/// Parameters of a run: load, seed, and policy of the tiers below device memory.
#[derive(Clone, Copy, PartialEq, Serialize, Debug)]
pub struct RunParameters {
    /// Concurrent sessions, or the factor on the recorded rate.
    pub load: f64,
    /// Random seed.
    pub seed: u64,
    /// Tier policy, if one was requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tier_policy: Option<TierPolicy>,
}

/// Computed and reused tokens.
#[derive(Clone, Copy, PartialEq, Serialize, Debug)]
pub struct ReuseStats {
    /// Prompt tokens that were computed.
    pub prefill_tokens: u64,
    /// Prompt tokens that were not computed.
    pub saved_tokens: u64,
    /// Computed prompt tokens that had been computed before.
    pub recomputed_tokens: u64,
    /// Share of prompt tokens cached at the worker that computed the rest.
    pub cache_hit_rate: f64,
    /// Share of continuing steps that found at least 95 % of what had ever been computed of their prompt.
    pub owner_hit_rate: f64,
    /// Share of continuing steps that found at least 95 % of what any worker held at placement, even if that was
    /// nothing.
    pub best_holder_hit_rate: f64,
    /// Share of prompt tokens that another worker sent before the prompt began.
    pub prefetched_share: f64,
    /// Prompt tokens loaded from slower tiers.
    pub restored_tokens: u64,
    /// Measured steps that loaded or received KV, and the mean breakdown of their time to first token.
    pub restores: RestoreStats,
}

/// Location and transfers of KV.
#[derive(Clone, Copy, PartialEq, Serialize, Debug)]
pub struct MemoryStats {
    /// Number of samples of the copies: one every 400 steps; none for a bound, which has a single memory.
    pub samples: usize,
    /// Cached tokens of all workers divided by the distinct ones among them; 0 without samples.
    pub duplicate_factor: f64,
    /// Mean bytes of device memory per session; 0 without samples or sessions.
    pub active_session_bytes: f64,
    /// Sessions that fit: memory of all workers divided by `active_session_bytes`; 0 if that is unknown.
    pub hbm_session_capacity: f64,
    /// Bytes of KV sent over links.
    pub kv_transfer_bytes: u64,
    /// Tokens evicted from device memory.
    pub evicted_tokens: u64,
    /// Traffic of the disks.
    pub disk: DiskStats,
    /// Concurrent sessions times their mean prompt, divided by the memory of all workers; 0 for requests at recorded
    /// times.
    pub occupancy: f64,
}

/// Traffic of the workers' disks.
#[derive(Clone, Copy, PartialEq, Serialize, Debug)]
pub struct DiskStats {
    /// Bytes of KV written.
    pub written_bytes: u64,
    /// Bytes of KV read.
    pub read_bytes: u64,
    /// Bytes of KV read, each counted once per worker however often it was read.
    pub useful_bytes: u64,
    /// Bytes of KV that disks were too busy to write.
    pub dropped_bytes: u64,
}

impl DiskStats {
    /// Returns bytes written divided by bytes ever read; none if no byte was read.
    pub fn write_amplification(&self) -> Option<f64> {
        (self.useful_bytes > 0).then(|| self.written_bytes as f64 / self.useful_bytes as f64)
    }
}

/// Prefixes replicated while sessions were idle.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug, Default)]
pub struct ReplicationStats {
    /// Number of replications.
    pub moves: usize,
    /// Tokens of KV sent.
    pub tokens: u64,
    /// Replications whose next step was placed where they went. Those neither used nor late were wasted.
    pub used: usize,
    /// Replications still in flight when the next step was placed; it did not wait for them.
    pub late: usize,
}

/// Work of the fleet.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct FleetWorkStats {
    /// Seconds until the last answer was complete.
    pub seconds: f64,
    /// Sessions that finished.
    pub sessions_over: usize,
    /// Finished sessions per GPU-hour of all workers.
    pub sessions_per_gpu_hour: f64,
    /// Share of decode time in which answers waited for a prefill chunk in their batch.
    pub decode_stall_share: f64,
    /// Share of the workers' time spent on prefill.
    pub prefill_utilization: f64,
    /// Share of the workers' time spent on prefill or decode.
    pub worker_utilization: f64,
    /// Busy share of the workers while sessions are idle, weighted by the number of idle sessions; none if none ever
    /// was.
    pub gap_utilization: Option<f64>,
    /// Breakdown of step time.
    pub step_breakdown: StepBreakdown,
    /// Prefixes sent before a step asked for them.
    pub prefix_replication: ReplicationStats,
    /// Steps for which the policy had no plan; they went to the worker with the fewest requests.
    pub fallback_steps: usize,
    /// Number of steps by action.
    pub actions: BTreeMap<&'static str, usize>,
    /// Prediction quality of the time to first token, by action and for `all`; empty if the policy predicts none.
    pub ttft_prediction: BTreeMap<&'static str, PredictionQuality>,
}

/// Seconds of a time to first token by cause, without queueing.
#[derive(Clone, Copy, PartialEq, Serialize, Debug, Default)]
pub struct TtftBreakdown {
    /// Computing what was not restored.
    pub compute: f64,
    /// Loading KV from the host tier.
    pub host: f64,
    /// Loading KV from disk.
    pub disk: f64,
    /// Waiting for KV from another worker before the prompt began.
    pub network: f64,
}

/// Steps that restored KV, with the sum of their times, or their mean at the end.
#[derive(Clone, Copy, PartialEq, Serialize, Debug, Default)]
pub struct RestoreStats {
    /// Number of steps.
    pub steps: usize,
    /// Breakdown of their time.
    #[serde(flatten)]
    pub split: TtftBreakdown,
}

impl RestoreStats {
    pub(crate) fn add(&mut self, step: &TtftBreakdown) {
        self.steps += 1;
        self.split.compute += step.compute;
        self.split.host += step.host;
        self.split.disk += step.disk;
        self.split.network += step.network;
    }

    /// Returns the mean over the steps; zeros if there are none.
    pub(crate) fn mean(&self) -> Self {
        let by = self.steps.max(1) as f64;
        let TtftBreakdown { compute, host, disk, network } = self.split;
        let split = TtftBreakdown { compute: compute / by, host: host / by, disk: disk / by, network: network / by };
        Self { split, ..*self }
    }
}
