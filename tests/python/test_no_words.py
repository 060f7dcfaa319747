"""What people say stands nowhere but in engines' and clients' hands: no log, metric, receipt, file or value in Redis has it."""

import base64
import hashlib
import json
import urllib.error
import urllib.parse
import urllib.request

import pytest
from harness.cluster import MODEL, Serve, SimWorker, get_json
from harness.processes import until
from harness.redis import Redis
from harness.talk import TEXT, prose

# Words that nobody says otherwise: a part of every prompt and of the key that its client shows.
WORD = "Zwyxquil-Övergård"
KEY = "sk-zwyxquilsecretkey"
SETTINGS = ("shared_cache.key_prefix=words", 'shared_cache.timeout="200ms"', "prefix_cache.verify_every=1", "transfer_check.sample_every=1")


def spellings(text: str) -> list[bytes]:
    """As logs, JSON, URLs and headers may write it; base64 at each of its three shifts, without the letters that depend on
    what stands beside it."""
    plain = text.encode()
    found = [plain, json.dumps(text)[1:-1].encode(), urllib.parse.quote(text).encode(), plain.hex().encode(), plain.lower()]
    found += [b"".join(b"\\x%02x" % byte if byte > 127 else bytes([byte]) for byte in plain)]
    for shift in range(3):
        packed = base64.b64encode(b"\0" * shift + plain)[4 if shift else 0:]
        found.append(packed.rstrip(b"=")[:-2])
    return sorted({spelling for spelling in found if len(spelling) > 8})


MARKERS = [spelling for text in (WORD, KEY) for spelling in spellings(text)]


def marked(where: str, content: bytes) -> list[str]:
    return [f"{where}: {marker!r}" for marker in MARKERS if marker in content]


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


def router_of(redis, workers, folder, *settings: str) -> Serve:
    keys = folder / "keys.toml"
    keys.write_text(f'[keys]\n"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}" = "team"\n')
    secret = () if "shared_cache.allow_plaintext=true" in settings else ("shared_cache.encryption_secret=0123456789abcdef",)
    shared = (*secret, TEXT, f'shared_cache.redis_url="{redis.url}"', f'auth.keys_file="{keys}"', *SETTINGS, *settings)
    router = Serve([worker.url for worker in workers], settings=shared).wait()
    until("Redis is up", lambda: router.metric("shared_cache_up") == 1)
    return router


