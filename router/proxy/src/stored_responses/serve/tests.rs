use http::Request;
use serde_json::{Value, json};
use vocabulary::TenantId;

use super::*;
use crate::receipt::RequestOutcome;
use crate::shared_cache::{CacheEntryKind, CacheKey};
use crate::testing::{
    StubWorker, TestResponse, TestRouter, get, occupy_offload_pool, post, send, start_router, wait_until,
};

const PATH: &str = "/v1/responses";

async fn ask(router: &TestRouter, body: Value) -> TestResponse {
    post(router.proxy_address(), PATH, body.to_string()).await
}

/// A step after `id` at a worker that has forgotten it.
fn step_after_forgotten(id: &str) -> Value {
    json!({"model": "tiny", "input": "and on", "previous_response_id": id, "behave": "forgotten"})
}

fn last_sent_body(worker: &StubWorker) -> Value {
    serde_json::from_slice(&worker.last_request().body).unwrap()
}

#[tokio::test]
async fn another_tenants_response_is_indistinguishable_from_a_missing_one() {
    let worker = StubWorker::start("one", "tiny").await;
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys.toml");
    std::fs::write(&keys, "[keys]\n\"k1\" = \"t1\"\n\"k2\" = \"t2\"").unwrap();
    // The router's own proof of cache_salt would be counted as well.
    let settings = [&format!("auth.keys_file={}", keys.display()), "auth.verify_cache_salt=false"];
    let router = start_router(&[&worker], &settings).await;
    let ask = async |key: &str, body: Value| {
        let request = Request::post(PATH).header("authorization", format!("Bearer {key}"));
        send(router.proxy_address(), request, body.to_string()).await
    };
    let made = ask("k1", json!({"model": "tiny", "input": "the secret is blue"})).await.json();
    let id = made["id"].as_str().unwrap();
    let before = worker.requests().len();
    let mut told = Vec::new();
    for id in [id, "resp_of_nobody"] {
        let response = ask("k2", step_after_forgotten(id)).await;
        assert_eq!((response.status, response.error_code().as_str()), (404, "not_found"));
        assert!(!response.headers.contains_key(RESOLVED_HEADER));
        told.push(String::from_utf8(response.body.to_vec()).unwrap().replace(id, "ID"));
    }
    assert_eq!(told[0], told[1], "as if it did not exist");
    assert_eq!(worker.requests().len(), before, "no worker was asked");
    let own = ask("k1", step_after_forgotten(id)).await;
    assert_eq!((own.status, own.headers[RESOLVED_HEADER].to_str().unwrap()), (200, "transcript"));
    assert!(
        last_sent_body(&worker)["input"].to_string().contains("the secret is blue"),
        "its own tenant goes on with it"
    );
}

