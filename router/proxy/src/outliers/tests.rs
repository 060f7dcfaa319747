use serde_json::{Value, json};
use strum::VariantArray as _;
use vocabulary::{Bytes, EngineSpeed, KvIndexState, Micros, ModelId, TimeSpan, WorkerCapacity, WorkerLoad};

use super::*;
use crate::receipt::Attempt;
use crate::routing::Percent;
use crate::testing::{StubWorker, TestRouter, get, post, start_router, wait_until};

const SECOND: Duration = Duration::from_secs(1);

fn worker(id: u64) -> WorkerView {
    WorkerView {
        id: WorkerId(id),
        endpoint: format!("http://{id}:8000").into(),
        incarnation: Incarnation(1),
        role: WorkerRole::Hybrid,
        models: [ModelId::from("m")].into(),
        ranks: 1,
        health: WorkerHealth::Ready,
        kv_index_state: KvIndexState::Exact,
        load: WorkerLoad::default(),
        capacity: WorkerCapacity::default(),
        speeds: EngineSpeed { prefill_tokens_per_second: 1e4, decode_step: Micros(1), decode_slowdown: Micros(1) },
        kv_bytes_per_token: Bytes(1),
        link: None,
    }
}

fn fleet(count: u64) -> Vec<WorkerView> {
    (1..=count).map(worker).collect()
}

fn id(view: &WorkerView) -> (WorkerId, Incarnation) {
    (view.id, view.incarnation)
}

/// Records this many failures of a worker; returns the result of the last.
fn record_failures(
    outliers: &mut OutlierDetector,
    workers: &[WorkerView],
    (which, times): (u64, u32),
    now: Instant,
) -> Option<EjectionReason> {
    let failed: Vec<_> = (0..times).map(|_| outliers.record_failure(workers, WorkerId(which), (now, now))).collect();
    failed.into_iter().last().flatten().map(|(cause, _)| cause)
}

#[test]
fn consecutive_failures_eject_and_an_answer_resets_the_count() {
    let (workers, now) = (fleet(4), Instant::now());
    let mut outliers = OutlierDetector::new(OutlierConfig::default());
    assert_eq!(record_failures(&mut outliers, &workers, (1, 4), now), None);
    assert!(!outliers.record_success(id(&workers[0]), (now, now)), "it was never away");
    assert_eq!(record_failures(&mut outliers, &workers, (1, 4), now), None);
    assert!(outliers.excluded(&workers, now).is_empty());
    assert_eq!(record_failures(&mut outliers, &workers, (1, 1), now), Some(EjectionReason::Consecutive));
    assert_eq!(outliers.excluded(&workers, now), [WorkerId(1)]);
    assert_eq!(record_failures(&mut outliers, &workers, (1, 9), now), None, "what was sent before says nothing more");
}

#[test]
fn a_failure_ratio_over_enough_requests_ejects() {
    let (workers, begin) = (fleet(4), Instant::now());
    let config = OutlierConfig { consecutive_failures: 0, ..OutlierConfig::default() };
    let run = |gap: Duration, volume: u32| {
        let mut outliers = OutlierDetector::new(config);
        (0..volume).find_map(|n| {
            let now = begin + gap * n;
            match n % 2 {
                0 => {
                    outliers.record_success(id(&workers[0]), (now, now));
                    None
                }
                _ => outliers.record_failure(&workers, WorkerId(1), (now, now)).map(|(cause, _)| (n + 1, cause)),
            }
        })
    };
    assert_eq!(run(Duration::ZERO, 40), Some((20, EjectionReason::FailureRate)), "not before there are enough of them");
    assert_eq!(run(SECOND * 2, 40), None, "an hour of few requests is no share of the last seconds");
}

