use super::*;

const ALL: Tokens = Tokens(1_000);

fn at(worker: u64) -> Owner {
    Owner { worker: WorkerId(worker), incarnation: Incarnation(1), rank: DpRank(0) }
}

fn seconds(seconds: u64) -> Micros {
    Micros(seconds * 1_000_000)
}

/// Sessions that were served one after the other, a second each.
fn served(sessions: &[(u128, u64)]) -> Tenancy {
    let mut tenancy = Tenancy::default();
    for (n, (session, tokens)) in (0..).zip(sessions) {
        let stay = Stay { tokens: Tokens(*tokens), found: Tokens::ZERO, capacity: ALL };
        tenancy.begins(at(1), SessionId(*session), stay, seconds(10 * n));
        tenancy.ends(at(1), SessionId(*session), Tokens(*tokens), seconds(10 * n + 1));
    }
    tenancy
}

/// As a step finds it that finds all that its session has there.
fn room(tenancy: &Tenancy, session: u128) -> Room<'_> {
    tenancy.visit(SessionId(session), seconds(100)).room(at(1), ALL, ALL)
}

fn all_victims(tenancy: &Tenancy, session: u128) -> impl Iterator<Item = Victim> {
    tenancy.visit(SessionId(session), seconds(100)).victims(&room(tenancy, session))
}

fn victims(tenancy: &Tenancy, session: u128) -> Vec<u64> {
    all_victims(tenancy, session).map(|victim| victim.tokens.0).collect()
}

fn begins(tenancy: &mut Tenancy, session: u128, tokens: u64) {
    let stay = Stay { tokens: Tokens(tokens), found: Tokens::ZERO, capacity: ALL };
    tenancy.begins(at(1), SessionId(session), stay, seconds(90));
}

#[test]
fn idle_sessions_are_victims_least_recently_used_first_and_never_the_session_itself() {
    let tenancy = served(&[(1, 100), (2, 200), (3, 300)]);
    assert_eq!(victims(&tenancy, 9), [100, 200, 300]);
    assert_eq!(victims(&tenancy, 2), [100, 300]);
    let room = room(&tenancy, 2);
    assert_eq!((room.free, room.own, room.others_idle), (Tokens(400), Tokens(200), Tokens(400)));
}

#[test]
fn what_is_being_served_is_no_victim() {
    let mut tenancy = served(&[(1, 100), (2, 200)]);
    begins(&mut tenancy, 1, 150);
    assert_eq!(victims(&tenancy, 9), [200]);
    let room = room(&tenancy, 9);
    assert_eq!((room.free, room.others_idle, room.active), (Tokens(650), Tokens(200), 1));
}

#[test]
fn beyond_the_capacity_the_oldest_lose_what_is_too_much() {
    let mut tenancy = served(&[(1, 400), (2, 300), (3, 200)]);
    begins(&mut tenancy, 4, 450);
    assert_eq!(victims(&tenancy, 9), [50, 300, 200], "from its end");
    begins(&mut tenancy, 4, 600);
    assert_eq!(victims(&tenancy, 9), [200, 200]);
}

#[test]
fn what_others_had_there_before_counts_once() {
    let mut tenancy = served(&[(1, 100)]);
    let stay = Stay { tokens: Tokens(150), found: Tokens(80), capacity: ALL };
    tenancy.begins(at(1), SessionId(2), stay, seconds(20));
    assert_eq!(room(&tenancy, 2).own, Tokens(70));
    tenancy.ends(at(1), SessionId(2), Tokens(180), seconds(21));
    assert_eq!(room(&tenancy, 2).own, Tokens(100));
}

#[test]
fn two_steps_of_a_session_are_one_tenant_until_both_are_over() {
    let mut tenancy = Tenancy::default();
    begins(&mut tenancy, 1, 100);
    begins(&mut tenancy, 1, 120);
    tenancy.ends(at(1), SessionId(1), Tokens(110), seconds(91));
    assert_eq!(victims(&tenancy, 9), [0; 0]);
    tenancy.ends(at(1), SessionId(1), Tokens(130), seconds(92));
    assert_eq!(victims(&tenancy, 9), [130]);
}

#[test]
fn a_step_that_failed_leaves_nothing_that_is_counted_on() {
    let mut tenancy = served(&[(1, 100)]);
    begins(&mut tenancy, 1, 150);
    tenancy.fails(at(1), SessionId(1), seconds(92));
    assert_eq!((room(&tenancy, 1).own, room(&tenancy, 1).free), (Tokens::ZERO, ALL));
}

#[test]
fn a_session_that_moved_away_is_in_the_way_and_not_wanted() {
    let mut tenancy = served(&[(1, 100), (2, 200)]);
    tenancy.leaves(at(1), SessionId(1));
    let first = all_victims(&tenancy, 9).next().unwrap();
    assert_eq!((first.tokens, first.chance), (Tokens(100), 0.0));
    begins(&mut tenancy, 1, 100);
    tenancy.ends(at(1), SessionId(1), Tokens(100), seconds(91));
    let last = all_victims(&tenancy, 9).last().unwrap();
    assert!(last.chance > 0.5, "it came back");
}

