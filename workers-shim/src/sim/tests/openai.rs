//! Tests of chat and completions: formats, streams, errors.

use super::*;

fn chat(content: &str) -> Value {
    json!({"model": "tiny", "messages": [{"role": "user", "content": content}], "temperature": 0})
}

#[tokio::test]
async fn chat_answer_has_vllms_shape() {
    let bench = SimWorkerFixture::new().await;
    let body = bench.ask("/v1/chat/completions", chat("hello there")).await;
    assert!(body["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!((&body["object"], &body["model"]), (&json!("chat.completion"), &json!("tiny")));
    let choice = &body["choices"][0];
    assert_eq!(choice["message"]["role"], "assistant");
    assert!(!choice["message"]["content"].as_str().unwrap().is_empty());
    assert!(["stop", "length"].contains(&choice["finish_reason"].as_str().unwrap()));
    let usage = &body["usage"];
    let sum = usage["prompt_tokens"].as_u64().unwrap() + usage["completion_tokens"].as_u64().unwrap();
    assert_eq!(usage["total_tokens"], sum);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
    assert!(body["kv_transfer_params"].is_null());
}

#[tokio::test]
async fn streamed_chat_equals_the_unstreamed_one() {
    let bench = SimWorkerFixture::new().await;
    let whole = bench.ask("/v1/chat/completions", chat("hello there")).await;
    let mut ask = chat("hello there");
    ask["stream"] = json!(true);
    ask["stream_options"] = json!({"include_usage": true});
    let response = bench.send("/v1/chat/completions", &ask).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
    assert_eq!(response.headers()[crate::sim::WORKER_HEADER], bench.worker.address().to_string());
    let stream = response.text().await.unwrap();
    assert!(stream.ends_with("data: [DONE]\n\n"));
    let chunks = payloads(&stream);
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let streamed: String = chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(streamed, text(&whole));
    let last = chunks.last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], whole["usage"]["completion_tokens"]);
    let ended = &chunks[chunks.len() - 2]["choices"][0];
    assert_eq!(ended["finish_reason"], whole["choices"][0]["finish_reason"]);
    assert!(chunks[1..chunks.len() - 2].iter().all(|c| c["choices"][0]["finish_reason"].is_null()));
}

#[tokio::test]
async fn usage_is_streamed_only_on_request() {
    let bench = SimWorkerFixture::new().await;
    let mut ask = chat("hello");
    ask["stream"] = json!(true);
    let stream = bench.send("/v1/chat/completions", &ask).await.text().await.unwrap();
    assert!(payloads(&stream).iter().all(|chunk| chunk.get("usage").is_none()));
}

#[tokio::test]
async fn next_step_finds_its_history_and_answer_cached() {
    let bench = SimWorkerFixture::new().await;
    let question = "tell me ".repeat(30);
    let first = bench.ask("/v1/chat/completions", chat(&question)).await;
    let mut messages = chat(&question)["messages"].clone();
    let turns = messages.as_array_mut().unwrap();
    turns.push(first["choices"][0]["message"].clone());
    turns.push(json!({"role": "user", "content": "go on"}));
    let ask = json!({"model": "tiny", "messages": messages, "temperature": 0});
    let second = bench.ask("/v1/chat/completions", ask).await;
    let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    let before = first["usage"]["total_tokens"].as_u64().unwrap();
    assert!(cached > first["usage"]["prompt_tokens"].as_u64().unwrap(), "decode blocks are reused");
    assert!(before - cached <= 16, "{cached} of {before}");
}

