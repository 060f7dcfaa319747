"""Two tenants: what A gets, is charged and is told of does not depend on what B says. And metering is what engines delivered."""

import json
import random
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from harness.cluster import MODEL, Serve, SimWorker, get_json
from harness.processes import until
from harness.talk import TEXT, prose

STEPS = 40
KEYS = '[keys]\n"key-a" = "a"\n"key-b" = "b"\n'
# So generous that nothing is refused, and so slow that what comes back within a run is told from what B took.
QUOTAS = tuple(f"tenants.{tenant}.{unit}_per_minute={count}" for tenant in "ab" for unit, count in (("requests", 6_000), ("tokens", 6_000_000)))


@dataclass
class Seen:
    """What one tenant saw."""

    answers: list = field(default_factory=list)
    limits: list = field(default_factory=list)
    cached: list = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    tokens: int = 0


def traffic(seed: int, tenant: str) -> list[tuple[str, str, dict]]:
    """Sessions that grow, of every endpoint, whole and streamed: path, session and body."""
    choice, asked, sessions = random.Random(seed), [], {}
    for _ in range(STEPS):
        name = f"{tenant}-{choice.randrange(4)}"
        text = sessions[name] = sessions.get(name, "One opening for all.") + " " + prose(choice.randrange(20, 120), choice.randrange(1, 5))
        kind = choice.choice(("chat", "completion", "messages", "responses"))
        common = {"model": MODEL, "temperature": 0, "stream": choice.random() < 0.5}
        tokens = choice.randrange(4, 40)
        messages = [{"role": "user", "content": text}]
        if kind == "chat":
            more = {"stream_options": {"include_usage": True}} if common["stream"] else {}
            asked.append(("/v1/chat/completions", name, {**common, **more, "messages": messages, "max_tokens": tokens}))
        elif kind == "completion":
            more = {"stream_options": {"include_usage": True}} if common["stream"] else {}
            asked.append(("/v1/completions", name, {**common, **more, "prompt": text, "max_tokens": tokens}))
        elif kind == "messages":
            asked.append(("/v1/messages", name, {**common, "messages": messages, "max_tokens": tokens}))
        else:
            asked.append(("/v1/responses", name, {**common, "input": text, "max_output_tokens": tokens}))
    return asked


