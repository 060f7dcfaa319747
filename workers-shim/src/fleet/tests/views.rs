//! Tests of the fleet's views of workers.

use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use tokio::net::TcpListener;
use vocabulary::{Blocks, DpRank, Incarnation, ModelId, WorkerHealth};

use super::*;

async fn until_ready(watch: &FleetHarness) {
    let ready = |harness: &FleetHarness| harness.fleet.snapshot().iter().all(|view| view.health == WorkerHealth::Ready);
    watch.until("ready", ready).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_view_shows_identity_and_capacity() {
    let worker = sim(sim_options()).await;
    let mut watch = FleetHarness::at(worker.address());
    until_ready(&watch).await;
    let view = watch.view(0);
    assert_eq!(view.id, WorkerId::of_endpoint(&url(worker.address())));
    assert_eq!((&*view.models, view.ranks, view.role), (&[ModelId::from("tiny")][..], 1, WorkerRole::Hybrid));
    assert_eq!((view.capacity.kv, view.capacity.block), (Tokens(512), Tokens(8)));
    assert_eq!(view.capacity.context, Tokens(400));
    assert!(view.incarnation > Incarnation(1_600_000_000_000_000), "microseconds since the epoch");
    let alive = watch.alive.recv().await.unwrap();
    assert_eq!(alive, LivenessReport { worker: view.id, incarnation: view.incarnation, ranks: 1 });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unanswered_address_is_unreachable_and_reports_no_liveness() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let mut watch = FleetHarness::at(address);
    tokio::time::sleep(Duration::from_millis(150)).await;
    assert_eq!(watch.view(0).health, WorkerHealth::Unreachable);
    assert!(watch.alive.try_recv().is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kv_moves_only_within_one_fabric() {
    let (a, b) = (sim(sim_options()).await, sim(sim_options()).await);
    let larger = SimOptions { profile: EngineProfile { block_size: 16, ..sim_options().profile }, ..sim_options() };
    let c = sim(larger).await;
    let spec = |worker: &SimWorker| WorkerDefinition::at(&url(worker.address()), WorkerRole::Hybrid);
    let watch = FleetHarness::with_workers(vec![spec(&a), spec(&b), spec(&c)]);
    until_ready(&watch).await;
    let [a, b, c] = [0, 1, 2].map(|at| watch.view(at));
    let fabric = |view: &WorkerView| view.link.as_ref().unwrap().fabric.clone();
    assert_eq!(fabric(&a), fabric(&b));
    assert_ne!(fabric(&a), fabric(&c));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dispatches_count_at_once_and_views_are_rebuilt_only_on_change() {
    let worker = sim(sim_options()).await;
    let watch = FleetHarness::at(worker.address());
    until_ready(&watch).await;
    let id = watch.id(0);
    let mut flight = watch.fleet.dispatch(id, DpRank(0), Tokens(500));
    assert_eq!((watch.view(0).load.waiting, watch.view(0).load.backlog), (1, Tokens(500)));
    flight.record_first_token();
    assert_eq!((watch.view(0).load.running, watch.view(0).load.backlog), (1, Tokens(0)));
    drop(flight);
    assert_eq!((watch.view(0).load.running, watch.view(0).load.waiting), (0, 0));
    let mut repeated = 0;
    for _ in 0..100 {
        repeated += u32::from(Arc::ptr_eq(&watch.fleet.snapshot(), &watch.fleet.snapshot()));
    }
    assert!(repeated > 80, "{repeated} of 100");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn death_is_seen_at_once_and_a_restart_is_a_new_incarnation() {
    let worker = sim(sim_options()).await;
    let address = worker.address();
    let watch = FleetHarness::at(address);
    until_ready(&watch).await;
    let first = watch.view(0);
    drop(worker);
    watch.fleet.mark_unreachable(first.id);
    watch.until("unreachable", |watch| watch.view(0).health == WorkerHealth::Unreachable).await;
    let _again = sim_at_reused_address(SimOptions { listen: address, ..sim_options() }).await;
    until_ready(&watch).await;
    assert!(watch.view(0).incarnation > first.incarnation);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn false_alarm_is_cleared_by_the_next_probe() {
    let worker = sim(sim_options()).await;
    let watch = FleetHarness::at(worker.address());
    until_ready(&watch).await;
    let before = watch.view(0);
    watch.fleet.mark_unreachable(before.id);
    until_ready(&watch).await;
    assert_eq!(watch.view(0).incarnation, before.incarnation);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn draining_can_be_set_and_cleared() {
    let worker = sim(sim_options()).await;
    let watch = FleetHarness::at(worker.address());
    until_ready(&watch).await;
    let id = watch.id(0);
    watch.fleet.set_draining(id, WorkerHealth::Draining);
    assert_eq!(watch.view(0).health, WorkerHealth::Draining);
    watch.fleet.set_draining(id, WorkerHealth::Ready);
    assert_eq!(watch.view(0).health, WorkerHealth::Ready);
}

/// A server that only lists its models.
async fn plain_server() -> SocketAddr {
    serve(plain_routes()).await
}

fn plain_routes() -> Router {
    let models = || async { r#"{"object":"list","data":[{"id":"tiny"},{"id":"other"}]}"# };
    Router::new().route("/v1/models", get(models))
}

async fn serve(server: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, server).await });
    address
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_without_metrics_or_events_is_approximated_from_routing() {
    let watch = FleetHarness::at(plain_server().await);
    until_ready(&watch).await;
    let view = watch.view(0);
    assert_eq!((view.models.len(), view.incarnation, &view.link), (2, Incarnation(0), &None));
    let prompt = prompt(1, 20);
    assert_eq!((watch.depth(&prompt), view.kv_index_state), (0, KvIndexState::Approximate));
    // The follower first looks for events; what is recorded before that may be dropped.
    tokio::time::sleep(Duration::from_millis(100)).await;
    watch.fleet.note_routed(view.id, DpRank(0), served(&[&chain(&prompt)]));
    assert_eq!((watch.depth(&prompt), watch.view(0).kv_index_state), (5, KvIndexState::Approximate));
    let longer = [&prompt[..], &[9; 8]].concat();
    assert_eq!(watch.overlaps(&longer)[0].blocks, Blocks(5));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn approximate_blocks_survive_event_discovery() {
    let looks = Arc::new(AtomicUsize::new(0));
    let counted = looks.clone();
    let server = plain_routes().route(
        "/kv_event_sources",
        get(move || async move {
            counted.fetch_add(1, Ordering::Relaxed);
            StatusCode::NOT_FOUND
        }),
    );
    let worker = WorkerDefinition::at(&url(serve(server).await), WorkerRole::Hybrid);
    let watch = FleetHarness::with_probe_settings(
        vec![worker],
        ProbeSettings { every: Duration::from_millis(5), ..quick_probes() },
    );
    until_ready(&watch).await;
    watch.until("looked for events", |_| looks.load(Ordering::Relaxed) >= 1).await;
    let prompt = prompt(1, 20);
    watch.fleet.note_routed(watch.id(0), DpRank(0), served(&[&chain(&prompt)]));
    watch.until("looked again, and again", |_| looks.load(Ordering::Relaxed) >= 4).await;
    assert_eq!(watch.depth(&prompt), 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn duplicate_worker_is_an_error() {
    let spec = WorkerDefinition::at("http://127.0.0.1:1/", WorkerRole::Hybrid);
    let twice = WorkerDefinition::at("http://127.0.0.1:1", WorkerRole::Prefill);
    let options = FleetOptions {
        workers: vec![spec, twice],
        pace: ProbeSettings::default(),
        index: SharedIndex::new(),
        rules: Arc::new(|_| None),
        liveness: None,
        routed_limits: RoutedBlockLimits::default(),
        snapshots: None,
        extra_ranks: 16,
    };
    assert!(matches!(Fleet::start(options), Err(FleetError::DuplicateWorker(_))));
}
