use std::sync::Arc;
use std::time::Instant;

use http::{HeaderMap, Method};
use planner::Leg;
use serde_json::{Value, json};
use vocabulary::{TenantId, WorkerId};
use workers_shim::sim::SimWorker;

use super::*;
use crate::gateway::Gateway;
use crate::incoming::{Endpoint, Incoming, new_request_id};
use crate::outliers::Trials;
use crate::pipeline::execute::Failed;
use crate::pipeline::plan::{Classified, Planned};
use crate::pipeline::underway::Underway;
use crate::pipeline::{identify, locate, parse, plan};
use crate::sim_command::tests::{sim, url};
use crate::testing::{Front, front_of, get, until};

async fn pair(producer: &[&str]) -> (SimWorker, SimWorker, Front) {
    let (p, d) = (sim(&[&["--role=prefill"], producer].concat()).await, sim(&["--role=decode", "--speed-up=50"]).await);
    let front = front_of(&[format!("{}#prefill", url(&p)), format!("{}#decode", url(&d))], &[]).await;
    until("both are ready", || front.gateway.roster.ready(front.gateway.fleet()).len() == 2).await;
    (p, d, front)
}

const ENDPOINTS: [Endpoint; 3] = [Endpoint::Completions, Endpoint::Messages, Endpoint::Responses];

/// The legs of a long prompt in the words of an endpoint, and a plan that computes it at `p` and answers at `d`.
async fn legs(gateway: &Arc<Gateway>, (p, d): (&SimWorker, &SimWorker), endpoint: Endpoint) -> (Legs, Plan) {
    let step = step(gateway, endpoint).await;
    let at = |worker: &SimWorker| WorkerId::of_endpoint(&url(worker));
    let plan = plan::plan(gateway, &step, &[]).unwrap().plan;
    let bytes = vocabulary::Bytes(1);
    let plan = Plan {
        prefill: Leg { worker: at(p), ..plan.prefill },
        decode: Leg { worker: at(d), ..plan.decode },
        handoff: Some(planner::Handoff::RemotePrefill { bytes }),
        ..plan
    };
    (Legs::of(gateway, &step), plan)
}

async fn step(gateway: &Arc<Gateway>, endpoint: Endpoint) -> Classified {
    let text = "word ".repeat(2000);
    let mut body =
        json!({"model": "tiny", "temperature": 0, "ignore_eos": true, "max_tokens": 8, "max_output_tokens": 8});
    body[endpoint.input()] = match endpoint {
        Endpoint::ChatCompletions | Endpoint::Messages => json!([{"role": "user", "content": text}]),
        Endpoint::Completions | Endpoint::Responses => json!(text),
    };
    let incoming = Incoming {
        id: new_request_id(),
        tenant: TenantId::default(),
        method: Method::POST,
        path: endpoint.path().into(),
        headers: HeaderMap::new(),
        body: body.to_string().into(),
        arrived: Instant::now(),
        reserved: None,
        memory: None,
        adds: None,
    };
    let request = parse::parse(incoming, endpoint, None).unwrap();
    let model = gateway.catalog().model(&request.model);
    let request = identify::Unnamed::new(request, model);
    let found = request.whole(&gateway.remembered.identity.trails, None);
    let named = request.named(found);
    plan::classify(gateway, locate::locate(gateway, named.prefixed, named.chat).await.unwrap())
}

/// The value of one of the worker's metrics, all labels together.
async fn metric(worker: &SimWorker, name: &str) -> f64 {
    let page = String::from_utf8(get(worker.address(), "/metrics").await.body.to_vec()).unwrap();
    let values = page.lines().filter(|line| line.split(['{', ' ']).next() == Some(name));
    values.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
}