#[tokio::test]
async fn a_client_chosen_request_id_cannot_reach_another_tenants_response() {
    let worker = StubWorker::start("one", "tiny").await;
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys.toml");
    std::fs::write(&keys, "[keys]\n\"ka\" = \"a\"\n\"kb\" = \"b\"").unwrap();
    let settings = [&format!("auth.keys_file={}", keys.display()), "auth.verify_cache_salt=false"];
    let router = start_router(&[&worker], &settings).await;
    let call = async |key: &str, request: http::request::Builder, body: String| {
        let request = request.header("authorization", format!("Bearer {key}")).header("x-request-id", "victim");
        send(router.proxy_address(), request, body).await
    };
    let made =
        call("kb", Request::post(PATH), json!({"model": "tiny", "input": "x", "behave": "store"}).to_string()).await;
    assert_eq!(made.headers["x-request-id"], "victim", "the client gets its own name of the request back");
    assert_ne!(worker.last_request().headers["x-request-id"], "victim", "its worker gets ours");
    let id = made.json()["id"].as_str().unwrap().to_owned();
    assert!(!id.contains("victim"), "{id}");
    for name in ["request_id", "r\\u0065quest_id", "rid"] {
        for rest in ["", ",\"background\":true", ",\"store\":false", ",\"stream\":false,\"request_id\":\"x\""] {
            let body = format!(
                "{{\"model\":\"tiny\",\"input\":\"x\",\"behave\":\"store\",\"priority\":-1,\"{name}\":\"{id}\"{rest}}}"
            );
            let response = call("ka", Request::post(PATH), body).await;
            assert_eq!(response.status, 200, "{name}");
            assert_ne!(response.json()["id"], id.as_str());
            let seen = last_sent_body(&worker);
            assert_eq!([&seen["request_id"], &seen["rid"], &seen["priority"]], [&Value::Null; 3], "{seen}");
        }
    }
    let path = format!("{PATH}/{id}");
    assert_eq!(call("ka", Request::get(&path), String::new()).await.status, 404);
    assert_eq!(call("kb", Request::get(&path), String::new()).await.status, 200);
    let stripped = |name| router.gateway.metrics.requests.stripped.with_label_values(&[name]).get();
    assert_eq!(["request_id", "priority"].map(stripped), [13, 12]);
    // If an engine gives out an id twice, it belongs to the first tenant.
    let body = json!({"model": "tiny", "input": "x"}).to_string();
    let twice = call("kb", Request::post(PATH), body.clone()).await.json()["id"].as_str().unwrap().to_owned();
    assert_eq!(call("ka", Request::post(PATH), body).await.json()["id"], twice.as_str());
    let path = format!("{PATH}/{twice}");
    assert_eq!(call("ka", Request::get(&path), String::new()).await.status, 404);
    assert_eq!(call("kb", Request::get(&path), String::new()).await.status, 200);
}

#[tokio::test]
async fn unstored_or_truncated_responses_do_not_continue_elsewhere() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &[]).await;
    let id = ask(&router, json!({"model": "tiny", "input": "x", "store": false})).await.json()["id"].clone();
    let begun = "event: response.created\ndata: {\"type\":\"response.created\",\"sequence_number\":0,\
        \"response\":{\"id\":\"resp_cut\",\"status\":\"in_progress\",\"output\":[]}}\n\n";
    let cut = json!({"model": "tiny", "input": "x", "stream": true, "behave": "die", "before": begun});
    let got = ask(&router, cut).await;
    let text = String::from_utf8(got.body.to_vec()).unwrap();
    assert!(text.starts_with(begun) && text.contains("event: error\ndata: "), "{text}");
    assert_eq!(
        router.gateway.decisions.receipts.newest(1, |_| true)[0].observed.unwrap().outcome,
        RequestOutcome::Interrupted
    );
    for id in [id.as_str().unwrap(), "resp_cut"] {
        let response = ask(&router, step_after_forgotten(id)).await;
        assert_eq!((response.status, response.headers.contains_key(RESOLVED_HEADER)), (404, false), "{id}");
        assert_eq!(last_sent_body(&worker)["previous_response_id"], id, "its maker was asked");
    }
    let id = ask(&router, json!({"model": "tiny", "input": "x"})).await.json()["id"].clone();
    let response = ask(&router, step_after_forgotten(id.as_str().unwrap())).await;
    assert_eq!((response.status, response.headers.contains_key(RESOLVED_HEADER)), (200, true));
}

#[tokio::test]
async fn a_background_response_is_forwarded_unplanned_and_found_again() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &[]).await;
    let response = ask(&router, json!({"model": "tiny", "input": "x", "background": true})).await;
    assert_eq!((response.status, &last_sent_body(&worker)["background"]), (200, &json!(true)));
    assert!(router.gateway.decisions.receipts.newest(1, |_| true).is_empty(), "nobody waits for its first token");
    let path = format!("{PATH}/{}", response.json()["id"].as_str().unwrap());
    assert_eq!(get(router.proxy_address(), &path).await.status, 200);
    assert_eq!(worker.last_request().path, path);
    ask(&router, json!({"model": "tiny", "input": "x", "background": false})).await;
    assert_eq!(router.gateway.decisions.receipts.newest(1, |_| true).len(), 1);
}

