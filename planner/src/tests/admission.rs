//! Who starts and who waits. A token takes 100 us to compute; the scene's step stores 1,700 of them, and its session grows by an
//! eighth of the memory, 2,500, where it is new.

use vocabulary::*;

use super::Scene;
use crate::*;

const FULL: Tokens = Tokens(20_000);

/// One worker whose memory somebody filled who has been idle for so long.
fn full(ago: u64) -> Scene {
    let mut scene = Scene::read("policy lambda=0 mu=0\n worker a hybrid kv=20000");
    scene.tenant(7, "a", FULL.0, ago);
    scene
}

fn cost(scene: &Scene) -> u64 {
    costs_others(&scene.inputs(), &scene.plan()).0
}

fn settings() -> Admission {
    Admission { tolerated: Micros(100_000), ..Admission::default() }
}

fn admit(queue: &mut Queue<u32>, step: u32, scene: &Scene) -> Verdict {
    queue.admit(step, Asking::of(&scene.inputs(), &scene.plan()))
}

/// It starts, and why.
fn starts(why: Start) -> Verdict {
    Verdict::Start { why }
}

fn waits(verdict: Verdict) -> bool {
    matches!(verdict, Verdict::Hold { .. })
}

#[test]
fn a_step_that_pushes_nobody_out_starts() {
    let mut scene = full(1);
    scene.workers[0].capacity.kv = Tokens(23_000);
    assert!(cost(&scene) > 0, "the step would have room, not so what follows");
    scene.workers[0].capacity.kv = Tokens(26_000);
    assert_eq!(cost(&scene), 0);
    assert_eq!(
        admit(&mut Queue::new(Admission { tolerated: Micros(0), ..settings() }), 1, &scene),
        starts(Start::Tolerated)
    );
}

#[test]
fn it_waits_while_it_would_push_out_who_comes_back_at_once_and_starts_when_that_is_unlikely() {
    // 4,200 tokens x 100 us x p / (1 - p), with p a little above a half.
    assert!((420_000..740_000).contains(&cost(&full(1))), "{}", cost(&full(1)));
    assert!(cost(&full(1)) > cost(&full(20)) && cost(&full(20)) > cost(&full(400)) && cost(&full(3_000)) == 0);
    let mut queue = Queue::new(settings());
    assert_eq!(admit(&mut queue, 1, &full(1)), Verdict::Hold { costs_others: Micros(cost(&full(1))) });
    assert_eq!((queue.len(), queue.in_turn()), (1, vec![1]));
    assert_eq!(admit(&mut queue, 1, &full(400)), starts(Start::Tolerated));
    assert!(queue.is_empty());
}

#[test]
fn a_copy_whose_session_moved_away_is_no_reason_to_wait() {
    let mut scene = full(1);
    scene.tenancy.leaves(Owner { worker: super::id("a"), incarnation: Incarnation(1), rank: DpRank(0) }, SessionId(7));
    assert_eq!(cost(&scene), 0);
}

#[test]
fn who_has_its_kv_there_stores_little_and_goes_on() {
    let mut scene =
        Scene::read("session owner=a sealed=100\n policy lambda=0 mu=0\n worker a hybrid kv=20000 holds=96");
    scene.tenant(7, "a", FULL.0, 1);
    let all = cost(&full(1));
    assert!(cost(&scene) * 2 > all, "found there, and another session's: this one is new there and will grow");
    // 1,536 of 1,600 are there, and they are its own.
    scene.tenant(1, "a", 1_536, 0);
    assert!(cost(&scene) * 10 <= all && cost(&scene) > 0, "{} of {all}", cost(&scene));
    assert_eq!(admit(&mut Queue::new(settings()), 1, &scene), starts(Start::Tolerated));
}

#[test]
fn sessions_that_come_back_at_once_are_dearer_without_end_and_their_price_has_one() {
    let mut scene = full(1);
    for session in 100..1_000 {
        [5, 3, 1].into_iter().for_each(|ago| scene.tenant(session, "a", FULL.0, ago));
    }
    // 200 times 4,200 tokens x 100 us, of a chance near 1.
    assert!((20_000_000..=84_000_000).contains(&cost(&scene)), "{}", cost(&scene));
}

#[test]
fn where_only_ends_of_answers_make_room_it_waits() {
    let mut scene = full(1);
    let at = Owner { worker: super::id("a"), incarnation: Incarnation(1), rank: DpRank(0) };
    let stay = Stay { tokens: FULL, found: Tokens::ZERO, capacity: FULL };
    scene.tenancy.begins(at, SessionId(7), stay, scene.now);
    assert_eq!(cost(&scene), 200 * 420_000);
}

#[test]
fn an_unknown_memory_lets_nobody_wait() {
    let mut scene = full(1);
    scene.workers[0].capacity.kv = Tokens::ZERO;
    assert_eq!(cost(&scene), 0);
}

#[test]
fn nobody_waits_longer_than_the_longest_wait() {
    let mut queue = Queue::new(Admission { longest: Micros(5_000_000), ..settings() });
    let mut scene = full(1);
    let begin = scene.now;
    assert!(waits(admit(&mut queue, 1, &scene)));
    for (passed, is_over) in [(0, false), (4_999_999, false), (5_000_000, true)] {
        scene.now = begin + Micros(passed);
        // Somebody else has just filled the memory.
        scene.tenant(8, "a", FULL.0, 0);
        let verdict = admit(&mut queue, 1, &scene);
        assert_eq!((verdict == starts(Start::Longest), waits(verdict)), (is_over, !is_over), "after {passed} us");
    }
    assert!(queue.is_empty());
}

#[test]
fn only_so_many_wait_and_one_more_starts() {
    let mut queue = Queue::new(Admission { most: 2, ..settings() });
    let scene = full(1);
    assert!(waits(admit(&mut queue, 1, &scene)) && waits(admit(&mut queue, 2, &scene)));
    assert_eq!(admit(&mut queue, 3, &scene), starts(Start::NoPlace));
    assert!(waits(admit(&mut queue, 2, &scene)), "who waits already goes on waiting");
    queue.leave(1);
    assert_eq!(queue.in_turn(), [2]);
    assert!(waits(admit(&mut queue, 3, &scene)));
}

#[test]
fn with_no_longest_wait_nobody_waits() {
    let mut queue = Queue::new(Admission { longest: Micros::ZERO, ..settings() });
    assert_eq!(admit(&mut queue, 1, &full(0)), starts(Start::Tolerated));
    assert!(queue.is_empty());
}

#[test]
fn short_prompts_are_asked_first_and_of_equal_ones_the_first_that_came() {
    let mut queue = Queue::new(settings());
    for (step, prompt) in [(1, 1_600), (2, 3_200), (3, 1_600), (4, 1_500)] {
        let mut scene = full(1);
        scene.ask.prompt = Tokens(prompt);
        scene.now += Micros(u64::from(step));
        assert!(waits(admit(&mut queue, step, &scene)), "{step}");
    }
    assert_eq!(queue.in_turn(), [4, 1, 3, 2]);
}

#[test]
fn settings_are_read_as_others_are() {
    let read = |text| serde_json::from_str::<Admission>(text);
    assert_eq!(read(r#"{"tolerated": 100000}"#).unwrap(), settings());
    assert!(read(r#"{"patience": 1}"#).is_err());
}
