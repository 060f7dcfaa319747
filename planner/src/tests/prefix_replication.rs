//! Which prefixes move between two steps, and which never do.

use proptest::prelude::*;
use vocabulary::*;

use super::properties::scenes;
use super::{PlanningScene, id};
use crate::*;

/// A session of 8,000 tokens has just ended a step at `a`, which has since been given prompts of 15,000 tokens (1.5 s);
/// `b` is idle.
const BUSY_OWNER: &str = "
    session owner=a sealed=500
    ask prompt=8100 answer=100
    worker a hybrid holds=500 backlog=15000 kv=100000
    worker b hybrid kv=100000";

const SESSION: SessionId = SessionId(1);

fn owner(name: &str) -> Owner {
    Owner { worker: id(name), incarnation: Incarnation(1), rank: DpRank(0) }
}

/// Returns a scene whose session has just ended a step at its owner.
fn between_steps(text: &str) -> PlanningScene {
    let mut scene = PlanningScene::read(text);
    steps(&mut scene, SESSION, ("a", Tokens(8_000)));
    scene
}

/// Runs a whole step of a session.
fn steps(scene: &mut PlanningScene, session: SessionId, (name, tokens): (&str, Tokens)) {
    let footprint = StepFootprint { tokens, cached: Tokens::ZERO, capacity: Tokens(100_000) };
    scene.occupancy.step_started(owner(name), session, footprint, scene.now);
    scene.occupancy.step_ended(owner(name), session, tokens, scene.now);
}

fn decide(scene: &PlanningScene) -> Result<ChosenReplication, ReplicationSkipReason> {
    plan_prefix_replication(&scene.inputs(), &ReplicationLimits::default())
}

/// Returns why the prefix stays in the busy-owner scene with more words added.
fn stays(more: &str) -> ReplicationSkipReason {
    decide(&between_steps(&format!("{BUSY_OWNER} {more}"))).unwrap_err()
}

#[test]
fn busy_owners_prefix_replicates_to_an_idle_worker() {
    let chosen = decide(&between_steps(BUSY_OWNER)).unwrap();
    assert_eq!((chosen.kind, chosen.from, chosen.to), (PrefixMoveKind::Replicate, id("a"), id("b")));
    assert_eq!(chosen.blocks, Blocks(500));
    assert_eq!(chosen.bytes, Bytes(800_000_000));
    assert!(chosen.saves > chosen.costs * 2, "{chosen:?}");
    // Transfer: 10 ms + 80 ms; second copy: 763 MiB at 50 us per MiB; no evictions.
    assert_eq!(chosen.costs, Micros(90_000 + 38_146), "{chosen:?}");
}

#[test]
fn draining_owners_prefix_migrates_without_a_second_copy() {
    let text = BUSY_OWNER.replace("backlog=15000", "health=draining backlog=15000");
    let chosen = decide(&between_steps(&text)).unwrap();
    assert_eq!((chosen.kind, chosen.to, chosen.costs), (PrefixMoveKind::Migrate, id("b"), Micros(90_000)));
    assert_eq!(
        decide(&between_steps(&format!("{text}\npolicy off=state_migration"))).map(|m| m.kind),
        Ok(PrefixMoveKind::Replicate)
    );
}

#[test]
fn prefix_stays_with_an_owner_that_serves_as_soon() {
    assert_eq!(
        decide(&between_steps(&BUSY_OWNER.replace("backlog=15000", "backlog=0"))),
        Err(ReplicationSkipReason::NotUsed)
    );
}

#[test]
fn no_replication_for_a_session_in_service_or_unknown() {
    let mut scene = between_steps(BUSY_OWNER);
    let footprint = StepFootprint { tokens: Tokens(8_000), cached: Tokens::ZERO, capacity: Tokens(100_000) };
    scene.occupancy.step_started(owner("a"), SESSION, footprint, scene.now);
    assert_eq!(decide(&scene), Err(ReplicationSkipReason::NotInGap));
    assert_eq!(decide(&PlanningScene::read(BUSY_OWNER)), Err(ReplicationSkipReason::NotInGap));
    let mut scene = between_steps(BUSY_OWNER);
    scene.session.owner = None;
    assert_eq!(decide(&scene), Err(ReplicationSkipReason::NoOwner));
}

