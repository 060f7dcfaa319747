//! Legality of plans. The executor runs any legal plan and refuses every other one; it makes no choices of its own.

use vocabulary::{Blocks, KvIndexState, Owner, Tokens, WorkerHealth, WorkerId, WorkerView};

use crate::worker_candidate::{length_refusal, serves_alone};
use crate::{
    Action, AttentionSpec, Handoff, HandoffKind, Leg, LegOrHandoff, LegRole, OwnershipEffect, Plan, PlanningInputs,
    RequestTransferBlocker, TransferPermission, WorkerRank,
};

/// Why a plan is illegal. Always a bug of the router, or a check against inputs other than those of the planning.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error, Debug)]
pub enum PlanViolation {
    /// A leg or source names a worker that is not in the fleet.
    #[error("{0} is not in the fleet")]
    NoSuchWorker(WorkerId),
    /// A leg or source names a rank that the worker does not have.
    #[error("{0} has no such rank")]
    NoSuchRank(WorkerId),
    /// A leg or source does not serve the model or adapter.
    #[error("{0} does not serve the model")]
    WrongModel(WorkerId),
    /// A leg or source already failed in this attempt.
    #[error("{0} is excluded")]
    Excluded(WorkerId),
    /// A leg or source is unreachable.
    #[error("{0} is not reached")]
    Unreachable(WorkerId),
    /// The leg that answers is at a worker that does not decode.
    #[error("{0} does not decode")]
    PrefillOnly(WorkerId),
    /// Prompt and answer exceed the limits of a leg's worker.
    #[error("prompt and answer exceed the context of {0}")]
    TooLong(WorkerId),
    /// A leg's tokens do not add up to the prompt.
    #[error("the tokens of the leg at {0} do not add up to the prompt")]
    TokenSum(WorkerId),
    /// More than one handoff.
    #[error("a plan may have one handoff at most")]
    TooManyHandoffs,
    /// Legs and handoffs in an order that no executor runs.
    #[error("no plan has these legs and handoffs in this order")]
    UnsupportedSequence,
    /// A handoff from or to another place than that of the leg that computes or uses the KV.
    #[error("the handoff at {0} does not join the legs")]
    HandoffApart(WorkerId),
    /// A handoff from a worker to itself.
    #[error("{0} would hand off to itself")]
    ToItself(WorkerId),
    /// A handoff for a request that forbids transfers.
    #[error("the request forbids transfers: {0:?}")]
    TransferForbidden(RequestTransferBlocker),
    /// A handoff from a worker that cannot send KV.
    #[error("{0} only receives")]
    SendsNothing(WorkerId),
    /// A handoff between workers that cannot exchange KV.
    #[error("{0} and {1} share no fabric")]
    NoFabric(WorkerId, WorkerId),
    /// A handoff between workers whose ranks cannot read from each other.
    #[error("the ranks of {1} cannot read from those of {0}: their parallel shapes do not match")]
    IncompatibleShapes(WorkerId, WorkerId),
    /// A handoff over a link that is disabled.
    #[error("the link from {0} to {1} is disabled")]
    DisabledLink(WorkerId, WorkerId),
    /// A replicate of blocks that the source is not believed to hold.
    #[error("{0} does not hold the blocks to be replicated")]
    BlocksNotHeld(WorkerId),
    /// A replicate of no blocks, of the whole prompt or more, or of unsealed blocks.
    #[error("{0} blocks are nothing, more than the prompt, or not sealed")]
    NotSealed(Blocks),
    /// A replicate that does not end at a block boundary of both engines and of the model's compressed entries.
    #[error("{0} blocks end inside a block of an engine or of the model")]
    Unaligned(Blocks),
    /// The action label does not match the legs and the handoff.
    #[error("{0} is not what the legs do")]
    Mislabelled(Action),
    /// The action is disabled.
    #[error("{0} is switched off")]
    Disabled(Action),
    /// The target only answers prompts that a prefill worker hands to it.
    #[error("{0} needs a prefill worker")]
    NeedsPrefiller(WorkerId),
    /// The ownership claim contradicts the session's owner.
    #[error("the claim contradicts the session's owner")]
    WrongClaim,
}

/// The three legal sequences.
#[derive(Clone, Copy)]
enum SequenceShape<'a> {
    Serve,
    Replicate { handoff: &'a Handoff, blocks: Blocks },
    RemotePrefill { prefill: &'a Leg, handoff: &'a Handoff },
}

