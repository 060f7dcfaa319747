"""Real engines that are stopped, restarted and killed in the midst of a hundred streams: while they compute prompts, hand them
over, and answer. Each client gets what one engine alone tells.

The last of these suites: it leaves one engine dead.
"""

import json
import os
import signal
import statistics
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import pytest
from harness.cluster import Serve, get_json, metric
from harness.processes import until
from harness.talk import TEXT, busy, prose
from harness.wire import events

# In all nine of the cells together, a hundred and some.
STREAMS = {"prefill": 12, "transfer": 10, "decode": 14}
FAULTS = ["stopped", "restarted", "killed"]
# Words of a prompt and tokens of an answer: what takes the time is what is to be broken.
SHAPES = {"prefill": (1800, 24), "transfer": (1800, 24), "decode": (80, 400)}
# A difference is the engine's own rounding where it hardly preferred its token to the other one.
ROUNDING = 1e-4
# Answers that the engine gives to others which takes over what the other one computed.
BUSY = 6


class Stream(threading.Thread):
    """One client: what came, and when."""

    def __init__(self, url: str, phase: str, number: int):
        super().__init__(daemon=True)
        words, tokens = SHAPES[phase]
        self.url, self.text = url, prose(words, number)
        self.body = {"model": "tiny", "temperature": 0, "max_tokens": tokens, "ignore_eos": True, "stream": True,
                     "stream_options": {"include_usage": True}}
        if number % 2:
            self.path, self.body["prompt"] = "/v1/completions", self.text
        else:
            self.path, self.body["messages"] = "/v1/chat/completions", [{"role": "user", "content": self.text}]
        self.came: list[tuple[float, bytes]] = []
        self.request = ""
        self.failure: Exception | None = None

    def run(self) -> None:
        request = urllib.request.Request(self.url + self.path, json.dumps(self.body).encode(), {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                self.request = answer.headers["x-request-id"] or ""
                for line in answer:
                    self.came.append((time.monotonic(), line))
        except OSError as failure:
            self.failure = failure

    def told(self) -> dict:
        payloads = events(b"".join(line for _, line in self.came))
        assert self.failure is None, self.failure
        assert payloads and payloads[-1] == "[DONE]" and payloads.count("[DONE]") == 1, payloads[-2:]
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

    def paused(self, since: float) -> float:
        """The longest time without a word after `since`."""
        after = [since, *(at for at, line in self.came if at > since and line.startswith(b"data:"))]
        return max(later - earlier for earlier, later in zip(after, after[1:]))


def alone(engine, stream: Stream) -> dict:
    """What one engine tells that finds nothing in its cache, and that nobody disturbs."""
    same = Stream(engine.url, "decode", 0)
    same.path, same.body = stream.path, stream.body | {"cache_salt": "alone"}
    same.run()
    return same.told()


def is_rounding(engine, stream: Stream, told: str, expected: str) -> bool:
    """Whether the engine hardly preferred the token at which the two part."""
    is_chat = "messages" in stream.body
    asked = {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
    plain = {name: value for name, value in stream.body.items() if name not in ("stream", "stream_options")}
    choice = engine.post(stream.path, plain | asked | {"cache_salt": "alone"})["choices"][0]["logprobs"]
    if is_chat:
        tokens = [(one["token"], [top["logprob"] for top in one["top_logprobs"]]) for one in choice["content"]]
    else:
        tokens = list(zip(choice["tokens"], [list(top.values()) for top in choice["top_logprobs"]]))
    at = len(os.path.commonprefix([told, expected]))
    for token, best in tokens:
        at -= len(token)
        if at < 0:
            return len(best) > 1 and abs(best[0] - best[1]) < ROUNDING
    return False


@contextmanager
def serving(engines, phase: str):
    roles = ("prefill", "decode") if phase == "transfer" else ("hybrid", "hybrid")
    # Who would be slowed down counts much where a prompt is to be computed away from who answers.
    settings = (TEXT, "planner.mu=50") if phase == "transfer" else (TEXT,)
    serve = Serve([f"{engine.url}#{role}" for engine, role in zip(engines, roles)], settings=settings).wait()
    try:
        yield serve
    finally:
        serve.stop()


def workers(serve) -> list[dict]:
    return get_json(f"{serve.operator}/ownerserve/v1/workers")["workers"]


def hit_when(phase: str, engines, victim) -> None:
    """Waits for the victim to be in the midst of what is to be broken."""
    if phase == "prefill":
        until("it computes prompts", lambda: victim.running() >= 2, 60, 0.01)
    elif phase == "transfer":
        other = next(engine for engine in engines if engine is not victim)
        before = other.prompt_tokens_from("external_kv_transfer")
        until("it hands over", lambda: other.prompt_tokens_from("external_kv_transfer") > before and victim.running() >= 1, 60, 0.01)
    else:
        until("it answers some", lambda: victim.running() >= 3, 60)
        before = metric(victim.metrics(), "vllm:generation_tokens_total")
        until("it is in their midst", lambda: metric(victim.metrics(), "vllm:generation_tokens_total") > before + 100, 60)


def hit(fault: str, victim) -> float:
    since = time.monotonic()
    victim.signal(signal.SIGSTOP if fault == "stopped" else signal.SIGKILL)
    if fault == "restarted":
        victim.process.child.wait()
        victim.start()
    return since


def mend(fault: str, engines, victim, serve) -> None:
    """The victim is there again, and the router takes it back as what it is: the same process, or another one."""
    if fault == "stopped":
        victim.signal(signal.SIGCONT)
    elif fault == "killed":
        victim.process.child.wait()
        victim.start()
    victim.wait()
    until("it is taken back", lambda: all(line["health"] == "ready" for line in workers(serve)), 60)
    until("nobody is served", lambda: all(engine.running() == 0 for engine in engines), 60)


def look(phase: str, fault: str, streams: list[Stream], engine) -> list[str]:
    """Compares every answer; gives the differences that are the engine's own rounding."""
    noise = []
    with ThreadPoolExecutor(6) as pool:
        expected = list(pool.map(lambda stream: alone(engine, stream), streams))
    for number, (stream, wanted) in enumerate(zip(streams, expected)):
        told = stream.told()
        if told != wanted:
            where = f"{phase} {fault} stream {number}"
            assert told | {"text": ""} == wanted | {"text": ""}, where
            assert is_rounding(engine, stream, told["text"], wanted["text"]), f"{where}: {told['text']!r} for {wanted['text']!r}"
            noise.append(where)
    return noise


def was_broken(phase: str, receipt: dict, victim: str) -> bool:
    """Whether the victim was of this step when it was broken in its phase."""
    for attempt in receipt["attempts"]:
        at_victim = victim in (attempt["prefill"], attempt["decode"])
        if phase == "transfer" and attempt["prefill"] == victim != attempt["decode"] and attempt["remarks"]:
            return True
        if phase == "prefill" and at_victim and {"decode_failed", "decode_silent", "decode_unreachable"} & set(attempt["remarks"]):
            return True
        if phase == "decode" and at_victim and {"broke_off", "fell_silent"} & set(attempt["remarks"]):
            return True
    return False


@pytest.mark.parametrize("phase", STREAMS)
def test_an_engine_is_lost_in_the_midst_of_streams_and_not_missed(engines, phase):
    victim = engines[0] if phase == "transfer" else engines[1]
    other = next(engine for engine in engines if engine is not victim)
    took, noise = [], []
    with serving(engines, phase) as serve:
        for cell, fault in enumerate(FAULTS):
            until("every block is known", lambda: {line["knowledge"] for line in workers(serve)} == {"exact"}, 60)
            id = next(line["id"] for line in workers(serve) if line["endpoint"] == victim.url)
            first = 1000 * (1 + list(STREAMS).index(phase)) + 100 * cell
            streams = [Stream(serve.url, phase, first + number) for number in range(STREAMS[phase])]
            with busy(other, clients=BUSY, words=10) if phase == "transfer" else nullcontext():
                if phase == "transfer":
                    until("the load is known", lambda: sum(line["load"]["running"] for line in workers(serve)) >= BUSY, 60)
                for stream in streams:
                    stream.start()
                hit_when(phase, engines, victim)
                since = hit(fault, victim)
                for stream in streams:
                    stream.join(150)
                assert not any(stream.is_alive() for stream in streams), "a client hangs"
            receipts = {line["request"]: line for line in get_json(f"{serve.operator}/ownerserve/v1/decisions?limit={len(streams)}")["decisions"]}
            broken = [stream for stream in streams if was_broken(phase, receipts[stream.request], id)]
            assert broken, [receipts[stream.request]["attempts"] for stream in streams]
            paused = [stream.paused(since) for stream in broken]
            took += paused
            mend(fault, engines, victim, serve)
            noise += look(phase, fault, streams, other)
            print(f"{phase} {fault}: {len(broken)} of {len(streams)} streams were broken, the longest pause {max(paused):.2f} s")
    percentile = statistics.quantiles(took, n=100, method="inclusive") if len(took) > 1 else took * 99
    print(f"{phase}: {len(took)} streams went on: p50 {percentile[49]:.2f} s, p99 {percentile[98]:.2f} s; rounding: {noise or 'none'}")
