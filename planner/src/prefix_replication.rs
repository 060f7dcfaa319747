//! Prefix replication: whether an idle session's prefix is moved before its next step asks for it.
//!
//! The next step is planned as if it came now, and again as if its prefix were already at the target. The saving is
//! weighted by the chance that the session returns shortly, since the fleet is different later. A move is always legal:
//! it is the replicate of a candidate that the step itself could have used.

use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use vocabulary::{Blocks, Bytes, DpRank, KvIndexState, Micros, Overlap, Tier, WorkerHealth, WorkerId};

use crate::candidate_table::CandidateTable;
use crate::cost::{CostModel, StoredKvKind};
use crate::micros::{micros, valid_or_zero};
use crate::worker_candidate::SpeedAndLoad;
use crate::{
    Handoff, HandoffKind, OwnershipEffect, PlanCandidate, PlanningInputs, ReplicateSendTiming, SelectionRule,
    WorkerRank, plan,
};

/// Limits on replication: what a move has to save, and which workers it leaves alone.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize, Debug, SmartDefault)]
pub struct ReplicationLimits {
    /// Minimum ratio of saving to cost.
    #[default(2.0)]
    pub margin: f64,
    /// Minimum net saving, in microseconds.
    #[default(Micros(20_000))]
    pub least: Micros,
    /// Longest queue of a target.
    #[default(Micros(500_000))]
    pub queue: Micros,
    /// Longest queue of a source that sends in turn (`ReplicateSendTiming::Queued`): nothing is computed there, but
    /// the KV arrives late.
    #[default(Micros(5_000_000))]
    pub source_queue: Micros,
    /// Most bytes of one move.
    #[default(Bytes(16 << 30))]
    pub bytes: Bytes,
}

/// Effect of a move on ownership.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub enum PrefixMoveKind {
    /// The owner stays; the target gets a read-only replica.
    Replicate,
    /// The session should leave its owner; the target becomes the new one.
    Migrate,
}

/// A move that is worth its cost.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct ChosenReplication {
    /// Effect on ownership.
    pub kind: PrefixMoveKind,
    /// Worker that sends.
    pub from: WorkerId,
    /// Rank of the sender.
    pub from_rank: DpRank,
    /// Worker that receives.
    pub to: WorkerId,
    /// Rank of the receiver.
    pub to_rank: DpRank,
    /// Leading blocks of the hash chain to move.
    pub blocks: Blocks,
    /// Bytes of these that the target lacks.
    pub bytes: Bytes,
    /// Expected saving of the next step, weighted by the chance that it comes shortly.
    pub saves: Micros,
    /// Cost of the move, whether the step comes or not: the transfer, a second copy, and evictions.
    pub costs: Micros,
}

/// Why nothing is moved.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug, strum::IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum ReplicationSkipReason {
    /// The session has had no step yet, or one is running.
    NotInGap,
    /// The session has no owner.
    NoOwner,
    /// The policy is a baseline, which moves nothing.
    Baseline,
    /// The step could not be served at all.
    NoPlan,
    /// No ready target with exact KV events can receive the prefix from a worker that holds it.
    NoTarget,
    /// The source or the target is too busy.
    Busy,
    /// The prefix is larger than one move may be.
    TooLarge,
    /// With the prefix at the target, the step would still go elsewhere or still need a handoff.
    NotUsed,
    /// The saving is too small for the cost.
    TooDear,
}