#[tokio::test]
async fn stripped_fields_are_counted_once_when_two_workers_are_asked() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &[]).await;
    let stripped = || router.gateway.metrics.requests.stripped.with_label_values(&["kv_transfer_params"]).get();
    let id = ask(&router, json!({"model": "tiny", "input": "x"})).await.json()["id"].clone();
    for (n, behave) in [(1, "forgotten"), (2, "answer")] {
        let mut next = step_after_forgotten(id.as_str().unwrap());
        next["behave"] = behave.into();
        next["kv_transfer_params"] = json!({"remote_request_id": "x"});
        let response = ask(&router, next).await;
        assert_eq!((response.status, response.headers.contains_key(RESOLVED_HEADER)), (200, behave == "forgotten"));
        assert_eq!((stripped(), last_sent_body(&worker).get("kv_transfer_params")), (n, None));
    }
}

#[tokio::test]
async fn an_operator_erases_a_session_or_a_tenant() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &[]).await;
    let named =
        |session: &str| json!({"model": "tiny", "input": "the words", "behave": "store", "prompt_cache_key": session});
    let ids = [named("mine"), named("other")].map(|body| ask(&router, body));
    let ids: Vec<String> =
        futures::future::join_all(ids).await.iter().map(|got| got.json()["id"].as_str().unwrap().into()).collect();
    let goes_on = async |id: &str| ask(&router, step_after_forgotten(id)).await.status;
    let forget =
        async |path: &str| send(router.operator_address(), Request::delete(format!("/ownerserve/v1/{path}")), "").await;
    assert_eq!([goes_on(&ids[0]).await, goes_on(&ids[1]).await], [200, 200]);
    let session = vocabulary::SessionId::of_key(&vocabulary::TenantId::default(), &"tiny".into(), "mine");
    let done = forget(&format!("sessions/{session}/retained-data?tenant=default")).await;
    assert_eq!(done.status, 200, "{done:?}");
    assert_eq!([goes_on(&ids[0]).await, goes_on(&ids[1]).await], [404, 200]);
    assert_eq!(
        forget("sessions/s-00000000000000000000000000000009/retained-data").await.status,
        404,
        "whose it is is not known"
    );
    let unknown = forget("tenants/someone/retained-data").await;
    assert_eq!(unknown.json()["result"], "no tenant of this name is configured and nothing was kept", "{unknown:?}");
    assert_eq!(goes_on(&ids[1]).await, 200, "another tenant's stay");
    let known = forget("tenants/default/retained-data").await.json();
    assert!(known["result"].as_str().unwrap().ends_with("forgotten here"), "there is no Redis: {known}");
    assert_eq!(goes_on(&ids[1]).await, 404);
}

