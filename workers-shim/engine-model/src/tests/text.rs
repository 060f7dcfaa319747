//! Tests of the generated text and of what it depends on.

use super::*;
use crate::{EngineBuildError, RequestRejection};

#[test]
fn every_engine_gives_the_same_answer_to_a_prompt() {
    let prompt = prompt(1, 30);
    let other = Engine::new(Arc::new(small_profile()), voice(), 12345).unwrap();
    let mut harness = EngineHarness { engine: other, ..EngineHarness::new(small_profile()) };
    assert_eq!(harness.answer(request(&prompt, 20)), answer_of_fresh_engine(&prompt, 20));
}

#[test]
fn every_prompt_token_changes_the_answer() {
    let base = prompt(1, 30);
    let answer = answer_of_fresh_engine(&base, 8);
    for at in 0..base.len() {
        let mut changed = base.clone();
        changed[at] += 1;
        assert_ne!(answer_of_fresh_engine(&changed, 8), answer, "token {at}");
    }
}

#[test]
fn answer_does_not_depend_on_cached_blocks() {
    let (short, long) = (prompt(1, 21), prompt(1, 43));
    let mut harness = EngineHarness::new(small_profile());
    harness.answer(request(&short, 5));
    assert_eq!(harness.answer(request(&long, 9)), answer_of_fresh_engine(&long, 9));
    assert_eq!(harness.answer(request(&long, 9)), answer_of_fresh_engine(&long, 9), "and now all of it is cached");
}

#[test]
fn answer_does_not_depend_on_block_size_or_chunks() {
    let prompt = prompt(3, 70);
    let odd = EngineProfile { block_size: 4, max_num_batched_tokens: 7, ..small_profile() };
    assert_eq!(EngineHarness::new(odd).answer(request(&prompt, 9)), answer_of_fresh_engine(&prompt, 9));
}

#[test]
fn resumed_answer_equals_an_uninterrupted_one() {
    let prompt = prompt(4, 18);
    let whole = answer_of_fresh_engine(&prompt, 24);
    let mut harness = EngineHarness::new(small_profile());
    let first = harness.answer(request(&prompt, 10));
    let resumed: Vec<u32> = prompt.iter().chain(&first).copied().collect();
    let rest = harness.answer(request(&resumed, 14));
    assert_eq!([first, rest].concat(), whole);
}

#[test]
fn answers_end_at_natural_lengths() {
    let lengths: Vec<u32> = (0..60)
        .map(|seed| {
            let mut harness = EngineHarness::new(small_profile());
            let mut natural = request(&prompt(seed, 10), 180);
            natural.sampling.eos_policy = EosPolicy::Natural;
            let id = harness.submit(natural);
            let finish = harness.finish(id);
            let text = &harness.texts[&id];
            assert_eq!(reason(&finish) == FinishReason::Stop, text.last() == Some(&EOS));
            assert_eq!(text.iter().filter(|t| **t == EOS).count(), usize::from(text.last() == Some(&EOS)));
            finish.generated
        })
        .collect();
    let mean = lengths.iter().sum::<u32>() / 60;
    assert!((20..100).contains(&mean), "mean {mean}");
    assert!(lengths.iter().collect::<std::collections::HashSet<_>>().len() > 20, "lengths differ: {lengths:?}");
}

#[test]
fn answer_does_not_end_right_after_a_turn_begins() {
    for seed in 0..50 {
        let mut prompt = prompt(seed, 60);
        prompt.push(1);
        let mut natural = request(&prompt, 12);
        natural.sampling.eos_policy = EosPolicy::Natural;
        assert_eq!(EngineHarness::new(small_profile()).answer(natural).len(), 12, "special tokens begin a turn");
    }
}

#[test]
fn min_tokens_delays_the_natural_end() {
    let natural = |seed: u32, min: u32| {
        let mut request = request(&prompt(seed, 40), 120);
        request.sampling.eos_policy = EosPolicy::Natural;
        request.sampling.min_tokens = min;
        EngineHarness::new(small_profile()).answer(request)
    };
    let early = (0..200).find(|seed| natural(*seed, 0).len() < 10).expect("some answer is short");
    assert!(natural(early, 30).len() >= 30);
}

#[test]
fn stop_token_ends_the_answer_and_is_included() {
    let prompt = prompt(5, 20);
    let whole = answer_of_fresh_engine(&prompt, 10);
    let mut stopping = request(&prompt, 10);
    stopping.sampling.stop = vec![whole[4]];
    let mut harness = EngineHarness::new(small_profile());
    let id = harness.submit(stopping);
    assert_eq!(reason(&harness.finish(id)), FinishReason::Stop);
    assert_eq!(harness.texts[&id], whole[..5]);
}

#[test]
fn only_seeds_and_adapters_change_the_answer() {
    let prompt = prompt(6, 20);
    let with = |change: &dyn Fn(&mut EngineRequest)| {
        let mut request = request(&prompt, 10);
        change(&mut request);
        EngineHarness::new(small_profile()).answer(request)
    };
    let plain = answer_of_fresh_engine(&prompt, 10);
    assert_ne!(with(&|r| r.sampling.salt = Some(5)), plain);
    assert_ne!(with(&|r| r.sampling.salt = Some(5)), with(&|r| r.sampling.salt = Some(8)));
    assert_eq!(with(&|r| r.sampling.salt = Some(5)), with(&|r| r.sampling.salt = Some(5)));
    assert_ne!(with(&|r| r.keys.adapter = Some("poet".into())), plain);
    assert_eq!(with(&|r| r.keys.salt = Some("tenant".into())), plain, "a salt separates caches, not texts");
}

#[test]
fn token_generator_emits_no_special_token_mid_answer() {
    let generator = TokenGenerator::new(&[0, 1, 2, 50, 51], EOS, &[0, 1]).unwrap();
    let mut state = crate::KvFingerprint::root(None);
    for _ in 0..500 {
        let token = generator.next_non_eos_token(state, None);
        assert!(token == 50 || token == 51);
        state = generator.extend(state, token);
    }
    assert_eq!(TokenGenerator::new(&[0, 1, 50], EOS, &[0, 1]).unwrap_err(), EngineBuildError::NoWords);
}

#[test]
fn uncomputable_requests_are_refused() {
    let mut harness = EngineHarness::new(EngineProfile { max_queue: 1, ..small_profile() });
    let mut ask = |tokens| harness.engine.submit(Micros(0), request(&prompt(1, tokens), 1));
    assert_eq!(ask(0), Err(RequestRejection::EmptyPrompt));
    assert_eq!(ask(200), Err(RequestRejection::TooLong { prompt: 200, context: 200 }));
    assert!(ask(199).is_ok());
    assert_eq!(ask(5), Err(RequestRejection::QueueFull { waiting: 1 }));
}

#[test]
fn invalid_profile_names_its_field() {
    let check = |profile: EngineProfile| match profile.check() {
        Err(EngineBuildError::Profile { field, .. }) => field,
        other => panic!("{other:?}"),
    };
    assert_eq!(
        check(EngineProfile { prefill_tokens_per_second: f64::NAN, ..small_profile() }),
        "prefill_tokens_per_second"
    );
    assert_eq!(check(EngineProfile { num_gpu_blocks: 10, ..small_profile() }), "max_model_len");
    assert_eq!(check(EngineProfile { max_num_batched_tokens: 2, ..small_profile() }), "max_num_batched_tokens");
    assert_eq!(EngineProfile::default().check(), Ok(()));
}
