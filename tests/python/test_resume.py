"""Workers are killed and stopped in the middle of many streams: every client gets what an unbroken run would have given it."""

import http.client
import json
import os
import re
import signal
import threading
import urllib.request
from dataclasses import dataclass, field

import pytest
from harness.cluster import Cluster, SimWorker, get_json, metric
from harness.processes import until
from harness.talk import TEXT, prose, served_at
from harness.wire import events

STREAMS = 40
TOKENS = 300
# About three seconds an answer.
SIM = ("--speed-up", "2")


def bodies() -> list[tuple[str, dict]]:
    """Chats and completions, with and without usage, with ids, stop texts, seeds and bounds of their own."""
    asked = []
    for number in range(STREAMS):
        body = {"model": "tiny", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        if number % 3 == 0:
            body["stream_options"] = {"include_usage": True}
        if number % 5 == 0:
            body["return_token_ids"] = True
        if number % 7 == 0:
            body["stop"] = ["a text that never comes"]
        if number % 4 == 1:
            body |= {"temperature": 0.7, "seed": number}
        text = prose(60, number + 1)
        if number % 2:
            asked.append(("/v1/completions", body | {"prompt": text, "min_tokens": 250}))
        else:
            asked.append(("/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}))
    return asked


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
# What does not go on by token ids; half as long where there are two answers.
OTHERS = [
    ("/v1/messages", {}),
    ("/v1/responses", {}),
    ("/v1/responses", {"temperature": 0.7, "seed": 3}),
    ("/v1/chat/completions", {"tools": [TOOL], "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"n": 2, "max_tokens": TOKENS // 2}),
    ("/v1/chat/completions", {"response_format": {"type": "json_object"}, "return_token_ids": True}),
    ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {"presence_penalty": 0.5, "temperature": 0.7, "seed": 8}),
    ("/v1/completions", {"prompt": ["Tell me this.", "Tell me that."], "max_tokens": TOKENS // 2}),
    ("/v1/completions", {"logprobs": 1, "stop": ["a text that never comes"], "include_stop_str_in_output": True}),
]


def others() -> list[tuple[str, dict]]:
    """Each of them thrice."""
    asked = []
    for number, (path, more) in enumerate(OTHERS * 3):
        text = prose(60, number + 100)
        said = {"input": text} if path == "/v1/responses" else {"messages": [{"role": "user", "content": text}]}
        if path == "/v1/completions":
            said = {"prompt": text}
        bound = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        asked.append((path, {"model": "tiny", "temperature": 0, bound: TOKENS, "ignore_eos": True, "stream": True, **said, **more}))
    return asked


@dataclass
class Stream:
    """One client's stream, read in a thread of its own."""

    url: str
    path: str
    body: dict
    begun: threading.Event = field(default_factory=threading.Event)
    answer: bytes | None = None
    error: Exception | None = None

    def start(self) -> "Stream":
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()
        return self

    def read(self) -> None:
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + self.path, json.dumps(self.body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=90) as answer:
                self.begun.set()
                self.answer = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self.error = error

    def payloads(self) -> list:
        self.thread.join(100)
        assert self.answer is not None, f"a client was left hanging: {self.error!r}"
        return events(self.answer)


def told_by_name(payloads: list) -> list:
    """What a client makes of a stream of events that have names; every one is told once, and by the same ids."""
    assert payloads[-1]["type"] in ("message_stop", "response.completed", "response.incomplete"), payloads[-1]
    numbers = [payload.pop("sequence_number") for payload in payloads if "sequence_number" in payload]
    assert numbers == list(range(len(numbers)))
    merged = []
    for payload in payloads:
        if merged and payload["type"] == merged[-1]["type"] == "content_block_delta":
            merged[-1]["delta"]["text"] += payload["delta"]["text"]
        elif merged and payload["type"] == merged[-1]["type"] == "response.output_text.delta":
            merged[-1]["delta"] += payload["delta"]
        else:
            merged.append(payload)
    text = json.dumps(merged)
    (name,) = set(re.findall(r'"(?:chatcmpl-|resp_|msg_)([^"]+)"', text))
    return json.loads(text.replace(name, "NAME"), object_hook=lambda fields: {key: fields[key] for key in fields if key != "created_at"})


def told(payloads: list) -> dict | list:
    """What a client makes of a stream."""
    if payloads[-1] != "[DONE]" and "type" in payloads[-1]:
        return told_by_name(payloads)
    assert payloads[-1] == "[DONE]" and payloads.count("[DONE]") == 1, payloads[-3:]
    told = [payload for payload in payloads if payload != "[DONE]"]
    assert not [payload for payload in told if "error" in payload], [p for p in told if "error" in p]
    choices = [choice for payload in told for choice in payload["choices"]]
    texts, ids = {}, {}
    for choice in choices:
        at = choice["index"]
        texts[at] = texts.get(at, "") + (choice["text"] if "text" in choice else choice["delta"].get("content") or "")
        ids[at] = ids.get(at, []) + (choice.get("token_ids") or [])
    usage = [payload["usage"] for payload in told if payload.get("usage")]
    return {
        "texts": texts,
        "ids": ids,
        "finish": sorted((choice["index"], choice["finish_reason"]) for choice in choices if choice["finish_reason"]),
        "roles": sum("role" in choice.get("delta", {}) for choice in choices),
        "usage": [(one["prompt_tokens"], one["completion_tokens"], one["total_tokens"]) for one in usage],
        "heads": len({(payload["id"], payload["created"], payload["object"], payload["model"]) for payload in told}),
        "objects": {payload["object"] for payload in told},
    }


def unbroken_of(asked: list[tuple[str, dict]]) -> list:
    """What one worker tells that nothing happens to."""
    worker = SimWorker("hybrid", "--speed-up", "50").wait()
    try:
        return [told(Stream(worker.url, path, body).start().payloads()) for path, body in asked]
    finally:
        worker.process.stop()


@pytest.fixture(scope="module")
def unbroken() -> list:
    return unbroken_of(bodies())


@pytest.fixture(scope="module")
def unbroken_others() -> list:
    return unbroken_of(others())


def busiest(cluster: Cluster) -> SimWorker:
    return max(cluster.workers, key=lambda worker: worker.running())


def resumed(cluster: Cluster) -> int:
    return int(cluster.serve.metric("stream_interruptions_total", outcome="resumed"))


def check(cluster: Cluster, streams: list[Stream], unbroken: list[dict]) -> None:
    for number, (stream, expected) in enumerate(zip(streams, unbroken)):
        got = told(stream.payloads())
        assert got == expected, f"stream {number} {stream.path}: {got} {expected}"
    broken = {outcome: cluster.serve.metric("stream_interruptions_total", outcome=outcome) for outcome in ("failed", "not_resumable")}
    assert broken == {"failed": 0, "not_resumable": 0}
    receipts = get_json(f"{cluster.serve.operator}/ownerserve/v1/decisions?limit={STREAMS}")["decisions"]
    again = [receipt for receipt in receipts if any("resume" in attempt for attempt in receipt["attempts"])]
    assert len(again) >= 1
    for receipt in again:
        attempts = receipt["attempts"]
        broken = [served_at(attempt) for attempt in attempts if {"stream_interrupted", "stream_lost"} & set(attempt["events"])]
        assert broken and served_at(attempts[-1]) not in broken and attempts[-1]["resume"]["duration"] != "0s", attempts
        assert receipt["observed"]["outcome"] == "complete"
        assert receipt["observed"]["output_tokens"] == TOKENS


@pytest.mark.parametrize("settings", [(), (TEXT,)], ids=["by_bytes", "by_tokens"])
def test_a_worker_killed_in_the_middle_of_many_streams_is_not_noticed(unbroken, settings):
    with Cluster("hybrid", "hybrid", "hybrid", sim=SIM, settings=settings) as cluster:
        streams = [Stream(cluster.url, path, body).start() for path, body in bodies()]
        assert all(stream.begun.wait(60) for stream in streams)
        victim = busiest(cluster)
        held = victim.running()
        assert held >= 1
        victim.process.kill()
        check(cluster, streams, unbroken)
        assert resumed(cluster) >= held / 2, "the streams were over before the worker was"


def test_what_does_not_go_on_by_token_ids_is_made_again_and_told_once(unbroken_others):
    with Cluster("hybrid", "hybrid", "hybrid", sim=SIM) as cluster:
        streams = [Stream(cluster.url, path, body).start() for path, body in others()]
        assert all(stream.begun.wait(60) for stream in streams)
        victim = busiest(cluster)
        words = metric(victim.metrics(), "vllm:generation_tokens_total")
        until("they are in their midst", lambda: metric(victim.metrics(), "vllm:generation_tokens_total") > words + 200)
        held = victim.running()
        assert held >= 3
        victim.process.kill()
        check(cluster, streams, unbroken_others)
        assert resumed(cluster) >= held / 2, "the streams were over before the worker was"


def test_a_worker_that_is_stopped_in_the_middle_of_many_streams_is_given_up(unbroken):
    with Cluster("hybrid", "hybrid", "hybrid", sim=SIM) as cluster:
        streams = [Stream(cluster.url, path, body).start() for path, body in bodies()]
        assert all(stream.begun.wait(60) for stream in streams)
        victim = busiest(cluster)
        assert victim.running() >= 1
        os.kill(victim.process.pid, signal.SIGSTOP)
        try:
            check(cluster, streams, unbroken)
            assert resumed(cluster) >= 1
        finally:
            os.kill(victim.process.pid, signal.SIGCONT)


def test_workers_that_die_one_after_the_other_are_not_noticed_while_one_is_left(unbroken):
    with Cluster("hybrid", "hybrid", "hybrid", sim=SIM) as cluster:
        streams = [Stream(cluster.url, path, body).start() for path, body in bodies()]
        assert all(stream.begun.wait(60) for stream in streams)
        for _ in range(2):
            victim = busiest(cluster)
            victim.process.kill()
            cluster.workers.remove(victim)
            before = resumed(cluster)
            until("its streams go on", lambda: resumed(cluster) > before or all(not s.thread.is_alive() for s in streams))
        check(cluster, streams, unbroken)


def broken_stream(cluster: Cluster, path: str, **more) -> list:
    body = {"model": "tiny", "temperature": 0, "max_tokens": 4000, "ignore_eos": True, "stream": True} | more
    stream = Stream(cluster.url, path, body).start()
    assert stream.begun.wait(30)
    until("somebody serves", lambda: busiest(cluster).running() >= 1)
    until("words came", lambda: "vllm:generation_tokens_total 0" not in busiest(cluster).metrics())
    victim = busiest(cluster)
    victim.process.kill()
    payloads = stream.payloads()
    victim.start()
    victim.wait()
    until("it is back", lambda: cluster.serve.workers_up() == len(cluster.workers))
    return payloads


def test_what_cannot_go_on_says_why():
    ask = {"messages": [{"role": "user", "content": "Tell me everything."}]}
    with Cluster("hybrid", "hybrid", sim=SIM) as cluster:
        for more, why in [
            ({"tools": [TOOL]}, "tools"),
            ({"n": 2}, "several choices"),
            ({"logprobs": True}, "log probabilities"),
            ({"response_format": {"type": "json_object"}}, "a format"),
            ({"presence_penalty": 0.5}, "penalties"),
        ]:
            payloads = broken_stream(cluster, "/v1/chat/completions", **ask, **more, temperature=0.7)
            errors = [payload["error"]["message"] for payload in payloads if "error" in payload]
            assert len(errors) == 1 and why in errors[0] and "cannot go on elsewhere" in errors[0], errors
            assert "drawn without a seed" in errors[0]
            assert "[DONE]" not in payloads
        assert cluster.serve.metric("stream_interruptions_total", outcome="not_resumable") == 5


def test_no_more_is_tried_than_the_budget_allows():
    ask = {"messages": [{"role": "user", "content": "Tell me everything."}]}
    with Cluster("hybrid", "hybrid", sim=SIM, settings=("retries.burst=0",)) as cluster:
        payloads = broken_stream(cluster, "/v1/chat/completions", **ask)
        assert "error" in payloads[-1]
        assert cluster.serve.metric("retry_budget_exhausted_total") == 1
        assert metric(cluster.serve.metrics(), "ownerserve_stream_interruptions_total", outcome="failed") == 1
