use clap::Parser;
use serde_json::{Value, json};

use super::*;
use crate::testing::{get, post, raw, read_until, request_bytes, start_router_at, wait_until};

#[derive(Parser)]
struct SimCommandLine {
    #[command(flatten)]
    sim: SimArgs,
}

const ANY: SocketAddr = SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

fn args(flags: &[&str]) -> SimArgs {
    SimCommandLine::try_parse_from(["sim-worker", "--listen=127.0.0.1:0"].iter().chain(flags)).unwrap().sim
}

pub(crate) async fn sim(flags: &[&str]) -> SimWorker {
    let args = args(flags);
    let codec = ModelTextCodec::load(args.tokenizer_dir.clone()).unwrap();
    SimWorker::start(engine_options(&args, ANY).unwrap(), Arc::new(codec)).await.unwrap()
}

pub(crate) fn url(worker: &SimWorker) -> String {
    format!("http://{}", worker.address())
}

#[test]
fn one_process_runs_one_engine_per_address() {
    let listen =
        |flags: &[&str]| SimCommandLine::try_parse_from(["sim-worker"].iter().chain(flags)).unwrap().sim.listen;
    assert_eq!(listen(&[]), ["127.0.0.1:8000".parse().unwrap()]);
    let two = listen(&["--listen=127.0.0.1:1", "--listen=127.0.0.1:2"]);
    assert_eq!(two.iter().map(SocketAddr::port).collect::<Vec<_>>(), [1, 2]);
}

#[test]
fn flags_become_options_and_an_invalid_profile_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("p.toml");
    std::fs::write(&path, "num_gpu_blocks = 128\nmax_model_len = 1024").unwrap();
    let profile = format!("--profile={}", path.display());
    let options = super::engine_options(
        &args(&[
            "--role=decode",
            "--speed-up=5",
            &profile,
            "--kv-events-fault=gap=3",
            "--kv-events-buffer=7",
            "--lora-adapter=sql",
            "--lora-adapter=poet",
        ]),
        ANY,
    )
    .unwrap();
    assert_eq!((options.role, options.speed_up, options.profile.num_gpu_blocks), (WorkerRole::Decode, 5.0, 128));
    assert_eq!(options.adapters, ["sql", "poet"]);
    assert_eq!((options.events.fault.gap.map(u64::from), options.events.buffer), (Some(3), 7));
    std::fs::write(&path, "bloks = 128").unwrap();
    let error = super::engine_options(&args(&[&profile]), ANY).unwrap_err().to_string();
    assert!(error.contains("p.toml") && error.contains("bloks"), "{error}");
    assert!(SimCommandLine::try_parse_from(["sim-worker", "--role=gpu"]).is_err());
}

#[tokio::test]
async fn tools_and_reasoning_are_accepted_by_all_three_endpoints() {
    let worker = sim(&["--speed-up=50"]).await;
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let ask = json!([{"role": "user", "content": "Which gate is it?"}]);
    let cases = [
        (
            "/v1/chat/completions",
            json!({"messages": ask, "tools": [
            {"type": "function", "function": {"name": "gate", "parameters": schema}}]}),
        ),
        (
            "/v1/messages",
            json!({"max_tokens": 4, "tools": [{"name": "gate", "input_schema": schema}], "messages": [
            {"role": "user", "content": "Which gate is it?"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "I look.", "signature": ""},
                {"type": "tool_use", "id": "call_1", "name": "gate", "input": {"city": "Oslo"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "B7"}]}]}),
        ),
        (
            "/v1/responses",
            json!({"tools": [{"type": "function", "name": "gate", "parameters": schema}], "input": [
            {"role": "user", "content": "Which gate is it?"},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "call_1", "name": "gate", "arguments": "{\"city\":\"Oslo\"}"},
            {"type": "function_call_output", "call_id": "call_1", "output": "B7"}]}),
        ),
    ];
    for (path, mut body) in cases {
        body["model"] = "tiny".into();
        let answer = post(worker.address(), path, body.to_string()).await;
        assert_eq!(answer.status, 200, "{path}: {:?}", answer.body);
        body.as_object_mut().unwrap().remove("tools");
        let plain = post(worker.address(), path, body.to_string()).await.json();
        let counts = ["prompt_tokens", "input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"];
        let prompt = |body: &Value| counts.iter().filter_map(|name| body["usage"][name].as_u64()).sum::<u64>();
        assert!(prompt(&answer.json()) > prompt(&plain), "{path}: tools are shown to the model");
    }
}

