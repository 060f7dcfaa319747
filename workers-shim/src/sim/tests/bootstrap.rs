//! Tests of transfers whose legs meet at a bootstrap server: SGLang's and Mooncake's.

use super::*;
use crate::engine_api::KvConnector;
use crate::sim::TransferOptions;
use ::vocabulary::WorkerRole;

async fn bench(dialect: KvConnector, role: WorkerRole, patience_ms: u64) -> SimWorkerFixture {
    let patience = Duration::from_millis(patience_ms);
    let handing = TransferOptions { dialect, patience, ..TransferOptions::default() };
    SimWorkerFixture::with(SimOptions { handing, role, ..options() }).await
}

async fn sglang(patience_ms: u64) -> (SimWorkerFixture, SimWorkerFixture) {
    (
        bench(KvConnector::Sglang, WorkerRole::Prefill, patience_ms).await,
        bench(KvConnector::Sglang, WorkerRole::Decode, patience_ms).await,
    )
}

fn leg(prompt: &[u32], source: &SimWorkerFixture, room: u64) -> Value {
    let mut ask = completion(prompt, 12);
    ask["bootstrap_host"] = json!("127.0.0.1");
    ask["bootstrap_port"] = json!(source.worker.bootstrap().port());
    ask["bootstrap_room"] = json!(room);
    ask
}

const PATH: &str = "/v1/completions";

#[tokio::test]
async fn sglang_legs_meet_in_a_room_and_the_target_skips_prefill() {
    let (p, d) = sglang(10_000).await;
    let prompt = words(1, 75);
    let ask = || leg(&prompt, &p, 41);
    let (source, target) = tokio::join!(p.ask(PATH, ask()), d.ask(PATH, ask()));
    assert_eq!(text(&target), answer_of_fresh_worker(&prompt, 12).await);
    assert_eq!(
        source["usage"]["completion_tokens"], 1,
        "a source ends after the first token, whatever it is asked for"
    );
    assert_eq!(source["kv_transfer_params"], Value::Null);
    assert_eq!(d.metric("sglang:prefill_effective_tokens_total").await, 0.0);
    let (_, info) = p.get("/server_info").await;
    let info: Value = serde_json::from_str(&info).unwrap();
    assert_eq!(info["disaggregation_bootstrap_port"], p.worker.bootstrap().port());
}

#[tokio::test]
async fn leg_without_a_counterpart_times_out() {
    let (p, d) = sglang(300).await;
    let prompt = words(1, 75);
    let (source, target) = tokio::join!(p.post(PATH, leg(&prompt, &p, 1)), d.post(PATH, leg(&prompt, &p, 2)));
    assert_eq!((source.0, target.0), (500, 500));
    // The timed-out rooms are not reused; a transfer in a new room succeeds.
    let (source, target) = tokio::join!(p.post(PATH, leg(&prompt, &p, 3)), d.post(PATH, leg(&prompt, &p, 3)));
    assert_eq!((source.0, target.0), (200, 200));
}

#[tokio::test]
async fn request_without_a_room_or_with_a_wrong_port_is_refused() {
    let (p, d) = sglang(300).await;
    let prompt = words(1, 75);
    for one in [&p, &d] {
        let (status, body) = one.post(PATH, completion(&prompt, 4)).await;
        assert_eq!(status, 400, "{body}");
        assert!(body["error"]["message"].as_str().unwrap().contains("bootstrap room"), "{body}");
    }
    let mut elsewhere = leg(&prompt, &p, 1);
    elsewhere["bootstrap_port"] = json!(1);
    assert_eq!((p.post(PATH, elsewhere.clone()).await.0, d.post(PATH, elsewhere).await.0), (400, 500));
}

#[tokio::test]
async fn mooncake_legs_meet_by_transfer_id_at_the_bootstrap_listed_engine() {
    let (p, d) = (
        bench(KvConnector::Mooncake, WorkerRole::Prefill, 2_000).await,
        bench(KvConnector::Mooncake, WorkerRole::Decode, 2_000).await,
    );
    let address = format!("http://{}", p.worker.bootstrap());
    let told: Value = d.client.get(format!("{address}/query")).send().await.unwrap().json().await.unwrap();
    let prompt = words(1, 75);
    let legs = |engine: &Value, name: &str| {
        let (mut source, mut target) = (completion(&prompt, 1), completion(&prompt, 12));
        source["kv_transfer_params"] =
            json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": name});
        target["kv_transfer_params"] = json!({
            "do_remote_prefill": true, "do_remote_decode": false, "transfer_id": name,
            "remote_bootstrap_addr": address, "remote_engine_id": engine,
        });
        (source, target)
    };
    let (source, target) = legs(&told["0"]["engine_id"], "xfer-1");
    let (source, target) = tokio::join!(p.ask(PATH, source), d.ask(PATH, target));
    assert_eq!(
        (text(&target), &source["kv_transfer_params"]),
        (answer_of_fresh_worker(&prompt, 12).await, &Value::Null)
    );
    assert!(d.metric("vllm:external_prefix_cache_hits_total").await > 70.0);
    let (source, target) = legs(&json!("another life"), "xfer-2");
    let (source, target) = tokio::join!(p.post(PATH, source), d.post(PATH, target));
    assert_eq!((source.0, target.0), (200, 500));
    assert_eq!(
        text(&d.ask(PATH, completion(&prompt, 12)).await),
        answer_of_fresh_worker(&prompt, 12).await,
        "alone it answers, too"
    );
}
