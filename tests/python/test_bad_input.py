"""Bad input at the socket: an error in OpenAI's shape, nothing forwarded, and the next client served as before."""

import gzip
import json
import time

import pytest
from harness.cluster import Serve
from harness.processes import until
from harness.recorder import Recorder
from harness.wire import Answer, chat, connect, exchange, head, read_answer

SMALL_LIMIT = 256 * 1024


@pytest.fixture(scope="module")
def strict():
    """A serve with short waits and a small limit, so that the tests are short too."""
    recorder = Recorder()
    settings = (f"proxy.body_limit={SMALL_LIMIT}B", 'proxy.header_timeout="1s"', 'proxy.body_idle_timeout="1s"')
    serve = Serve([recorder.url], settings=settings).wait()
    yield recorder, serve
    serve.stop()
    recorder.stop()


def is_openais(answer: Answer, status: int) -> dict:
    assert answer.status == status, answer
    error = answer.json()["error"]
    assert error["message"] and error["type"]
    assert {"param", "code"} <= set(error)
    return error


def still_serves(serve) -> bool:
    return exchange(serve.port, chat()).status == 200


@pytest.mark.parametrize("body", [
    b"", b"{", b"[1, 2", b'{"model": "tiny", "messages": [', b"null", b"[]", b'"text"', b"7", b"{}{}", b'{"model": "tiny",}',
    b"\x00\x01\x02", b'{"model": "tiny", "messages": "hi"}', b'{"model": "tiny"}', b'{"messages": []}',
    b'{"model": null, "messages": []}', b'{"model": ["tiny"], "messages": []}', b"[" * 100_000, b'{"a":' * 20_000,
    b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"stream":"maybe"}',
])
def test_what_is_not_a_request_is_a_bad_request(strict, body):
    recorder, serve = strict
    recorder.seen.clear()
    is_openais(exchange(serve.port, body), 400)
    assert recorder.posts() == []
    assert still_serves(serve)


def test_an_unknown_model_is_not_found_and_not_forwarded(strict):
    recorder, serve = strict
    recorder.seen.clear()
    error = is_openais(exchange(serve.port, chat(model="no-such-model")), 404)
    assert error["code"] == "model_not_found" and "no-such-model" in error["message"]
    assert recorder.posts() == []


def test_invalid_utf8_is_a_bad_request(strict):
    recorder, serve = strict
    recorder.seen.clear()
    is_openais(exchange(serve.port, b'{"model":"tiny","messages":[{"role":"user","content":"\xff\xfe"}]}'), 400)
    assert recorder.posts() == []


def test_lone_surrogates_are_forwarded_unchanged(strict):
    recorder, serve = strict
    recorder.seen.clear()
    body = b'{"model":"tiny","messages":[{"role":"user","content":"a\\ud800b \\udfff"}]}'
    assert exchange(serve.port, body).status == 200
    assert recorder.posts()[0].body == body


def test_a_body_announced_over_the_limit_is_refused_before_it_is_sent(strict):
    _, serve = strict
    with connect(serve.port) as connection:
        connection.sendall(head("POST", "/v1/chat/completions", {
            "content-type": "application/json", "content-length": str(SMALL_LIMIT + 1)}))
        is_openais(read_answer(connection), 413)


def test_a_chunked_body_over_the_limit_is_refused_on_the_way(strict):
    recorder, serve = strict
    recorder.seen.clear()
    with connect(serve.port) as connection:
        connection.sendall(head("POST", "/v1/chat/completions", {
            "content-type": "application/json", "transfer-encoding": "chunked"}))
        piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        try:
            for _ in range(8):
                connection.sendall(piece)
        except OSError:
            pass
        is_openais(read_answer(connection), 413)
    assert recorder.posts() == []