#[test]
fn ejection_spares_the_last_worker_of_a_model_and_half_of_the_fleet() {
    let now = Instant::now();
    let ejects = |workers: &[WorkerView], which: u64| {
        let mut outliers = OutlierDetector::new(OutlierConfig::default());
        record_failures(&mut outliers, workers, (which, 5), now).is_some()
    };
    assert!(ejects(&fleet(2), 1));
    assert!(!ejects(&fleet(1), 1), "alone");
    let other = WorkerView { models: [ModelId::from("other")].into(), ..worker(2) };
    assert!(!ejects(&[worker(1), other], 1), "nobody else has its model");
    let prefill = WorkerView { role: WorkerRole::Prefill, ..worker(2) };
    assert!(!ejects(&[worker(1), prefill.clone()], 1), "the other one cannot answer");
    assert!(ejects(&[worker(1), prefill], 2), "a hybrid computes prompts, too");
    let gone = WorkerView { health: WorkerHealth::Unreachable, ..worker(2) };
    assert!(!ejects(&[worker(1), gone], 1), "the other one is not reached");

    let (workers, mut outliers) = (fleet(5), OutlierDetector::new(OutlierConfig::default()));
    let out = (1..=5).filter(|which| record_failures(&mut outliers, &workers, (*which, 5), now).is_some()).count();
    assert_eq!((out, outliers.excluded(&workers, now).len()), (2, 2), "at most half of five");
    assert_eq!(outliers.excluded(&workers, now + SECOND * 10), []);
    let none = OutlierConfig { max_ejection_percent: Percent::NONE, ..OutlierConfig::default() };
    assert_eq!(record_failures(&mut OutlierDetector::new(none), &workers, (1, 50), now), None);
}

#[test]
fn a_trial_request_ends_or_extends_the_ejection() {
    let (workers, begin) = (fleet(3), Instant::now());
    let mut outliers = OutlierDetector::new(OutlierConfig::default());
    record_failures(&mut outliers, &workers, (1, 5), begin);
    let at = |seconds: u32| begin + SECOND * seconds;
    assert_eq!(outliers.excluded(&workers, at(9)), [WorkerId(1)]);
    assert_eq!(outliers.excluded(&workers, at(10)), [], "one may go there");
    outliers.record_sent(WorkerId(1), at(10));
    assert_eq!(outliers.excluded(&workers, at(10)), [WorkerId(1)], "and no other");
    assert!(outliers.ejection(&workers[0]).is_some_and(|ejected| ejected.is_on_trial()));
    let long_ago = (begin, at(11));
    assert_eq!(outliers.record_failure(&workers, WorkerId(1), long_ago), None, "it was asked before the trial was");
    assert!(!outliers.record_success(id(&workers[0]), long_ago) && outliers.ejection(&workers[0]).is_some());
    let failed = outliers.record_failure(&workers, WorkerId(1), (at(10), at(11)));
    assert_eq!(failed, Some((EjectionReason::Trial, SECOND * 20)), "twice as long");
    assert_eq!(outliers.excluded(&workers, at(30)), [WorkerId(1)]);
    outliers.record_sent(WorkerId(1), at(31));
    assert_eq!(outliers.excluded(&workers, at(50)), [WorkerId(1)]);
    assert_eq!(
        outliers.excluded(&workers, at(51)),
        [],
        "nothing was heard of that trial: one more, and the next one later"
    );
    outliers.record_sent(WorkerId(1), at(51));
    assert_eq!(outliers.excluded(&workers, at(80)), [WorkerId(1)]);
    assert!(outliers.record_success(id(&workers[0]), (at(31), at(82))), "what the first one says counts as well");
    assert_eq!((outliers.ejection(&workers[0]), outliers.excluded(&workers, at(82))), (None, vec![]));
    // Failing again soon: ejected for longer than the first time. After a long healthy time: as the first time.
    let again = |outliers: &mut OutlierDetector, now| {
        record_failures(outliers, &workers, (1, 5), now);
        outliers.ejection(&workers[0]).unwrap().time_to_trial(now)
    };
    assert_eq!(again(&mut outliers, at(83)), SECOND * 40);
    outliers.record_sent(WorkerId(1), at(130));
    assert!(outliers.record_success(id(&workers[0]), (at(130), at(131))));
    assert_eq!(again(&mut outliers, at(900)), SECOND * 10);
}

