//! The fleet as one step sees it: every worker's candidate data, the owner, and the best helpers on each fabric.
//!
//! A helper's cost does not depend on the target it helps, so the two cheapest of a fabric are enough for all its
//! targets (two, because a worker cannot help itself): the number of candidates grows with the workers, not with pairs
//! of them.

use std::cmp::Reverse;

use vocabulary::{KvIndexState, Micros, Owner, Tokens, WorkerHealth, WorkerId, WorkerRole};

use crate::cached_prefix::cached_prefixes;
use crate::cost::{CostModel, usable};
use crate::kv_occupancy::SessionLookup;
use crate::worker_candidate::{WorkerCandidate, length_refusal};
use crate::{CandidateRefusal, MoveReason, ParallelShape, PlanningError, PlanningInputs};

/// Table of the workers as one step sees them: everything that its candidates are built from.
pub(crate) struct CandidateTable<'a> {
    pub(crate) inputs: PlanningInputs<'a>,
    /// This session's view of the KV occupancy model.
    pub(crate) session_lookup: SessionLookup<'a>,
    pub(crate) candidates: Vec<WorkerCandidate<'a>>,
    pub(crate) owner: Option<usize>,
    /// Why the session should leave its owner, whichever worker serves.
    move_reason: Option<MoveReason>,
    /// Whether draining workers may serve: only when no other worker can.
    draining_eligibility: DrainingEligibility,
    /// Worker with the longest believed prefix, and its tokens.
    longest_prefix: Option<(usize, Tokens)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum DrainingEligibility {
    No,
    Draining,
}

impl<'a> CandidateTable<'a> {
    pub(crate) fn build(inputs: &PlanningInputs<'a>) -> Result<Self, PlanningError> {
        let session_lookup = inputs.occupancy.model.session_lookup(inputs.session.id, inputs.occupancy.now);
        let candidate = |(view, prefix)| WorkerCandidate::new((inputs, session_lookup), view, prefix);
        let candidates: Vec<_> = inputs.workers.iter().zip(cached_prefixes(inputs)).map(candidate).collect();
        let can_serve_undrained = |c: &WorkerCandidate<'_>| c.can_serve() && !c.is_draining();
        let draining_eligibility = if candidates.iter().any(can_serve_undrained) {
            DrainingEligibility::No
        } else if candidates.iter().any(WorkerCandidate::can_serve) {
            DrainingEligibility::Draining
        } else {
            return Err(planning_error(inputs, &candidates));
        };
        let owner = inputs.session.owner.and_then(|owner| {
            candidates.iter().position(|c| (c.view.id, c.view.incarnation) == (owner.worker, owner.incarnation))
        });
        let longest_prefix = longest_prefix(&candidates);
        let mut layout = Self {
            inputs: *inputs,
            session_lookup,
            candidates,
            owner,
            move_reason: None,
            draining_eligibility,
            longest_prefix,
        };
        layout.move_reason = layout.move_reason();
        Ok(layout)
    }

    /// Returns why a worker cannot be a target.
    pub(crate) fn target_refusal(&self, at: usize) -> Option<CandidateRefusal> {
        let candidate = &self.candidates[at];
        let draining = candidate.is_draining() && self.draining_eligibility == DrainingEligibility::No;
        candidate
            .refusal
            .or((!candidate.view.role.decodes()).then_some(CandidateRefusal::PrefillOnly))
            .or(draining.then_some(CandidateRefusal::Draining))
    }

    /// Returns the worker with the longest prefix and its tokens, unless it is this worker.
    pub(crate) fn longest_prefix_elsewhere(&self, at: usize) -> Option<(usize, Tokens)> {
        self.longest_prefix.filter(|(place, _)| *place != at)
    }

    /// Returns the tokens of the prompt that may be replicated: sealed, and at most all but one.
    pub(crate) fn replicable_tokens(&self) -> Tokens {
        self.inputs
            .session
            .sealed
            .tokens(self.inputs.request.block_size)
            .min(self.inputs.request.prompt_tokens - Tokens(1))
    }

    fn move_reason(&self) -> Option<MoveReason> {
        self.inputs.session.owner?;
        let Some(owner) = self.owner.map(|at| &self.candidates[at]) else { return Some(MoveReason::OwnerGone) };
        let sealed =
            self.inputs.session.sealed.tokens(self.inputs.request.block_size).min(self.inputs.request.prompt_tokens);
        let evicted = owner.view.kv_index_state == KvIndexState::Exact && owner.prefix.believed * 2 < sealed;
        match owner.refusal {
            Some(CandidateRefusal::FailedEarlierAttempt) => Some(MoveReason::OwnerFailedAttempt),
            Some(CandidateRefusal::NotReady | CandidateRefusal::ModelNotServed) => Some(MoveReason::OwnerGone),
            _ if owner.is_draining() => Some(MoveReason::OwnerDraining),
            _ if !owner.view.role.decodes() => Some(MoveReason::OwnerPrefillOnly),
            _ if self.is_overloaded(owner) => Some(MoveReason::OwnerOverloaded),
            _ if evicted => Some(MoveReason::OwnerEvicted),
            _ => None,
        }
    }

