//! Tests of KV transfers between workers over their side channels.

use super::*;
use crate::sim::TransferFault;

/// Runs a producer's leg.
pub(super) async fn produce(producer: &SimWorkerFixture, prompt: &[u32]) -> Value {
    let mut ask = completion(prompt, 1);
    ask["kv_transfer_params"] = json!({"do_remote_decode": true, "do_remote_prefill": false});
    let params = producer.ask("/v1/completions", ask).await["kv_transfer_params"].clone();
    assert_eq!((&params["do_remote_prefill"], &params["remote_num_tokens"]), (&json!(true), &json!(prompt.len())));
    params
}

fn consuming(prompt: &[u32], max_tokens: u32, params: Value) -> Value {
    let mut ask = completion(prompt, max_tokens);
    ask["kv_transfer_params"] = params;
    ask
}

const EXTERNAL: &str =
    "vllm:prompt_tokens_by_source_total{engine=\"0\",model_name=\"tiny\",source=\"external_kv_transfer\"}";

#[tokio::test]
async fn remotely_prefilled_prompt_gets_the_same_answer() {
    let (p, d) = (SimWorkerFixture::new().await, SimWorkerFixture::new().await);
    let prompt = words(1, 75);
    let params = produce(&p, &prompt).await;
    let body = d.ask("/v1/completions", consuming(&prompt, 12, params)).await;
    assert_eq!(text(&body), answer_of_fresh_worker(&prompt, 12).await);
    assert_eq!(d.metric(EXTERNAL).await, 75.0);
    assert_eq!(body["usage"]["prompt_tokens_details"]["cached_tokens"], 0, "the producer's count");
    p.until("vllm:kv_cache_usage_perc", 0.0).await;
    let again = d.ask("/v1/completions", completion(&prompt, 12)).await;
    assert_eq!(again["usage"]["prompt_tokens_details"]["cached_tokens"], 72, "the consumer caches it");
}

