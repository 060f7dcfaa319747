use strum::VariantArray as _;

use super::*;

/// Pseudo-random samples from a seed.
struct SampleRng(u64);

impl SampleRng {
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Approximately normal: the sum of twelve uniform samples.
    fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.uniform()).sum::<f64>() - 6.0
    }
}

const FETCH: Action = Action::ArtifactFetch;

fn step(session: u64, arm: ComparisonArm, seconds: f64) -> StepSample {
    let took = Micros((seconds * 1e6) as u64);
    StepSample { action: FETCH, session: SessionId(session.into()), arm, latency: took, at_unix_ms: session }
}

/// Runs sessions of three steps each in a random arm, with arm own slower by `factor`. Prompt sizes of sessions differ
/// by half an order of magnitude; one step in 50 waits ten times as long. Returns the number of sessions until the
/// slowdown was detected.
fn sessions_until_detected(seed: u64, factor: f64, most: u64) -> Option<u64> {
    let (guardrail, mut chance) = (Guardrail::default(), SampleRng(seed));
    (0..most).find(|session| {
        let arm = if chance.uniform() < 0.5 { ComparisonArm::Control } else { ComparisonArm::Treatment };
        let own = if arm == ComparisonArm::Treatment { factor } else { 1.0 };
        let size = (0.5 * chance.normal()).exp();
        (0..3).any(|_| {
            let wait = if chance.uniform() < 0.02 { 10.0 } else { 1.0 };
            let seconds = own * size * wait * (0.4 * chance.normal()).exp();
            matches!(guardrail.add(&step(*session, arm, seconds)), Some(GuardrailEvent::Slower(_)))
        })
    })
}

#[test]
fn equal_arms_are_not_flagged_as_slower_under_repeated_looks() {
    let runs = 100;
    let found = (0..runs).filter(|seed| sessions_until_detected(seed * 7_919, 1.0, 3_000).is_some()).count();
    assert_eq!(found, 0, "of {runs} runs of 9,000 looks");
}

#[test]
fn a_fifty_percent_slowdown_is_detected_within_a_few_hundred_sessions() {
    let took: Vec<_> =
        (0..40).map(|seed| sessions_until_detected(seed * 104_729, 1.5, 1_000).unwrap_or(1_000)).collect();
    let late = took.iter().filter(|took| **took > 500).count();
    assert!(late <= 2, "{took:?}");
    let soon = (0..10).map(|seed| sessions_until_detected(seed * 104_729, 3.0, 1_000).unwrap_or(1_000)).max();
    assert!(soon < Some(120), "{soon:?}");
}

#[test]
fn a_faster_arm_is_not_flagged_and_its_interval_is_below_one() {
    assert_eq!(sessions_until_detected(1, 0.5, 1_000), None);
    let guardrail = Guardrail::default();
    for session in 0..400 {
        let (arm, seconds) =
            if session % 2 == 0 { (ComparisonArm::Control, 2.0) } else { (ComparisonArm::Treatment, 1.0) };
        assert_eq!(guardrail.add(&step(session, arm, seconds)), None);
    }
    let compared = guardrail.of(FETCH);
    assert_eq!((compared.control_sessions, compared.treatment_sessions), (200, 200));
    let expected = 1.05 / 2.05;
    assert!((compared.ttft_ratio.unwrap() - expected).abs() < 1e-6, "{compared:?}");
    assert!(
        compared.ttft_ratio_lower < compared.ttft_ratio
            && compared.ttft_ratio < compared.ttft_ratio_upper
            && compared.ttft_ratio_upper < Some(1.0)
    );
}

/// Adds one step for each of `count` sessions per arm, with arm own ten times as slow. Returns the event, and after how
/// many sessions it came.
fn add_slow_sessions(guardrail: &Guardrail, action: Action, count: u64) -> Option<(u64, GuardrailEvent)> {
    (0..2 * count).find_map(|session| {
        let (arm, seconds) =
            if session % 2 == 0 { (ComparisonArm::Control, 0.1) } else { (ComparisonArm::Treatment, 1.0) };
        guardrail.add(&StepSample { action, ..step(session, arm, seconds) }).map(|found| (session + 1, found))
    })
}

#[test]
fn no_verdict_before_each_arm_has_twenty_sessions() {
    let guardrail = Guardrail::default();
    for _ in 0..50 {
        assert_eq!(add_slow_sessions(&guardrail, FETCH, 19), None);
    }
    assert_eq!((guardrail.of(FETCH).treatment_sessions, guardrail.of(FETCH).ttft_ratio), (19, None));
    assert_eq!(add_slow_sessions(&guardrail, FETCH, 20).map(|(after, _)| after), Some(40));
}

