//! Compares the occupancy model and its eviction cost with a naive reference model: a list of sessions, scanned for
//! everything.

use proptest::prelude::*;
use vocabulary::*;

use super::{PlanningScene, id};
use crate::return_model::{GapBucket, ReturnModel, ReturnPattern};
use crate::*;

const CAPACITY: Tokens = Tokens(20_000);
const NAMES: [&str; 3] = ["a", "b", "c"];

/// Event: what happens, at which rank and incarnation, to which session, with how many tokens, after which delay.
type OccupancyEvent = (u8, (usize, u64), u128, (u64, u64), u64);

#[derive(Clone, Debug)]
struct ReferenceSession {
    at: Owner,
    session: SessionId,
    tokens: Tokens,
    shared: Tokens,
    steps: u32,
    last: Micros,
    return_pattern: Option<ReturnPattern>,
}

/// Reference model: behaves as [`OccupancyModel`] is documented, without maintained order or sums.
#[derive(Default)]
struct ReferenceOccupancy {
    residents: Vec<ReferenceSession>,
    incarnations: Vec<Owner>,
    returns: ReturnModel,
    sessions: Vec<(SessionId, ReturnPattern, Option<Micros>)>,
}

impl ReferenceOccupancy {
    fn find(&mut self, at: Owner, session: SessionId) -> Option<&mut ReferenceSession> {
        self.residents.iter_mut().find(|tenant| (tenant.at, tenant.session) == (at, session))
    }

    fn here(&self, at: Owner) -> impl Iterator<Item = &ReferenceSession> {
        self.residents.iter().filter(move |tenant| tenant.at == at)
    }

    fn taken(&self, at: Owner) -> Tokens {
        self.here(at).map(|tenant| tenant.tokens).sum()
    }

    /// Returns the idle sessions in eviction order.
    fn eviction_order(&self, at: Owner) -> Vec<&ReferenceSession> {
        let mut line: Vec<_> = self.here(at).filter(|tenant| tenant.steps == 0).collect();
        line.sort_by_key(|tenant| (tenant.last, tenant.session));
        line
    }

    fn step_started(&mut self, at: Owner, session: SessionId, (tokens, found): (Tokens, Tokens), now: Micros) {
        if let Some((_, pattern, away)) = self.sessions.iter_mut().find(|(id, ..)| *id == session)
            && let Some(since) = away.take()
        {
            self.returns.record_return(*pattern, now - since);
            *pattern = pattern.after_gap(now - since);
        }
        if !self.incarnations.contains(&at) {
            self.incarnations.retain(|life| life.worker != at.worker);
            self.residents.retain(|tenant| tenant.at.worker != at.worker);
            self.incarnations.push(at);
        }
        let before = self.find(at, session).cloned();
        let shared = before.as_ref().map_or(found, |tenant| tenant.shared.min(found));
        let steps = before.map_or(0, |tenant| tenant.steps) + 1;
        self.residents.retain(|tenant| (tenant.at, tenant.session) != (at, session));
        let (tokens, wanted) = (tokens - shared, Some(ReturnPattern::New));
        self.residents.push(ReferenceSession { at, session, tokens, shared, steps, last: now, return_pattern: wanted });
        self.evict(at, CAPACITY);
    }

    fn step_ended(&mut self, at: Owner, session: SessionId, tokens: Tokens, now: Micros) {
        let seen = self.sessions.iter().position(|(id, ..)| *id == session).unwrap_or_else(|| {
            self.sessions.push((session, ReturnPattern::New, None));
            self.sessions.len() - 1
        });
        self.sessions[seen].2 = Some(now);
        let pattern = self.sessions[seen].1;
        let Some(tenant) = self.find(at, session) else { return };
        tenant.steps = tenant.steps.saturating_sub(1);
        (tenant.tokens, tenant.last, tenant.return_pattern) = (tokens - tenant.shared, now, Some(pattern));
        self.residents.retain(|tenant| tenant.steps > 0 || tenant.tokens > Tokens::ZERO);
    }

    fn step_failed(&mut self, at: Owner, session: SessionId, now: Micros) {
        if let Some((.., away)) = self.sessions.iter_mut().find(|(id, ..)| *id == session) {
            *away = Some(now);
        }
        let Some(tenant) = self.find(at, session) else { return };
        tenant.steps = tenant.steps.saturating_sub(1);
        let over = tenant.steps == 0;
        self.residents.retain(|tenant| !over || (tenant.at, tenant.session) != (at, session));
    }

