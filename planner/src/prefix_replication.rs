//! Whether a session's prefix is to move while the session is between two steps, before the next one asks for it.
//!
//! The next step is planned as if it came now, and once more as if its prefix lay at the target already. What that saves counts
//! by the chance that the session comes back shortly: later the fleet is another one. A move never changes what is legal: it is
//! the replicate of a candidate that the step itself might have taken.

use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use vocabulary::{Blocks, Bytes, DpRank, KvIndexState, Micros, Overlap, Tier, WorkerHealth, WorkerId};

use crate::cost::CostModel;
use crate::fleet_layout::FleetLayout;
use crate::micros::{micros, valid_or_zero};
use crate::pressure::CopyKind;
use crate::worker_candidate::WorkerSpeed;
use crate::{Handoff, OwnershipClaim, PlanCandidate, PlanningInputs, SelectionRule, SendTiming, plan};

/// What a move has to be worth, and what it keeps away from.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize, Debug, SmartDefault)]
pub struct ReplicationLimits {
    /// What is saved, by what is paid, at the least.
    #[default(2.0)]
    pub margin: f64,
    /// What is left of the savings, at the least.
    #[default(Micros(20_000))]
    pub least: Micros,
    /// A target whose queue is longer is left alone.
    #[default(Micros(500_000))]
    pub queue: Micros,
    /// The same of a source that sends when the turn of its request comes: it computes nothing for that, but the KV comes late.
    #[default(Micros(5_000_000))]
    pub source_queue: Micros,
    /// The most that moves at once.
    #[default(Bytes(16 << 30))]
    pub bytes: Bytes,
}

/// What becomes of ownership.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub enum ReplicationPurpose {
    /// The owner stays; the target gets a read-only copy.
    Replicate,
    /// The owner should be left, and the target is to become it.
    Migrate,
}

/// A move that pays.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct PrefixReplication {
    /// What becomes of ownership.
    pub kind: ReplicationPurpose,
    /// Who sends.
    pub from: WorkerId,
    /// Which rank of it.
    pub from_rank: DpRank,
    /// Who gets it.
    pub to: WorkerId,
    /// Which rank of it.
    pub to_rank: DpRank,
    /// Chain blocks from the start.
    pub blocks: Blocks,
    /// What the target lacks of them.
    pub bytes: Bytes,
    /// What the next step is expected to save, by the chance that it comes shortly.
    pub saves: Micros,
    /// What the move costs, whether the step comes or not: the link, a second copy, and whom it pushes out.
    pub costs: Micros,
}

/// Why nothing moves.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug, strum::IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum ReplicationSkipReason {
    /// It has no step behind it, or one under way.
    NotInGap,
    /// It has no owner.
    NoOwner,
    /// The policy is a baseline, which moves nothing.
    Baseline,
    /// The step could not be served at all.
    NoPlan,
    /// No target that is ready and exactly known can be sent the prefix by anybody who holds it.
    NoTarget,
    /// Who would send or get it has too much to do.
    Busy,
    /// It is more than may move at once.
    TooLarge,
    /// The step would not go to where the prefix lay then, or would be served without that.
    NotUsed,
    /// It saves too little for what it costs.
    TooDear,
}