async fn becomes(worker: &SimWorker, (name, wanted): (&str, f64)) {
    let deadline = Instant::now() + Duration::from_secs(5);
    while metric(worker, name).await != wanted {
        assert!(Instant::now() < deadline, "{name} never became {wanted}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

const RUNNING: &str = "vllm:num_requests_running";
const PROMPTS: &str = "vllm:prompt_tokens_total";
const HITS: &str = "vllm:external_prefix_cache_hits_total";

/// The text of a whole answer.
fn text(endpoint: Endpoint, answer: &Value) -> Value {
    let text = match endpoint {
        Endpoint::ChatCompletions => &answer["choices"][0]["message"]["content"],
        Endpoint::Completions => &answer["choices"][0]["text"],
        Endpoint::Messages => &answer["content"][0]["text"],
        Endpoint::Responses => &answer["output"][0]["content"][0]["text"],
    };
    assert!(text.as_str().is_some_and(|text| !text.is_empty()), "{answer}");
    text.clone()
}

#[tokio::test]
async fn both_legs_give_one_answer_and_the_blocks_are_pulled() {
    for endpoint in ENDPOINTS {
        let (p, d, front) = pair(&["--speed-up=50"]).await;
        let (legs, plan) = legs(&front.gateway, (&p, &d), endpoint).await;
        let (opened, remarks) = remote_prefill(legs, &plan, None).await;
        let Ok(Opened::Whole(answer, told)) = opened else { panic!("{remarks:?}") };
        assert_eq!((answer.status().as_u16(), told.usage.unwrap().completion.0), (200, 8), "{endpoint:?}");
        assert_eq!(remarks, []);
        assert!(metric(&d, HITS).await > 1000.0, "{endpoint:?}: the prompt was not computed again");
    }
}

#[tokio::test]
async fn a_client_that_leaves_while_the_prompt_is_computed_cancels_it_and_holds_nothing() {
    for endpoint in ENDPOINTS {
        let (p, d, front) = pair(&["--speed-up=0.01"]).await;
        let (legs, plan) = legs(&front.gateway, (&p, &d), endpoint).await;
        let asked = tokio::spawn(async move { remote_prefill(legs, &plan, None).await });
        becomes(&p, (RUNNING, 1.0)).await;
        asked.abort();
        becomes(&p, (RUNNING, 0.0)).await;
        assert_eq!(metric(&d, PROMPTS).await, 0.0, "{endpoint:?}: there is nothing to be pulled");
    }
}

#[tokio::test]
async fn blocks_that_a_client_left_behind_are_pulled_for_one_token() {
    for endpoint in ENDPOINTS {
        let (p, d, front) = pair(&["--speed-up=50"]).await;
        let (legs, plan) = legs(&front.gateway, (&p, &d), endpoint).await;
        let mut remarks = Vec::new();
        let transfer = legs.transfer(&plan.prefill, &plan.decode).unwrap();
        let handoff = prefill((&legs, &plan), (&transfer, None), &mut remarks).await;
        assert!(handoff.is_some() && remarks.is_empty(), "{endpoint:?}: {remarks:?}");
        let (client, left) = oneshot::channel();
        drop(left);
        answer((&legs, &plan), (&transfer, handoff, remarks), client).await;
        assert!(metric(&d, HITS).await > 1000.0, "{endpoint:?}");
        assert_eq!(metric(&d, "vllm:generation_tokens_total").await, 1.0, "{endpoint:?}");
    }
}

#[tokio::test]
async fn a_producer_that_dies_costs_a_recompute_and_no_text() {
    for endpoint in ENDPOINTS {
        let (p, d, front) = pair(&["--speed-up=0.01"]).await;
        let (legs, plan) = legs(&front.gateway, (&p, &d), endpoint).await;
        let expected = {
            let plain = legs.body.plain(&legs.options);
            text(endpoint, &crate::testing::post(d.address(), legs.path(), plain).await.json())
        };
        let asked = tokio::spawn(async move { remote_prefill(legs, &plan, None).await });
        becomes(&p, (RUNNING, 1.0)).await;
        drop(p);
        let (opened, remarks) = asked.await.unwrap();
        let Ok(Opened::Whole(answer, _)) = opened else { panic!("{remarks:?}") };
        assert_eq!(text(endpoint, &serde_json::from_slice(answer.body()).unwrap()), expected);
        assert_eq!(remarks, [Remark::PrefillFailed], "{endpoint:?}");
    }
}

#[tokio::test]
async fn what_a_target_hands_back_is_fetched_or_computed_where_that_target_is_gone() {
    let flags = ["--dialect=bidirectional", "--speed-up=50"];
    let [p, d, e] = [
        sim(&[&["--role=prefill"], &flags[..]].concat()).await,
        sim(&[&["--role=decode"], &flags[..]].concat()).await,
        sim(&[&["--role=decode"], &flags[..]].concat()).await,
    ];
    let declared = [(&p, "prefill"), (&d, "decode"), (&e, "decode")].map(|(worker, role)| {
        format!("{{url=\"{}#{role}\",profile={{link={{dialect=\"bidirectional\"}}}}}}", url(worker))
    });
    let front = front_of(&[], &[&format!("workers=[{}]", declared.join(","))]).await;
    until("all are ready", || front.gateway.roster.ready(front.gateway.fleet()).len() == 3).await;
    let (legs_d, plan_d) = legs(&front.gateway, (&p, &d), Endpoint::Completions).await;
    let (legs_e, plan_e) = legs(&front.gateway, (&p, &e), Endpoint::Completions).await;
    let fates = front.gateway.metrics.plans.between_steps.readbacks.clone();
    let fate = |fate: Fate| fates.with_label_values(&[fate.as_ref()]).get();
    let handed_back = async || {
        let (opened, _) = remote_prefill(legs_d.clone(), &plan_d, None).await;
        let Ok(Opened::Whole(_, told)) = opened else { panic!("no answer") };
        let fates = fates.clone();
        Some(Back { readback: told.readback.expect("it is handed back"), keeper: plan_d.decode.worker, fates })
    };
    let expected = {
        let plain = legs_e.body.plain(&legs_e.options);
        text(Endpoint::Completions, &crate::testing::post(e.address(), legs_e.path(), plain).await.json())
    };
    // The same prompt again, all of which lies there; the source has lost it.
    let back = handed_back().await;
    crate::testing::post(p.address(), "/reset_prefix_cache", "").await;
    let (opened, remarks) = remote_prefill(legs_e.clone(), &plan_e, back).await;
    let Ok(Opened::Whole(answer, _)) = opened else { panic!("{remarks:?}") };
    assert_eq!(text(Endpoint::Completions, &serde_json::from_slice(answer.body()).unwrap()), expected);
    assert!(remarks.is_empty() && metric(&p, HITS).await > 1000.0, "{remarks:?}");
    let back = handed_back().await;
    crate::testing::post(p.address(), "/reset_prefix_cache", "").await;
    drop(d);
    let (opened, remarks) = remote_prefill(legs_e, &plan_e, back).await;
    let Ok(Opened::Whole(answer, _)) = opened else { panic!("{remarks:?}") };
    assert_eq!(text(Endpoint::Completions, &serde_json::from_slice(answer.body()).unwrap()), expected);
    assert_eq!(remarks, [Remark::ReadbackFailed]);
    assert_eq!((fate(Fate::Fetched), fate(Fate::Failed)), (1, 1));
}

#[tokio::test]
async fn a_trial_that_failed_beside_another_worker_counts_once_it_is_known_whose_fault_it_was() {
    let (p, d) = (sim(&["--role=prefill"]).await, sim(&["--role=decode"]).await);
    let other = sim(&[]).await;
    let workers = [format!("{}#prefill", url(&p)), format!("{}#decode", url(&d)), url(&other)];
    let front = front_of(&workers, &[]).await;
    let gateway = &front.gateway;
    until("all are ready", || gateway.roster.ready(gateway.fleet()).len() == 3).await;
    let (outliers, sick) = (&gateway.policies.outliers, WorkerId::of_endpoint(&url(&d)));
    let views = gateway.fleet().snapshot();
    let ejected = || {
        let view = views.iter().find(|view| view.id == sick).unwrap();
        outliers.lock().ejected(view).map(|ejected| (ejected.times, ejected.is_on_trial()))
    };
    let long_ago = Instant::now().checked_sub(Duration::from_secs(60)).unwrap();
    for _ in 0..5 {
        outliers.lock().failed(&views, sick, (long_ago, long_ago));
    }
    assert_eq!(ejected(), Some((1, false)));

    let (_, plan) = legs(gateway, (&p, &d), Endpoint::Completions).await;
    let mut underway = Underway::new(gateway, step(gateway, Endpoint::Completions).await);
    let both = |step: &Classified, failed: &[WorkerId]| {
        let trials = Trials::begin(outliers, plan.workers());
        plan::plan(gateway, step, failed).map(|planned| Planned { plan, trials, ..planned })
    };
    underway.planned(both).unwrap().unwrap();
    assert_eq!(ejected(), Some((1, true)));
    let error = LegError::Failed(http::StatusCode::INTERNAL_SERVER_ERROR);
    underway.failed(Failed { asked: Instant::now(), remarks: Vec::new(), exclude: sick, error }).unwrap();
    assert_eq!(ejected(), Some((1, true)), "it may have been the other one");
    underway.planned(|step, failed| plan::plan(gateway, step, failed)).unwrap().unwrap();
    drop(underway);
    assert_eq!(ejected(), Some((2, false)), "nobody else has shown to be sick");
}
