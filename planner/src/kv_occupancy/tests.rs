use super::*;

const ALL: Tokens = Tokens(1_000);

fn at(worker: u64) -> Owner {
    Owner { worker: WorkerId(worker), incarnation: Incarnation(1), rank: DpRank(0) }
}

fn seconds(seconds: u64) -> Micros {
    Micros(seconds * 1_000_000)
}

/// Returns a model after one step of each session, of one second, started 10 s apart.
fn served(sessions: &[(u128, u64)]) -> OccupancyModel {
    let mut occupancy = OccupancyModel::default();
    for (n, (session, tokens)) in (0..).zip(sessions) {
        let footprint = StepFootprint { tokens: Tokens(*tokens), cached: Tokens::ZERO, capacity: ALL };
        occupancy.step_started(at(1), SessionId(*session), footprint, seconds(10 * n));
        occupancy.step_ended(at(1), SessionId(*session), Tokens(*tokens), seconds(10 * n + 1));
    }
    occupancy
}

/// Returns the headroom of a step that finds everything its session has there.
fn room(occupancy: &OccupancyModel, session: u128) -> RankHeadroom<'_> {
    occupancy.session_lookup(SessionId(session), seconds(100)).headroom(at(1), ALL, ALL)
}

fn all_victims(occupancy: &OccupancyModel, session: u128) -> impl Iterator<Item = EvictionVictim> {
    occupancy.session_lookup(SessionId(session), seconds(100)).victims(&room(occupancy, session))
}

fn victims(occupancy: &OccupancyModel, session: u128) -> Vec<u64> {
    all_victims(occupancy, session).map(|victim| victim.tokens.0).collect()
}

fn begins(occupancy: &mut OccupancyModel, session: u128, tokens: u64) {
    let footprint = StepFootprint { tokens: Tokens(tokens), cached: Tokens::ZERO, capacity: ALL };
    occupancy.step_started(at(1), SessionId(session), footprint, seconds(90));
}

#[test]
fn victims_are_idle_sessions_in_lru_order_without_the_session_itself() {
    let occupancy = served(&[(1, 100), (2, 200), (3, 300)]);
    assert_eq!(victims(&occupancy, 9), [100, 200, 300]);
    assert_eq!(victims(&occupancy, 2), [100, 300]);
    let room = room(&occupancy, 2);
    assert_eq!((room.free, room.session_tokens, room.others_idle), (Tokens(400), Tokens(200), Tokens(400)));
}

#[test]
fn sessions_being_served_are_not_victims() {
    let mut occupancy = served(&[(1, 100), (2, 200)]);
    begins(&mut occupancy, 1, 150);
    assert_eq!(victims(&occupancy, 9), [200]);
    let room = room(&occupancy, 9);
    assert_eq!((room.free, room.others_idle, room.active), (Tokens(650), Tokens(200), 1));
}

#[test]
fn exceeding_capacity_evicts_the_oldest_sessions() {
    let mut occupancy = served(&[(1, 400), (2, 300), (3, 200)]);
    begins(&mut occupancy, 4, 450);
    assert_eq!(victims(&occupancy, 9), [50, 300, 200], "from its end");
    begins(&mut occupancy, 4, 600);
    assert_eq!(victims(&occupancy, 9), [200, 200]);
}

#[test]
fn shared_prefix_tokens_count_once() {
    let mut occupancy = served(&[(1, 100)]);
    let footprint = StepFootprint { tokens: Tokens(150), cached: Tokens(80), capacity: ALL };
    occupancy.step_started(at(1), SessionId(2), footprint, seconds(20));
    assert_eq!(room(&occupancy, 2).session_tokens, Tokens(70));
    occupancy.step_ended(at(1), SessionId(2), Tokens(180), seconds(21));
    assert_eq!(room(&occupancy, 2).session_tokens, Tokens(100));
}

#[test]
fn concurrent_steps_of_a_session_count_as_one_resident_until_both_end() {
    let mut occupancy = OccupancyModel::default();
    begins(&mut occupancy, 1, 100);
    begins(&mut occupancy, 1, 120);
    occupancy.step_ended(at(1), SessionId(1), Tokens(110), seconds(91));
    assert_eq!(victims(&occupancy, 9), [0; 0]);
    occupancy.step_ended(at(1), SessionId(1), Tokens(130), seconds(92));
    assert_eq!(victims(&occupancy, 9), [130]);
}

#[test]
fn failed_step_leaves_no_counted_kv() {
    let mut occupancy = served(&[(1, 100)]);
    begins(&mut occupancy, 1, 150);
    occupancy.step_failed(at(1), SessionId(1), seconds(92));
    assert_eq!((room(&occupancy, 1).session_tokens, room(&occupancy, 1).free), (Tokens::ZERO, ALL));
}

#[test]
fn departed_session_occupies_memory_with_zero_return_probability() {
    let mut occupancy = served(&[(1, 100), (2, 200)]);
    occupancy.session_moved(at(1), SessionId(1));
    let first = all_victims(&occupancy, 9).next().unwrap();
    assert_eq!((first.tokens, first.return_probability), (Tokens(100), 0.0));
    begins(&mut occupancy, 1, 100);
    occupancy.step_ended(at(1), SessionId(1), Tokens(100), seconds(91));
    let last = all_victims(&occupancy, 9).last().unwrap();
    assert!(last.return_probability > 0.5, "it came back");
}

