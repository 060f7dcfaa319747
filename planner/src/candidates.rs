//! Builds every way to serve the step, priced or refused. It does not choose.

use std::cell::Cell;

use vocabulary::{Bytes, Micros, Tokens};

use crate::candidate_table::{CandidateTable, FabricShortlist, FabricShortlists};
use crate::cost::{CostModel, MissingKvSource, TargetCostInputs, sequential_terms};
use crate::lcm::lcm;
use crate::worker_candidate::WorkerCandidate;
use crate::{
    Action, CandidateRefusal, CostTerms, Handoff, HandoffKind, Leg, LegRole, LegSequence, MoveReason, OwnershipEffect,
    PlanCandidate, ReplicateSendTiming, RestorablePrefix, RestoreSplit, SelectionRule, StepKind, TransferPermission,
    WorkerRank,
};

/// Returns at most three candidates per worker: serve there, prefill elsewhere, replicate the sealed prefix there
/// first.
pub(crate) fn candidates(layout: &CandidateTable<'_>) -> Vec<PlanCandidate> {
    let cost_model = CostModel::new(&layout.inputs, layout.session_lookup);
    let offers_transfers = layout.inputs.policy.policy == SelectionRule::LowestCost
        && layout.inputs.request.transfers == TransferPermission::Allowed;
    let fabrics = offers_transfers.then(|| FabricShortlists::ignoring_disabled_links(layout, &cost_model));
    let builder = CandidateBuilder { layout, cost_model, fabrics, cached_source_costs: Default::default() };
    let mut all = Vec::with_capacity(3 * layout.candidates.len());
    for target in 0..layout.candidates.len() {
        builder.push_all(target, &mut all);
    }
    all
}

struct CandidateBuilder<'a> {
    layout: &'a CandidateTable<'a>,
    cost_model: CostModel<'a>,
    fabrics: Option<FabricShortlists<'a>>,
    /// Costs of the most recent sources, by source and prefix length: a few sources help all targets.
    cached_source_costs: [Cell<Option<MemoizedSourceCost>>; 4],
}

/// Cost of a source that computes up to the given number of tokens, with its key.
type MemoizedSourceCost = ((usize, Tokens), CostTerms);

/// Possible replication to one target: its source, the leading tokens present afterwards, and how they get there.
#[derive(Clone, Copy)]
struct ReplicateOption {
    from: usize,
    prefix_end: Tokens,
    split: RestoreSplit,
    alternative_split: Option<RestoreSplit>,
}

/// One way to replicate the prefix, priced and labelled.
#[derive(Clone, Copy)]
struct PricedReplicate {
    terms: CostTerms,
    action: Action,
    refusal: Option<CandidateRefusal>,
}

impl PricedReplicate {
    fn preference(&self) -> (bool, Micros) {
        (self.refusal.is_some(), self.terms.total())
    }
}

/// Candidate without its label and refusal.
struct PricedCandidate {
    sequence: LegSequence,
    ownership: OwnershipEffect,
    terms: CostTerms,
}

impl PricedCandidate {
    fn labelled(self, action: Action, refusal: Option<CandidateRefusal>) -> PlanCandidate {
        let Self { sequence, ownership, terms } = self;
        PlanCandidate { action, sequence, ownership, cost_terms: terms, total_cost: terms.total(), refusal }
    }
}

