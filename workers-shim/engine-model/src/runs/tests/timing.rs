use vocabulary::{Micros, Tokens};

use super::{TIMING, near};
use crate::Profile;
use crate::runs::{Seconds, Timing};

#[test]
fn a_prompt_in_two_parts_costs_what_it_costs_in_one() {
    let whole = TIMING.prefill(Tokens(1_000), Tokens(200));
    let parts = TIMING.prefill(Tokens(400), Tokens(200)) + TIMING.prefill(Tokens(600), Tokens(600));
    near(whole, parts);
    near(TIMING.prefill(Tokens(1_000), Tokens(0)), 1.0 + 1e-6 * 1_000.0 * 500.0);
    assert_eq!(TIMING.prefill(Tokens(0), Tokens(500)), 0.0);
}

#[test]
fn each_chunk_costs_its_overhead_and_chunks_are_whole() {
    let timing = Timing { chunk_overhead: 0.5, ..TIMING };
    let over = |tokens| timing.prefill(Tokens(tokens), Tokens(0)) - TIMING.prefill(Tokens(tokens), Tokens(0));
    near(over(1), 0.5);
    near(over(100), 0.5);
    near(over(101), 1.0);
}

#[test]
fn a_batch_slows_down_by_its_context_and_by_each_further_request() {
    let timing = Timing { request: 0.25, ..TIMING };
    near(timing.batch(0, 0), 0.0);
    near(timing.batch(1, 1_000), 0.01);
    near(timing.batch(3, 1_000), 0.51);
}

#[test]
fn a_profile_is_read_as_the_engine_by_blocks_reads_it() {
    let profile = Profile::default();
    let timing = Timing::of(&profile);
    for tokens in [1, 2_048] {
        near(timing.prefill(Tokens(u64::from(tokens)), Tokens(9)), Seconds::from(profile.step_time(tokens, 0)).0);
    }
    for requests in [1, 7] {
        let step = timing.step + timing.batch(requests as usize, 50_000);
        near(step, Seconds::from(profile.step_time(0, requests)).0);
        // Both in one step: its overhead counts once.
        let both =
            timing.prefill(Tokens(512), Tokens(0)) + timing.step_beside_chunk + timing.batch(requests as usize, 0);
        near(both, Seconds::from(profile.step_time(512, requests)).0);
    }
}

#[test]
fn seconds_are_ordered_and_add_up() {
    let mut times = [Seconds(2.0), Seconds(-1.0), Seconds(0.5)];
    times.sort();
    assert_eq!(times, [Seconds(-1.0), Seconds(0.5), Seconds(2.0)]);
    assert_eq!(Seconds::from(Micros(1_500_000)), Seconds(1.5));
    let mut sum = Seconds(1.0) + Seconds(0.5) - Seconds::ZERO;
    sum += Seconds(0.25);
    assert_eq!(sum, Seconds(1.75));
}
