"""A worker that dies: before its first byte nobody notices, after it the stream ends with an error event."""

import json
import threading

import openai
import pytest
from harness.cluster import Cluster, Serve
from harness.processes import until
from harness.recorder import Recorder
from harness.wire import chat, connect, events, exchange, head


@pytest.fixture
def pair():
    """A recorder that breaks, one that does not, and a serve in front of both."""
    broken, sound = Recorder(), Recorder()
    serve = Serve([broken.url, sound.url]).wait()
    yield broken, sound, serve
    serve.stop()
    broken.stop()
    sound.stop()


@pytest.mark.parametrize("stream", [True, False])
def test_a_worker_that_breaks_off_before_answering_is_not_noticed(pair, stream):
    broken, sound, serve = pair
    broken.behaviour.break_before_answer = True
    for number in range(12):
        answer = exchange(serve.port, chat(f"question {number}", stream=stream))
        assert answer.status == 200, answer
        assert not stream or events(answer.body)[-1] == "[DONE]"
    assert len(sound.posts()) == 12
    assert broken.posts(), "the broken worker was never tried"


@pytest.mark.parametrize("path, ask", [
    ("/v1/messages", lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 4}),
    ("/v1/responses", lambda text: {"input": text, "store": False}),
])
@pytest.mark.parametrize("stream", [True, False])
def test_nor_is_it_where_messages_or_responses_are_asked_for(pair, path, ask, stream):
    broken, sound, serve = pair
    broken.behaviour.break_before_answer = True
    for number in range(12):
        body = json.dumps({"model": "tiny", "stream": stream, **ask(f"question {number}")}).encode()
        assert exchange(serve.port, body, path).status == 200
    assert [seen.path for seen in sound.posts()] == [path] * 12
    assert broken.posts(), "the broken worker was never tried"


def test_a_worker_that_answers_500_is_not_noticed_while_another_can(pair):
    broken, _, serve = pair
    broken.behaviour.status = 500
    broken.behaviour.answer = {"error": {"message": "out of memory"}}
    assert [exchange(serve.port, chat(f"q {number}")).status for number in range(8)] == [200] * 8
    assert broken.posts(), "the broken worker was never tried"


def test_when_all_break_the_client_hears_of_it_once(pair):
    broken, sound, serve = pair
    broken.behaviour.break_before_answer = sound.behaviour.break_before_answer = True
    answer = exchange(serve.port, chat("q"))
    assert answer.status in (502, 503) and answer.json()["error"]["type"] == "server_error"
    assert 2 <= len(broken.posts()) + len(sound.posts()) <= 6, "tries are bounded"


def test_a_stream_that_breaks_ends_with_an_error_event():
    recorder = Recorder()
    recorder.behaviour.break_after_events = 3
    recorder.behaviour.events = 10
    serve = Serve([recorder.url]).wait()
    try:
        answer = exchange(serve.port, chat("q", stream=True))
        payloads = events(answer.body)
        assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream")
        assert [payload["choices"][0]["delta"]["content"] for payload in payloads[:3]] == ["w0 ", "w1 ", "w2 "]
        assert payloads[3]["error"]["type"] == "server_error" and payloads[3]["error"]["message"]
        assert payloads[4:] in ([], ["[DONE]"])
        assert len(recorder.posts()) == 1, "tokens would have come twice"
    finally:
        serve.stop()
        recorder.stop()


def test_the_official_client_raises_when_its_stream_breaks():
    recorder = Recorder()
    recorder.behaviour.break_after_events = 3
    serve = Serve([recorder.url]).wait()
    try:
        with openai.OpenAI(base_url=f"{serve.url}/v1", api_key="none", max_retries=0) as client:
            ask = {"model": "tiny", "messages": [{"role": "user", "content": "q"}], "stream": True}
            with pytest.raises(openai.APIError, match="worker"):
                list(client.chat.completions.create(**ask))
        assert recorder.posts()
    finally:
        serve.stop()
        recorder.stop()


def ask_in_thread(port: int, body: bytes, results: list) -> threading.Thread:
    def run():
        try:
            results.append(exchange(port, body))
        except OSError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_workers_killed_before_they_answered_are_not_noticed_by_anyone():
    """Whole answers are long in the making, so that the kill meets all of them before their first byte."""
    with Cluster("hybrid", "hybrid", "hybrid", sim=("--speed-up", "5")) as cluster:
        results: list = []
        bodies = [chat(f"Task {number}: go on.", max_tokens=150, ignore_eos=True) for number in range(18)]
        threads = [ask_in_thread(cluster.serve.port, body, results) for body in bodies]
        victim = cluster.workers[0]
        until("the victim is at work", lambda: victim.running() >= 1)
        victim.process.kill()
        for thread in threads:
            thread.join(90)
        statuses = [getattr(result, "status", repr(result)) for result in results]
        assert statuses == [200] * 18
        assert cluster.serve.metric("retries_total") >= 1


def test_a_worker_killed_in_mid_stream_ends_the_stream_with_an_error_event():
    with Cluster("hybrid", sim=("--speed-up", "2")) as cluster:
        body = chat("Tell me everything.", max_tokens=8000, stream=True, ignore_eos=True)
        with connect(cluster.serve.port) as connection:
            connection.sendall(head("POST", "/v1/chat/completions", {
                "content-type": "application/json", "content-length": str(len(body)), "connection": "close"}) + body)
            stream = connection.makefile("rb")
            received = b""
            while received.count(b"data:") < 5:
                received += stream.readline()
            cluster.workers[0].process.kill()
            received += stream.read()
        payloads = events(received)
        errors = [place for place, payload in enumerate(payloads) if "error" in payload]
        assert len(errors) == 1 and errors[0] >= 5
        assert payloads[errors[0]]["error"]["type"] == "server_error"
        assert payloads[errors[0] + 1:] in ([], ["[DONE]"])


def test_a_worker_that_comes_back_is_used_again():
    with Cluster("hybrid", "hybrid", sim=("--speed-up", "20")) as cluster:
        first = cluster.workers[0]
        first.process.kill()
        assert [exchange(cluster.serve.port, chat(f"q {n}")).status for n in range(6)] == [200] * 6
        until("the loss was seen", lambda: cluster.serve.workers_up() == 1)
        first.start()
        first.wait()
        until("the return was seen", lambda: cluster.serve.workers_up() == 2)

        def used_again():
            for number in range(6):
                exchange(cluster.serve.port, chat(f"fresh question {number}", max_tokens=2))
            return "vllm:prompt_tokens_total 0" not in first.metrics() and 'source="local_compute"' in first.metrics()

        until("the returned worker serves", used_again, 30)