impl ReplicationSkipReason {
    /// The word for logs, metrics and the API.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// The replicate of a candidate.
#[derive(Clone, Copy)]
struct ReplicateTransfer {
    from: WorkerId,
    rank: DpRank,
    blocks: Blocks,
    bytes: Bytes,
}

/// Whether something is to move for the step that `inputs` expect, and what. Equal inputs give equal answers, whatever the order
/// of the workers.
///
/// A prefix that lies in a slower tier of its own worker stays there: no engine's dialect has words for loading it without a
/// request that uses it, so that there is no prefetch among the answers.
pub fn plan_prefix_replication(
    inputs: &PlanningInputs<'_>,
    bounds: &ReplicationLimits,
) -> Result<PrefixReplication, ReplicationSkipReason> {
    if inputs.policy.rule != SelectionRule::Own {
        return Err(ReplicationSkipReason::Baseline);
    }
    inputs.session.owner.ok_or(ReplicationSkipReason::NoOwner)?;
    let chance = inputs
        .occupancy
        .model
        .short_term_return_probability(inputs.session.id, inputs.occupancy.now)
        .ok_or(ReplicationSkipReason::NotInGap)?;
    let now = plan(inputs).map_err(|_| ReplicationSkipReason::NoPlan)?;
    let (candidate, sending) = cheapest_replicate(inputs, &now.candidates, bounds)?;
    let after = overlaps_after_replication(inputs, candidate, sending.blocks);
    let after = plan(&PlanningInputs { overlaps: &after, ..*inputs }).map_err(|_| ReplicationSkipReason::NoPlan)?.plan;
    if after.target() != candidate.decode.worker || after.handoff.is_some() {
        return Err(ReplicationSkipReason::NotUsed);
    }
    let saves = micros((now.plan.because.total - after.because.total).0 as f64 * chance);
    let costs = replication_cost(inputs, candidate, sending).ok_or(ReplicationSkipReason::NoPlan)?;
    if saves < costs + bounds.least || saves < micros(costs.0 as f64 * valid_or_zero(bounds.margin)) {
        return Err(ReplicationSkipReason::TooDear);
    }
    let kind = match candidate.claim {
        OwnershipClaim::Move { .. } => ReplicationPurpose::Migrate,
        OwnershipClaim::Keep | OwnershipClaim::Open | OwnershipClaim::Borrow => ReplicationPurpose::Replicate,
    };
    Ok(PrefixReplication {
        kind,
        from: sending.from,
        from_rank: sending.rank,
        to: candidate.decode.worker,
        to_rank: candidate.decode.rank,
        blocks: sending.blocks,
        bytes: sending.bytes,
        saves,
        costs,
    })
}

/// The replicate after which the step would be cheapest, had it been made before.
fn cheapest_replicate<'a>(
    inputs: &PlanningInputs<'_>,
    all: &'a [PlanCandidate],
    bounds: &ReplicationLimits,
) -> Result<(&'a PlanCandidate, ReplicateTransfer), ReplicationSkipReason> {
    let mut why = ReplicationSkipReason::NoTarget;
    let mut best: Option<(&PlanCandidate, ReplicateTransfer)> = None;
    for candidate in all.iter().filter(|candidate| candidate.refused.is_none()) {
        let Some(Handoff::Replicate { from, rank, blocks, bytes }) = candidate.handoff else { continue };
        let find = |id| inputs.workers.iter().find(|view| view.id == id);
        let (Some(source), Some(target)) = (find(from), find(candidate.decode.worker)) else { continue };
        if target.health != WorkerHealth::Ready || target.knowledge != KvIndexState::Exact {
            continue;
        }
        let sends_in_turn = inputs.policy.sources == SendTiming::InTurn;
        let waits = |view| WorkerSpeed::of(view, inputs.policy).queue;
        let is_full = WorkerSpeed::of(target, inputs.policy).usage >= inputs.policy.overload.kv_usage;
        if is_full || waits(target) > bounds.queue || (sends_in_turn && waits(source) > bounds.source_queue) {
            why = why.max(ReplicationSkipReason::Busy);
            continue;
        }
        if bytes > bounds.bytes {
            why = why.max(ReplicationSkipReason::TooLarge);
            continue;
        }
        let key = |candidate: &PlanCandidate| (candidate.total - candidate.terms.network, candidate.decode.worker);
        if best.is_none_or(|(least, _)| key(candidate) < key(least)) {
            best = Some((candidate, ReplicateTransfer { from, rank, blocks, bytes }));
        }
    }
    best.ok_or(why)
}

/// Who holds what once the prefix has arrived.
fn overlaps_after_replication(inputs: &PlanningInputs<'_>, candidate: &PlanCandidate, blocks: Blocks) -> Vec<Overlap> {
    let (worker, rank) = (candidate.decode.worker, candidate.decode.rank);
    let mut all = inputs.overlaps.to_vec();
    all.push(Overlap { worker, rank, tier: Tier::Hbm, blocks });
    all
}

/// The link's time, as if somebody waited for it; the second copy, where one is left; and what the prefix pushes out.
fn replication_cost(
    inputs: &PlanningInputs<'_>,
    candidate: &PlanCandidate,
    sending: ReplicateTransfer,
) -> Option<Micros> {
    const MIB: f64 = 1_048_576.0;
    let table = FleetLayout::build(inputs).ok()?;
    let prices = CostModel::new(&table.inputs, table.session_lookup);
    let at = table.candidates.iter().find(|at| at.view.id == candidate.decode.worker)?;
    let network = prices.network(at.view.link.as_ref()?, sending.bytes);
    let brought = sending.blocks.tokens(inputs.request.block) - at.prefix.on_device();
    let copy = match candidate.claim {
        OwnershipClaim::Move { .. } => Micros::ZERO,
        _ => micros(valid_or_zero(inputs.policy.lambda) / MIB * sending.bytes.0 as f64),
    };
    Some(network + copy + prices.eviction_cost(at, brought, CopyKind::Passes))
}
