//! The figures of runs, what several seeds of them come to, and how they are written: a table and a page for people, JSON
//! and CSV for programs.

mod ablations;
mod caches;
mod cells;
mod document;
mod mean;
mod metrics;
mod notes;
mod page;
mod prediction;
mod restores;
mod step_breakdown;
mod times;
mod verdicts;

use std::collections::BTreeMap;

use serde::Serialize;

use crate::cache_strategy::CacheStrategy;

pub use ablations::{AblationResult, ablation_table, ablations};
pub use caches::cache_table;
pub use cells::{PolicySummary, summarize_policies, summary_table};
pub use document::{DecisionLatency, ReportSubject, SimulationReport};
pub use mean::{Mean, student_t};
pub use metrics::{Metric, MetricDefinition, csv, definitions};
pub use notes::notes;
pub use page::page;
pub use prediction::PredictionQuality;
pub(crate) use prediction::PredictionSamples;
pub use restores::{RestoreBreakdown, RestoreFigures};
pub use step_breakdown::StepBreakdown;
pub use times::{TimeDistribution, percentile};
pub use verdicts::{BaselineVerdict, verdict_table, verdicts};

/// What one run came to. Times are seconds of virtual time; those of steps stop being counted when fewer sessions run
/// than were asked for.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct RunFigures {
    /// Who decided.
    pub policy: &'static str,
    /// What it was given.
    pub traffic: RunParameters,
    /// Steps that were served.
    pub steps: usize,
    /// Steps that were not when nothing happened any more.
    pub unserved: usize,
    /// From a step's arrival to its first token.
    pub first_token: TimeDistribution,
    /// The same, of steps that add at most 1,024 tokens to what their session had.
    pub small_first_token: TimeDistribution,
    /// From a step's arrival to the end of its answer.
    pub step: TimeDistribution,
    /// The sum of its steps' times, of each session.
    pub session: TimeDistribution,
    /// Between two tokens of an answer: its time after the first token by its tokens.
    pub token: TimeDistribution,
    /// What was computed and what was not.
    pub reuse: ReuseFigures,
    /// Where KV lay and moved.
    pub memory: MemoryFigures,
    /// What the workers did.
    pub service: FleetFigures,
}

/// Which traffic, which chance, and which cache below device memory.
#[derive(Clone, Copy, PartialEq, Serialize, Debug)]
pub struct RunParameters {
    /// Sessions at once, or the factor on the recorded rate.
    pub load: f64,
    /// What chance was drawn from.
    pub seed: u64,
    /// How slower tiers are kept, where that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache: Option<CacheStrategy>,
}

/// What was computed and what was not.
#[derive(Clone, Copy, PartialEq, Serialize, Debug)]
pub struct ReuseFigures {
    /// Prompt tokens that were computed.
    pub prefill_tokens: u64,
    /// Prompt tokens that were not.
    pub saved_tokens: u64,
    /// Of the computed ones, those that had been computed before.
    pub recomputed_tokens: u64,
    /// Share of prompt tokens found in the memory of the worker that computed the rest.
    pub hit_rate: f64,
    /// Share of steps that go on from others and found at least 95 % of what had ever been computed of them.
    pub owner_hit_rate: f64,
    /// Share of them that found at least 95 % of what anybody held of them when they were placed, be it nothing.
    pub best_holder_rate: f64,
    /// Share of prompt tokens that were sent by another worker before the prompt began.
    pub fetched_rate: f64,
    /// Prompt tokens that came back from slower tiers.
    pub restored_tokens: u64,
    /// Measured steps that were loaded or sent KV, and the mean of what their first tokens waited for.
    pub restores: RestoreFigures,
}

/// Where KV lay and moved.
#[derive(Clone, Copy, PartialEq, Serialize, Debug)]
pub struct MemoryFigures {
    /// How often copies were looked at: every 400 steps, and never in the one memory of a bound.
    pub looks: usize,
    /// Cached tokens of all workers by the distinct ones among them; 0 without looks.
    pub duplicate_factor: f64,
    /// Bytes of device memory that a session's prompts take; 0 without looks or sessions.
    pub session_bytes: f64,
    /// Memory of all workers by that; 0 without.
    pub sessions_fit: f64,
    /// Bytes of KV that went over links.
    pub kv_bytes_moved: u64,
    /// Tokens that lost their place in device memory.
    pub evicted_tokens: u64,
    /// What went to disks and came from them.
    pub disk: DiskFigures,
    /// Sessions at once times their mean prompt, by the memory of all workers; 0 where requests come at recorded times.
    pub occupancy: f64,
}

/// What went to the workers' disks and came from them.
#[derive(Clone, Copy, PartialEq, Serialize, Debug)]
pub struct DiskFigures {
    /// Bytes of KV that were written.
    pub written_bytes: u64,
    /// Bytes of KV that were read.
    pub read_bytes: u64,
    /// Of those, each counted once at each worker however often it was read.
    pub useful_bytes: u64,
    /// Bytes of KV that disks were too busy to write.
    pub dropped_bytes: u64,
}

impl DiskFigures {
    /// Bytes written by those that were ever of use; none where none was.
    pub fn write_amplification(&self) -> Option<f64> {
        (self.useful_bytes > 0).then(|| self.written_bytes as f64 / self.useful_bytes as f64)
    }
}

/// What was sent while sessions were between two steps.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug, Default)]
pub struct ReplicationFigures {
    /// How often.
    pub moves: usize,
    /// Tokens of KV.
    pub tokens: u64,
    /// Of the moves, those whose next step went where it lay; the others that were not late were for nothing.
    pub used: usize,
    /// Those still under way when the next step was placed, which did not wait for them.
    pub late: usize,
}

/// What the workers did.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct FleetFigures {
    /// Until the last answer was whole.
    pub seconds: f64,
    /// Sessions that came to their end.
    pub sessions_over: usize,
    /// By the hours of all workers' GPUs.
    pub sessions_per_gpu_hour: f64,
    /// Share of the time of answers in which they waited for a prompt's chunk beside them.
    pub decode_stall: f64,
    /// Share of the workers' time in which they computed prompts.
    pub prefill_use: f64,
    /// Share of the workers' time in which they computed or answered.
    pub busy: f64,
    /// The same while a session is between its steps, each second as often as sessions are; none without such seconds.
    pub gap_use: Option<f64>,
    /// Where a step's time went.
    pub spent: StepBreakdown,
    /// What was sent before a step asked for it.
    pub ahead: ReplicationFigures,
    /// Steps that the policy had no plan of its own for; they went where the fewest requests were.
    pub unplanned: usize,
    /// How often each way of serving was taken.
    pub actions: BTreeMap<&'static str, usize>,
    /// How well first tokens were foretold, by the way of serving and of `all`; empty where the policy foretells none.
    pub foretold: BTreeMap<&'static str, PredictionQuality>,
}
