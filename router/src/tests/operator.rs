use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes as Body;
use http::Request;
use ownership::ledger::{
    Command, KvBlockSpec, KvFormatDigest, KvKinds, Outcome, OwnershipTransition, RegisterWorker, SetQuota, StepCommit,
    WorkerKind, WorkerSpec,
};
use vocabulary::{
    Blocks, Bytes, DpRank, HashSeed, Incarnation, Micros, ModelId, Owner, PrefixChain, PrefixId, SessionId, TenantId,
    Tokens, WorkerId, WorkerRole,
};

use crate::testing::{
    StubWorker, get, post, raw, read_until, request_bytes, send, start_router, start_router_at, wait_until,
};
use vocabulary::RoutingMode;

#[tokio::test]
async fn routing_mode_changes_at_run_time_and_shows_in_metrics() {
    let router = start_router_at(&[], &["routing.mode=shadow"]).await;
    let at = router.operator_address();
    let path = "/ownerserve/v1/routing";
    let json = |request: http::request::Builder| request.header("content-type", "application/json");
    assert_eq!(
        get(at, path).await.json(),
        serde_json::json!({"mode": "shadow", "rollout_percent": 100, "disabled_actions": []})
    );
    let got = send(at, json(Request::put(path)), "{\"mode\":\"active\",\"rollout_percent\":5}").await;
    assert_eq!((got.status, got.json()["rollout_percent"].as_u64()), (200, Some(5)));
    let got = send(at, json(Request::patch(path)), "{\"rollout_percent\":20}").await;
    assert_eq!(got.json(), serde_json::json!({"mode": "active", "rollout_percent": 20, "disabled_actions": []}));
    let text = get(at, "/metrics").await.body;
    let text = std::str::from_utf8(&text).unwrap();
    assert!(
        text.contains("ownerserve_routing_mode{mode=\"active\"} 1")
            && text.contains("ownerserve_routing_rollout_ratio 0.2"),
        "{text}"
    );
    for body in ["{\"mode\":\"fast\"}", "{\"rollout_percent\":101}", "{\"x\":1}", "nonsense"] {
        let response = send(at, json(Request::put(path)), body).await;
        assert_eq!(
            (response.status, response.headers["content-type"].to_str().unwrap()),
            (400, "application/problem+json")
        );
        assert!(response.json()["detail"].as_str().unwrap().contains("accepted is"), "{body}");
    }
    let form = Request::put(path).header("content-type", "text/plain");
    assert_eq!(send(at, form, "{\"mode\":\"bypass\"}").await.status, 415, "what any web page could send is refused");
    assert_eq!(get(at, path).await.json()["mode"], "active");
}