#[test]
fn a_request_during_the_ejection_pause_is_not_a_trial() {
    let (workers, begin) = (fleet(3), Instant::now());
    let mut outliers = OutlierDetector::new(OutlierConfig::default());
    record_failures(&mut outliers, &workers, (1, 5), begin);
    let before = outliers.ejection(&workers[0]);
    let soon = begin + SECOND;
    assert!(!outliers.record_sent(WorkerId(1), soon), "nobody else could be asked");
    assert_eq!(outliers.record_failure(&workers, WorkerId(1), (soon, soon)), None);
    assert_eq!(outliers.ejection(&workers[0]), before, "it is out for no longer because of it");
    assert!(!outliers.record_sent(WorkerId(2), soon), "it is well");
}

#[test]
fn an_inconclusive_trial_frees_the_slot_for_the_next() {
    let (workers, begin) = (fleet(3), Instant::now());
    let mut outliers = OutlierDetector::new(OutlierConfig::default());
    record_failures(&mut outliers, &workers, (1, 5), begin);
    let at = |seconds: u32| begin + SECOND * seconds;
    for second in [10, 11, 12] {
        assert!(outliers.record_sent(WorkerId(1), at(second)));
        assert_eq!(outliers.excluded(&workers, at(second)), [WorkerId(1)]);
        outliers.release_trial(WorkerId(1), (at(second), at(second)));
        assert_eq!(outliers.excluded(&workers, at(second)), [], "its client left");
    }
    outliers.release_trial(WorkerId(1), (at(12), at(12)));
    assert!(outliers.record_sent(WorkerId(1), at(12)));
    outliers.release_trial(WorkerId(1), (at(5), at(13)));
    assert_eq!(outliers.excluded(&workers, at(13)), [WorkerId(1)], "that one was no trial");
    assert_eq!(outliers.ejection(&workers[0]).map(|ejected| ejected.ejections), Some(1));
}

#[test]
fn a_trial_whose_answer_began_does_not_count_as_hanging() {
    let (workers, begin) = (fleet(3), Instant::now());
    let times = |heard: bool| {
        let mut outliers = OutlierDetector::new(OutlierConfig::default());
        record_failures(&mut outliers, &workers, (1, 5), begin);
        let at = |seconds: u32| begin + SECOND * seconds;
        outliers.record_sent(WorkerId(1), at(10));
        if heard {
            outliers.record_answer_started(WorkerId(1));
        }
        assert_eq!(outliers.excluded(&workers, at(20)), [], "another one may go");
        outliers.record_sent(WorkerId(1), at(20));
        outliers.ejection(&workers[0]).map(|ejected| ejected.ejections)
    };
    assert_eq!((times(true), times(false)), (Some(1), Some(2)));
}

#[test]
fn a_worker_on_trial_still_counts_as_ejected() {
    let (workers, begin) = (fleet(4), Instant::now());
    let mut outliers = OutlierDetector::new(OutlierConfig::default());
    let ejects =
        |outliers: &mut OutlierDetector, which, now| record_failures(outliers, &workers, (which, 5), now).is_some();
    assert!(ejects(&mut outliers, 1, begin) && ejects(&mut outliers, 2, begin));
    let later = begin + SECOND * 11;
    assert_eq!(outliers.excluded(&workers, later), []);
    assert!(!ejects(&mut outliers, 3, later), "half of four are not known to be well");
    outliers.record_sent(WorkerId(1), later);
    assert!(outliers.record_success(id(&workers[0]), (later, later)));
    assert!(record_failures(&mut outliers, &workers, (3, 1), later).is_some(), "one of them is");
}

#[test]
fn ejection_time_is_capped() {
    let (workers, mut now) = (fleet(2), Instant::now());
    let mut outliers = OutlierDetector::new(OutlierConfig::default());
    record_failures(&mut outliers, &workers, (1, 5), now);
    for _ in 0..100 {
        let pause = outliers.ejection(&workers[0]).unwrap().time_to_trial(now);
        assert!(pause <= SECOND * 300, "{pause:?}");
        now += pause;
        outliers.record_sent(WorkerId(1), now);
        assert_eq!(record_failures(&mut outliers, &workers, (1, 1), now), Some(EjectionReason::Trial));
    }
    assert_eq!(outliers.ejection(&workers[0]).unwrap().time_to_trial(now), SECOND * 300);
}

