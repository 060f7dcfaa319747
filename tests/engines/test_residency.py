"""What the residency index says that real vLLM holds, beside what vLLM then finds: random sessions in a cache that is too small.

RESIDENCY_REQUESTS=10000 RESIDENCY_SEED=7 for other than 500 requests of seed 1.
"""

import json
import os
import random
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine import BLOCK, Engine
from harness.cluster import Serve, get_json
from harness.processes import free_ports, until
from harness.talk import TEXT

REQUESTS = int(os.environ.get("RESIDENCY_REQUESTS", "500"))
SEED = int(os.environ.get("RESIDENCY_SEED", "1"))
CONTEXT = 1536
CACHE_BLOCKS = 96
BYTES_PER_TOKEN = 2 * 2 * 2 * 64 * 4  # layers, keys and values, heads, dimension, float32
SESSIONS = 24
AT_ONCE = 4
AGREES = 0.999


class Traffic:
    """Prompts of sessions that share openings, grow, fork, end, and are asked again. Lengths hit the blocks' edges often."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.openings = [self.tokens(length) for length in (BLOCK, 3 * BLOCK - 1, 5 * BLOCK + 7, 300)]
        self.sessions: list[list[int]] = []

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(100, 4000) for _ in range(count)]

    def tail(self, longest: int) -> list[int]:
        count = self.rng.randint(1, longest)
        return self.tokens(count if self.rng.random() < 0.7 else -(-count // BLOCK) * BLOCK)

    def place(self, session: list[int]) -> int:
        """Where the session is kept: instead of another one when there are enough."""
        if len(self.sessions) < SESSIONS:
            self.sessions.append(session)
            return len(self.sessions) - 1
        at = self.rng.randrange(SESSIONS)
        self.sessions[at] = session
        return at

    def next(self) -> tuple[int, list[int]]:
        """A session's number and its prompt."""
        kind = self.rng.random()
        if kind < 0.2 or not self.sessions:
            shared = self.rng.choice([[], *self.openings])
            at = self.place(shared + self.tail(200))
        elif kind < 0.35:
            old = self.rng.choice(self.sessions)
            at = self.place(old[:self.rng.randint(1, len(old))] + self.tail(100))
        else:
            at = self.rng.randrange(len(self.sessions))
            if kind < 0.8:
                self.sessions[at] = self.sessions[at] + self.tail(120)
            elif kind < 0.9:
                self.sessions[at] = self.sessions[at][:max(BLOCK, len(self.sessions[at]) // BLOCK * BLOCK)]
        if len(self.sessions[at]) > CONTEXT - 32:
            self.sessions[at] = self.rng.choice(self.openings) + self.tail(60)
        return at, self.sessions[at]

    def answered(self, at: int, prompt: list[int], answer: list[int]) -> None:
        """The session goes on with the engine's answer, unless it has become another one meanwhile."""
        if self.sessions[at] == prompt:
            self.sessions[at] = prompt + answer


@pytest.fixture(scope="module")
def engine():
    engine = Engine("small", free_ports(4), context=CONTEXT, cache_bytes=CACHE_BLOCKS * BLOCK * BYTES_PER_TOKEN)
    try:
        engine.wait()
        yield engine
    finally:
        engine.stop()


def ask(serve, prompt: list[int], answer: int) -> tuple[str, list[int]]:
    """The request's id and the answer's tokens."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": answer, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True}
    request = urllib.request.Request(
        f"{serve.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as whole:
        return whole.headers["x-request-id"], json.load(whole)["choices"][0]["token_ids"]


def worker(serve) -> dict:
    return get_json(f"{serve.operator}/ownerserve/v1/workers")["workers"][0]


def settled(serve) -> dict:
    """The worker, once all requests are answered and ten looks in a row found that no event had come."""
    last, same = worker(serve), 0
    while same < 10:
        time.sleep(0.01)
        now = worker(serve)
        same = same + 1 if now["kv_event_counts"]["batches"] == last["kv_event_counts"]["batches"] else 0
        last = now
    return last


def usable(overlap: int, prompt: int) -> int:
    """What vLLM takes of `overlap` tokens that it holds: whole blocks, and never the last token, whose logits it needs."""
    return min(overlap, prompt - 1) // BLOCK * BLOCK


class Tally:
    """Samples by what was found, and every difference."""

    def __init__(self):
        self.kinds: Counter[str] = Counter()
        self.differences: list[str] = []
        self.computed = 0

    def take(self, receipt: dict, before: dict, after: dict) -> None:
        known, seen = receipt["lookup"], receipt["observed"]
        overlap, prompt, cached = known["max_overlap_tokens"], known["prompt_tokens"], seen["cached_tokens"]
        self.computed += prompt - cached
        kind = "nothing" if cached == 0 else "all but the last block" if overlap == prompt else "a part"
        self.kinds[kind] += 1
        if cached == seen["predicted_cached_tokens"] == usable(overlap, prompt):
            return
        why = ("told late: it was stored before the events said so" if cached > usable(overlap, prompt) else
               "told late: it was evicted before the events said so" if cached < usable(overlap, prompt) else
               "the plan counted other than the index")
        self.differences.append(
            f"{why}: prompt {prompt}, index {overlap}, planned {seen['predicted_cached_tokens']}, vLLM {cached}; "
            f"events before {before['kv_event_counts']}, after {after['kv_event_counts']}")


def test_what_the_index_predicts_is_what_vllm_finds_under_evictions(engine):
    predicted_as_found(engine, REQUESTS, CACHE_BLOCKS)


def predicted_as_found(engine, requests: int, cache_blocks: int) -> None:
    """Asserts that the index predicts what vLLM finds of so many requests, more than a cache of so many blocks can keep."""
    serve = Serve([f"{engine.url}#hybrid"], settings=(TEXT,)).wait()
    traffic, tally, asked = Traffic(SEED), Tally(), 0
    try:
        until("every block is known", lambda: worker(serve)["kv_index_state"] == "exact")
        with ThreadPoolExecutor(AT_ONCE) as pool:
            while asked < requests:
                together = [(*traffic.next(), traffic.rng.randint(1, 48)) for _ in range(5)]
                answers = list(pool.map(lambda one: ask(serve, one[1], one[2]), together))
                for (at, prompt, _), (_, answer) in zip(together, answers):
                    traffic.answered(at, prompt, answer)
                for _ in range(5):
                    before = settled(serve)
                    at, prompt = traffic.next()
                    request, answer = ask(serve, prompt, traffic.rng.randint(1, 8))
                    tally.take(until("its receipt", lambda: receipt_of(serve, request)), before, worker(serve))
                    traffic.answered(at, prompt, answer)
                asked += 10
        at_end = settled(serve)
    finally:
        serve.stop()
    report(asked, cache_blocks, tally, at_end)
    samples = sum(tally.kinds.values())
    assert len(tally.differences) <= samples * (1 - AGREES), tally.differences
    assert len(tally.kinds) == 3 and min(tally.kinds.values()) >= samples // 50, tally.kinds
    assert tally.computed // BLOCK > cache_blocks, "nothing had to be evicted"
    assert at_end["kv_index_state"] == "exact" and at_end["kv_event_counts"]["engine_blocks"] <= cache_blocks, at_end
    assert at_end["kv_event_counts"]["unknown_blocks"] == at_end["kv_event_counts"]["undecodable"] == 0, at_end


def receipt_of(serve, request: str) -> dict | None:
    """What was decided and seen; it is there soon after the answer."""
    receipt = get_json(f"{serve.operator}/ownerserve/v1/decisions/{request}")
    return receipt if receipt["observed"] else None


def report(asked: int, cache_blocks: int, tally: Tally, at_end: dict) -> None:
    samples = sum(tally.kinds.values())
    print(f"\n{asked} requests, seed {SEED}, cache of {cache_blocks} blocks; {samples} sampled when the engine was idle, "
          f"found {dict(tally.kinds)}; at least {tally.computed // BLOCK} blocks computed")
    print(f"{len(tally.differences)} differences, {100 * (1 - len(tally.differences) / samples):.3f} % agree; "
          f"events {at_end['kv_event_counts']}")
    for difference in tally.differences:
        print(" ", difference)