#[tokio::test]
async fn actions_are_disabled_and_enabled_at_run_time() {
    let router = start_router_at(&[], &[]).await;
    let (at, path) = (router.operator_address(), "/ownerserve/v1/routing");
    let turn = |body: &'static str| send(at, Request::put(path).header("content-type", "application/json"), body);
    let disabled = |response: crate::testing::TestResponse| response.json()["disabled_actions"].clone();
    let got = turn(r#"{"disabled_actions":["state_migration","artifact_fetch"]}"#).await;
    assert_eq!(got.status, 200);
    assert_eq!(disabled(got), serde_json::json!(["artifact_fetch", "state_migration"]));
    assert_eq!(
        disabled(turn(r#"{"rollout_percent":50}"#).await).as_array().map(Vec::len),
        Some(2),
        "left out, it stays"
    );
    let off = router.gateway.routing.get().disabled;
    assert!(off.contains(planner::Action::ArtifactFetch) && !off.contains(planner::Action::RemotePrefill));
    for (body, why) in [
        (r#"{"disabled_actions":["colocated_prefill"]}"#, "colocated_prefill cannot be disabled, because every step"),
        (
            r#"{"disabled_actions":["fetch"]}"#,
            "fetch is not accepted here: accepted is a list of decode_continuation, remote_",
        ),
        (r#"{"disabled_actions":"artifact_fetch"}"#, "accepted is"),
    ] {
        let got = turn(body).await;
        let detail = got.json()["detail"].as_str().unwrap().to_owned();
        assert!(got.status == 400 && detail.contains(why), "{body}: {detail}");
    }
    assert_eq!(disabled(get(at, path).await).as_array().map(Vec::len), Some(2), "what was refused changed nothing");
    assert_eq!(disabled(turn(r#"{"disabled_actions":[]}"#).await), serde_json::json!([]));
}

#[tokio::test]
async fn readiness_follows_the_workers_but_liveness_does_not() {
    let nobody = start_router_at(&[], &[]).await;
    assert_eq!(get(nobody.operator_address(), "/readyz").await.status, 503);
    assert_eq!(get(nobody.operator_address(), "/livez").await.status, 200);
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &[]).await;
    assert_eq!(get(router.operator_address(), "/readyz").await.status, 200);
    let lines = get(router.operator_address(), "/ownerserve/v1/workers").await.json();
    assert_eq!(lines["workers"][0]["endpoint"], worker.url());
    assert_eq!(lines["workers"][0]["health"], "ready");
    assert_eq!(lines["workers"][0]["models"][0], "tiny");
}

#[tokio::test]
async fn inexact_worker_reports_its_reason_and_a_remedy() {
    let worker = StubWorker::start("one", "tiny").await;
    let url = worker.url();
    let listed = format!("workers=[{{url={url:?}, kv_events_endpoint=\"tcp://127.0.0.1:9\"}}]");
    let router = start_router_at(&[], &[&listed, "models.tiny.tokenizer_dir=builtin"]).await;
    let line = async || get(router.operator_address(), "/ownerserve/v1/workers").await.json()["workers"][0].clone();
    let mut now = line().await;
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while now["kv_event_sources"]["configured"] != 1 {
        assert!(std::time::Instant::now() < deadline, "never configured: {now}");
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        now = line().await;
    }
    assert_eq!(
        (now["kv_index_state"].as_str(), now["kv_event_sources"]["connected"].as_u64()),
        (Some("degraded"), Some(0))
    );
    let doubt = now["kv_index_reason"].as_str().unwrap();
    assert!(doubt.contains("tcp://127.0.0.1:9") && doubt.contains("--kv-events-config"), "{doubt}");
}

#[tokio::test]
async fn router_with_all_workers_drained_keeps_serving_and_reports_it() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &[]).await;
    let at = router.operator_address();
    let id = WorkerId::of_endpoint(&worker.url());
    wait_until("the ledger has it", || router.gateway.directory().view().worker(id).is_some()).await;
    // Drains through the ledger: it would override a flag set only in the registry.
    let path = format!("/ownerserve/v1/workers/{id}/drain");
    let drain = |draining: bool| send(at, asking(Request::put(&path), None), format!("{{\"draining\":{draining}}}"));
    assert_eq!(drain(true).await.status, 200);
    let ready = get(at, "/readyz").await;
    assert_eq!(ready.status, 200, "{}", ready.json());
    let degraded = &ready.json()["degraded"][0];
    assert_eq!((degraded["component"].as_str(), degraded["reason"].as_str()), (Some("workers"), Some("all_draining")));
    let clients = router.proxy_address();
    assert_eq!(get(clients, "/readyz").await.status, 200);
    assert_eq!(get(clients, "/v1/models").await.json()["data"][0]["id"], "tiny");
    for path in ["/v1/completions", "/v1/embeddings"] {
        let response = post(clients, path, "{\"model\":\"tiny\",\"prompt\":\"on and on\",\"input\":\"x\"}").await;
        assert_eq!(response.status, 200, "{path}: nobody else can serve it");
    }
    assert_eq!(drain(false).await.status, 200);
    assert_eq!(get(at, "/readyz").await.json()["degraded"], serde_json::json!([]));
}

#[tokio::test]
async fn stopping_router_is_not_ready_while_requests_finish() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &[]).await;
    let (at, clients) = (router.operator_address(), router.proxy_address());
    let mut running =
        raw(clients, &request_bytes("/v1/completions", r#"{"model":"tiny","prompt":"x","behave":"stream"}"#)).await;
    read_until(&mut running, "data: 0").await;
    let ending = tokio::spawn(router.stop());
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
    let mut ready = get(at, "/readyz").await;
    while ready.status == 200 {
        assert!(std::time::Instant::now() < deadline, "it never says that it ends");
        ready = get(at, "/readyz").await;
    }
    assert_eq!((ready.status, ready.json()["type"].as_str()), (503, Some("urn:ownerserve:problem:not_ready")));
    drop(running);
    ending.await.unwrap();
}

#[tokio::test]
async fn unknown_paths_and_methods_return_problems() {
    let router = start_router_at(&[], &[]).await;
    let at = router.operator_address();
    for (request, status) in
        [(Request::post("/v1/chat/completions"), 404), (Request::get("/"), 404), (Request::delete("/metrics"), 405)]
    {
        let response = send(at, request, Body::new()).await;
        assert_eq!((response.status, response.json()["status"].as_u64()), (status, Some(u64::from(status))));
    }
    assert_eq!(post(at, "/ownerserve/v1/workers", "{}").await.status, 405);
}

/// Seals two sessions of one worker, one of them named by a client.
async fn seal_something(front: &crate::testing::TestRouter) -> (SessionId, PrefixId) {
    let app_state = &front.gateway;
    let worker = WorkerId::of_endpoint("http://engine:1");
    let spec = WorkerSpec {
        endpoint: "http://engine:1".into(),
        role: WorkerRole::Hybrid,
        kind: WorkerKind::Engine,
        models: Arc::from([ModelId::from("tiny")]),
        ranks: 1,
    };
    let ttl = Micros(60_000_000);
    let register = RegisterWorker { worker, incarnation: Incarnation(7), spec, ttl };
    app_state.ledger.directory().submit(Command::RegisterWorker(register)).unwrap().await.unwrap();
    let (tenant, model) = (TenantId::default(), ModelId::from("tiny"));
    let session = SessionId::of_key(&tenant, &model, "s1");
    let chain = PrefixChain::over_tokens(PrefixId(1), HashSeed(0), Tokens(16), &(0..64).collect::<Vec<_>>());
    let owner = Owner { worker, incarnation: Incarnation(7), rank: DpRank(0) };
    let shape = KvBlockSpec {
        format: KvFormatDigest(9),
        kinds: KvKinds::default(),
        block: Tokens(16),
        block_bytes: Bytes(100),
    };
    let command = Command::commit_step(StepCommit {
        session,
        tenant: &tenant,
        model: &model,
        parent: None,
        chain: &chain,
        sealed: Blocks(4),
        base: Blocks(0),
        replaced_head: None,
        owner,
        ownership: OwnershipTransition::Claim,
        shape,
        router: app_state.ledger.node_id(),
    });
    let outcome = app_state.ledger.directory().submit(command.unwrap()).unwrap().await.unwrap();
    assert!(outcome.refusals().is_empty(), "{outcome:?}");
    (session, chain.head())
}

#[tokio::test]
async fn sessions_and_owners_are_read_from_the_ledger() {
    let router = start_router_at(&[], &[]).await;
    let at = router.operator_address();
    let (session, prefix) = seal_something(&router).await;
    let got = get(at, &format!("/ownerserve/v1/sessions/{session}")).await.json();
    assert_eq!(got["session"]["owner"]["endpoint"], "http://engine:1");
    assert_eq!(got["session"]["owner"]["live"], true);
    assert_eq!(got["session"]["heads"][0]["prefix"], prefix.to_string());
    assert_eq!(got["session"]["heads"][0]["tokens"], 64);
    assert!(got["session"]["epoch"]["index"].as_u64() > Some(0) && got["revision"].as_u64() > Some(0), "{got}");
    assert_eq!(got["stale"], false);
    for query in ["?session_key=s1&model=tiny", "?tenant=default", "?limit=1", ""] {
        let response = get(at, &format!("/ownerserve/v1/sessions{query}")).await.json();
        assert_eq!(
            (response["total"].as_u64(), response["sessions"][0]["id"].as_str()),
            (Some(1), Some(&*session.to_string()))
        );
    }
    assert_eq!(get(at, "/ownerserve/v1/sessions?tenant=other").await.json()["sessions"], serde_json::json!([]));
    let response = get(at, &format!("/ownerserve/v1/owners/{prefix}")).await.json();
    assert_eq!(response["owners"][0]["state"], "owned");
    assert_eq!(response["owners"][0]["owner"]["worker"], WorkerId::of_endpoint("http://engine:1").to_string());
    assert_eq!(
        (response["owners"][0]["blocks"].as_u64(), response["owners"][0]["bytes"].as_u64()),
        (Some(4), Some(400))
    );
    let text = String::from_utf8(get(at, "/metrics").await.body.to_vec()).unwrap();
    for line in
        ["ownerserve_ledger_sessions 1", "ownerserve_ledger_leases{state=\"held\"} 1", "ownerserve_ledger_stale 0"]
    {
        assert!(text.contains(line), "{line} in {text}");
    }
    assert!(!text.contains("ownerserve_ledger_commits_total{outcome=\"applied\"} 0"), "{text}");
}

#[tokio::test]
async fn ledger_state_survives_a_restart() {
    let data = tempfile::tempdir().unwrap();
    let folder = format!("ledger.data_dir={:?}", data.path());
    let before = start_router_at(&[], &[&folder]).await;
    let (session, _) = seal_something(&before).await;
    let path = format!("/ownerserve/v1/sessions/{session}");
    let first = get(before.operator_address(), &path).await.json()["session"].clone();
    before.stop().await;
    let after = start_router_at(&[], &[&folder]).await;
    let second = get(after.operator_address(), &path).await.json()["session"].clone();
    for field in ["owner", "epoch", "heads", "tenant", "model"] {
        assert_eq!(first[field], second[field], "{field}");
    }
}

#[tokio::test]
async fn invalid_ids_and_queries_return_problems_naming_accepted_values() {
    let router = start_router_at(&[], &[]).await;
    for (path, status, wanted) in [
        ("sessions/nonsense", 400, "accepted is s- and 32 hexadecimal digits"),
        ("sessions/s-95b041be", 400, "accepted is s- and 32 hexadecimal digits"),
        ("sessions/s-00000000000000000000000000000001", 404, "No session"),
        ("sessions?limit=many", 400, "limit: accepted is a whole number from 1 to 1000"),
        ("sessions?limit=99999", 400, "limit: accepted is a whole number from 1 to 1000"),
        ("decisions?limit=-1", 400, "limit: accepted is a whole number from 1 to 1000"),
        ("sessions?session_key=s1", 400, "model"),
        ("sessions?colour=red", 400, "colour"),
        ("owners/s-1", 400, "accepted is p- and 32 hexadecimal digits"),
        ("owners/p-00000000000000000000000000000001", 404, "No artifact"),
        ("decisions?session=x", 400, "session"),
        ("decisions/req-00000000000000000000000000000001", 404, "No decision"),
        ("nothing", 404, "Served are"),
    ] {
        let response = get(router.operator_address(), &format!("/ownerserve/v1/{path}")).await;
        let json = response.json();
        assert_eq!((response.status, json["status"].as_u64()), (status, Some(u64::from(status))), "{path}");
        assert!(json["detail"].as_str().unwrap().contains(wanted), "{path}: {json}");
    }
    let response = get(router.operator_address(), "/ownerserve/v1/decisions?limit=5").await.json();
    assert_eq!(response["decisions"], serde_json::json!([]));
}

fn asking(request: http::request::Builder, token: Option<&str>) -> http::request::Builder {
    let request = request.header("content-type", "application/json");
    match token {
        Some(token) => request.header("authorization", format!("Bearer {token}")),
        None => request,
    }
}

/// Writes a tokens file with a reader and an operator, and returns the setting that names it.
fn tokens(folder: &tempfile::TempDir) -> String {
    let path = folder.path().join("tokens.toml");
    let text = "[tokens]\n\"looks-at-everything\" = \"read\"\n\"works-on-everything\" = { role = \"operator\", name = \"alice\" }";
    std::fs::write(&path, text).unwrap();
    format!("operator.tokens_file={path:?}")
}

#[tokio::test]
async fn reader_and_operator_roles_are_enforced_and_distinguished() {
    let folder = tempfile::tempdir().unwrap();
    let router = start_router_at(&[], &[&tokens(&folder)]).await;
    let at = router.operator_address();
    let (list, mode) = ("/ownerserve/v1/sessions", "/ownerserve/v1/routing");
    for (token, read, write) in [
        (None, 401, 401),
        (Some("guess"), 401, 401),
        (Some("looks-at-everything"), 200, 403),
        (Some("works-on-everything"), 200, 200),
    ] {
        assert_eq!(send(at, asking(Request::get(list), token), "").await.status, read, "{token:?}");
        let response = send(at, asking(Request::put(mode), token), "{\"mode\":\"bypass\"}").await;
        assert_eq!(response.status, write, "{token:?}");
        assert_eq!(response.headers.contains_key("www-authenticate"), write == 401);
        assert_eq!(router.gateway.routing.get().mode == RoutingMode::Bypass, write == 200, "{token:?}");
    }
    assert_eq!(get(at, "/metrics").await.status, 401);
    for open in ["/livez", "/ownerserve/v1/openapi.json"] {
        assert_eq!(get(at, open).await.status, 200, "{open}");
    }
}

#[tokio::test]
async fn every_write_is_audited_without_its_token() {
    let (folder, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let router = start_router_at(&[], &[&tokens(&folder), &format!("ledger.data_dir={:?}", data.path())]).await;
    let at = router.operator_address();
    let named = |token| asking(Request::put("/ownerserve/v1/routing"), token).header("x-request-id", "mine");
    send(at, named(Some("works-on-everything")), "{\"mode\":\"bypass\"}").await;
    send(at, named(Some("looks-at-everything")), "{\"mode\":\"active\"}").await;
    send(at, named(Some("works-on-everything")), "nonsense").await;
    send(
        at,
        asking(
            Request::delete("/ownerserve/v1/sessions/s-00000000000000000000000000000001"),
            Some("works-on-everything"),
        ),
        "",
    )
    .await;
    send(at, asking(Request::get("/ownerserve/v1/sessions"), Some("works-on-everything")), "").await;
    let text = |name: &str| std::fs::read_to_string(data.path().join("audit").join(name)).unwrap();
    let lines_of = |name: &str| -> Vec<serde_json::Value> {
        text(name).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let (lines, refused) = (lines_of("audit.jsonl"), lines_of("refused.jsonl"));
    let told = |line: &serde_json::Value| {
        let word = |name: &str| line[name].as_str().unwrap_or_default().to_owned();
        (word("actor"), word("role"), word("outcome"), line["status"].as_u64().unwrap())
    };
    let expected = |who: &str, role: &str, outcome: &str, status| (who.into(), role.into(), outcome.into(), status);
    assert_eq!(told(&lines[0]), expected("alice", "operator", "succeeded", 200));
    assert_eq!((refused[0]["role"].as_str(), refused[0]["outcome"].as_str()), (Some("read"), Some("forbidden")));
    assert_eq!(told(&lines[1]), expected("alice", "operator", "invalid_body", 400));
    assert_eq!(told(&lines[2]), expected("alice", "operator", "not_found", 404));
    assert_eq!((lines.len(), refused.len()), (3, 1), "reads are not in it");
    assert_eq!(lines[0]["operation"], "PUT /ownerserve/v1/routing");
    assert_eq!((lines[0]["body"]["mode"].as_str(), lines[0]["request_id"].as_str()), (Some("bypass"), Some("mine")));
    assert!(lines[0]["remote_address"].as_str().unwrap().starts_with("127.0.0.1:"), "{lines:?}");
    assert_eq!(lines[2]["path"], "/ownerserve/v1/sessions/s-00000000000000000000000000000001");
    let all = text("audit.jsonl") + &text("refused.jsonl");
    assert!(!all.contains("works") && !all.contains("looks"));
}

#[tokio::test]
async fn write_that_cannot_be_audited_is_rejected_and_degrades_readiness() {
    let data = tempfile::tempdir().unwrap();
    std::fs::create_dir(data.path().join("audit")).unwrap();
    std::os::unix::fs::symlink("/dev/full", data.path().join("audit/audit.jsonl")).unwrap();
    let worker = crate::testing::StubWorker::start("one", "tiny").await;
    let router = start_router_at(&[worker.url()], &[&format!("ledger.data_dir={:?}", data.path())]).await;
    let at = router.operator_address();
    let before = router.gateway.routing.get().mode;
    let response = send(at, asking(Request::put("/ownerserve/v1/routing"), None), "{\"mode\":\"bypass\"}").await;
    let body = response.json();
    assert_eq!((response.status, body["reason"].as_str()), (503, Some("audit_log_unavailable")), "{body}");
    assert!(body["detail"].as_str().unwrap().contains("Free space"), "{body}");
    assert_eq!(router.gateway.routing.get().mode, before);
    let ready = get(at, "/readyz").await.json();
    let degraded = &ready["degraded"][0];
    assert_eq!(
        (degraded["component"].as_str(), degraded["reason"].as_str()),
        (Some("audit_log"), Some("write_failed")),
        "{ready}"
    );
    let text = String::from_utf8(get(at, "/metrics").await.body.to_vec()).unwrap();
    assert!(text.contains("ownerserve_audit_log_failures_total{kind=\"write_rejected\"} 1"), "{text}");
}

#[tokio::test]
async fn completed_write_of_a_disconnected_client_is_audited() {
    let data = tempfile::tempdir().unwrap();
    let router = start_router_at(&[], &[&format!("ledger.data_dir={:?}", data.path())]).await;
    let (at, audit) = (router.operator_address(), data.path().join("audit/audit.jsonl"));
    for n in 0..50 {
        let body = "{\"max_entries\":7}";
        let head = format!("PUT /ownerserve/v1/tenants/gone-{n}/quota HTTP/1.1\r\nhost: x\r\n");
        let length = format!("content-type: application/json\r\ncontent-length: {}\r\n\r\n", body.len());
        let mut client = std::net::TcpStream::connect(at).unwrap();
        std::io::Write::write_all(&mut client, format!("{head}{length}{body}").as_bytes()).unwrap();
    }
    let quota = |n: usize| router.gateway.directory().view().quota(&TenantId(format!("gone-{n}").into()));
    wait_until("some were done", || (0..50).filter(|n| quota(*n).is_some()).count() >= 10).await;
    for n in (0..50).filter(|n| quota(*n).is_some()) {
        let key = format!("/ownerserve/v1/tenants/gone-{n}/quota\"");
        wait_until(&key, || std::fs::read_to_string(&audit).unwrap().contains(&key)).await;
    }
}

#[tokio::test]
async fn entity_tag_validates_reads_and_fences_writes() {
    let router = start_router_at(&[], &[]).await;
    let at = router.operator_address();
    let (session, _) = seal_something(&router).await;
    let path = format!("/ownerserve/v1/sessions/{session}");
    let response = get(at, &path).await;
    let tag = response.headers["etag"].to_str().unwrap().to_owned();
    for header in ["ownerserve-revision", "ownerserve-term", "ownerserve-leader", "x-request-id"] {
        assert!(response.headers.contains_key(header), "{header}");
    }
    let again = send(at, Request::get(&path).header("if-none-match", &tag), "").await;
    assert_eq!((again.status, again.body.len(), again.headers["etag"].to_str().unwrap()), (304, 0, &*tag));
    let release = format!("{path}/release");
    let post = |fence: Option<&str>| {
        let request = asking(Request::post(&release), None);
        match fence {
            Some(fence) => request.header("if-match", fence),
            None => request,
        }
    };
    let response = send(at, post(None), "{}").await;
    assert_eq!((response.status, response.json()["epoch"]["index"].is_u64()), (428, true));
    let response = send(at, post(Some("\"0.1.0\"")), "{}").await;
    assert_eq!(
        (response.status, response.json()["reason"].as_str()),
        (412, Some("stale_epoch")),
        "{}",
        response.json()
    );
    assert_eq!(response.json()["type"], "urn:ownerserve:problem:precondition_failed");
    assert_eq!(send(at, post(Some("nonsense")), "{}").await.status, 400);
    assert_eq!(send(at, post(Some(&tag)), "{\"x\":1}").await.status, 400);
    assert_eq!(send(at, post(Some(&tag)), "{}").await.status, 200);
    let response = get(at, &path).await;
    assert!(response.json()["session"]["owner"].is_null() && response.headers["etag"] != *tag);
    let worker = WorkerId::of_endpoint("http://engine:1");
    let ranked = format!("{{\"owner\":{{\"worker\":\"{worker}\",\"rank\":9}}}}");
    let response = send(at, asking(Request::post(format!("{path}/claim")), None), ranked).await.json();
    assert_eq!(response["reason"], "unknown_rank", "{response}");
    assert!(response["detail"].as_str().unwrap().contains("no rank 9; its ranks are 0 to 0"), "{response}");
    let claim = format!("{{\"owner\":{{\"worker\":\"{worker}\"}}}}");
    let response = send(at, asking(Request::post(format!("{path}/claim")), None), claim).await;
    assert_eq!((response.status, response.json()["epoch"]["index"].is_u64()), (200, true), "{}", response.json());
    assert_eq!(get(at, &path).await.json()["session"]["owner"]["live"], true);
}

#[tokio::test]
async fn browser_form_writes_and_oversized_requests_change_nothing() {
    let router = start_router_at(&[], &[]).await;
    let at = router.operator_address();
    let level = || Request::put("/ownerserve/v1/cluster/feature-level");
    let json = |request: http::request::Builder| request.header("content-type", "application/json");
    assert_eq!(send(at, level(), "{\"feature_level\":2}").await.status, 415);
    assert_eq!(send(at, json(level()), format!("{{\"feature_level\":2{}}}", " ".repeat(70_000))).await.status, 413);
    let long = format!("/ownerserve/v1/cluster/feature-level?{}", "a".repeat(9_000));
    assert_eq!(send(at, json(Request::put(long)), "{\"feature_level\":2}").await.status, 414);
    for body in [
        "",
        "[]",
        "{}",
        "{\"feature_level\":-1}",
        "{\"feature_level\":2}}",
        "{\"feature_level\":2,\"x\":1}",
        "{\"feature_level\":99999999999}",
    ] {
        let response = send(at, json(level()), body).await;
        assert_eq!(
            (response.status, response.json()["type"].as_str()),
            (400, Some("urn:ownerserve:problem:invalid_body")),
            "{body}"
        );
    }
    let got = send(at, json(level()), "{\"feature_level\":0}").await;
    assert!(got.status == 400 && got.json()["detail"].as_str().unwrap().contains("accepted is 1 and more"));
    for share in ["-1", "101", "256", "1e3"] {
        let body = format!("{{\"rollout_percent\":{share}}}");
        let response = send(at, json(Request::put("/ownerserve/v1/routing")), body).await;
        let detail = response.json()["detail"].as_str().unwrap().to_owned();
        assert!(response.status == 400 && detail.contains("0 to 100") && !detail.contains("255"), "{detail}");
    }
    let response = send(at, json(level()), "{\"feature_level\":77}").await;
    assert_eq!((response.status, response.json()["reason"].as_str()), (409, Some("feature_level")));
}

#[tokio::test]
async fn lists_continue_after_a_cursor_and_reject_foreign_cursors() {
    let router = start_router_at(&[], &[]).await;
    let at = router.operator_address();
    seal_something(&router).await;
    for name in ["a", "b", "c"] {
        let set = SetQuota { tenant: TenantId(name.into()), artifacts: Some(5) };
        router.gateway.ledger.directory().submit(Command::RaiseLevel(2)).unwrap().await.unwrap();
        assert_eq!(router.gateway.ledger.directory().submit(Command::SetQuota(set)).unwrap().await, Ok(Outcome::Done));
    }
    let page = |query: String| async move { get(at, &format!("/ownerserve/v1/tenants?{query}")).await };
    let first = page("limit=3".into()).await.json();
    let names = |page: &serde_json::Value| {
        let all = page["tenants"].as_array().unwrap().iter();
        all.map(|line| line["tenant"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(names(&first), ["a", "b", "c"]);
    let next = first["next_cursor"].as_str().unwrap();
    let long = "\u{1f980}".repeat(128);
    let set = SetQuota { tenant: TenantId(long.as_str().into()), artifacts: Some(5) };
    assert_eq!(router.gateway.ledger.directory().submit(Command::SetQuota(set)).unwrap().await, Ok(Outcome::Done));
    let set = SetQuota { tenant: TenantId("\u{1f981}".into()), artifacts: Some(5) };
    assert_eq!(router.gateway.ledger.directory().submit(Command::SetQuota(set)).unwrap().await, Ok(Outcome::Done));
    let longest = page("limit=5".into()).await.json()["next_cursor"].as_str().unwrap().to_owned();
    let document = get(at, "/ownerserve/v1/openapi.json").await.json();
    let parameters = document["paths"]["/ownerserve/v1/tenants"]["get"]["parameters"].as_array().unwrap().clone();
    let cursor = parameters.iter().find(|it| it["name"] == "cursor").unwrap();
    assert!(longest.len() > 1_000 && longest.len() as u64 <= cursor["schema"]["maxLength"].as_u64().unwrap());
    assert_eq!(names(&page(format!("cursor={longest}")).await.json()), ["\u{1f981}"]);
    let bounded = TenantId(long.as_str().into());
    for tenant in [bounded, TenantId("\u{1f981}".into())] {
        let lifted = Command::SetQuota(SetQuota { tenant, artifacts: None });
        assert_eq!(router.gateway.ledger.directory().submit(lifted).unwrap().await, Ok(Outcome::Done));
    }
    let second = page(format!("limit=3&cursor={next}")).await.json();
    assert_eq!((names(&second), second["next_cursor"].is_null()), (vec!["default".to_owned()], true));
    assert_eq!(second["list_revision"], first["list_revision"]);
    let response = page(format!("has_quota=true&cursor={next}")).await;
    assert_eq!(
        (response.status, response.json()["type"].as_str()),
        (400, Some("urn:ownerserve:problem:invalid_cursor"))
    );
    assert_eq!(get(at, &format!("/ownerserve/v1/groups?cursor={next}")).await.status, 400);
    for query in [
        "limit=0",
        "limit=1001",
        "cursor=x",
        "colour=red",
        "limit=1&limit=2",
        "consistency=most",
        "max_staleness=5ms",
        "consistency=bounded",
        "consistency=bounded&max_staleness=0s",
        "consistency=bounded&max_staleness=500",
        "consistency=bounded&max_staleness=11m",
    ] {
        assert_eq!(page(query.into()).await.status, 400, "{query}");
    }
    for query in ["consistency=local", "consistency=linearizable", "consistency=bounded&max_staleness=500ms"] {
        assert_eq!(page(query.into()).await.status, 200, "{query}");
    }
}

#[tokio::test]
async fn openapi_document_lists_every_route_with_its_problems() {
    let router = start_router_at(&[], &[]).await;
    let document = get(router.operator_address(), "/ownerserve/v1/openapi.json").await.json();
    assert_eq!(document["openapi"], "3.1.0");
    let paths = document["paths"].as_object().unwrap();
    assert!(paths.len() > 25 && paths.contains_key("/ownerserve/v1/sessions/{id}/release"), "{}", paths.len());
    for (path, operations) in paths {
        for (method, operation) in operations.as_object().unwrap() {
            let responses = &operation["responses"];
            assert!(responses["400"].is_object() && responses["200"].is_object(), "{method} {path}");
            assert!(operation["summary"].is_string(), "{method} {path} says what it does");
            let is_write = method != "get";
            assert_eq!(responses["504"].is_object(), is_write, "{method} {path}");
            for (status, response) in responses.as_object().unwrap() {
                let described = response["description"].as_str().unwrap_or_default();
                assert!(described.len() > 3, "{method} {path}: {status} is described, as OpenAPI 3.1 demands");
            }
            let is_open = ["/livez", "/readyz", "/ownerserve/v1/openapi.json"].contains(&path.as_str());
            assert_eq!(responses["401"].is_null(), is_open, "{method} {path}");
        }
    }
    let text = document.to_string();
    let references = text.split("\"#/components/schemas/").skip(1).map(|rest| rest.split('"').next().unwrap());
    for name in references {
        assert!(document["components"]["schemas"][name].is_object(), "{name} is described");
    }
}

/// Properties of a schema, those of flattened schemas included.
fn properties(document: &serde_json::Value, schema: &serde_json::Value) -> BTreeMap<String, serde_json::Value> {
    let own = schema["properties"].as_object().into_iter().flatten();
    let mut found: BTreeMap<_, _> = own.map(|(name, property)| (name.clone(), property.clone())).collect();
    if let Some(name) = schema["$ref"].as_str().and_then(|name| name.rsplit('/').next()) {
        found.extend(properties(document, &document["components"]["schemas"][name]));
    }
    for part in schema["allOf"].as_array().into_iter().flatten() {
        found.extend(properties(document, part));
    }
    found
}

/// Returns whether an enum or a description has the word.
fn has_word(value: &serde_json::Value, word: &str) -> bool {
    let text = value.to_string();
    text.contains(&format!("\"{word}\"")) || text.contains(&format!("`{word}`"))
}

/// Returns whether the OpenAPI document has a word of this kind, and all that the line names besides.
fn has_api_word(document: &serde_json::Value, (kind, place): (&str, &[&str]), word: &str) -> bool {
    let schema = |name: &str| {
        let schema = &document["components"]["schemas"][name];
        assert!(schema.is_object(), "no schema {name}");
        schema
    };
    let problem = properties(document, schema("Problem"));
    match (kind, place) {
        ("path", []) => document["paths"].get(format!("/ownerserve/v1{word}")).is_some(),
        ("tag", []) => document["paths"].to_string().contains(&format!("\"tags\":[\"{word}\"]")),
        ("query", [path]) => {
            let parameters = document["paths"][format!("/ownerserve/v1{path}")]["get"]["parameters"].as_array();
            parameters.unwrap().iter().any(|parameter| parameter["name"] == word)
        }
        ("field", [name]) => properties(document, schema(name)).contains_key(word),
        ("value", [name, "-"]) => has_word(schema(name), word),
        ("value", [name, property]) => {
            let property = properties(document, schema(name)).remove(*property);
            let property = property.unwrap_or_else(|| panic!("{name} has no property {place:?}"));
            let target = property["$ref"].as_str().and_then(|name| name.rsplit('/').next());
            has_word(target.map_or(&property, schema), word)
        }
        ("type", []) => has_word(&problem["type"], &format!("urn:ownerserve:problem:{word}")),
        ("reason", []) => has_word(&problem["reason"], word),
        _ => panic!("{kind} {place:?}"),
    }
}

#[tokio::test]
async fn api_uses_the_new_word_for_every_renamed_one() {
    let data = tempfile::tempdir().unwrap();
    let router = start_router_at(&[], &[&format!("ledger.data_dir={:?}", data.path())]).await;
    let at = router.operator_address();
    let document = get(at, "/ownerserve/v1/openapi.json").await.json();
    send(at, asking(Request::put("/ownerserve/v1/tenants/a/quota"), None), "{\"max_entries\":1}").await;
    let audit = std::fs::read_to_string(data.path().join("audit/audit.jsonl")).unwrap();
    let audit: serde_json::Value = serde_json::from_str(audit.lines().next().unwrap()).unwrap();
    let lines = include_str!("operator/renamed_words.txt").lines().filter(|line| !line.starts_with('#'));
    let mut count = 0;
    for line in lines {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [kind, place @ .., old, new] = &words[..] else { panic!("{line}") };
        let has = |word: &str| match *kind {
            "audit" => audit.get(word).is_some(),
            kind => has_api_word(&document, (kind, place), word),
        };
        assert!(has(new), "{line}: {new} is missing");
        assert!(!has(old), "{line}: {old} is still there");
        count += 1;
    }
    assert!(count > 150, "{count} words");
}

#[tokio::test]
async fn dns_rebinding_and_cross_origin_requests_are_rejected() {
    let router = start_router_at(&[], &["server.allowed_origins=[\"https://ui.example\"]"]).await;
    let at = router.operator_address();
    let register = async |headers: &[(&str, &str)]| {
        let mut request = Request::post("/ownerserve/v1/registrations").header("content-type", "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        send(at, request, "{\"url\":\"http://127.0.0.1:9\",\"ttl\":\"60s\"}").await
    };
    for (headers, word) in [
        (vec![("host", "evil.example"), ("origin", "http://evil.example")], "host_not_allowed"),
        (vec![("host", "evil.example")], "host_not_allowed"),
        (vec![("origin", "http://evil.example")], "origin_not_allowed"),
        (vec![("origin", "null")], "origin_not_allowed"),
    ] {
        let response = register(&headers).await;
        assert_eq!(
            (response.status, response.headers["content-type"].to_str().unwrap()),
            (403, "application/problem+json")
        );
        let problem = response.json();
        assert_eq!(problem["type"], format!("urn:ownerserve:problem:{word}"), "{headers:?}");
        assert!(problem["detail"].as_str().unwrap().contains("server.allowed_"), "{problem}");
    }
    let read = Request::get("/ownerserve/v1/workers").header("host", "evil.example");
    assert_eq!(send(at, read, Body::new()).await.status, 403, "nor does it read anything");
    assert!(router.gateway.fleet().snapshot().is_empty());
    assert_eq!(register(&[("origin", "https://ui.example")]).await.status, 200);
    assert_eq!(register(&[("origin", &format!("http://{at}"))]).await.status, 200);
    wait_until("it is listed", || router.gateway.fleet().snapshot().len() == 1).await;
}

#[tokio::test]
async fn readiness_hides_details_from_callers_without_a_token() {
    let (folder, worker) = (tempfile::tempdir().unwrap(), StubWorker::start("one", "tiny").await);
    let name = "no-such-host.invalid:80";
    let dns = format!("discovery.dns=[{{address={name:?}, refresh_interval=\"1s\"}}]");
    let router = start_router(&[&worker], &[&tokens(&folder), &dns]).await;
    let at = router.operator_address();
    wait_until("the name was looked up", || !router.gateway.discovery().failures().is_empty()).await;
    let ask = |token| send(at, asking(Request::get("/readyz"), token), "");
    let details = |response: &crate::testing::TestResponse| {
        let told = response.json()["degraded"].as_array().unwrap().clone();
        told.iter()
            .map(|line| (line["component"].as_str().unwrap().to_owned(), line["detail"].to_string()))
            .collect::<Vec<_>>()
    };
    let (stranger, known) = (ask(None).await, ask(Some("looks-at-everything")).await);
    assert_eq!((stranger.status, known.status, ask(Some("guess")).await.status), (200, 200, 200));
    let whole = details(&known);
    assert!(whole.iter().any(|(component, detail)| component == "discovery" && detail.contains(name)), "{whole:?}");
    let components = |all: &[(String, String)]| all.iter().map(|(component, _)| component.clone()).collect::<Vec<_>>();
    for got in [&stranger, &ask(Some("guess")).await] {
        let told = details(got);
        assert_eq!(components(&told), components(&whole), "the components are told");
        for (_, detail) in &told {
            assert!(detail.contains("send an operator token") && !detail.contains("no-such-host"), "{detail}");
            assert!(!detail.contains("127.0.0.1") && !detail.contains("resolve"), "{detail}");
        }
    }
    drop(router);
    let router = start_router_at(&[], &[&tokens(&folder), &dns]).await;
    wait_until("the name was looked up", || !router.gateway.discovery().failures().is_empty()).await;
    let ask = async |token| {
        let response = send(router.operator_address(), asking(Request::get("/readyz"), token), "").await;
        assert_eq!(response.status, 503);
        response.json()["detail"].as_str().unwrap().to_owned()
    };
    assert!(ask(Some("looks-at-everything")).await.contains(name));
    let response = ask(None).await;
    assert!(response.contains("cannot be looked up") && !response.contains("no-such-host"), "{response}");
}

#[tokio::test]
async fn no_tenant_takes_the_memory_of_operators_writes() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &[]).await;
    let mut held = router.gateway.memory_budget.reservation(&TenantId::default());
    held.grow(router.gateway.config.proxy.request_memory_limit.0).unwrap();
    let write = || Request::put("/ownerserve/v1/routing").header("content-type", "application/json");
    let response = post(router.proxy_address(), "/tokenize", "{\"x\": 1}").await;
    assert_eq!(response.status, 429, "clients have none left");
    let response = send(router.operator_address(), write(), "{\"mode\": \"shadow\"}").await;
    assert!(response.status != 429 && response.status < 500, "{response:?}");
    let mut operators = router.gateway.operator_memory.reservation(&TenantId("".into()));
    operators.grow(16 << 20).unwrap();
    let response = send(router.operator_address(), write(), "{\"mode\": \"shadow\"}").await;
    assert_eq!((response.status, response.json()["title"].as_str()), (429, Some("Too many requests")));
}
