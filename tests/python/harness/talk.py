"""Conversations: the same ones at the cluster and at a lone worker, step by step."""

import json
import re
import threading
import urllib.parse
import urllib.request
from contextlib import contextmanager

from .cluster import MODEL, SimWorker, get_json
from .processes import ROOT, until

# Serve names prompts by their tokens, exactly as the workers do.
TEXT = f'models.{MODEL}.tokenizer_dir="{ROOT}/configs/models/tiny"'

WORDS = ("flight reservation passenger window luggage refund airport morning confirm change upgrade payment card number "
         "please policy insurance cancel itinerary return economy business arrival departure").split()


def prose(words: int, seed: int) -> str:
    """Text that no cache has seen under another seed."""
    state, out = seed * 2654435761 % 2**32 or 1, []
    for _ in range(words):
        state = (state * 1664525 + 1013904223) % 2**32
        out.append(WORDS[(state >> 16) % len(WORDS)])
    return " ".join(out)


def post(url: str, path: str, body: dict, session: str | None = None, timeout: float = 120.0) -> dict:
    headers = {"content-type": "application/json", **({"x-session-id": session} if session else {})}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.load(answer)


class Talk:
    """One session of chat. What was asked and answered is kept, to be asked again elsewhere."""

    def __init__(self, url: str, session: str, opening: str):
        self.url, self.session = url, session
        self.messages = [{"role": "system", "content": opening}]
        self.asked: list[tuple[str, dict, str]] = []

    def say(self, text: str, tokens: int = 24) -> str:
        self.messages.append({"role": "user", "content": text})
        body = {"model": MODEL, "messages": list(self.messages), "max_tokens": tokens, "temperature": 0}
        answer = post(self.url, "/v1/chat/completions", body, self.session)["choices"][0]["message"]["content"]
        self.asked.append(("/v1/chat/completions", body, answer))
        self.messages.append({"role": "assistant", "content": answer})
        return answer

    def complete(self, prompt: str, tokens: int = 24) -> str:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = post(self.url, "/v1/completions", body, self.session)["choices"][0]["text"]
        self.asked.append(("/v1/completions", body, answer))
        return answer


def asked_alone(talks: list[Talk], *flags: str) -> list[tuple[str, str]]:
    """The same requests at one hybrid worker that serves nobody else: pairs of what was answered and what it answers."""
    worker = SimWorker("hybrid", *flags).wait()
    try:
        pairs = []
        for talk in talks:
            for path, body, answer in talk.asked:
                choice = post(worker.url, path, body)["choices"][0]
                pairs.append((answer, choice["text"] if "text" in choice else choice["message"]["content"]))
        return pairs
    finally:
        worker.process.stop()


def session_line(serve, key: str) -> dict | None:
    """The ledger's line of the session that its client calls `key`."""
    query = urllib.parse.urlencode({"session_key": key, "model": MODEL})
    found = get_json(f"{serve.operator}/ownerserve/v1/sessions?{query}")["sessions"]
    return found[0] if found else None


def sealed_session(serve, key: str, heads: int = 1) -> dict:
    """The same, once the commit of its last step has arrived and it has an owner."""

    def settled():
        line = session_line(serve, key)
        return line if line and line["owner"] and line["in_flight_steps"] == 0 and len(line["heads"]) >= heads else None

    return until(f"session {key} is in the ledger", settled, 15)


def owner_of(cluster, key: str) -> SimWorker:
    endpoint = sealed_session(cluster.serve, key)["owner"]["endpoint"]
    return next(worker for worker in cluster.workers if worker.url == endpoint)


def decisions(serve, limit: int = 20) -> list[dict]:
    return get_json(f"{serve.operator}/ownerserve/v1/decisions?limit={limit}")["decisions"]


def seconds(span: str) -> float:
    """A duration of a receipt, as `"1.5ms"`."""
    number, unit = re.fullmatch(r"([0-9.]+)(ns|us|ms|s|m|h)", span).groups()
    return float(number) * {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}[unit]


def legs(plan: dict) -> list[dict]:
    """The legs of a plan or a candidate, in order: the first computes the prompt, the last answers."""
    return [part["leg"] for part in plan["sequence"] if "leg" in part]


def handoffs(plan: dict) -> list[dict]:
    """The KV transfers of a plan or a candidate, in order."""
    return [part["handoff"] for part in plan["sequence"] if "handoff" in part]


def served_at(attempt: dict) -> str:
    """The worker that was to answer in this attempt of a receipt."""
    return attempt["legs"][-1]["worker"]


@contextmanager
def busy(worker, clients: int = 48, words: int = 1500):
    """The worker, anything with `url` and `running()`, answers others, who came to it directly and leave at the end."""
    connections = []

    def swamp(number: int) -> None:
        body = {"model": MODEL, "prompt": prose(words, 90_000 + number), "max_tokens": 4000, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(
            f"{worker.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
        try:
            connections.append(urllib.request.urlopen(request, timeout=60))
        except OSError:
            pass

    threads = [threading.Thread(target=swamp, args=(number,), daemon=True) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        until("the worker is swamped", lambda: worker.running() >= min(clients, 8), 60)
        yield
    finally:
        for thread in threads:
            thread.join(30)
        for connection in connections:
            connection.close()
