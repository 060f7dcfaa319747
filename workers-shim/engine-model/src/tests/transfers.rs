//! Tests of KV transfers between engines: correct, corrupted, and lost.

use vocabulary::Tokens;

use super::*;
use crate::HoldPurpose;

/// Runs a producer's leg and returns what its consumer must send.
fn produce(producer: &mut EngineHarness, prompt: &[u32]) -> RemoteBlocks {
    let mut ask = request(prompt, 1);
    ask.transfer = TransferRole::Produce;
    let id = producer.submit(ask);
    let handoff = producer.finish(id).handoff.expect("a producer's leg that ended by length hands off");
    assert_eq!(handoff.tokens as usize, prompt.len());
    RemoteBlocks {
        engine: "p".into(),
        request: handoff.request,
        blocks: handoff.blocks,
        host: "127.0.0.1".into(),
        port: 5600,
    }
}

/// Runs a consumer's leg, with the requested blocks fetched from the producer.
fn consume(
    consumer: &mut EngineHarness,
    producer: &mut EngineHarness,
    (prompt, source): (&[u32], &RemoteBlocks),
) -> Vec<u32> {
    let mut ask = request(prompt, 10);
    ask.transfer = TransferRole::Consume(source.clone());
    let id = consumer.submit(ask);
    consumer.advance(consumer.now);
    let (pulling, wanted) = consumer.pulls.pop().expect("the driver is asked to pull");
    assert_eq!(pulling, id);
    let images = producer.engine.export(&wanted.request, &wanted.blocks);
    consumer.engine.pull_arrived(consumer.now, id, images);
    consumer.finish(id);
    producer.engine.release(&consumer.pulled.pop().expect("the producer is told").request);
    consumer.texts.remove(&id).unwrap()
}

fn pair() -> (EngineHarness, EngineHarness) {
    (EngineHarness::new(small_profile()), EngineHarness::new(small_profile()))
}

#[test]
fn pulled_prompt_gives_the_same_answer_as_a_computed_one() {
    for tokens in [1, 3, 4, 5, 20, 21, 63] {
        let (mut p, mut d) = pair();
        let prompt = prompt(1, tokens);
        let source = produce(&mut p, &prompt);
        assert_eq!(source.blocks.len(), (tokens as usize).div_ceil(4));
        assert_eq!(consume(&mut d, &mut p, (&prompt, &source)), answer_of_fresh_engine(&prompt, 10), "{tokens} tokens");
        assert_eq!(p.engine.stats().blocks_used, 0, "released");
    }
}

#[test]
fn pulled_blocks_count_as_external_and_are_reported() {
    let (mut p, mut d) = pair();
    let prompt = prompt(1, 21);
    let source = produce(&mut p, &prompt);
    consume(&mut d, &mut p, (&prompt, &source));
    let stats = d.engine.stats();
    assert_eq!((stats.prompt.external, stats.prompt.computed, stats.prompt.cached), (21, 0, 0));
    assert_eq!((stats.transfers.done, stats.transfers.bytes.0), (1, 24_000));
    let PrefixCacheChange::Stored(stored) = &d.all_events()[0] else { panic!("stored") };
    assert_eq!((stored.hashes.len(), stored.parent), (5, None));
    assert_eq!(stored.tokens, prompt[..20]);
    let again = d.submit(request(&prompt, 1));
    assert_eq!(d.finish(again).cached, 20, "and they are found");
}

#[test]
fn transfers_take_latency_and_bandwidth_and_share_the_link() {
    let (mut p, mut d) = pair();
    let (a, b) = (prompt(1, 20), prompt(2, 20));
    let sources = [produce(&mut p, &a), produce(&mut p, &b)];
    let ids: Vec<EngineRequestId> = [a, b]
        .iter()
        .zip(sources)
        .map(|(prompt, source)| {
            let mut ask = request(prompt, 1);
            ask.transfer = TransferRole::Consume(source);
            d.submit(ask)
        })
        .collect();
    d.advance(Micros(0));
    for (id, wanted) in std::mem::take(&mut d.pulls) {
        d.engine.pull_arrived(Micros(0), id, p.engine.export(&wanted.request, &wanted.blocks));
    }
    d.finish(ids[1]);
    // 20 KB each at 1 MB/s, one after the other, 500 us latency; then the last token takes 100 us.
    assert_eq!(d.finishes[&ids[0]].first_token, Micros(20_600));
    assert_eq!(d.finishes[&ids[1]].first_token, Micros(40_600));
}