    /// Returns why ownership should move to this target. Overload is no reason to move to a target that is overloaded
    /// too, or sessions would move in circles when every worker is.
    pub(crate) fn move_reason_for(&self, target: usize) -> Option<MoveReason> {
        let is_futile =
            |why: &MoveReason| *why == MoveReason::OwnerOverloaded && self.is_overloaded(&self.candidates[target]);
        self.move_reason.filter(|why| !is_futile(why))
    }

    fn is_overloaded(&self, candidate: &WorkerCandidate<'_>) -> bool {
        let overload = &self.inputs.policy.overload;
        candidate.speed.queue >= overload.max_queue_time || candidate.speed.usage >= overload.max_kv_cache_usage
    }

    /// Returns whether this worker, at the candidate's rank, is the session's owner.
    pub(crate) fn is_owner(&self, at: usize) -> bool {
        let candidate = &self.candidates[at];
        let rank = candidate.prefix.rank;
        self.inputs.session.owner
            == Some(Owner { worker: candidate.view.id, incarnation: candidate.view.incarnation, rank })
    }
}

/// The cheapest helpers of one fabric.
#[derive(Default, Clone, Copy)]
pub(crate) struct FabricShortlist {
    sources: CheapestTwo,
    prefillers: CheapestTwo,
}

/// The two cheapest workers, cheapest first.
#[derive(Default, Clone, Copy)]
struct CheapestTwo([Option<(PriceSortKey, usize)>; 2]);

type PriceSortKey = (Micros, Reverse<u64>, WorkerId);

impl CheapestTwo {
    fn offer(&mut self, key: PriceSortKey, at: usize) {
        let [first, second] = &mut self.0;
        if first.is_none_or(|(best, _)| key < best) {
            *second = first.replace((key, at));
        } else if second.is_none_or(|(best, _)| key < best) {
            *second = Some((key, at));
        }
    }

    /// Returns whether a worker that costs at least `key` could still be one of the two.
    fn may_take(&self, key: PriceSortKey) -> bool {
        self.0[1].is_none_or(|(second, _)| key < second)
    }

    fn merge(&mut self, other: Self) {
        other.0.into_iter().flatten().for_each(|(key, place)| self.offer(key, place));
    }

    fn places(self) -> impl Iterator<Item = usize> {
        self.0.into_iter().flatten().map(|(_, place)| place)
    }
}

impl FabricShortlist {
    fn merge(&mut self, other: Self) {
        self.sources.merge(other.sources);
        self.prefillers.merge(other.prefillers);
    }

    /// Returns the workers that can send sealed blocks, cheapest first.
    pub(crate) fn sources(self) -> impl Iterator<Item = usize> {
        self.sources.places()
    }

    /// Returns the workers that can compute a prompt for another one, cheapest first.
    pub(crate) fn prefillers(self) -> impl Iterator<Item = usize> {
        self.prefillers.places()
    }
}

pub(crate) struct FabricShortlists<'a>(Vec<(FabricKey<'a>, FabricShortlist)>);

type FabricKey<'a> = (&'a str, Option<ParallelShape>);

impl<'a> FabricShortlists<'a> {
    /// Helpers as if no link were disabled: right for every target that no disabled link leads to.
    pub(crate) fn ignoring_disabled_links(layout: &CandidateTable<'a>, cost_model: &CostModel<'_>) -> Self {
        Self::among(layout, cost_model, |_| true)
    }

    /// Helpers for one target with disabled links to it, without the workers that would send over those links.
    pub(crate) fn around_disabled_links(
        layout: &CandidateTable<'a>,
        cost_model: &CostModel<'_>,
        target: WorkerId,
    ) -> Self {
        Self::among(layout, cost_model, |from| !layout.inputs.is_link_disabled(from, target))
    }

