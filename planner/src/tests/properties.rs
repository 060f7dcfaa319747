//! Properties of every decision, over generated fleets.

use proptest::prelude::*;
use vocabulary::*;

use super::{PlanningScene, id};
use crate::*;

const NAMES: [&str; 7] = ["a", "b", "c", "d", "e", "f", "g"];

fn odd_rate() -> impl Strategy<Value = f64> {
    prop_oneof![8 => 100.0..100_000.0, 1 => Just(0.0), 1 => Just(f64::NAN), 1 => Just(f64::INFINITY), 1 => Just(-1.0)]
}

fn word(name: &'static str) -> BoxedStrategy<String> {
    let load = (0u32..40, 0u32..4, 0u64..50_000, 0.0..1.0f64, odd_rate());
    let shape = (
        prop_oneof![Just("prefill"), Just("decode"), Just("hybrid")],
        prop_oneof![6 => Just("ready"), 1 => Just("draining"), 1 => Just("unreachable")],
        prop_oneof![3 => Just("exact"), 1 => Just("degraded"), 1 => Just("approximate")],
        prop_oneof![3 => Just("nixl"), 1 => Just("mooncake"), 1 => Just("none")],
        prop_oneof![4 => Just("m"), 1 => Just("m,lora"), 1 => Just("other")],
        prop_oneof![Just(0u64), Just(16), Just(32), Just(48)],
        prop_oneof![4 => Just(0u64), 1 => Just(5_000)],
    );
    let held = (
        0u64..700,
        0u64..700,
        0u64..400,
        (
            prop_oneof![4 => 1e8..1e11f64, 1 => Just(f64::NAN)],
            prop_oneof![4 => Just(""), 2 => Just("shape=1x1"), 1 => Just("shape=2x1"), 1 => Just("shape=3x2")],
        ),
    );
    (load, shape, held)
        .prop_map(move |(load, shape, held)| {
            let (running, waiting, backlog, usage, rate) = load;
            let (role, health, knows, fabric, models, block, context) = shape;
            let (holds, host, holds1, (link, parallel)) = held;
            format!(
                "worker {name} {role} health={health} knows={knows} models={models} ranks=2 block={block} rate={rate} \
             context={context} running={running} waiting={waiting} backlog={backlog} usage={usage} holds={holds} \
             host={host} holds1={holds1} link={link} fabric={fabric} {parallel}"
            )
        })
        .boxed()
}

fn disabled_links() -> impl Strategy<Value = Vec<DirectedLink>> {
    let link = (0..NAMES.len(), 0..NAMES.len());
    let links = prop::collection::vec(link, 0..12);
    links.prop_map(|links| links.iter().map(|(a, b)| DirectedLink { from: id(NAMES[*a]), to: id(NAMES[*b]) }).collect())
}

fn attentions() -> impl Strategy<Value = Option<AttentionSpec>> {
    use crate::attention::tests::{hybrid, read};
    let every = WindowCheckpointInterval::EveryTokens(Tokens(1_024));
    prop_oneof![
        4 => Just(None),
        1 => Just(Some(read("gpt-oss-20b"))),
        1 => Just(Some(hybrid().with_checkpoints(every).unwrap())),
        1 => Just(Some(hybrid().with_checkpoints(WindowCheckpointInterval::None).unwrap())),
    ]
}

prop_compose! {
    pub(super) fn scenes()(
        workers in NAMES.map(word),
        session in (any::<u128>(), 0usize..9, 0u64..700, 0usize..9, 0usize..9),
        ask in (0u64..12_000, 0u64..2_000, any::<bool>(), 0usize..9, 0usize..9),
        step in 0usize..6,
        policy in (prop_oneof![4 => Just(10.0), 1 => Just(f64::NAN), 1 => 0.0..1e6], 0.0..4.0f64, 0usize..6, 0u64..9_000),
        attention in attentions(),
        inflow in prop::array::uniform7((0u64..4, 0u64..60_000_000)),
        rule in prop_oneof![5 => Just("lowest_cost"), 1 => Just("round_robin"), 1 => Just("session_pinning"), 1 => Just("match_rate_minus_load")],
    ) -> PlanningScene {
        let mut scene = PlanningScene::read(&workers.join("\n"));
        let owner = |at: usize| NAMES.get(at).map(|name| Owner {
            worker: id(name),
            incarnation: Incarnation(1),
            rank: DpRank((at % 2) as u16),
        });
        let (session_id, owned, sealed, replica, promised) = session;
        scene.session.id = SessionId(session_id);
        scene.session.owner = owner(owned);
        scene.session.sealed = Blocks(sealed);
        scene.session.replicas.extend(owner(replica));
        scene.session.peer_intents.extend(owner(promised).map(|o| LiveIntent { worker: o.worker, rank: o.rank, blocks: Blocks(300) }));
        scene.step = StepKind::ALL[step];
        let (prompt, answer, transfers, first, second) = ask;
        (scene.ask.prompt_tokens, scene.ask.expected_output_tokens) = (Tokens(prompt), Tokens(answer));
        let forbidden = TransferPermission::Forbidden(RequestTransferBlocker::Endpoint);
        scene.ask.transfers = if transfers { TransferPermission::Allowed } else { forbidden };
        scene.excluded.extend([first, second].iter().filter_map(|at| NAMES.get(*at)).map(|name| id(name)));
        (scene.policy.memory_cost_per_mib, scene.policy.interference_weight) = (policy.0, policy.1);
        scene.policy.disabled_actions.extend(Action::ALL.get(policy.2));
        scene.policy.attention_cost_doubling_tokens = Tokens(policy.3);
        for (name, (prompts, work)) in NAMES.into_iter().zip(inflow) {
            let at = Owner { worker: id(name), incarnation: Incarnation(1), rank: DpRank(0) };
            (0..prompts).for_each(|_| scene.occupancy.prefill_started(at, Micros(work), scene.now));
        }
        scene.attention = attention;
        scene.policy.policy = serde_json::from_value(rule.into()).unwrap();
        scene
    }
}

