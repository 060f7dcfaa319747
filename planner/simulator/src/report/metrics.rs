//! Every figure with its name and definition: the single source for the table, the files, the page and `--help`.

use serde::Serialize;

use super::ablations::ABLATION;
use super::prediction::ALL_ACTIONS;
use super::times::{MEASUREMENT_WINDOW, PERCENTILE};
use super::verdicts::VERDICT;
use super::{PredictionQuality, RunStats, StepBreakdown, TtftBreakdown};

/// One figure of a run.
pub struct Metric {
    /// Column name.
    pub name: &'static str,
    /// Definition.
    pub description: &'static str,
    /// Where the figure is shown to people.
    pub(super) visibility: MetricVisibility,
    /// Number of decimal places.
    pub digits: usize,
    /// Returns the value; none if nothing was measured.
    pub value: fn(&RunStats) -> Option<f64>,
}

/// Whether a figure is shown in the table.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum MetricVisibility {
    /// In the table, with its confidence interval.
    TableWithConfidence,
    Table,
    /// In files only.
    Files,
}

/// Definition of a figure or term.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug)]
pub struct TermDefinition {
    /// Column name or term.
    pub name: &'static str,
    /// Definition.
    pub what: &'static str,
}

fn replication_share(stats: &RunStats, moves: usize) -> Option<f64> {
    let all = stats.service.prefix_replication.moves;
    (all > 0).then(|| moves as f64 / all as f64)
}

impl Metric {
    const fn new(visibility: MetricVisibility, name: &'static str, description: &'static str) -> Self {
        Self { name, description, visibility, digits: 0, value: |_| None }
    }

    const fn of(self, digits: usize, value: fn(&RunStats) -> Option<f64>) -> Self {
        Self { digits, value, ..self }
    }
}

const fn in_table_with_confidence(name: &'static str, what: &'static str) -> Metric {
    Metric::new(MetricVisibility::TableWithConfidence, name, what)
}

const fn in_table(name: &'static str, what: &'static str) -> Metric {
    Metric::new(MetricVisibility::Table, name, what)
}

const fn in_files_only(name: &'static str, what: &'static str) -> Metric {
    Metric::new(MetricVisibility::Files, name, what)
}

const FIRST: &str = "seconds from a step's arrival to its first token";
const SMALL: &str = "the same, of steps that add at most 1,024 tokens to what their session had";
const STEP: &str = "seconds from a step's arrival to the end of its answer";
const TOKEN: &str = "milliseconds between two tokens of an answer: its time after the first token by its tokens";

const PLANNING: &str = "microseconds that a policy took to place a step, by the clock of the machine that ran the \
    simulation; the one figure that is not of virtual time and that another run has otherwise. Told in reports only";
const SESSION_HBM: &str = "gigabytes of device memory that an active session takes: the distinct tokens of all active \
    sessions' latest prompts, each as often as it lies in the fleet and at least once, by the sessions; looked at every 400 \
    steps";

const PREDICTION_ERROR: &str = "median of |predicted - observed| / observed, of the seconds from placement to the first token as the \
    policy predicted them and as they were";

/// Returns a part of the prediction quality; none if the policy predicts nothing.
fn prediction(stats: &RunStats, part: fn(&PredictionQuality) -> f64) -> Option<f64> {
    stats.service.ttft_prediction.get(ALL_ACTIONS).map(part)
}

/// Returns a part of the step time; none if no step was measured.
fn step_part(stats: &RunStats, part: fn(&StepBreakdown) -> f64) -> Option<f64> {
    (stats.step.count > 0).then(|| part(&stats.service.step_breakdown))
}

const RESTORED: &str = "measured steps that were loaded KV from the host tier or from disk, or sent KV by another worker \
    before their prompt began";

const WRITE_AMPLIFICATION: &str = "bytes of KV written to disks, by those of them that were ever read back, each counted once at \
    each worker: what a byte of use costs in writes. An SSD's own rewriting comes on top. Nothing where none was read";

