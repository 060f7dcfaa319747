use vocabulary::{Micros, Tokens};

use super::{TIMING, assert_near};
use crate::EngineProfile;
use crate::runs::{EngineTiming, Seconds};

#[test]
fn splitting_a_prefill_does_not_change_its_cost() {
    let whole = TIMING.prefill_time(Tokens(1_000), Tokens(200));
    let parts = TIMING.prefill_time(Tokens(400), Tokens(200)) + TIMING.prefill_time(Tokens(600), Tokens(600));
    assert_near(whole, parts);
    assert_near(TIMING.prefill_time(Tokens(1_000), Tokens(0)), 1.0 + 1e-6 * 1_000.0 * 500.0);
    assert_eq!(TIMING.prefill_time(Tokens(0), Tokens(500)), 0.0);
}

#[test]
fn every_started_chunk_costs_its_overhead() {
    let timing = EngineTiming { chunk_overhead: 0.5, ..TIMING };
    let over = |tokens| timing.prefill_time(Tokens(tokens), Tokens(0)) - TIMING.prefill_time(Tokens(tokens), Tokens(0));
    assert_near(over(1), 0.5);
    assert_near(over(100), 0.5);
    assert_near(over(101), 1.0);
}

#[test]
fn decode_slows_with_context_and_batch_size() {
    let timing = EngineTiming { decode_request: 0.25, ..TIMING };
    assert_near(timing.batch_time(0, 0), 0.0);
    assert_near(timing.batch_time(1, 1_000), 0.01);
    assert_near(timing.batch_time(3, 1_000), 0.51);
}

#[test]
fn timing_agrees_with_the_block_engine_profile() {
    let profile = EngineProfile::default();
    let timing = EngineTiming::of(&profile);
    for tokens in [1, 2_048] {
        assert_near(
            timing.prefill_time(Tokens(u64::from(tokens)), Tokens(9)),
            Seconds::from(profile.step_time(tokens, 0)).0,
        );
    }
    for requests in [1, 7] {
        let step = timing.decode_step + timing.batch_time(requests as usize, 50_000);
        assert_near(step, Seconds::from(profile.step_time(0, requests)).0);
        // Both in one step, whose overhead counts once.
        let both = timing.prefill_time(Tokens(512), Tokens(0))
            + timing.step_beside_chunk
            + timing.batch_time(requests as usize, 0);
        assert_near(both, Seconds::from(profile.step_time(512, requests)).0);
    }
}

#[test]
fn seconds_order_and_add() {
    let mut times = [Seconds(2.0), Seconds(-1.0), Seconds(0.5)];
    times.sort();
    assert_eq!(times, [Seconds(-1.0), Seconds(0.5), Seconds(2.0)]);
    assert_eq!(Seconds::from(Micros(1_500_000)), Seconds(1.5));
    let mut sum = Seconds(1.0) + Seconds(0.5) - Seconds::ZERO;
    sum += Seconds(0.25);
    assert_eq!(sum, Seconds(1.75));
}
