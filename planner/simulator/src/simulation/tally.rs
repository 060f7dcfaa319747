//! Counters of a running simulation, and its figures at the end.

use std::collections::{BTreeMap, HashMap, HashSet};

use engine_model::runs::{DiskTraffic, PrefillStart, RunTree, Seconds};
use vocabulary::Tokens;

use super::Simulation;
use super::memory_sampler::MemorySampler;
use super::reuse::{ReuseCounter, share};
use super::stage_times::StageTimestamps;
use super::utilization::UtilizationTracker;
use crate::policies::{Action, PlacementPrediction, StepRef};
use crate::report::{
    DiskStats, FleetWorkStats, MemoryStats, PredictionSamples, RestoreStats, ReuseStats, RunParameters, RunStats,
    StepBreakdown, TimeDistribution,
};
use crate::trace::{ArrivalProcess, Trace, TraceStep};

/// Number of finished steps between two samples of the copies.
const SAMPLE_EVERY: usize = 400;
/// Most new tokens of a small step.
const MAX_SMALL_STEP: Tokens = Tokens(1_024);

#[derive(Default)]
pub(super) struct RunTally {
    /// Small steps: they continue others, and nearly all of their prompt was in their own session before.
    small_steps: HashSet<StepRef>,
    is_independent: bool,
    /// Whether times are no longer measured because the traffic thins out.
    pub(super) is_window_closed: bool,
    pub(super) finished_steps: usize,
    /// Time at which the last answer was complete.
    last_finished_at: Seconds,
    /// Sum of the step times so far, by session.
    time_by_session: HashMap<usize, f64>,
    samples: TimeSamples,
    reused: ReuseCounter,
    pub(super) memory_samples: MemorySampler,
    pub(super) utilization: UtilizationTracker,
    actions: BTreeMap<Action, usize>,
}

#[derive(Default)]
struct TimeSamples {
    first: Vec<f64>,
    small: Vec<f64>,
    step: Vec<f64>,
    session: Vec<f64>,
    token: Vec<f64>,
    spent: StepBreakdown,
    restores: RestoreStats,
    predictions: PredictionSamples,
}

impl RunTally {
    pub(super) fn new(trace: &Trace) -> Self {
        let (small_steps, is_independent) = (small_steps(trace), trace.arrivals == ArrivalProcess::Recorded);
        Self { small_steps, is_independent, reused: ReuseCounter::new(trace.runs.len()), ..Self::default() }
    }

    pub(super) fn session_finished(&mut self, session: usize) {
        let took = self.time_by_session.remove(&session).unwrap_or_default();
        self.samples.session.push(took);
        self.memory_samples.session_finished(session);
        self.utilization.closed(session);
    }

    pub(super) fn action(&mut self, action: Action) {
        *self.actions.entry(action).or_default() += 1;
    }

    /// Records the start of a prompt. `best` is the longest prefix that any worker held at placement. Returns the
    /// prompt's tokens that are recomputed.
    pub(super) fn started(
        &mut self,
        runs: &RunTree,
        (at, step): (StepRef, &TraceStep),
        (started, best): (&PrefillStart, Tokens),
    ) -> Tokens {
        if !self.is_independent {
            self.memory_samples.record_prompt(at, step);
        }
        let goes_on = self.is_independent || !step.after.is_empty();
        self.reused.record_prompt(runs, (step, started), goes_on.then_some(best))
    }

    /// Records the first token of a step.
    pub(super) fn record_first_token(&mut self, at: StepRef, stages: &StageTimestamps) {
        if self.is_window_closed {
            return;
        }
        let waited = (stages.first_token - stages.arrived).0;
        self.samples.first.push(waited);
        if self.small_steps.contains(&at) {
            self.samples.small.push(waited);
        }
        stages.restore_breakdown().iter().for_each(|restore| self.samples.restores.add(restore));
    }

    /// Records the time to first token of a step with a prediction.
    pub(super) fn record_prediction(&mut self, predicted: &PlacementPrediction, took: Seconds) {
        if !self.is_window_closed {
            self.samples.predictions.add(predicted.action, (predicted.ttft, took));
        }
    }

    pub(super) fn step_finished(&mut self, (at, step): (StepRef, &TraceStep), now: Seconds, stages: &StageTimestamps) {
        let (took, answering) = (now - stages.arrived, now - stages.first_token);
        self.finished_steps += 1;
        self.last_finished_at = now;
        *self.time_by_session.entry(at.session).or_default() += took.0;
        self.reused.mark_computed(step.resent_path.as_deref().unwrap_or_default());
        self.utilization.step_finished(at.session);
        if !self.is_window_closed {
            self.samples.step.push(took.0);
            self.samples.token.push(answering.0 / step.answer.0.max(1) as f64);
            self.samples.spent.add(&stages.step_breakdown(now));
        }
    }

