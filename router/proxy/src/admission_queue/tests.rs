use futures::FutureExt as _;
use http::{HeaderMap, Method};
use serde_json::json;
use vocabulary::{KvIndexState, TenantId, Tokens, WorkerId};
use workers_shim::sim::SimWorker;

use super::*;
use crate::client_request::{ClientRequest, GenerationEndpoint};
use crate::lab::sim_command::tests::{sim, url};
use crate::pipeline::{identify, locate, plan};
use crate::receipt::{Receipt, RequestOutcome};
use crate::request_id::new_request_id;
use crate::request_parser::parse;
use crate::request_states::ClassifiedStep;
use crate::routing::Percent;
use crate::testing::{TestRouter, post, raw, request_bytes, start_router_at, wait_until};
use vocabulary::RoutingMode;

fn hold(queue: &mut AdmissionQueue, step: u128, prompt: u64) -> AdmissionDecision {
    let asking = AdmissionRequest { prompt: Tokens(prompt), displaced_compute: Micros(u64::MAX), now: Micros(1) };
    queue.admit(RequestId(step), asking)
}

fn start(queue: &mut AdmissionQueue, step: u128) {
    let asking = AdmissionRequest { prompt: Tokens(1), displaced_compute: Micros::ZERO, now: Micros(1) };
    assert!(matches!(queue.admit(RequestId(step), asking), AdmissionDecision::Start { .. }));
}

/// Returns which of these steps have been woken.
fn woken(queue: &AdmissionQueue, steps: &[u128]) -> Vec<u128> {
    let is_called =
        |step: &u128| queue.wakers.get(&RequestId(*step)).is_some_and(|bell| bell.notified().now_or_never().is_some());
    steps.iter().copied().filter(is_called).collect()
}

fn queue_of_three() -> AdmissionQueue {
    let mut turns = AdmissionQueue::new(AdmissionLimits::default());
    for (step, prompt) in [(1, 300), (2, 100), (3, 200)] {
        assert!(matches!(hold(&mut turns, step, prompt), AdmissionDecision::Hold { .. }));
    }
    turns
}

#[test]
fn queued_steps_wake_one_at_a_time_shortest_prompt_first() {
    let mut turns = queue_of_three();
    assert_eq!(woken(&turns, &[1, 2, 3]), []);
    turns.notify_completion(Micros(2));
    assert_eq!(woken(&turns, &[1, 2, 3]), [2]);
    start(&mut turns, 2);
    assert_eq!(woken(&turns, &[1, 3]), [3]);
    hold(&mut turns, 3, 200);
    assert_eq!(woken(&turns, &[1, 3]), [1]);
    hold(&mut turns, 1, 300);
    assert_eq!((woken(&turns, &[1, 3]), turns.len()), (vec![], 2), "the round is over");
}

#[test]
fn a_step_that_leaves_the_queue_passes_its_turn_on() {
    let mut turns = queue_of_three();
    turns.notify_completion(Micros(2));
    turns.leave(RequestId(3), Micros(2));
    assert_eq!(woken(&turns, &[1, 2]), [2]);
    turns.leave(RequestId(2), Micros(2));
    assert_eq!((woken(&turns, &[1]), turns.len()), (vec![1], 1));
}

#[test]
fn a_completion_during_a_round_starts_another_and_new_steps_plan_at_once() {
    let mut turns = queue_of_three();
    turns.notify_completion(Micros(2));
    assert_eq!(woken(&turns, &[1, 2, 3]), [2]);
    turns.notify_completion(Micros(3));
    hold(&mut turns, 4, 50);
    assert_eq!(woken(&turns, &[1, 2, 3, 4]), [], "one at a time");
    for (step, next) in [(2, 3), (3, 1), (1, 4)] {
        hold(&mut turns, step, 100);
        assert_eq!(woken(&turns, &[1, 2, 3, 4]), [next], "behind the last one the shortest of all");
    }
}

