use std::sync::Arc;
use std::time::Instant;

use planner::{Handoff, HandoffKind, LegRole, LegSequence, Plan};
use serde_json::{Value, json};
use vocabulary::{TenantId, WorkerId};
use workers_shim::engine_api::LegBody;
use workers_shim::sim::SimWorker;

use super::*;
use crate::app_state::AppState;
use crate::client_request::GenerationEndpoint;
use crate::lab::sim_command::tests::{sim, url};
use crate::leg_outcome::FailedAttempt;
use crate::memory_budget::{MemoryBudget, MemoryLimits};
use crate::outliers::TrialGuard;
use crate::pipeline::end_guard::EndGuard;
use crate::pipeline::plan;
use crate::pipeline::plan::PlanGuards;
use crate::pipeline::planning::{PlanVerdict, Planning};
use crate::pipeline::tests::classified_step;
use crate::request_states::{ClassifiedStep, PlannedStep};
use crate::testing::{TestRouter, get, start_router_at, wait_until};

async fn pair(producer: &[&str]) -> (SimWorker, SimWorker, TestRouter) {
    let (p, d) = (sim(&[&["--role=prefill"], producer].concat()).await, sim(&["--role=decode", "--speed-up=50"]).await);
    let router = start_router_at(&[format!("{}#prefill", url(&p)), format!("{}#decode", url(&d))], &[]).await;
    wait_until("both are ready", || router.gateway.worker_pool.ready(router.gateway.fleet()).len() == 2).await;
    (p, d, router)
}

const ENDPOINTS: [GenerationEndpoint; 3] =
    [GenerationEndpoint::Completions, GenerationEndpoint::Messages, GenerationEndpoint::Responses];

/// The legs of a long prompt for an endpoint, and a plan that computes it at `p` and answers at `d`.
async fn planned(
    app_state: &Arc<AppState>,
    (p, d): (&SimWorker, &SimWorker),
    endpoint: GenerationEndpoint,
) -> (Legs, LegPair, Plan) {
    let step = step(app_state, endpoint).await;
    let plan = plan::plan(&app_state.pipeline.plan, &step, &[]).unwrap().0.plan;
    let at = |worker: &SimWorker| WorkerId::of_endpoint(&url(worker));
    let prefill = Leg { role: LegRole::Prefill, worker: at(p), ..*plan.prompt_leg() };
    let decode = Leg { role: LegRole::Decode, worker: at(d), ..*plan.answer_leg() };
    let (source, target, bytes) = (prefill.at(), decode.at(), vocabulary::Bytes(1));
    let handoff = Handoff { kind: HandoffKind::RemotePrefill, source, target, blocks: None, bytes };
    let plan = Plan { sequence: LegSequence::remote_prefill(prefill, handoff, decode), ..plan };
    (Legs::of(&app_state.workers, &step), LegPair { prefill, decode }, plan)
}

async fn legs(
    app_state: &Arc<AppState>,
    workers: (&SimWorker, &SimWorker),
    endpoint: GenerationEndpoint,
) -> (Legs, LegPair) {
    let (legs, pair, _) = planned(app_state, workers, endpoint).await;
    (legs, pair)
}

async fn step(app_state: &Arc<AppState>, endpoint: GenerationEndpoint) -> ClassifiedStep {
    let text = "word ".repeat(2000);
    let mut body =
        json!({"model": "tiny", "temperature": 0, "ignore_eos": true, "max_tokens": 8, "max_output_tokens": 8});
    body[endpoint.input()] = match endpoint {
        GenerationEndpoint::ChatCompletions | GenerationEndpoint::Messages => {
            json!([{"role": "user", "content": text}])
        }
        GenerationEndpoint::Completions | GenerationEndpoint::Responses => json!(text),
    };
    classified_step(app_state, endpoint, &body).await
}

/// Sum of one of the worker's metrics over all labels.
async fn metric(worker: &SimWorker, name: &str) -> f64 {
    let page = String::from_utf8(get(worker.address(), "/metrics").await.body.to_vec()).unwrap();
    let values = page.lines().filter(|line| line.split(['{', ' ']).next() == Some(name));
    values.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
}

