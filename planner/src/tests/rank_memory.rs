//! Recorded occupancy in a decision log: what it contains, and replanning from it.

use vocabulary::*;

use super::{PlanningScene, id, is_local_to};
use crate::*;

const FULL: u64 = 20_000;

fn place(name: &str) -> Owner {
    Owner { worker: id(name), incarnation: Incarnation(1), rank: DpRank(0) }
}

/// Scene of two workers; the first is full with the KV of `tenants`: session, tokens, seconds since its last step.
fn scene(tenants: &[(u128, u64, u64)]) -> PlanningScene {
    let mut scene = PlanningScene::read(
        "policy lambda=0 mu=0\n worker a hybrid kv=20000 holds=20\n worker b hybrid kv=20000 backlog=3000",
    );
    scene.session.id = SessionId(777);
    tenants.iter().for_each(|(session, tokens, ago)| scene.add_resident(*session, "a", *tokens, *ago));
    scene
}

fn recorded_memory(scene: &PlanningScene) -> Vec<RankMemorySnapshot> {
    scene.occupancy.recorded_memory(&scene.inputs(), &scene.plan())
}

#[test]
fn recorded_memory_omits_unknown_ranks_and_replays_them_as_free() {
    let scene = scene(&[(1, 9_000, 5), (2, 9_000, 3)]);
    let recorded = recorded_memory(&scene);
    assert_eq!(recorded.iter().map(|recorded| recorded.worker).collect::<Vec<_>>(), [id("a")]);
    let mut again = scene;
    let before = again.plan();
    again.occupancy = OccupancyModel::from_recorded(&recorded);
    assert_eq!(again.plan(), before);
    let at_b = before.candidates.iter().find(|one| is_local_to(one, "b")).unwrap();
    assert_eq!(at_b.cost_terms.eviction, Micros::ZERO, "nobody is known to be there");
}

#[test]
fn recorded_memory_lists_only_victims_within_the_steps_reach() {
    // 2,000 tokens are free; prompt, answer and growth (an eighth) need 4,200, so 2,200 must be evicted: the first
    // session has enough.
    let told_of_few = recorded_memory(&scene(&[(1, 6_000, 9), (2, 6_000, 7), (3, 6_000, 5)]));
    assert_eq!(told_of_few[0].eviction_candidates.iter().map(|victim| victim.tokens.0).collect::<Vec<_>>(), [6_000]);
    let many: Vec<_> = (1..=18).map(|session| (session, 100, 60 - session as u64)).collect();
    let told_of_many = recorded_memory(&scene(&[&[(99, 18_200, 1)], &many[..]].concat()));
    assert_eq!(told_of_many[0].eviction_candidates.len(), 16, "those after them count as these on average");
}

#[test]
fn recorded_memory_with_free_room_has_active_sessions_but_no_victims() {
    let recorded = recorded_memory(&scene(&[(1, 3_000, 5), (2, 3_000, 500)]));
    let RankMemorySnapshot {
        free_tokens: free,
        session_tokens: own,
        idle_tokens: idle,
        active_sessions: active,
        eviction_candidates: victims,
        ..
    } = recorded[0].clone();
    assert_eq!((free, own, idle), (Tokens(FULL - 6_000), Tokens::ZERO, Tokens(6_000)));
    assert_eq!((active, victims.len()), (1, 0), "one stepped within the last minute");
}

#[test]
fn recorded_memory_separates_own_kv_and_lists_stale_kv_as_a_victim() {
    let mut scene = scene(&[(1, 3_000, 5), (2, 9_000, 3), (3, 7_500, 1)]);
    scene.session.id = SessionId(1);
    let recorded = recorded_memory(&scene);
    let stale = Tokens(3_000 - 320);
    assert_eq!((recorded[0].session_tokens, recorded[0].idle_tokens), (Tokens(3_000), stale + Tokens(16_500)));
    let victims: Vec<_> = recorded[0].eviction_candidates.iter().map(|victim| victim.tokens).collect();
    assert_eq!((victims, recorded[0].eviction_candidates[0].return_probability), (vec![stale, Tokens(9_000)], 0.0));
    let before = scene.plan();
    scene.occupancy = OccupancyModel::from_recorded(&recorded);
    assert_eq!(scene.plan(), before);
}

#[test]
fn recorded_victim_probabilities_round_trip_through_json() {
    let tenants: Vec<_> = (1..=12).map(|session| (session, 1_600, 7 * session as u64)).collect();
    let recorded = recorded_memory(&scene(&tenants));
    assert!(!recorded[0].eviction_candidates.is_empty());
    let read: Vec<RankMemorySnapshot> = serde_json::from_str(&serde_json::to_string(&recorded).unwrap()).unwrap();
    assert_eq!(read, recorded);
    for victim in &recorded[0].eviction_candidates {
        assert!((0.0..=1.0).contains(&victim.return_probability));
        assert_eq!((victim.return_probability * 1e6).round() / 1e6, victim.return_probability, "in millionths");
    }
}

#[test]
fn sessions_whose_steps_only_fail_are_forgotten_too() {
    let mut occupancy = OccupancyModel::default();
    let (at, footprint) =
        (place("a"), StepFootprint { tokens: Tokens(100), cached: Tokens::ZERO, capacity: Tokens(FULL) });
    let second = |n: u64| Micros(n * 1_000_000);
    let mut steps = |session: u128, begin: u64| {
        occupancy.step_started(at, SessionId(session), footprint, second(begin));
        occupancy.step_ended(at, SessionId(session), Tokens(100), second(begin + 1));
        occupancy.step_started(at, SessionId(session), footprint, second(begin + 2));
        occupancy.step_failed(at, SessionId(session), second(begin + 3));
    };
    (0..2_000).for_each(|n| steps(n, 1_000 * n as u64));
    assert!(occupancy.sessions() < 10, "{}", occupancy.sessions());
}

#[test]
fn session_is_resident_only_where_its_step_ran() {
    let scene = scene(&[(1, 9_000, 5)]);
    assert!(scene.occupancy.is_resident(place("a"), SessionId(1)));
    assert!(
        !scene.occupancy.is_resident(place("b"), SessionId(1))
            && !scene.occupancy.is_resident(place("a"), SessionId(2))
    );
}