#[test]
fn only_missing_blocks_are_pulled() {
    let (mut p, mut d) = pair();
    let long = prompt(1, 40);
    d.answer(request(&long[..22], 1));
    let source = produce(&mut p, &long);
    assert_eq!(consume(&mut d, &mut p, (&long, &source)), answer_of_fresh_engine(&long, 10));
    let stats = d.engine.stats();
    assert_eq!(stats.transfers.bytes.0, 5 * 4_000, "five of ten blocks");
    assert_eq!((stats.prompt.cached, stats.prompt.external), (20, 20));
}

#[test]
fn worker_with_a_warm_cache_can_act_as_producer() {
    let (mut owner, mut target) = pair();
    let history = prompt(1, 40);
    owner.answer(request(&history, 9));
    let mut leg = request(&history[..36], 1);
    leg.transfer = TransferRole::Produce;
    let id = owner.submit(leg);
    let handoff = owner.finish(id).handoff.unwrap();
    assert_eq!(handoff.cached, 32, "all but the last block, which is computed again");
    let source = RemoteBlocks {
        engine: "o".into(),
        request: handoff.request,
        blocks: handoff.blocks,
        host: "h".into(),
        port: 1,
    };
    consume(&mut target, &mut owner, (&history[..36], &source));
    let serve = target.submit(request(&history, 10));
    assert_eq!(target.finish(serve).cached, 36);
    assert_eq!(target.texts[&serve], answer_of_fresh_engine(&history, 10));
}

#[test]
fn params_of_another_prompt_give_wrong_text_without_error() {
    let (mut p, mut d) = pair();
    let (mine, foreign) = (prompt(1, 21), prompt(2, 21));
    let source = produce(&mut p, &foreign);
    let text = consume(&mut d, &mut p, (&mine, &source));
    assert_eq!(text.len(), 10);
    assert_ne!(text, answer_of_fresh_engine(&mine, 10));
    assert_ne!(text, answer_of_fresh_engine(&foreign, 10));
}

#[test]
fn params_of_a_shorter_prompt_give_wrong_text() {
    let (mut p, mut d) = pair();
    let long = prompt(1, 21);
    let source = produce(&mut p, &long[..9]);
    let text = consume(&mut d, &mut p, (&long, &source));
    assert_ne!(text, answer_of_fresh_engine(&long, 10));
}

#[test]
fn wrong_blocks_poison_later_cache_hits() {
    let (mut p, mut d) = pair();
    let (mine, foreign) = (prompt(1, 21), prompt(2, 21));
    let source = produce(&mut p, &foreign);
    consume(&mut d, &mut p, (&mine, &source));
    let longer = prompt(1, 33);
    assert_ne!(d.answer(request(&longer, 10)), answer_of_fresh_engine(&longer, 10), "the cache is poisoned");
}

#[test]
fn params_used_twice_give_wrong_text() {
    let (mut p, mut d) = pair();
    let mut third = EngineHarness::new(small_profile());
    let prompt = prompt(1, 21);
    let source = produce(&mut p, &prompt);
    assert_eq!(consume(&mut d, &mut p, (&prompt, &source)), answer_of_fresh_engine(&prompt, 10));
    assert_ne!(consume(&mut third, &mut p, (&prompt, &source)), answer_of_fresh_engine(&prompt, 10));
}