impl Plan {
    /// Returns whether this plan may be executed for these inputs.
    pub fn check(&self, inputs: &PlanningInputs<'_>) -> Result<(), PlanViolation> {
        let shape = self.shape()?;
        let target = check_leg(self.answer_leg(), inputs)?;
        if !target.role.decodes() {
            return Err(PlanViolation::PrefillOnly(target.id));
        }
        self.legs().try_for_each(|leg| check_leg(leg, inputs).map(drop))?;
        if self.answer_leg().role == LegRole::Serve && !serves_alone(target) {
            return Err(PlanViolation::NeedsPrefiller(target.id));
        }
        if let (TransferPermission::Forbidden(bar), true) = (inputs.request.transfers, self.sequence.has_handoff()) {
            return Err(PlanViolation::TransferForbidden(bar));
        }
        match shape {
            SequenceShape::Serve => whole_prompt(self.answer_leg(), inputs)?,
            SequenceShape::Replicate { handoff, blocks } => {
                whole_prompt(self.answer_leg(), inputs)?;
                self.check_replicate(inputs, target, (handoff, blocks))?;
            }
            SequenceShape::RemotePrefill { prefill, handoff } => self.check_remote(inputs, (prefill, handoff))?,
        }
        self.check_label(inputs)?;
        self.check_claim(inputs)
    }

    fn shape(&self) -> Result<SequenceShape<'_>, PlanViolation> {
        if self.handoffs().count() > 1 {
            return Err(PlanViolation::TooManyHandoffs);
        }
        let [first, second] = [&self.sequence.before_answer[0], &self.sequence.before_answer[1]].map(Option::as_ref);
        match (first, second, self.answer_leg().role) {
            (None, None, LegRole::Serve) => Ok(SequenceShape::Serve),
            (
                Some(LegOrHandoff::Handoff(
                    handoff @ Handoff { kind: HandoffKind::Replicate, blocks: Some(blocks), .. },
                )),
                None,
                LegRole::Serve,
            ) => Ok(SequenceShape::Replicate { handoff, blocks: *blocks }),
            (
                Some(LegOrHandoff::Leg(prefill @ Leg { role: LegRole::Prefill, .. })),
                Some(LegOrHandoff::Handoff(handoff @ Handoff { kind: HandoffKind::RemotePrefill, blocks: None, .. })),
                LegRole::Decode,
            ) => Ok(SequenceShape::RemotePrefill { prefill, handoff }),
            _ => Err(PlanViolation::UnsupportedSequence),
        }
    }

    fn check_remote(
        &self,
        inputs: &PlanningInputs<'_>,
        (prefill, handoff): (&Leg, &Handoff),
    ) -> Result<(), PlanViolation> {
        let decode = self.answer_leg();
        let (source, target) = (prefill.worker, decode.worker);
        if source == target {
            return Err(PlanViolation::ToItself(target));
        }
        if (handoff.source, handoff.target) != (prefill.at(), decode.at()) {
            return Err(PlanViolation::HandoffApart(target));
        }
        whole_prompt(prefill, inputs)?;
        if decode.cached_tokens > inputs.request.prompt_tokens || decode.computed_tokens != Tokens::ZERO {
            return Err(PlanViolation::TokenSum(target));
        }
        check_fabric(inputs, find(source, inputs)?, find(target, inputs)?)
    }

    fn check_replicate(
        &self,
        inputs: &PlanningInputs<'_>,
        target: &WorkerView,
        (handoff, blocks): (&Handoff, Blocks),
    ) -> Result<(), PlanViolation> {
        let source = check_participant(handoff.source, inputs)?;
        if source.id == target.id {
            return Err(PlanViolation::ToItself(target.id));
        }
        if handoff.target != self.answer_leg().at() {
            return Err(PlanViolation::HandoffApart(target.id));
        }
        check_fabric(inputs, source, target)?;
        let tokens = blocks.tokens(inputs.request.block_size);
        if tokens == Tokens::ZERO || tokens >= inputs.request.prompt_tokens || blocks > inputs.session.sealed {
            return Err(PlanViolation::NotSealed(blocks));
        }
        let engines = [source, target].map(|end| end.capacity.block);
        let model = inputs.attention.map_or(Tokens(1), AttentionSpec::block);
        if engines.into_iter().chain([model]).any(|block| tokens.0.checked_rem(block.0).is_some_and(|rest| rest != 0)) {
            return Err(PlanViolation::Unaligned(blocks));
        }
        if believed_blocks(inputs, source, handoff.source) < blocks {
            return Err(PlanViolation::BlocksNotHeld(source.id));
        }
        Ok(())
    }

    fn check_label(&self, inputs: &PlanningInputs<'_>) -> Result<(), PlanViolation> {
        let replicates = self.sequence.handoff(HandoffKind::Replicate).is_some();
        let is_remote = self.sequence.handoff(HandoffKind::RemotePrefill).is_some();
        let fits = match self.action {
            Action::ColocatedPrefill | Action::DecodeContinuation => !self.sequence.has_handoff(),
            Action::RemotePrefill => is_remote,
            Action::TailRecompute => !is_remote,
            Action::ArtifactFetch => replicates,
            Action::StateMigration => replicates && matches!(self.ownership, OwnershipEffect::Move { .. }),
        };
        match fits {
            false => Err(PlanViolation::Mislabelled(self.action)),
            true if !inputs.allows(self.action) => Err(PlanViolation::Disabled(self.action)),
            true => Ok(()),
        }
    }

    fn check_claim(&self, inputs: &PlanningInputs<'_>) -> Result<(), PlanViolation> {
        let target = find(self.target(), inputs)?;
        let owner = inputs.session.owner;
        let owned =
            owner == Some(Owner { worker: target.id, incarnation: target.incarnation, rank: self.answer_leg().rank });
        let right = match self.ownership {
            OwnershipEffect::Keep => owned,
            OwnershipEffect::Claim => owner.is_none(),
            OwnershipEffect::ReadReplica => owner.is_some() && !owned,
            OwnershipEffect::Move { previous_owner, epoch, .. } => {
                owner == Some(previous_owner) && !owned && epoch == inputs.session.epoch
            }
        };
        if right { Ok(()) } else { Err(PlanViolation::WrongClaim) }
    }
}