/// Returns the newest receipt, once there are `count`.
async fn newest_receipt(router: &TestRouter, count: usize) -> serde_json::Value {
    for _ in 0..500 {
        let all = router.gateway.decisions.receipts.newest(100, |_| true);
        if all.len() >= count {
            assert_eq!(all.len(), count, "{all:#?}");
            return serde_json::to_value(&*all[0]).unwrap();
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("there are no {count} receipts");
}

#[tokio::test]
async fn an_unplanned_step_after_a_stored_response_has_a_receipt() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &[]).await;
    let id = ask(&router, json!({"model": "tiny", "input": "x", "store": true})).await.json()["id"].clone();
    let first = newest_receipt(&router, 1).await;
    // If the worker has forgotten the previous response, the step is planned like any other.
    let response = ask(&router, step_after_forgotten(id.as_str().unwrap())).await;
    let receipt = newest_receipt(&router, 2).await;
    assert_eq!(receipt["request_id"], response.headers["x-request-id"].to_str().unwrap());
    assert!(receipt["decision"].is_object(), "{receipt}");

    let next = |behave: &str| {
        json!({"model": "tiny", "input": "and on", "previous_response_id": id, "behave": behave, "counted": 400,
            "prompt_cache_key": "mine"})
    };
    let response = ask(&router, next("count")).await;
    let receipt = newest_receipt(&router, 3).await;
    assert_eq!(receipt["request_id"], response.headers["x-request-id"].to_str().unwrap());
    let lookup = &receipt["lookup"];
    assert_eq!(
        (&lookup["token_ids_unavailable"], &lookup["session_key_source"]),
        (&json!("stored_response"), &json!("body"))
    );
    assert_eq!((&lookup["prompt_tokens"], lookup.get("prompt_tokens_estimated")), (&json!(400), None));
    let seen = &receipt["observed"];
    assert_eq!(
        (&seen["outcome"], &seen["http_status"], &seen["output_tokens"]),
        (&json!("complete"), &json!(200), &json!(1))
    );
    assert_eq!((&receipt["decision"], &seen["ttft"]), (&json!(null), &json!(null)));
    let [served, before] = [&receipt, &first].map(|one| one["attempts"][0]["legs"][0]["worker"].clone());
    assert_eq!(served, before, "the worker that stored it");

    // The worker reports no usage here, and refuses the next request.
    ask(&router, next("answer")).await;
    let lookup = &newest_receipt(&router, 4).await["lookup"];
    assert!(lookup["prompt_tokens_estimated"] == true && lookup["prompt_tokens"].as_u64().unwrap() > 10, "{lookup}");
    ask(&router, next("refuse")).await;
    assert_eq!(newest_receipt(&router, 5).await["observed"]["outcome"], "rejected");
    ask(&router, next("die")).await;
    let seen = &newest_receipt(&router, 6).await["observed"];
    assert!(seen["outcome"] == "interrupted" && seen["ttft"].as_str().is_some_and(|ttft| ttft != "0s"), "{seen}");
    let whole = "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"id\":\"resp_2\",\
        \"status\":\"completed\",\"output\":[],\"usage\":{\"input_tokens\":77,\"output_tokens\":5,\"total_tokens\":82}}}\n\n";
    let mut streamed = next("die");
    streamed["before"] = whole.into();
    ask(&router, streamed).await;
    let receipt = newest_receipt(&router, 7).await;
    assert_eq!(
        (&receipt["lookup"]["prompt_tokens"], &receipt["observed"]["output_tokens"]),
        (&json!(77), &json!(5)),
        "{receipt}"
    );
}

#[tokio::test]
async fn long_answers_are_read_on_the_offload_pool_after_their_end() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &[]).await;
    let release = occupy_offload_pool(&router.gateway).await;
    let body = json!({"model": "tiny", "input": "x", "background": true, "behave": "long answer"});
    let id = ask(&router, body).await.json()["id"].as_str().unwrap().to_owned();
    let step = json!({"model": "tiny", "input": "y", "previous_response_id": id, "behave": "long answer"});
    assert_eq!(ask(&router, step).await.status, 200);
    wait_until("both have ended", || router.gateway.metrics.requests.in_flight.get() == 0).await;
    let key = CacheKey::new(CacheEntryKind::Transcript, &TenantId::default(), &id);
    let transcript = || router.gateway.caches.shared_cache.get_shared(&key);
    assert!(transcript().await.is_none(), "there was no place to read its output");
    assert!(router.gateway.decisions.receipts.newest(100, |_| true).is_empty(), "nor to read the usage of the step");
    drop(release);
    let observed = &newest_receipt(&router, 1).await["observed"];
    assert_eq!((&observed["outcome"], &observed["output_tokens"]), (&json!("complete"), &json!(5)), "{observed}");
    while transcript().await.is_none() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    wait_until("all memory is given back", || router.gateway.metrics.memory.reserved.get() == 0).await;
}