def ask(router, key: str, step: tuple[str, str, dict]):
    path, session, body = step
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}", "x-session-id": session}
    request = urllib.request.Request(router.url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def parts(raw: bytes, streamed: bool) -> list[dict]:
    if not streamed:
        return [json.loads(raw)]
    return [json.loads(line[6:]) for line in raw.splitlines() if line.startswith(b"data: {")]


def texts(part) -> str:
    """All that an answer says, in order, without names and times."""
    if isinstance(part, list):
        return "".join(map(texts, part))
    if not isinstance(part, dict):
        return ""
    own = "".join(value for name, value in part.items() if name in ("text", "content", "delta") and isinstance(value, str))
    return own + "".join(texts(value) for value in part.values())


def usages(part) -> list[dict]:
    if isinstance(part, list):
        return [usage for each in part for usage in usages(each)]
    if not isinstance(part, dict):
        return []
    own = [part["usage"]] if isinstance(part.get("usage"), dict) else []
    return own + [usage for value in part.values() for usage in usages(value)]


def counted(found: list[dict]) -> tuple[int, int]:
    """Tokens of an answer, and those that were cached; an engine tells them once or bit by bit."""
    largest = {}
    for usage in found:
        for name, value in {**usage, **(usage.get("prompt_tokens_details") or {}), **(usage.get("input_tokens_details") or {})}.items():
            if isinstance(value, int):
                largest[name] = max(largest.get(name, 0), value)
    cached = largest.get("cached_tokens", 0) + largest.get("cache_read_input_tokens", 0)
    # The messages API counts apart what was found in a cache, and what was put there.
    apart = largest.get("cache_read_input_tokens", 0) + largest.get("cache_creation_input_tokens", 0)
    prompt = largest.get("prompt_tokens", 0) or largest.get("input_tokens", 0) + apart
    return prompt + (largest.get("completion_tokens", 0) or largest.get("output_tokens", 0)), cached


def note(seen: Seen, step, answer) -> None:
    status, headers, raw = answer
    assert status == 200, raw
    said = parts(raw, step[2]["stream"])
    tokens, cached = counted(usages(said))
    seen.answers.append(texts(said))
    seen.limits.append({name.lower(): value for name, value in headers.items() if name.lower().startswith("x-ratelimit-limit")})
    seen.cached.append(cached)
    seen.requests.append(headers["x-request-id"])
    seen.tokens += tokens


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    return path


def run(keys, steps_of_b: list) -> dict:
    """A's steps, with one of B's before each. One after another and at one worker, so that B's load moves none of A's steps
    and only what B says can make a difference."""
    workers = [SimWorker("hybrid", "--speed-up", "50").wait()]
    router = Serve([worker.url for worker in workers], settings=(TEXT, f'auth.keys_file="{keys}"', *QUOTAS)).wait()
    try:
        a, b = Seen(), Seen()
        for number, step in enumerate(traffic(7, "a")):
            if number < len(steps_of_b):
                note(b, steps_of_b[number], ask(router, "key-b", steps_of_b[number]))
            note(a, step, ask(router, "key-a", step))
            # A step of the same session is planned on what the ledger has of the one before.
            until("the ledger has the step", lambda: router.metric("ledger_pending_commit_sessions") == 0)
        receipts = [get_json(f"{router.operator}/ownerserve/v1/decisions/{request}") for request in a.requests]
        until("A's tokens are counted", lambda: router.metric("tenant_tokens_total", tenant="a") >= a.tokens)
        return {
            "seen": a, "other": b,
            "kinds": [(receipt["decision"]["step_kind"], [attempt["action"] for attempt in receipt["attempts"]]) for receipt in receipts],
            "metered": {tenant: router.metric("tenant_tokens_total", tenant=tenant) for tenant in ("a", "b")},
            "ejection": [worker["ejection"] for worker in get_json(f"{router.operator}/ownerserve/v1/workers")["workers"]],
        }
    finally:
        router.stop()
        for worker in workers:
            worker.process.stop()


def test_what_a_tenant_gets_does_not_depend_on_what_another_says(keys):
    alone = run(keys, [])
    # B asks what A asks, from the same sessions by name, and something else.
    for other in (traffic(7, "a"), traffic(11, "b")):
        beside = run(keys, other)
        assert beside["seen"].answers == alone["seen"].answers
        assert beside["seen"].cached == alone["seen"].cached, "what B sent is found by nobody else"
        assert beside["seen"].limits == alone["seen"].limits
        assert beside["kinds"] == alone["kinds"]
        assert beside["ejection"] == alone["ejection"]
        assert beside["metered"]["a"] == alone["metered"]["a"]


def test_metering_is_what_engines_delivered(keys):
    found = run(keys, traffic(11, "b"))
    assert found["metered"] == {"a": found["seen"].tokens, "b": found["other"].tokens}


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}])
def test_who_hangs_up_is_charged_what_was_delivered(keys, more):
    worker = SimWorker("hybrid", "--speed-up", "20").wait()
    router = Serve([worker.url], settings=(TEXT, f'auth.keys_file="{keys}"', *QUOTAS)).wait()
    try:
        body = {"model": MODEL, "stream": True, "ignore_eos": True, "max_tokens": 2_000, "messages": [{"role": "user", "content": prose(20, 1)}], **more}
        headers = {"content-type": "application/json", "authorization": "Bearer key-a"}
        request = urllib.request.Request(router.url + "/v1/chat/completions", json.dumps(body).encode(), headers)
        answer = urllib.request.urlopen(request, timeout=60)
        delivered = sum(answer.readline().startswith(b"data: {") for _ in range(800))
        answer.close()
        until("it is charged", lambda: router.metric("requests_in_flight") == 0)
        until("what was delivered is counted", lambda: router.metric("tenant_tokens_total", tenant="a") >= delivered, seconds=5)
    finally:
        router.stop()
        worker.process.stop()


class Picky(BaseHTTPRequestHandler):
    """An engine that fails one kind of request and is well otherwise."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def told(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        models = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()
        pages = {"/v1/models": (200, models), "/health": (200, b""), "/metrics": (200, b"process_start_time_seconds 1.0\n", "text/plain")}
        self.told(*pages.get(self.path, (404, b"{}")))

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
        message = {"role": "assistant", "content": "well"}
        well = {"id": "x", "object": "chat.completion", "model": MODEL, "usage": usage, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        if b"POISON" in body:
            self.told(500, b'{"error":{"message":"boom"}}')
        else:
            self.told(200, json.dumps(well).encode())


def test_poison_of_one_tenant_ejects_no_worker_for_the_other(keys):
    engines = [ThreadingHTTPServer(("127.0.0.1", 0), Picky) for _ in range(4)]
    for engine in engines:
        engine.daemon_threads = True
        Thread(target=engine.serve_forever, args=(0.05,), daemon=True).start()
    router = Serve([f"http://127.0.0.1:{engine.server_port}" for engine in engines], settings=(f'auth.keys_file="{keys}"',)).wait()
    try:
        chat = lambda text: ("/v1/chat/completions", "s", {"model": MODEL, "messages": [{"role": "user", "content": text}]})
        for number in range(12):
            assert ask(router, "key-b", chat(f"POISON {number}"))[0] >= 500
            assert ask(router, "key-a", chat(f"well {number}"))[0] == 200
        workers = get_json(f"{router.operator}/ownerserve/v1/workers")["workers"]
        assert [worker["ejection"] for worker in workers if worker["ejection"]] == []
    finally:
        router.stop()
        for engine in engines:
            engine.shutdown()
            engine.server_close()
