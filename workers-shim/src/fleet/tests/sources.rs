//! Tests of event sources that are lost, never connect, or belong to an unidentified process.

use std::sync::atomic::Ordering;

use super::engine::{FlakyProxy, ForgetfulPublisher, ProxyMode, cleared, removed, stored, stored_after};
use super::*;
use crate::events::EventSourceCount;

/// A fleet that follows a worker's events through a proxy.
fn fleet_over_proxy(wire: &FlakyProxy, worker: SocketAddr, replay: Option<&str>) -> FleetHarness {
    let events = EventSourceSetting::Configured { live: wire.endpoint.clone(), replay: replay.map(str::to_owned) };
    FleetHarness::with_workers(vec![WorkerDefinition {
        events,
        ..WorkerDefinition::at(&url(worker), WorkerRole::Hybrid)
    }])
}

fn connected_and_knowledge(harness: &FleetHarness) -> (usize, KvIndexState) {
    let EventSourceCount { configured, connected } = harness.fleet.event_sources(harness.id(0)).unwrap();
    assert_eq!(configured, 1);
    (connected, harness.view(0).kv_index_state)
}

async fn check_lost_connection_degrades_worker(loss: ProxyMode) {
    let worker = sim(sim_options()).await;
    let wire = FlakyProxy::to(worker.events_endpoint()).await;
    let watch = fleet_over_proxy(&wire, worker.address(), Some(worker.replay_endpoint()));
    watch.until_exact().await;
    assert_eq!(
        (connected_and_knowledge(&watch), watch.fleet.inexact_reason(watch.id(0))),
        ((1, KvIndexState::Exact), None)
    );
    wire.set_mode(loss);
    watch.until("in doubt", |watch| connected_and_knowledge(watch) == (0, KvIndexState::Degraded)).await;
    let doubt = watch.inexact_reason();
    assert!(doubt.contains(&wire.endpoint) && doubt.contains("`kv_events_endpoint`"), "{doubt}");
    ask(worker.address(), &prompt(1, 40), 1).await;
    assert_eq!(watch.depth(&prompt(1, 40)), 0);
    wire.set_mode(ProxyMode::Open);
    watch.until_exact().await;
    assert_eq!(
        (connected_and_knowledge(&watch), watch.depth(&prompt(1, 40))),
        ((1, KvIndexState::Exact), 10),
        "what was missed is there"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closed_event_connection_degrades_the_worker_until_reconnected() {
    check_lost_connection_degrades_worker(ProxyMode::Closed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silently_dead_event_connection_degrades_the_worker_until_reconnected() {
    check_lost_connection_degrades_worker(ProxyMode::Silent).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreachable_event_source_is_configured_but_not_connected() {
    let worker = sim(sim_options()).await;
    let wire = FlakyProxy::to(worker.events_endpoint()).await;
    wire.set_mode(ProxyMode::Closed);
    let watch = fleet_over_proxy(&wire, worker.address(), Some(worker.replay_endpoint()));
    watch.until("looked for", |watch| watch.fleet.event_sources(watch.id(0)).unwrap().configured == 1).await;
    watch.until("in doubt", |watch| connected_and_knowledge(watch) == (0, KvIndexState::Degraded)).await;
    assert!(watch.inexact_reason().contains(&wire.endpoint), "{}", watch.inexact_reason());
    wire.set_mode(ProxyMode::Open);
    watch.until_exact().await;
    assert_eq!(connected_and_knowledge(&watch).0, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_without_replay_becomes_exact_after_a_cache_clear() {
    let mut engine = ForgetfulPublisher::start().await;
    engine.publish(cleared(), false).await;
    let wire = FlakyProxy::to(&engine.endpoints.0).await;
    let watch = fleet_over_proxy(&wire, engine.address, None);
    watch.until("looked for", |watch| watch.fleet.event_sources(watch.id(0)).unwrap().configured == 1).await;
    // The fleet's view of a worker follows its sources with a delay.
    watch.until("connected", |watch| connected_and_knowledge(watch) == (1, KvIndexState::Degraded)).await;
    assert!(watch.inexact_reason().contains("`replay_endpoint`"), "{}", watch.inexact_reason());
    while connected_and_knowledge(&watch).1 != KvIndexState::Exact {
        // A new subscription misses some.
        engine.publish(cleared(), false).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(watch.fleet.inexact_reason(watch.id(0)), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_without_process_identity_is_never_exact() {
    let mut engine = ForgetfulPublisher::with_metrics("vllm:num_requests_running 0\n").await;
    engine.started.store(0, Ordering::Relaxed);
    engine.publish(stored(1, &prompt(1, 8)), true).await;
    let watch = FleetHarness::at(engine.address);
    watch.until("replayed", |watch| watch.depth(&prompt(1, 8)) == 2).await;
    let replays = |harness: &FleetHarness| harness.fleet.events(harness.id(0)).unwrap().replays;
    watch.until("replayed again", |watch| replays(watch) >= 2).await;
    engine.publish(cleared(), true).await;
    engine.publish(stored(2, &prompt(2, 8)), true).await;
    watch.until("heard", |watch| watch.depth(&prompt(2, 8)) == 2).await;
    watch.until("in doubt", |watch| connected_and_knowledge(watch) == (1, KvIndexState::Degraded)).await;
    assert!(watch.inexact_reason().contains("GET /metrics"), "{}", watch.inexact_reason());
    engine.started.store(1_700_000_000, Ordering::Relaxed);
    watch.until_exact().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_events_expire_after_twice_the_largest_ranks_capacity() {
    let two_ranks = "vllm:cache_config_info{block_size=\"8\",engine=\"0\",num_gpu_blocks=\"2\"} 1\n\
                     vllm:cache_config_info{block_size=\"8\",engine=\"1\",num_gpu_blocks=\"4\"} 1\n";
    let mut engine = ForgetfulPublisher::with_metrics(two_ranks).await;
    engine.publish(stored(0, &prompt(0, 8)), false).await;
    let watch = FleetHarness::at(engine.address);
    watch.until("connected", |watch| watch.fleet.event_sources(watch.id(0)).unwrap().connected == 1).await;
    for number in 1..=7 {
        engine.publish(stored(number, &prompt(number as u32, 8)), true).await;
    }
    watch.until("heard", |watch| watch.depth(&prompt(7, 8)) == 2).await;
    watch.until("in doubt", |watch| connected_and_knowledge(watch) == (1, KvIndexState::Degraded)).await;
    let doubt = watch.inexact_reason();
    assert!(doubt.contains("7 of the 8 blocks") && doubt.contains("`buffer_steps`"), "{doubt}");
    engine.publish(stored(8, &prompt(8, 8)), true).await;
    for number in 1..=3 {
        engine.publish(removed(number), true).await;
    }
    watch.until("heard", |watch| watch.depth(&prompt(3, 8)) == 0).await;
    watch
        .until("five blocks where there is room for four: a removal was lost", |watch| {
            connected_and_knowledge(watch).1 == KvIndexState::Degraded
        })
        .await;
    engine.publish(removed(4), true).await;
    watch.until_exact().await;
    assert_eq!(watch.fleet.inexact_reason(watch.id(0)), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn message_that_reveals_a_loss_does_not_count_towards_recovery() {
    let mut engine =
        ForgetfulPublisher::with_metrics("vllm:cache_config_info{block_size=\"8\",num_gpu_blocks=\"1\"} 1\n").await;
    engine.publish(stored(0, &prompt(0, 8)), false).await;
    let watch = FleetHarness::at(engine.address);
    watch.until("connected", |watch| watch.fleet.event_sources(watch.id(0)).unwrap().connected == 1).await;
    engine.publish(stored_after(&[(1, Some(99)), (2, None), (3, None)]), true).await;
    watch.until("heard", |watch| watch.depth(&prompt(3, 8)) == 2).await;
    watch
        .until("the block that the first one hangs on is still there", |watch| {
            connected_and_knowledge(watch).1 == KvIndexState::Degraded
        })
        .await;
    assert!(watch.inexact_reason().contains("0 of the 2 blocks"), "{}", watch.inexact_reason());
    engine.publish(stored_after(&[(4, None), (5, None)]), true).await;
    for number in 2..=4 {
        engine.publish(removed(number), true).await;
    }
    watch.until_exact().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replaced_process_degrades_the_worker_until_a_probe_identifies_it() {
    let mut engine = ForgetfulPublisher::start().await;
    engine.publish(cleared(), true).await;
    // No probe is due after the first ones.
    let pace = ProbeSettings { every: Duration::from_secs(3600), ..quick_probes() };
    let watch =
        FleetHarness::with_probe_settings(vec![WorkerDefinition::at(&url(engine.address), WorkerRole::Hybrid)], pace);
    watch.until_exact().await;
    engine.started.fetch_add(1, Ordering::Relaxed);
    watch.until("in doubt", |watch| connected_and_knowledge(watch) == (0, KvIndexState::Degraded)).await;
    let doubt = watch.inexact_reason();
    assert!(doubt.contains("another process answers"), "its source is connected, and not what is wrong: {doubt}");
    watch.fleet.mark_unreachable(watch.id(0));
    watch.until_exact().await;
    assert_eq!(watch.fleet.inexact_reason(watch.id(0)), None);
}