#[test]
fn a_new_incarnation_starts_clean_and_departed_workers_are_forgotten() {
    let (mut workers, now) = (fleet(3), Instant::now());
    let mut outliers = OutlierDetector::new(OutlierConfig::default());
    record_failures(&mut outliers, &workers, (1, 5), now);
    workers[0].incarnation = Incarnation(2);
    assert_eq!(outliers.excluded(&workers, now), []);
    assert_eq!(record_failures(&mut outliers, &workers, (1, 4), now), None);
    assert_eq!(record_failures(&mut outliers, &workers, (1, 1), now), Some(EjectionReason::Consecutive));
    outliers.record_failure(&workers[1..], WorkerId(2), (now, now));
    assert_eq!(outliers.records.len(), 1);
}

#[test]
fn an_invalid_outlier_setting_names_what_is_accepted() {
    let well = OutlierConfig::default();
    assert_eq!(well.problem(), None);
    for (wrong, field) in [
        (OutlierConfig { interval: TimeSpan::seconds(0), ..well }, "outliers.interval"),
        (OutlierConfig { base_ejection_time: TimeSpan::seconds(0), ..well }, "outliers.base_ejection_time"),
        (OutlierConfig { max_ejection_time: TimeSpan::seconds(9), ..well }, "outliers.max_ejection_time"),
        (OutlierConfig { request_volume: 0, ..well }, "outliers.request_volume"),
        (OutlierConfig { trial_requests: 101, ..well }, "outliers.trial_requests"),
    ] {
        assert_eq!(wrong.problem().map(|(path, _)| path), Some(field));
    }
}

const PATH: &str = "/v1/completions";
const QUICK: [&str; 2] = ["outliers.consecutive_failures=3", "outliers.base_ejection_time=1s"];

async fn ask(router: &TestRouter, behave: &str) -> u16 {
    let body = json!({"model": "tiny", "prompt": "a history ".repeat(40), "behave": behave});
    post(router.proxy_address(), PATH, body.to_string()).await.status
}

async fn operator(router: &TestRouter, path: &str) -> Value {
    get(router.operator_address(), path).await.json()
}

async fn two_workers(settings: &[&str]) -> ([std::sync::Arc<StubWorker>; 2], TestRouter) {
    let workers = [StubWorker::start("one", "tiny").await, StubWorker::start("two", "tiny").await];
    let router = start_router(&[&workers[0], &workers[1]], settings).await;
    wait_until("both are ready", || router.gateway.worker_pool.ready(router.gateway.fleet()).len() == 2).await;
    (workers, router)
}

#[tokio::test]
async fn a_failing_worker_gets_no_requests_until_a_trial_succeeds() {
    let ([one, two], router) = two_workers(&QUICK).await;
    let ejected =
        || router.gateway.metrics.decisions.outliers.ejections.with_label_values(&["consecutive_failures"]).get();
    while ejected() == 0 {
        assert_eq!(ask(&router, "fail at one").await, 200, "the other one answers");
    }
    let asked = one.requests().len();
    assert!(asked >= 3, "{asked}");
    for _ in 0..10 {
        assert_eq!(ask(&router, "fail at one").await, 200);
    }
    let receipts = router.gateway.decisions.receipts.newest(10, |_| true);
    let tells = |attempt: &Attempt| attempt.ejected_workers == [WorkerId::of_endpoint(&one.url())];
    assert!(receipts.iter().any(|receipt| receipt.attempts.iter().any(tells)), "{receipts:?}");
    let trials = one.requests().len() - asked;
    assert!(trials <= 2, "{trials} of ten, and those only as the second was over");

    let listed = operator(&router, "/ownerserve/v1/workers").await;
    let lines = listed["workers"].as_array().unwrap();
    let of =
        |worker: &StubWorker| lines.iter().find(|line| line["endpoint"] == worker.url()).unwrap()["ejection"].clone();
    assert!(of(&one)["reason"].is_string() && of(&one)["count"].as_u64() >= Some(1), "{listed}");
    assert_eq!(of(&two), Value::Null);
    let ready = operator(&router, "/readyz").await;
    let degraded = ready["degraded"].as_array().unwrap();
    let line = degraded.iter().find(|line| line["reason"] == "ejected").unwrap();
    assert!(line["detail"].as_str().unwrap().contains(&one.url()), "{ready}");
    let metrics = get(router.operator_address(), "/metrics").await;
    let metrics = String::from_utf8_lossy(&metrics.body).into_owned();
    assert!(metrics.contains(&format!("ownerserve_worker_ejected{{worker=\"{}\"}} 1", one.address)), "{metrics}");

    // The worker is healthy now: a trial brings it back.
    let is_back = || operator(&router, "/readyz");
    while is_back().await["degraded"].as_array().unwrap().iter().any(|line| line["reason"] == "ejected") {
        assert_eq!(ask(&router, "answer").await, 200);
    }
}