    fn among(layout: &CandidateTable<'a>, cost_model: &CostModel<'_>, may_send: impl Fn(WorkerId) -> bool) -> Self {
        let mut all = Self(Vec::with_capacity(2));
        for (at, candidate) in layout.candidates.iter().enumerate() {
            let Some(fabric) = fabric(candidate) else { continue };
            let sends = candidate.view.link.as_ref().is_some_and(|link| link.carries.exports_kv());
            if candidate.refusal.is_some() || !sends || !may_send(candidate.view.id) {
                continue;
            }
            let key = |price| (price, Reverse(candidate.rendezvous_weight), candidate.view.id);
            let helpers = all.entry((fabric, candidate.shape));
            let offer = |best: &mut CheapestTwo, to: Tokens| {
                // Check lower bounds first: the eviction term is skipped for a worker that is already too expensive.
                if best.may_take(key(cost_model.earliest_finish(candidate, to)))
                    && best.may_take(key(cost_model.source_terms_without_eviction(candidate, to).total()))
                {
                    best.offer(key(cost_model.source_terms(candidate, to).total()), at);
                }
            };
            let replicable = layout.replicable_tokens();
            if candidate.prefix.believed.min(replicable) > Tokens::ZERO {
                // Tokens of the sealed prefix that the source lacks are computed somewhere; they are priced at the
                // source's own rate.
                offer(&mut helpers.sources, replicable);
            }
            if candidate.view.role != WorkerRole::Decode && candidate.view.health == WorkerHealth::Ready {
                offer(&mut helpers.prefillers, layout.inputs.request.prompt_tokens);
            }
        }
        all
    }

    /// Returns the helpers on the target's fabric whose KV its ranks can read; none when the target has no usable link.
    pub(crate) fn helpers_for(
        &self,
        inputs: &PlanningInputs<'_>,
        target: &WorkerCandidate<'_>,
    ) -> Option<FabricShortlist> {
        let name = fabric(target)?;
        let mut matching =
            self.0.iter().filter(|((fabric, shape), _)| *fabric == name && inputs.can_read(*shape, target.shape));
        let mut helpers = matching.next().map_or_else(FabricShortlist::default, |(_, helpers)| *helpers);
        matching.for_each(|(_, more)| helpers.merge(*more));
        Some(helpers)
    }

    fn entry(&mut self, fabric: FabricKey<'a>) -> &mut FabricShortlist {
        let at = self.0.iter().position(|(place, _)| *place == fabric).unwrap_or_else(|| {
            self.0.push((fabric, FabricShortlist::default()));
            self.0.len() - 1
        });
        &mut self.0[at].1
    }
}

fn fabric<'a>(candidate: &WorkerCandidate<'a>) -> Option<&'a str> {
    candidate.view.link.as_ref().filter(|link| usable(link)).map(|link| &*link.fabric)
}

fn longest_prefix(candidates: &[WorkerCandidate<'_>]) -> Option<(usize, Tokens)> {
    let has_prefix = |c: &WorkerCandidate<'_>| c.refusal.is_none() && c.prefix.believed > Tokens::ZERO;
    let holders = candidates.iter().enumerate().filter(|(_, candidate)| has_prefix(candidate));
    let longest = holders.max_by_key(|(_, c)| (c.prefix.believed, c.rendezvous_weight, Reverse(c.view.id)));
    longest.map(|(at, candidate)| (at, candidate.prefix.believed))
}

/// Returns why no worker can serve: the first requirement that all of them fail.
fn planning_error(inputs: &PlanningInputs<'_>, candidates: &[WorkerCandidate<'_>]) -> PlanningError {
    if candidates.iter().all(|s| s.refusal == Some(CandidateRefusal::ModelNotServed)) {
        let request = inputs.request;
        let known = inputs.workers.iter().any(|view| view.models.contains(&request.model));
        let missing = request.adapter.as_ref().filter(|_| known).unwrap_or(&request.model);
        return PlanningError::UnknownModel { model: missing.clone() };
    }
    let decoding =
        || candidates.iter().filter(|s| s.view.role.decodes() && s.refusal != Some(CandidateRefusal::ModelNotServed));
    let fits = |s: &WorkerCandidate<'_>| length_refusal(inputs.request, s.view).is_none();
    if decoding().next().is_some() && !decoding().any(fits) {
        return PlanningError::TooLong { longest: decoding().map(max_step_tokens).max().unwrap_or_default() };
    }
    if decoding().any(|s| s.refusal == Some(CandidateRefusal::FailedEarlierAttempt) && fits(s)) {
        PlanningError::AllExcluded
    } else {
        PlanningError::NoneReady
    }
}

fn max_step_tokens(candidate: &WorkerCandidate<'_>) -> Tokens {
    let limits = [candidate.view.capacity.context, candidate.view.capacity.kv];
    limits.into_iter().filter(|limit| *limit > Tokens::ZERO).min().unwrap_or_default()
}
