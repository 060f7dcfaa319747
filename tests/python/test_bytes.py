"""The client's bytes reach the engine as they came, less what a client must not say; nothing but listed paths is forwarded."""

import json

import pytest
from harness.wire import ask, exchange

ODD = (b'{ "model":"tiny",\n "messages":[{"role":"user","content":"h\\u00e9 \xc3\xa9"}] ,"max_tokens":2,'
       b'"x_unknown":{"b":1,"a":[2, 3.0]},"seed":12345678901234567890,"temperature":1.0,"top_p":0.10,"stream":false}')
ADMIN = [
    ("POST", "/reset_prefix_cache"), ("POST", "/sleep"), ("POST", "/wake_up"), ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"), ("POST", "/flush_cache"), ("POST", "/collective_rpc"), ("GET", "/server_info"),
    ("GET", "/metrics"), ("GET", "/kv_event_sources"), ("POST", "/abort_requests"), ("POST", "/v1/../sleep"),
    ("POST", "/v1/chat/completions/../../../sleep"), ("POST", "/%73leep"), ("POST", "//sleep"),
    ("GET", "/ownerserve/v1/workers"),
]


def test_an_unusual_body_arrives_byte_for_byte(recorded):
    recorder, serve = recorded
    assert exchange(serve.port, ODD).status == 200
    assert [seen.body for seen in recorder.posts()] == [ODD]


def test_unknown_headers_arrive_and_hop_by_hop_ones_do_not(recorded):
    recorder, serve = recorded
    exchange(serve.port, ODD, x_custom="hello", baggage="k=v", traceparent="00-1-2-03", keep_alive="timeout=5", te="trailers")
    headers = recorder.posts()[0].headers
    assert (headers["x-custom"], headers["baggage"], headers["traceparent"]) == ("hello", "k=v", "00-1-2-03")
    assert "keep-alive" not in headers and "te" not in headers


@pytest.mark.parametrize("field", [
    '"kv_transfer_params":{"do_remote_prefill":true,"remote_engine_id":"x"}',
    '"kv_transfer_params" : {"do_remote_decode" : true}',
    '"\\u006bv_transfer_params":{"do_remote_prefill":true}',
    '"vllm_xargs":{"kv_cache_report_mode":"full"}',
])
def test_what_concerns_transfers_is_taken_out_of_a_clients_body(recorded, field):
    recorder, serve = recorded
    before = serve.metric("stripped_parameters_total")
    body = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],' + field.encode() + b',"seed":1}'
    assert exchange(serve.port, body).status == 200
    arrived = json.loads(recorder.posts()[0].body)
    assert "kv_transfer_params" not in arrived
    assert "kv_cache_report_mode" not in arrived.get("vllm_xargs", {})
    assert arrived["seed"] == 1
    assert serve.metric("stripped_parameters_total") == before + 1


def test_the_same_words_inside_a_message_stay(recorded):
    recorder, serve = recorded
    text = 'say "kv_transfer_params": {"do_remote_decode": true}'
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": text}]}).encode()
    exchange(serve.port, body)
    assert recorder.posts()[0].body == body


@pytest.mark.parametrize(("method", "path"), ADMIN)
def test_engine_administration_is_never_forwarded(recorded, method, path):
    recorder, serve = recorded
    known = len(recorder.posts())
    answer = exchange(serve.port, b"{}", path=path) if method == "POST" else ask(serve.port, method, path)
    assert answer.status in (404, 405), answer
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert len(recorder.posts()) == known
    assert not [seen for seen in recorder.seen if "sleep" in seen.path or "lora" in seen.path]


@pytest.mark.parametrize("path", [
    "/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize", "/v1/rerank",
    "/v1/score",
])
def test_other_inference_paths_pass_through(recorded, path):
    recorder, serve = recorded
    body = b'{"model": "tiny", "input": ["a"], "messages": [], "prompt": "p", "odd": 1e3}'
    assert exchange(serve.port, body, path=path).status == 200
    assert [(seen.path, seen.body) for seen in recorder.posts()] == [(path, body)]


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "/v1/assistants", "/v1/threads/t1/runs"])
def test_what_needs_shared_state_is_refused_by_name(recorded, path):
    recorder, serve = recorded
    answer = exchange(serve.port, b"{}", path=path)
    assert answer.status == 501 and answer.json()["error"]["message"]
    assert recorder.posts() == []


def test_an_answers_bytes_and_headers_reach_the_client(recorded):
    recorder, serve = recorded
    recorder.behaviour.answer = {"id": "x", "odd_field": [1.50, "é"], "choices": []}
    answer = exchange(serve.port, ODD)
    assert answer.body == json.dumps(recorder.behaviour.answer).encode()
    assert answer.headers["content-type"] == "application/json"
