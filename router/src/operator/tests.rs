use std::sync::Arc;

use bytes::Bytes as Body;
use http::Request;
use ownership::ledger::{
    Command, Custody, KvFormat, KvKinds, KvShape, RegisterWorker, StepCommit, WorkerKind, WorkerSpec,
};
use vocabulary::{
    Blocks, Bytes, Chain, DpRank, Incarnation, Micros, ModelId, Owner, PrefixId, Role, Seed, SessionId, TenantId,
    Tokens, WorkerId,
};

use crate::testing::{Worker, front, front_of, get, post, send};

#[tokio::test]
async fn the_dial_turns_at_run_time_and_shows_in_the_metrics() {
    let front = front_of(&[], &["steering.mode=shadow"]).await;
    let at = front.operator_address();
    let path = "/ownerserve/v1/mode";
    let json = |request: http::request::Builder| request.header("content-type", "application/json");
    assert_eq!(get(at, path).await.json(), serde_json::json!({"mode": "shadow", "rollout_percent": 100}));
    let got = send(at, json(Request::put(path)), "{\"mode\":\"own\",\"rollout_percent\":5}").await;
    assert_eq!((got.status, got.json()["rollout_percent"].as_u64()), (200, Some(5)));
    let got = send(at, json(Request::patch(path)), "{\"rollout_percent\":20}").await;
    assert_eq!(got.json(), serde_json::json!({"mode": "own", "rollout_percent": 20}));
    let text = get(at, "/metrics").await.body;
    let text = std::str::from_utf8(&text).unwrap();
    assert!(
        text.contains("ownerserve_mode{mode=\"own\"} 1") && text.contains("ownerserve_rollout_ratio 0.2"),
        "{text}"
    );
    for body in ["{\"mode\":\"fast\"}", "{\"rollout_percent\":101}", "{\"x\":1}", "nonsense"] {
        let got = send(at, json(Request::put(path)), body).await;
        assert_eq!((got.status, got.headers["content-type"].to_str().unwrap()), (400, "application/problem+json"));
        assert!(got.json()["detail"].as_str().unwrap().contains("accepted is"), "{body}");
    }
    let form = Request::put(path).header("content-type", "text/plain");
    assert_eq!(send(at, form, "{\"mode\":\"sticky\"}").await.status, 415, "what any web page could send is refused");
    assert_eq!(get(at, path).await.json()["mode"], "own");
}

#[tokio::test]
async fn readiness_follows_the_workers_and_liveness_does_not() {
    let nobody = front_of(&[], &[]).await;
    assert_eq!(get(nobody.operator_address(), "/readyz").await.status, 503);
    assert_eq!(get(nobody.operator_address(), "/livez").await.status, 200);
    let worker = Worker::start("one", "tiny").await;
    let front = front(&[&worker], &[]).await;
    assert_eq!(get(front.operator_address(), "/readyz").await.status, 200);
    let lines = get(front.operator_address(), "/ownerserve/v1/workers").await.json();
    assert_eq!(lines["workers"][0]["endpoint"], worker.url());
    assert_eq!(lines["workers"][0]["health"], "ready");
    assert_eq!(lines["workers"][0]["models"][0], "tiny");
}

#[tokio::test]
async fn unknown_paths_and_methods_are_problems_and_the_client_api_is_not_here() {
    let front = front_of(&[], &[]).await;
    let at = front.operator_address();
    for (request, status) in
        [(Request::post("/v1/chat/completions"), 404), (Request::get("/"), 404), (Request::delete("/metrics"), 405)]
    {
        let got = send(at, request, Body::new()).await;
        assert_eq!((got.status, got.json()["status"].as_u64()), (status, Some(u64::from(status))));
    }
    assert_eq!(post(at, "/ownerserve/v1/workers", "{}").await.status, 405);
}

/// Two sessions sealed over one worker, one of them named by a client.
async fn seal_something(front: &crate::testing::Front) -> (SessionId, PrefixId) {
    let gateway = &front.gateway;
    let worker = WorkerId::of_endpoint("http://engine:1");
    let spec = WorkerSpec {
        endpoint: "http://engine:1".into(),
        role: Role::Hybrid,
        kind: WorkerKind::Engine,
        models: Arc::from([ModelId::from("tiny")]),
        ranks: 1,
    };
    let ttl = Micros(60_000_000);
    let register = RegisterWorker { worker, incarnation: Incarnation(7), spec, ttl };
    gateway.commit(Command::RegisterWorker(register)).await.unwrap();
    let (tenant, model) = (TenantId::default(), ModelId::from("tiny"));
    let session = SessionId::of_key(&tenant, &model, "s1");
    let chain = Chain::over_tokens(PrefixId(1), Seed(0), Tokens(16), &(0..64).collect::<Vec<_>>());
    let owner = Owner { worker, incarnation: Incarnation(7), rank: DpRank(0) };
    let shape = KvShape { format: KvFormat(9), kinds: KvKinds::default(), block: Tokens(16), block_bytes: Bytes(100) };
    let command = Command::commit_step(StepCommit {
        session,
        tenant: &tenant,
        model: &model,
        parent: None,
        chain: &chain,
        sealed: Blocks(4),
        base: Blocks(0),
        replaces: None,
        owner,
        custody: Custody::Claims,
        shape,
        router: gateway.node(),
    });
    let outcome = gateway.commit(command.unwrap()).await.unwrap();
    assert!(outcome.refusals().is_empty(), "{outcome:?}");
    (session, chain.head())
}