#[test]
fn another_life_of_a_worker_begins_empty_and_knows_nothing_of_the_old_one() {
    let mut tenancy = served(&[(1, 100)]);
    let reborn = Owner { incarnation: Incarnation(2), ..at(1) };
    assert_eq!(tenancy.visit(SessionId(9), seconds(100)).room(reborn, ALL, Tokens::ZERO).free, ALL);
    tenancy.begins(reborn, SessionId(2), Stay { tokens: Tokens(10), found: Tokens(0), capacity: ALL }, seconds(50));
    assert_eq!(room(&tenancy, 9).free, ALL, "the old one is void");
    tenancy.ends(at(1), SessionId(1), Tokens(500), seconds(51));
    assert_eq!(
        tenancy.visit(SessionId(9), seconds(100)).room(reborn, ALL, Tokens::ZERO).free,
        Tokens(990),
        "what ends late changes nothing"
    );
}

#[test]
fn a_rank_that_was_cleared_holds_what_is_in_use() {
    let mut tenancy = served(&[(1, 100), (2, 200)]);
    begins(&mut tenancy, 2, 250);
    tenancy.seen_to_hold(at(1), Tokens(50));
    assert_eq!(victims(&tenancy, 9), [100], "as much as may well be on its way");
    tenancy.seen_to_hold(at(1), Tokens::ZERO);
    let room = room(&tenancy, 9);
    assert_eq!((room.free, room.others_idle), (Tokens(750), Tokens::ZERO));
}

#[test]
fn where_the_memory_is_unknown_nothing_is_noted() {
    let mut tenancy = Tenancy::default();
    let stay = Stay { tokens: Tokens(10), found: Tokens::ZERO, capacity: Tokens::ZERO };
    tenancy.begins(at(1), SessionId(1), stay, seconds(1));
    assert!(tenancy.workers.is_empty());
}

#[test]
fn tenants_of_nothing_are_not_kept() {
    let tenancy = served(&[(1, 0), (2, 0)]);
    assert_eq!(victims(&tenancy, 9), [0; 0]);
    assert!(tenancy.workers[&WorkerId(1)].ranks.iter().all(|(_, rank)| rank.is_empty()) && tenancy.tenants.is_empty());
}

#[test]
fn sessions_are_active_while_they_are_served_and_for_a_minute_after() {
    let mut tenancy = served(&[(1, 10), (2, 10), (3, 10), (4, 10), (5, 10)]);
    begins(&mut tenancy, 6, 10);
    // Those that ended at 1, 11, 21 and 31 s are not; the one at 41 s is, and the one that is served.
    assert_eq!(room(&tenancy, 9).active, 2);
    assert_eq!(room(&tenancy, 5).active, 1);
}

#[test]
fn who_never_comes_back_is_forgotten_and_learned_from() {
    let mut tenancy = served(&[(1, 100)]);
    let before = all_victims(&tenancy, 9).next().unwrap().chance;
    for session in 100..400_u128 {
        begins(&mut tenancy, session, 1);
        tenancy.ends(at(1), SessionId(session), Tokens(1), seconds(91));
    }
    for n in 0..100 {
        let stay = Stay { tokens: Tokens(1), found: Tokens::ZERO, capacity: ALL };
        tenancy.begins(at(2), SessionId(1_000 + n), stay, seconds(10_000));
    }
    assert!(tenancy.sessions.is_empty() && tenancy.ends.is_empty());
    let after = all_victims(&tenancy, 9).next().unwrap().chance;
    assert!(after < before / 4.0, "{before} {after}");
}

#[test]
fn the_account_of_sessions_is_bounded_and_who_makes_room_is_not_taken_for_gone() {
    let mut tenancy = served(&[(u128::MAX - 1, 100)]);
    let before = all_victims(&tenancy, 9).next().unwrap().chance;
    for session in 0..MOST_ENDS as u128 + 5_000 {
        begins(&mut tenancy, session, 1);
        tenancy.ends(at(1), SessionId(session), Tokens(1), seconds(91));
    }
    assert!(tenancy.ends.len() <= MOST_ENDS + 1 && tenancy.sessions.len() <= MOST_ENDS + 1);
    assert_eq!(room(&tenancy, u128::MAX).free, Tokens::ZERO, "and that of tenants by the memory");
    let mut again = served(&[(u128::MAX - 1, 100)]);
    again.returns = tenancy.returns;
    assert_eq!(all_victims(&again, 9).next().unwrap().chance, before);
}

#[test]
fn growth_is_learnt_from_steps_that_were_served() {
    let mut tenancy = Tenancy::default();
    let mut step = |session, tokens, is_served: bool| {
        begins(&mut tenancy, session, tokens);
        tenancy.ends(at(1), SessionId(session), Tokens(tokens), seconds(91));
        if is_served {
            tenancy.served(SessionId(session), Tokens(tokens));
        }
        tenancy.expected_growth()
    };
    assert_eq!([step(1, 100, true), step(1, 150, true)], [Tokens::ZERO, Tokens(50)]);
    (2..100).for_each(|session| assert_eq!(step(session, 0, false), Tokens(50), "it was refused"));
    assert_eq!(step(2, 100, true), Tokens(25), "now it is a session");
}