    fn observe_held_tokens(&mut self, at: Owner, tokens: Tokens) {
        let in_use: Tokens = self.here(at).filter(|tenant| tenant.steps > 0).map(|tenant| tenant.tokens).sum();
        if tokens * 2 < self.taken(at) - in_use {
            self.evict(at, in_use + tokens);
        }
    }

    fn evict(&mut self, at: Owner, most: Tokens) {
        while self.taken(at) > most {
            let over = self.taken(at) - most;
            let Some(first) = self.eviction_order(at).first().map(|tenant| tenant.session) else { return };
            let tenant = self.find(at, first).unwrap();
            tenant.tokens -= over;
            self.residents.retain(|tenant| tenant.steps > 0 || tenant.tokens > Tokens::ZERO);
        }
    }

    /// Returns the number of other sessions that are being served, or are among the last sixteen to step, did so within
    /// a minute and have not moved away.
    fn active_count(&self, at: Owner, session: SessionId, now: Micros) -> usize {
        let served = self.here(at).filter(|tenant| tenant.steps > 0 && tenant.session != session).count();
        let line = self.eviction_order(at);
        let last = line.iter().rev().take(16).filter(|tenant| now - tenant.last < Micros(60_000_000));
        served + last.filter(|tenant| tenant.session != session && tenant.return_pattern.is_some()).count()
    }

    /// Returns `T_eviction` of `stored` tokens, as documented at `CostModel::eviction_cost`.
    fn eviction_cost(
        &self,
        scene: &PlanningScene,
        at: Owner,
        (stored, found, stays): (Tokens, Tokens, bool),
    ) -> Micros {
        let (session, policy) = (scene.session.id, &scene.policy);
        let is_new = !self.here(at).any(|tenant| tenant.session == session && tenant.tokens > Tokens::ZERO);
        let growth =
            if stays && is_new { policy.max_session_growth_tokens.min(Tokens(CAPACITY.0 / 8)) } else { Tokens::ZERO };
        let free = CAPACITY - self.taken(at);
        let missing = stored + growth - free;
        if missing == Tokens::ZERO {
            return Micros::ZERO;
        }
        let view = scene.workers.iter().find(|view| view.id == at.worker).unwrap();
        let rate =
            PrefillTimeModel::new(1e6 / view.speeds.prefill_tokens_per_second, policy.attention_cost_doubling_tokens);
        let stale = |own: &ReferenceSession| own.tokens.min(own.shared + own.tokens - found);
        let victims = self.eviction_order(at).into_iter().map(|tenant| match tenant.session == session {
            true => ReferenceSession { tokens: stale(tenant), return_pattern: None, ..tenant.clone() },
            false => tenant.clone(),
        });
        let victims: Vec<_> = victims.filter(|tenant| tenant.tokens > Tokens::ZERO).collect();
        let idle: Tokens = victims.iter().map(|tenant| tenant.tokens).sum();
        let (evicted, mut left, mut seen, mut again) = (missing.min(idle), missing.min(idle), Tokens::ZERO, 0.0);
        for victim in victims.into_iter().take(16) {
            let part = victim.tokens.min(left);
            let chance = victim.return_pattern.map_or(0.0, |habit| {
                self.returns.return_probability(habit, GapBucket::MAX.at_most(scene.now - victim.last))
            });
            again += rate.span(victim.tokens - part, victim.tokens).0 as f64 * chance;
            (left, seen) = (left - part, seen + part);
        }
        if left > Tokens::ZERO {
            again = again * evicted.0 as f64 / seen.0 as f64;
        }
        let held_up = (self.active_count(at, session, scene.now) as f64 / 2.0).min(4.0);
        let waiting = rate.span(Tokens::ZERO, stored - free - idle).0 as f64 * 20.0;
        Micros((policy.eviction_weight * (again * (1.0 + held_up) + waiting)) as u64)
    }
}

/// Applies the same event to both models.
fn happen(
    occupancy: &mut OccupancyModel,
    plain: &mut ReferenceOccupancy,
    (what, place, session, tokens, _): OccupancyEvent,
    now: Micros,
) {
    let (worker, life) = (id(NAMES[place.0]), Incarnation(place.1));
    let (at, session) = (Owner { worker, incarnation: life, rank: DpRank(0) }, SessionId(session));
    let (tokens, found) = (Tokens(tokens.0), Tokens(tokens.1));
    match what {
        0..8 => {
            if what != 0 {
                occupancy.step_started(at, session, StepFootprint { tokens, cached: found, capacity: CAPACITY }, now);
                plain.step_started(at, session, (tokens, found), now);
                occupancy.prefill_started(at, Micros(tokens.0 * 100), now);
            }
            // Most events are a whole step: start and end.
            if what != 1 {
                occupancy.step_ended(at, session, tokens, now);
                plain.step_ended(at, session, tokens, now);
            }
        }
        8 => {
            occupancy.step_failed(at, session, now);
            plain.step_failed(at, session, now);
        }
        9 => {
            occupancy.session_moved(at, session);
            if let Some(tenant) = plain.find(at, session) {
                tenant.return_pattern = None;
            }
        }
        _ => {
            occupancy.observe_held_tokens(at, tokens);
            plain.observe_held_tokens(at, tokens);
        }
    }
}