impl ReplicationSkipReason {
    /// Returns the reason's name for logs, metrics and the API.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Replicate of a candidate.
#[derive(Clone, Copy)]
struct ReplicateTransfer {
    source: WorkerRank,
    target: WorkerRank,
    blocks: Blocks,
    bytes: Bytes,
}

/// Decides whether a prefix is moved for the step that `inputs` expect, and how. Equal inputs give equal answers,
/// whatever the order of the workers.
///
/// A prefix in a slower tier of its own worker stays there: no engine has an API to load it without a request that uses
/// it, so a prefetch is never returned.
pub fn plan_prefix_replication(
    inputs: &PlanningInputs<'_>,
    bounds: &ReplicationLimits,
) -> Result<ChosenReplication, ReplicationSkipReason> {
    if inputs.policy.policy != SelectionRule::LowestCost {
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
    let after = overlaps_after_replication(inputs, sending);
    let after = plan(&PlanningInputs { overlaps: &after, ..*inputs }).map_err(|_| ReplicationSkipReason::NoPlan)?.plan;
    if after.target() != sending.target.worker || after.sequence.has_handoff() {
        return Err(ReplicationSkipReason::NotUsed);
    }
    let saves = micros((now.plan.rationale.total_cost - after.rationale.total_cost).0 as f64 * chance);
    let costs = replication_cost(inputs, candidate, sending).ok_or(ReplicationSkipReason::NoPlan)?;
    if saves < costs + bounds.least || saves < micros(costs.0 as f64 * valid_or_zero(bounds.margin)) {
        return Err(ReplicationSkipReason::TooDear);
    }
    let kind = match candidate.ownership {
        OwnershipEffect::Move { .. } => PrefixMoveKind::Migrate,
        OwnershipEffect::Keep | OwnershipEffect::Claim | OwnershipEffect::ReadReplica => PrefixMoveKind::Replicate,
    };
    Ok(ChosenReplication {
        kind,
        from: sending.source.worker,
        from_rank: sending.source.rank,
        to: sending.target.worker,
        to_rank: sending.target.rank,
        blocks: sending.blocks,
        bytes: sending.bytes,
        saves,
        costs,
    })
}

/// Returns the replicate after which the step would be cheapest.
fn cheapest_replicate<'a>(
    inputs: &PlanningInputs<'_>,
    all: &'a [PlanCandidate],
    bounds: &ReplicationLimits,
) -> Result<(&'a PlanCandidate, ReplicateTransfer), ReplicationSkipReason> {
    let mut why = ReplicationSkipReason::NoTarget;
    let mut best: Option<(&PlanCandidate, ReplicateTransfer)> = None;
    for candidate in all.iter().filter(|candidate| candidate.refusal.is_none()) {
        let Some(&Handoff { source: from, target: to, blocks: Some(blocks), bytes, .. }) =
            candidate.sequence.handoff(HandoffKind::Replicate)
        else {
            continue;
        };
        let find = |id| inputs.workers.iter().find(|view| view.id == id);
        let (Some(source), Some(target)) = (find(from.worker), find(to.worker)) else { continue };
        if target.health != WorkerHealth::Ready || target.kv_index_state != KvIndexState::Exact {
            continue;
        }
        let sends_in_turn = inputs.policy.replicate_dispatch == ReplicateSendTiming::Queued;
        let waits = |view| SpeedAndLoad::of(view, inputs.policy).queue;
        let is_full = SpeedAndLoad::of(target, inputs.policy).usage >= inputs.policy.overload.max_kv_cache_usage;
        if is_full || waits(target) > bounds.queue || (sends_in_turn && waits(source) > bounds.source_queue) {
            why = why.max(ReplicationSkipReason::Busy);
            continue;
        }
        if bytes > bounds.bytes {
            why = why.max(ReplicationSkipReason::TooLarge);
            continue;
        }
        let key = |candidate: &PlanCandidate| {
            (candidate.total_cost - candidate.cost_terms.network, candidate.sequence.target())
        };
        if best.is_none_or(|(least, _)| key(candidate) < key(least)) {
            best = Some((candidate, ReplicateTransfer { source: from, target: to, blocks, bytes }));
        }
    }
    best.ok_or(why)
}

/// Returns the overlaps as they are once the prefix has arrived.
fn overlaps_after_replication(inputs: &PlanningInputs<'_>, sending: ReplicateTransfer) -> Vec<Overlap> {
    let ReplicateTransfer { target: WorkerRank { worker, rank }, blocks, .. } = sending;
    let mut all = inputs.overlaps.to_vec();
    all.push(Overlap { worker, rank, tier: Tier::Hbm, blocks });
    all
}

/// Cost of a move: transfer time, as if a step waited for it, a second copy if one is left, and evictions at the
/// target.
fn replication_cost(
    inputs: &PlanningInputs<'_>,
    candidate: &PlanCandidate,
    sending: ReplicateTransfer,
) -> Option<Micros> {
    const MIB: f64 = 1_048_576.0;
    let table = CandidateTable::build(inputs).ok()?;
    let cost_model = CostModel::new(&table.inputs, table.session_lookup);
    let at = table.candidates.iter().find(|at| at.view.id == sending.target.worker)?;
    let transfer_time = cost_model.transfer_time(at.view.link.as_ref()?, sending.bytes);
    let brought = sending.blocks.tokens(inputs.request.block_size) - at.prefix.on_device();
    let copy = match candidate.ownership {
        OwnershipEffect::Move { .. } => Micros::ZERO,
        _ => micros(valid_or_zero(inputs.policy.memory_cost_per_mib) / MIB * sending.bytes.0 as f64),
    };
    Some(transfer_time + copy + cost_model.eviction_cost(at, brought, StoredKvKind::Transfer))
}