#[test]
fn expired_lease_frees_the_blocks_and_later_reads_are_garbage() {
    let (mut p, mut d) = pair();
    let prompt = prompt(1, 21);
    let source = produce(&mut p, &prompt);
    let held = p.engine.stats().blocks_used;
    p.advance(p.now + Micros(29_000_000));
    assert_eq!((held, p.engine.stats().blocks_used), (6, 6));
    p.advance(p.now + Micros(1_000_000));
    assert_eq!((p.engine.stats().blocks_used, p.engine.stats().expired_holds), (0, 1));
    assert_ne!(consume(&mut d, &mut p, (&prompt, &source)), answer_of_fresh_engine(&prompt, 10));
}

#[test]
fn held_blocks_are_not_evicted() {
    let mut p = EngineHarness::new(EngineProfile { num_gpu_blocks: 50, ..small_profile() });
    let mut d = EngineHarness::new(small_profile());
    let kept = prompt(1, 80);
    let source = produce(&mut p, &kept);
    for seed in 2..6 {
        p.answer(request(&prompt(seed, 100), 1));
    }
    assert_eq!(consume(&mut d, &mut p, (&kept, &source)), answer_of_fresh_engine(&kept, 10));
}

#[test]
fn answer_that_the_model_ended_has_no_handoff() {
    let ended = (0..400).find_map(|seed| {
        let mut ask = request(&prompt(seed, 40), 1);
        ask.sampling.eos_policy = EosPolicy::Natural;
        ask.transfer = TransferRole::Produce;
        let mut harness = EngineHarness::new(small_profile());
        let id = harness.submit(ask);
        let finish = harness.finish(id);
        (finish.reason == FinishReason::Stop).then_some(finish)
    });
    assert_eq!(ended.expect("some first token is the end").handoff, None);
}

#[test]
fn unresponsive_producer_fails_its_consumer_after_a_timeout() {
    let mut d = EngineHarness::new(small_profile());
    let mut ask = request(&prompt(1, 9), 4);
    let source = RemoteBlocks { engine: "p".into(), request: "x".into(), blocks: vec![1], host: "h".into(), port: 1 };
    ask.transfer = TransferRole::Consume(source);
    let id = d.submit(ask);
    d.advance(Micros(1_000));
    d.engine.pull_failed(d.now, id);
    let finish = d.finish(id);
    assert_eq!((finish.reason, d.now), (FinishReason::Error, Micros(18_801_000)));
    assert_eq!((d.engine.stats().transfers.failed, d.engine.stats().blocks_used), (1, 0));
}

#[test]
fn params_without_a_request_hang_and_then_kill_the_engine() {
    let mut d = EngineHarness::new(small_profile());
    let mut ask = request(&prompt(1, 9), 4);
    ask.transfer = TransferRole::Hang;
    let hung = d.submit(ask);
    let other = d.submit(request(&prompt(2, 9), 150));
    d.advance(Micros(60_000));
    assert!(!d.finishes.contains_key(&hung) && !d.engine.is_dead());
    d.engine.cancel(d.now, hung);
    d.advance(d.now);
    assert!(d.engine.is_dead());
    assert_eq!(reason(&d.finishes[&other]), FinishReason::Error);
}

#[test]
fn consumer_cancelled_mid_transfer_frees_everything() {
    let (mut p, mut d) = pair();
    let prompt = prompt(1, 21);
    let source = produce(&mut p, &prompt);
    let mut ask = request(&prompt, 10);
    ask.transfer = TransferRole::Consume(source);
    let id = d.submit(ask);
    d.advance(d.now);
    d.engine.cancel(d.now, id);
    d.engine.pull_arrived(d.now, id, Vec::new());
    d.advance(d.now + Micros(1_000_000));
    assert_eq!((d.engine.stats().blocks_used, d.engine.stats().pulling), (0, 0));
    assert_eq!(p.engine.stats().blocks_used, 6, "the producer waits for its lease's end");
}

#[test]
fn unknown_reads_and_double_release_are_harmless() {
    let mut p = EngineHarness::new(small_profile());
    let source = produce(&mut p, &prompt(1, 21));
    assert!(p.engine.export(&source.request, &[9_999, 1]).is_empty(), "beyond the memory's end");
    assert_eq!(p.engine.export("nobody", &source.blocks).len(), 6);
    p.engine.release(&source.request);
    p.engine.release(&source.request);
    p.engine.release("nobody");
    assert_eq!(p.engine.stats().blocks_used, 0);
    p.engine.pull_arrived(p.now, EngineRequestId(77), Vec::new());
    p.engine.pull_failed(p.now, EngineRequestId(77));
    assert_eq!(p.engine.next_event(), None);
}

