//! Tests of responses, messages, pooling, and operator endpoints.

use super::*;

#[tokio::test]
async fn messages_are_answered_in_anthropics_format() {
    let bench = SimWorkerFixture::new().await;
    let ask = json!({
        "model": "tiny", "max_tokens": 6, "system": "be brief",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
    });
    let body = bench.ask("/v1/messages", ask.clone()).await;
    assert_eq!((&body["type"], &body["stop_reason"]), (&json!("message"), &json!("max_tokens")));
    let told = body["content"][0]["text"].as_str().unwrap().to_owned();
    let usage = &body["usage"];
    let counted = bench.ask("/v1/messages/count_tokens", ask.clone()).await["input_tokens"].as_u64();
    let sum: u64 = ["input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"]
        .iter()
        .map(|name| usage[name].as_u64().unwrap())
        .sum();
    assert_eq!(Some(sum), counted);
    let mut streamed = ask;
    streamed["stream"] = json!(true);
    let stream = bench.send("/v1/messages", &streamed).await.text().await.unwrap();
    let events = payloads(&stream);
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!((kinds[0], kinds[kinds.len() - 1]), ("message_start", "message_stop"));
    let text: String = events.iter().filter_map(|event| event["delta"]["text"].as_str()).collect();
    assert_eq!(text, told);
    let (status, error) = bench.post("/v1/messages", json!({"model": "no", "max_tokens": 1, "messages": []})).await;
    assert_eq!((status, &error["type"], &error["error"]["type"]), (404, &json!("error"), &json!("not_found_error")));
}

#[tokio::test]
async fn responses_can_be_continued_and_retrieved() {
    let bench = SimWorkerFixture::new().await;
    let first = bench.ask("/v1/responses", json!({"model": "tiny", "input": "hello", "max_output_tokens": 6})).await;
    assert_eq!((&first["object"], &first["status"]), (&json!("response"), &json!("incomplete")));
    assert_eq!(first["output"][0]["content"][0]["type"], "output_text");
    assert_eq!(first["usage"]["output_tokens"], 6);
    let id = first["id"].as_str().unwrap();
    let (status, kept) = bench.get(&format!("/v1/responses/{id}")).await;
    assert_eq!((status, serde_json::from_str::<Value>(&kept).unwrap()), (200, first.clone()));
    let next = json!({"model": "tiny", "input": "more", "previous_response_id": id});
    let second = bench.ask("/v1/responses", next).await;
    assert!(second["usage"]["input_tokens"].as_u64() > first["usage"]["total_tokens"].as_u64());
    let body = json!({"model": "tiny", "instructions": "be brief", "input": [
        {"role": "user", "content": "hello"}, first["output"][0], {"role": "user", "content": "more"}]});
    let following = json!({"model": "tiny", "instructions": "be brief", "input": "more", "previous_response_id": id});
    let prompts = [bench.ask("/v1/responses", body).await, bench.ask("/v1/responses", following).await];
    assert_eq!(prompts[0]["usage"]["input_tokens"], prompts[1]["usage"]["input_tokens"], "its own instructions count");
    let lost = json!({"model": "tiny", "input": "more", "previous_response_id": "resp_x"});
    assert_eq!(bench.post("/v1/responses", lost).await.0, 404);
}

