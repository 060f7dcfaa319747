//! One of the candidates: the cheapest, or what a baseline would take.

use std::cmp::{Ordering, Reverse};

use vocabulary::{Load, WorkerId};

use crate::candidates::candidates;
use crate::table::Table;
use crate::{Because, Candidate, Decision, Inputs, NoPlan, Plan, Rule, RunnerUp, rendezvous};

/// The decision for one step. Equal inputs give equal decisions, whatever the order of workers and overlaps.
pub fn plan(inputs: &Inputs<'_>) -> Result<Decision, NoPlan> {
    let table = Table::lay(inputs)?;
    let candidates = candidates(&table);
    let allowed = || candidates.iter().filter(|candidate| candidate.refused.is_none());
    let chosen = match inputs.policy.rule {
        Rule::Own => allowed().min_by(|a, b| cheaper(inputs, a, b)),
        Rule::RoundRobin => in_turn(inputs, allowed()),
        Rule::SessionPinning => allowed().min_by_key(|candidate| affinity(inputs, candidate)),
        Rule::MatchRateMinusLoad => {
            let most = inputs.workers.iter().map(|view| busy(&view.load)).max().unwrap_or(0);
            allowed().min_by_key(|candidate| (Reverse(score(inputs, candidate, most)), affinity(inputs, candidate)))
        }
    };
    // Whoever could serve may answer only what a prefill worker hands to it.
    let chosen = *chosen.ok_or(NoPlan::NoneReady)?;
    let others = allowed().filter(|candidate| **candidate != chosen);
    let runner_up = others.min_by(|a, b| cheaper(inputs, a, b)).map(|next| RunnerUp {
        action: next.action,
        worker: next.decode.worker,
        total: next.total,
    });
    let because = Because { rule: inputs.policy.rule, terms: chosen.terms, total: chosen.total, runner_up };
    let Candidate { action, prefill, decode, handoff, claim, .. } = chosen;
    Ok(Decision { step: inputs.step, plan: Plan { action, prefill, decode, handoff, claim, because }, candidates })
}

type Affinity = (Reverse<u64>, WorkerId);

/// The session's order of workers: the same on every router, another for each session.
fn affinity(inputs: &Inputs<'_>, candidate: &Candidate) -> Affinity {
    let worker = candidate.decode.worker;
    (Reverse(rendezvous::weight(inputs.session.id, worker)), worker)
}

/// Cheapest first; equal prices by rendezvous of session and worker; at one worker the simplest action.
fn cheaper(inputs: &Inputs<'_>, a: &Candidate, b: &Candidate) -> Ordering {
    let rest = |candidate: &Candidate| (affinity(inputs, candidate), candidate.action);
    a.total.cmp(&b.total).then_with(|| rest(a).cmp(&rest(b)))
}

fn in_turn<'a>(inputs: &Inputs<'_>, allowed: impl Iterator<Item = &'a Candidate>) -> Option<&'a Candidate> {
    let mut all: Vec<_> = allowed.collect();
    all.sort_unstable_by_key(|candidate| candidate.decode.worker);
    let turn = inputs.turn.checked_rem(all.len() as u64)?;
    all.get(turn as usize).copied()
}

/// Share of the prompt found minus load relative to the busiest worker's, both in thousandths.
fn score(inputs: &Inputs<'_>, candidate: &Candidate, most: u64) -> i64 {
    let own = inputs.workers.iter().find(|view| view.id == candidate.decode.worker);
    let load = own.map_or(0, |view| busy(&view.load));
    thousandths(candidate.decode.tokens_cached.0, inputs.ask.prompt.0) - thousandths(load, most)
}

fn busy(load: &Load) -> u64 {
    u64::from(load.running) + u64::from(load.waiting)
}

fn thousandths(part: u64, whole: u64) -> i64 {
    (u128::from(part) * 1_000).checked_div(u128::from(whole)).map_or(0, |n| n.min(1_000) as i64)
}
