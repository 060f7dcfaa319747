use std::sync::Arc;
use std::time::Instant;

use http::{HeaderMap, Method};
use prefix::{Content, FallbackReason};
use serde_json::{Value, json};
use vocabulary::{Chain, PrefixId};

use super::*;
use crate::catalog::Model;
use crate::incoming::{Endpoint, Incoming, new_request_id};
use crate::pipeline::identify::Unnamed;
use crate::pipeline::parse::parse;
use crate::pipeline::token_ids::TokenIds;
use crate::testing::{Front, Worker, front, get, post, until};

const PATH: &str = "/v1/chat/completions";
const SETTINGS: [&str; 2] = ["models.tiny.text=builtin", "identity.look_every=1"];

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

async fn ask(front: &Front, turns: usize, settings: Value) -> Option<&'static str> {
    ask_at(front, PATH, body(turns, &settings)).await
}

async fn ask_at(front: &Front, path: &str, body: String) -> Option<&'static str> {
    let got = post(front.proxy_address(), path, body).await;
    assert_eq!(got.status, 200);
    let known = &front.gateway.decisions.receipts.newest(1, |_| true)[0].known;
    assert_eq!(known.fallback, None);
    known.rung
}

fn looks(front: &Front, outcome: &str) -> u64 {
    front.gateway.metrics.identity.looks.with_label_values(&[outcome]).get()
}

#[tokio::test]
async fn steps_are_known_from_the_one_before_whatever_else_they_ask_for_and_looked_at() {
    let worker = Worker::start("one", "tiny").await;
    let front = front(&[&worker], &SETTINGS).await;
    assert_eq!(ask(&front, 0, json!({})).await, Some("cold"));
    assert_eq!(ask(&front, 1, json!({})).await, Some("leading"));
    assert_eq!(ask(&front, 2, json!({"prompt_cache_key": "s"})).await, Some("leading"), "named only now");
    assert_eq!(ask(&front, 3, json!({"prompt_cache_key": "s"})).await, Some("session"));
    let bound = json!({"prompt_cache_key": "s", "max_tokens": 7, "temperature": 0.5, "user": "u"});
    assert_eq!(ask(&front, 4, bound).await, Some("session"), "what decides no prompt may change");
    assert_eq!(front.gateway.metrics.identity.steps.with_label_values(&["cold"]).get(), 1);
    until("all have been looked at", || looks(&front, "same") + looks(&front, "left_out") == 4).await;
    assert!(looks(&front, "same") > 0);
    let known = front.gateway.metrics.soft_state.identified.with_label_values(&["conversation"]).get();
    assert!(known > 0 && !front.gateway.remembered.identity.trails.is_empty());
}