/// The small model's files with a tokenizer that begins plain prompts with token 0.
fn framing_model() -> tempfile::TempDir {
    let tiny = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/models/tiny");
    let folder = tempfile::tempdir().unwrap();
    for file in ["tokenizer_config.json", "chat_template.jinja"] {
        std::fs::copy(tiny.join(file), folder.path().join(file)).unwrap();
    }
    let begin = "<|endoftext|>";
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(tiny.join("tokenizer.json")).unwrap()).unwrap();
    tokenizer["post_processor"] = json!({
        "type": "TemplateProcessing", "pair": [],
        "single": [{"SpecialToken": {"id": begin, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {begin: {"id": begin, "ids": [0], "tokens": [begin]}},
    });
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    folder
}

#[tokio::test]
async fn generated_text_round_trips_with_tokenizer_framing() {
    let folder = framing_model();
    let worker = sim(&["--speed-up=50", &format!("--tokenizer-dir={}", folder.path().display())]).await;
    let tokens = async |mut ask: Value| {
        ask["model"] = "tiny".into();
        post(worker.address(), "/tokenize", ask.to_string()).await.json()["tokens"].clone()
    };
    let ask =
        json!({"model": "tiny", "prompt": "Go on.", "max_tokens": 40, "ignore_eos": true, "return_token_ids": true});
    let choice = post(worker.address(), "/v1/completions", ask.to_string()).await.json()["choices"][0].clone();
    let text = &choice["text"];
    assert_eq!(tokens(json!({"prompt": text, "add_special_tokens": false})).await, choice["token_ids"], "{text}");
    assert_eq!(tokens(json!({"prompt": "Go on."})).await, choice["prompt_token_ids"]);
    assert_eq!(choice["prompt_token_ids"][0], 0, "begin of text");
}

#[tokio::test]
async fn simulated_worker_is_served_through_the_router() {
    let worker = sim(&["--speed-up=50"]).await;
    let router = start_router_at(&[url(&worker)], &[]).await;
    let at = router.proxy_address();
    let models = get(at, "/v1/models").await.json();
    assert_eq!(models["data"][0]["id"], "tiny");
    let chat = |stream: bool| {
        json!({"model": "tiny", "max_tokens": 8, "temperature": 0, "stream": stream,
               "messages": [{"role": "user", "content": "Where is my bag?"}]})
        .to_string()
    };
    let whole = post(at, "/v1/chat/completions", chat(false)).await;
    assert_eq!(whole.status, 200, "{:?}", whole.body);
    let text = whole.json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    let stream = post(at, "/v1/chat/completions", chat(true)).await;
    assert!(stream.headers["content-type"].to_str().unwrap().starts_with("text/event-stream"));
    let events = String::from_utf8(stream.body.to_vec()).unwrap();
    assert!(events.trim_end().ends_with("data: [DONE]"), "{events}");
    let pieces = events.lines().filter_map(|line| line.strip_prefix("data: {"));
    let said: String = pieces
        .map(|piece| serde_json::from_str::<Value>(&format!("{{{piece}")).unwrap())
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(said, text);
    let direct = post(worker.address(), "/v1/chat/completions", chat(false)).await.json();
    assert_eq!(direct["choices"][0]["message"]["content"].as_str(), Some(text.as_str()));
    let ids = post(at, "/tokenize", json!({"model": "tiny", "prompt": "bag"}).to_string()).await.json();
    assert!(ids["tokens"].as_array().is_some_and(|tokens| !tokens.is_empty()), "{ids}");
    assert_eq!(worker.admin_requests(), 0);
}

#[tokio::test]
async fn dead_worker_is_replaced_before_and_during_its_answer() {
    let (first, second) = (sim(&["--speed-up=0.5"]).await, sim(&["--speed-up=50"]).await);
    let router = start_router_at(&[url(&first), url(&second)], &["routing.fallback_policy=round_robin"]).await;
    wait_until("both are ready", || router.gateway.worker_pool.ready(router.gateway.fleet()).len() == 2).await;
    let body = |stream: bool| {
        json!({"model": "tiny", "max_tokens": 400, "ignore_eos": true, "prompt": "Go on.", "stream": stream})
            .to_string()
    };
    // Two at once, so that one is at the slow worker, whole answers and streams each.
    let mut streams = Vec::new();
    for _ in 0..2 {
        let mut stream = raw(router.proxy_address(), &request_bytes("/v1/completions", &body(true))).await;
        read_until(&mut stream, "data: {").await;
        streams.push(stream);
    }
    let at = router.proxy_address();
    let whole: Vec<_> = (0..2)
        .map(|_| {
            let body = body(false);
            tokio::spawn(async move { post(at, "/v1/completions", body).await })
        })
        .collect();
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    drop(first);
    for answer in whole {
        assert_eq!(answer.await.unwrap().status, 200, "nobody notices a worker that had not answered");
    }
    for mut stream in streams {
        let end = crate::testing::read_chunked_body(&mut stream).await;
        assert!(!end.contains("event: error") && end.contains("[DONE]"), "{end}");
    }
    assert_eq!(router.gateway.metrics.requests.broken_streams.with_label_values(&["resumed"]).get(), 1);
}

#[tokio::test]
async fn operators_see_worker_events_load_and_lease() {
    let worker = sim(&["--speed-up=50"]).await;
    let router = start_router_at(&[url(&worker)], &["models.tiny.tokenizer_dir=builtin"]).await;
    let line = async || get(router.operator_address(), "/ownerserve/v1/workers").await.json()["workers"][0].clone();
    let metrics = async || String::from_utf8(get(router.operator_address(), "/metrics").await.body.to_vec()).unwrap();
    let body =
        json!({"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "word ".repeat(400)}]});
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    loop {
        assert_eq!(post(router.proxy_address(), "/v1/chat/completions", body.to_string()).await.status, 200);
        let line = line().await;
        if line["kv_index_state"] == "exact"
            && line["lease"]["state"] == "held"
            && line["kv_event_counts"]["engine_blocks"] != 0
        {
            break;
        }
        assert!(std::time::Instant::now() < deadline, "{line}");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    let known = line().await;
    assert_eq!(known["kv_event_sources"], json!({"configured": 1, "connected": 1}));
    assert!(known["kv_index_reason"].is_null(), "{known}");
    assert!(known["confidence"]["prefill"]["samples"].is_u64(), "{known}");
    let name = worker.address().to_string();
    let text = metrics().await;
    let value = |series: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("ownerserve_{series} ")));
        line.unwrap_or_else(|| panic!("{series} in {text}")).parse::<f64>().unwrap()
    };
    assert_eq!(value(&format!("worker_up{{role=\"hybrid\",worker=\"{name}\"}}")), 1.0);
    assert_eq!(value(&format!("kv_index_state{{state=\"exact\",worker=\"{name}\"}}")), 1.0);
    assert_eq!(value(&format!("kv_event_sources{{state=\"connected\",worker=\"{name}\"}}")), 1.0);
    assert_eq!(value(&format!("kv_event_sources{{state=\"disconnected\",worker=\"{name}\"}}")), 0.0);
    assert!(value(&format!("kv_events_total{{worker=\"{name}\"}}")) > 0.0);
    let (held, distinct) =
        (value(&format!("residency_blocks{{worker=\"{name}\"}}")), value("residency_distinct_blocks"));
    assert!(held > 10.0 && held == distinct, "one worker holds each block once: {held} {distinct}");
    assert_eq!(value("ledger_leases{state=\"held\"}"), 1.0);
    assert_eq!(value("client_connections") as i64, router.gateway.metrics.process.connections.get());
}