def test_a_compressed_body_counts_as_what_it_unpacks_to(strict):
    recorder, serve = strict
    recorder.seen.clear()
    bomb = gzip.compress(chat("x" * (4 * SMALL_LIMIT)))
    is_openais(exchange(serve.port, bomb, content_encoding="gzip"), 413)
    assert recorder.posts() == []


def test_a_compressed_body_is_served(strict):
    recorder, serve = strict
    recorder.seen.clear()
    assert exchange(serve.port, gzip.compress(chat("packed")), content_encoding="gzip").status == 200
    seen = recorder.posts()[0]
    body = gzip.decompress(seen.body) if seen.headers.get("content-encoding") == "gzip" else seen.body
    assert json.loads(body)["messages"][0]["content"] == "packed"


@pytest.mark.parametrize("encoding", ["zzz", "gzip, zzz"])
def test_an_unknown_encoding_is_said_to_be_unknown(strict, encoding):
    recorder, serve = strict
    recorder.seen.clear()
    is_openais(exchange(serve.port, chat(), content_encoding=encoding), 415)
    assert recorder.posts() == []


def test_a_body_that_is_not_in_its_encoding_is_a_bad_request(strict):
    _, serve = strict
    is_openais(exchange(serve.port, chat(), content_encoding="gzip"), 400)


def test_slow_headers_are_ended(strict):
    _, serve = strict
    with connect(serve.port) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-slow: ")
        started = time.monotonic()
        answer = read_answer(connection)
        assert time.monotonic() - started < 8
        assert answer.status in (0, 408)
    assert still_serves(serve)


def test_a_slow_body_is_ended(strict):
    recorder, serve = strict
    recorder.seen.clear()
    with connect(serve.port) as connection:
        connection.sendall(head("POST", "/v1/chat/completions", {
            "content-type": "application/json", "content-length": "1000"}) + b'{"model"')
        started = time.monotonic()
        is_openais(read_answer(connection), 408)
        assert time.monotonic() - started < 8
    assert recorder.posts() == []
    assert still_serves(serve)


def test_a_client_that_leaves_in_its_own_body_harms_nothing(strict):
    recorder, serve = strict
    recorder.seen.clear()
    for _ in range(20):
        with connect(serve.port) as connection:
            connection.sendall(head("POST", "/v1/chat/completions", {
                "content-type": "application/json", "content-length": "1000"}) + b'{"model"')
    assert still_serves(serve)
    assert len(recorder.posts()) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_worker(cluster, stream):
    with connect(cluster.serve.port) as connection:
        body = chat("Tell me everything.", max_tokens=20_000, stream=stream, ignore_eos=True)
        connection.sendall(head("POST", "/v1/chat/completions", {
            "content-type": "application/json", "content-length": str(len(body))}) + body)
        until("a worker is busy", lambda: sum(worker.running() for worker in cluster.workers) >= 1)
    until("no worker is busy", lambda: sum(worker.running() for worker in cluster.workers) == 0, 10)
    assert still_serves(cluster.serve)


@pytest.mark.parametrize("noise", [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET\r\n\r\n", b"\r\n" * 50, b"POST /v1/chat/completions HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 5_000 + b"\r\n", b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
])
def test_noise_is_refused_and_the_next_client_served(strict, noise):
    recorder, serve = strict
    recorder.seen.clear()
    with connect(serve.port) as connection:
        try:
            connection.sendall(noise)
            answer = read_answer(connection)
            assert answer.status == 0 or 400 <= answer.status < 500, answer
        except ConnectionError:
            pass
    assert recorder.posts() == []
    assert still_serves(serve)


def test_the_default_limit_is_64_mebibytes(recorded):
    _, serve = recorded
    for size, status in ((64 << 20) + 1, 413), ((64 << 20), None):
        with connect(serve.port) as connection:
            connection.sendall(head("POST", "/v1/chat/completions", {
                "content-type": "application/json", "content-length": str(size)}))
            connection.settimeout(3 if status else 0.5)
            try:
                assert read_answer(connection).status == status
            except TimeoutError:
                assert status is None