/// Returns a part of the time to first token of restored steps; none if there are none.
fn restore(stats: &RunStats, part: fn(&TtftBreakdown) -> f64) -> Option<f64> {
    (stats.reuse.restores.steps > 0).then(|| part(&stats.reuse.restores.split))
}

const OWNER_HIT: &str = "share of the steps that go on from others which found, in the memory of the worker that \
    computed the rest, at least 95 % (less 64 tokens) of what had ever been computed of their prompt: what was \
    evicted is a miss";
const DUPLICATE_FACTOR: &str =
    "cached tokens of all workers by the distinct ones among them, looked at every 400 steps";
const FALLBACK_STEPS: &str =
    "steps that the policy had no plan of its own for; they went where the fewest requests were";
const BEST_HOLDER: &str = "share of the steps that go on from others which found at least 95 % (less 64 tokens) of \
    what anybody still held of them when they were placed, be it nothing";
const GAP_UTILIZATION: &str = "the same share while a session is between its steps (tool gaps), each second counted once for \
    every session that is";
const RECOMPUTE_TIME: &str = "of these: prompt tokens were computed again, by their share of the computed ones";
const HANDOFF_TIME: &str = "of these: the prompt's KV went to the worker that answers, or waited for room there";
const DECODE_TIME: &str = "of these: the answer was generated, waiting beside others' prompts included; the eight \
    parts are the mean step time";
const RESTORE_HOST_S: &str = "seconds of such a step's time to first token, mean: KV came from the host tier";
const PREDICTION_BIAS: &str =
    "median of (predicted - observed) / observed of the same: below zero, steps took longer than predicted";

fn gigabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e9
}

