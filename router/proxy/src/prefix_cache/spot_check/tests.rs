use std::sync::Arc;
use std::time::Instant;

use http::{HeaderMap, Method};
use prefix::{FallbackReason, PromptContent};
use serde_json::{Value, json};
use vocabulary::{PrefixChain, PrefixId};

use super::*;
use crate::catalog::Model;
use crate::client_request::{ClientRequest, GenerationEndpoint};
use crate::pipeline::identify::IdentificationInput;
use crate::request_id::new_request_id;
use crate::request_parser::parse;
use crate::testing::{StubWorker, TestRouter, get, post, start_router, wait_until};
use crate::token_ids::LazyTokenIds;

const PATH: &str = "/v1/chat/completions";
const SETTINGS: [&str; 2] = ["models.tiny.tokenizer_dir=builtin", "prefix_cache.verify_every=1"];

fn body(turns: usize, settings: &Value) -> String {
    let mut messages = vec![json!({"role": "system", "content": "You are kind. ".repeat(60)})];
    for n in 0..turns {
        messages.push(json!({"role": "user", "content": format!("question {n}")}));
        messages.push(json!({"role": "assistant", "content": format!("answer {n}")}));
    }
    messages.push(json!({"role": "user", "content": format!("question {turns}")}));
    let mut body = json!({"model": "tiny", "messages": messages});
    body.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
    body.to_string()
}

async fn ask(router: &TestRouter, turns: usize, settings: Value) -> Option<&'static str> {
    ask_at(router, PATH, body(turns, &settings)).await
}

async fn ask_at(router: &TestRouter, path: &str, body: String) -> Option<&'static str> {
    let response = post(router.proxy_address(), path, body).await;
    assert_eq!(response.status, 200);
    let known = &router.gateway.decisions.receipts.newest(1, |_| true)[0].lookup;
    assert_eq!(known.token_ids_unavailable, None);
    known.tier
}

fn spot_check_count(router: &TestRouter, outcome: &str) -> u64 {
    router.gateway.metrics.prefix_cache.verifications.with_label_values(&[outcome]).get()
}

#[tokio::test]
async fn steps_with_any_options_reuse_the_previous_prompt_and_are_spot_checked() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &SETTINGS).await;
    assert_eq!(ask(&router, 0, json!({})).await, Some("miss"));
    assert_eq!(ask(&router, 1, json!({})).await, Some("leading"));
    assert_eq!(ask(&router, 2, json!({"prompt_cache_key": "s"})).await, Some("leading"), "named only now");
    assert_eq!(ask(&router, 3, json!({"prompt_cache_key": "s"})).await, Some("session"));
    let bound = json!({"prompt_cache_key": "s", "max_tokens": 7, "temperature": 0.5, "user": "u"});
    assert_eq!(ask(&router, 4, bound).await, Some("session"), "what decides no prompt may change");
    assert_eq!(router.gateway.metrics.prefix_cache.steps.with_label_values(&["miss"]).get(), 1);
    wait_until("all have been looked at", || {
        spot_check_count(&router, "match") + spot_check_count(&router, "skipped") == 4
    })
    .await;
    assert!(spot_check_count(&router, "match") > 0);
    let known = router.gateway.metrics.shared_cache.identified.with_label_values(&["conversation"]).get();
    assert!(known > 0 && !router.gateway.caches.prefix_cache.conversations.is_empty());
}

