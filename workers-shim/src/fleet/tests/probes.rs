//! Tests of workers that answer wrongly, late, or as another process.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use axum::Router;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use vocabulary::{Bytes, Incarnation, Micros, ModelId, WorkerHealth};

use super::*;

/// An engine's response to one path.
#[derive(Clone, Copy, PartialEq, Debug)]
enum CannedResponse {
    Good,
    Status(u16),
    /// After this many milliseconds.
    Late(u64),
    Endless,
}

/// An engine whose responses can be replaced.
struct ScriptedEngine {
    address: SocketAddr,
    script: Arc<EngineScript>,
    server: JoinHandle<()>,
}

struct EngineScript {
    responses: Mutex<HashMap<&'static str, CannedResponse>>,
    page: Mutex<String>,
    probe_count: AtomicU64,
    authorization: Mutex<Option<String>>,
}

const PAGE: &str = "process_start_time_seconds 1700000000.5\nvllm:num_requests_running 3\nvllm:num_requests_waiting 0\n\
    vllm:kv_cache_usage_perc 0.5\nvllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"100\",cache_dtype=\"auto\"} 1\n";
const INCARNATION: Incarnation = Incarnation(1_700_000_000_500_000);

impl ScriptedEngine {
    async fn start() -> Self {
        Self::listen("127.0.0.1:0".parse().unwrap()).await
    }