#[test]
fn long_idle_session_is_not_worth_replication() {
    let mut scene = between_steps(BUSY_OWNER);
    scene.now = Micros(300_000_000);
    assert_eq!(decide(&scene), Err(ReplicationSkipReason::TooDear));
}

#[test]
fn busy_draining_full_or_inexactly_known_workers_receive_no_replication() {
    assert_eq!(stays("usage=0.99"), ReplicationSkipReason::Busy);
    assert_eq!(stays("backlog=6000"), ReplicationSkipReason::Busy);
    for more in ["health=draining", "health=unreachable", "knows=degraded", "knows=approximate", "fabric=none"] {
        assert_eq!(stays(more), ReplicationSkipReason::NoTarget, "{more}");
    }
}

#[test]
fn disabled_links_and_disabled_actions_also_block_replication() {
    for more in [
        "\npolicy barred=a>b",
        "\npolicy off=artifact_fetch off=tail_recompute off=state_migration",
        "\nask transfers=no",
    ] {
        assert_eq!(stays(more), ReplicationSkipReason::NoTarget, "{more}");
    }
    assert_eq!(stays("\npolicy rule=session_pinning"), ReplicationSkipReason::Baseline);
}

#[test]
fn sources_that_send_in_turn_are_skipped_behind_a_long_queue() {
    let mut scene = between_steps(&BUSY_OWNER.replace("backlog=15000", "backlog=51000"));
    assert_eq!(decide(&scene), Err(ReplicationSkipReason::Busy));
    // A source that sends at once serves the step itself in time, which is cheaper than a second copy.
    scene.policy.replicate_dispatch = ReplicateSendTiming::Immediate;
    assert_eq!(decide(&scene), Err(ReplicationSkipReason::TooDear));
}

#[test]
fn replication_never_evicts_kv_that_is_wanted_sooner() {
    let mut scene = between_steps(BUSY_OWNER);
    (2..14).for_each(|session| steps(&mut scene, SessionId(session), ("b", Tokens(8_000))));
    let full = decide(&scene);
    assert!(matches!(full, Err(ReplicationSkipReason::TooDear | ReplicationSkipReason::NotUsed)), "{full:?}");
}

#[test]
fn replication_respects_the_byte_limit() {
    let scene = between_steps(BUSY_OWNER);
    let bounds = |bytes| ReplicationLimits { bytes: Bytes(bytes), ..ReplicationLimits::default() };
    assert_eq!(plan_prefix_replication(&scene.inputs(), &bounds(799_999_999)), Err(ReplicationSkipReason::TooLarge));
    assert!(plan_prefix_replication(&scene.inputs(), &bounds(800_000_000)).is_ok());
}

#[test]
fn replication_below_the_margin_is_refused() {
    let scene = between_steps(BUSY_OWNER);
    let with = |margin| {
        plan_prefix_replication(&scene.inputs(), &ReplicationLimits { margin, ..ReplicationLimits::default() })
    };
    assert_eq!(with(1e6), Err(ReplicationSkipReason::TooDear));
    assert!(with(f64::NAN).is_ok(), "without a margin what is left still counts");
    let all = ReplicationLimits { least: Micros(u64::MAX), ..ReplicationLimits::default() };
    assert_eq!(plan_prefix_replication(&scene.inputs(), &all), Err(ReplicationSkipReason::TooDear));
}

#[test]
fn replicated_copy_counts_at_its_target_without_ending_the_idle_gap() {
    let mut scene = between_steps(BUSY_OWNER);
    let before = scene.occupancy.short_term_return_probability(SESSION, scene.now);
    let footprint = StepFootprint { tokens: Tokens(8_000), cached: Tokens::ZERO, capacity: Tokens(100_000) };
    scene.occupancy.prefix_replicated(owner("b"), SESSION, footprint, scene.now);
    assert!(scene.occupancy.is_resident(owner("b"), SESSION) && scene.occupancy.is_resident(owner("a"), SESSION));
    assert!(before.is_some());
    assert_eq!(scene.occupancy.short_term_return_probability(SESSION, scene.now), before);
}

