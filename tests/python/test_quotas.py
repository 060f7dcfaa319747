"""A tenant's requests and tokens in a minute, counted by all routers together; by shares while Redis is gone."""

import json
import threading
import time

import pytest
from harness import wire
from harness.cluster import Serve, SimWorker
from harness.processes import until
from harness.redis import Redis

QUOTAS = ("tenants.default.requests_per_minute=60",)


@pytest.fixture(scope="module")
def worker():
    worker = SimWorker("hybrid", "--speed-up", "50").wait()
    yield worker
    worker.process.stop()


@pytest.fixture
def redis():
    redis = Redis()
    yield redis
    redis.stop()


def router_of(worker, *settings: str) -> Serve:
    return Serve([worker.url], settings=settings).wait()


@pytest.fixture
def pair(redis, worker):
    shared = (f'shared_cache.redis_url="{redis.url}"', "shared_cache.key_prefix=q", "shared_cache.encryption_secret=0123456789abcdef", 'shared_cache.timeout="200ms"', *QUOTAS)
    routers = [router_of(worker, *shared) for _ in range(2)]
    for router in routers:
        until("both are counted", lambda router=router: router.metric("shared_cache_routers") == 2)
        until("Redis is up", lambda router=router: router.metric("shared_cache_up") == 1)
    yield routers
    for router in routers:
        router.stop()


def hammer(routers, each: int, clients: int = 3) -> tuple[dict[int, int], float]:
    """Answers by status, and how long it took."""
    counts: dict[int, int] = {}
    lock = threading.Lock()

    def run(router) -> None:
        for _ in range(each // clients):
            status = wire.exchange(router.port, wire.chat()).status
            with lock:
                counts[status] = counts.get(status, 0) + 1

    began = time.monotonic()
    threads = [threading.Thread(target=run, args=(router,)) for router in routers for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts, time.monotonic() - began


def test_a_quota_of_requests_is_told_and_kept(worker):
    router = router_of(worker, "tenants.default.requests_per_minute=3")
    try:
        answers = [wire.exchange(router.port, wire.chat()) for _ in range(4)]
        assert [answer.status for answer in answers] == [200, 200, 200, 429]
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["2", "1", "0", "0"]
        assert all(answer.headers["x-ratelimit-limit-requests"] == "3" for answer in answers)
        assert "x-ratelimit-limit-tokens" not in answers[0].headers
        error = answers[3].json()["error"]
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded") and "3 requests per minute" in error["message"]
        assert 1 <= int(answers[3].headers["retry-after"]) <= 20
        assert float(answers[3].headers["x-ratelimit-reset-requests"].removesuffix("s")) > 0
        assert router.metric("quota_rejections_total", tenant="default", unit="requests") == 1
        assert wire.ask(router.port, "GET", "/livez").status == 200, "a probe is free"
        assert wire.ask(router.port, "GET", "/v1/models").status == 429, "a list of models is a request"
    finally:
        router.stop()


def test_a_quota_of_tokens_counts_what_engines_count(worker):
    router = router_of(worker, "tenants.default.tokens_per_minute=600")
    try:
        used, remaining = 0, 600
        for number in range(20):
            answer = wire.exchange(router.port, wire.chat("hello " * 40))
            if answer.status != 200:
                break
            used += answer.json()["usage"]["total_tokens"]
        error = answer.json()["error"]
        assert (answer.status, error["type"], error["code"]) == (429, "tokens", "rate_limit_exceeded")
        assert number > 1 and used <= 700, (number, used)
        remaining = int(answer.headers["x-ratelimit-remaining-tokens"])
        assert 600 - used <= remaining <= 600 - used + 60, "and some that came back"
    finally:
        router.stop()


def test_streams_and_responses_are_settled_too(worker):
    router = router_of(worker, "tenants.default.tokens_per_minute=100000")
    try:
        def remaining() -> int:
            answer = wire.exchange(router.port, b"{}")
            return int(answer.headers["x-ratelimit-remaining-tokens"])

        before = remaining()
        # Each costs a long answer, which nobody can see in the request.
        wire.exchange(router.port, wire.chat(stream=True, max_tokens=3000, ignore_eos=True))
        until("the stream is settled", lambda: remaining() < before - 1000)
        before = remaining()
        body = json.dumps({"model": "tiny", "input": "hello", "max_output_tokens": 6000, "ignore_eos": True}).encode()
        assert wire.exchange(router.port, body, "/v1/responses").status == 200
        until("the response is settled", lambda: remaining() < before - 1000)
    finally:
        router.stop()


def test_routers_count_together(pair):
    counts, took = hammer(pair, 90)
    assert set(counts) <= {200, 429}
    # What came back while it ran; and each router may hold one that it did not use.
    assert 60 - 2 <= counts[200] <= 60 + took + 1, (counts, took)


def test_without_redis_each_router_keeps_to_its_share(redis, pair):
    one, other = pair
    redis.kill()
    for router in pair:
        until("it is gone", lambda router=router: router.metric("shared_cache_state", state="unreachable") == 1)
    counts, took = hammer([one], 90)
    assert set(counts) <= {200, 429}
    assert 30 - 1 <= counts[200] <= 30 + took / 2 + 2, (counts, took)
    counts, took = hammer([other], 90)
    assert 30 - 1 <= counts[200] <= 30 + took / 2 + 2, (counts, took)
    receipts = json.loads(wire.ask(one.operator_port, "GET", "/ownerserve/v1/decisions?limit=1").body)["decisions"]
    assert receipts[0]["shared_cache_state"] == "unreachable"
    redis.start()
    for router in pair:
        until("it is back", lambda router=router: router.metric("shared_cache_up") == 1)
    assert wire.exchange(one.port, wire.chat()).status == 200, "the common count begins anew"


@pytest.mark.parametrize("how", ["pause", "kill"])
def test_the_first_request_of_an_outage_is_served_within_its_share(redis, worker, how):
    shared = (f'shared_cache.redis_url="{redis.url}"', "shared_cache.key_prefix=o", "shared_cache.encryption_secret=0123456789abcdef", "tenants.default.requests_per_minute=20")
    router = router_of(worker, *shared)
    try:
        until("Redis is up", lambda: router.metric("shared_cache_up") == 1)
        assert [wire.exchange(router.port, wire.chat()).status for _ in range(3)] == [200] * 3
        getattr(redis, how)()
        counts, _ = hammer([router], 24, clients=1)
        # 17 were left, and one more comes in three seconds.
        assert 17 <= counts[200] <= 20 and counts[429] == 24 - counts[200], counts
        if how == "pause":
            redis.go_on()
            until("Redis is up again", lambda: router.metric("shared_cache_up") == 1)
            counts, _ = hammer([router], 24, clients=1)
            assert 12 <= counts[200] <= 20, f"what all routers had left is leased again: {counts}"
    finally:
        router.stop()


def test_a_quota_that_is_spoilt_in_redis_is_replaced(redis, pair):
    for spoilt in (("SET", "ownerserve:1:q:quota:7:default:requests", "x"),
                   ("HSET", "ownerserve:1:q:quota:7:default:requests", "level", "nan", "at", "-5"),
                   ("HSET", "ownerserve:1:q:quota:7:default:requests", "level", "1e300", "at", "1e300")):
        redis.ask("DEL", spoilt[1])
        redis.ask(*spoilt)
        assert wire.exchange(pair[0].port, wire.chat()).status == 200, spoilt
    assert 0 < redis.ask("PTTL", "ownerserve:1:q:quota:7:default:requests") <= 120_000
    assert pair[0].metric("shared_cache_up") == 1
