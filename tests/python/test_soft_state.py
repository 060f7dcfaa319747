"""Two routers with one Redis: what one of them learned the other one knows. Redis slow, gone or flushed costs speed only."""

import json
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest
from harness.cluster import MODEL, Serve, SimWorker, get_json
from harness.processes import until
from harness.recorder import Behaviour, Recorder
from harness.redis import Redis
from harness.talk import TEXT, post, prose, sealed_session

# As many failures in a row as the breaker takes, and how many clients ask at once.
FAILURES, CLIENTS = 3, 6
# Responses that a simulated worker remembers.
KEPT = 256
# Generous: the suite shares its machine with others.
BUDGET = "shared_cache.timeout=\"200ms\""


@pytest.fixture(scope="module")
def redis():
    redis = Redis()
    yield redis
    redis.stop()


@pytest.fixture(scope="module")
def workers():
    workers = [SimWorker("hybrid", "--speed-up", "20").wait() for _ in range(2)]
    yield workers
    for worker in workers:
        worker.process.stop()


def routers_of(redis, workers, *settings: str, count: int = 2) -> list[Serve]:
    shared = (f'shared_cache.redis_url="{redis.url}"', "shared_cache.key_prefix=test", "shared_cache.encryption_secret=0123456789abcdef", BUDGET, *settings)
    routers = [Serve([worker.url for worker in workers], settings=shared) for _ in range(count)]
    for router in routers:
        router.wait()
        until("Redis is up", lambda router=router: router.metric("shared_cache_up") == 1)
    return routers


@pytest.fixture
def routers(redis, workers):
    routers = routers_of(redis, workers)
    yield routers
    for router in routers:
        router.stop()