#[test]
fn replication_skip_reasons_agree_in_code_and_json() {
    for why in [
        ReplicationSkipReason::NotInGap,
        ReplicationSkipReason::NoOwner,
        ReplicationSkipReason::Baseline,
        ReplicationSkipReason::NoPlan,
        ReplicationSkipReason::NoTarget,
    ] {
        assert_eq!(serde_json::to_string(&why).unwrap(), format!("\"{}\"", why.as_str()));
    }
    for why in [
        ReplicationSkipReason::Busy,
        ReplicationSkipReason::TooLarge,
        ReplicationSkipReason::NotUsed,
        ReplicationSkipReason::TooDear,
    ] {
        assert_eq!(serde_json::to_string(&why).unwrap(), format!("\"{}\"", why.as_str()));
    }
}

/// Adds a recent step of the scene's session, whichever worker owns it.
fn away(mut scene: PlanningScene) -> PlanningScene {
    let at = Owner { rank: DpRank(0), ..owner("a") };
    let footprint = StepFootprint { tokens: Tokens(100), cached: Tokens::ZERO, capacity: Tokens(100_000) };
    scene.occupancy.step_started(at, scene.session.id, footprint, scene.now);
    scene.occupancy.step_ended(at, scene.session.id, Tokens(100), scene.now);
    scene
}

/// Limits that allow most moves.
const PERMISSIVE_LIMITS: ReplicationLimits = ReplicationLimits {
    margin: 1.0,
    least: Micros(0),
    queue: Micros(u64::MAX),
    source_queue: Micros(u64::MAX),
    bytes: Bytes(u64::MAX),
};

proptest! {
    #[test]
    fn every_replication_is_a_legal_fetch_that_saves_more_than_it_costs(scene in scenes()) {
        let scene = away(scene);
        let inputs = scene.inputs();
        let Ok(chosen) = plan_prefix_replication(&inputs, &PERMISSIVE_LIMITS) else { return Ok(()) };
        prop_assert!(chosen.from != chosen.to && chosen.blocks > Blocks::ZERO);
        prop_assert!(chosen.saves >= chosen.costs);
        let link = DirectedLink { from: chosen.from, to: chosen.to };
        prop_assert!(!scene.barred.contains(&link));
        let target = scene.workers.iter().find(|view| view.id == chosen.to).unwrap();
        prop_assert_eq!((target.health, target.kv_index_state), (WorkerHealth::Ready, KvIndexState::Exact));
        let decision = plan(&inputs).unwrap();
        let same = decision.candidates.iter().find(|candidate| {
            let sequence = &candidate.sequence;
            sequence.target() == chosen.to && sequence.handoff(HandoffKind::Replicate).is_some()
        });
        let PlanCandidate { action, sequence, ownership, refusal, .. } = *same.unwrap();
        prop_assert_eq!(refusal, None);
        let as_plan = Plan { action, sequence, ownership, rationale: decision.plan.rationale };
        prop_assert_eq!(as_plan.check(&inputs), Ok(()));
    }

    #[test]
    fn replication_ignores_worker_order_and_wider_limits_allow_no_less(scene in scenes()) {
        let mut scene = away(scene);
        let first = plan_prefix_replication(&scene.inputs(), &PERMISSIVE_LIMITS);
        scene.workers.reverse();
        scene.overlaps.reverse();
        prop_assert_eq!(plan_prefix_replication(&scene.inputs(), &PERMISSIVE_LIMITS), first);
        // Tighter limits may allow a different target, but never a move where the wider ones allow none.
        if plan_prefix_replication(&scene.inputs(), &ReplicationLimits { margin: 2.0, ..PERMISSIVE_LIMITS }).is_ok() {
            prop_assert!(first.is_ok());
        }
    }
}
