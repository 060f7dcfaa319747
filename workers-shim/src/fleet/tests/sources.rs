//! Event sources that are lost, never come up, or are nobody knows whose.

use std::sync::atomic::Ordering;

use super::engine::{Forgetful, Way, Wire, cleared, removed, stored, stored_after};
use super::*;
use crate::events::SourceCount;

/// A worker whose events come over a wire.
fn over(wire: &Wire, worker: SocketAddr, replay: Option<&str>) -> Watch {
    let events = EventsAt::Configured { live: wire.endpoint.clone(), replay: replay.map(str::to_owned) };
    Watch::over(vec![WorkerSpec { events, ..WorkerSpec::at(&url(worker), Role::Hybrid) }])
}

fn heard(watch: &Watch) -> (usize, Knowledge) {
    let SourceCount { configured, connected } = watch.fleet.event_sources(watch.id(0)).unwrap();
    assert_eq!(configured, 1);
    (connected, watch.view(0).knowledge)
}

async fn a_lost_connection_is_noticed(loss: Way) {
    let worker = sim(sim_options()).await;
    let wire = Wire::to(worker.events_endpoint()).await;
    let watch = over(&wire, worker.address(), Some(worker.replay_endpoint()));
    watch.until_exact().await;
    assert_eq!((heard(&watch), watch.fleet.doubt(watch.id(0))), ((1, Knowledge::Exact), None));
    wire.make(loss);
    watch.until("in doubt", |watch| heard(watch) == (0, Knowledge::Degraded)).await;
    let doubt = watch.doubt();
    assert!(doubt.contains(&wire.endpoint) && doubt.contains("`events`"), "{doubt}");
    ask(worker.address(), &prompt(1, 40), 1).await;
    assert_eq!(watch.depth(&prompt(1, 40)), 0);
    wire.make(Way::Open);
    watch.until_exact().await;
    assert_eq!((heard(&watch), watch.depth(&prompt(1, 40))), ((1, Knowledge::Exact), 10), "what was missed is there");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_whose_event_connection_is_closed_is_in_doubt_until_it_is_heard_again() {
    a_lost_connection_is_noticed(Way::Closed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_whose_event_connection_died_without_a_word_is_in_doubt_until_it_is_heard_again() {
    a_lost_connection_is_noticed(Way::Silent).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_never_came_up_is_configured_and_not_connected() {
    let worker = sim(sim_options()).await;
    let wire = Wire::to(worker.events_endpoint()).await;
    wire.make(Way::Closed);
    let watch = over(&wire, worker.address(), Some(worker.replay_endpoint()));
    watch.until("looked for", |watch| watch.fleet.event_sources(watch.id(0)).unwrap().configured == 1).await;
    watch.until("in doubt", |watch| heard(watch) == (0, Knowledge::Degraded)).await;
    assert!(watch.doubt().contains(&wire.endpoint), "{}", watch.doubt());
    wire.make(Way::Open);
    watch.until_exact().await;
    assert_eq!(heard(&watch).0, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_replay_a_worker_is_known_once_nothing_can_be_missing() {
    let mut engine = Forgetful::start().await;
    engine.say(cleared(), false).await;
    let wire = Wire::to(&engine.endpoints.0).await;
    let watch = over(&wire, engine.address, None);
    watch.until("looked for", |watch| watch.fleet.event_sources(watch.id(0)).unwrap().configured == 1).await;
    // What the fleet shows of a worker follows its sources a moment later.
    watch.until("connected", |watch| heard(watch) == (1, Knowledge::Degraded)).await;
    assert!(watch.doubt().contains("`replay_endpoint`"), "{}", watch.doubt());
    while heard(&watch).1 != Knowledge::Exact {
        // A fresh subscription misses some.
        engine.say(cleared(), false).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(watch.fleet.doubt(watch.id(0)), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_whose_process_nobody_can_tell_is_never_known_exactly() {
    let mut engine = Forgetful::telling("vllm:num_requests_running 0\n").await;
    engine.started.store(0, Ordering::Relaxed);
    engine.say(stored(1, &prompt(1, 8)), true).await;
    let watch = Watch::at(engine.address);
    watch.until("replayed", |watch| watch.depth(&prompt(1, 8)) == 2).await;
    let replays = |watch: &Watch| watch.fleet.events(watch.id(0)).unwrap().replays;
    watch.until("replayed again", |watch| replays(watch) >= 2).await;
    engine.say(cleared(), true).await;
    engine.say(stored(2, &prompt(2, 8)), true).await;
    watch.until("heard", |watch| watch.depth(&prompt(2, 8)) == 2).await;
    watch.until("in doubt", |watch| heard(watch) == (1, Knowledge::Degraded)).await;
    assert!(watch.doubt().contains("GET /metrics"), "{}", watch.doubt());
    engine.started.store(1_700_000_000, Ordering::Relaxed);
    watch.until_exact().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_that_were_lost_no_longer_matter_once_the_engine_has_stored_twice_what_its_largest_rank_holds() {
    let two_ranks = "vllm:cache_config_info{block_size=\"8\",engine=\"0\",num_gpu_blocks=\"2\"} 1\n\
                     vllm:cache_config_info{block_size=\"8\",engine=\"1\",num_gpu_blocks=\"4\"} 1\n";
    let mut engine = Forgetful::telling(two_ranks).await;
    engine.say(stored(0, &prompt(0, 8)), false).await;
    let watch = Watch::at(engine.address);
    watch.until("connected", |watch| watch.fleet.event_sources(watch.id(0)).unwrap().connected == 1).await;
    for number in 1..=7 {
        engine.say(stored(number, &prompt(number as u32, 8)), true).await;
    }
    watch.until("heard", |watch| watch.depth(&prompt(7, 8)) == 2).await;
    watch.until("in doubt", |watch| heard(watch) == (1, Knowledge::Degraded)).await;
    let doubt = watch.doubt();
    assert!(doubt.contains("7 of the 8 blocks") && doubt.contains("`buffer_steps`"), "{doubt}");
    engine.say(stored(8, &prompt(8, 8)), true).await;
    for number in 1..=3 {
        engine.say(removed(number), true).await;
    }
    watch.until("heard", |watch| watch.depth(&prompt(3, 8)) == 0).await;
    watch
        .until("five blocks where there is room for four: a removal was lost", |watch| {
            heard(watch).1 == Knowledge::Degraded
        })
        .await;
    engine.say(removed(4), true).await;
    watch.until_exact().await;
    assert_eq!(watch.fleet.doubt(watch.id(0)), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_shows_what_was_lost_is_not_made_good_by_what_else_is_in_it() {
    let mut engine = Forgetful::telling("vllm:cache_config_info{block_size=\"8\",num_gpu_blocks=\"1\"} 1\n").await;
    engine.say(stored(0, &prompt(0, 8)), false).await;
    let watch = Watch::at(engine.address);
    watch.until("connected", |watch| watch.fleet.event_sources(watch.id(0)).unwrap().connected == 1).await;
    engine.say(stored_after(&[(1, Some(99)), (2, None), (3, None)]), true).await;
    watch.until("heard", |watch| watch.depth(&prompt(3, 8)) == 2).await;
    watch
        .until("the block that the first one hangs on is still there", |watch| heard(watch).1 == Knowledge::Degraded)
        .await;
    assert!(watch.doubt().contains("0 of the 2 blocks"), "{}", watch.doubt());
    engine.say(stored_after(&[(4, None), (5, None)]), true).await;
    for number in 2..=4 {
        engine.say(removed(number), true).await;
    }
    watch.until_exact().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_whose_process_was_replaced_says_so_until_a_probe_has_met_the_new_one() {
    let mut engine = Forgetful::start().await;
    engine.say(cleared(), true).await;
    // No probe comes by itself after the first ones.
    let pace = Pace { every: Duration::from_secs(3600), ..quick() };
    let watch = Watch::paced(vec![WorkerSpec::at(&url(engine.address), Role::Hybrid)], pace);
    watch.until_exact().await;
    engine.started.fetch_add(1, Ordering::Relaxed);
    watch.until("in doubt", |watch| heard(watch) == (0, Knowledge::Degraded)).await;
    let doubt = watch.doubt();
    assert!(doubt.contains("another process answers"), "its source is connected, and not what is wrong: {doubt}");
    watch.fleet.unreachable(watch.id(0));
    watch.until_exact().await;
    assert_eq!(watch.fleet.doubt(watch.id(0)), None);
}
