//! Compares decisions as they were served with the planner's decisions for the same inputs now. All figures are
//! predictions; only the last table contains observations.

use std::collections::BTreeMap;
use std::sync::Arc;

use planner::{Action, CostTerms, Decision, PlanCandidate, Policy, RecordedPlanningInputs};
use serde::Serialize;
use vocabulary::{Micros, SessionId, WorkerId};

use super::estimate::{MeanEstimate, SessionSums, percentile};
use proxy::decisions::{ReplayAttempt, ReplayRecord};
use proxy::receipt::{AttemptLeg, RequestOutcome};
use vocabulary::RoutingMode;

#[derive(Clone, Debug, Default)]
struct PlanSamples {
    ttft_ms: Vec<f64>,
    computed: u64,
    moved: u64,
}

/// Totals of one side of the comparison.
#[derive(Clone, Copy, PartialEq, Serialize, Debug)]
pub(super) struct PlanTotals {
    /// Predicted milliseconds to the first token.
    pub(super) ttft_mean_ms: f64,
    pub(super) ttft_p50_ms: f64,
    pub(super) ttft_p99_ms: f64,
    pub(super) computed_tokens: u64,
    /// Bytes that move between workers.
    pub(super) kv_transfer_bytes: u64,
}

/// How well the cost of what was done predicted its time to first token.
#[derive(Clone, Copy, PartialEq, Serialize, Debug)]
pub(super) struct TtftAccuracy {
    /// Steps whose first token was observed.
    pub(super) steps: usize,
    /// Median milliseconds.
    pub(super) predicted_ms: f64,
    pub(super) observed_ms: f64,
    /// Median of the absolute differences, as a share of the observed time.
    pub(super) error: f64,
    /// Median of the differences as a share of the observed time; above 0 the prediction was too high.
    pub(super) bias: f64,
}

/// Records by the mode that decided.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug)]
pub(super) struct ModeCounts {
    pub(super) active: u64,
    pub(super) shadow: u64,
    pub(super) bypass: u64,
}

/// Steps for which the recorded policy gives the recorded plan again, and those for which it does not.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug, Default)]
pub(super) struct ReproductionCounts {
    pub(super) reproduced: u64,
    pub(super) unreproduced: u64,
    /// Steps among these whose log does not record KV occupancy: it was written before evictions had a
    /// price.
    pub(super) without_memory: u64,
}

/// Result of a what-if: recorded decisions compared with what-if decisions.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub(super) struct WhatIfComparison {
    /// Records that were read.
    #[serde(flatten)]
    pub(super) modes: ModeCounts,
    /// Of these, the steps that could be compared; others were not planned, or served in a way that was not priced.
    pub(super) compared: usize,
    pub(super) sessions: usize,
    /// Steps that nobody could serve in the other fleet.
    pub(super) unservable: u64,
    #[serde(flatten)]
    pub(super) replayed: ReproductionCounts,
    /// Steps that would be served in another way than they were.
    pub(super) changed_plans: u64,
    pub(super) as_served: Option<PlanTotals>,
    pub(super) what_if: Option<PlanTotals>,
    /// Milliseconds that a step's first token would come earlier, predicted.
    pub(super) predicted_ttft_saving_ms: Option<MeanEstimate>,
    /// Steps by action: as served, and what-if.
    pub(super) actions: BTreeMap<Action, [u64; 2]>,
    /// How well the times to first token were predicted.
    pub(super) ttft_prediction: BTreeMap<Action, TtftAccuracy>,
}

/// What a what-if changes in the recorded planning inputs.
#[derive(Clone, Debug, Default)]
pub(super) struct WhatIfScenario {
    /// The policy in place of the recorded one.
    pub(super) policy: Option<Policy>,
    pub(super) removed_workers: Vec<WorkerId>,
    /// Factors on every worker's prefill rate and every link's rate.
    pub(super) prefill_speedup: Option<f64>,
    pub(super) link_speedup: Option<f64>,
}

impl WhatIfScenario {
    fn apply(&self, mut case: RecordedPlanningInputs) -> RecordedPlanningInputs {
        if self.removed_workers.is_empty() && self.prefill_speedup.is_none() && self.link_speedup.is_none() {
            return case;
        }
        let mut workers = case.workers.to_vec();
        workers.retain(|worker| !self.removed_workers.contains(&worker.id));
        case.overlaps.retain(|overlap| !self.removed_workers.contains(&overlap.worker));
        for worker in &mut workers {
            worker.speeds.prefill_tokens_per_second *= self.prefill_speedup.unwrap_or(1.0);
            if let Some(link) = &mut worker.link {
                link.bytes_per_second *= self.link_speedup.unwrap_or(1.0);
            }
        }
        case.workers = workers.into();
        case
    }
}

/// Milliseconds until the first token, as the price has them: the terms that are time of this step, not of others.
fn ttft_ms(terms: &CostTerms) -> f64 {
    terms.time_to_first_token().0 as f64 / 1e3
}

impl PlanSamples {
    fn add(&mut self, candidate: &PlanCandidate) {
        self.ttft_ms.push(ttft_ms(&candidate.cost_terms));
        self.computed += candidate.sequence.legs().map(|leg| leg.computed_tokens.0).sum::<u64>();
        self.moved += candidate.sequence.moved_bytes().0;
    }

    fn totals(mut self) -> Option<PlanTotals> {
        let mean = self.ttft_ms.iter().sum::<f64>() / self.ttft_ms.len() as f64;
        Some(PlanTotals {
            ttft_mean_ms: mean,
            ttft_p50_ms: percentile(&mut self.ttft_ms, 0.5)?,
            ttft_p99_ms: percentile(&mut self.ttft_ms, 0.99)?,
            computed_tokens: self.computed,
            kv_transfer_bytes: self.moved,
        })
    }
}