#[test]
fn producer_that_decodes_further_hands_off_only_the_prompt() {
    let (mut p, mut d) = pair();
    let prompt = prompt(1, 18);
    let mut ask = request(&prompt, 9);
    ask.transfer = TransferRole::Produce;
    let id = p.submit(ask);
    let handoff = p.finish(id).handoff.unwrap();
    assert_eq!((handoff.blocks.len(), handoff.tokens), (5, 18));
    assert_eq!(p.engine.stats().blocks_used, 5);
    let source = RemoteBlocks {
        engine: "p".into(),
        request: handoff.request,
        blocks: handoff.blocks,
        host: "h".into(),
        port: 1,
    };
    assert_eq!(consume(&mut d, &mut p, (&prompt, &source)), answer_of_fresh_engine(&prompt, 10));
}

#[test]
fn reused_request_name_releases_its_previous_blocks() {
    let mut p = EngineHarness::new(small_profile());
    for _ in 0..2 {
        let mut ask = request(&prompt(1, 18), 1);
        ask.name = "same".into();
        ask.transfer = TransferRole::Produce;
        let id = p.submit(ask);
        p.finish(id);
    }
    p.engine.release("same");
    assert_eq!(p.engine.stats().blocks_used, 0);
}

#[test]
fn consumers_wait_for_memory_before_pulling() {
    let (mut p, mut d) = (
        EngineHarness::new(small_profile()),
        EngineHarness::new(EngineProfile { num_gpu_blocks: 50, ..small_profile() }),
    );
    let (busy, wanted) = (prompt(1, 150), prompt(2, 120));
    let source = produce(&mut p, &wanted);
    let first = d.submit(request(&busy, 10));
    d.advance(Micros(1));
    let mut ask = request(&wanted, 5);
    ask.transfer = TransferRole::Consume(source);
    let second = d.submit(ask);
    d.advance(Micros(2));
    assert!(d.pulls.is_empty(), "30 blocks do not fit beside 38");
    d.finish(first);
    d.advance(d.now);
    let (id, source) = d.pulls.pop().expect("now they do");
    assert_eq!(id, second);
    d.engine.pull_arrived(d.now, id, p.engine.export(&source.request, &source.blocks));
    d.finish(second);
    assert_eq!(d.texts[&second], answer_of_fresh_engine(&wanted, 5));
}

#[test]
fn preempted_consumer_recomputes_its_prompt() {
    let (mut p, mut d) = (
        EngineHarness::new(small_profile()),
        EngineHarness::new(EngineProfile { num_gpu_blocks: 50, ..small_profile() }),
    );
    let (mine, other) = (prompt(1, 60), prompt(2, 60));
    let first = d.submit(request(&other, 130));
    d.advance(Micros(7_000));
    let source = produce(&mut p, &mine);
    let mut ask = request(&mine, 70);
    ask.transfer = TransferRole::Consume(source);
    let second = d.submit(ask);
    while d.pulls.is_empty() {
        let next = d.engine.next_event().expect("the pull is asked for");
        d.advance(next);
    }
    let (id, source) = d.pulls.pop().unwrap();
    d.engine.pull_arrived(d.now, id, p.engine.export(&source.request, &source.blocks));
    d.finish(first);
    d.finish(second);
    assert!(d.engine.stats().preemptions > 0);
    assert!(d.pulls.is_empty(), "it is not pulled twice");
    assert_eq!(d.texts[&second], answer_of_fresh_engine(&mine, 70));
}