/// The conversation of `body` in the formats of `/v1/messages` and `/v1/responses`.
fn other_endpoint_bodies(turns: usize) -> [(&'static str, Value); 2] {
    let chat: Value = serde_json::from_str(&body(turns, &json!({}))).unwrap();
    let (system, said) = chat["messages"].as_array().unwrap().split_first().unwrap();
    let blocks = said.iter().map(|message| {
        let text = json!({"type": "text", "text": message["content"]});
        json!({"role": message["role"], "content": [text]})
    });
    let messages =
        json!({"model": "tiny", "max_tokens": 9, "system": system["content"], "messages": blocks.collect::<Value>()});
    let responses = json!({"model": "tiny", "instructions": system["content"], "input": said});
    [("/v1/messages", messages), ("/v1/responses", responses)]
}

#[tokio::test]
async fn steps_of_other_endpoints_reuse_the_previous_prompt_exactly() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &SETTINGS).await;
    ask(&router, 3, json!({})).await;
    let prompt = || router.gateway.decisions.receipts.newest(1, |_| true)[0].lookup.prompt_tokens;
    let whole = prompt();
    for at in [0, 1] {
        let step = async |turns: usize| {
            let (path, body) = other_endpoint_bodies(turns)[at].clone();
            ask_at(&router, path, body.to_string()).await
        };
        assert_eq!(step(1).await, Some("miss"));
        assert_eq!(step(2).await, Some("leading"));
        assert_eq!(step(3).await, Some("leading"));
        assert_eq!(prompt(), whole, "as many tokens as by the other endpoint");
    }
    wait_until("they have been looked at", || {
        spot_check_count(&router, "match") + spot_check_count(&router, "skipped") == 4
    })
    .await;
    assert!(
        spot_check_count(&router, "match") > 0
            && spot_check_count(&router, "token_mismatch") + spot_check_count(&router, "length_mismatch") == 0
    );
}

#[tokio::test]
async fn a_response_its_worker_forgot_continues_from_its_transcript_exactly() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &SETTINGS).await;
    let [_, (path, first)] = other_endpoint_bodies(2);
    let id = post(router.proxy_address(), path, first.to_string()).await.json()["id"].clone();
    let next = json!({"model": "tiny", "input": "and on", "previous_response_id": id, "behave": "forgotten"});
    let response = post(router.proxy_address(), path, next.to_string()).await;
    assert_eq!(
        (response.status, response.headers["x-ownerserve-history-source"].to_str().unwrap()),
        (200, "transcript")
    );
    let sent: Value = serde_json::from_slice(&worker.last_request().body).unwrap();
    assert_eq!(
        sent["input"].as_array().unwrap().len(),
        5 + 1 + 1,
        "all that was said before, the answer, and what is new"
    );
    let known = router.gateway.decisions.receipts.newest(1, |_| true)[0].lookup.clone();
    assert_eq!(
        (known.token_ids_unavailable, known.tier),
        (None, Some("miss")),
        "without the instructions it begins otherwise"
    );
}