def ask(router, path: str, body: dict, key: str = KEY) -> bytes:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}", "x-session-id": "a-session"}
    request = urllib.request.Request(router.url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        return error.read()


def traffic(router) -> None:
    """Every endpoint, whole and streamed, refused and served, short, and with a body so long that a checkpoint is kept."""
    text = f"{prose(40, 3)} {WORD} {prose(40, 4)}"
    long = f"{WORD} {prose(15_000, 5)}"
    for stream in (False, True):
        common = {"model": MODEL, "stream": stream}
        for words in (text, long):
            chat = {**common, "messages": [{"role": "system", "content": text}, {"role": "user", "content": words}]}
            ask(router, "/v1/chat/completions", {**chat, "max_tokens": 8, "metadata": {"note": "x" * 200_000}})
            ask(router, "/v1/messages", {**common, "max_tokens": 8, "messages": chat["messages"][1:]})
            ask(router, "/v1/completions", {**common, "prompt": words, "max_tokens": 8})
        first = json.loads(ask(router, "/v1/responses", {"model": MODEL, "input": text, "max_output_tokens": 8}))
        follows = {**common, "input": text, "previous_response_id": first["id"], "max_output_tokens": 8}
        ask(router, "/v1/responses", follows)
    for path, body in (
        ("/v1/chat/completions", {"model": WORD, "messages": [{"role": "user", "content": text}]}),
        ("/v1/chat/completions", {"model": MODEL, "messages": text}),
        ("/v1/responses", {"model": MODEL, "input": text, "previous_response_id": f"resp_{KEY}"}),
        ("/v1/completions", {"model": MODEL, "prompt": text, "temperature": text}),
        ("/tokenize", {"model": MODEL, "prompt": text}),
    ):
        ask(router, path, body)
    ask(router, "/v1/completions", {"model": MODEL, "prompt": text}, key=KEY + "x")


def break_off(router, workers) -> None:
    """A stream goes on at the other worker when its own dies."""
    body = {"model": MODEL, "prompt": f"{WORD} {prose(60, 9)}", "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True}
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(router.url + "/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read(600)
        busy = [worker for worker in workers if worker.running() > 0]
        assert busy, "somebody answers"
        busy[0].process.kill()
        assert b"[DONE]" in answer.read()


def everywhere(router, redis) -> dict[str, bytes]:
    """All that this router shows or keeps, by where it stands."""
    found = {"log": router.process.log.read_bytes(), "metrics": router.metrics().encode()}
    for name in ("decisions?limit=500", "sessions", "artifacts", "owners", "tenants", "workers", "leases", "cluster", "routing"):
        found[name] = json.dumps(get_json(f"{router.operator}/ownerserve/v1/{name}"), ensure_ascii=False).encode()
    for receipt in json.loads(found["decisions?limit=500"])["decisions"]:
        request = receipt["request_id"]
        found[request] = json.dumps(get_json(f"{router.operator}/ownerserve/v1/decisions/{request}"), ensure_ascii=False).encode()
    for path in router.data.rglob("*"):
        if path.is_file():
            found[str(path)] = path.read_bytes() + path.name.encode()
    for key in redis.ask("KEYS", "*"):
        # A dump is compressed, which hides words.
        value = redis.ask("GET", key) if redis.ask("TYPE", key) == b"string" else redis.ask("DUMP", key)
        found[f"redis {key.decode()}"] = value + key
    return found


def test_what_is_said_stands_nowhere(redis, workers, tmp_path):
    router = router_of(redis, workers, tmp_path)
    try:
        traffic(router)
        until("transcripts are shared", lambda: any(":transcript:" in key for key in redis.keys()))
        until("a checkpoint is shared", lambda: any(":checkpoint:" in key for key in redis.keys()))
        assert all(int(redis.ask("PTTL", key)) > 0 for key in redis.ask("KEYS", "*")), "every key ends by itself"
        break_off(router, workers)
        until("it was told", lambda: router.metric("stream_interruptions_total", outcome="resumed") == 1)
        found = everywhere(router, redis)
        assert sum(len(content) for content in found.values()) > 20_000 and len(found) > 20, "there was something to search"
        assert [hit for where, content in found.items() for hit in marked(where, content)] == []
    finally:
        router.stop()


def test_the_search_finds_what_lies_there_as_it_is(redis, workers, tmp_path):
    """Control: with plain values in Redis, transcripts show the word, and each spelling of it is found."""
    for worker in workers:
        if not worker.process.alive():
            worker.start()
            worker.wait()
    router = router_of(redis, workers, tmp_path, "shared_cache.allow_plaintext=true", "shared_cache.key_prefix=plain")
    try:
        traffic(router)
        until("transcripts are shared", lambda: any("plain:transcript:" in key for key in redis.keys()))
        hits = [hit for where, content in everywhere(router, redis).items() for hit in marked(where, content)]
        assert hits and all("plain:transcript:" in hit for hit in hits), hits
    finally:
        router.stop()
    for text in (WORD, KEY):
        for shift in range(3):
            assert marked("here", base64.b64encode(b"x" * shift + text.encode() + b"yz")), "in base64"
        assert marked("here", json.dumps({"a": text}).encode()) and marked("here", text.encode())


def test_what_is_kept_of_a_tenant_is_deleted_in_redis(redis, workers, tmp_path):
    router = router_of(redis, workers, tmp_path, "shared_cache.key_prefix=deleted")

    def lengths(kind: str) -> list[int]:
        return [int(redis.ask("STRLEN", key)) for key in redis.keys(f"*:deleted:{kind}:*")]

    try:
        traffic(router)
        until("transcripts are shared", lambda: len(lengths("transcript")) >= 2 and max(lengths("transcript")) > 300)
        request = urllib.request.Request(f"{router.operator}/ownerserve/v1/tenants/team/retained-data", method="DELETE")
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert "values were forgotten" in json.load(answer)["result"]
        # What is left are marks: nothing but what every value has beside its words.
        assert set(lengths("transcript") + lengths("checkpoint") + lengths("response_worker")) == {29}
    finally:
        router.stop()
