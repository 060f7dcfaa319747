//! KV between engines: what is right, what is wrong, and what goes missing.

use vocabulary::Tokens;

use super::*;
use crate::Taker;

/// Run a producer's leg and return what its consumer must send.
fn produce(producer: &mut Rig, prompt: &[u32]) -> Source {
    let mut ask = request(prompt, 1);
    ask.transfer = Transfer::Produce;
    let id = producer.submit(ask);
    let handoff = producer.finish(id).handoff.expect("a producer's leg that ended by length hands off");
    assert_eq!(handoff.tokens as usize, prompt.len());
    Source {
        engine: "p".into(),
        request: handoff.request,
        blocks: handoff.blocks,
        host: "127.0.0.1".into(),
        port: 5600,
    }
}

/// Run a consumer's leg, fetching what it asks for from the producer.
fn consume(consumer: &mut Rig, producer: &mut Rig, (prompt, source): (&[u32], &Source)) -> Vec<u32> {
    let mut ask = request(prompt, 10);
    ask.transfer = Transfer::Consume(source.clone());
    let id = consumer.submit(ask);
    consumer.advance(consumer.now);
    let (pulling, wanted) = consumer.pulls.pop().expect("the driver is asked to pull");
    assert_eq!(pulling, id);
    let images = producer.engine.export(&wanted.request, &wanted.blocks);
    consumer.engine.arrived(consumer.now, id, images);
    consumer.finish(id);
    producer.engine.release(&consumer.pulled.pop().expect("the producer is told").request);
    consumer.texts.remove(&id).unwrap()
}

fn pair() -> (Rig, Rig) {
    (Rig::new(small()), Rig::new(small()))
}

#[test]
fn a_pulled_prompt_gets_the_answer_of_a_computed_one() {
    for tokens in [1, 3, 4, 5, 20, 21, 63] {
        let (mut p, mut d) = pair();
        let prompt = prompt(1, tokens);
        let source = produce(&mut p, &prompt);
        assert_eq!(source.blocks.len(), (tokens as usize).div_ceil(4));
        assert_eq!(consume(&mut d, &mut p, (&prompt, &source)), alone(&prompt, 10), "{tokens} tokens");
        assert_eq!(p.engine.stats().blocks_used, 0, "released");
    }
}

#[test]
fn a_transfer_is_counted_as_external_and_its_blocks_are_told() {
    let (mut p, mut d) = pair();
    let prompt = prompt(1, 21);
    let source = produce(&mut p, &prompt);
    consume(&mut d, &mut p, (&prompt, &source));
    let stats = d.engine.stats();
    assert_eq!((stats.prompt.external, stats.prompt.computed, stats.prompt.cached), (21, 0, 0));
    assert_eq!((stats.transfers.done, stats.transfers.bytes.0), (1, 24_000));
    let KvEvent::Stored(stored) = &d.all_events()[0] else { panic!("stored") };
    assert_eq!((stored.hashes.len(), stored.parent), (5, None));
    assert_eq!(stored.tokens, prompt[..20]);
    let again = d.submit(request(&prompt, 1));
    assert_eq!(d.finish(again).cached, 20, "and they are found");
}

#[test]
fn a_transfer_takes_latency_and_bandwidth_and_shares_the_link() {
    let (mut p, mut d) = pair();
    let (a, b) = (prompt(1, 20), prompt(2, 20));
    let sources = [produce(&mut p, &a), produce(&mut p, &b)];
    let ids: Vec<RequestId> = [a, b]
        .iter()
        .zip(sources)
        .map(|(prompt, source)| {
            let mut ask = request(prompt, 1);
            ask.transfer = Transfer::Consume(source);
            d.submit(ask)
        })
        .collect();
    d.advance(Micros(0));
    for (id, wanted) in std::mem::take(&mut d.pulls) {
        d.engine.arrived(Micros(0), id, p.engine.export(&wanted.request, &wanted.blocks));
    }
    d.finish(ids[1]);
    // 20 KB each at 1 MB/s, one after the other, 500 us latency; then the last token at 100 us.
    assert_eq!(d.finishes[&ids[0]].first_token, Micros(20_600));
    assert_eq!(d.finishes[&ids[1]].first_token, Micros(40_600));
}

#[test]
fn only_blocks_that_lack_are_pulled() {
    let (mut p, mut d) = pair();
    let long = prompt(1, 40);
    d.answer(request(&long[..22], 1));
    let source = produce(&mut p, &long);
    assert_eq!(consume(&mut d, &mut p, (&long, &source)), alone(&long, 10));
    let stats = d.engine.stats();
    assert_eq!(stats.transfers.bytes.0, 5 * 4_000, "five of ten blocks");
    assert_eq!((stats.prompt.cached, stats.prompt.external), (20, 20));
}

