//! What is said, and what it depends on.

use super::*;
use crate::{ModelError, Refused};

#[test]
fn the_same_prompt_gets_the_same_answer_from_every_engine() {
    let prompt = prompt(1, 30);
    let other = Engine::new(Arc::new(small()), voice(), 12345).unwrap();
    let mut rig = Rig { engine: other, ..Rig::new(small()) };
    assert_eq!(rig.answer(request(&prompt, 20)), alone(&prompt, 20));
}

#[test]
fn every_token_of_the_prompt_matters() {
    let base = prompt(1, 30);
    let answer = alone(&base, 8);
    for at in 0..base.len() {
        let mut changed = base.clone();
        changed[at] += 1;
        assert_ne!(alone(&changed, 8), answer, "token {at}");
    }
}

#[test]
fn an_answer_does_not_depend_on_what_was_cached() {
    let (short, long) = (prompt(1, 21), prompt(1, 43));
    let mut rig = Rig::new(small());
    rig.answer(request(&short, 5));
    assert_eq!(rig.answer(request(&long, 9)), alone(&long, 9));
    assert_eq!(rig.answer(request(&long, 9)), alone(&long, 9), "and now all of it is cached");
}

#[test]
fn an_answer_does_not_depend_on_block_size_or_chunks() {
    let prompt = prompt(3, 70);
    let odd = Profile { block_tokens: 4, step_tokens: 7, ..small() };
    assert_eq!(Rig::new(odd).answer(request(&prompt, 9)), alone(&prompt, 9));
}

#[test]
fn going_on_from_an_answer_is_the_same_as_never_stopping() {
    let prompt = prompt(4, 18);
    let whole = alone(&prompt, 24);
    let mut rig = Rig::new(small());
    let first = rig.answer(request(&prompt, 10));
    let resumed: Vec<u32> = prompt.iter().chain(&first).copied().collect();
    let rest = rig.answer(request(&resumed, 14));
    assert_eq!([first, rest].concat(), whole);
}

#[test]
fn answers_end_by_themselves_at_natural_lengths() {
    let lengths: Vec<u32> = (0..60)
        .map(|seed| {
            let mut rig = Rig::new(small());
            let mut natural = request(&prompt(seed, 10), 180);
            natural.sampling.ending = Ending::Natural;
            let id = rig.submit(natural);
            let finish = rig.finish(id);
            let text = &rig.texts[&id];
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
fn a_turn_that_just_began_does_not_end() {
    for seed in 0..50 {
        let mut prompt = prompt(seed, 60);
        prompt.push(1);
        let mut natural = request(&prompt, 12);
        natural.sampling.ending = Ending::Natural;
        assert_eq!(Rig::new(small()).answer(natural).len(), 12, "special tokens begin a turn");
    }
}

#[test]
fn no_end_comes_before_the_shortest_length_that_was_asked_for() {
    let natural = |seed: u32, min: u32| {
        let mut request = request(&prompt(seed, 40), 120);
        request.sampling.ending = Ending::Natural;
        request.sampling.min_tokens = min;
        Rig::new(small()).answer(request)
    };
    let early = (0..200).find(|seed| natural(*seed, 0).len() < 10).expect("some answer is short");
    assert!(natural(early, 30).len() >= 30);
}

#[test]
fn stop_tokens_end_an_answer_and_belong_to_it() {
    let prompt = prompt(5, 20);
    let whole = alone(&prompt, 10);
    let mut stopping = request(&prompt, 10);
    stopping.sampling.stop = vec![whole[4]];
    let mut rig = Rig::new(small());
    let id = rig.submit(stopping);
    assert_eq!(reason(&rig.finish(id)), FinishReason::Stop);
    assert_eq!(rig.texts[&id], whole[..5]);
}

#[test]
fn seeds_adapters_and_nothing_else_change_the_answer() {
    let prompt = prompt(6, 20);
    let with = |change: &dyn Fn(&mut Request)| {
        let mut request = request(&prompt, 10);
        change(&mut request);
        Rig::new(small()).answer(request)
    };
    let plain = alone(&prompt, 10);
    assert_ne!(with(&|r| r.sampling.salt = Some(5)), plain);
    assert_ne!(with(&|r| r.sampling.salt = Some(5)), with(&|r| r.sampling.salt = Some(8)));
    assert_eq!(with(&|r| r.sampling.salt = Some(5)), with(&|r| r.sampling.salt = Some(5)));
    assert_ne!(with(&|r| r.keys.adapter = Some("poet".into())), plain);
    assert_eq!(with(&|r| r.keys.salt = Some("tenant".into())), plain, "a salt separates caches, not texts");
}

#[test]
fn a_voice_never_says_a_special_token_in_mid_answer() {
    let voice = Voice::new(&[0, 1, 2, 50, 51], EOS, &[0, 1]).unwrap();
    let mut state = crate::Fingerprint::root(None);
    for _ in 0..500 {
        let token = voice.next_word(state, None);
        assert!(token == 50 || token == 51);
        state = voice.read(state, token);
    }
    assert_eq!(Voice::new(&[0, 1, 50], EOS, &[0, 1]).unwrap_err(), ModelError::NoWords);
}

#[test]
fn what_cannot_be_computed_is_refused() {
    let mut rig = Rig::new(Profile { max_waiting: 1, ..small() });
    let mut ask = |tokens| rig.engine.submit(Micros(0), request(&prompt(1, tokens), 1));
    assert_eq!(ask(0), Err(Refused::EmptyPrompt));
    assert_eq!(ask(200), Err(Refused::TooLong { prompt: 200, context: 200 }));
    assert!(ask(199).is_ok());
    assert_eq!(ask(5), Err(Refused::QueueFull { waiting: 1 }));
}

#[test]
fn profiles_that_make_no_sense_are_named() {
    let check = |profile: Profile| match profile.check() {
        Err(ModelError::Profile { field, .. }) => field,
        other => panic!("{other:?}"),
    };
    assert_eq!(check(Profile { prefill_tokens_per_second: f64::NAN, ..small() }), "prefill_tokens_per_second");
    assert_eq!(check(Profile { blocks: 10, ..small() }), "context_tokens");
    assert_eq!(check(Profile { step_tokens: 2, ..small() }), "step_tokens");
    assert_eq!(Profile::default().check(), Ok(()));
}