#[test]
fn new_incarnation_starts_with_empty_occupancy() {
    let mut occupancy = served(&[(1, 100)]);
    let reborn = Owner { incarnation: Incarnation(2), ..at(1) };
    assert_eq!(occupancy.session_lookup(SessionId(9), seconds(100)).headroom(reborn, ALL, Tokens::ZERO).free, ALL);
    occupancy.step_started(
        reborn,
        SessionId(2),
        StepFootprint { tokens: Tokens(10), cached: Tokens(0), capacity: ALL },
        seconds(50),
    );
    assert_eq!(room(&occupancy, 9).free, ALL, "the old one is void");
    occupancy.step_ended(at(1), SessionId(1), Tokens(500), seconds(51));
    assert_eq!(
        occupancy.session_lookup(SessionId(9), seconds(100)).headroom(reborn, ALL, Tokens::ZERO).free,
        Tokens(990),
        "what ends late changes nothing"
    );
}

#[test]
fn cleared_rank_keeps_only_kv_in_use() {
    let mut occupancy = served(&[(1, 100), (2, 200)]);
    begins(&mut occupancy, 2, 250);
    occupancy.observe_held_tokens(at(1), Tokens(50));
    assert_eq!(victims(&occupancy, 9), [100], "as much as may well be on its way");
    occupancy.observe_held_tokens(at(1), Tokens::ZERO);
    let room = room(&occupancy, 9);
    assert_eq!((room.free, room.others_idle), (Tokens(750), Tokens::ZERO));
}

#[test]
fn unknown_capacity_records_no_occupancy() {
    let mut occupancy = OccupancyModel::default();
    let footprint = StepFootprint { tokens: Tokens(10), cached: Tokens::ZERO, capacity: Tokens::ZERO };
    occupancy.step_started(at(1), SessionId(1), footprint, seconds(1));
    assert!(occupancy.workers.is_empty());
}

#[test]
fn residents_without_tokens_are_removed() {
    let occupancy = served(&[(1, 0), (2, 0)]);
    assert_eq!(victims(&occupancy, 9), [0; 0]);
    assert!(
        occupancy.workers[&WorkerId(1)].ranks.iter().all(|(_, rank)| rank.is_empty()) && occupancy.residents.is_empty()
    );
}

#[test]
fn sessions_stay_active_for_a_minute_after_their_step() {
    let mut occupancy = served(&[(1, 10), (2, 10), (3, 10), (4, 10), (5, 10)]);
    begins(&mut occupancy, 6, 10);
    // Sessions that ended at 1, 11, 21 and 31 s are no longer active; the one that ended at 41 s and the running one
    // are.
    assert_eq!(room(&occupancy, 9).active, 2);
    assert_eq!(room(&occupancy, 5).active, 1);
}

#[test]
fn sessions_that_never_return_are_forgotten_and_counted_as_gone() {
    let mut occupancy = served(&[(1, 100)]);
    let before = all_victims(&occupancy, 9).next().unwrap().return_probability;
    for session in 100..400_u128 {
        begins(&mut occupancy, session, 1);
        occupancy.step_ended(at(1), SessionId(session), Tokens(1), seconds(91));
    }
    for n in 0..100 {
        let footprint = StepFootprint { tokens: Tokens(1), cached: Tokens::ZERO, capacity: ALL };
        occupancy.step_started(at(2), SessionId(1_000 + n), footprint, seconds(10_000));
    }
    assert!(occupancy.sessions.is_empty() && occupancy.step_ends.is_empty());
    let after = all_victims(&occupancy, 9).next().unwrap().return_probability;
    assert!(after < before / 4.0, "{before} {after}");
}

#[test]
fn session_limit_drops_the_oldest_without_counting_them_as_gone() {
    let mut occupancy = served(&[(u128::MAX - 1, 100)]);
    let before = all_victims(&occupancy, 9).next().unwrap().return_probability;
    for session in 0..MAX_STEP_ENDS as u128 + 5_000 {
        begins(&mut occupancy, session, 1);
        occupancy.step_ended(at(1), SessionId(session), Tokens(1), seconds(91));
    }
    assert!(occupancy.step_ends.len() <= MAX_STEP_ENDS + 1 && occupancy.sessions.len() <= MAX_STEP_ENDS + 1);
    assert_eq!(room(&occupancy, u128::MAX).free, Tokens::ZERO, "and that of tenants by the memory");
    let mut again = served(&[(u128::MAX - 1, 100)]);
    again.returns = occupancy.returns;
    assert_eq!(all_victims(&again, 9).next().unwrap().return_probability, before);
}

#[test]
fn expected_growth_is_learned_from_served_steps() {
    let mut occupancy = OccupancyModel::default();
    let mut step = |session, tokens, is_served: bool| {
        begins(&mut occupancy, session, tokens);
        occupancy.step_ended(at(1), SessionId(session), Tokens(tokens), seconds(91));
        if is_served {
            occupancy.step_served(SessionId(session), Tokens(tokens));
        }
        occupancy.expected_growth()
    };
    assert_eq!([step(1, 100, true), step(1, 150, true)], [Tokens::ZERO, Tokens(50)]);
    (2..100).for_each(|session| assert_eq!(step(session, 0, false), Tokens(50), "it was refused"));
    assert_eq!(step(2, 100, true), Tokens(25), "now it is a session");
}
