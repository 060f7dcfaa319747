//! Admission control: which steps start and which queue. A token takes 100 us to compute; the scene's step stores 1,700
//! tokens, and its session is expected to grow by an eighth of the memory (2,500 tokens) where it is new.

use vocabulary::*;

use super::PlanningScene;
use crate::*;

const FULL: Tokens = Tokens(20_000);

/// Scene of one worker whose memory is full with the KV of a session that has been idle for `ago` seconds.
fn full(ago: u64) -> PlanningScene {
    let mut scene = PlanningScene::read("policy lambda=0 mu=0\n worker a hybrid kv=20000");
    scene.add_resident(7, "a", FULL.0, ago);
    scene
}

fn cost(scene: &PlanningScene) -> u64 {
    displaced_compute(&scene.inputs(), &scene.plan()).0
}

fn settings() -> AdmissionLimits {
    AdmissionLimits { max_displaced_compute: Micros(100_000), ..AdmissionLimits::default() }
}

fn admit(queue: &mut StepQueue<u32>, step: u32, scene: &PlanningScene) -> AdmissionDecision {
    queue.admit(step, AdmissionRequest::of(&scene.inputs(), &scene.plan()))
}

/// Returns the decision to start, for this reason.
fn starts(reason: StepStartReason) -> AdmissionDecision {
    AdmissionDecision::Start { why: reason }
}

fn waits(verdict: AdmissionDecision) -> bool {
    matches!(verdict, AdmissionDecision::Hold { .. })
}

#[test]
fn step_that_evicts_nothing_is_admitted() {
    let mut scene = full(1);
    scene.workers[0].capacity.kv = Tokens(23_000);
    assert!(cost(&scene) > 0, "the step would have room, not so what follows");
    scene.workers[0].capacity.kv = Tokens(26_000);
    assert_eq!(cost(&scene), 0);
    assert_eq!(
        admit(&mut StepQueue::new(AdmissionLimits { max_displaced_compute: Micros(0), ..settings() }), 1, &scene),
        starts(StepStartReason::Tolerated)
    );
}

#[test]
fn step_waits_until_its_victims_are_unlikely_to_return() {
    // 4,200 tokens x 100 us x p / (1 - p), with p slightly above one half.
    assert!((420_000..740_000).contains(&cost(&full(1))), "{}", cost(&full(1)));
    assert!(cost(&full(1)) > cost(&full(20)) && cost(&full(20)) > cost(&full(400)) && cost(&full(3_000)) == 0);
    let mut queue = StepQueue::new(settings());
    assert_eq!(admit(&mut queue, 1, &full(1)), AdmissionDecision::Hold { costs_others: Micros(cost(&full(1))) });
    assert_eq!((queue.len(), queue.admission_order()), (1, vec![1]));
    assert_eq!(admit(&mut queue, 1, &full(400)), starts(StepStartReason::Tolerated));
    assert!(queue.is_empty());
}

#[test]
fn kv_of_a_departed_session_does_not_delay_a_step() {
    let mut scene = full(1);
    scene
        .occupancy
        .session_moved(Owner { worker: super::id("a"), incarnation: Incarnation(1), rank: DpRank(0) }, SessionId(7));
    assert_eq!(cost(&scene), 0);
}

#[test]
fn step_with_resident_kv_is_admitted_with_little_cost() {
    let mut scene =
        PlanningScene::read("session owner=a sealed=100\n policy lambda=0 mu=0\n worker a hybrid kv=20000 holds=96");
    scene.add_resident(7, "a", FULL.0, 1);
    let all = cost(&full(1));
    assert!(cost(&scene) * 2 > all, "found there, and another session's: this one is new there and will grow");
    // 1,536 of the 1,600 prompt tokens are cached there, and belong to the session itself.
    scene.add_resident(1, "a", 1_536, 0);
    assert!(cost(&scene) * 10 <= all && cost(&scene) > 0, "{} of {all}", cost(&scene));
    assert_eq!(admit(&mut StepQueue::new(settings()), 1, &scene), starts(StepStartReason::Tolerated));
}

