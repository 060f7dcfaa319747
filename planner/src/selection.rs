//! Selection of one candidate: the cheapest, or the one that a baseline would take.

use std::cmp::{Ordering, Reverse};

use vocabulary::WorkerId;

use crate::candidate_table::CandidateTable;
use crate::candidates::candidates;
use crate::{
    Decision, Plan, PlanCandidate, PlanRationale, PlanningError, PlanningInputs, RunnerUp, SelectionRule, rendezvous,
};

/// Plans one step. Equal inputs give equal decisions, whatever the order of workers and overlaps.
pub fn plan(inputs: &PlanningInputs<'_>) -> Result<Decision, PlanningError> {
    let table = CandidateTable::build(inputs)?;
    let candidates = candidates(&table);
    let allowed = || candidates.iter().filter(|candidate| candidate.refusal.is_none());
    let chosen = match inputs.policy.policy {
        SelectionRule::LowestCost => allowed().min_by(|a, b| cheaper(inputs, a, b)),
        SelectionRule::RoundRobin => round_robin(inputs, allowed()),
        SelectionRule::SessionPinning => allowed().min_by_key(|candidate| affinity_key(inputs, candidate)),
        SelectionRule::MatchRateMinusLoad => {
            let most = inputs.workers.iter().map(|view| view.load.requests()).max().unwrap_or(0);
            allowed().min_by_key(|candidate| {
                (Reverse(match_rate_minus_load(inputs, candidate, most)), affinity_key(inputs, candidate))
            })
        }
    };
    // All workers that could serve may depend on a prefill worker.
    let chosen = *chosen.ok_or(PlanningError::NoneReady)?;
    let others = allowed().filter(|candidate| **candidate != chosen);
    let runner_up = others.min_by(|a, b| cheaper(inputs, a, b)).map(|next| RunnerUp {
        action: next.action,
        worker: next.sequence.target(),
        total_cost: next.total_cost,
    });
    let rationale = PlanRationale {
        policy: inputs.policy.policy,
        cost_terms: chosen.cost_terms,
        total_cost: chosen.total_cost,
        runner_up,
    };
    let PlanCandidate { action, sequence, ownership, .. } = chosen;
    Ok(Decision { step_kind: inputs.step, plan: Plan { action, sequence, ownership, rationale }, candidates })
}

type RendezvousRank = (Reverse<u64>, WorkerId);

/// Sort key of a worker for the session: the same on every router, different for each session.
fn affinity_key(inputs: &PlanningInputs<'_>, candidate: &PlanCandidate) -> RendezvousRank {
    let worker = candidate.sequence.target();
    (Reverse(rendezvous::weight(inputs.session.id, worker)), worker)
}

/// Orders by cost, then by rendezvous of session and worker, then by action, the simplest first.
fn cheaper(inputs: &PlanningInputs<'_>, a: &PlanCandidate, b: &PlanCandidate) -> Ordering {
    let rest = |candidate: &PlanCandidate| (affinity_key(inputs, candidate), candidate.action);
    a.total_cost.cmp(&b.total_cost).then_with(|| rest(a).cmp(&rest(b)))
}

fn round_robin<'a>(
    inputs: &PlanningInputs<'_>,
    allowed: impl Iterator<Item = &'a PlanCandidate>,
) -> Option<&'a PlanCandidate> {
    let mut all: Vec<_> = allowed.collect();
    all.sort_unstable_by_key(|candidate| candidate.sequence.target());
    let turn = inputs.round_robin_index.checked_rem(all.len() as u64)?;
    all.get(turn as usize).copied()
}

/// Returns the cached share of the prompt minus the load relative to the busiest worker's, both in thousandths.
fn match_rate_minus_load(inputs: &PlanningInputs<'_>, candidate: &PlanCandidate, most: u64) -> i64 {
    let leg = candidate.sequence.answer_leg();
    let own = inputs.workers.iter().find(|view| view.id == leg.worker);
    let load = own.map_or(0, |view| view.load.requests());
    thousandths(leg.cached_tokens.0, inputs.request.prompt_tokens.0) - thousandths(load, most)
}

fn thousandths(part: u64, whole: u64) -> i64 {
    (u128::from(part) * 1_000).checked_div(u128::from(whole)).map_or(0, |n| n.min(1_000) as i64)
}