prop_compose! {
    /// Events that together take less time than `SESSION_RETENTION`.
    fn happenings()(all in prop::collection::vec((
        prop_oneof![20 => 0u8..8, 1 => 8u8..11],
        (prop_oneof![4 => Just(0usize), 1 => 1usize..3], prop_oneof![200 => Just(1u64), 1 => Just(2)]),
        prop_oneof![1 => 0u128..6, 5 => 6u128..60],
        (prop_oneof![10 => 0u64..60, 30 => 0u64..1_000, 1 => 0u64..20_000], prop_oneof![2 => Just(0u64), 1 => 0u64..900]),
        prop_oneof![2 => Just(0u64), 6 => 0u64..100_000, 1 => 0u64..4_000_000],
    ), 0..260)) -> Vec<OccupancyEvent> { all }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn eviction_costs_match_the_reference_occupancy_for_every_candidate(
        happenings in happenings(),
        held in [0u64..600, 0u64..600, 0u64..600],
        (prompt, session, sealed, doubles) in (1u64..9_000, 0u128..60, 0u64..600, prop_oneof![Just(0u64), 1u64..9_000]),
        (mu, growth, at_once) in (0.0..2.0f64, 0u64..4_000, any::<bool>()),
    ) {
        let workers = [("a", "hybrid"), ("b", "decode"), ("c", "hybrid")];
        let line = |((name, role), held): ((_, _), _)| format!("worker {name} {role} kv=20000 holds={held} running=3");
        let mut scene = PlanningScene::read(&workers.into_iter().zip(held).map(line).collect::<Vec<_>>().join("\n"));
        let mut plain = ReferenceOccupancy::default();
        for happening in happenings {
            scene.now += Micros(happening.4);
            happen(&mut scene.occupancy, &mut plain, happening, scene.now);
        }
        scene.session.id = SessionId(session);
        scene.session.sealed = Blocks(sealed);
        scene.ask.prompt_tokens = Tokens(prompt);
        scene.policy.replicate_dispatch = if at_once { ReplicateSendTiming::Immediate } else { ReplicateSendTiming::Queued };
        (scene.policy.interference_weight, scene.policy.max_session_growth_tokens) = (mu, Tokens(growth));
        scene.policy.attention_cost_doubling_tokens = Tokens(doubles);
        let place = |worker| Owner { worker, incarnation: Incarnation(1), rank: DpRank(0) };
        let candidates = scene.plan().candidates;
        let cached = |worker| {
            let alone = candidates.iter().find(|one| {
                one.sequence.target() == worker && !one.sequence.has_handoff()
            });
            alone.unwrap().sequence.answer_leg().cached_tokens
        };
        for candidate in candidates.iter().filter(|one| one.refusal.is_none()) {
            let target = candidate.sequence.target();
            let stored = scene.ask.prompt_tokens + scene.ask.expected_output_tokens - cached(target);
            let price = |worker, stored, stays| plain.eviction_cost(&scene, place(worker), (stored, cached(worker), stays));
            let mut expected = price(target, stored, true);
            expected += candidate.sequence.handoffs().map(|handoff| {
                let source = handoff.source.worker;
                match handoff.kind {
                    HandoffKind::RemotePrefill => price(source, scene.ask.prompt_tokens - cached(source), false),
                    HandoffKind::Replicate if !at_once => {
                        price(source, handoff.blocks.unwrap().tokens(Tokens(16)) - cached(source), false)
                    }
                    HandoffKind::Replicate => Micros::ZERO,
                }
            }).sum::<Micros>();
            prop_assert_eq!(candidate.cost_terms.eviction, expected, "{:?}", candidate);
        }
        // The recorded occupancy of a decision log gives the same decision, with equal terms.
        let decision = scene.plan();
        let recorded = scene.occupancy.recorded_memory(&scene.inputs(), &decision);
        let parsed: Vec<RankMemorySnapshot> = serde_json::from_str(&serde_json::to_string(&recorded).unwrap()).unwrap();
        scene.occupancy = OccupancyModel::from_recorded(&parsed);
        prop_assert_eq!(scene.plan(), decision);
    }
}