#[tokio::test]
async fn when_all_workers_fail_all_are_still_tried() {
    let ([one, two], router) = two_workers(&QUICK).await;
    for n in 1..=8 {
        assert_eq!(ask(&router, "fail").await, 502);
        assert_eq!(one.requests().len() + two.requests().len(), 2 * n, "both are tried, whoever is ejected");
    }
    assert_eq!(ask(&router, "answer").await, 200);
}

#[tokio::test]
async fn client_errors_and_overload_do_not_eject() {
    let (_workers, router) = two_workers(&["outliers.consecutive_failures=1"]).await;
    for _ in 0..4 {
        assert_eq!((ask(&router, "refuse").await, ask(&router, "busy").await), (422, 429));
    }
    assert!(EjectionReason::VARIANTS.iter().all(|cause| {
        router.gateway.metrics.decisions.outliers.ejections.with_label_values(&[cause.as_ref()]).get() == 0
    }));
    let ejected =
        || router.gateway.metrics.decisions.outliers.ejections.with_label_values(&["consecutive_failures"]).get();
    for _ in 0..12 {
        assert_eq!(ask(&router, "fail").await, 502);
    }
    assert_eq!(ejected(), 0, "what fails at two workers is the request's fault");
    while ejected() == 0 {
        assert_eq!(ask(&router, "fail at one").await, 200);
    }
}

/// Sampled without a seed, so it cannot resume at another worker.
const SPOKEN: &str = "data: {\"choices\":[{\"index\":0,\"text\":\"words\"}]}\n\n";

#[tokio::test]
async fn broken_streams_eject() {
    let ([one, two], router) = two_workers(&["outliers.consecutive_failures=2", "retries.burst=0"]).await;
    let ejected =
        || router.gateway.metrics.decisions.outliers.ejections.with_label_values(&["consecutive_failures"]).get();
    let body =
        json!({"model": "tiny", "prompt": "a history ".repeat(40), "behave": "die", "stream": true, "before": SPOKEN});
    for _ in 0..8 {
        post(router.proxy_address(), PATH, body.to_string()).await;
    }
    assert_eq!(ejected(), 1, "one of {} and {}", one.requests().len(), two.requests().len());
}

#[tokio::test]
async fn a_refused_event_ends_its_stream_and_counts_against_no_worker() {
    let half_event = |bytes: usize| format!("{SPOKEN}data: \"{}", "x".repeat(bytes));
    for (limit, bytes, code, reason) in
        [("64KiB", 400 << 10, "overloaded", "no_memory"), ("256MiB", 17 << 20, "worker_failed", "too_long")]
    {
        let limit = format!("upstream.stream_buffer_limit={limit:?}");
        let ([one, two], router) = two_workers(&["outliers.consecutive_failures=2", &limit]).await;
        let body = json!({"model": "tiny", "prompt": "a history ".repeat(40), "behave": "die", "stream": true,
            "temperature": 0, "before": half_event(bytes)});
        for asked in 1..5 {
            let answer = post(router.proxy_address(), PATH, body.to_string()).await;
            let told = String::from_utf8(answer.body.to_vec()).unwrap();
            assert!(told.starts_with(SPOKEN) && told.contains(code) && !told.contains("xx"), "{told}");
            assert_eq!(one.requests().len() + two.requests().len(), asked, "another worker would send the same event");
        }
        let metrics = &router.gateway.metrics;
        assert_eq!(metrics.requests.refused_events.with_label_values(&[reason]).get(), 4);
        assert_eq!(metrics.decisions.outliers.ejections.with_label_values(&["consecutive_failures"]).get(), 0);
    }
}