#[test]
fn a_holder_with_a_warm_cache_can_play_the_producer() {
    let (mut owner, mut target) = pair();
    let history = prompt(1, 40);
    owner.answer(request(&history, 9));
    let mut leg = request(&history[..36], 1);
    leg.transfer = Transfer::Produce;
    let id = owner.submit(leg);
    let handoff = owner.finish(id).handoff.unwrap();
    assert_eq!(handoff.cached, 32, "all but the last block, which is computed again");
    let source =
        Source { engine: "o".into(), request: handoff.request, blocks: handoff.blocks, host: "h".into(), port: 1 };
    consume(&mut target, &mut owner, (&history[..36], &source));
    let serve = target.submit(request(&history, 10));
    assert_eq!(target.finish(serve).cached, 36);
    assert_eq!(target.texts[&serve], alone(&history, 10));
}

#[test]
fn parameters_of_another_prompt_give_wrong_text_and_no_error() {
    let (mut p, mut d) = pair();
    let (mine, foreign) = (prompt(1, 21), prompt(2, 21));
    let source = produce(&mut p, &foreign);
    let text = consume(&mut d, &mut p, (&mine, &source));
    assert_eq!(text.len(), 10);
    assert_ne!(text, alone(&mine, 10));
    assert_ne!(text, alone(&foreign, 10));
}

#[test]
fn parameters_of_a_shorter_prompt_give_wrong_text() {
    let (mut p, mut d) = pair();
    let long = prompt(1, 21);
    let source = produce(&mut p, &long[..9]);
    let text = consume(&mut d, &mut p, (&long, &source));
    assert_ne!(text, alone(&long, 10));
}

#[test]
fn wrong_blocks_stay_wrong_for_who_finds_them_later() {
    let (mut p, mut d) = pair();
    let (mine, foreign) = (prompt(1, 21), prompt(2, 21));
    let source = produce(&mut p, &foreign);
    consume(&mut d, &mut p, (&mine, &source));
    let longer = prompt(1, 33);
    assert_ne!(d.answer(request(&longer, 10)), alone(&longer, 10), "the cache is poisoned");
}

#[test]
fn parameters_used_twice_give_wrong_text() {
    let (mut p, mut d) = pair();
    let mut third = Rig::new(small());
    let prompt = prompt(1, 21);
    let source = produce(&mut p, &prompt);
    assert_eq!(consume(&mut d, &mut p, (&prompt, &source)), alone(&prompt, 10));
    assert_ne!(consume(&mut third, &mut p, (&prompt, &source)), alone(&prompt, 10));
}

#[test]
fn a_lease_that_ends_frees_the_blocks_and_what_is_read_then_is_garbage() {
    let (mut p, mut d) = pair();
    let prompt = prompt(1, 21);
    let source = produce(&mut p, &prompt);
    let held = p.engine.stats().blocks_used;
    p.advance(p.now + Micros(29_000_000));
    assert_eq!((held, p.engine.stats().blocks_used), (6, 6));
    p.advance(p.now + Micros(1_000_000));
    assert_eq!((p.engine.stats().blocks_used, p.engine.stats().expired_holds), (0, 1));
    assert_ne!(consume(&mut d, &mut p, (&prompt, &source)), alone(&prompt, 10));
}

#[test]
fn held_blocks_are_not_evicted() {
    let mut p = Rig::new(Profile { blocks: 50, ..small() });
    let mut d = Rig::new(small());
    let kept = prompt(1, 80);
    let source = produce(&mut p, &kept);
    for seed in 2..6 {
        p.answer(request(&prompt(seed, 100), 1));
    }
    assert_eq!(consume(&mut d, &mut p, (&kept, &source)), alone(&kept, 10));
}

#[test]
fn an_answer_that_the_model_ended_hands_nothing_off() {
    let ended = (0..400).find_map(|seed| {
        let mut ask = request(&prompt(seed, 40), 1);
        ask.sampling.ending = Ending::Natural;
        ask.transfer = Transfer::Produce;
        let mut rig = Rig::new(small());
        let id = rig.submit(ask);
        let finish = rig.finish(id);
        (finish.reason == FinishReason::Stop).then_some(finish)
    });
    assert_eq!(ended.expect("some first token is the end").handoff, None);
}