/// The conversation of `body` in the words of `/v1/messages` and of `/v1/responses`.
fn reworded(turns: usize) -> [(&'static str, Value); 2] {
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
async fn steps_in_the_words_of_other_endpoints_are_known_as_exactly_and_gone_on_with_as_well() {
    let worker = Worker::start("one", "tiny").await;
    let front = front(&[&worker], &SETTINGS).await;
    ask(&front, 3, json!({})).await;
    let prompt = || front.gateway.decisions.receipts.newest(1, |_| true)[0].known.prompt;
    let whole = prompt();
    for at in [0, 1] {
        let step = async |turns: usize| {
            let (path, body) = reworded(turns)[at].clone();
            ask_at(&front, path, body.to_string()).await
        };
        assert_eq!(step(1).await, Some("cold"));
        assert_eq!(step(2).await, Some("leading"));
        assert_eq!(step(3).await, Some("leading"));
        assert_eq!(prompt(), whole, "as many tokens as by the other endpoint");
    }
    until("they have been looked at", || looks(&front, "same") + looks(&front, "left_out") == 4).await;
    assert!(looks(&front, "same") > 0 && looks(&front, "tokens") + looks(&front, "length") == 0);
}

#[tokio::test]
async fn a_response_that_its_maker_forgot_goes_on_with_its_transcript_and_is_known_exactly() {
    let worker = Worker::start("one", "tiny").await;
    let front = front(&[&worker], &SETTINGS).await;
    let [_, (path, first)] = reworded(2);
    let id = post(front.proxy_address(), path, first.to_string()).await.json()["id"].clone();
    let next = json!({"model": "tiny", "input": "and on", "previous_response_id": id, "behave": "forgotten"});
    let got = post(front.proxy_address(), path, next.to_string()).await;
    assert_eq!((got.status, got.headers["x-ownerserve-resolved"].to_str().unwrap()), (200, "transcript"));
    let sent: Value = serde_json::from_slice(&worker.last().body).unwrap();
    assert_eq!(
        sent["input"].as_array().unwrap().len(),
        5 + 1 + 1,
        "all that was said before, the answer, and what is new"
    );
    let known = front.gateway.decisions.receipts.newest(1, |_| true)[0].known.clone();
    assert_eq!((known.fallback, known.rung), (None, Some("cold")), "without the instructions it begins otherwise");
}

#[tokio::test]
async fn a_prompt_with_an_image_is_never_said_to_be_known_and_says_why() {
    let worker = Worker::start("one", "tiny").await;
    let front = front(&[&worker], &SETTINGS).await;
    let ask = async |path: &str, body: Value| {
        assert_eq!(post(front.proxy_address(), path, body.to_string()).await.status, 200);
        front.gateway.decisions.receipts.newest(1, |_| true)[0].known.clone()
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
        let known = ask(path, body).await;
        assert_eq!((known.fallback, known.rung), (Some("multimodal"), None), "{path}");
        assert_eq!(known.deepest_overlap, Tokens::ZERO, "{path}");
    }
    let counted = front.gateway.metrics.plans.fallback.with_label_values(&["multimodal"]);
    assert_eq!(counted.get(), 3);
}

/// A step that is known from the one before it.
fn grown(gateway: &crate::gateway::Gateway, model: &Arc<Model>) -> Prefixed {
    let trails = &gateway.remembered.identity.trails;
    let unnamed = |turns: usize| {
        let body = body(turns, &json!({}));
        let incoming = Incoming {
            id: new_request_id(),
            tenant: TenantId::default(),
            method: Method::POST,
            path: PATH.to_owned(),
            headers: HeaderMap::new(),
            body: body.into(),
            arrived: Instant::now(),
            reserved: None,
            memory: None,
            adds: None,
        };
        Unnamed::new(parse(incoming, Endpoint::ChatCompletions, None).unwrap(), model.clone())
    };
    unnamed(0).whole(trails, None);
    let step = unnamed(1);
    let found = step.grown(trails).unwrap();
    step.named(found).prefixed
}

#[tokio::test]
async fn a_difference_ends_it_for_the_model_and_everything_says_so() {
    let worker = Worker::start("one", "tiny").await;
    let front = front(&[&worker], &SETTINGS[..1]).await;
    let model = front.gateway.catalog().model(&"tiny".into());
    let mut step = grown(&front.gateway, &model);
    let taken = |step: &Prefixed| Look::at(step, Rung::Leading, Tokens::ZERO).taken().0;
    assert_eq!(taken(&step), None);
    let ids = TokenIds::of(&step).unwrap().read(&step.prompt.chain).unwrap().into_owned();
    assert_eq!(ids.len() as u64, step.prompt.chain.tokens.0);
    let other = Chain::over_tokens(PrefixId(7), model.identifier.seed(), model.identifier.block(), &ids);
    assert!(TokenIds::of(&step).unwrap().read(&other).is_none(), "leads elsewhere");
    step.prompt.content = Content::Tail(vec![1]);
    assert_eq!(taken(&step), Some(Difference::Tokens));

    assert_ne!(ask(&front, 2, json!({})).await, Some("cold"));
    let identity = &front.gateway.remembered.identity;
    identity.looks.take(Look::at(&step, Rung::Leading, Tokens::ZERO));
    until("the difference is found", || model.is_distrusted()).await;
    assert_eq!(looks(&front, "tokens"), 1);
    assert_eq!(ask(&front, 3, json!({})).await, Some("cold"));
    assert!(front.gateway.decisions.receipts.newest(1, |_| true)[0].known.distrusted);
    let ready = get(front.operator_address(), "/readyz").await.json();
    assert_eq!(
        (&ready["degraded"][0]["what"], &ready["degraded"][0]["cause"]),
        (&json!("identity"), &json!("distrusted"))
    );
    let metrics = get(front.operator_address(), "/metrics").await;
    assert!(String::from_utf8_lossy(&metrics.body).contains("ownerserve_identity_distrusted_models 1"));
}

#[tokio::test]
async fn a_prompt_that_cannot_be_computed_as_a_whole_is_forgotten_and_its_model_trusted() {
    let worker = Worker::start("one", "tiny").await;
    let front = front(&[&worker], &SETTINGS[..1]).await;
    let model = front.gateway.catalog().model(&"tiny".into());
    let mut step = grown(&front.gateway, &model);
    // As if the template had refused it.
    step.request.incoming.body = body(1, &json!({"continue_final_message": true})).into();
    let identity = &front.gateway.remembered.identity;
    let look = Look::at(&step, Rung::Leading, Tokens::ZERO);
    assert_eq!(look.taken().0, Some(Difference::Refused(FallbackReason::Malformed)));
    identity.looks.take(look);
    until("it has been looked at", || looks(&front, "malformed") == 1).await;
    assert!(!model.is_distrusted());
    assert_eq!(ask(&front, 2, json!({})).await, Some("leading"), "other conversations go on");
}

#[tokio::test]
async fn no_memory_has_every_prompt_computed_as_a_whole() {
    let worker = Worker::start("one", "tiny").await;
    let front = front(&[&worker], &[SETTINGS[0], "identity.memory=0"]).await;
    assert_eq!(ask(&front, 0, json!({})).await, Some("cold"));
    assert_eq!(ask(&front, 1, json!({})).await, Some("cold"));
    for (path, body) in reworded(1) {
        assert_eq!(ask_at(&front, path, body.to_string()).await, Some("cold"));
    }
    assert!(front.gateway.remembered.identity.trails.is_empty());
}