#[test]
fn of_failures_without_a_second_opinion_one_of_each_tenant_counts_in_an_interval() {
    let mut outliers = OutlierDetector::new(OutlierConfig::default());
    let (begin, tenant) = (Instant::now(), |n: usize| vocabulary::TenantId(n.to_string().into()));
    let counted = |outliers: &mut OutlierDetector, now| {
        (0..300).filter(|n| outliers.counts_unconfirmed(&tenant(n % 2), now)).count()
    };
    assert_eq!(counted(&mut outliers, begin), 2);
    assert_eq!((counted(&mut outliers, begin + SECOND * 9), counted(&mut outliers, begin + SECOND * 10)), (0, 2));
    let many = (0..5000).filter(|n| outliers.counts_unconfirmed(&tenant(*n), begin + SECOND * 30)).count();
    assert_eq!((many, outliers.unconfirmed.len()), (MOST_TENANTS, MOST_TENANTS));
}

/// Sends a request of the first of two tenants; its client leaves once the second worker is processing it.
async fn leaves(router: &TestRouter, two: &StubWorker, body: &str) {
    let head = format!(
        "POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k1\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let client = crate::testing::raw(router.proxy_address(), format!("{head}{body}").as_bytes()).await;
    wait_until("the second one hangs", || two.active.count() == 1).await;
    drop(client);
    wait_until("it is over", || two.active.count() == 0 && router.gateway.metrics.requests.in_flight.get() == 0).await;
}

#[tokio::test]
async fn one_tenants_poison_ejects_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys.toml");
    std::fs::write(&keys, "[keys]\n\"k1\" = \"t1\"\n\"k2\" = \"t2\"").unwrap();
    let keys = format!("auth.keys_file={}", keys.display());
    let body = |behave: &str, before: Option<&str>| {
        let mut body = json!({"model": "tiny", "prompt": "a history ".repeat(40), "behave": behave});
        if let Some(before) = before {
            (body["stream"], body["before"]) = (json!(true), json!(before));
        }
        body.to_string()
    };
    // Without a retry; with one; cut inside an answer that may resume elsewhere, and inside one that may not.
    let cut = Some("data: {\"cut\":");
    let cases = [(0, "fail", None), (8, "fail", None), (0, "die", cut), (256, "die", cut), (256, "die", Some(SPOKEN))];
    for (burst, behave, before) in cases {
        let burst = format!("retries.burst={burst}");
        let ([one, two], router) =
            two_workers(&[&keys, "auth.verify_cache_salt=false", "outliers.interval=1h", &burst]).await;
        for _ in 0..150 {
            let request = http::Request::post(PATH).header("authorization", "Bearer k1");
            crate::testing::send(router.proxy_address(), request, body(behave, before)).await;
        }
        assert!(one.requests().len() + two.requests().len() >= 150);
        let workers = router.gateway.fleet().snapshot();
        assert_eq!(router.gateway.policies.outliers.lock().all_ejected(&workers), [], "{behave}, {burst}");
    }
    let ([_one, two], router) = two_workers(&[&keys, "auth.verify_cache_salt=false"]).await;
    for _ in 0..40 {
        leaves(&router, &two, &body("fail or hang", None)).await;
    }
    let workers = router.gateway.fleet().snapshot();
    assert_eq!(router.gateway.policies.outliers.lock().all_ejected(&workers), []);
}
