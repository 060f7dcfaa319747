//! The fleet laid out for one step: every worker's standing, the owner's, and the best helpers on each fabric.
//!
//! A helper's price does not depend on the target it helps, so the best two of a fabric are enough for all targets of
//! it (two, because a worker cannot help itself): candidates grow with the workers, not with their pairs.

use std::cmp::Reverse;

use vocabulary::{Health, Knowledge, Micros, Owner, Role, Tokens, WorkerId};

use crate::cost::{Prices, usable};
use crate::holding::holdings;
use crate::standing::{Standing, too_long};
use crate::tenancy::Visit;
use crate::{Inputs, MoveReason, NoPlan, ParallelShape, Refused};

/// Everything that candidates are made from.
pub(crate) struct Table<'a> {
    pub(crate) inputs: Inputs<'a>,
    /// The account of whose KV lies where.
    pub(crate) visit: Visit<'a>,
    pub(crate) standings: Vec<Standing<'a>>,
    pub(crate) owner: Option<usize>,
    /// Why the owner should not stay the owner, whoever serves.
    leave: Option<MoveReason>,
    /// Whether draining workers may serve: only when nobody else can.
    last_resort: LastResort,
    /// Who holds most of the prompt, and how much.
    deepest: Option<(usize, Tokens)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum LastResort {
    No,
    Draining,
}

impl<'a> Table<'a> {
    pub(crate) fn lay(inputs: &Inputs<'a>) -> Result<Self, NoPlan> {
        let holdings = holdings(inputs);
        let visit = inputs.account.tenancy.visit(inputs.session.id, inputs.account.now);
        let stand = |(view, holding)| Standing::new((inputs, visit), view, holding);
        let standings: Vec<_> = inputs.workers.iter().zip(holdings).map(stand).collect();
        let able = |s: &Standing<'_>| s.can_serve() && !s.is_draining();
        let last_resort = if standings.iter().any(able) {
            LastResort::No
        } else if standings.iter().any(Standing::can_serve) {
            LastResort::Draining
        } else {
            return Err(nobody(inputs, &standings));
        };
        let owner = inputs.session.owner.and_then(|owner| {
            standings.iter().position(|s| (s.view.id, s.view.incarnation) == (owner.worker, owner.incarnation))
        });
        let deepest = deepest(&standings);
        let mut table = Self { inputs: *inputs, visit, standings, owner, leave: None, last_resort, deepest };
        table.leave = table.reason_to_leave();
        Ok(table)
    }

    /// Why a worker cannot be a target.
    pub(crate) fn refused(&self, at: usize) -> Option<Refused> {
        let standing = &self.standings[at];
        let draining = standing.is_draining() && self.last_resort == LastResort::No;
        standing
            .barred
            .or((!standing.view.role.decodes()).then_some(Refused::PrefillOnly))
            .or(draining.then_some(Refused::Draining))
    }

    /// Who holds most of the prompt, and how much, unless it is this worker itself.
    pub(crate) fn deepest_other(&self, at: usize) -> Option<(usize, Tokens)> {
        self.deepest.filter(|(place, _)| *place != at)
    }

    /// Tokens of the prompt that may be replicated: sealed, and not all of it.
    pub(crate) fn movable(&self) -> Tokens {
        self.inputs.session.sealed.tokens(self.inputs.ask.block).min(self.inputs.ask.prompt - Tokens(1))
    }

    fn reason_to_leave(&self) -> Option<MoveReason> {
        self.inputs.session.owner?;
        let Some(standing) = self.owner.map(|at| &self.standings[at]) else { return Some(MoveReason::OwnerGone) };
        let sealed = self.inputs.session.sealed.tokens(self.inputs.ask.block).min(self.inputs.ask.prompt);
        let evicted = standing.view.knowledge == Knowledge::Exact && standing.holding.held * 2 < sealed;
        match standing.barred {
            Some(Refused::Excluded) => Some(MoveReason::OwnerExcluded),
            Some(Refused::NotReady | Refused::WrongModel) => Some(MoveReason::OwnerGone),
            _ if standing.is_draining() => Some(MoveReason::OwnerDraining),
            _ if !standing.view.role.decodes() => Some(MoveReason::OwnerPrefillOnly),
            _ if self.is_overloaded(standing) => Some(MoveReason::OwnerOverloaded),
            _ if evicted => Some(MoveReason::OwnerEvicted),
            _ => None,
        }
    }