#[test]
fn a_producer_that_does_not_answer_fails_its_consumer_after_a_while() {
    let mut d = Rig::new(small());
    let mut ask = request(&prompt(1, 9), 4);
    let source = Source { engine: "p".into(), request: "x".into(), blocks: vec![1], host: "h".into(), port: 1 };
    ask.transfer = Transfer::Consume(source);
    let id = d.submit(ask);
    d.advance(Micros(1_000));
    d.engine.pull_failed(d.now, id);
    let finish = d.finish(id);
    assert_eq!((finish.reason, d.now), (FinishReason::Error, Micros(18_801_000)));
    assert_eq!((d.engine.stats().transfers.failed, d.engine.stats().blocks_used), (1, 0));
}

#[test]
fn parameters_without_a_request_hang_and_then_kill_the_engine() {
    let mut d = Rig::new(small());
    let mut ask = request(&prompt(1, 9), 4);
    ask.transfer = Transfer::Hang;
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
fn a_consumer_that_leaves_in_mid_transfer_leaves_nothing_behind() {
    let (mut p, mut d) = pair();
    let prompt = prompt(1, 21);
    let source = produce(&mut p, &prompt);
    let mut ask = request(&prompt, 10);
    ask.transfer = Transfer::Consume(source);
    let id = d.submit(ask);
    d.advance(d.now);
    d.engine.cancel(d.now, id);
    d.engine.arrived(d.now, id, Vec::new());
    d.advance(d.now + Micros(1_000_000));
    assert_eq!((d.engine.stats().blocks_used, d.engine.stats().pulling), (0, 0));
    assert_eq!(p.engine.stats().blocks_used, 6, "the producer waits for its lease's end");
}

#[test]
fn reading_what_is_not_there_and_releasing_twice_harm_nothing() {
    let mut p = Rig::new(small());
    let source = produce(&mut p, &prompt(1, 21));
    assert!(p.engine.export(&source.request, &[9_999, 1]).is_empty(), "beyond the memory's end");
    assert_eq!(p.engine.export("nobody", &source.blocks).len(), 6);
    p.engine.release(&source.request);
    p.engine.release(&source.request);
    p.engine.release("nobody");
    assert_eq!(p.engine.stats().blocks_used, 0);
    p.engine.arrived(p.now, RequestId(77), Vec::new());
    p.engine.pull_failed(p.now, RequestId(77));
    assert_eq!(p.engine.next_event(), None);
}

#[test]
fn a_producer_that_says_more_than_one_token_hands_off_only_its_prompt() {
    let (mut p, mut d) = pair();
    let prompt = prompt(1, 18);
    let mut ask = request(&prompt, 9);
    ask.transfer = Transfer::Produce;
    let id = p.submit(ask);
    let handoff = p.finish(id).handoff.unwrap();
    assert_eq!((handoff.blocks.len(), handoff.tokens), (5, 18));
    assert_eq!(p.engine.stats().blocks_used, 5);
    let source =
        Source { engine: "p".into(), request: handoff.request, blocks: handoff.blocks, host: "h".into(), port: 1 };
    assert_eq!(consume(&mut d, &mut p, (&prompt, &source)), alone(&prompt, 10));
}

#[test]
fn a_name_used_again_gives_back_what_it_held() {
    let mut p = Rig::new(small());
    for _ in 0..2 {
        let mut ask = request(&prompt(1, 18), 1);
        ask.name = "same".into();
        ask.transfer = Transfer::Produce;
        let id = p.submit(ask);
        p.finish(id);
    }
    p.engine.release("same");
    assert_eq!(p.engine.stats().blocks_used, 0);
}

#[test]
fn consumers_wait_for_memory_before_they_pull() {
    let (mut p, mut d) = (Rig::new(small()), Rig::new(Profile { blocks: 50, ..small() }));
    let (busy, wanted) = (prompt(1, 150), prompt(2, 120));
    let source = produce(&mut p, &wanted);
    let first = d.submit(request(&busy, 10));
    d.advance(Micros(1));
    let mut ask = request(&wanted, 5);
    ask.transfer = Transfer::Consume(source);
    let second = d.submit(ask);
    d.advance(Micros(2));
    assert!(d.pulls.is_empty(), "30 blocks do not fit beside 38");
    d.finish(first);
    d.advance(d.now);
    let (id, source) = d.pulls.pop().expect("now they do");
    assert_eq!(id, second);
    d.engine.arrived(d.now, id, p.engine.export(&source.request, &source.blocks));
    d.finish(second);
    assert_eq!(d.texts[&second], alone(&wanted, 5));
}

#[test]
fn a_consumer_thrown_out_for_memory_computes_its_prompt_itself() {
    let (mut p, mut d) = (Rig::new(small()), Rig::new(Profile { blocks: 50, ..small() }));
    let (mine, other) = (prompt(1, 60), prompt(2, 60));
    let first = d.submit(request(&other, 130));
    d.advance(Micros(7_000));
    let source = produce(&mut p, &mine);
    let mut ask = request(&mine, 70);
    ask.transfer = Transfer::Consume(source);
    let second = d.submit(ask);
    while d.pulls.is_empty() {
        let next = d.engine.next_event().expect("the pull is asked for");
        d.advance(next);
    }
    let (id, source) = d.pulls.pop().unwrap();
    d.engine.arrived(d.now, id, p.engine.export(&source.request, &source.blocks));
    d.finish(first);
    d.finish(second);
    assert!(d.engine.stats().preemptions > 0);
    assert!(d.pulls.is_empty(), "it is not pulled twice");
    assert_eq!(d.texts[&second], alone(&mine, 70));
}

/// Run the consumer's leg of the bidirectional mode: its text, and what the next turn's producer must send.
fn exchange(consumer: &mut Rig, producer: &mut Rig, (prompt, source): (&[u32], &Source)) -> (Vec<u32>, Source, u32) {
    let mut ask = request(prompt, 90);
    ask.transfer = Transfer::Exchange(source.clone());
    let id = consumer.submit(ask);
    fetch(consumer, producer);
    let handoff = consumer.finish(id).handoff.expect("it keeps what it has computed");
    assert!(matches!(handoff.taker, Taker::NextTurn(_)));
    let back = Source { request: handoff.request, blocks: handoff.blocks, ..source.clone() };
    (consumer.texts.remove(&id).unwrap(), back, handoff.tokens)
}

/// What `reader` asks for comes from `holder`.
fn fetch(reader: &mut Rig, holder: &mut Rig) {
    reader.advance(reader.now);
    let (id, wanted) = reader.pulls.pop().expect("the driver is asked to pull");
    reader.engine.arrived(reader.now, id, holder.engine.export(&wanted.request, &wanted.blocks));
}

#[test]
fn the_next_turn_reads_back_what_the_consumer_has_computed_and_says_the_same() {
    for (tokens, keeps) in [(20, true), (21, true), (64, false), (63, false)] {
        let (mut p, mut d) = pair();
        let first = prompt(1, tokens);
        let source = produce(&mut p, &first);
        let (answer, back, kept) = exchange(&mut d, &mut p, (&first, &source));
        p.engine.release(&source.request);
        assert_eq!(kept, tokens + 89, "all but the last token, which nobody has computed");
        if !keeps {
            p.engine.reset_prefix_cache();
        }
        let second = [first, answer, prompt(2, 30)].concat();
        let mut leg = request(&second, 1);
        leg.transfer = Transfer::ReadBack(back, Tokens(u64::from(kept)));
        let id = p.submit(leg);
        fetch(&mut p, &mut d);
        let finish = p.finish(id);
        assert_eq!(finish.external + finish.cached, kept, "{tokens} tokens");
        d.engine.release(&p.pulled.pop().expect("the consumer is told").request);
        assert_eq!(d.engine.stats().blocks_used, 0, "released");
        let handoff = finish.handoff.unwrap();
        let source = Source { request: handoff.request, blocks: handoff.blocks, ..source };
        assert_eq!(consume(&mut d, &mut p, (&second, &source)), alone(&second, 10), "{tokens} tokens");
    }
}

#[test]
fn what_is_read_back_for_another_prompt_is_wrong_and_no_error() {
    let (mut p, mut d) = pair();
    let first = prompt(1, 21);
    let source = produce(&mut p, &first);
    let (mut answer, back, kept) = exchange(&mut d, &mut p, (&first, &source));
    answer[40] += 1;
    let second = [first, answer, prompt(2, 30)].concat();
    let mut leg = request(&second, 1);
    leg.transfer = Transfer::ReadBack(back, Tokens(u64::from(kept)));
    let id = p.submit(leg);
    fetch(&mut p, &mut d);
    let handoff = p.finish(id).handoff.unwrap();
    let source = Source { request: handoff.request, blocks: handoff.blocks, ..source };
    assert_ne!(consume(&mut d, &mut p, (&second, &source)), alone(&second, 10));
}

#[test]
fn little_is_computed_rather_than_read_back_and_its_keeper_is_told() {
    let (mut p, mut d) = pair();
    let first = prompt(1, 21);
    let source = produce(&mut p, &first);
    let (answer, back, kept) = exchange(&mut d, &mut p, (&first, &source));
    let second = [first, answer].concat();
    p.answer(request(&second[..kept as usize - 40], 1));
    let mut leg = request(&second, 1);
    leg.transfer = Transfer::ReadBack(back.clone(), Tokens(u64::from(kept)));
    let id = p.submit(leg);
    assert_eq!((p.finish(id).external, p.pulls.len()), (0, 0));
    assert_eq!(p.pulled.pop().map(|source| source.request), Some(back.request));
}