#[tokio::test]
async fn completions_take_text_ids_and_batches() {
    let bench = SimWorkerFixture::new().await;
    let ids = words(1, 20);
    let by_ids = bench.ask("/v1/completions", completion(&ids, 6)).await;
    let plain = bench.ask("/tokenize", json!({"model": "tiny", "prompt": "x"})).await;
    assert_eq!(plain["count"], 1);
    let as_text = bench.ask("/detokenize", json!({"model": "tiny", "tokens": ids})).await["prompt"].clone();
    let mut ask = completion(&ids, 6);
    ask["prompt"] = as_text.clone();
    assert_eq!(text(&bench.ask("/v1/completions", ask.clone()).await), text(&by_ids));
    ask["prompt"] = json!([as_text, "other"]);
    let batch = bench.ask("/v1/completions", ask.clone()).await;
    assert_eq!(batch["choices"].as_array().unwrap().len(), 2);
    assert_eq!((text(&batch), &batch["choices"][1]["index"]), (text(&by_ids), &json!(1)));
    ask["prompt"] = json!([ids, words(2, 9)]);
    let batch = bench.ask("/v1/completions", ask).await;
    assert_eq!(batch["usage"]["prompt_tokens"], 29);
    assert_eq!(batch["usage"]["completion_tokens"], 12);
}

#[tokio::test]
async fn completion_length_defaults_to_sixteen_tokens() {
    let bench = SimWorkerFixture::new().await;
    let mut ask = completion(&words(1, 20), 1);
    ask.as_object_mut().unwrap().remove("max_tokens");
    assert_eq!(bench.ask("/v1/completions", ask).await["usage"]["completion_tokens"], 16);
}

#[tokio::test]
async fn token_ids_are_returned_on_request() {
    let bench = SimWorkerFixture::new().await;
    let ids = words(1, 20);
    let mut ask = completion(&ids, 5);
    ask["return_token_ids"] = json!(true);
    let body = bench.ask("/v1/completions", ask.clone()).await;
    let choice = &body["choices"][0];
    assert_eq!(choice["prompt_token_ids"], json!(ids));
    let said = choice["token_ids"].as_array().unwrap();
    assert_eq!(said.len(), 5);
    let response = bench.ask("/detokenize", json!({"model": "tiny", "tokens": said})).await;
    assert_eq!(response["prompt"], choice["text"]);
    ask["stream"] = json!(true);
    let stream = bench.send("/v1/completions", &ask).await.text().await.unwrap();
    let chunks = payloads(&stream);
    assert_eq!(chunks[0]["choices"][0]["prompt_token_ids"], json!(ids));
    let streamed: Vec<Value> =
        chunks.iter().flat_map(|c| c["choices"][0]["token_ids"].as_array().unwrap().clone()).collect();
    assert_eq!(&streamed, said);
}

#[tokio::test]
async fn choices_differ_and_the_first_equals_the_single_one() {
    let bench = SimWorkerFixture::new().await;
    let mut ask = completion(&words(1, 20), 8);
    let plain = text(&bench.ask("/v1/completions", ask.clone()).await);
    ask["n"] = json!(3);
    let body = bench.ask("/v1/completions", ask.clone()).await;
    let texts: Vec<&str> = body["choices"].as_array().unwrap().iter().map(|c| c["text"].as_str().unwrap()).collect();
    assert_eq!(texts[0], plain);
    assert!(texts[1] != texts[0] && texts[2] != texts[0] && texts[1] != texts[2]);
    assert_eq!((&body["usage"]["prompt_tokens"], &body["usage"]["completion_tokens"]), (&json!(20), &json!(24)));
    ask["stream"] = json!(true);
    let stream = bench.send("/v1/completions", &ask).await.text().await.unwrap();
    for (index, expected) in texts.iter().enumerate() {
        let of = |c: &&Value| c["choices"][0]["index"] == index;
        let text: String =
            payloads(&stream).iter().filter(of).filter_map(|c| c["choices"][0]["text"].as_str()).collect();
        assert_eq!(text, *expected);
    }
}