fn find<'a>(worker: WorkerId, inputs: &PlanningInputs<'a>) -> Result<&'a WorkerView, PlanViolation> {
    inputs.workers.iter().find(|view| view.id == worker).ok_or(PlanViolation::NoSuchWorker(worker))
}

/// Returns a worker that may take part in the plan, as a leg or as a source.
fn check_participant<'a>(
    WorkerRank { worker, rank }: WorkerRank,
    inputs: &PlanningInputs<'a>,
) -> Result<&'a WorkerView, PlanViolation> {
    let view = find(worker, inputs)?;
    let serves = |model| view.models.contains(model);
    if rank.0 >= view.ranks.max(1) {
        Err(PlanViolation::NoSuchRank(worker))
    } else if !serves(&inputs.request.model) || !inputs.request.adapter.as_ref().is_none_or(serves) {
        Err(PlanViolation::WrongModel(worker))
    } else if inputs.excluded.contains(&worker) {
        Err(PlanViolation::Excluded(worker))
    } else if view.health == WorkerHealth::Unreachable {
        Err(PlanViolation::Unreachable(worker))
    } else {
        Ok(view)
    }
}

fn check_leg<'a>(leg: &Leg, inputs: &PlanningInputs<'a>) -> Result<&'a WorkerView, PlanViolation> {
    let view = check_participant(leg.at(), inputs)?;
    if length_refusal(inputs.request, view).is_some() { Err(PlanViolation::TooLong(view.id)) } else { Ok(view) }
}

fn whole_prompt(leg: &Leg, inputs: &PlanningInputs<'_>) -> Result<(), PlanViolation> {
    let sum = leg.cached_tokens.0.checked_add(leg.computed_tokens.0);
    if sum == Some(inputs.request.prompt_tokens.0) { Ok(()) } else { Err(PlanViolation::TokenSum(leg.worker)) }
}

fn check_fabric(inputs: &PlanningInputs<'_>, source: &WorkerView, target: &WorkerView) -> Result<(), PlanViolation> {
    let (from, to) = (source.id, target.id);
    match (&source.link, &target.link) {
        (Some(a), Some(b)) if a.fabric != b.fabric => Err(PlanViolation::NoFabric(from, to)),
        (None, _) | (_, None) => Err(PlanViolation::NoFabric(from, to)),
        (Some(link), _) if !link.carries.exports_kv() => Err(PlanViolation::SendsNothing(from)),
        _ if !inputs.can_read(inputs.shape(from), inputs.shape(to)) => Err(PlanViolation::IncompatibleShapes(from, to)),
        _ if inputs.is_link_disabled(from, to) => Err(PlanViolation::DisabledLink(from, to)),
        _ => Ok(()),
    }
}

/// Returns the blocks of the prompt that a rank is believed to hold: observed, in a live intent, or (without exact KV
/// events) owned.
fn believed_blocks(inputs: &PlanningInputs<'_>, worker: &WorkerView, WorkerRank { rank, .. }: WorkerRank) -> Blocks {
    let seen = inputs.overlaps.iter().filter(|o| (o.worker, o.rank) == (worker.id, rank)).map(|o| o.blocks);
    let promised =
        inputs.session.peer_intents.iter().filter(|p| (p.worker, p.rank) == (worker.id, rank)).map(|p| p.blocks);
    let owners = inputs.session.owner.iter().chain(&inputs.session.replicas);
    let owned = owners
        .filter(|o| (o.worker, o.incarnation, o.rank) == (worker.id, worker.incarnation, rank))
        .filter(|_| worker.kv_index_state != KvIndexState::Exact)
        .map(|_| inputs.session.sealed);
    seen.chain(promised).chain(owned).max().unwrap_or_default()
}