fn own_scenes() -> impl Strategy<Value = PlanningScene> {
    scenes().prop_map(|mut scene| {
        scene.policy.policy = SelectionRule::LowestCost;
        scene
    })
}

/// Sorts a decision's candidates independently of the fleet's order.
fn sorted(mut decision: Decision) -> Decision {
    decision.candidates.sort_by_key(|c| (c.sequence.target(), c.action, c.total_cost, c.refusal));
    decision
}

impl std::fmt::Debug for PlanningScene {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.inputs().fmt(f)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_chosen_plan_is_legal(scene in scenes()) {
        if let Ok(decision) = plan(&scene.inputs()) {
            prop_assert_eq!(decision.plan.check(&scene.inputs()), Ok(()));
        }
    }

    #[test]
    fn every_allowed_candidate_is_legal(scene in scenes()) {
        let Ok(decision) = plan(&scene.inputs()) else { return Ok(()) };
        for PlanCandidate { action, sequence, ownership, .. } in
            decision.candidates.into_iter().filter(|candidate| candidate.refusal.is_none())
        {
            let plan = Plan { action, sequence, ownership, rationale: decision.plan.rationale };
            prop_assert_eq!(plan.check(&scene.inputs()), Ok(()), "{:?}", plan);
        }
    }

    #[test]
    fn chosen_plan_is_the_cheapest_allowed_candidate(scene in own_scenes()) {
        let Ok(decision) = plan(&scene.inputs()) else { return Ok(()) };
        let allowed = decision.candidates.iter().filter(|candidate| candidate.refusal.is_none());
        let least = allowed.clone().map(|candidate| candidate.total_cost).min();
        prop_assert_eq!(Some(decision.plan.rationale.total_cost), least);
        let Plan { action, sequence, ownership, .. } = decision.plan;
        let chosen = allowed.filter(|c| (c.action, c.sequence, c.ownership) == (action, sequence, ownership));
        prop_assert_eq!(chosen.count(), 1, "the plan is one of the candidates");
    }

    #[test]
    fn cost_terms_sum_to_the_total(scene in scenes()) {
        let Ok(decision) = plan(&scene.inputs()) else { return Ok(()) };
        for PlanCandidate { cost_terms: terms, total_cost: total, refusal, .. } in decision.candidates {
            let CostTerms { queue, compute, network, restore, memory, interference, eviction } = terms;
            let sum = [queue, compute, network, restore, memory, interference, eviction];
            prop_assert_eq!(sum.into_iter().sum::<Micros>(), total);
            prop_assert!(refusal.is_none_or(|why| why == CandidateRefusal::ActionDisabled || total == Micros::ZERO));
        }
    }

    #[test]
    fn order_of_workers_and_overlaps_does_not_change_the_decision(scene in scenes(), turn in 0usize..7) {
        let first = plan(&scene.inputs()).map(sorted);
        let mut other = scene;
        other.workers.rotate_left(turn);
        other.workers[1..].reverse();
        other.overlaps.rotate_right(turn);
        other.overlaps.reverse();
        prop_assert_eq!(plan(&other.inputs()).map(sorted), first);
    }

    #[test]
    fn equal_inputs_give_equal_decisions(scene in scenes()) {
        prop_assert_eq!(plan(&scene.inputs()), plan(&scene.inputs()));
    }

    #[test]
    fn excluded_worker_appears_in_no_allowed_candidate(scene in scenes()) {
        let Ok(decision) = plan(&scene.inputs()) else { return Ok(()) };
        for candidate in decision.candidates.iter().filter(|candidate| candidate.refusal.is_none()) {
            let sources = candidate.sequence.handoffs().map(|handoff| handoff.source.worker);
            let mut part = candidate.sequence.workers().chain(sources);
            prop_assert!(!part.any(|worker| scene.excluded.contains(&worker)));
        }
    }

