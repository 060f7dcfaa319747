"""Clients of real engines, one answer each: what came and when, beside what an engine alone tells that nobody disturbs."""

import json
import os
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from harness.wire import events

# A difference is the engine's own rounding where it hardly preferred its token to the other one.
ROUNDING = 1e-4


class Stream(threading.Thread):
    """One client: what came, and when."""

    def __init__(self, url: str, asked: str | list[dict], tokens: int, session: str | None = None):
        super().__init__(daemon=True)
        self.url, self.session = url, session
        self.body = {"model": "tiny", "temperature": 0, "max_tokens": tokens, "ignore_eos": True, "stream": True,
                     "stream_options": {"include_usage": True}}
        if isinstance(asked, str):
            self.path, self.body["prompt"] = "/v1/completions", asked
        else:
            self.path, self.body["messages"] = "/v1/chat/completions", asked
        self.came: list[tuple[float, bytes]] = []
        self.request = ""
        self.failure: Exception | None = None

    def run(self) -> None:
        headers = {"content-type": "application/json", **({"x-session-id": self.session} if self.session else {})}
        request = urllib.request.Request(self.url + self.path, json.dumps(self.body).encode(), headers)
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
    same = Stream(engine.url, "", 1)
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


def differences(engine, streams: list[Stream]) -> list[str]:
    """Compares every answer with the engine's alone, and fails unless a difference is its own rounding: those are given."""
    with ThreadPoolExecutor(8) as pool:
        expected = list(pool.map(lambda stream: alone(engine, stream), streams))
    noise = []
    for number, (stream, wanted) in enumerate(zip(streams, expected)):
        told = stream.told()
        if told != wanted:
            assert told | {"text": ""} == wanted | {"text": ""}, f"answer {number}"
            assert is_rounding(engine, stream, told["text"], wanted["text"]), f"answer {number}: {told['text']!r} for {wanted['text']!r}"
            noise.append(f"answer {number}: {told['text']!r} for {wanted['text']!r}")
    return noise