#[test]
fn without_completions_each_queued_step_wakes_every_half_second() {
    let mut turns = queue_of_three();
    turns.notify_completion(Micros(10));
    for step in [2, 3, 1] {
        assert_eq!(woken(&turns, &[step]), [step]);
        hold(&mut turns, step, 100);
    }
    turns.poll_idle(Micros(500_009));
    assert_eq!(woken(&turns, &[1, 2, 3]), []);
    turns.poll_idle(Micros(500_010));
    assert_eq!(woken(&turns, &[1, 2, 3]), [2]);
    turns.poll_idle(Micros(9_000_000));
    assert_eq!(woken(&turns, &[1, 2, 3]), [], "that round still goes on");
}

const PATH: &str = "/v1/completions";

fn body(word: &str) -> String {
    let prompt = format!("{word} {}", "and a long history ".repeat(60));
    json!({"model": "tiny", "max_tokens": 2, "prompt": prompt}).to_string()
}

/// A worker whose memory is full with KV of recent sessions, and a router that queues rather than evict any of them.
async fn full_worker(settings: &[&str]) -> (SimWorker, TestRouter, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("small.toml");
    std::fs::write(&path, "num_gpu_blocks = 128\nmax_model_len = 2048").unwrap();
    let worker = sim(&["--speed-up=50", &format!("--profile={}", path.display())]).await;
    let fixed = ["models.tiny.tokenizer_dir=builtin", "planner.admission.max_displaced_compute=0s"];
    let router = start_router_at(&[url(&worker)], &[&fixed, settings].concat()).await;
    wait_until("its memory and its blocks are known", || {
        let view = &router.gateway.fleet().snapshot()[0];
        (view.capacity.kv, view.kv_index_state) == (Tokens(2_048), KvIndexState::Exact)
    })
    .await;
    (worker, router, folder)
}

/// Sends prompts in shadow mode, where none waits, until one evicts another.
async fn fill(router: &TestRouter) {
    router.gateway.routing.set(RoutingMode::Shadow, Percent::ALL);
    for number in 0.. {
        assert!(number < 30, "never full");
        assert_eq!(post(router.proxy_address(), PATH, body(&format!("number {number}"))).await.status, 200);
        let receipt = newest(router);
        assert_eq!(receipt.admission_wait, None);
        if receipt.decision.as_ref().unwrap().plan.rationale.cost_terms.eviction > Micros::ZERO {
            break;
        }
    }
    router.gateway.routing.set(RoutingMode::Active, Percent::ALL);
}

async fn step(router: &TestRouter, word: &str) -> ClassifiedStep {
    let incoming = ClientRequest {
        id: new_request_id(),
        tenant: TenantId::default(),
        method: Method::POST,
        path: PATH.into(),
        headers: HeaderMap::new(),
        body: body(word).into(),
        arrived: Instant::now(),
        token_reservation: None,
        memory: None,
        addition: None,
    };
    let request = parse(incoming, GenerationEndpoint::Completions, None).unwrap();
    let model = router.gateway.catalog().model(&request.model);
    let request = identify::IdentificationInput::new(request, model);
    let found = request.compute_whole(&router.gateway.caches.prefix_cache.conversations, None);
    let named = request.with_prompt(found);
    plan::classify(
        &router.gateway.pipeline.classify,
        locate::locate(&router.gateway.pipeline.locate, named.identified, named.converted).await.unwrap(),
    )
}

fn newest(router: &TestRouter) -> Arc<Receipt> {
    router.gateway.decisions.receipts.newest(1, |_| true).remove(0)
}

fn waited(router: &TestRouter, until: WaitOutcome) -> u64 {
    router.gateway.metrics.decisions.admission_wait.with_label_values(&[until.as_ref()]).get_sample_count()
}

#[tokio::test]
async fn a_step_waits_at_most_max_wait_and_its_receipt_says_why() {
    let (_worker, router, _folder) = full_worker(&["planner.admission.max_wait=700ms"]).await;
    fill(&router).await;
    assert_eq!(post(router.proxy_address(), PATH, body("it waits")).await.status, 200);
    let receipt = newest(&router);
    let Some(AdmissionWait { duration, displaced_compute, outcome }) = receipt.admission_wait else {
        panic!("{receipt:?}")
    };
    assert!(
        outcome == WaitOutcome::MaxWaitReached && duration >= Micros(700_000) && displaced_compute > Micros::ZERO,
        "{receipt:?}"
    );
    assert!(receipt.observed.unwrap().ttft.unwrap_or(receipt.observed.unwrap().duration) > duration);
    assert_eq!((waited(&router, WaitOutcome::MaxWaitReached), router.gateway.policies.occupancy().queue_len()), (1, 0));
}

