//! Every way to serve the step, priced or refused. It does not choose.

use std::cell::Cell;

use vocabulary::{Bytes, Micros, Tokens};

use crate::cost::{Compute, Prices, Serving, in_turn};
use crate::lcm::lcm;
use crate::standing::Standing;
use crate::table::{Fabrics, Helpers, Table};
use crate::{
    Action, Candidate, Claim, Handoff, Leg, MoveReason, Refused, Restore, Rule, Sources, StepKind, Terms, Transfers,
    Way,
};

/// At most three a worker: serve there, have it computed elsewhere, have the sealed prefix sent there first.
pub(crate) fn candidates(table: &Table<'_>) -> Vec<Candidate> {
    let prices = Prices::new(&table.inputs, table.visit);
    let offers_transfers = table.inputs.policy.rule == Rule::Own && table.inputs.ask.transfers == Transfers::Allowed;
    let fabrics = offers_transfers.then(|| Fabrics::of(table, &prices));
    let maker = Maker { table, prices, fabrics, sources: Default::default() };
    let mut all = Vec::with_capacity(3 * table.standings.len());
    for target in 0..table.standings.len() {
        maker.push_all(target, &mut all);
    }
    all
}

struct Maker<'a> {
    table: &'a Table<'a>,
    prices: Prices<'a>,
    fabrics: Option<Fabrics<'a>>,
    /// What the last few sources' parts cost, by who it is and up to where: few help all targets.
    sources: [Cell<Option<SourcePart>>; 4],
}

/// What the part of a source, up to so many tokens, costs.
type SourcePart = ((usize, Tokens), Terms);

/// A replicate to one target: from whom, the leading tokens that could be there afterwards, and how they get there.
#[derive(Clone, Copy)]
struct Replicate {
    from: usize,
    until: Tokens,
    way: Way,
    other: Option<Way>,
}

/// One way of a replicate, priced and labelled.
#[derive(Clone, Copy)]
struct Fetch {
    terms: Terms,
    action: Action,
    refused: Option<Refused>,
}

impl Fetch {
    fn rank(&self) -> (bool, Micros) {
        (self.refused.is_some(), self.terms.total())
    }
}

/// A candidate before its label and refusal are known.
struct Draft {
    prefill: Leg,
    decode: Leg,
    handoff: Option<Handoff>,
    claim: Claim,
    terms: Terms,
}

impl Draft {
    fn labelled(self, action: Action, refused: Option<Refused>) -> Candidate {
        let Self { prefill, decode, handoff, claim, terms } = self;
        Candidate { action, prefill, decode, handoff, claim, terms, total: terms.total(), refused }
    }
}