#[tokio::test]
async fn an_image_prompt_falls_back_as_multimodal() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &SETTINGS).await;
    let ask = async |path: &str, body: Value| {
        assert_eq!(post(router.proxy_address(), path, body.to_string()).await.status, 200);
        router.gateway.decisions.receipts.newest(1, |_| true)[0].lookup.clone()
    };
    let turn = |part: Value| json!([{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]);
    let url = "data:image/png;base64,AAAA";
    let chat = json!({"model": "tiny", "messages": turn(json!({"type": "image_url", "image_url": {"url": url}}))});
    let source = json!({"type": "base64", "media_type": "image/png", "data": "AAAA"});
    let messages =
        json!({"model": "tiny", "max_tokens": 9, "messages": turn(json!({"type": "image", "source": source}))});
    let item = json!([{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]);
    let responses = json!({"model": "tiny", "input": item});
    for (path, body) in [(PATH, chat), ("/v1/messages", messages), ("/v1/responses", responses)] {
        let response = ask(path, body).await;
        assert_eq!((response.token_ids_unavailable, response.tier), (Some("multimodal"), None), "{path}");
        assert_eq!(response.max_overlap_tokens, Tokens::ZERO, "{path}");
    }
    let counted = router.gateway.metrics.plans.fallback.with_label_values(&["multimodal"]);
    assert_eq!(counted.get(), 3);
}

/// A step whose prompt extends the one before it.
fn extended_step(gateway: &crate::app_state::AppState, model: &Arc<Model>) -> IdentifiedRequest {
    let conversations = &gateway.caches.prefix_cache.conversations;
    let unnamed = |turns: usize| {
        let body = body(turns, &json!({}));
        let incoming = ClientRequest {
            id: new_request_id(),
            tenant: TenantId::default(),
            method: Method::POST,
            path: PATH.to_owned(),
            headers: HeaderMap::new(),
            body: body.into(),
            arrived: Instant::now(),
            token_reservation: None,
            memory: None,
            addition: None,
        };
        IdentificationInput::new(parse(incoming, GenerationEndpoint::ChatCompletions, None).unwrap(), model.clone())
    };
    unnamed(0).compute_whole(conversations, None);
    let step = unnamed(1);
    let found = step.extend_known(conversations).unwrap();
    step.with_prompt(found).identified
}

#[tokio::test]
async fn a_spot_check_difference_disables_prompt_reuse_for_the_model() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &SETTINGS[..1]).await;
    let model = router.gateway.catalog().model(&"tiny".into());
    let mut step = extended_step(&router.gateway, &model);
    let taken = |step: &IdentifiedRequest| PendingSpotCheck::new(step, LookupTier::Leading, Tokens::ZERO).run().0;
    assert_eq!(taken(&step), None);
    let ids = LazyTokenIds::of(&step).unwrap().read(&step.prompt.chain).unwrap().into_owned();
    assert_eq!(ids.len() as u64, step.prompt.chain.tokens.0);
    let other = PrefixChain::over_tokens(PrefixId(7), model.identifier.seed(), model.identifier.block(), &ids);
    assert!(LazyTokenIds::of(&step).unwrap().read(&other).is_none(), "leads elsewhere");
    step.prompt.content = PromptContent::Tail(vec![1]);
    assert_eq!(taken(&step), Some(IncrementalPromptMismatch::Tokens));

    assert_ne!(ask(&router, 2, json!({})).await, Some("miss"));
    let identity = &router.gateway.caches.prefix_cache;
    identity.spot_checks.enqueue(PendingSpotCheck::new(&step, LookupTier::Leading, Tokens::ZERO));
    wait_until("the difference is found", || model.is_disabled_by_spot_check()).await;
    assert_eq!(spot_check_count(&router, "token_mismatch"), 1);
    assert_eq!(ask(&router, 3, json!({})).await, Some("miss"));
    assert!(router.gateway.decisions.receipts.newest(1, |_| true)[0].lookup.disabled_by_spot_check);
    let ready = get(router.operator_address(), "/readyz").await.json();
    assert_eq!(
        (&ready["degraded"][0]["component"], &ready["degraded"][0]["reason"]),
        (&json!("prefix_cache"), &json!("disabled_by_verification"))
    );
    let metrics = get(router.operator_address(), "/metrics").await;
    assert!(String::from_utf8_lossy(&metrics.body).contains("ownerserve_prefix_cache_disabled_models 1"));
}

#[tokio::test]
async fn a_spot_check_that_cannot_render_drops_the_prompt_but_trusts_the_model() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &SETTINGS[..1]).await;
    let model = router.gateway.catalog().model(&"tiny".into());
    let mut step = extended_step(&router.gateway, &model);
    // As if the template had refused it.
    step.request.incoming.body = body(1, &json!({"continue_final_message": true})).into();
    let identity = &router.gateway.caches.prefix_cache;
    let look = PendingSpotCheck::new(&step, LookupTier::Leading, Tokens::ZERO);
    assert_eq!(look.run().0, Some(IncrementalPromptMismatch::Refused(FallbackReason::Malformed)));
    identity.spot_checks.enqueue(look);
    wait_until("it has been looked at", || spot_check_count(&router, "malformed") == 1).await;
    assert!(!model.is_disabled_by_spot_check());
    assert_eq!(ask(&router, 2, json!({})).await, Some("leading"), "other conversations go on");
}

#[tokio::test]
async fn zero_cache_memory_computes_every_prompt_from_scratch() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &[SETTINGS[0], "prefix_cache.memory_limit=0B"]).await;
    assert_eq!(ask(&router, 0, json!({})).await, Some("miss"));
    assert_eq!(ask(&router, 1, json!({})).await, Some("miss"));
    for (path, body) in other_endpoint_bodies(1) {
        assert_eq!(ask_at(&router, path, body.to_string()).await, Some("miss"));
    }
    assert!(router.gateway.caches.prefix_cache.conversations.is_empty());
}