#[tokio::test]
async fn stop_string_ends_the_answer_and_is_excluded() {
    let bench = SimWorkerFixture::new().await;
    let mut ask = completion(&words(1, 20), 12);
    let whole = text(&bench.ask("/v1/completions", ask.clone()).await);
    // From the middle of one word to the middle of the next.
    let stop = &whole[14..17];
    let cut = whole.find(stop).unwrap();
    ask["stop"] = json!([stop]);
    for streamed in [false, true] {
        ask["stream"] = json!(streamed);
        let response = bench.send("/v1/completions", &ask).await.text().await.unwrap();
        let choices: Vec<Value> = match streamed {
            true => payloads(&response),
            false => vec![serde_json::from_str(&response).unwrap()],
        };
        let text: String = choices.iter().filter_map(|c| c["choices"][0]["text"].as_str()).collect();
        let last = &choices.last().unwrap()["choices"][0];
        assert_eq!(text, whole[..cut]);
        assert_eq!((&last["finish_reason"], &last["stop_reason"]), (&json!("stop"), &json!(stop)));
    }
    bench.until("vllm:num_requests_running", 0.0).await;
}

#[tokio::test]
async fn seed_has_an_effect_only_with_temperature() {
    let bench = SimWorkerFixture::new().await;
    let ask = |temperature: f64, seed: Value| {
        let mut ask = completion(&words(1, 20), 8);
        ask["temperature"] = json!(temperature);
        ask["seed"] = seed;
        ask
    };
    let greedy = text(&bench.ask("/v1/completions", ask(0.0, json!(null))).await);
    assert_eq!(text(&bench.ask("/v1/completions", ask(0.0, json!(5))).await), greedy);
    let warm = text(&bench.ask("/v1/completions", ask(0.7, json!(5))).await);
    assert_ne!(warm, greedy);
    assert_eq!(text(&bench.ask("/v1/completions", ask(0.7, json!(5))).await), warm);
}

#[tokio::test]
async fn partial_answer_can_be_continued() {
    let bench = SimWorkerFixture::new().await;
    let mut ask = chat("hello there");
    ask["max_tokens"] = json!(12);
    let whole = text(&bench.ask("/v1/chat/completions", ask.clone()).await);
    let (begun, rest) = whole.split_at(15);
    ask["messages"].as_array_mut().unwrap().push(json!({"role": "assistant", "content": begun}));
    ask["continue_final_message"] = json!(true);
    ask["add_generation_prompt"] = json!(false);
    ask["max_tokens"] = json!(7);
    assert_eq!(text(&bench.ask("/v1/chat/completions", ask).await), rest);
}

#[tokio::test]
async fn invalid_requests_get_vllms_errors() {
    let bench = SimWorkerFixture::new().await;
    let cases = [
        ("/v1/chat/completions", json!({"model": "nobody", "messages": [{"role": "user", "content": "x"}]}), 404),
        ("/v1/chat/completions", json!({"model": 5, "messages": [{"role": "user", "content": "x"}]}), 400),
        ("/v1/chat/completions", json!({"model": "tiny"}), 400),
        ("/v1/chat/completions", json!({"model": "tiny", "messages": "x"}), 400),
        ("/v1/chat/completions", json!({"model": "tiny", "messages": []}), 400),
        ("/v1/chat/completions", json!({"model": "tiny", "messages": [{"role": "user", "content": 5}]}), 400),
        ("/v1/completions", json!({"model": "tiny"}), 400),
        ("/v1/completions", json!({"model": "tiny", "prompt": ""}), 400),
        ("/v1/completions", json!({"model": "tiny", "prompt": [99999]}), 400),
        ("/v1/completions", json!({"model": "tiny", "prompt": "x", "max_tokens": 0}), 400),
        ("/v1/completions", json!({"model": "tiny", "prompt": "x", "max_tokens": 5000}), 400),
        ("/v1/completions", json!({"model": "tiny", "prompt": words(1, 4_000)}), 400),
        ("/v1/completions", json!({"model": "tiny", "prompt": "x", "temperature": 3}), 400),
        ("/v1/completions", json!({"model": "tiny", "prompt": "x", "temperature": "hot"}), 400),
        ("/v1/completions", json!({"model": "tiny", "prompt": "x", "stream_options": {}}), 400),
        ("/v1/completions", json!({"model": "tiny", "prompt": "x", "stop": [""]}), 400),
        ("/v1/completions", json!({"model": "tiny", "prompt": "x", "cache_salt": ""}), 400),
        ("/v1/completions", json!({"model": "tiny", "prompt": "x", "priority": 1}), 400),
        ("/v1/completions", json!(["x"]), 400),
    ];
    for (path, body, expected) in cases {
        let (status, answer) = bench.post(path, body.clone()).await;
        assert_eq!(status, expected, "{body}: {answer}");
        let error = &answer["error"];
        assert_eq!(error["code"], expected);
        assert!(error["message"].is_string() && error["type"].is_string(), "{answer}");
    }
    let (status, answer) =
        bench.post("/v1/completions", json!({"model": "tiny", "prompt": "x", "max_tokens": 0})).await;
    let expected = json!({"error": {
        "message": "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)",
        "type": "BadRequestError", "param": "max_tokens", "code": 400,
    }});
    assert_eq!((status, answer), (400, expected), "as captured from vLLM");
}