/// Runs the consumer's leg of the bidirectional mode; returns its text, and what the next turn's producer must send.
fn run_bidirectional_leg(
    consumer: &mut EngineHarness,
    producer: &mut EngineHarness,
    (prompt, source): (&[u32], &RemoteBlocks),
) -> (Vec<u32>, RemoteBlocks, u32) {
    let mut ask = request(prompt, 90);
    ask.transfer = TransferRole::Exchange(source.clone());
    let id = consumer.submit(ask);
    serve_pulls(consumer, producer);
    let handoff = consumer.finish(id).handoff.expect("it keeps what it has computed");
    assert!(matches!(handoff.target, HoldPurpose::NextTurn(_)));
    let back = RemoteBlocks { request: handoff.request, blocks: handoff.blocks, ..source.clone() };
    (consumer.texts.remove(&id).unwrap(), back, handoff.tokens)
}

/// Fetches the blocks that `reader` requests from `holder`.
fn serve_pulls(reader: &mut EngineHarness, holder: &mut EngineHarness) {
    reader.advance(reader.now);
    let (id, wanted) = reader.pulls.pop().expect("the driver is asked to pull");
    reader.engine.pull_arrived(reader.now, id, holder.engine.export(&wanted.request, &wanted.blocks));
}

#[test]
fn reverse_pull_of_the_consumers_kv_keeps_the_answer() {
    for (tokens, keeps) in [(20, true), (21, true), (64, false), (63, false)] {
        let (mut p, mut d) = pair();
        let first = prompt(1, tokens);
        let source = produce(&mut p, &first);
        let (answer, back, kept) = run_bidirectional_leg(&mut d, &mut p, (&first, &source));
        p.engine.release(&source.request);
        assert_eq!(kept, tokens + 89, "all but the last token, which nobody has computed");
        if !keeps {
            p.engine.reset_prefix_cache();
        }
        let second = [first, answer, prompt(2, 30)].concat();
        let mut leg = request(&second, 1);
        leg.transfer = TransferRole::ReversePull(back, Tokens(u64::from(kept)));
        let id = p.submit(leg);
        serve_pulls(&mut p, &mut d);
        let finish = p.finish(id);
        assert_eq!(finish.external + finish.cached, kept, "{tokens} tokens");
        d.engine.release(&p.pulled.pop().expect("the consumer is told").request);
        assert_eq!(d.engine.stats().blocks_used, 0, "released");
        let handoff = finish.handoff.unwrap();
        let source = RemoteBlocks { request: handoff.request, blocks: handoff.blocks, ..source };
        assert_eq!(consume(&mut d, &mut p, (&second, &source)), answer_of_fresh_engine(&second, 10), "{tokens} tokens");
    }
}

#[test]
fn reverse_pull_for_another_prompt_gives_wrong_text_without_error() {
    let (mut p, mut d) = pair();
    let first = prompt(1, 21);
    let source = produce(&mut p, &first);
    let (mut answer, back, kept) = run_bidirectional_leg(&mut d, &mut p, (&first, &source));
    answer[40] += 1;
    let second = [first, answer, prompt(2, 30)].concat();
    let mut leg = request(&second, 1);
    leg.transfer = TransferRole::ReversePull(back, Tokens(u64::from(kept)));
    let id = p.submit(leg);
    serve_pulls(&mut p, &mut d);
    let handoff = p.finish(id).handoff.unwrap();
    let source = RemoteBlocks { request: handoff.request, blocks: handoff.blocks, ..source };
    assert_ne!(consume(&mut d, &mut p, (&second, &source)), answer_of_fresh_engine(&second, 10));
}

#[test]
fn short_reverse_pull_is_recomputed_and_the_holder_is_released() {
    let (mut p, mut d) = pair();
    let first = prompt(1, 21);
    let source = produce(&mut p, &first);
    let (answer, back, kept) = run_bidirectional_leg(&mut d, &mut p, (&first, &source));
    let second = [first, answer].concat();
    p.answer(request(&second[..kept as usize - 40], 1));
    let mut leg = request(&second, 1);
    leg.transfer = TransferRole::ReversePull(back.clone(), Tokens(u64::from(kept)));
    let id = p.submit(leg);
    assert_eq!((p.finish(id).external, p.pulls.len()), (0, 0));
    assert_eq!(p.pulled.pop().map(|source| source.request), Some(back.request));
}