impl Maker<'_> {
    fn push_all(&self, target: usize, all: &mut Vec<Candidate>) {
        if let Some(refused) = self.table.refused(target) {
            all.push(self.unpriced(target, None).labelled(Action::ColocatedPrefill, Some(refused)));
            return;
        }
        if !self.at(target).serves_alone() {
            all.push(self.draft(target).labelled(Action::ColocatedPrefill, Some(Refused::NeedsPrefiller)));
            all.extend(self.prefiller(target).map(|prefiller| self.remote(target, prefiller)));
            return;
        }
        let Some(fabrics) = &self.fabrics else {
            all.push(self.single(target, None));
            return;
        };
        let around = self.around_bars(target);
        let helpers = around.as_ref().unwrap_or(fabrics).of_target(&self.table.inputs, self.at(target));
        let replicate = helpers.and_then(|h| h.sources().find_map(|from| self.replicate(from, target)));
        all.push(self.single(target, replicate));
        match (replicate, helpers) {
            (Some(replicate), _) => all.push(self.fetch(target, &replicate)),
            (None, Some(_)) => all.extend(self.fetch_refused(target, Refused::OtherFabric)),
            (None, None) => all.extend(self.fetch_refused(target, Refused::NoLink)),
        }
        let prefiller = |helpers: Helpers| helpers.prefillers().find(|place| *place != target);
        if let Some(prefiller) = helpers.and_then(prefiller) {
            all.push(self.remote(target, prefiller));
        } else if around.is_some()
            && let Some(barred) = fabrics.of_target(&self.table.inputs, self.at(target)).and_then(prefiller)
        {
            all.push(Candidate { refused: Some(Refused::BarredLink), ..self.remote(target, barred) });
        }
    }

    /// Who may compute the prompt for this target.
    fn prefiller(&self, target: usize) -> Option<usize> {
        let helpers = match self.around_bars(target) {
            Some(around) => around.of_target(&self.table.inputs, self.at(target))?,
            None => self.fabrics.as_ref()?.of_target(&self.table.inputs, self.at(target))?,
        };
        helpers.prefillers().find(|place| *place != target)
    }

    /// Who can help a target that barred links lead to; none where none does.
    fn around_bars(&self, target: usize) -> Option<Fabrics<'_>> {
        let id = self.at(target).view.id;
        let is_barred = self.table.inputs.disabled.links.iter().any(|link| link.to == id);
        (self.fabrics.is_some() && is_barred).then(|| Fabrics::around_bars(self.table, &self.prices, id))
    }

    /// One leg, nothing moves.
    fn single(&self, target: usize, replicate: Option<Replicate>) -> Candidate {
        let cached = self.at(target).holding.cached;
        let draft = self.draft(target);
        let allows = |action| self.table.inputs.allows(action);
        let is_tail = |r: Replicate| cached > Tokens::ZERO && r.until - cached <= cached;
        let continues = self.table.inputs.step == StepKind::DecodeContinuation && draft.claim == Claim::Keep;
        let action = if self.fabrics.is_none() && self.table.inputs.policy.rule != Rule::Own {
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

    /// The sealed prefix is sent to the target, which then serves: in the cheapest way that is switched on.
    fn fetch(&self, target: usize, replicate: &Replicate) -> Candidate {
        let Replicate { from, way, other, .. } = *replicate;
        let claim = self.claim(target, Some(&self.handoff(from, &way)));
        let first = self.fetch_by(target, from, &way, &claim);
        let second = other.map(|other| (other, self.fetch_by(target, from, &other, &claim)));
        let (way, Fetch { terms, action, refused }) = match second {
            Some((other, second)) if second.rank() < first.rank() => (other, second),
            _ => (way, first),
        };
        let leg = self.leg(target, way.start);
        let handoff = Some(self.handoff(from, &way));
        Draft { prefill: leg, decode: leg, handoff, claim, terms }.labelled(action, refused)
    }

    fn fetch_by(&self, target: usize, from: usize, way: &Way, claim: &Claim) -> Fetch {
        let (source, at) = (self.at(from), self.at(target));
        let serving = Serving { start: way.start, computed: Compute::Here, elsewhere: self.elsewhere(target, claim) };
        let served = self.prices.target(at, serving);
        // What the target has in slower tiers is sent as well: it need not load it.
        let served = Terms { restore: served.restore - self.prices.restore(at), ..served };
        let network = self.network(target, way.bytes);
        let terms = match self.table.inputs.policy.sources {
            Sources::InTurn => {
                let terms = in_turn(&self.source(from, way.loaded), &served);
                Terms { network: network + source.pace.step + at.pace.step, ..terms }
            }
            // What is sent comes while the target's queue drains.
            Sources::AtOnce => {
                let load = self.prices.restore(source);
                Terms { queue: served.queue - load - network, network, restore: served.restore + load, ..served }
            }
        };
        let holds_more = self.aligned(from, target, source.holding.held) > way.loaded;
        let action = match claim {
            Claim::Move { .. } => Action::StateMigration,
            _ if holds_more || way.recomputes_windows() => Action::TailRecompute,
            _ => Action::ArtifactFetch,
        };
        let refused = (!self.table.inputs.allows(action)).then_some(Refused::Disabled);
        Fetch { terms, action, refused }
    }

    /// Somebody holds what the target lacks, and cannot send it there.
    fn fetch_refused(&self, target: usize, why: Refused) -> Option<Candidate> {
        let (from, held) = self.table.deepest_other(target)?;
        let fits = self.table.inputs.can_read(self.at(from).shape, self.at(target).shape);
        let why = match why {
            Refused::OtherFabric if !fits => Refused::OtherShape,
            Refused::OtherFabric if self.table.inputs.bars(self.at(from).view.id, self.at(target).view.id) => {
                Refused::BarredLink
            }
            why => why,
        };
        let until = held.min(self.table.movable());
        let cached = self.at(target).holding.cached;
        let bytes = (until > cached).then(|| self.prices.bytes(self.at(target), cached, until))?;
        let handoff = self.handoff(from, &Way { loaded: until, bytes, start: until });
        Some(self.unpriced(target, Some(handoff)).labelled(Action::ArtifactFetch, Some(why)))
    }

    /// The prompt is computed elsewhere and pulled by the target.
    fn remote(&self, target: usize, prefiller: usize) -> Candidate {
        let (source, at) = (self.at(prefiller), self.at(target));
        let prompt = self.table.inputs.ask.prompt;
        let bytes = self.prices.bytes(at, at.holding.cached, prompt);
        let handoff = Handoff::RemotePrefill { bytes };
        let claim = self.claim(target, Some(&handoff));
        let serving =
            Serving { start: at.holding.cached, computed: Compute::Pulled, elsewhere: self.elsewhere(target, &claim) };
        let mut terms = in_turn(&self.source(prefiller, prompt), &self.prices.target(at, serving));
        terms.network = self.network(target, bytes) + source.pace.step;
        let prefill = self.leg(prefiller, source.holding.cached);
        let decode = Leg { tokens_computed: Tokens::ZERO, ..self.leg(target, at.holding.cached) };
        let allowed = self.table.inputs.allows(Action::RemotePrefill);
        Draft { prefill, decode, handoff: Some(handoff), claim, terms }
            .labelled(Action::RemotePrefill, (!allowed).then_some(Refused::Disabled))
    }

    /// One leg at `target` with what it has.
    fn draft(&self, target: usize) -> Draft {
        let claim = self.claim(target, None);
        let start = self.at(target).holding.cached;
        let serving = Serving { start, computed: Compute::Here, elsewhere: self.elsewhere(target, &claim) };
        let leg = self.leg(target, start);
        Draft { prefill: leg, decode: leg, handoff: None, claim, terms: self.prices.target(self.at(target), serving) }
    }

    fn unpriced(&self, target: usize, handoff: Option<Handoff>) -> Draft {
        let leg = self.leg(target, self.at(target).holding.cached);
        let claim = self.claim(target, handoff.as_ref());
        Draft { prefill: leg, decode: leg, handoff, claim, terms: Terms::default() }
    }

    /// What `from` can send to `target`: up to a boundary of both engines, and more than the target has.
    fn replicate(&self, from: usize, target: usize) -> Option<Replicate> {
        if from == target {
            return None;
        }
        let until = self.aligned(from, target, self.table.movable().min(self.at(from).holding.held));
        if until <= self.at(target).holding.cached {
            return None;
        }
        let [first, second] = self.ways(from, target, until);
        let (way, other) = first.map_or((second, None), |first| (Some(first), second));
        way.map(|way| Replicate { from, until, way, other })
    }

    /// How the prefix up to `until` can come to `target`.
    fn ways(&self, from: usize, target: usize, until: Tokens) -> [Option<Way>; 2] {
        let at = self.at(target);
        let held = at.holding.on_device();
        match self.table.inputs.attention {
            Some(spec) => Restore { spec, held, until, unit: self.unit(from, target) }.ways(),
            None => {
                let bytes = self.prices.bytes(at, held, until);
                [Some(Way { loaded: until, bytes, start: until }), None]
            }
        }
    }

    /// What moves between two workers ends at a multiple of the chain's block, both engines' and the model's.
    fn unit(&self, from: usize, target: usize) -> Tokens {
        let blocks = [from, target].map(|place| self.at(place).view.capacity.block.0);
        let model = self.table.inputs.attention.map_or(1, |spec| spec.block().0);
        Tokens(blocks.into_iter().fold(lcm(self.table.inputs.ask.block.0, model), lcm))
    }

    fn aligned(&self, from: usize, target: usize, tokens: Tokens) -> Tokens {
        let unit = self.unit(from, target);
        tokens.min(self.table.inputs.ask.prompt - Tokens(1)).whole_blocks(unit).tokens(unit)
    }

    fn handoff(&self, from: usize, way: &Way) -> Handoff {
        let Standing { view, holding, .. } = self.at(from);
        let blocks = way.loaded.whole_blocks(self.table.inputs.ask.block);
        Handoff::Replicate { from: view.id, rank: holding.rank, blocks, bytes: way.bytes }
    }

    /// What a source's part costs.
    fn source(&self, place: usize, to: Tokens) -> Terms {
        let known = self.sources.iter().filter_map(Cell::get).find(|(key, _)| *key == (place, to));
        known.map_or_else(
            || {
                let terms = self.prices.source(self.at(place), to);
                let oldest = Some(((place, to), terms));
                self.sources.iter().fold(oldest, |next, cell| cell.replace(next));
                terms
            },
            |(_, terms)| terms,
        )
    }

    fn network(&self, target: usize, bytes: Bytes) -> Micros {
        let link = self.at(target).view.link.as_ref();
        link.map_or(Micros(u64::MAX), |link| self.prices.network(link, bytes))
    }

    fn leg(&self, place: usize, cached: Tokens) -> Leg {
        let at = self.at(place);
        let tokens_computed = self.table.inputs.ask.prompt - cached;
        Leg { worker: at.view.id, rank: at.holding.rank, tokens_cached: cached, tokens_computed }
    }

    /// What others keep of the prompt, if more than the target; after a move the old owner's copy is nobody's.
    fn elsewhere(&self, target: usize, claim: &Claim) -> Tokens {
        match claim {
            Claim::Move { .. } => Tokens::ZERO,
            _ => self.table.deepest_other(target).map_or(Tokens::ZERO, |(_, held)| held),
        }
    }

    /// Ownership follows the reason to leave, or the state itself when the session already lives at the target.
    fn claim(&self, target: usize, handoff: Option<&Handoff>) -> Claim {
        let session = self.table.inputs.session;
        let Some(from) = session.owner else { return Claim::Open };
        if self.table.is_owner(target) {
            return Claim::Keep;
        }
        let replicates = matches!(handoff, Some(Handoff::Replicate { .. }));
        if replicates && !self.table.inputs.allows(Action::StateMigration) {
            return Claim::Borrow;
        }
        let lives_there = |owner: usize| owner == target || self.at(target).holding.held > self.at(owner).holding.held;
        let there = self.table.owner.is_some_and(lives_there).then_some(MoveReason::StateIsThere);
        let why = self.table.leave_for(target).or(there);
        why.map_or(Claim::Borrow, |why| Claim::Move { from, epoch: session.epoch, why })
    }

    fn at(&self, place: usize) -> &Standing<'_> {
        &self.table.standings[place]
    }
}