#[tokio::test]
async fn broken_and_oversized_bodies_are_refused() {
    let bench = SimWorkerFixture::with(SimOptions { body_limit: 1000, ..options() }).await;
    let send = |body: Vec<u8>| bench.client.post(bench.url("/v1/completions")).body(body).send();
    assert_eq!(send(b"{\"model\": ".to_vec()).await.unwrap().status(), 400);
    assert_eq!(send(b"{\"model\": \"\xff\"}".to_vec()).await.unwrap().status(), 400);
    assert_eq!(send(vec![b' '; 2000]).await.unwrap().status(), 413);
    let lone = br#"{"model": "tiny", "prompt": "a \ud83d b", "max_tokens": 2}"#.to_vec();
    assert_eq!(send(lone).await.unwrap().status(), 200);
    assert_eq!(bench.get("/health").await.0, 200);
    assert_eq!(bench.get("/nowhere").await.0, 404);
}

#[tokio::test]
async fn tenants_do_not_share_cached_blocks() {
    let bench = SimWorkerFixture::new().await;
    let cached = async |salt: &str| {
        let mut ask = completion(&words(1, 40), 2);
        ask["cache_salt"] = json!(salt);
        bench.ask("/v1/completions", ask).await["usage"]["prompt_tokens_details"]["cached_tokens"].clone()
    };
    assert_eq!([cached("a").await, cached("b").await, cached("a").await], [json!(0), json!(0), json!(32)]);
}

#[tokio::test]
async fn prompt_logprobs_force_a_full_prefill() {
    let bench = SimWorkerFixture::new().await;
    let chat = json!({"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": words(1, 40)}]});
    let cached = async |path: &str, mut ask: Value, fields: Value| {
        ask.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        bench.ask(path, ask).await["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 0
    };
    // As vLLM 0.32 responded to the same fields.
    for (path, ask, read, unread) in [
        (
            "/v1/completions",
            completion(&words(1, 40), 2),
            [json!({}), json!({"prompt_logprobs": null}), json!({"echo": true}), json!({"logprobs": 1})],
            [json!({"prompt_logprobs": 0}), json!({"prompt_logprobs": 1}), json!({"echo": true, "logprobs": 0})],
        ),
        (
            "/v1/chat/completions",
            chat,
            [
                json!({}),
                json!({"prompt_logprobs": null}),
                json!({"echo": false}),
                json!({"logprobs": true, "top_logprobs": 1}),
            ],
            [json!({"prompt_logprobs": 0}), json!({"prompt_logprobs": 1}), json!({"echo": true})],
        ),
    ] {
        assert!(!cached(path, ask.clone(), json!({})).await, "cold");
        for fields in read {
            assert!(cached(path, ask.clone(), fields.clone()).await, "{path} {fields}");
        }
        for fields in unread {
            assert!(!cached(path, ask.clone(), fields.clone()).await, "{path} {fields}");
        }
        assert!(cached(path, ask, json!({})).await, "it is there all the same");
    }
}