#[test]
fn displaced_compute_is_capped_for_sessions_that_return_at_once() {
    let mut scene = full(1);
    for session in 100..1_000 {
        [5, 3, 1].into_iter().for_each(|ago| scene.add_resident(session, "a", FULL.0, ago));
    }
    // At most 200 x 4,200 tokens x 100 us, since the chance is near 1.
    assert!((20_000_000..=84_000_000).contains(&cost(&scene)), "{}", cost(&scene));
}

#[test]
fn memory_full_of_running_answers_costs_the_maximum() {
    let mut scene = full(1);
    let at = Owner { worker: super::id("a"), incarnation: Incarnation(1), rank: DpRank(0) };
    let footprint = StepFootprint { tokens: FULL, cached: Tokens::ZERO, capacity: FULL };
    scene.occupancy.step_started(at, SessionId(7), footprint, scene.now);
    assert_eq!(cost(&scene), 200 * 420_000);
}

#[test]
fn unknown_capacity_never_delays_a_step() {
    let mut scene = full(1);
    scene.workers[0].capacity.kv = Tokens::ZERO;
    assert_eq!(cost(&scene), 0);
}

#[test]
fn step_is_admitted_after_the_maximum_wait() {
    let mut queue = StepQueue::new(AdmissionLimits { max_wait: Micros(5_000_000), ..settings() });
    let mut scene = full(1);
    let begin = scene.now;
    assert!(waits(admit(&mut queue, 1, &scene)));
    for (passed, is_over) in [(0, false), (4_999_999, false), (5_000_000, true)] {
        scene.now = begin + Micros(passed);
        // Another session has just filled the memory.
        scene.add_resident(8, "a", FULL.0, 0);
        let verdict = admit(&mut queue, 1, &scene);
        assert_eq!(
            (verdict == starts(StepStartReason::Longest), waits(verdict)),
            (is_over, !is_over),
            "after {passed} us"
        );
    }
    assert!(queue.is_empty());
}

#[test]
fn full_admission_queue_admits_the_next_step() {
    let mut queue = StepQueue::new(AdmissionLimits { max_queue: 2, ..settings() });
    let scene = full(1);
    assert!(waits(admit(&mut queue, 1, &scene)) && waits(admit(&mut queue, 2, &scene)));
    assert_eq!(admit(&mut queue, 3, &scene), starts(StepStartReason::NoPlace));
    assert!(waits(admit(&mut queue, 2, &scene)), "who waits already goes on waiting");
    queue.remove(1);
    assert_eq!(queue.admission_order(), [2]);
    assert!(waits(admit(&mut queue, 3, &scene)));
}

#[test]
fn zero_maximum_wait_disables_queueing() {
    let mut queue = StepQueue::new(AdmissionLimits { max_wait: Micros::ZERO, ..settings() });
    assert_eq!(admit(&mut queue, 1, &full(0)), starts(StepStartReason::Tolerated));
    assert!(queue.is_empty());
}

#[test]
fn queue_orders_steps_by_prompt_length_then_arrival() {
    let mut queue = StepQueue::new(settings());
    for (step, prompt) in [(1, 1_600), (2, 3_200), (3, 1_600), (4, 1_500)] {
        let mut scene = full(1);
        scene.ask.prompt_tokens = Tokens(prompt);
        scene.now += Micros(u64::from(step));
        assert!(waits(admit(&mut queue, step, &scene)), "{step}");
    }
    assert_eq!(queue.admission_order(), [4, 1, 3, 2]);
}

#[test]
fn admission_settings_use_defaults_and_reject_unknown_fields() {
    let read = |text| serde_json::from_str::<AdmissionLimits>(text);
    assert_eq!(read(r#"{"max_displaced_compute": "100ms"}"#).unwrap(), settings());
    assert!(read(r#"{"patience": 1}"#).is_err());
}