async fn wait_for_metric(worker: &SimWorker, (name, wanted): (&str, f64)) {
    let deadline = Instant::now() + Duration::from_secs(5);
    while metric(worker, name).await != wanted {
        assert!(Instant::now() < deadline, "{name} never became {wanted}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

const RUNNING: &str = "vllm:num_requests_running";
const PROMPTS: &str = "vllm:prompt_tokens_total";
const HITS: &str = "vllm:external_prefix_cache_hits_total";

/// Returns the text of a whole answer.
fn text(endpoint: GenerationEndpoint, answer: &Value) -> Value {
    let text = match endpoint {
        GenerationEndpoint::ChatCompletions => &answer["choices"][0]["message"]["content"],
        GenerationEndpoint::Completions => &answer["choices"][0]["text"],
        GenerationEndpoint::Messages => &answer["content"][0]["text"],
        GenerationEndpoint::Responses => &answer["output"][0]["content"][0]["text"],
    };
    assert!(text.as_str().is_some_and(|text| !text.is_empty()), "{answer}");
    text.clone()
}

#[tokio::test]
async fn remote_prefill_answers_and_pulls_the_blocks() {
    for endpoint in ENDPOINTS {
        let (p, d, router) = pair(&["--speed-up=50"]).await;
        let (legs, pair) = legs(&router.gateway, (&p, &d), endpoint).await;
        let (opened, remarks) = remote_prefill(legs, pair, None).await;
        let Ok(LegResponse::Whole(answer, told)) = opened else { panic!("{remarks:?}") };
        assert_eq!((answer.status().as_u16(), told.usage.unwrap().completion.0), (200, 8), "{endpoint:?}");
        assert_eq!(remarks, []);
        assert!(metric(&d, HITS).await > 1000.0, "{endpoint:?}: the prompt was not computed again");
    }
}

#[tokio::test]
async fn a_client_that_leaves_during_prefill_cancels_the_legs() {
    for endpoint in ENDPOINTS {
        let (p, d, router) = pair(&["--speed-up=0.01"]).await;
        let (legs, pair) = legs(&router.gateway, (&p, &d), endpoint).await;
        let asked = tokio::spawn(async move { remote_prefill(legs, pair, None).await });
        wait_for_metric(&p, (RUNNING, 1.0)).await;
        asked.abort();
        wait_for_metric(&p, (RUNNING, 0.0)).await;
        assert_eq!(metric(&d, PROMPTS).await, 0.0, "{endpoint:?}: there is nothing to be pulled");
    }
}

#[tokio::test]
async fn the_decode_leg_pulls_blocks_after_the_client_left() {
    for endpoint in ENDPOINTS {
        let (p, d, router) = pair(&["--speed-up=50"]).await;
        let (legs, pair) = legs(&router.gateway, (&p, &d), endpoint).await;
        let mut remarks = Vec::new();
        let transfer = legs.transfer(&pair.prefill, &pair.decode).unwrap();
        let handoff = prefill((&legs, &pair), (&transfer, None), &mut remarks).await;
        assert!(handoff.is_some() && remarks.is_empty(), "{endpoint:?}: {remarks:?}");
        let (client, left) = oneshot::channel();
        drop(left);
        run_decode((&legs, &pair), (&transfer, handoff, remarks), client).await;
        assert!(metric(&d, HITS).await > 1000.0, "{endpoint:?}");
        assert_eq!(metric(&d, "vllm:generation_tokens_total").await, 1.0, "{endpoint:?}");
    }
}

#[tokio::test]
async fn a_dying_producer_costs_a_recompute_and_loses_no_text() {
    for endpoint in ENDPOINTS {
        let (p, d, router) = pair(&["--speed-up=0.01"]).await;
        let (legs, pair) = legs(&router.gateway, (&p, &d), endpoint).await;
        let expected = {
            let plain = legs.body.plain(&legs.options).into_bytes();
            text(endpoint, &crate::testing::post(d.address(), legs.path(), plain).await.json())
        };
        let asked = tokio::spawn(async move { remote_prefill(legs, pair, None).await });
        wait_for_metric(&p, (RUNNING, 1.0)).await;
        drop(p);
        let (opened, remarks) = asked.await.unwrap();
        let Ok(LegResponse::Whole(answer, _)) = opened else { panic!("{remarks:?}") };
        assert_eq!(text(endpoint, &serde_json::from_slice(answer.body()).unwrap()), expected);
        assert_eq!(remarks, [AttemptEvent::PrefillFailed], "{endpoint:?}");
    }
}

#[tokio::test]
async fn returned_kv_is_fetched_or_recomputed_when_its_holder_is_gone() {
    let flags = ["--kv-connector=nixl_bidirectional", "--speed-up=50"];
    let [p, d, e] = [
        sim(&[&["--role=prefill"], &flags[..]].concat()).await,
        sim(&[&["--role=decode"], &flags[..]].concat()).await,
        sim(&[&["--role=decode"], &flags[..]].concat()).await,
    ];
    let declared = [(&p, "prefill"), (&d, "decode"), (&e, "decode")].map(|(worker, role)| {
        format!("{{url=\"{}#{role}\",profile={{link={{connector=\"nixl_bidirectional\"}}}}}}", url(worker))
    });
    let router = start_router_at(&[], &[&format!("workers=[{}]", declared.join(","))]).await;
    wait_until("all are ready", || router.gateway.worker_pool.ready(router.gateway.fleet()).len() == 3).await;
    let (legs_d, pair_d) = legs(&router.gateway, (&p, &d), GenerationEndpoint::Completions).await;
    let (legs_e, pair_e) = legs(&router.gateway, (&p, &e), GenerationEndpoint::Completions).await;
    let fates = router.gateway.metrics.plans.kv_movement.reverse_pulls.clone();
    let fate = |fate: ReversePullOutcome| fates.with_label_values(&[fate.as_ref()]).get();
    let handed_back = async || {
        let (opened, _) = remote_prefill(legs_d.clone(), pair_d, None).await;
        let Ok(LegResponse::Whole(_, told)) = opened else { panic!("no answer") };
        let fates = fates.clone();
        Some(ReversePullSource {
            params: told.reverse_pull.expect("it is handed back"),
            holder: pair_d.decode.worker,
            outcomes: fates,
        })
    };
    let expected = {
        let plain = legs_e.body.plain(&legs_e.options).into_bytes();
        text(GenerationEndpoint::Completions, &crate::testing::post(e.address(), legs_e.path(), plain).await.json())
    };
    // The same prompt again: the holder has all of it, the source has lost it.
    let back = handed_back().await;
    crate::testing::post(p.address(), "/reset_prefix_cache", "").await;
    let (opened, remarks) = remote_prefill(legs_e.clone(), pair_e, back).await;
    let Ok(LegResponse::Whole(answer, _)) = opened else { panic!("{remarks:?}") };
    assert_eq!(text(GenerationEndpoint::Completions, &serde_json::from_slice(answer.body()).unwrap()), expected);
    assert!(remarks.is_empty() && metric(&p, HITS).await > 1000.0, "{remarks:?}");
    let back = handed_back().await;
    crate::testing::post(p.address(), "/reset_prefix_cache", "").await;
    drop(d);
    let (opened, remarks) = remote_prefill(legs_e, pair_e, back).await;
    let Ok(LegResponse::Whole(answer, _)) = opened else { panic!("{remarks:?}") };
    assert_eq!(text(GenerationEndpoint::Completions, &serde_json::from_slice(answer.body()).unwrap()), expected);
    assert_eq!(remarks, [AttemptEvent::ReversePullFailed]);
    assert_eq!((fate(ReversePullOutcome::Pulled), fate(ReversePullOutcome::Failed)), (1, 1));
}

#[tokio::test]
async fn a_failed_trial_with_two_suspects_counts_against_neither_when_the_client_leaves() {
    let (p, d) = (sim(&["--role=prefill"]).await, sim(&["--role=decode"]).await);
    let other = sim(&[]).await;
    let workers = [format!("{}#prefill", url(&p)), format!("{}#decode", url(&d)), url(&other)];
    let router = start_router_at(&workers, &[]).await;
    let app_state = &router.gateway;
    wait_until("all are ready", || app_state.worker_pool.ready(app_state.fleet()).len() == 3).await;
    let (outliers, sick) = (&app_state.policies.outliers, WorkerId::of_endpoint(&url(&d)));
    let views = app_state.fleet().snapshot();
    let ejected = || {
        let view = views.iter().find(|view| view.id == sick).unwrap();
        outliers.lock().ejection(view).map(|ejected| (ejected.ejections, ejected.is_on_trial()))
    };
    let long_ago = Instant::now().checked_sub(Duration::from_secs(60)).unwrap();
    for _ in 0..5 {
        outliers.lock().record_failure(&views, sick, (long_ago, long_ago));
    }
    assert_eq!(ejected(), Some((1, false)));

    let (_, _, plan) = planned(app_state, (&p, &d), GenerationEndpoint::Completions).await;
    let first = Planning::first(step(app_state, GenerationEndpoint::Completions).await);
    let both = |step: &ClassifiedStep, failed: &[WorkerId]| {
        let trials = TrialGuard::begin(outliers, plan.workers());
        let planned = plan::plan(&app_state.pipeline.plan, step, failed);
        planned.map(|(planned, guards)| (PlannedStep { plan, ..planned }, PlanGuards { trials, ..guards }))
    };
    let Ok(PlanVerdict::Start(dispatched)) = first.plan(&app_state.pipeline.plan, both) else { panic!("it starts") };
    assert_eq!(ejected(), Some((1, true)));
    let error = LegError::Failed(http::StatusCode::INTERNAL_SERVER_ERROR);
    let failed = FailedAttempt { sent_at: Instant::now(), events: Vec::new(), exclude: sick, error };
    let Ok(again) = dispatched.failed(&app_state.pipeline.stream.reporter, failed) else { panic!("it is tried again") };
    assert_eq!(ejected(), Some((1, true)), "it may have been the other one");
    let next = again.plan(&app_state.pipeline.plan, |step, failed| plan::plan(&app_state.pipeline.plan, step, failed));
    let Ok(PlanVerdict::Start(dispatched)) = next else { panic!("it starts again") };
    drop(EndGuard::new(*dispatched, &app_state.pipeline.ends));
    assert_eq!(ejected(), Some((1, false)), "no other worker was asked");
}

#[tokio::test]
async fn bodies_of_legs_are_charged_to_the_client_until_they_were_sent() {
    let (p, d, router) = pair(&["--speed-up=50"]).await;
    let (legs, plan) = legs(&router.gateway, (&p, &d), GenerationEndpoint::Completions).await;
    let source = legs.body.scanned_json().body().clone();
    let metrics = crate::telemetry::metrics::Metrics::default().memory;
    // Legs with room for the client's body and `room` bytes more.
    let with_room = |room: usize| {
        let size = source.len() + room;
        let budget = MemoryBudget::new(MemoryLimits { total: size, tenant: size }, &metrics);
        let mut memory = budget.reservation(&TenantId::default());
        memory.grow(source.len()).unwrap();
        let mut with_room = legs.clone();
        with_room.reserved = Some(Arc::new(memory));
        with_room
    };
    let reserved = || usize::try_from(metrics.reserved.get()).unwrap();
    let transfer = legs.transfer(&plan.prefill, &plan.decode).unwrap();
    let another = legs.body.prefill(&legs.options, (&transfer, None));
    let one = with_room(another.copied_bytes());
    let body = one.charge(one.body.prefill(&one.options, (&transfer, None))).unwrap();
    assert_eq!(reserved(), source.len() + body.copied_bytes());
    let second = one.charge(another);
    let Err(LegError::OverBudget(refused)) = second else { panic!("there is room for one leg") };
    assert_eq!(refused.status().as_u16(), 429);
    drop(body);
    assert_eq!(one.charge(LegBody::shared(source.clone())).unwrap().into_bytes().as_ptr(), source.as_ptr());
    assert_eq!(reserved(), source.len(), "the client's own body is no copy");
    assert!(
        one.send_silent(&plan.prefill, one.path(), one.body.prefill(&one.options, (&transfer, None))).await.is_ok()
    );
    wait_until("it was sent", || reserved() == source.len()).await;

    let full = with_room(0);
    let longer = full.body.prefill(&full.options, (&transfer, None));
    let Err(error) = full.serve(&plan.decode, longer).await else { panic!("there was no room for a leg") };
    assert_eq!((error.retryable(), error.client_error().status().as_u16()), (false, 413), "it would never fit");
    assert_eq!(error.attempt_event(), AttemptEvent::MemoryBudgetExceeded);
    let (opened, remarks) = remote_prefill(full, plan, None).await;
    assert!(opened.is_ok(), "the target computes the prompt from the client's own body");
    assert_eq!(remarks, [AttemptEvent::MemoryBudgetExceeded]);
}