#[tokio::test]
async fn a_client_that_leaves_the_queue_leaves_a_receipt() {
    let (worker, router, _folder) = full_worker(&[]).await;
    fill(&router).await;
    let served = router.gateway.decisions.receipts.newest(100, |_| true).len();
    let account = router.gateway.policies.occupancy();
    let client = raw(router.proxy_address(), &request_bytes(PATH, &body("it leaves"))).await;
    wait_until("it waits", || account.queue_len() == 1).await;
    drop(client);
    wait_until("it is gone", || account.queue_len() == 0).await;
    wait_until("its receipt is there", || router.gateway.decisions.receipts.newest(100, |_| true).len() > served).await;
    let receipt = newest(&router);
    assert_eq!((receipt.observed.unwrap().outcome, receipt.attempts.len()), (RequestOutcome::ClientDisconnected, 0));
    assert_eq!(receipt.admission_wait.map(|waited| waited.outcome), Some(WaitOutcome::Abandoned));
    assert_eq!(waited(&router, WaitOutcome::Abandoned), 1);
    drop(worker);
}

#[tokio::test]
async fn queued_steps_start_when_the_planner_is_bypassed() {
    let (_worker, router, _folder) = full_worker(&[]).await;
    fill(&router).await;
    let (address, account) = (router.proxy_address(), router.gateway.policies.occupancy().clone());
    let answer = tokio::spawn(async move { post(address, PATH, body("it waits")).await.status });
    wait_until("it waits", || account.queue_len() == 1).await;
    router.gateway.routing.set(RoutingMode::Bypass, Percent::ALL);
    assert_eq!(answer.await.unwrap(), 200);
    let receipt = newest(&router);
    assert_eq!(
        (receipt.mode, receipt.admission_wait.map(|waited| waited.outcome)),
        (RoutingMode::Bypass, Some(WaitOutcome::Admitted))
    );
}

#[tokio::test]
async fn retried_bypassed_and_inexact_steps_do_not_queue() {
    let (_worker, router, _folder) = full_worker(&[]).await;
    fill(&router).await;
    let plan = |step: &ClassifiedStep, excluded: &[WorkerId]| {
        plan::plan(&router.gateway.pipeline.plan, step, excluded).unwrap().0
    };
    let mut step = step(&router, "one more").await;
    assert!(!plan(&step, &[WorkerId(7)]).must_wait());
    step.mode = RoutingMode::Shadow;
    let shadow = plan(&step, &[]);
    assert!(!shadow.must_wait() && shadow.decision.is_some());
    step.mode = RoutingMode::Active;
    let exact = step.located.workers.clone();
    for kv_index_state in [KvIndexState::Degraded, KvIndexState::Approximate] {
        step.located.workers =
            exact.iter().map(|view| vocabulary::WorkerView { kv_index_state, ..view.clone() }).collect();
        assert!(!plan(&step, &[]).must_wait(), "{kv_index_state:?}");
    }
    step.located.workers = exact;
    assert!(plan(&step, &[]).must_wait());
}

#[tokio::test]
async fn a_step_that_finds_the_queue_full_starts_and_is_counted() {
    let (_worker, router, _folder) = full_worker(&["planner.admission.max_queue=0"]).await;
    for number in 0..12 {
        assert_eq!(post(router.proxy_address(), PATH, body(&format!("number {number}"))).await.status, 200);
    }
    let receipt = newest(&router);
    let Some(AdmissionWait { duration, displaced_compute, outcome }) = receipt.admission_wait else {
        panic!("{receipt:?}")
    };
    assert!(
        (duration, outcome) == (Micros::ZERO, WaitOutcome::QueueFull) && displaced_compute > Micros::ZERO,
        "{receipt:?}"
    );
    assert!(waited(&router, WaitOutcome::QueueFull) > 0);
}
