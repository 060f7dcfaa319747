use vocabulary::Micros;

use super::*;
use crate::EngineProfile;
use crate::tests::{EngineHarness, prompt, request, small_profile};

/// One of several conversations: its prompts include its earlier answers.
struct GrowingConversation {
    text: Vec<u32>,
    path: Vec<RunId>,
}

/// Runs four conversations of six turns on both engines; returns the time of each first token, the end of each turn,
/// and the cached tokens.
fn run_on_both_engines(profile: &EngineProfile) -> (Vec<[f64; 3]>, Vec<[f64; 3]>) {
    const ANSWER: u32 = 24;
    let block = profile.block_size;
    let mut runs = RunTree::default();
    let mut harness = EngineHarness::new(profile.clone());
    let mut turns = Vec::new();
    let mut talks: Vec<GrowingConversation> =
        (0..4).map(|_| GrowingConversation { text: Vec::new(), path: Vec::new() }).collect();
    for turn in 0..6_u32 {
        for (talk, number) in talks.iter_mut().zip(0..) {
            talk.text.extend(prompt(turn * 10 + number + 1, 300 + 40 * number));
            let at = Micros(u64::from(turn) * 4_000_000 + u64::from(number) * 60_000);
            harness.advance(at);
            let id = harness.submit(request(&talk.text, ANSWER));
            let known = runs.end_depth(&talk.path).0 as u32;
            let whole = talk.text.len() as u32 / block * block;
            talk.path.push(runs.add(talk.path.last().copied(), whole - known));
            turns.push((id, at, talk.path.clone(), talk.text.len() as u64, Vec::new()));
        }
        harness.advance(Micros(u64::from(turn + 1) * 4_000_000));
        for (talk, (id, .., resent)) in talks.iter_mut().zip(&mut turns[turn as usize * 4..]) {
            talk.text.extend(&harness.texts[id]);
            // The last token of an answer is never computed.
            let (known, whole) = (runs.end_depth(&talk.path).0 as u32, (talk.text.len() as u32 - 1) / block * block);
            talk.path.push(runs.add(talk.path.last().copied(), whole - known));
            resent.clone_from(&talk.path);
        }
    }
    let by_blocks = turns.iter().map(|(id, at, ..)| {
        let finish = &harness.finishes[id];
        let since = |micros: Micros| (micros - *at).0 as f64 / 1e6;
        [since(finish.first_token), since(*harness.times[id].last().unwrap()), f64::from(finish.cached)]
    });
    let by_blocks = by_blocks.collect();
    let device = u64::from(profile.capacity());
    let mut bench = RunEngineHarness::new(runs, EngineTiming::of(profile), sizes(device, 0));
    for (ticket, (_, at, path, tokens, resent)) in (0..).zip(&turns) {
        bench.run_until(Seconds::from(*at).0);
        let resent = Some(resent.as_slice().into());
        bench.submit(RunRequest { expected_history: resent, ..run_request(ticket, path, *tokens, u64::from(ANSWER)) });
    }
    bench.run_until(100.0);
    let by_runs = (0..).zip(&turns).map(|(ticket, (_, at, ..))| {
        let begun = Seconds::from(*at).0;
        [bench.first_token(ticket) - begun, bench.finished(ticket) - begun, bench.started(ticket)[0] as f64]
    });
    (by_blocks, by_runs.collect())
}

fn mean(all: &[[f64; 3]], which: usize) -> f64 {
    all.iter().map(|one| one[which]).sum::<f64>() / all.len() as f64
}

#[test]
fn run_and_block_engines_agree_on_times_and_cache_hits() {
    let roomy =
        EngineProfile { num_gpu_blocks: 4_096, max_model_len: 8_000, max_num_batched_tokens: 256, ..small_profile() };
    let (blocks, runs) = run_on_both_engines(&roomy);
    // Larger tolerance for answers: these prompts are slightly longer than a chunk, which takes two steps in the
    // block-level engine and 1.2 in the run-level engine.
    for (which, within) in [(0, 0.02), (1, 0.12), (2, 0.01)] {
        let (seen, expected) = (mean(&runs, which), mean(&blocks, which));
        assert!((seen / expected - 1.0).abs() < within, "{which}: {seen} by runs, {expected} by blocks");
    }
}

#[test]
fn run_and_block_engines_recompute_alike_under_memory_pressure() {
    let tight =
        EngineProfile { num_gpu_blocks: 1_000, max_model_len: 4_000, max_num_batched_tokens: 256, ..small_profile() };
    let (blocks, runs) = run_on_both_engines(&tight);
    let (roomy, _) = run_on_both_engines(&EngineProfile { num_gpu_blocks: 4_096, ..tight });
    assert!(mean(&blocks, 2) < 0.8 * mean(&roomy, 2), "the memory is too large for this test");
    let (seen, expected) = (mean(&runs, 2), mean(&blocks, 2));
    assert!((seen / expected - 1.0).abs() < 0.25, "{seen} found by runs, {expected} by blocks");
}