    #[test]
    fn plan_exists_exactly_when_a_decode_worker_can_serve(scene in scenes()) {
        let can = scene.workers.iter().any(|view| {
            view.role.decodes()
                && view.health != WorkerHealth::Unreachable
                && view.models.contains(&scene.ask.model)
                && !scene.excluded.contains(&view.id)
                && (view.capacity.context.0 == 0 || scene.ask.prompt_tokens + scene.ask.expected_output_tokens <= view.capacity.context)
        });
        prop_assert_eq!(plan(&scene.inputs()).is_ok(), can);
    }

    #[test]
    fn each_worker_has_at_most_three_candidates(scene in scenes()) {
        let Ok(decision) = plan(&scene.inputs()) else { return Ok(()) };
        prop_assert!(decision.candidates.len() <= 3 * scene.workers.len());
    }

    #[test]
    fn disabling_an_action_never_makes_a_step_cheaper(scene in own_scenes(), off in 1usize..6) {
        // State migration is special: disabling it turns the same legs into a fetch that leaves ownership unchanged.
        let off = Action::ALL[off];
        let Ok(before) = plan(&scene.inputs()) else { return Ok(()) };
        let mut without = scene;
        without.policy.disabled_actions.push(off);
        let after = plan(&without.inputs()).expect("colocated prefill remains");
        prop_assert!(off == Action::StateMigration || after.plan.rationale.total_cost >= before.plan.rationale.total_cost);
        prop_assert_ne!(after.plan.action, off);
    }

    #[test]
    fn runtime_disabled_actions_equal_policy_disabled_actions(scene in own_scenes(), bits in 0u8..64) {
        let mut scene = scene;
        scene.disabled = ActionSet::from_bits(bits);
        let running = plan(&scene.inputs());
        if let Ok(decision) = &running {
            prop_assert_eq!(decision.plan.check(&scene.inputs()), Ok(()));
        }
        scene.policy.disabled_actions.extend(scene.disabled.iter());
        scene.disabled = ActionSet::NONE;
        prop_assert_eq!(plan(&scene.inputs()), running);
    }

    #[test]
    fn disabled_links_carry_no_kv_and_leave_every_step_servable(
        scene in own_scenes(), barred in disabled_links(),
    ) {
        let mut scene = scene;
        let free = plan(&scene.inputs());
        scene.barred = barred;
        let Ok(decision) = plan(&scene.inputs()) else {
            prop_assert!(free.is_err());
            return Ok(());
        };
        prop_assert_eq!(decision.plan.check(&scene.inputs()), Ok(()));
        let over = |candidate: &PlanCandidate| {
            let handoff = candidate.sequence.handoffs().next()?;
            Some((handoff.source.worker, handoff.target.worker))
        };
        for candidate in decision.candidates.iter().filter(|candidate| candidate.refusal.is_none()) {
            let link = over(candidate).map(|(from, to)| DirectedLink { from, to });
            prop_assert!(link.is_none_or(|link| !scene.barred.contains(&link)), "{:?}", candidate);
        }
        // Candidates that use no disabled link are still offered, at the same cost.
        for candidate in free.unwrap().candidates.iter().filter(|candidate| candidate.refusal.is_none()) {
            let link = over(candidate).map(|(from, to)| DirectedLink { from, to });
            if link.is_some_and(|link| !scene.barred.contains(&link)) {
                prop_assert!(decision.candidates.contains(candidate), "{:?}", candidate);
            }
        }
    }

    #[test]
    fn recorded_planning_inputs_round_trip_to_the_same_decision(
        scene in own_scenes(), prompt in 0u64..9_000, disabled in 0u8..64, barred in disabled_links(),
    ) {
        let mut case = RecordedPlanningInputs {
            step: ClassificationInputs { prompt_tokens: Tokens(prompt), ..ClassificationInputs::default() },
            request: scene.ask,
            session: scene.session,
            workers: scene.workers.into(),
            overlaps: scene.overlaps,
            failed_workers: scene.excluded,
            kv_occupancy: Some(Vec::new()),
            disabled_actions: ActionSet::from_bits(disabled),
            disabled_links: barred,
        };
        // JSON cannot represent non-finite numbers; real fleets measure their rates, so they have none.
        let is_number = |view: &WorkerView| {
            view.speeds.prefill_tokens_per_second.is_finite()
                && view.link.as_ref().is_none_or(|link| link.bytes_per_second.is_finite())
        };
        let kept: Vec<_> = case.workers.iter().filter(|view| is_number(view)).cloned().collect();
        case.workers = kept.into();
        let read: RecordedPlanningInputs = serde_json::from_str(&serde_json::to_string(&case).unwrap()).unwrap();
        prop_assert_eq!(read.plan(&scene.policy, (None, &[])), case.plan(&scene.policy, (None, &[])));
    }
}