/// Builds the comparison record by record.
#[derive(Debug, Default)]
pub(super) struct ComparisonBuilder {
    modes: [u64; 3],
    /// Workers that were asked about.
    workers: BTreeMap<WorkerId, Arc<str>>,
    served: PlanSamples,
    planned: PlanSamples,
    saved: SessionSums,
    unservable: u64,
    replayed: ReproductionCounts,
    changed_plans: u64,
    actions: BTreeMap<Action, [u64; 2]>,
    /// Predicted and observed milliseconds.
    predictions: BTreeMap<Action, Vec<(f64, f64)>>,
}

/// The candidate that a decision's plan is.
fn chosen_candidate(decision: &Decision) -> Option<&PlanCandidate> {
    let plan = &decision.plan;
    let is = |candidate: &&PlanCandidate| (candidate.action, candidate.sequence) == (plan.action, plan.sequence);
    decision.candidates.iter().find(is)
}

/// Returns the candidate that was executed. The bypass labels every plan at one worker colocated prefill; the planner
/// has other labels, by what the worker lacks.
fn served_candidate<'a>(decision: &'a Decision, tried: &ReplayAttempt) -> Option<&'a PlanCandidate> {
    let at =
        |candidate: &&PlanCandidate| candidate.sequence.legs().map(AttemptLeg::from).eq(tried.legs.iter().copied());
    let all = || decision.candidates.iter().filter(at);
    all().find(|one| one.action == tried.action).or_else(|| all().find(|one| !one.sequence.has_handoff()))
}

impl ComparisonBuilder {
    /// One more record, beside `change`.
    pub(super) fn add(&mut self, entry: ReplayRecord, change: &WhatIfScenario) {
        let ReplayRecord { head, receipt: told, case } = entry;
        self.modes[told.mode as usize] += 1;
        let (Some(recorded), Some(case), Some(tried)) = (told.decision, case, told.attempts.last()) else {
            return;
        };
        for worker in case.workers.iter() {
            self.workers.entry(worker.id).or_insert_with(|| worker.endpoint.clone());
        }
        let Some(served) = served_candidate(&recorded, tried) else { return };
        if let Some(saw) = told.observed.filter(|saw| saw.outcome == RequestOutcome::Complete)
            && let Some(Micros(seen)) = saw.ttft
        {
            // No price is of the time that a step waits before it starts.
            let waited = told.admission_wait.map_or(0, |waited| waited.duration.0);
            let pair = (ttft_ms(&served.cost_terms), seen.saturating_sub(waited) as f64 / 1e3);
            self.predictions.entry(served.action).or_default().push(pair);
        }
        let configured = (head.configured.attention.get(&case.request.model), &head.configured.shapes[..]);
        self.replayed.without_memory += u64::from(case.kv_occupancy.is_none());
        match case.plan(&head.policy, configured) {
            Ok(again) if again.plan == recorded.plan => self.replayed.reproduced += 1,
            _ => self.replayed.unreproduced += 1,
        }
        let policy = change.policy.as_ref().unwrap_or(&head.policy);
        let Ok(decision) = change.apply(case).plan(policy, configured) else {
            self.unservable += 1;
            return;
        };
        if let Some(planned) = chosen_candidate(&decision) {
            self.compare(told.lookup.session_id, served, planned);
        }
    }

    fn compare(&mut self, session: SessionId, served: &PlanCandidate, planned: &PlanCandidate) {
        self.served.add(served);
        self.planned.add(planned);
        self.saved.add(session, ttft_ms(&served.cost_terms) - ttft_ms(&planned.cost_terms));
        self.actions.entry(served.action).or_default()[0] += 1;
        self.actions.entry(planned.action).or_default()[1] += 1;
        let is_same = served.action == planned.action && served.sequence.workers().eq(planned.sequence.workers());
        self.changed_plans += u64::from(!is_same);
    }

    /// The workers that were asked about, with their URLs.
    pub(super) fn workers(&self) -> &BTreeMap<WorkerId, Arc<str>> {
        &self.workers
    }

    pub(super) fn finish(self) -> WhatIfComparison {
        let [shadow, bypass, active] =
            [RoutingMode::Shadow, RoutingMode::Bypass, RoutingMode::Active].map(|mode| self.modes[mode as usize]);
        let accuracy = |(action, pairs): (Action, Vec<(f64, f64)>)| Some((action, prediction_error(&pairs)?));
        WhatIfComparison {
            modes: ModeCounts { active, shadow, bypass },
            compared: self.served.ttft_ms.len(),
            sessions: self.saved.sessions(),
            unservable: self.unservable,
            replayed: self.replayed,
            changed_plans: self.changed_plans,
            as_served: self.served.totals(),
            what_if: self.planned.totals(),
            predicted_ttft_saving_ms: self.saved.estimate(),
            actions: self.actions,
            ttft_prediction: self.predictions.into_iter().filter_map(accuracy).collect(),
        }
    }
}

fn prediction_error(pairs: &[(f64, f64)]) -> Option<TtftAccuracy> {
    let median = |of: &dyn Fn(&(f64, f64)) -> f64| percentile(&mut pairs.iter().map(of).collect::<Vec<_>>(), 0.5);
    let off = |(predicted, observed): &(f64, f64)| (predicted - observed) / observed.max(0.001);
    Some(TtftAccuracy {
        steps: pairs.len(),
        predicted_ms: median(&|pair| pair.0)?,
        observed_ms: median(&|pair| pair.1)?,
        error: median(&|pair| off(pair).abs())?,
        bias: median(&|pair| off(pair))?,
    })
}
