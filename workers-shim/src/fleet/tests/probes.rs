//! Workers that answer badly, late, or as somebody else.

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
use vocabulary::{Bytes, Health, Incarnation, Micros};

use super::*;

/// What an engine answers to one path.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Mood {
    Good,
    Status(u16),
    /// After so many milliseconds.
    Late(u64),
    Endless,
}

/// An engine whose every answer can be spoiled.
struct Engine {
    address: SocketAddr,
    script: Arc<Script>,
    server: JoinHandle<()>,
}

struct Script {
    moods: Mutex<HashMap<&'static str, Mood>>,
    page: Mutex<String>,
    asked: AtomicU64,
    authorization: Mutex<Option<String>>,
}

const PAGE: &str = "process_start_time_seconds 1700000000.5\nvllm:num_requests_running 3\nvllm:num_requests_waiting 0\n\
    vllm:kv_cache_usage_perc 0.5\nvllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"100\",cache_dtype=\"auto\"} 1\n";
const BORN: Incarnation = Incarnation(1_700_000_000_500_000);

impl Engine {
    async fn start() -> Self {
        Self::listen("127.0.0.1:0".parse().unwrap()).await
    }

    async fn listen(address: SocketAddr) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let script = Arc::new(Script {
            moods: Mutex::default(),
            page: Mutex::new(PAGE.to_owned()),
            asked: AtomicU64::new(0),
            authorization: Mutex::default(),
        });
        let answering = script.clone();
        let routes = Router::new().fallback(move |request: Request| answer(answering.clone(), request));
        let server = tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
        Self { address, script, server }
    }

    fn mood(&self, path: &'static str, mood: Mood) {
        self.script.moods.lock().insert(path, mood);
    }

    fn page(&self, page: &str) {
        *self.script.page.lock() = page.to_owned();
    }

    /// Until every path has been asked some times more.
    async fn asked_again(&self) {
        let wanted = self.script.asked.load(Ordering::Relaxed) + 5;
        for _ in 0..500 {
            if self.script.asked.load(Ordering::Relaxed) >= wanted {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("it is not asked any more");
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn answer(script: Arc<Script>, request: Request) -> Response {
    let path = request.uri().path().to_owned();
    let mood = script.moods.lock().get(path.as_str()).copied().unwrap_or(Mood::Good);
    let key = request.headers().get(header::AUTHORIZATION).map(|value| value.to_str().unwrap().to_owned());
    *script.authorization.lock() = key;
    if path == "/metrics" {
        script.asked.fetch_add(1, Ordering::Relaxed);
    }
    match mood {
        Mood::Status(code) => return StatusCode::from_u16(code).unwrap().into_response(),
        Mood::Late(millis) => tokio::time::sleep(Duration::from_millis(millis)).await,
        Mood::Endless => return "vllm:x 1\n".repeat(1 << 20).into_response(),
        Mood::Good => {}
    }
    match path.as_str() {
        "/health" => StatusCode::OK.into_response(),
        "/v1/models" => r#"{"data":[{"id":"tiny","max_model_len":2048}]}"#.into_response(),
        "/metrics" => script.page.lock().clone().into_response(),
        "/version" => r#"{"version":"9.9"}"#.into_response(),
        _ => StatusCode::NOT_FOUND.into_response(),
    }
}

fn spec(engine: &Engine) -> WorkerSpec {
    WorkerSpec::at(&url(engine.address), Role::Decode)
}

/// Probes every 30 ms that wait 150 ms.
fn watch(specs: Vec<WorkerSpec>) -> Watch {
    patient(specs, Duration::from_millis(150))
}

fn patient(specs: Vec<WorkerSpec>, patience: Duration) -> Watch {
    let (every, again) = (Duration::from_millis(30), Duration::from_millis(10));
    Watch::paced(specs, Pace { every, again, patience, ..Pace::default() })
}

async fn ready(watch: &Watch) {
    watch.until("ready", |watch| watch.view(0).health == Health::Ready).await;
}

async fn unreachable(watch: &Watch) {
    watch.until("unreachable", |watch| watch.view(0).health == Health::Unreachable).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_whose_metrics_fail_stays_who_it_is_and_its_load_is_forgotten() {
    let engine = Engine::start().await;
    let watch = watch(vec![spec(&engine)]);
    ready(&watch).await;
    assert_eq!((watch.view(0).incarnation, watch.view(0).load.running), (BORN, 3));
    for mood in [Mood::Status(500), Mood::Status(503), Mood::Late(400)] {
        engine.mood("/metrics", mood);
        watch.until("forgotten", |watch| watch.view(0).load.running == 0).await;
        let view = watch.view(0);
        assert_eq!((view.health, view.incarnation), (Health::Ready, BORN), "{mood:?}");
        assert_eq!((view.capacity.block, view.load.kv_usage), (Tokens(16), 0.0), "{mood:?}");
        engine.mood("/metrics", Mood::Good);
        watch.until("known again", |watch| watch.view(0).load.running == 3).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_that_end_in_a_panic_are_counted_begun_anew_and_see_what_happens_then() {
    let engine = Engine::start().await;
    let (panics, ended) = (Arc::new(Notify::new()), Arc::new(AtomicU64::new(0)));
    let (planted, counted) = (panics.clone(), ended.clone());
    let keep: Keep = Arc::new(move |name, mut begin| {
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
    let watch = Watch::kept(vec![spec(&engine)], quick(), keep);
    ready(&watch).await;
    panics.notify_one();
    watch.until("ended", |_| ended.load(Ordering::Relaxed) == 1).await;
    engine.mood("/health", Mood::Status(503));
    unreachable(&watch).await;
    engine.mood("/health", Mood::Good);
    ready(&watch).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_ill_takes_no_work_until_it_says_otherwise() {
    let engine = Engine::start().await;
    let watch = watch(vec![spec(&engine)]);
    ready(&watch).await;
    engine.mood("/health", Mood::Status(503));
    unreachable(&watch).await;
    engine.mood("/health", Mood::Good);
    ready(&watch).await;
    engine.page(&PAGE.replace("vllm:num_requests_waiting 0", "vllm:engine_sleep_state{sleep_state=\"awake\"} 0"));
    unreachable(&watch).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_late_answer_is_forgiven_and_lasting_silence_is_not() {
    let engine = Engine::start().await;
    let watch = patient(vec![spec(&engine)], Duration::from_millis(600));
    ready(&watch).await;
    engine.mood("/health", Mood::Late(60_000));
    tokio::time::sleep(Duration::from_millis(120)).await;
    assert_eq!(watch.view(0).health, Health::Ready, "not one question has timed out yet");
    unreachable(&watch).await;
    engine.mood("/health", Mood::Good);
    ready(&watch).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_probe_that_began_before_somebody_failed_does_not_take_it_back() {
    let engine = Engine::start().await;
    let watch = watch(vec![spec(&engine)]);
    ready(&watch).await;
    let id = watch.id(0);
    engine.asked_again().await;
    // From here on every probe takes 100 ms, so one is under way when the worker is reported.
    engine.mood("/v1/models", Mood::Late(100));
    tokio::time::sleep(Duration::from_millis(80)).await;
    watch.fleet.unreachable(id);
    let reported = Instant::now();
    ready(&watch).await;
    assert!(reported.elapsed() >= Duration::from_millis(95), "{:?}: a probe of its own came first", reported.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_waits_for_the_loss_of_a_worker_hears_of_death_and_of_a_new_life() {
    let nobody = watch(vec![WorkerSpec::at("http://127.0.0.1:1", Role::Hybrid)]);
    for lost in [nobody.fleet.lost(nobody.id(0)), nobody.fleet.lost(WorkerId(7))] {
        tokio::time::timeout(Duration::from_secs(5), lost).await.expect("who was never reached is lost already");
    }
    let engine = Engine::start().await;
    let mut watch = watch(vec![spec(&engine)]);
    let id = watch.id(0);
    ready(&watch).await;
    let lost = watch.fleet.lost(id);
    let early = tokio::time::timeout(Duration::from_millis(100), watch.fleet.lost(id)).await;
    assert!(early.is_err(), "it lives");
    engine.page(&PAGE.replace("1700000000.5", "1700000099"));
    tokio::time::timeout(Duration::from_secs(5), lost).await.expect("another process answers");
    assert_eq!(watch.view(0).incarnation, Incarnation(1_700_000_099_000_000));
    let lost = watch.fleet.lost(id);
    watch.fleet.unreachable(id);
    tokio::time::timeout(Duration::from_secs(5), lost).await.expect("it was reported");
    let mut lives = Vec::new();
    while let Ok(alive) = watch.alive.try_recv() {
        lives.push(alive.incarnation);
    }
    lives.dedup();
    assert_eq!(lives, [BORN, Incarnation(1_700_000_099_000_000)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_comes_back_is_not_used_before_it_said_who_it_is() {
    let engine = Engine::start().await;
    let watch = watch(vec![spec(&engine)]);
    ready(&watch).await;
    engine.mood("/health", Mood::Status(500));
    unreachable(&watch).await;
    engine.mood("/metrics", Mood::Late(100));
    engine.page(&PAGE.replace("1700000000.5", "1700000099"));
    engine.mood("/health", Mood::Good);
    ready(&watch).await;
    assert_eq!(watch.view(0).incarnation, Incarnation(1_700_000_099_000_000), "never ready under its old name");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endless_and_foreign_answers_are_no_answers() {
    let engine = Engine::start().await;
    engine.mood("/metrics", Mood::Endless);
    engine.mood("/health", Mood::Status(404));
    let watch = watch(vec![spec(&engine)]);
    ready(&watch).await;
    assert_eq!((watch.view(0).incarnation, watch.view(0).load.running), (Incarnation(0), 0));
    let flight = watch.fleet.dispatch(watch.id(0), DpRank(0), Tokens(9));
    assert_eq!((watch.view(0).load.waiting, watch.view(0).load.backlog), (1, Tokens(9)), "our own are known");
    drop(flight);
    for mood in [Mood::Status(301), Mood::Endless] {
        engine.mood("/v1/models", mood);
        unreachable(&watch).await;
        engine.mood("/v1/models", Mood::Good);
        ready(&watch).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_is_known_by_its_metrics_and_by_nothing_else() {
    let engine = Engine::start().await;
    let watch = watch(vec![spec(&engine)]);
    ready(&watch).await;
    let shown = |wanted| move |watch: &Watch| watch.fleet.engine(watch.id(0)) == wanted;
    assert!(shown(crate::scrape::Engine::Vllm)(&watch));
    engine.page("sglang:num_running_reqs 1\n");
    watch.until("another", shown(crate::scrape::Engine::Sglang)).await;
    engine.mood("/metrics", Mood::Status(404));
    watch.until("nobody's", shown(crate::scrape::Engine::Other)).await;
    assert_eq!(watch.fleet.engine(WorkerId(0)), crate::scrape::Engine::Other, "no worker of ours");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_carry_the_workers_key() {
    let engine = Engine::start().await;
    let watch = watch(vec![WorkerSpec { api_key: Some("secret".into()), ..spec(&engine) }]);
    ready(&watch).await;
    assert_eq!(engine.script.authorization.lock().as_deref(), Some("Bearer secret"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn draining_outlives_probes_and_death() {
    let engine = Engine::start().await;
    let watch = watch(vec![spec(&engine)]);
    ready(&watch).await;
    watch.fleet.set_draining(watch.id(0), Health::Draining);
    engine.asked_again().await;
    assert_eq!(watch.view(0).health, Health::Draining);
    watch.fleet.unreachable(watch.id(0));
    watch.until("draining again", |watch| watch.view(0).health == Health::Draining).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_links_costs_are_learnt_and_configured_models_are_kept() {
    let engine = Engine::start().await;
    engine.page(&format!("{PAGE}vllm:nixl_num_kv_expired_reqs_total 0.0\n"));
    let models = vec![ModelId::from("mine")];
    let watch = watch(vec![WorkerSpec { models: models.clone(), ..spec(&engine) }]);
    watch.until("linked", |watch| watch.view(0).link.is_some()).await;
    let before = watch.view(0).link.unwrap();
    assert_eq!((&*before.fabric, &*watch.view(0).models), ("nixl 9.9 auto 16 mine", &*models));
    for _ in 0..40 {
        watch.fleet.transferred(watch.id(0), Bytes(1 << 30), Micros(2_000_000));
    }
    let after = watch.view(0).link.unwrap();
    assert!(after.bytes_per_second < before.bytes_per_second / 5.0, "{before:?} {after:?}");
    engine.asked_again().await;
    assert_eq!(watch.view(0).link, Some(after), "a probe does not undo it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_fleet_asks_nobody() {
    let engine = Engine::start().await;
    let watch = watch(vec![spec(&engine)]);
    ready(&watch).await;
    drop(watch);
    tokio::time::sleep(Duration::from_millis(50)).await;
    let asked = engine.script.asked.load(Ordering::Relaxed);
    tokio::time::sleep(Duration::from_millis(150)).await;
    assert_eq!(engine.script.asked.load(Ordering::Relaxed), asked);
}