    /// Why ownership should go to this target: nobody flees from an overloaded owner to an overloaded target, or
    /// sessions would run in circles while everybody is.
    pub(crate) fn leave_for(&self, target: usize) -> Option<MoveReason> {
        let in_vain =
            |why: &MoveReason| *why == MoveReason::OwnerOverloaded && self.is_overloaded(&self.standings[target]);
        self.leave.filter(|why| !in_vain(why))
    }

    fn is_overloaded(&self, standing: &Standing<'_>) -> bool {
        let overload = &self.inputs.policy.overload;
        standing.pace.queue >= overload.queue || standing.pace.usage >= overload.kv_usage
    }

    /// Whether this rank is the owner itself.
    pub(crate) fn is_owner(&self, at: usize) -> bool {
        let standing = &self.standings[at];
        let rank = standing.holding.rank;
        self.inputs.session.owner
            == Some(Owner { worker: standing.view.id, incarnation: standing.view.incarnation, rank })
    }
}

/// The best helpers of one fabric.
#[derive(Default, Clone, Copy)]
pub(crate) struct Helpers {
    sources: Best,
    prefillers: Best,
}

/// The cheapest two, cheapest first.
#[derive(Default, Clone, Copy)]
struct Best([Option<(Key, usize)>; 2]);

type Key = (Micros, Reverse<u64>, WorkerId);

impl Best {
    fn offer(&mut self, key: Key, at: usize) {
        let [first, second] = &mut self.0;
        if first.is_none_or(|(best, _)| key < best) {
            *second = first.replace((key, at));
        } else if second.is_none_or(|(best, _)| key < best) {
            *second = Some((key, at));
        }
    }

    /// Whether somebody of this price or a higher one can be among them.
    fn may_take(&self, key: Key) -> bool {
        self.0[1].is_none_or(|(second, _)| key < second)
    }

    fn merge(&mut self, other: Self) {
        other.0.into_iter().flatten().for_each(|(key, place)| self.offer(key, place));
    }

    fn places(self) -> impl Iterator<Item = usize> {
        self.0.into_iter().flatten().map(|(_, place)| place)
    }
}

impl Helpers {
    fn merge(&mut self, other: Self) {
        self.sources.merge(other.sources);
        self.prefillers.merge(other.prefillers);
    }

    /// Who can send sealed blocks, best first.
    pub(crate) fn sources(self) -> impl Iterator<Item = usize> {
        self.sources.places()
    }

    /// Who can compute a prompt for others, best first.
    pub(crate) fn prefillers(self) -> impl Iterator<Item = usize> {
        self.prefillers.places()
    }
}

pub(crate) struct Fabrics<'a>(Vec<(Place<'a>, Helpers)>);

type Place<'a> = (&'a str, Option<ParallelShape>);

impl<'a> Fabrics<'a> {
    /// For all targets that no barred link leads to.
    pub(crate) fn of(table: &Table<'a>, prices: &Prices<'_>) -> Self {
        Self::among(table, prices, |_| true)
    }

    /// For one target that barred links lead to: without those who would send over them.
    pub(crate) fn around_bars(table: &Table<'a>, prices: &Prices<'_>, target: WorkerId) -> Self {
        Self::among(table, prices, |from| !table.inputs.bars(from, target))
    }