    async fn listen(address: SocketAddr) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let script = Arc::new(EngineScript {
            responses: Mutex::default(),
            page: Mutex::new(PAGE.to_owned()),
            probe_count: AtomicU64::new(0),
            authorization: Mutex::default(),
        });
        let answering = script.clone();
        let routes = Router::new().fallback(move |request: Request| answer(answering.clone(), request));
        let server = tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
        Self { address, script, server }
    }

    fn set_response(&self, path: &'static str, mood: CannedResponse) {
        self.script.responses.lock().insert(path, mood);
    }

    fn set_metrics_page(&self, page: &str) {
        *self.script.page.lock() = page.to_owned();
    }

    /// Waits until every path was requested a few more times.
    async fn wait_probed_again(&self) {
        let wanted = self.script.probe_count.load(Ordering::Relaxed) + 5;
        for _ in 0..500 {
            if self.script.probe_count.load(Ordering::Relaxed) >= wanted {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("it is not asked any more");
    }
}

impl Drop for ScriptedEngine {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn answer(script: Arc<EngineScript>, request: Request) -> Response {
    let path = request.uri().path().to_owned();
    let mood = script.responses.lock().get(path.as_str()).copied().unwrap_or(CannedResponse::Good);
    let key = request.headers().get(header::AUTHORIZATION).map(|value| value.to_str().unwrap().to_owned());
    *script.authorization.lock() = key;
    if path == "/metrics" {
        script.probe_count.fetch_add(1, Ordering::Relaxed);
    }
    match mood {
        CannedResponse::Status(code) => return StatusCode::from_u16(code).unwrap().into_response(),
        CannedResponse::Late(millis) => tokio::time::sleep(Duration::from_millis(millis)).await,
        CannedResponse::Endless => return "vllm:x 1\n".repeat(1 << 20).into_response(),
        CannedResponse::Good => {}
    }
    match path.as_str() {
        "/health" => StatusCode::OK.into_response(),
        "/v1/models" => r#"{"data":[{"id":"tiny","max_model_len":2048}]}"#.into_response(),
        "/metrics" => script.page.lock().clone().into_response(),
        "/version" => r#"{"version":"9.9"}"#.into_response(),
        _ => StatusCode::NOT_FOUND.into_response(),
    }
}

fn spec(engine: &ScriptedEngine) -> WorkerDefinition {
    WorkerDefinition::at(&url(engine.address), WorkerRole::Decode)
}

/// A fleet with a probe interval of 30 ms and a timeout of 150 ms.
fn fleet_of(specs: Vec<WorkerDefinition>) -> FleetHarness {
    fleet_with_timeout(specs, Duration::from_millis(150))
}

fn fleet_with_timeout(specs: Vec<WorkerDefinition>, patience: Duration) -> FleetHarness {
    let (every, again) = (Duration::from_millis(30), Duration::from_millis(10));
    FleetHarness::with_probe_settings(specs, ProbeSettings { every, again, patience, ..ProbeSettings::default() })
}

async fn wait_ready(harness: &FleetHarness) {
    harness.until("ready", |harness| harness.view(0).health == WorkerHealth::Ready).await;
}

async fn wait_unreachable(harness: &FleetHarness) {
    harness.until("unreachable", |harness| harness.view(0).health == WorkerHealth::Unreachable).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failing_metrics_keep_the_identity_and_clear_the_load() {
    let engine = ScriptedEngine::start().await;
    let watch = fleet_of(vec![spec(&engine)]);
    wait_ready(&watch).await;
    assert_eq!((watch.view(0).incarnation, watch.view(0).load.running), (INCARNATION, 3));
    for mood in [CannedResponse::Status(500), CannedResponse::Status(503), CannedResponse::Late(400)] {
        engine.set_response("/metrics", mood);
        watch.until("forgotten", |watch| watch.view(0).load.running == 0).await;
        let view = watch.view(0);
        assert_eq!((view.health, view.incarnation), (WorkerHealth::Ready, INCARNATION), "{mood:?}");
        assert_eq!((view.capacity.block, view.load.kv_usage), (Tokens(16), 0.0), "{mood:?}");
        engine.set_response("/metrics", CannedResponse::Good);
        watch.until("known again", |watch| watch.view(0).load.running == 3).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_that_end_in_a_panic_are_counted_begun_anew_and_see_what_happens_then() {
    let engine = ScriptedEngine::start().await;
    let (panics, ended) = (Arc::new(Notify::new()), Arc::new(AtomicU64::new(0)));
    let (planted, counted) = (panics.clone(), ended.clone());
    let keep: TaskSupervisor = Arc::new(move |name, mut begin| {
        let (planted, counted) = (planted.clone(), counted.clone());
        Box::pin(async move {
            loop {
                let fails = async {
                    planted.notified().await;
                    panic!("a planted one");
                };
                let life = async {
                    tokio::select! {
                        () = begin() => {}
                        () = fails, if name == "probes" => {}
                    }
                };
                match std::panic::AssertUnwindSafe(life).catch_unwind().await {
                    Ok(()) => return,
                    Err(_) => counted.fetch_add(1, Ordering::Relaxed),
                };
            }
        })
    });
    let watch = FleetHarness::kept(vec![spec(&engine)], quick_probes(), keep);
    wait_ready(&watch).await;
    panics.notify_one();
    watch.until("ended", |_| ended.load(Ordering::Relaxed) == 1).await;
    engine.set_response("/health", CannedResponse::Status(503));
    wait_unreachable(&watch).await;
    engine.set_response("/health", CannedResponse::Good);
    wait_ready(&watch).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unhealthy_worker_gets_no_work_until_it_recovers() {
    let engine = ScriptedEngine::start().await;
    let watch = fleet_of(vec![spec(&engine)]);
    wait_ready(&watch).await;
    engine.set_response("/health", CannedResponse::Status(503));
    wait_unreachable(&watch).await;
    engine.set_response("/health", CannedResponse::Good);
    wait_ready(&watch).await;
    engine.set_metrics_page(
        &PAGE.replace("vllm:num_requests_waiting 0", "vllm:engine_sleep_state{sleep_state=\"awake\"} 0"),
    );
    wait_unreachable(&watch).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn single_timeout_is_tolerated_and_lasting_silence_is_not() {
    let engine = ScriptedEngine::start().await;
    let watch = fleet_with_timeout(vec![spec(&engine)], Duration::from_millis(600));
    wait_ready(&watch).await;
    engine.set_response("/health", CannedResponse::Late(60_000));
    tokio::time::sleep(Duration::from_millis(120)).await;
    assert_eq!(watch.view(0).health, WorkerHealth::Ready, "not one question has timed out yet");
    wait_unreachable(&watch).await;
    engine.set_response("/health", CannedResponse::Good);
    wait_ready(&watch).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probe_started_before_a_reported_failure_does_not_clear_it() {
    let engine = ScriptedEngine::start().await;
    let watch = fleet_of(vec![spec(&engine)]);
    wait_ready(&watch).await;
    let id = watch.id(0);
    engine.wait_probed_again().await;
    // From here on every probe takes 100 ms, so one is running when the worker is reported.
    engine.set_response("/v1/models", CannedResponse::Late(100));
    tokio::time::sleep(Duration::from_millis(80)).await;
    watch.fleet.mark_unreachable(id);
    let reported = Instant::now();
    wait_ready(&watch).await;
    assert!(reported.elapsed() >= Duration::from_millis(95), "{:?}: a probe of its own came first", reported.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loss_waiters_wake_on_death_and_on_a_new_incarnation() {
    let nobody = fleet_of(vec![WorkerDefinition::at("http://127.0.0.1:1", WorkerRole::Hybrid)]);
    for lost in [nobody.fleet.wait_lost(nobody.id(0)), nobody.fleet.wait_lost(WorkerId(7))] {
        tokio::time::timeout(Duration::from_secs(5), lost).await.expect("who was never reached is lost already");
    }
    let engine = ScriptedEngine::start().await;
    let mut watch = fleet_of(vec![spec(&engine)]);
    let id = watch.id(0);
    wait_ready(&watch).await;
    let lost = watch.fleet.wait_lost(id);
    let early = tokio::time::timeout(Duration::from_millis(100), watch.fleet.wait_lost(id)).await;
    assert!(early.is_err(), "it lives");
    engine.set_metrics_page(&PAGE.replace("1700000000.5", "1700000099"));
    tokio::time::timeout(Duration::from_secs(5), lost).await.expect("another process answers");
    assert_eq!(watch.view(0).incarnation, Incarnation(1_700_000_099_000_000));
    let lost = watch.fleet.wait_lost(id);
    watch.fleet.mark_unreachable(id);
    tokio::time::timeout(Duration::from_secs(5), lost).await.expect("it was reported");
    let mut lives = Vec::new();
    while let Ok(alive) = watch.alive.try_recv() {
        lives.push(alive.incarnation);
    }
    lives.dedup();
    assert_eq!(lives, [INCARNATION, Incarnation(1_700_000_099_000_000)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn returning_worker_is_not_ready_before_it_identifies_itself() {
    let engine = ScriptedEngine::start().await;
    let watch = fleet_of(vec![spec(&engine)]);
    wait_ready(&watch).await;
    engine.set_response("/health", CannedResponse::Status(500));
    wait_unreachable(&watch).await;
    engine.set_response("/metrics", CannedResponse::Late(100));
    engine.set_metrics_page(&PAGE.replace("1700000000.5", "1700000099"));
    engine.set_response("/health", CannedResponse::Good);
    wait_ready(&watch).await;
    assert_eq!(watch.view(0).incarnation, Incarnation(1_700_000_099_000_000), "never ready under its old name");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endless_and_foreign_responses_are_ignored() {
    let engine = ScriptedEngine::start().await;
    engine.set_response("/metrics", CannedResponse::Endless);
    engine.set_response("/health", CannedResponse::Status(404));
    let watch = fleet_of(vec![spec(&engine)]);
    wait_ready(&watch).await;
    assert_eq!((watch.view(0).incarnation, watch.view(0).load.running), (Incarnation(0), 0));
    let flight = watch.fleet.dispatch(watch.id(0), DpRank(0), Tokens(9));
    assert_eq!((watch.view(0).load.waiting, watch.view(0).load.backlog), (1, Tokens(9)), "our own are known");
    drop(flight);
    for mood in [CannedResponse::Status(301), CannedResponse::Endless] {
        engine.set_response("/v1/models", mood);
        wait_unreachable(&watch).await;
        engine.set_response("/v1/models", CannedResponse::Good);
        wait_ready(&watch).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_kind_comes_only_from_metrics() {
    let engine = ScriptedEngine::start().await;
    let watch = fleet_of(vec![spec(&engine)]);
    wait_ready(&watch).await;
    let shown = |wanted| move |harness: &FleetHarness| harness.fleet.engine(harness.id(0)) == wanted;
    assert!(shown(crate::scrape::EngineKind::Vllm)(&watch));
    engine.set_metrics_page("sglang:num_running_reqs 1\n");
    watch.until("another", shown(crate::scrape::EngineKind::Sglang)).await;
    engine.set_response("/metrics", CannedResponse::Status(404));
    watch.until("nobody's", shown(crate::scrape::EngineKind::Other)).await;
    assert_eq!(watch.fleet.engine(WorkerId(0)), crate::scrape::EngineKind::Other, "no worker of ours");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_carry_the_workers_api_key() {
    let engine = ScriptedEngine::start().await;
    let watch = fleet_of(vec![WorkerDefinition { api_key: Some("secret".into()), ..spec(&engine) }]);
    wait_ready(&watch).await;
    assert_eq!(engine.script.authorization.lock().as_deref(), Some("Bearer secret"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn draining_survives_probes_and_death() {
    let engine = ScriptedEngine::start().await;
    let watch = fleet_of(vec![spec(&engine)]);
    wait_ready(&watch).await;
    watch.fleet.set_draining(watch.id(0), WorkerHealth::Draining);
    engine.wait_probed_again().await;
    assert_eq!(watch.view(0).health, WorkerHealth::Draining);
    watch.fleet.mark_unreachable(watch.id(0));
    watch.until("draining again", |watch| watch.view(0).health == WorkerHealth::Draining).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn link_costs_are_learned_and_configured_models_are_kept() {
    let engine = ScriptedEngine::start().await;
    engine.set_metrics_page(&format!("{PAGE}vllm:nixl_num_kv_expired_reqs_total 0.0\n"));
    let models = vec![ModelId::from("mine")];
    let watch = fleet_of(vec![WorkerDefinition { models: models.clone(), ..spec(&engine) }]);
    watch.until("linked", |watch| watch.view(0).link.is_some()).await;
    let before = watch.view(0).link.unwrap();
    assert_eq!((&*before.fabric, &*watch.view(0).models), ("nixl 9.9 auto 16 mine", &*models));
    for _ in 0..40 {
        watch.fleet.record_transfer(watch.id(0), Bytes(1 << 30), Micros(2_000_000));
    }
    let after = watch.view(0).link.unwrap();
    assert!(after.bytes_per_second < before.bytes_per_second / 5.0, "{before:?} {after:?}");
    engine.wait_probed_again().await;
    assert_eq!(watch.view(0).link, Some(after), "a probe does not undo it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_fleet_stops_probing() {
    let engine = ScriptedEngine::start().await;
    let watch = fleet_of(vec![spec(&engine)]);
    wait_ready(&watch).await;
    drop(watch);
    tokio::time::sleep(Duration::from_millis(50)).await;
    let asked = engine.script.probe_count.load(Ordering::Relaxed);
    tokio::time::sleep(Duration::from_millis(150)).await;
    assert_eq!(engine.script.probe_count.load(Ordering::Relaxed), asked);
}
