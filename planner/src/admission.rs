//! Admission control: whether a step starts now or queues, so that it does not evict KV that other sessions will soon
//! reuse. Decides only; the caller does the waiting.
//!
//! When KV memory is full, every step evicts the KV of a session that comes back, recomputes it and evicts the next
//! one. Beyond some load, workers only thrash. A step therefore queues while its plan displaces more compute of other
//! sessions than the settings tolerate. It starts once sessions have ended or have been idle for longer, because their
//! KV is cheap to evict. A step whose KV is already at its target takes little memory and rarely waits.

mod queue;

use serde::{Deserialize, Serialize};
use vocabulary::{Micros, Tokens};

use crate::cached_prefix::CachedPrefix;
use crate::kv_occupancy::{EvictionVictim, SessionLookup};
use crate::micros::micros;
use crate::worker_candidate::WorkerCandidate;
use crate::{Decision, PlanningInputs};
pub use queue::{AdmissionRequest, StepQueue};

/// Cap on how often one victim's KV counts as recomputed; also the factor for KV that fits only once a running answer
/// ends.
const MAX_RECOMPUTES: f64 = 200.0;

/// Whether a step starts or queues.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum AdmissionDecision {
    /// The step starts as planned.
    Start {
        /// Why it starts now.
        why: StepStartReason,
    },
    /// The step queues, and is planned again when something has changed.
    Hold {
        /// Compute that starting now would displace, in microseconds.
        costs_others: Micros,
    },
}

/// Why a step starts.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub enum StepStartReason {
    /// The displaced compute is within the tolerated amount.
    Tolerated,
    /// The step has queued for the longest allowed time.
    Longest,
    /// The queue is full.
    NoPlace,
}

/// Returns the compute, in microseconds, that other sessions will spend on recomputing KV if this decision is executed
/// now. Zero when the KV fits, and when the memory's size is unknown. A session without KV at the worker is also
/// charged its expected growth: the sessions already there keep growing, and would evict it at every step.
///
/// Each victim at the decode worker counts `recovery_cost x p / (1 - p)`, where `p` is the chance that its session
/// comes back within 15 s: a returning session evicts another one, which returns with about the same chance, and so on.
pub fn displaced_compute(inputs: &PlanningInputs<'_>, decision: &Decision) -> Micros {
    let leg = decision.plan.answer_leg();
    let Some(view) = inputs.workers.iter().find(|view| view.id == leg.worker) else { return Micros::ZERO };
    if view.capacity.kv == Tokens::ZERO {
        return Micros::ZERO;
    }
    let session_lookup = inputs.occupancy.model.session_lookup(inputs.session.id, inputs.occupancy.now);
    let local_leg = decision.local_legs().find(|local_leg| local_leg.worker == leg.worker);
    let cached = local_leg.unwrap_or(leg).cached_tokens;
    let at = WorkerCandidate::new(
        (inputs, session_lookup),
        view,
        CachedPrefix { rank: leg.rank, cached, ..CachedPrefix::default() },
    );
    let stored =
        inputs.request.prompt_tokens + inputs.request.expected_output_tokens + at.expected_growth(inputs) - cached;
    match stored - at.headroom.free {
        Tokens::ZERO => Micros::ZERO,
        missing => micros(cascading_recompute_cost(session_lookup, &at, missing)),
    }
}

fn cascading_recompute_cost<'a>(session_lookup: SessionLookup<'a>, at: &WorkerCandidate<'a>, missing: Tokens) -> f64 {
    let evicted = missing.min(at.headroom.evictable());
    let (mut remaining, mut recompute_cost) = (evicted, 0.0);
    for EvictionVictim { tokens, return_probability } in session_lookup.short_term_victims(&at.headroom) {
        let part = tokens.min(remaining);
        recompute_cost += at.recovery_cost.span(tokens - part, tokens) * expected_recomputes(return_probability);
        remaining -= part;
        if remaining == Tokens::ZERO {
            break;
        }
    }
    if remaining > Tokens::ZERO && remaining < evicted {
        recompute_cost *= evicted.0 as f64 / (evicted - remaining).0 as f64;
    }
    recompute_cost + at.speed.rate.span(Tokens::ZERO, missing - evicted).0 as f64 * MAX_RECOMPUTES
}

/// Expected number of recomputations if each one causes another with this chance: the geometric series, capped.
fn expected_recomputes(return_probability: f64) -> f64 {
    if return_probability < 1.0 {
        (return_probability / (1.0 - return_probability)).min(MAX_RECOMPUTES)
    } else {
        MAX_RECOMPUTES
    }
}
