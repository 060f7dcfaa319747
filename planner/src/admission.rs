//! Whether a step starts now or waits a little, so that it does not push out the KV of sessions that are about to want it.
//! Decides; whoever asks does the waiting.
//!
//! Where memory is full each step pushes somebody's KV out, who comes back, computes it again and pushes out the next one.
//! Beyond some load workers do little else. So a step waits while its plan costs others more than the settings tolerate: it
//! starts once sessions have ended or paused for longer, since what those have is cheap to push out. Steps whose KV lies
//! where they go take little memory, and hardly ever wait.

mod queue;

use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use vocabulary::{Micros, Tokens};

use crate::cached_prefix::CachedPrefix;
use crate::kv_occupancy::{SessionLookup, Victim};
use crate::micros::micros;
use crate::worker_candidate::WorkerCandidate;
use crate::{Decision, PlanningInputs};
pub use queue::{AdmissionRequest, StepQueue};

/// A victim costs as much as being computed again this many times, at most; so does what only an answer's end makes room for.
const MAX_RECOMPUTES: f64 = 200.0;

/// When steps wait.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug, SmartDefault)]
#[serde(default, deny_unknown_fields)]
pub struct AdmissionLimits {
    /// Others' computing that a step may cause and start at once all the same.
    #[default(Micros(3_000_000))]
    pub tolerated: Micros,
    /// The longest that a step waits, whatever it costs others; with 0 none waits.
    #[default(Micros(300_000_000))]
    pub longest: Micros,
    /// So many steps wait at most; one more starts.
    #[default(1_024)]
    pub most: usize,
}

/// What a step does next.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum AdmissionDecision {
    /// It starts as planned.
    Start {
        /// Why now.
        why: AdmissionReason,
    },
    /// It waits, and is planned anew when something has changed.
    Hold {
        /// What starting now would cost others.
        costs_others: Micros,
    },
}

/// Why a step starts.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub enum AdmissionReason {
    /// It costs others no more than is tolerated.
    Tolerated,
    /// It has waited for the longest time.
    Longest,
    /// No place was left in the queue.
    NoPlace,
}

/// What others will spend on computing again if this is done now, in microseconds. Zero where there is room, and where the
/// memory's size is unknown. A session that is new there takes what it is expected to grow by as well: those that are there go on
/// growing, and would push it out with every step.
///
/// For each victim at the worker that answers `time to have it eviction_cost x p / (1 - p)`, with the chance `p` that its session
/// comes back within 15 s: it then pushes somebody out in turn, who comes back with about that chance as well, and so on.
pub fn displaced_compute(inputs: &PlanningInputs<'_>, decision: &Decision) -> Micros {
    let leg = &decision.plan.decode;
    let Some(view) = inputs.workers.iter().find(|view| view.id == leg.worker) else { return Micros::ZERO };
    if view.capacity.kv == Tokens::ZERO {
        return Micros::ZERO;
    }
    let visit = inputs.occupancy.model.session_lookup(inputs.session.id, inputs.occupancy.now);
    let alone = decision.local_legs().find(|alone| alone.worker == leg.worker);
    let cached = alone.unwrap_or(leg).tokens_cached;
    let at =
        WorkerCandidate::new((inputs, visit), view, CachedPrefix { rank: leg.rank, cached, ..CachedPrefix::default() });
    let stored = inputs.request.prompt + inputs.request.answer + at.expected_growth(inputs) - cached;
    match stored - at.headroom.free {
        Tokens::ZERO => Micros::ZERO,
        missing => micros(cascading_recompute_cost(visit, &at, missing)),
    }
}

fn cascading_recompute_cost<'a>(visit: SessionLookup<'a>, at: &WorkerCandidate<'a>, missing: Tokens) -> f64 {
    let evicted = missing.min(at.headroom.evictable());
    let (mut left, mut again) = (evicted, 0.0);
    for Victim { tokens, chance } in visit.short_term_victims(&at.headroom) {
        let part = tokens.min(left);
        again += at.eviction_cost.span(tokens - part, tokens) * expected_recomputes(chance);
        left -= part;
        if left == Tokens::ZERO {
            break;
        }
    }
    if left > Tokens::ZERO && left < evicted {
        again *= evicted.0 as f64 / (evicted - left).0 as f64;
    }
    again + at.speed.rate.span(Tokens::ZERO, missing - evicted).0 as f64 * MAX_RECOMPUTES
}

/// How often something is computed again in all, where each time is followed by another with this chance.
fn expected_recomputes(chance: f64) -> f64 {
    if chance < 1.0 { (chance / (1.0 - chance)).min(MAX_RECOMPUTES) } else { MAX_RECOMPUTES }
}
