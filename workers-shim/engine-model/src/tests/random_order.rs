//! Random operations in random order: answers stay correct, memory is accounted for, and events match the cache.

use super::*;

/// A small generator, so that a failing seed can be repeated.
struct WorkloadRng(u64);

impl WorkloadRng {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % sides
    }
}

/// Prompts with shared prefixes, as sessions have.
fn random_prompt(dice: &mut WorkloadRng) -> Vec<u32> {
    let session = prompt(dice.roll(5) as u32, 120);
    let kept = 1 + dice.roll(110) as usize;
    let mut tokens = session[..kept].to_vec();
    if dice.roll(2) == 0 {
        tokens.extend(prompt(100 + dice.roll(3) as u32, 1 + dice.roll(12) as u32));
    }
    tokens
}

#[test]
fn answers_stay_correct_under_memory_pressure_and_cancellation() {
    for seed in 0..40 {
        let mut dice = WorkloadRng(seed);
        let mut harness = EngineHarness::new(EngineProfile {
            num_gpu_blocks: 50,
            max_num_seqs: 6,
            max_num_batched_tokens: 24,
            ..small_profile()
        });
        let mut asked = Vec::new();
        for _ in 0..30 {
            let (tokens, length) = (random_prompt(&mut dice), 1 + dice.roll(40) as u32);
            let id = harness.submit(request(&tokens, length));
            asked.push((id, tokens, length));
            harness.advance(harness.now + Micros(dice.roll(9_000)));
            if dice.roll(5) == 0 {
                let victim = asked[dice.roll(asked.len() as u64) as usize].0;
                harness.engine.cancel(harness.now, victim);
            }
        }
        while let Some(next) = harness.engine.next_event() {
            harness.advance(next);
        }
        harness.advance(harness.now);
        for (id, tokens, length) in &asked {
            let finish = harness.finishes.get(id).unwrap_or_else(|| panic!("seed {seed}: {id:?} ends"));
            let said = harness.texts.get(id).cloned().unwrap_or_default();
            match reason(finish) {
                FinishReason::Length => {
                    assert_eq!(said, answer_of_fresh_engine(tokens, *length), "seed {seed}: {id:?}")
                }
                FinishReason::Abort => {
                    assert!(answer_of_fresh_engine(tokens, *length).starts_with(&said), "seed {seed}: {id:?}")
                }
                other => panic!("seed {seed}: {other:?}"),
            }
            assert_eq!(finish.generated as usize, said.len());
        }
        assert_memory_adds_up(&mut harness, seed);
    }
}

fn assert_memory_adds_up(harness: &mut EngineHarness, seed: u64) {
    let stats = harness.engine.stats();
    assert_eq!((stats.blocks_used, stats.running, stats.waiting), (0, 0, 0), "seed {seed}");
    let copies = harness.copies();
    assert!(copies.values().all(|count| *count > 0), "seed {seed}: nothing is removed that was not stored");
    assert!(copies.values().sum::<i32>() <= 50, "seed {seed}: no more is told than fits");
    let tokens = stats.prompt;
    let ends = stats.finishes;
    assert_eq!(ends.length + ends.abort, 30, "seed {seed}");
    assert!(tokens.computed > 0 && tokens.external == 0, "seed {seed}");
}

#[test]
fn event_listener_predicts_the_prefix_cache_hits() {
    for seed in 0..40 {
        let mut dice = WorkloadRng(1_000 + seed);
        let mut harness = EngineHarness::new(EngineProfile { num_gpu_blocks: 50, ..small_profile() });
        for _ in 0..25 {
            let tokens = random_prompt(&mut dice);
            harness.answer(request(&tokens, 1 + dice.roll(10) as u32));
        }
        let believed = believed_tokens(&harness);
        let tokens = random_prompt(&mut dice);
        let expected = believed.iter().filter(|held| tokens[..tokens.len() - 1].starts_with(held)).map(Vec::len).max();
        let id = harness.submit(request(&tokens, 1));
        assert_eq!(harness.finish(id).cached as usize, expected.unwrap_or(0), "seed {seed}");
    }
}

/// Returns all prefixes that the events so far leave in the cache without a hole.
fn believed_tokens(harness: &EngineHarness) -> Vec<Vec<u32>> {
    let copies = harness.copies();
    let mut prefixes: HashMap<u64, Vec<u32>> = HashMap::new();
    for event in harness.all_events() {
        let PrefixCacheChange::Stored(stored) = event else { continue };
        let mut before = stored.parent.map(|parent| prefixes[&parent].clone()).unwrap_or_default();
        for (hash, block) in stored.hashes.iter().zip(stored.tokens.chunks(4)) {
            before.extend(block);
            prefixes.insert(*hash, before.clone());
        }
    }
    let mut whole: Vec<Vec<u32>> =
        prefixes.into_iter().filter(|(hash, _)| copies.contains_key(hash)).map(|(_, tokens)| tokens).collect();
    whole.sort_by_key(Vec::len);
    let mut held: Vec<Vec<u32>> = Vec::new();
    for tokens in whole {
        if tokens.len() == 4 || held.contains(&tokens[..tokens.len() - 4].to_vec()) {
            held.push(tokens);
        }
    }
    held
}

#[test]
fn transfers_among_busy_engines_never_change_an_answer() {
    for seed in 0..25 {
        let mut dice = WorkloadRng(9_000 + seed);
        let mut rigs = [
            EngineHarness::new(small_profile()),
            EngineHarness::new(EngineProfile { num_gpu_blocks: 50, ..small_profile() }),
            EngineHarness::new(small_profile()),
        ];
        for round in 0..12 {
            let from = dice.roll(3) as usize;
            let to = (from + 1 + dice.roll(2) as usize) % 3;
            let tokens = random_prompt(&mut dice);
            rigs[to].answer(request(&random_prompt(&mut dice), 3));
            let said = hand_off(&mut rigs, (from, to), &tokens);
            assert_eq!(said, answer_of_fresh_engine(&tokens, 8), "seed {seed}, round {round}");
        }
        assert!(rigs.iter().all(|rig| rig.engine.stats().blocks_used == 0), "seed {seed}");
    }
}

fn hand_off(rigs: &mut [EngineHarness; 3], (from, to): (usize, usize), tokens: &[u32]) -> Vec<u32> {
    let mut leg = request(tokens, 1);
    leg.transfer = TransferRole::Produce;
    let id = rigs[from].submit(leg);
    let handoff = rigs[from].finish(id).handoff.expect("ended by length");
    let source = RemoteBlocks {
        engine: "p".into(),
        request: handoff.request,
        blocks: handoff.blocks,
        host: "h".into(),
        port: 1,
    };
    let mut serve = request(tokens, 8);
    serve.transfer = TransferRole::Consume(source);
    let id = rigs[to].submit(serve);
    let now = rigs[to].now;
    rigs[to].advance(now);
    let (_, wanted) = rigs[to].pulls.pop().expect("asked to pull");
    let images = rigs[from].engine.export(&wanted.request, &wanted.blocks);
    rigs[to].engine.pull_arrived(now, id, images);
    rigs[to].finish(id);
    rigs[from].engine.release(&wanted.request);
    rigs[to].texts.remove(&id).unwrap()
}