#[tokio::test]
async fn streamed_response_ends_with_the_whole_response() {
    let bench = SimWorkerFixture::new().await;
    let ask = json!({"model": "tiny", "input": [{"role": "user", "content": "hi"}], "max_output_tokens": 6,
                     "stream": true});
    let stream = bench.send("/v1/responses", &ask).await.text().await.unwrap();
    let events = payloads(&stream);
    assert_eq!(events[0]["type"], "response.created");
    let numbers: Vec<u64> = events.iter().map(|event| event["sequence_number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (0..numbers.len() as u64).collect::<Vec<_>>());
    let deltas: String = events
        .iter()
        .filter(|event| event["type"] == "response.output_text.delta")
        .map(|event| event["delta"].as_str().unwrap())
        .collect();
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.incomplete");
    assert_eq!(last["response"]["output"][0]["content"][0]["text"], json!(deltas));
}

#[tokio::test]
async fn embeddings_scores_and_ranks_are_deterministic() {
    let bench = SimWorkerFixture::new().await;
    let ask = json!({"model": "tiny", "input": ["ab cd", "xy"]});
    let body = bench.ask("/v1/embeddings", ask.clone()).await;
    assert_eq!(body["data"].as_array().unwrap().len(), 2);
    assert_eq!(bench.ask("/v1/embeddings", ask.clone()).await["data"], body["data"]);
    let mut packed = ask;
    packed["encoding_format"] = json!("base64");
    assert!(bench.ask("/v1/embeddings", packed).await["data"][0]["embedding"].is_string());
    let ranked = json!({"model": "tiny", "query": "same words", "documents": ["other", "same words"], "top_n": 1});
    let ranked = bench.ask("/v1/rerank", ranked).await;
    assert_eq!((&ranked["results"][0]["index"], ranked["results"].as_array().unwrap().len()), (&json!(1), 1));
    let scored = json!({"model": "tiny", "text_1": "same words", "text_2": ["same words", "other"]});
    let scored = bench.ask("/v1/score", scored).await;
    let score = |at: usize| scored["data"][at]["score"].as_f64().unwrap();
    assert!(score(0) > 0.99 && score(1) < score(0));
    assert_eq!(bench.post("/v1/rerank", json!({"model": "tiny", "query": "x"})).await.0, 400);
    assert_eq!(bench.post("/v1/embeddings", json!({"model": "no", "input": "x"})).await.0, 404);
}

#[tokio::test]
async fn worker_reports_models_health_load_and_metrics() {
    let bench = SimWorkerFixture::new().await;
    let models: Value = serde_json::from_str(&bench.get("/v1/models").await.1).unwrap();
    assert_eq!((&models["data"][0]["id"], &models["data"][0]["max_model_len"]), (&json!("tiny"), &json!(4000)));
    assert_eq!(bench.get("/health").await, (200, String::new()));
    assert_eq!(bench.get("/load").await.1, "{\"server_load\":0}");
    bench.ask("/v1/completions", completion(&words(1, 20), 5)).await;
    bench.ask("/v1/completions", completion(&words(1, 20), 5)).await;
    let (status, page) = bench.get("/metrics").await;
    assert_eq!(status, 200);
    for line in [
        "vllm:prompt_tokens_by_source_total{engine=\"0\",model_name=\"tiny\",source=\"local_compute\"} 24.0",
        "vllm:prompt_tokens_by_source_total{engine=\"0\",model_name=\"tiny\",source=\"local_cache_hit\"} 16.0",
        "vllm:generation_tokens_total{engine=\"0\",model_name=\"tiny\"} 10.0",
        "vllm:request_success_total{engine=\"0\",model_name=\"tiny\",finished_reason=\"length\"} 2.0",
        "vllm:time_to_first_token_seconds_count{engine=\"0\",model_name=\"tiny\"} 2.0",
        "vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"tiny\"} 0.0",
    ] {
        assert!(page.contains(line), "{line} in {page}");
    }
    assert!(page.contains("block_size=\"8\"") && page.contains("num_gpu_blocks=\"512\""));
    let start = bench.metric("process_start_time_seconds").await;
    let other = SimWorkerFixture::new().await.metric("process_start_time_seconds").await;
    assert!(start > 1.6e9 && start != other, "two lives are told apart");
}

#[tokio::test]
async fn configured_adapters_are_listed_and_served() {
    let bench = SimWorkerFixture::with(SimOptions { adapters: vec!["sql".into(), "poet".into()], ..options() }).await;
    let models: Value = serde_json::from_str(&bench.get("/v1/models").await.1).unwrap();
    let listed: Vec<_> =
        models["data"].as_array().unwrap().iter().map(|model| (&model["id"], &model["parent"])).collect();
    let (tiny, none) = (&json!("tiny"), &Value::Null);
    assert_eq!(listed, [(tiny, none), (&json!("poet"), tiny), (&json!("sql"), tiny)]);
    let ask = |model: &str| json!({"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]});
    for path in ["/v1/chat/completions", "/v1/messages"] {
        assert_eq!(bench.ask(path, ask("sql")).await["model"], "sql");
        assert_eq!(bench.post(path, ask("csv")).await.0, 404, "{path}");
    }
    assert_eq!(bench.ask("/v1/responses", json!({"model": "sql", "input": "hi"})).await["model"], "sql");
    assert_eq!(bench.post("/v1/responses", json!({"model": "csv", "input": "hi"})).await.0, 404);
    assert_eq!(bench.post("/v1/messages/count_tokens", ask("csv")).await.0, 404);
    for wrong in [vec!["tiny".to_owned()], vec![String::new()], vec!["a".into(), "a".into()], vec!["x".repeat(129)]] {
        let options = SimOptions { adapters: wrong.clone(), ..options() };
        let error = SimWorker::start(options, Arc::new(TinyTokenizer))
            .await
            .err()
            .unwrap_or_else(|| panic!("{wrong:?} is taken"));
        assert!(error.to_string().starts_with("lora_adapter must be at most 64 different names"), "{error}");
    }
}

#[tokio::test]
async fn admin_endpoints_work_and_are_counted() {
    let bench = SimWorkerFixture::new().await;
    assert_eq!(bench.worker.admin_requests(), 0);
    assert_eq!(bench.send("/v1/load_lora_adapter", &json!({})).await.status(), 400);
    let load = json!({"lora_name": "poet", "lora_path": "/x"});
    assert_eq!(bench.send("/v1/load_lora_adapter", &load).await.status(), 200);
    let mut ask = completion(&words(1, 20), 5);
    let plain = text(&bench.ask("/v1/completions", ask.clone()).await);
    ask["model"] = json!("poet");
    assert_ne!(text(&bench.ask("/v1/completions", ask.clone()).await), plain);
    assert_eq!(bench.send("/v1/unload_lora_adapter", &load).await.status(), 200);
    assert_eq!(bench.post("/v1/completions", ask).await.0, 404);
    assert_eq!(bench.send("/sleep", &json!({})).await.status(), 200);
    assert_eq!(bench.post("/v1/completions", completion(&words(1, 20), 5)).await.0, 503);
    assert_eq!(bench.send("/wake_up", &json!({})).await.status(), 200);
    let awake = bench.ask("/v1/completions", completion(&words(1, 20), 5)).await;
    assert_eq!(awake["usage"]["prompt_tokens_details"]["cached_tokens"], 0, "sleep discards KV");
    assert!(bench.ask("/reset_prefix_cache", json!({})).await["success"].as_bool().unwrap());
    assert_eq!(bench.worker.admin_requests(), 6);
}
