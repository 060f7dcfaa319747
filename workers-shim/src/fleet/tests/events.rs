//! Tests of residency from real event streams: simulated workers with faults, and a publisher with a short replay
//! buffer.

use std::num::NonZeroU64;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use vocabulary::WorkerHealth;

use super::engine::{ForgetfulPublisher, cleared, stored};
use super::*;
use crate::sim::{EventFault, EventOptions};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn computed_blocks_are_known_exactly() {
    let worker = sim(sim_options()).await;
    let watch = FleetHarness::at(worker.address());
    watch.until_exact().await;
    let prompt = prompt(1, 44);
    let answer = ask(worker.address(), &prompt, 20).await;
    // Five engine blocks of the prompt, then blocks with prompt and answer: 8 * 8 = 64 tokens; the last one is not
    // certain.
    watch.until("stored", |watch| watch.depth(&prompt) == 11).await;
    let said: Vec<u32> =
        answer["choices"][0]["text"].as_str().unwrap().split_whitespace().map(|word| word.parse().unwrap()).collect();
    let whole = [&prompt[..], &said].concat();
    watch.until("answer stored", |watch| watch.depth(&whole) >= 14).await;
    assert_eq!(watch.view(0).kv_index_state, KvIndexState::Exact);
    let counts = watch.fleet.events(watch.id(0)).unwrap();
    assert_eq!((counts.undecodable, counts.unknown_blocks, counts.gaps), (0, 0, 0));
    assert!(counts.batches > 0 && counts.blocks >= 7 && counts.lag < vocabulary::Micros(5_000_000), "{counts:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_fleet_catches_up_by_replay() {
    let worker = sim(sim_options()).await;
    for number in 0..6 {
        ask(worker.address(), &prompt(number, 40), 1).await;
    }
    let watch = FleetHarness::at(worker.address());
    watch.until_exact().await;
    for number in 0..6 {
        watch.until("replayed", |watch| watch.depth(&prompt(number, 40)) == 10).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn index_stays_correct_under_duplicates_gaps_and_evictions() {
    let fault = EventFault { duplicate: NonZeroU64::new(2), gap: NonZeroU64::new(3) };
    let events = EventOptions { fault, ..EventOptions::default() };
    let worker = sim(SimOptions { events, ..sim_options() }).await;
    let (faulty, late) = (FleetHarness::at(worker.address()), async || {
        let late = FleetHarness::at(worker.address());
        late.until_exact().await;
        late
    });
    faulty.until_exact().await;
    // 64 blocks of 8 tokens: twenty prompts of ten blocks evict each other, while two of them are repeated.
    for number in 0..20 {
        ask(worker.address(), &prompt(number, 80), 1).await;
        ask(worker.address(), &prompt(number % 2, 80), 1).await;
    }
    let late = late().await;
    for number in 0..20 {
        let prompt = prompt(number, 80);
        let depth = late.depth(&prompt);
        faulty.until(&format!("{depth} blocks of prompt {number}"), |watch| watch.depth(&prompt) == depth).await;
    }
    assert!(late.depth(&prompt(1, 80)) > 0 && late.depth(&prompt(2, 80)) == 0, "both outcomes occur");
    let counts = faulty.fleet.events(faulty.id(0)).unwrap();
    assert!(counts.gaps > 3 && counts.replays > counts.gaps, "{counts:?}");
    assert_eq!(faulty.view(0).kv_index_state, KvIndexState::Exact);
    assert!(faulty.index.read().blocks() <= 2 * 64, "no more than the cache holds");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restarted_worker_keeps_no_previous_blocks() {
    let worker = sim(sim_options()).await;
    let address = worker.address();
    let endpoint = |text: &str| text.strip_prefix("tcp://").unwrap().parse::<SocketAddr>().unwrap();
    let (live, replay) = (endpoint(worker.events_endpoint()), endpoint(worker.replay_endpoint()));
    let watch = FleetHarness::at(address);
    watch.until_exact().await;
    ask(address, &prompt(1, 40), 1).await;
    watch.until("stored", |watch| watch.depth(&prompt(1, 40)) == 10).await;
    let first = watch.view(0).incarnation;
    drop(worker);
    watch.until("unreachable", |watch| watch.view(0).health == WorkerHealth::Unreachable).await;
    let events = EventOptions { listen: live, replay, ..EventOptions::default() };
    let again = sim_at_reused_address(SimOptions { listen: address, events, ..sim_options() }).await;
    watch.until("another life", |watch| watch.view(0).incarnation > first).await;
    watch.until("forgotten", |watch| watch.depth(&prompt(1, 40)) == 0).await;
    watch.until_exact().await;
    ask(again.address(), &prompt(2, 40), 1).await;
    watch.until("stored", |watch| watch.depth(&prompt(2, 40)) == 10).await;
    assert_eq!(watch.depth(&prompt(1, 40)), 0);
    watch.until("swept", |watch| watch.index.read().blocks() == 10).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cleared_engine_cache_clears_the_index() {
    let worker = sim(sim_options()).await;
    let watch = FleetHarness::at(worker.address());
    watch.until_exact().await;
    ask(worker.address(), &prompt(1, 40), 1).await;
    watch.until("stored", |watch| watch.depth(&prompt(1, 40)) == 10).await;
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    client.post(format!("{}/reset_prefix_cache", url(worker.address()))).send().await.unwrap();
    // The engine publishes it with its next step.
    ask(worker.address(), &prompt(2, 40), 1).await;
    watch.until("cleared", |watch| watch.depth(&prompt(1, 40)) == 0 && watch.depth(&prompt(2, 40)) == 10).await;
    assert_eq!(watch.view(0).kv_index_state, KvIndexState::Exact);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn indivisible_block_size_falls_back_to_approximation() {
    let odd = SimOptions { profile: EngineProfile { block_size: 10, ..sim_options().profile }, ..sim_options() };
    let worker = sim(odd).await;
    let watch = FleetHarness::at(worker.address());
    watch.until_exact().await;
    ask(worker.address(), &prompt(1, 40), 1).await;
    watch
        .until("a misfit", |watch| {
            watch.inexact_reason().contains("`models.tiny.block_size` to a number that divides 10")
        })
        .await;
    // The fleet's view of a worker follows its sources with a delay.
    watch.until("guesses", |watch| watch.view(0).kv_index_state == KvIndexState::Approximate).await;
    watch.fleet.note_routed(watch.id(0), DpRank(0), served(&[&chain(&prompt(1, 40))]));
    assert_eq!(watch.depth(&prompt(1, 40)), 10);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unrecoverable_loss_stays_degraded_until_the_cache_is_cleared() {
    let mut engine = ForgetfulPublisher::start().await;
    engine.publish(stored(1, &prompt(1, 8)), false).await;
    engine.publish(stored(2, &prompt(2, 8)), true).await;
    let watch = FleetHarness::at(engine.address);
    watch.until("replayed", |watch| watch.depth(&prompt(2, 8)) == 2).await;
    assert_eq!(watch.depth(&prompt(1, 8)), 0);
    watch.until("degraded", |watch| watch.view(0).kv_index_state == KvIndexState::Degraded).await;
    engine.publish(Bytes::from_static(b"\xc1"), true).await;
    engine.publish(stored(3, &prompt(3, 8)), true).await;
    watch.until("going on", |watch| watch.depth(&prompt(3, 8)) == 2).await;
    assert_eq!(watch.view(0).kv_index_state, KvIndexState::Degraded);
    engine.publish(cleared(), true).await;
    watch.until_exact().await;
    assert_eq!((watch.depth(&prompt(3, 8)), watch.fleet.events(watch.id(0)).unwrap().undecodable), (0, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_dropped_during_a_replay_are_requested_again() {
    let mut engine = ForgetfulPublisher::start().await;
    engine.replay_limit.store(3, Ordering::Relaxed);
    for number in 0..12 {
        engine.publish(stored(number, &prompt(number as u32, 8)), true).await;
    }
    let watch = FleetHarness::at(engine.address);
    watch.until_exact().await;
    for number in 0..12 {
        assert_eq!(watch.depth(&prompt(number, 8)), 2, "prompt {number}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replaced_process_is_detected_before_its_events_are_applied() {
    let mut engine = ForgetfulPublisher::start().await;
    engine.publish(stored(1, &prompt(1, 8)), true).await;
    let watch = FleetHarness::at(engine.address);
    watch.until_exact().await;
    watch.until("stored", |watch| watch.depth(&prompt(1, 8)) == 2).await;
    // Restarted, with higher numbers than before: the numbers alone look like a gap.
    engine.started.fetch_add(100, Ordering::Relaxed);
    engine.buffer.send_modify(Vec::clear);
    for number in 2..6 {
        engine.publish(stored(number, &prompt(number as u32, 8)), true).await;
    }
    engine.buffer.send_modify(|buffer| {
        for (sequence, (number, _)) in buffer.iter_mut().enumerate() {
            *number = sequence as u64;
        }
    });
    watch.until("forgotten", |watch| watch.depth(&prompt(1, 8)) == 0).await;
    for number in 2..6 {
        watch.until("heard", |watch| watch.depth(&prompt(number, 8)) == 2).await;
    }
    watch.until_exact().await;
}