#[tokio::test]
async fn streamed_chat_handoff_works() {
    let (p, d, single) = (SimWorkerFixture::new().await, SimWorkerFixture::new().await, SimWorkerFixture::new().await);
    let messages = json!([{"role": "user", "content": "some words to begin with ".repeat(8)}]);
    let ask = json!({"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 9});
    let mut leg = ask.clone();
    leg["max_tokens"] = json!(1);
    leg["kv_transfer_params"] = json!({"do_remote_decode": true, "do_remote_prefill": false});
    let params = p.ask("/v1/chat/completions", leg.clone()).await["kv_transfer_params"].clone();
    let mut serve = ask.clone();
    serve["stream"] = json!(true);
    serve["kv_transfer_params"] = params;
    let stream = d.send("/v1/chat/completions", &serve).await.text().await.unwrap();
    let streamed: String =
        payloads(&stream).iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(streamed, text(&single.ask("/v1/chat/completions", ask).await));
    assert!(d.metric(EXTERNAL).await > 0.0);
    leg["stream"] = json!(true);
    let stream = p.send("/v1/chat/completions", &leg).await.text().await.unwrap();
    assert!(!stream.contains("remote_request_id"), "a streaming producer never returns parameters");
}

#[tokio::test]
async fn messages_and_responses_support_handoff() {
    let p = SimWorkerFixture::new().await;
    let params = json!({"do_remote_decode": true, "do_remote_prefill": false});
    let messages = json!({"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "hello"}],
                          "kv_transfer_params": params});
    assert!(p.ask("/v1/messages", messages).await["kv_transfer_params"]["remote_request_id"].is_string());
    let responses = json!({"model": "tiny", "max_output_tokens": 1, "input": "hello", "kv_transfer_params": params});
    assert!(p.ask("/v1/responses", responses).await["kv_transfer_params"]["remote_request_id"].is_string());
}

#[tokio::test]
async fn replicated_prefix_gives_the_same_answer_on_the_target() {
    let (owner, target) = (SimWorkerFixture::new().await, SimWorkerFixture::new().await);
    let history = words(1, 100);
    let expected = text(&owner.ask("/v1/completions", completion(&history, 10)).await);
    let sealed = &history[..96];
    let params = produce(&owner, sealed).await;
    assert_eq!(params["remote_prefill_cached_tokens"], 88, "the owner had all but the last block");
    target.ask("/v1/completions", consuming(sealed, 1, params)).await;
    let served = target.ask("/v1/completions", completion(&history, 10)).await;
    assert_eq!(text(&served), expected);
    assert_eq!(served["usage"]["prompt_tokens_details"]["cached_tokens"], 96);
}

#[tokio::test]
async fn foreign_and_reused_params_give_wrong_text_without_error() {
    let (p, d) = (SimWorkerFixture::new().await, SimWorkerFixture::new().await);
    let (mine, other) = (words(1, 75), words(2, 75));
    let foreign = produce(&p, &other).await;
    let body = d.ask("/v1/completions", consuming(&mine, 12, foreign)).await;
    assert_ne!(text(&body), answer_of_fresh_worker(&mine, 12).await);
    let fresh = words(3, 75);
    let params = produce(&p, &fresh).await;
    let consumer = SimWorkerFixture::new().await;
    let first = consumer.ask("/v1/completions", consuming(&fresh, 12, params.clone())).await;
    assert_eq!(text(&first), answer_of_fresh_worker(&fresh, 12).await);
    p.until("vllm:kv_cache_usage_perc", 0.0).await;
    let second = SimWorkerFixture::new().await.ask("/v1/completions", consuming(&fresh, 12, params)).await;
    assert_ne!(text(&second), text(&first));
}

#[tokio::test]
async fn consumer_without_params_computes_the_prompt() {
    let d = SimWorkerFixture::new().await;
    let prompt = words(1, 75);
    let body = d.ask("/v1/completions", consuming(&prompt, 12, json!(null))).await;
    assert_eq!(text(&body), answer_of_fresh_worker(&prompt, 12).await);
    assert_eq!(d.metric(EXTERNAL).await, 0.0);
}

#[tokio::test]
async fn dead_producer_fails_its_consumer_after_vllms_timeout() {
    let p = SimWorkerFixture::new().await;
    let d = SimWorkerFixture::with(SimOptions { speed_up: 50.0, ..options() }).await;
    let prompt = words(1, 75);
    let params = produce(&p, &prompt).await;
    drop(p);
    let began = std::time::Instant::now();
    let (status, body) = d.post("/v1/completions", consuming(&prompt, 12, params)).await;
    assert_eq!((status, &body["error"]["type"]), (500, &json!("InternalServerError")));
    assert!(began.elapsed() > Duration::from_millis(376), "18.8 s, fifty times as fast");
    assert_eq!(
        text(&d.ask("/v1/completions", completion(&prompt, 12)).await),
        answer_of_fresh_worker(&prompt, 12).await
    );
}

#[tokio::test]
async fn replaced_engine_on_the_same_port_is_detected() {
    let p = SimWorkerFixture::new().await;
    let d = SimWorkerFixture::with(SimOptions { speed_up: 100.0, ..options() }).await;
    let prompt = words(1, 75);
    let mut params = produce(&p, &prompt).await;
    params["remote_engine_id"] = json!("00000000-0000-0000-0000-000000000000");
    assert_eq!(d.post("/v1/completions", consuming(&prompt, 12, params)).await.0, 500);
}

#[tokio::test]
async fn unpulled_blocks_are_freed_when_the_lease_ends() {
    let p = SimWorkerFixture::with(SimOptions { speed_up: 40.0, ..options() }).await;
    produce(&p, &words(1, 75)).await;
    assert!(p.metric("vllm:kv_cache_usage_perc").await > 0.0);
    p.until("vllm:nixl_num_kv_expired_reqs_total", 1.0).await;
    assert_eq!(p.metric("vllm:kv_cache_usage_perc").await, 0.0);
}

#[tokio::test]
async fn hanging_params_kill_the_engine_when_the_client_leaves() {
    let (p, d) = (SimWorkerFixture::new().await, SimWorkerFixture::new().await);
    let prompt = words(1, 75);
    let mut params = produce(&p, &prompt).await;
    params.as_object_mut().unwrap().remove("remote_request_id");
    let hanging = d.client.post(d.url("/v1/completions")).json(&consuming(&prompt, 4, params));
    assert!(hanging.timeout(Duration::from_millis(300)).send().await.unwrap_err().is_timeout());
    for _ in 0..100 {
        if d.get("/health").await.0 == 503 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(d.post("/v1/completions", completion(&prompt, 4)).await.0, 500);
}

#[tokio::test]
async fn transfer_takes_the_links_time() {
    let slow = EngineProfile { link_bandwidth: 75.0 * 131_072.0 * 4.0, ..profile() };
    let (p, d) =
        (SimWorkerFixture::new().await, SimWorkerFixture::with(SimOptions { profile: slow, ..options() }).await);
    let prompt = words(1, 75);
    let params = produce(&p, &prompt).await;
    let began = std::time::Instant::now();
    d.ask("/v1/completions", consuming(&prompt, 1, params)).await;
    let took = began.elapsed();
    assert!(took > Duration::from_millis(250), "{took:?}");
}

#[tokio::test]
async fn corruption_fault_damages_every_third_read_until_recomputed() {
    let fault = "corrupt=3".parse().unwrap();
    let p = SimWorkerFixture::with(SimOptions { transfer_fault: fault, ..options() }).await;
    let d = SimWorkerFixture::new().await;
    let mut wrong = Vec::new();
    for n in 0..6 {
        let prompt = words(n + 1, 75);
        let params = produce(&p, &prompt).await;
        let answer = text(&d.ask("/v1/completions", consuming(&prompt, 12, params)).await);
        let right = answer_of_fresh_worker(&prompt, 12).await;
        wrong.push(answer != right);
        // Damaged blocks stay in the consumer's cache, and later requests read them, too.
        let again = d.ask("/v1/completions", completion(&prompt, 12)).await;
        assert_eq!(text(&again) != right, wrong[n as usize], "{n}");
    }
    assert_eq!(wrong, [false, false, true, false, false, true]);
    for bad in ["corrupt", "corrupt=0", "corrupt=x", "lost=3"] {
        assert!(bad.parse::<TransferFault>().unwrap_err().to_string().contains("corrupt=N"), "{bad}");
    }
}

#[tokio::test]
async fn bidirectional_producer_pulls_the_consumers_kv_on_the_next_turn() {
    let both_ways = || {
        let mut options = options();
        options.handing.dialect = crate::engine_api::KvConnector::NixlBidirectional;
        SimWorkerFixture::with(options)
    };
    let (p, d) = (both_ways().await, both_ways().await);
    let prompt = words(1, 75);
    let params = produce(&p, &prompt).await;
    let mut ask = consuming(&prompt, 80, params);
    (ask["return_token_ids"], ask["ignore_eos"]) = (json!(true), json!(true));
    let body = d.ask("/v1/completions", ask).await;
    let back = body["kv_transfer_params"].clone();
    assert_eq!((&back["do_remote_decode"], &back["do_remote_prefill"]), (&json!(true), &json!(false)));
    assert_eq!(back["remote_num_tokens"], 154, "all but the last token");
    assert!(back["remote_blocks_expiry_time"].is_number());
    p.until("vllm:kv_cache_usage_perc", 0.0).await;
    assert!(d.metric("vllm:kv_cache_usage_perc").await > 0.0, "held for the next turn");
    let ids = body["choices"][0]["token_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32);
    let next: Vec<u32> = prompt.into_iter().chain(ids).chain(words(2, 40)).collect();
    let mut ask = completion(&next, 1);
    ask["kv_transfer_params"] = back;
    let params = p.ask("/v1/completions", ask).await["kv_transfer_params"].clone();
    assert_eq!(p.metric(EXTERNAL).await, 82.0, "154 tokens without the 72 that it has");
    d.until("vllm:kv_cache_usage_perc", 0.0).await;
    let body = d.ask("/v1/completions", consuming(&next, 12, params)).await;
    assert_eq!(text(&body), answer_of_fresh_worker(&next, 12).await);
}