def respond(router, text, previous: str | None = None, key: str = "any", **fields) -> tuple[dict, dict]:
    """The answer of `/v1/responses`, and its headers."""
    follows = {"previous_response_id": previous} if previous else {}
    body = {"model": MODEL, "input": text, "max_output_tokens": 12, "temperature": 0, **follows, **fields}
    request = urllib.request.Request(
        router.url + "/v1/responses", json.dumps(body).encode(), {"content-type": "application/json", "authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        raw = answer.read()
        return (json.loads(raw) if answer.headers["content-type"].startswith("application/json") else {"raw": raw}), dict(answer.headers)


def said(answer: dict) -> str:
    return answer["output"][0]["content"][0]["text"]


def saved(router, kind: str) -> float:
    return router.metric("shared_cache_writes_total", kind=kind, outcome="stored")


def lookups(router, outcome: str, kind: str | None = None) -> float:
    return router.metric("shared_cache_lookups_total", outcome=outcome, **({"kind": kind} if kind else {}))


def in_redis(redis, *ids: str) -> bool:
    keys = redis.keys()
    return all(any(key.endswith(identifier) and f":{kind}:" in key for key in keys) for identifier in ids for kind in ("response_worker", "transcript"))


def test_a_response_made_through_one_router_is_found_through_the_other(redis, routers):
    one, other = routers
    answers = [respond(one, prose(40, number))[0] for number in range(4)]
    until("all is shared", lambda: in_redis(redis, *(answer["id"] for answer in answers)))
    for answer in answers:
        assert get_json(f"{other.url}/v1/responses/{answer['id']}")["output"] == answer["output"]
        follow, headers = respond(other, "and on", answer["id"])
        assert follow["previous_response_id"] == answer["id"]
        assert "x-ownerserve-history-source" not in headers, "its maker is there"
    assert lookups(other, "shared_hit", "response_worker") == len(answers)
    assert lookups(other, "local_hit", "response_worker") == len(answers), "asked for once only"


def test_a_router_that_was_restarted_still_finds_what_it_made(redis, routers):
    one, _ = routers
    answer, _ = respond(one, prose(40, 50))
    until("it is shared", lambda: in_redis(redis, answer["id"]))
    one.process.kill()
    one.start()
    one.wait()
    until("Redis is up", lambda: one.metric("shared_cache_up") == 1)
    assert get_json(f"{one.url}/v1/responses/{answer['id']}")["id"] == answer["id"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_where_its_maker_is_gone(redis, stream):
    lone = SimWorker("hybrid", "--speed-up", "20").wait()
    spare = SimWorker("hybrid", "--speed-up", "20").wait()
    one, other = routers_of(redis, [lone, spare])
    try:
        first, _ = respond(one, prose(60, 7))
        until("it is shared", lambda: in_redis(redis, first["id"]))
        second, _ = respond(one, "what then?", first["id"], stream=stream)
        identifier = second.get("id") or second["raw"].split(b'"id":"resp_')[1].split(b'"')[0].decode()
        identifier = identifier if identifier.startswith("resp_") else f"resp_{identifier}"
        until("the second is shared", lambda: in_redis(redis, identifier))
        maker = next(worker for worker in (lone, spare) if made(worker, first["id"]))
        maker.process.kill()
        third, headers = respond(other, "and at last?", identifier)
        assert headers.get("x-ownerserve-history-source") == "transcript"
        assert other.metric("response_history_resolutions_total", outcome="resolved") == 1
        # The engine that took over saw the whole conversation: asked in one piece it says the same.
        text = said(second) if not stream else stream_text(second["raw"])
        whole = [{"role": "user", "content": prose(60, 7)}, {"role": "assistant", "content": said(first)},
                 {"role": "user", "content": "what then?"}, {"role": "assistant", "content": text},
                 {"role": "user", "content": "and at last?"}]
        again, _ = respond(other, whole)
        assert (said(again), again["usage"]["input_tokens"]) == (said(third), third["usage"]["input_tokens"])
        # And it can be gone on with from there.
        until("the third is shared", lambda: in_redis(redis, third["id"]))
        fourth, headers = respond(one, "go on", third["id"])
        assert "x-ownerserve-history-source" not in headers and fourth["usage"]["input_tokens"] > third["usage"]["input_tokens"]
    finally:
        for process in (one, other):
            process.stop()
        for worker in (lone, spare):
            worker.process.stop()


def made(worker, identifier: str) -> bool:
    try:
        return get_json(f"{worker.url}/v1/responses/{identifier}")["id"] == identifier
    except urllib.error.HTTPError:
        return False


def stream_text(raw: bytes) -> str:
    lines = [line[6:] for line in raw.splitlines() if line.startswith(b"data: {")]
    return json.loads(lines[-1])["response"]["output"][0]["content"][0]["text"]


class Load:
    """Clients who make responses at one router and go on with them at the other, and all answers they get."""

    def __init__(self, routers, most: int | None = None):
        # After `most` responses each they ask for the last one only: engines, simulated ones too, forget the oldest.
        self.routers, self.most, self.stop = routers, most, threading.Event()
        self.served, self.failed = 0, []
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self.run, args=(number,), daemon=True) for number in range(CLIENTS)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        for thread in self.threads:
            thread.join(60)

    def run(self, number: int) -> None:
        one, other = self.routers
        turn = 0
        while not self.stop.is_set():
            turn += 1
            try:
                if self.most is None or 2 * turn <= self.most:
                    first, _ = respond(one, prose(20, 1000 * number + turn))
                    respond(other, "on", first["id"])
                else:
                    get_json(f"{one.url}/v1/responses/{first['id']}")
                    get_json(f"{other.url}/v1/responses/{first['id']}")
                post(other.url, "/v1/chat/completions", {"model": MODEL, "max_tokens": 4, "messages": [
                    {"role": "user", "content": prose(20, number)}]})
                with self.lock:
                    self.served += 3
            except (OSError, ValueError, KeyError) as error:
                body = error.read() if isinstance(error, urllib.error.HTTPError) else b""
                with self.lock:
                    self.failed.append((repr(error), body))

    def more(self, count: int) -> None:
        """Until so many more were served."""
        wanted = self.served + count
        until("load goes on", lambda: self.served >= wanted, 60)


def readyz(router) -> str:
    with urllib.request.urlopen(f"{router.operator}/readyz", timeout=10) as answer:
        return answer.read().decode()


FAULTS = {
    "slow": (lambda redis: redis.pause(), lambda redis: redis.go_on()),
    "unreachable": (lambda redis: redis.kill(), lambda redis: redis.start()),
}


@pytest.mark.parametrize("standing", list(FAULTS))
def test_redis_in_trouble_costs_no_request_and_is_said(standing, redis, routers):
    breaks, mends = FAULTS[standing]
    with Load(routers) as load:
        load.more(3 * CLIENTS)
        breaks(redis)
        try:
            for router in routers:
                until(f"it is {standing}", lambda router=router: router.metric("shared_cache_state", state=standing) == 1)
                assert f"Redis is {standing}" in readyz(router)
            waited = [lookups(router, "timeout") for router in routers]
            load.more(6 * CLIENTS)
        finally:
            mends(redis)
        # Nobody waits any more once the breaker is open, and before that at most those who were under way.
        assert [lookups(router, "timeout") for router in routers] == waited
        assert all(count <= CLIENTS + FAILURES for count in waited), waited
        assert sum(lookups(router, "skipped") for router in routers) > 0
        for router in routers:
            until("it is back", lambda router=router: router.metric("shared_cache_up") == 1)
            assert json.loads(readyz(router))["degraded"] == []
        load.more(3 * CLIENTS)
    assert load.failed == []


def test_a_flush_costs_no_request_and_what_was_known_is_told_again(redis, routers):
    one, other = routers
    kept, _ = respond(one, prose(30, 99))
    until("it is shared", lambda: in_redis(redis, kept["id"]))
    with Load(routers, most=KEPT // CLIENTS - 2) as load:
        load.more(2 * CLIENTS)
        redis.ask("FLUSHALL")
        for router in routers:
            until("the flush is noticed", lambda router=router: router.metric("shared_cache_flushes_total") == 1)
        until("it is told again", lambda: in_redis(redis, kept["id"]))
        load.more(2 * CLIENTS)
    assert load.failed == []
    assert lookups(other, "local_hit", "response_worker") + lookups(other, "shared_hit", "response_worker") > 0
    assert get_json(f"{other.url}/v1/responses/{kept['id']}")["id"] == kept["id"]


def test_a_flush_is_noticed_also_where_the_answer_that_tells_it_is_lost(redis, routers):
    kept, _ = respond(routers[0], prose(30, 98))
    until("it is shared", lambda: in_redis(redis, kept["id"]))
    with socket.create_connection(("127.0.0.1", redis.port), timeout=5) as connection:
        connection.sendall(b"PING\r\n")
        assert connection.recv(16) == b"+PONG\r\n", "it is accepted already"
        redis.pause()
        try:
            connection.sendall(b"FLUSHALL\r\n")
            # A probe of each router, one a second, stands behind it and is given up.
            time.sleep(1.3)
        finally:
            redis.go_on()
    for router in routers:
        until("the flush is noticed", lambda router=router: router.metric("shared_cache_flushes_total") == 1)
    until("it is told again", lambda: in_redis(redis, kept["id"]))
    assert all(router.metric("shared_cache_up") == 1 for router in routers)


def test_what_is_torn_foreign_or_huge_in_redis_is_a_miss(redis, routers):
    one, other = routers
    spoilt = {}
    for number, value in enumerate((b"", b"\x01", b"x" * 100, b"\x00" * (8 << 20))):
        answer, _ = respond(one, prose(20, 200 + number))
        until("it is shared", lambda answer=answer: in_redis(redis, answer["id"]))
        (key,) = redis.keys(f"*response_worker*{answer['id']}")
        whole = redis.ask("STRLEN", key)
        redis.ask("SET", key, value)
        spoilt[answer["id"]] = key
    foreign = list(spoilt)[0]
    redis.ask("DEL", spoilt[foreign])
    redis.ask("LPUSH", spoilt[foreign], "of another type")
    for identifier in spoilt:
        follow, headers = respond(other, "on", identifier)
        assert follow["previous_response_id"] == identifier and "x-ownerserve-history-source" not in headers
    assert other.metric("shared_cache_up") == 1
    assert lookups(other, "corrupt", "response_worker") >= 3 and lookups(other, "error") == 0
    until("what was wrong is right again", lambda: all(redis.ask("TYPE", key) == b"string" and redis.ask("STRLEN", key) == whole for key in spoilt.values()))


def test_a_transcript_that_is_torn_or_missing_is_not_made_up(redis, routers, workers):
    one, other = routers
    answers = [respond(one, prose(20, 500 + number))[0] for number in range(2)]
    until("it is shared", lambda: in_redis(redis, *(answer["id"] for answer in answers)))
    torn, missing = ((key, answer["id"]) for answer in answers for key in redis.keys(f"*transcript*{answer['id']}"))
    redis.ask("SETRANGE", torn[0], "30", "torn")
    redis.ask("DEL", missing[0])
    for worker in workers:
        worker.process.kill()
        worker.start()
        worker.wait()
    until("all workers are up", lambda: other.workers_up() == len(workers))
    for _, identifier in (torn, missing):
        with pytest.raises(urllib.error.HTTPError) as refused:
            respond(other, "on", identifier)
        assert refused.value.code == 404, "the worker that was restarted says it, and nobody else knows better"
    assert other.metric("response_history_resolutions_total", outcome="incomplete") == 2


def test_what_was_deleted_through_one_router_is_gone_at_the_other(redis):
    recorder = Recorder()
    one, other = routers_of(redis, [recorder])
    try:
        answers = {}
        for name in ("resp_gone", "resp_kept"):
            recorder.behaviour = Behaviour(answer={"id": name, "status": "completed", "output": []})
            answers[name], _ = respond(one, "hello")
            until("it is shared", lambda name=name: in_redis(redis, name))
        delete = urllib.request.Request(f"{other.url}/v1/responses/resp_gone", method="DELETE")
        assert urllib.request.urlopen(delete, timeout=10).status == 200
        until("all know", lambda: saved(other, "transcript") == 1)
        # The worker has lost both. The router that made them still holds their transcripts.
        recorder.behaviour = Behaviour(answer={}, status=404)
        recorder.seen.clear()
        for name in answers:
            with pytest.raises(urllib.error.HTTPError):
                respond(one, "and on", name)
        inputs = [json.loads(seen.body)["input"] for seen in recorder.posts()]
        resolved = [{"role": "user", "content": text} for text in ("hello", "and on")]
        assert inputs == ["and on", "and on", resolved], "only what was kept is told to another worker"
        assert lookups(one, "deleted", "transcript") == 1
    finally:
        one.stop()
        other.stop()
        recorder.stop()


def test_nothing_is_found_across_tenants(redis, workers, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[keys]\n"k-a" = "a"\n"k-b" = "b"\n')
    one, other = routers_of(redis, workers, f'auth.keys_file="{keys}"')
    try:
        answer, _ = respond(one, prose(20, 600), key="k-a")
        until("it is shared", lambda: in_redis(redis, answer["id"]))
        keys_of = redis.keys(f"*{answer['id']}")
        # Whose it is stands under a key that all tenants share.
        assert len(keys_of) == 3 and all((":1:a:" in key) != (":response_tenant:0::" in key) for key in keys_of)
        assert respond(other, "on", answer["id"], key="k-a")[0]["previous_response_id"] == answer["id"]
        for router in (one, other):
            with pytest.raises(urllib.error.HTTPError) as refused:
                respond(router, "on", answer["id"], key="k-b")
            assert refused.value.code == 404
        redis.pause()
        until("it is slow", lambda: other.metric("shared_cache_state", state="slow") == 1)
        with pytest.raises(urllib.error.HTTPError) as refused:
            respond(other, "on", "resp_unknown", key="k-b")
        # It may exist, and nobody can tell whose it is.
        assert (refused.value.code, refused.value.headers["retry-after"]) == (503, "1")
        assert respond(other, "on", answer["id"], key="k-a")[0]["previous_response_id"] == answer["id"]
    finally:
        redis.go_on()
        one.stop()
        other.stop()


def test_every_key_has_an_end_and_names_its_tenant(redis, routers):
    redis.ask("FLUSHALL")
    answer, _ = respond(routers[0], prose(20, 300))
    until("it is shared", lambda: in_redis(redis, answer["id"]))
    until("routers have marked it", lambda: len(redis.keys("*:mark:*")) == len(routers))
    keys = redis.keys()
    assert keys and all(key.startswith("ownerserve:1:test:") for key in keys)
    assert all(0 < redis.ask("PTTL", key) <= 24 * 3600 * 1000 for key in keys)
    assert all(":7:default:" in key for key in keys if ":mark:" not in key and not key.endswith((":routers", ":secret")))


def test_another_secret_is_told_by_who_came_with_it_until_there_is_one_secret(redis, workers):
    (one,) = routers_of(redis, workers, "shared_cache.key_prefix=rotated", count=1)
    (other,) = routers_of(redis, workers, "shared_cache.key_prefix=rotated", "shared_cache.encryption_secret=fedcba9876543210", count=1)
    told = lambda router: [(line["component"], line["reason"]) for line in get_json(f"{router.operator}/readyz")["degraded"]]
    try:
        until("it is told", lambda: ("shared_cache", "other_secret") in told(other))
        assert ("shared_cache", "other_secret") not in told(one)
        one.stop()
        # As if a minute had passed, in which nobody opens it.
        redis.ask("DEL", "ownerserve:1:rotated:secret")
        until("there is one secret", lambda: ("shared_cache", "other_secret") not in told(other))
    finally:
        one.stop()
        other.stop()


def test_a_router_without_redis_starts_and_says_so(workers):
    nobody = Redis()
    nobody.kill()
    (router,) = [Serve([worker.url for worker in workers], settings=(f'shared_cache.redis_url="redis://:hunter2@127.0.0.1:{nobody.port}"', "shared_cache.encryption_secret=0123456789abcdef", BUDGET))]
    try:
        router.wait()
        first, _ = respond(router, prose(20, 400))
        respond(router, "on", first["id"])
        assert router.metric("shared_cache_state", state="unreachable") == 1
        assert "Redis is unreachable" in readyz(router)
        log = router.process.log.read_text()
        assert "Redis does not answer as it should" in log and "hunter2" not in log
    finally:
        router.stop()


def test_what_one_router_has_tokenized_the_other_one_need_not(redis, workers):
    one, other = routers_of(redis, workers, TEXT)
    alone = Serve([worker.url for worker in workers], settings=(TEXT,)).wait()
    try:
        messages = [{"role": "user", "content": prose(2500, number)} for number in range(8)]
        ask(one, messages)
        until("it is shared", lambda: redis.keys("*:checkpoint:*"))
        messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "and on"}]
        usage = ask(other, messages)["usage"]
        assert lookups(other, "shared_hit", "checkpoint") == 1
        known, computed = (other.metric("prefix_lookup_tokens_total", source=source) for source in ("checkpoint", "encoded"))
        assert known + computed == usage["prompt_tokens"] and known > 0.95 * usage["prompt_tokens"]
        # The same prompt has the same name, whoever named it.
        ask(alone, messages)
        assert alone.metric("prefix_lookup_tokens_total", source="checkpoint") == 0
        assert alone.metric("prefix_lookup_tokens_total", source="encoded") == usage["prompt_tokens"]
        assert blocks(alone) == blocks(other)
        ask(other, [*messages, {"role": "user", "content": "and further"}])
        assert lookups(other, "local_hit", "checkpoint") == 0, "the next one it knows itself, by its session"
        assert other.metric("prefix_lookups_total", tier="session") == 1
        # One that is torn, and one of another conversation, change nothing.
        (key,) = redis.keys("*:checkpoint:*")
        redis.ask("SETRANGE", key, "500", "torn")
        other.process.kill()
        other.start()
        other.wait()
        until("Redis is up", lambda: other.metric("shared_cache_up") == 1)
        assert ask(other, messages)["usage"]["prompt_tokens"] == usage["prompt_tokens"]
        assert lookups(other, "corrupt", "checkpoint") == 1
        rewritten = [{"role": "user", "content": "rewritten"}, *messages[1:]]
        ask(other, rewritten)
        assert other.metric("prefix_lookup_tokens_total", source="checkpoint") == 0
    finally:
        for router in (one, other, alone):
            router.stop()


def ask(router, messages: list[dict]) -> dict:
    # Long enough to be worth a checkpoint, and short enough for the worker.
    body = {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0, "metadata": {"note": "x" * 150_000}}
    return post(router.url, "/v1/chat/completions", body, "long")


def blocks(router) -> list:
    """The session's heads, as the ledger names them."""
    return [(head["prefix"], head["blocks"]) for head in sealed_session(router, "long")["heads"]]