    pub(super) fn is_sample_due(&self) -> bool {
        self.finished_steps.is_multiple_of(SAMPLE_EVERY)
    }
}

/// Returns the steps that add few tokens to what their session had.
fn small_steps(trace: &Trace) -> HashSet<StepRef> {
    let mut small = HashSet::new();
    if trace.arrivals == ArrivalProcess::Recorded {
        return small;
    }
    for (session, recorded) in trace.sessions.iter().enumerate() {
        let mut had = HashSet::new();
        for (index, step) in recorded.steps.iter().enumerate() {
            let known = step.path.iter().take_while(|run| had.contains(*run)).count();
            let new = step.prompt - trace.runs.end_depth(&step.path[..known]);
            had.extend(step.path.iter().copied());
            if !step.after.is_empty() && new <= MAX_SMALL_STEP {
                small.insert(StepRef { session, step: index });
            }
        }
    }
    small
}

impl Simulation<'_> {
    /// Returns the figures of a finished run.
    pub(super) fn figures(self) -> RunStats {
        let all = self.trace.steps().count();
        let (memory, service) = (self.memory(), self.service());
        let tally = self.tally;
        RunStats {
            policy: self.kind.as_str(),
            traffic: RunParameters {
                load: self.setup.load,
                seed: self.setup.seed,
                tier_policy: self.driver.tier_policy,
            },
            steps: tally.finished_steps,
            unserved: all - tally.finished_steps,
            ttft: TimeDistribution::of(tally.samples.first),
            small_step_ttft: TimeDistribution::of(tally.samples.small),
            step: TimeDistribution::of(tally.samples.step),
            session: TimeDistribution::of(tally.samples.session),
            tpot: TimeDistribution::of(tally.samples.token),
            reuse: ReuseStats { restores: tally.samples.restores.mean(), ..tally.reused.figures() },
            memory,
            service,
        }
    }

    fn memory(&self) -> MemoryStats {
        let prompts: u64 = self.trace.steps().map(|step| step.prompt.0).sum();
        let mean_prompt = share(prompts as f64, self.trace.steps().count() as f64);
        let in_sessions = self.trace.arrivals == ArrivalProcess::AfterDependencies;
        let capacity = self.setup.workers as f64 * self.setup.spec.sizes.device.0 as f64;
        let (samples, duplicate_factor, session) = self.tally.memory_samples.summary();
        MemoryStats {
            samples,
            duplicate_factor,
            active_session_bytes: session * self.setup.spec.kv_bytes as f64,
            hbm_session_capacity: share(capacity, session),
            kv_transfer_bytes: self.links.moved_tokens.0 * self.setup.spec.kv_bytes,
            evicted_tokens: self.engines.iter().map(|worker| worker.engine.evicted().0).sum(),
            disk: self.disk(),
            occupancy: if in_sessions { self.setup.load * mean_prompt / capacity } else { 0.0 },
        }
    }

    fn disk(&self) -> DiskStats {
        let bytes = |of: fn(DiskTraffic) -> Tokens| -> u64 {
            let tokens: Tokens = self.engines.iter().map(|worker| of(worker.engine.disk_use())).sum();
            tokens.0 * self.setup.spec.kv_bytes
        };
        DiskStats {
            written_bytes: bytes(|disk| disk.written),
            read_bytes: bytes(|disk| disk.read),
            useful_bytes: bytes(|disk| disk.useful),
            dropped_bytes: bytes(|disk| disk.dropped),
        }
    }

    fn service(&self) -> FleetWorkStats {
        let tally = &self.tally;
        let usage = |of: fn(engine_model::runs::EngineBusyTime) -> f64| -> f64 {
            self.engines.iter().map(|worker| of(worker.engine.usage())).sum()
        };
        let (span, workers) = (tally.last_finished_at.0, self.setup.workers as f64);
        let sessions_over = tally.samples.session.len();
        let hours = span * workers * f64::from(self.setup.spec.gpus) / 3_600.0;
        FleetWorkStats {
            seconds: span,
            sessions_over,
            sessions_per_gpu_hour: share(sessions_over as f64, hours),
            decode_stall_share: share(usage(|usage| usage.stalled), usage(|usage| usage.decoding)),
            prefill_utilization: share(usage(|usage| usage.prefilling), span * workers),
            worker_utilization: share(tally.utilization.busy_seconds, span * workers),
            gap_utilization: tally.utilization.gap_utilization(workers),
            step_breakdown: tally.samples.spent.mean_over(tally.samples.step.len()),
            prefix_replication: self.links.replication.figures,
            fallback_steps: self.driver.policy.fallback_steps(),
            actions: tally.actions.iter().map(|(action, count)| (action.as_str(), *count)).collect(),
            ttft_prediction: tally.samples.predictions.figures(),
        }
    }
}