#[tokio::test]
async fn sessions_and_owners_are_read_from_the_ledger() {
    let front = front_of(&[], &[]).await;
    let at = front.operator_address();
    let (session, prefix) = seal_something(&front).await;
    let got = get(at, &format!("/ownerserve/v1/sessions/{session}")).await.json();
    assert_eq!(got["session"]["owner"]["endpoint"], "http://engine:1");
    assert_eq!(got["session"]["owner"]["live"], true);
    assert_eq!(got["session"]["heads"][0]["prefix"], prefix.to_string());
    assert_eq!(got["session"]["heads"][0]["tokens"], 64);
    assert!(got["session"]["epoch"]["index"].as_u64() > Some(0) && got["revision"].as_u64() > Some(0), "{got}");
    assert_eq!(got["stale"], false);
    for query in ["?key=s1&model=tiny", "?tenant=default", "?limit=1", ""] {
        let got = get(at, &format!("/ownerserve/v1/sessions{query}")).await.json();
        assert_eq!((got["total"].as_u64(), got["sessions"][0]["id"].as_str()), (Some(1), Some(&*session.to_string())));
    }
    assert_eq!(get(at, "/ownerserve/v1/sessions?tenant=other").await.json()["sessions"], serde_json::json!([]));
    let got = get(at, &format!("/ownerserve/v1/owners/{prefix}")).await.json();
    assert_eq!(got["owners"][0]["standing"], "owned");
    assert_eq!(got["owners"][0]["owner"]["worker"], WorkerId::of_endpoint("http://engine:1").to_string());
    assert_eq!((got["owners"][0]["blocks"].as_u64(), got["owners"][0]["bytes"].as_u64()), (Some(4), Some(400)));
    let text = String::from_utf8(get(at, "/metrics").await.body.to_vec()).unwrap();
    for line in ["ownerserve_sessions 1", "ownerserve_leases{state=\"held\"} 1", "ownerserve_ledger_stale 0"] {
        assert!(text.contains(line), "{line} in {text}");
    }
    assert!(!text.contains("ownerserve_ledger_commits_total{outcome=\"applied\"} 0"), "{text}");
}

#[tokio::test]
async fn what_the_ledger_returned_is_returned_after_a_restart() {
    let data = tempfile::tempdir().unwrap();
    let folder = format!("ledger.data_dir={:?}", data.path());
    let before = front_of(&[], &[&folder]).await;
    let (session, _) = seal_something(&before).await;
    let path = format!("/ownerserve/v1/sessions/{session}");
    let first = get(before.operator_address(), &path).await.json()["session"].clone();
    before.stop().await;
    let after = front_of(&[], &[&folder]).await;
    let second = get(after.operator_address(), &path).await.json()["session"].clone();
    for field in ["owner", "epoch", "heads", "tenant", "model"] {
        assert_eq!(first[field], second[field], "{field}");
    }
}

#[tokio::test]
async fn bad_ids_and_queries_are_problems_that_say_what_is_accepted() {
    let front = front_of(&[], &[]).await;
    for (path, status, wanted) in [
        ("sessions/nonsense", 400, "SessionId"),
        ("sessions/s-1", 404, "No session"),
        ("sessions?limit=many", 400, "limit"),
        ("sessions?key=s1", 400, "model"),
        ("sessions?colour=red", 400, "colour"),
        ("owners/s-1", 400, "PrefixId"),
        ("owners/p-1", 404, "No artifact"),
        ("decisions?session=x", 400, "session"),
        ("decisions/req-1", 404, "No decision"),
        ("nothing", 404, "Served are"),
    ] {
        let got = get(front.operator_address(), &format!("/ownerserve/v1/{path}")).await;
        let json = got.json();
        assert_eq!((got.status, json["status"].as_u64()), (status, Some(u64::from(status))), "{path}");
        assert!(json["detail"].as_str().unwrap().contains(wanted), "{path}: {json}");
    }
    let got = get(front.operator_address(), "/ownerserve/v1/decisions?limit=5").await.json();
    assert_eq!(got["decisions"], serde_json::json!([]));
}