#[test]
fn repeated_steps_of_a_session_do_not_narrow_the_interval() {
    let of = |steps| {
        let guardrail = Guardrail::default();
        let mut chance = SampleRng(3);
        for session in 0..60 {
            let arm = ComparisonArm::VARIANTS[session as usize % 2];
            let seconds = (0.5 * chance.normal()).exp();
            (0..steps).for_each(|_| assert_eq!(guardrail.add(&step(session, arm, seconds)), None));
        }
        let ArmComparisonReport { ttft_ratio_lower, ttft_ratio_upper, .. } = guardrail.of(FETCH);
        (ttft_ratio_lower.unwrap(), ttft_ratio_upper.unwrap())
    };
    let (once, often) = (of(1), of(30));
    assert!((once.0 - often.0).abs() < 1e-9 && (once.1 - often.1).abs() < 1e-9, "{once:?} {often:?}");
}

#[test]
fn a_slower_action_stays_flagged_until_reset() {
    let guardrail = Guardrail::default();
    let Some((40, GuardrailEvent::Slower(compared))) = add_slow_sessions(&guardrail, FETCH, 100) else {
        panic!("found with the fortieth session")
    };
    assert_eq!(compared.slower_since, Some(UtcTime::from_unix_ms(39)));
    assert_eq!(guardrail.slower_actions(), [(FETCH, compared)]);
    assert_eq!(add_slow_sessions(&guardrail, FETCH, 100), None, "steps that were under way change nothing");
    assert_eq!(guardrail.of(FETCH), compared);
    guardrail.reset(FETCH);
    assert_eq!((guardrail.of(FETCH), guardrail.slower_actions()), (ArmComparisonReport::default(), Vec::new()));
    assert!(add_slow_sessions(&guardrail, FETCH, 100).is_some());
}

#[test]
fn a_slower_placement_is_unflagged_once_it_recovers() {
    let guardrail = Guardrail::default();
    let action = Action::DecodeContinuation;
    assert!(matches!(add_slow_sessions(&guardrail, action, 100), Some((40, GuardrailEvent::Slower(_)))));
    let well = |session| {
        let step = step(session, ComparisonArm::VARIANTS[session as usize % 2], 0.1);
        guardrail.add(&StepSample { action, ..step }).map(|found| (session, found))
    };
    let Some((_, GuardrailEvent::Recovered(compared))) = (1_000..3_000).find_map(well) else { panic!("it ends") };
    assert_eq!(compared.slower_since, None);
    assert!((3_000..6_000).all(|session| well(session).is_none()), "and does not come again");
}

#[test]
fn a_slower_placement_stays_flagged_while_sessions_are_too_few() {
    let guardrail = Guardrail::default();
    let action = Action::DecodeContinuation;
    assert!(add_slow_sessions(&guardrail, action, 100).is_some());
    // A day later those sessions have expired.
    let later = |session: u64| {
        let step = step(session, ComparisonArm::VARIANTS[session as usize % 2], 0.1);
        guardrail.add(&StepSample { action, at_unix_ms: 2 * SESSION_TTL_MS + session, ..step })
    };
    assert!((1_000..1_039).all(|session| later(session).is_none()), "39 sessions");
    let compared = guardrail.of(action);
    assert_eq!((compared.ttft_ratio, compared.slower_since), (None, Some(UtcTime::from_unix_ms(39))), "{compared:?}");
    assert!(matches!(later(1_039), Some(GuardrailEvent::Recovered(_))));
}

#[test]
fn old_sessions_are_evicted_and_old_samples_decay() {
    let guardrail = Guardrail::default();
    let found = (0..4 * MAX_SESSIONS as u64)
        .find_map(|session| guardrail.add(&step(session, ComparisonArm::VARIANTS[session as usize % 2], 1.0)));
    assert_eq!(found, None);
    assert_eq!(
        (guardrail.of(FETCH).control_sessions, guardrail.of(FETCH).treatment_sessions),
        (MAX_SESSIONS, MAX_SESSIONS)
    );
    let tomorrow = StepSample { at_unix_ms: SESSION_TTL_MS + 10_000, ..step(7, ComparisonArm::Treatment, 1.0) };
    guardrail.add(&tomorrow);
    assert_eq!((guardrail.of(FETCH).control_sessions, guardrail.of(FETCH).treatment_sessions), (0, 1));
    let mut sessions = ArmSessions::default();
    (0..1_000).for_each(|_| sessions.add(&tomorrow, 0.0));
    (0..100).for_each(|_| sessions.add(&tomorrow, 1.0));
    assert!(sessions.0[0].mean > 0.99, "{:?}", sessions.0[0]);
}