impl Metric {
    /// All figures, in the order of the columns.
    pub const ALL: &[Self] = &[
        in_files_only("steps", "steps that were served").of(0, |f| Some(f.steps as f64)),
        in_files_only("unserved", "steps that were not when nothing happened any more")
            .of(0, |f| Some(f.unserved as f64)),
        in_table_with_confidence("ttft_mean_s", FIRST).of(3, |f| f.ttft.if_measured(|times| times.mean)),
        in_table_with_confidence("ttft_p95_s", FIRST).of(3, |f| f.ttft.if_measured(|times| times.p95)),
        in_table("ttft_p99_s", FIRST).of(3, |f| f.ttft.if_measured(|times| times.p99)),
        in_table("small_step_ttft_p95_s", SMALL).of(3, |f| f.small_step_ttft.if_measured(|times| times.p95)),
        in_files_only("small_step_ttft_p99_s", SMALL).of(3, |f| f.small_step_ttft.if_measured(|times| times.p99)),
        in_table_with_confidence("step_mean_s", STEP).of(3, |f| f.step.if_measured(|times| times.mean)),
        in_files_only("step_p95_s", STEP).of(3, |f| f.step.if_measured(|times| times.p95)),
        in_table_with_confidence("session_mean_s", "the sum of its steps' times, of each session that came to its end")
            .of(1, |f| f.session.if_measured(|times| times.mean)),
        in_table("prefill_mtok", "millions of prompt tokens that were computed")
            .of(2, |f| Some(f.reuse.prefill_tokens as f64 / 1e6)),
        in_files_only(
            "cache_hit_rate",
            "share of prompt tokens found in the memory of the worker that computed the rest",
        )
        .of(4, |f| Some(f.reuse.cache_hit_rate)),
        in_table("owner_hit_rate", OWNER_HIT).of(4, |f| Some(f.reuse.owner_hit_rate)),
        in_files_only("prefetched_share", "share of prompt tokens that another worker sent before the prompt began")
            .of(4, |f| Some(f.reuse.prefetched_share)),
        in_table("duplicate_factor", DUPLICATE_FACTOR)
            .of(3, |f| (f.memory.samples > 0).then_some(f.memory.duplicate_factor)),
        in_table("transferred_gb", "gigabytes of KV that were transferred over links")
            .of(1, |f| Some(f.memory.kv_transfer_bytes as f64 / 1e9)),
        in_files_only("tpot_mean_ms", TOKEN).of(2, |f| f.tpot.if_measured(|times| times.mean * 1e3)),
        in_table("tpot_p99_ms", TOKEN).of(2, |f| f.tpot.if_measured(|times| times.p99 * 1e3)),
        in_table(
            "decode_stall_share",
            "share of the decode time in which answers waited for a prefill chunk in their batch",
        )
        .of(4, |f| Some(f.service.decode_stall_share)),
        in_files_only("prefill_utilization", "share of the workers' time in which they computed prompts")
            .of(4, |f| Some(f.service.prefill_utilization)),
        in_files_only(
            "prefix_replications",
            "how often a prefix was replicated while its session was between two steps",
        )
        .of(0, |f| Some(f.service.prefix_replication.moves as f64)),
        in_files_only("prefix_replications_used", "share of these whose next step went to the replica")
            .of(4, |f| replication_share(f, f.service.prefix_replication.used)),
        in_files_only("prefix_replications_late", "share of these still in flight when the next step was placed")
            .of(4, |f| replication_share(f, f.service.prefix_replication.late)),
        in_files_only("fallback_steps", FALLBACK_STEPS).of(0, |f| Some(f.service.fallback_steps as f64)),
        in_table("sessions_per_gpu_hour", "sessions that came to their end, by the hours of all workers' GPUs")
            .of(3, |f| Some(f.service.sessions_per_gpu_hour)),
        in_files_only("occupancy", "sessions at once x mean prompt / memory of all workers")
            .of(3, |f| Some(f.memory.occupancy)),
        in_table("measured", "steps whose times were measured").of(0, |f| Some(f.step.count as f64)),
        in_files_only("saved_mtok", "millions of prompt tokens that were not computed")
            .of(2, |f| Some(f.reuse.saved_tokens as f64 / 1e6)),
        in_files_only("recomputed_mtok", "millions of the computed prompt tokens that had been computed before")
            .of(2, |f| Some(f.reuse.recomputed_tokens as f64 / 1e6)),
        in_files_only("best_holder_hit_rate", BEST_HOLDER).of(4, |f| Some(f.reuse.best_holder_hit_rate)),
        in_files_only("active_session_hbm_gb", SESSION_HBM)
            .of(2, |f| (f.memory.active_session_bytes > 0.0).then_some(f.memory.active_session_bytes / 1e9)),
        in_table("hbm_session_capacity", "device memory of all workers, by what an active session takes of it")
            .of(1, |f| (f.memory.hbm_session_capacity > 0.0).then_some(f.memory.hbm_session_capacity)),
        in_files_only("worker_utilization", "share of the workers' time in which they computed or answered")
            .of(4, |f| Some(f.service.worker_utilization)),
        in_files_only("gap_utilization", GAP_UTILIZATION).of(4, |f| f.service.gap_utilization),
        in_files_only(
            "admission_wait_s",
            "seconds of a measured step, mean: the policy held it in its admission queue",
        )
        .of(3, |f| step_part(f, |parts| parts.admission_wait)),
        in_files_only("fetch_time_s", "of these: KV of its prompt was on its way from another worker")
            .of(3, |f| step_part(f, |parts| parts.fetch)),
        in_files_only("queue_time_s", "of these: it waited behind others or for memory")
            .of(3, |f| step_part(f, |parts| parts.queue)),
        in_files_only("restore_time_s", "of these: KV came back from slower tiers")
            .of(3, |f| step_part(f, |parts| parts.restore)),
        in_files_only("recompute_time_s", RECOMPUTE_TIME).of(3, |f| step_part(f, |parts| parts.recompute)),
        in_files_only("compute_time_s", "of these: prompt tokens were computed for the first time")
            .of(3, |f| step_part(f, |parts| parts.compute)),
        in_files_only("handoff_time_s", HANDOFF_TIME).of(3, |f| step_part(f, |parts| parts.handoff)),
        in_files_only("decode_time_s", DECODE_TIME).of(3, |f| step_part(f, |parts| parts.decode)),
        in_files_only("restored_mtok", "millions of prompt tokens that came back from slower tiers")
            .of(2, |f| Some(f.reuse.restored_tokens as f64 / 1e6)),
        in_files_only("restored_steps", RESTORED).of(0, |f| Some(f.reuse.restores.steps as f64)),
        in_files_only("restore_host_s", RESTORE_HOST_S).of(3, |f| restore(f, |split| split.host)),
        in_files_only("restore_disk_s", "of these: KV came from disk, waiting for it included")
            .of(3, |f| restore(f, |split| split.disk)),
        in_files_only("restore_network_s", "of these: KV came from another worker")
            .of(3, |f| restore(f, |split| split.network)),
        in_files_only("restore_compute_s", "of these: the rest of the prompt was computed")
            .of(3, |f| restore(f, |split| split.compute)),
        in_files_only("disk_written_gb", "gigabytes of KV that were written to disks")
            .of(1, |f| Some(gigabytes(f.memory.disk.written_bytes))),
        in_files_only("disk_read_gb", "gigabytes of KV that were read from disks")
            .of(1, |f| Some(gigabytes(f.memory.disk.read_bytes))),
        in_files_only("disk_dropped_gb", "gigabytes of KV that disks more than a second behind did not write")
            .of(1, |f| Some(gigabytes(f.memory.disk.dropped_bytes))),
        in_files_only("write_amplification", WRITE_AMPLIFICATION).of(3, |f| f.memory.disk.write_amplification()),
        in_table("ttft_prediction_error", PREDICTION_ERROR).of(3, |f| prediction(f, |all| all.error_p50)),
        in_files_only("ttft_prediction_bias", PREDICTION_BIAS).of(3, |f| prediction(f, |all| all.bias_p50)),
    ];