impl CandidateBuilder<'_> {
    fn push_all(&self, target: usize, all: &mut Vec<PlanCandidate>) {
        if let Some(refusal) = self.layout.target_refusal(target) {
            all.push(self.unpriced(target).labelled(Action::ColocatedPrefill, Some(refusal)));
            return;
        }
        if !self.at(target).serves_alone() {
            all.push(
                self.local_draft(target)
                    .labelled(Action::ColocatedPrefill, Some(CandidateRefusal::RequiresPrefillWorker)),
            );
            all.extend(self.prefiller(target).map(|prefiller| self.remote_prefill_candidate(target, prefiller)));
            return;
        }
        let Some(fabrics) = &self.fabrics else {
            all.push(self.local_candidate(target, None));
            return;
        };
        let fabrics_around = self.fabrics_around_disabled_links(target);
        let helpers = fabrics_around.as_ref().unwrap_or(fabrics).helpers_for(&self.layout.inputs, self.at(target));
        let replicate = helpers.and_then(|h| h.sources().find_map(|from| self.replicate_option(from, target)));
        all.push(self.local_candidate(target, replicate));
        match (replicate, helpers) {
            (Some(replicate), _) => all.push(self.replicate_candidate(target, &replicate)),
            (None, Some(_)) => all.extend(self.refused_replicate_candidate(target, CandidateRefusal::FabricMismatch)),
            (None, None) => all.extend(self.refused_replicate_candidate(target, CandidateRefusal::NoLink)),
        }
        let prefiller = |helpers: FabricShortlist| helpers.prefillers().find(|place| *place != target);
        if let Some(prefiller) = helpers.and_then(prefiller) {
            all.push(self.remote_prefill_candidate(target, prefiller));
        } else if fabrics_around.is_some()
            && let Some(disabled) = fabrics.helpers_for(&self.layout.inputs, self.at(target)).and_then(prefiller)
        {
            all.push(PlanCandidate {
                refusal: Some(CandidateRefusal::LinkDisabled),
                ..self.remote_prefill_candidate(target, disabled)
            });
        }
    }

    /// Returns the worker that would compute the prompt for this target.
    fn prefiller(&self, target: usize) -> Option<usize> {
        let helpers = match self.fabrics_around_disabled_links(target) {
            Some(fabrics) => fabrics.helpers_for(&self.layout.inputs, self.at(target))?,
            None => self.fabrics.as_ref()?.helpers_for(&self.layout.inputs, self.at(target))?,
        };
        helpers.prefillers().find(|place| *place != target)
    }

    /// Returns the helpers of a target that has disabled links to it; none when it has no disabled link.
    fn fabrics_around_disabled_links(&self, target: usize) -> Option<FabricShortlists<'_>> {
        let id = self.at(target).view.id;
        let has_disabled_link = self.layout.inputs.disabled.links.iter().any(|link| link.to == id);
        (self.fabrics.is_some() && has_disabled_link)
            .then(|| FabricShortlists::around_disabled_links(self.layout, &self.cost_model, id))
    }

    /// One leg, no transfer.
    fn local_candidate(&self, target: usize, replicate: Option<ReplicateOption>) -> PlanCandidate {
        let cached = self.at(target).prefix.cached;
        let draft = self.local_draft(target);
        let allows = |action| self.layout.inputs.allows(action);
        let is_tail = |r: ReplicateOption| cached > Tokens::ZERO && r.prefix_end - cached <= cached;
        let continues =
            self.layout.inputs.step == StepKind::DecodeContinuation && draft.ownership == OwnershipEffect::Keep;
        let action = if self.fabrics.is_none() && self.layout.inputs.policy.policy != SelectionRule::LowestCost {
            Action::ColocatedPrefill
        } else if continues && allows(Action::DecodeContinuation) {
            Action::DecodeContinuation
        } else if replicate.is_some_and(is_tail) && allows(Action::TailRecompute) {
            Action::TailRecompute
        } else {
            Action::ColocatedPrefill
        };
        draft.labelled(action, None)
    }

    /// The sealed prefix is replicated to the target, which serves the step, in the cheapest way that is enabled.
    fn replicate_candidate(&self, target: usize, replicate: &ReplicateOption) -> PlanCandidate {
        let ReplicateOption { from, split, alternative_split, .. } = *replicate;
        let ownership = self.ownership(target, Some(HandoffKind::Replicate));
        let price = |split: RestoreSplit| (split, self.price_replicate(target, from, &split, &ownership));
        let (first, second) = (price(split), alternative_split.map(price));
        let (split, PricedReplicate { terms, action, refusal }) = match second {
            Some(second) if second.1.preference() < first.1.preference() => second,
            _ => first,
        };
        let leg = self.leg(target, LegRole::Serve, split.start);
        let sequence = LegSequence::replicate(self.replicate_handoff(from, &split, &leg), leg);
        PricedCandidate { sequence, ownership, terms }.labelled(action, refusal)
    }

    fn price_replicate(
        &self,
        target: usize,
        from: usize,
        split: &RestoreSplit,
        ownership: &OwnershipEffect,
    ) -> PricedReplicate {
        let (source, at) = (self.at(from), self.at(target));
        let serving = TargetCostInputs {
            start: split.start,
            missing_kv_source: MissingKvSource::Here,
            duplicated_until: self.tokens_elsewhere(target, ownership),
        };
        let served = self.cost_model.target_terms(at, serving);
        // The transfer also covers blocks that the target holds in slower tiers, so the target does not load them.
        let served = CostTerms { restore: served.restore - self.cost_model.restore_time(at), ..served };
        let transfer = self.transfer_time(target, split.bytes);
        let terms = match self.layout.inputs.policy.replicate_dispatch {
            ReplicateSendTiming::Queued => {
                let terms = sequential_terms(&self.source_cost(from, split.loaded), &served);
                CostTerms { network: transfer + source.speed.step + at.speed.step, ..terms }
            }
            // The transfer overlaps with the target's queue.
            ReplicateSendTiming::Immediate => {
                let load = self.cost_model.restore_time(source);
                CostTerms {
                    queue: served.queue - load - transfer,
                    network: transfer,
                    restore: served.restore + load,
                    ..served
                }
            }
        };
        let holds_more = self.align_down(from, target, source.prefix.believed) > split.loaded;
        let action = match ownership {
            OwnershipEffect::Move { .. } => Action::StateMigration,
            _ if holds_more || split.recomputes_windows() => Action::TailRecompute,
            _ => Action::ArtifactFetch,
        };
        let refusal = (!self.layout.inputs.allows(action)).then_some(CandidateRefusal::ActionDisabled);
        PricedReplicate { terms, action, refusal }
    }

    /// Another worker holds a longer prefix but cannot send it to the target.
    fn refused_replicate_candidate(&self, target: usize, why: CandidateRefusal) -> Option<PlanCandidate> {
        let (from, believed) = self.layout.longest_prefix_elsewhere(target)?;
        let fits = self.layout.inputs.can_read(self.at(from).shape, self.at(target).shape);
        let why = match why {
            CandidateRefusal::FabricMismatch if !fits => CandidateRefusal::ParallelismMismatch,
            CandidateRefusal::FabricMismatch
                if self.layout.inputs.is_link_disabled(self.at(from).view.id, self.at(target).view.id) =>
            {
                CandidateRefusal::LinkDisabled
            }
            why => why,
        };
        let until = believed.min(self.layout.replicable_tokens());
        let cached = self.at(target).prefix.cached;
        let bytes = (until > cached).then(|| self.cost_model.bytes(self.at(target), cached, until))?;
        let leg = self.leg(target, LegRole::Serve, cached);
        let handoff = self.replicate_handoff(from, &RestoreSplit { loaded: until, bytes, start: until }, &leg);
        let ownership = self.ownership(target, Some(HandoffKind::Replicate));
        let draft =
            PricedCandidate { sequence: LegSequence::replicate(handoff, leg), ownership, terms: CostTerms::default() };
        Some(draft.labelled(Action::ArtifactFetch, Some(why)))
    }

    /// The prompt is computed at `prefiller`, and the target pulls its KV.
    fn remote_prefill_candidate(&self, target: usize, prefiller: usize) -> PlanCandidate {
        let (source, at) = (self.at(prefiller), self.at(target));
        let prompt = self.layout.inputs.request.prompt_tokens;
        let bytes = self.cost_model.bytes(at, at.prefix.cached, prompt);
        let ownership = self.ownership(target, Some(HandoffKind::RemotePrefill));
        let serving = TargetCostInputs {
            start: at.prefix.cached,
            missing_kv_source: MissingKvSource::Pulled,
            duplicated_until: self.tokens_elsewhere(target, &ownership),
        };
        let mut terms =
            sequential_terms(&self.source_cost(prefiller, prompt), &self.cost_model.target_terms(at, serving));
        terms.network = self.transfer_time(target, bytes) + source.speed.step;
        let prefill = self.leg(prefiller, LegRole::Prefill, source.prefix.cached);
        let decode = Leg { computed_tokens: Tokens::ZERO, ..self.leg(target, LegRole::Decode, at.prefix.cached) };
        let kind = HandoffKind::RemotePrefill;
        let handoff = Handoff { kind, source: prefill.at(), target: decode.at(), blocks: None, bytes };
        let allowed = self.layout.inputs.allows(Action::RemotePrefill);
        PricedCandidate { sequence: LegSequence::remote_prefill(prefill, handoff, decode), ownership, terms }
            .labelled(Action::RemotePrefill, (!allowed).then_some(CandidateRefusal::ActionDisabled))
    }

    /// One leg at `target` with the prefix it has.
    fn local_draft(&self, target: usize) -> PricedCandidate {
        let ownership = self.ownership(target, None);
        let start = self.at(target).prefix.cached;
        let serving = TargetCostInputs {
            start,
            missing_kv_source: MissingKvSource::Here,
            duplicated_until: self.tokens_elsewhere(target, &ownership),
        };
        PricedCandidate {
            sequence: LegSequence::serve(self.leg(target, LegRole::Serve, start)),
            ownership,
            terms: self.cost_model.target_terms(self.at(target), serving),
        }
    }

    /// One leg at `target` that is not priced.
    fn unpriced(&self, target: usize) -> PricedCandidate {
        let leg = self.leg(target, LegRole::Serve, self.at(target).prefix.cached);
        let ownership = self.ownership(target, None);
        PricedCandidate { sequence: LegSequence::serve(leg), ownership, terms: CostTerms::default() }
    }

    /// Returns what `from` can send to `target`: a prefix longer than the target's that ends at a block boundary of
    /// both engines.
    fn replicate_option(&self, from: usize, target: usize) -> Option<ReplicateOption> {
        if from == target {
            return None;
        }
        let until = self.align_down(from, target, self.layout.replicable_tokens().min(self.at(from).prefix.believed));
        if until <= self.at(target).prefix.cached {
            return None;
        }
        let [first, second] = self.restore_splits(from, target, until);
        let (split, alternative_split) = first.map_or((second, None), |first| (Some(first), second));
        split.map(|split| ReplicateOption { from, prefix_end: until, split, alternative_split })
    }

    /// Returns the ways to bring the prefix up to `until` to `target`.
    fn restore_splits(&self, from: usize, target: usize, until: Tokens) -> [Option<RestoreSplit>; 2] {
        let at = self.at(target);
        let device_tokens = at.prefix.on_device();
        match self.layout.inputs.attention {
            Some(spec) => {
                RestorablePrefix { spec, cached: device_tokens, until, unit: self.unit(from, target) }.load_splits()
            }
            None => {
                let bytes = self.cost_model.bytes(at, device_tokens, until);
                [Some(RestoreSplit { loaded: until, bytes, start: until }), None]
            }
        }
    }

    /// Granularity of a transfer between two workers: the least common multiple of the chain's, both engines' and the
    /// model's block.
    fn unit(&self, from: usize, target: usize) -> Tokens {
        let blocks = [from, target].map(|place| self.at(place).view.capacity.block.0);
        let model = self.layout.inputs.attention.map_or(1, |spec| spec.block().0);
        Tokens(blocks.into_iter().fold(lcm(self.layout.inputs.request.block_size.0, model), lcm))
    }

    fn align_down(&self, from: usize, target: usize, tokens: Tokens) -> Tokens {
        let unit = self.unit(from, target);
        tokens.min(self.layout.inputs.request.prompt_tokens - Tokens(1)).whole_blocks(unit).tokens(unit)
    }

    /// Copy of a prefix from `from` to the worker of `leg`.
    fn replicate_handoff(&self, from: usize, split: &RestoreSplit, leg: &Leg) -> Handoff {
        let WorkerCandidate { view, prefix, .. } = self.at(from);
        let source = WorkerRank { worker: view.id, rank: prefix.rank };
        let blocks = Some(split.loaded.whole_blocks(self.layout.inputs.request.block_size));
        Handoff { kind: HandoffKind::Replicate, source, target: leg.at(), blocks, bytes: split.bytes }
    }

    /// Cost of a source that computes the prompt up to `to`.
    fn source_cost(&self, place: usize, to: Tokens) -> CostTerms {
        let known = self.cached_source_costs.iter().filter_map(Cell::get).find(|(key, _)| *key == (place, to));
        known.map_or_else(
            || {
                let terms = self.cost_model.source_terms(self.at(place), to);
                let oldest = Some(((place, to), terms));
                self.cached_source_costs.iter().fold(oldest, |next, cell| cell.replace(next));
                terms
            },
            |(_, terms)| terms,
        )
    }

    fn transfer_time(&self, target: usize, bytes: Bytes) -> Micros {
        let link = self.at(target).view.link.as_ref();
        link.map_or(Micros(u64::MAX), |link| self.cost_model.transfer_time(link, bytes))
    }

    fn leg(&self, place: usize, role: LegRole, cached: Tokens) -> Leg {
        let at = self.at(place);
        let computed_tokens = self.layout.inputs.request.prompt_tokens - cached;
        Leg { role, worker: at.view.id, rank: at.prefix.rank, cached_tokens: cached, computed_tokens }
    }

    /// Tokens of the prompt that another worker keeps, if more than the target. After a move the old owner's copy no
    /// longer counts.
    fn tokens_elsewhere(&self, target: usize, ownership: &OwnershipEffect) -> Tokens {
        match ownership {
            OwnershipEffect::Move { .. } => Tokens::ZERO,
            _ => self.layout.longest_prefix_elsewhere(target).map_or(Tokens::ZERO, |(_, held)| held),
        }
    }

    /// Ownership moves if the owner should be left, or if the target already holds more of the session than the owner.
    fn ownership(&self, target: usize, handoff: Option<HandoffKind>) -> OwnershipEffect {
        let session = self.layout.inputs.session;
        let Some(from) = session.owner else { return OwnershipEffect::Claim };
        if self.layout.is_owner(target) {
            return OwnershipEffect::Keep;
        }
        if handoff == Some(HandoffKind::Replicate) && !self.layout.inputs.allows(Action::StateMigration) {
            return OwnershipEffect::ReadReplica;
        }
        let lives_there =
            |owner: usize| owner == target || self.at(target).prefix.believed > self.at(owner).prefix.believed;
        let there = self.layout.owner.is_some_and(lives_there).then_some(MoveReason::TargetHoldsMore);
        let why = self.layout.move_reason_for(target).or(there);
        why.map_or(OwnershipEffect::ReadReplica, |reason| OwnershipEffect::Move {
            previous_owner: from,
            epoch: session.epoch,
            reason,
        })
    }

    fn at(&self, place: usize) -> &WorkerCandidate<'_> {
        &self.layout.candidates[place]
    }
}