    fn among(table: &Table<'a>, prices: &Prices<'_>, may_send: impl Fn(WorkerId) -> bool) -> Self {
        let mut all = Self(Vec::with_capacity(2));
        for (at, standing) in table.standings.iter().enumerate() {
            let Some(fabric) = fabric(standing) else { continue };
            let sends = standing.view.link.as_ref().is_some_and(|link| link.carries.sends());
            if standing.barred.is_some() || !sends || !may_send(standing.view.id) {
                continue;
            }
            let key = |price| (price, Reverse(standing.weight), standing.view.id);
            let helpers = all.entry((fabric, standing.shape));
            let offer = |best: &mut Best, to: Tokens| {
                // Who is too dear already is not asked for what it adds, and whom it would push out.
                if best.may_take(key(prices.soonest(standing, to)))
                    && best.may_take(key(prices.source_in_free_room(standing, to).total()))
                {
                    best.offer(key(prices.source(standing, to).total()), at);
                }
            };
            let movable = table.movable();
            if standing.holding.held.min(movable) > Tokens::ZERO {
                // What the source lacks of the sealed prefix will be computed somewhere; its own rate is the yardstick.
                offer(&mut helpers.sources, movable);
            }
            if standing.view.role != Role::Decode && standing.view.health == Health::Ready {
                offer(&mut helpers.prefillers, table.inputs.ask.prompt);
            }
        }
        all
    }

    /// The helpers on a target's fabric that its ranks can read from; none when the target has no usable link.
    pub(crate) fn of_target(&self, inputs: &Inputs<'_>, target: &Standing<'_>) -> Option<Helpers> {
        let name = fabric(target)?;
        let mut those =
            self.0.iter().filter(|((fabric, shape), _)| *fabric == name && inputs.can_read(*shape, target.shape));
        let mut helpers = those.next().map_or_else(Helpers::default, |(_, helpers)| *helpers);
        those.for_each(|(_, more)| helpers.merge(*more));
        Some(helpers)
    }

    fn entry(&mut self, wanted: Place<'a>) -> &mut Helpers {
        let at = self.0.iter().position(|(place, _)| *place == wanted).unwrap_or_else(|| {
            self.0.push((wanted, Helpers::default()));
            self.0.len() - 1
        });
        &mut self.0[at].1
    }
}

fn fabric<'a>(standing: &Standing<'a>) -> Option<&'a str> {
    standing.view.link.as_ref().filter(|link| usable(link)).map(|link| &*link.fabric)
}

fn deepest(standings: &[Standing<'_>]) -> Option<(usize, Tokens)> {
    let holds = |s: &Standing<'_>| s.barred.is_none() && s.holding.held > Tokens::ZERO;
    let holders = standings.iter().enumerate().filter(|(_, standing)| holds(standing));
    let most = holders.max_by_key(|(_, s)| (s.holding.held, s.weight, Reverse(s.view.id)));
    most.map(|(at, standing)| (at, standing.holding.held))
}

/// Why nobody can serve: the first thing that everybody lacks.
fn nobody(inputs: &Inputs<'_>, standings: &[Standing<'_>]) -> NoPlan {
    if standings.iter().all(|s| s.barred == Some(Refused::WrongModel)) {
        let ask = inputs.ask;
        let known = inputs.workers.iter().any(|view| view.models.contains(&ask.model));
        let missing = ask.adapter.as_ref().filter(|_| known).unwrap_or(&ask.model);
        return NoPlan::UnknownModel { model: missing.clone() };
    }
    let decoding = || standings.iter().filter(|s| s.view.role.decodes() && s.barred != Some(Refused::WrongModel));
    let fits = |s: &Standing<'_>| too_long(inputs.ask, s.view).is_none();
    if decoding().next().is_some() && !decoding().any(fits) {
        return NoPlan::TooLong { longest: decoding().map(longest).max().unwrap_or_default() };
    }
    if decoding().any(|s| s.barred == Some(Refused::Excluded) && fits(s)) {
        NoPlan::AllExcluded
    } else {
        NoPlan::NoneReady
    }
}

fn longest(standing: &Standing<'_>) -> Tokens {
    let limits = [standing.view.capacity.context, standing.view.capacity.kv];
    limits.into_iter().filter(|limit| *limit > Tokens::ZERO).min().unwrap_or_default()
}
