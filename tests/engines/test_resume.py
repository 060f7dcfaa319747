"""Real engines that are stopped, and at last killed, in the middle of streams: each client gets what one engine alone tells.

The last of these suites: it leaves one engine dead.
"""

import json
import os
import signal
import statistics
import threading
import urllib.request

from harness.cluster import Serve, get_json, metric
from harness.processes import until
from harness.talk import prose
from harness.wire import events

STREAMS = 14
TOKENS = 400


def asked(number: int) -> tuple[str, dict]:
    body = {"model": "tiny", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}}
    if number % 2:
        return "/v1/completions", body | {"prompt": prose(80, 900 + number)}
    return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": prose(80, 900 + number)}]}


def listen(url: str, number: int, heard: list) -> None:
    path, body = asked(number)
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=180) as answer:
        heard[number] = b"".join(answer)


def told(stream: bytes) -> dict:
    payloads = events(stream)
    assert payloads[-1] == "[DONE]" and payloads.count("[DONE]") == 1, payloads[-2:]
    payloads = payloads[:-1]
    assert not [payload for payload in payloads if "error" in payload], payloads[-1]
    choices = [choice for payload in payloads for choice in payload["choices"]]
    usage = [payload["usage"] for payload in payloads if payload.get("usage")]
    return {
        "text": "".join(choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices),
        "finish": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "roles": sum("role" in choice.get("delta", {}) for choice in choices),
        "usage": [(one["prompt_tokens"], one["completion_tokens"]) for one in usage],
        "heads": len({(payload["id"], payload["created"], payload["object"]) for payload in payloads}),
        "ids": any(choice.get("token_ids") for choice in choices),
    }


def all_at(url: str) -> tuple[list[threading.Thread], list]:
    heard = [None] * STREAMS
    threads = [threading.Thread(target=listen, args=(url, number, heard), daemon=True) for number in range(STREAMS)]
    for thread in threads:
        thread.start()
    return threads, heard


def break_one(engines, number: int) -> None:
    """Streams through `serve`, one engine of which gets this signal in their midst."""
    alone = [None] * STREAMS
    for one in range(STREAMS):
        listen(engines[0].url, one, alone)
    serve = Serve([engine.url for engine in engines]).wait()
    try:
        threads, heard = all_at(serve.url)
        until("both engines answer", lambda: all(engine.running() >= 3 for engine in engines), 60)
        victim = engines[1]
        before = metric(victim.metrics(), "vllm:generation_tokens_total")
        until("it is in their midst", lambda: metric(victim.metrics(), "vllm:generation_tokens_total") > before + 100, 60)
        os.kill(victim.process.pid, number)
        for thread in threads:
            thread.join(180)
        assert all(heard), "a client was left hanging"
        assert [told(stream) for stream in heard] == [told(stream) for stream in alone]
        receipts = get_json(f"{serve.operator}/ownerserve/v1/decisions?limit={STREAMS}")["decisions"]
        took = [attempt["resumed"]["took"] for receipt in receipts for attempt in receipt["attempts"] if "resumed" in attempt]
        assert len(took) >= 3
        print(f"{len(took)} of {STREAMS} streams went on: p50 {statistics.median(took) / 1000:.0f} ms, most {max(took) / 1000:.0f} ms")
    finally:
        serve.stop()


def test_an_engine_that_is_stopped_in_the_midst_of_streams_is_not_missed(engines):
    try:
        break_one(engines, signal.SIGSTOP)
    finally:
        os.kill(engines[1].process.pid, signal.SIGCONT)
    until("nobody is served", lambda: all(engine.running() == 0 for engine in engines), 60)


def test_an_engine_that_is_killed_in_the_midst_of_streams_is_not_missed(engines):
    break_one(engines, signal.SIGKILL)