    /// Returns a figure by its column name.
    pub fn by_name(name: &str) -> Option<&'static Self> {
        Self::ALL.iter().find(|metric| metric.name == name)
    }

    /// Formats the value; `nothing` if nothing was measured.
    pub(super) fn format(&self, stats: &RunStats, nothing: &str) -> String {
        (self.value)(stats).map_or_else(|| nothing.to_owned(), |value| format!("{value:.*}", self.digits))
    }
}

/// Returns the definitions of all columns, and of terms used in them.
pub fn definitions() -> Vec<TermDefinition> {
    let words = [
        ("percentile", PERCENTILE),
        ("measured window", MEASUREMENT_WINDOW),
        ("verdict", VERDICT),
        ("ablation", ABLATION),
        ("planning overhead", PLANNING),
    ];
    let words = words.into_iter().map(|(name, what)| TermDefinition { name, what });
    words
        .chain(Metric::ALL.iter().map(|metric| TermDefinition { name: metric.name, what: metric.description }))
        .collect()
}

/// Returns every run as comma-separated values with a header line. A figure without measurements is empty.
pub fn csv(runs: &[RunStats]) -> String {
    let names = Metric::ALL.iter().map(|metric| metric.name);
    // The optional column comes last, so that the positions of the others are stable.
    let tiers = runs.iter().any(|run| run.traffic.tier_policy.is_some()).then_some("tier_policy");
    let head = ["policy", "load", "seed"].into_iter().chain(names).chain(tiers);
    let mut text = head.collect::<Vec<_>>().join(",") + "\n";
    for run in runs {
        let labels = [run.policy.to_owned(), run.traffic.load.to_string(), run.traffic.seed.to_string()];
        let figures = Metric::ALL.iter().map(|metric| metric.format(run, ""));
        let tiers = tiers.map(|_| run.traffic.tier_policy.map(|policy| policy.to_string()).unwrap_or_default());
        text += &(labels.into_iter().chain(figures).chain(tiers).collect::<Vec<_>>().join(",") + "\n");
    }
    text
}
