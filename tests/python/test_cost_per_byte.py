"""What a byte on the wire may cost: the worst bodies of N bytes at every endpoint, beside a plain one of N bytes in the same run.

CPU is the process's own (utime and stime), memory its peak. Meanwhile `/livez` is asked, of the process and of an idle one beside
it: what the machine does to both is nobody's fault. COST_BYTES sets another N. `./test` has a small one and
three endpoints, one of each way that a body is read; `./test --deep` has all of them (COST_ALL).
"""

import base64
import functools
import gzip
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from harness import wire
from harness.cluster import Serve, SimWorker

BYTES = int(os.environ.get("COST_BYTES", 16 << 10))
# So many at once: more than there are cores on a small machine.
AT_ONCE = 4
# Most bytes that a body of N bytes inflates to here: below `proxy.body_limit`, so that nothing but its cost speaks against it.
INFLATED = min(1_000 * BYTES, 60 << 20)
# A tree of JSON costs more a byte than text does, and what is inflated is up to 32 times what came.
CPU_PLAIN, CPU_PACKED = 8, 64
MEMORY_PLAIN, MEMORY_PACKED = 8, 64
# Below this nothing is told apart: one tick of the kernel's clock a request, and the breath of an allocator.
LEAST_CPU = 1 / os.sysconf("SC_CLK_TCK") / AT_ONCE
LEAST_MEMORY = 4 << 20
# Of `/livez`, beyond what the idle process took; the slowest of a few probes scatters on a busy machine.
SLOWEST_PROBE, SCATTER = 0.1, 3

# What `read_body` takes: so many bytes of one byte of gzip, and any density below so many bytes.
DENSEST, ANY_DENSITY = 32, 1 << 20
TOO_DENSE = 413

FIELDS = {
    "/v1/chat/completions": "messages", "/v1/messages": "messages", "/v1/messages/count_tokens": "messages", "/v1/responses": "input",
    "/v1/completions": "prompt", "/v1/embeddings": "input", "/v1/rerank": "query", "/v1/score": "text_1", "/tokenize": "messages",
    "/detokenize": "prompt",
}
PATHS = list(FIELDS) if os.environ.get("COST_ALL") else ["/v1/chat/completions", "/v1/responses", "/v1/embeddings"]


@dataclass(frozen=True)
class Post:
    """A body as it goes on the wire."""

    path: str
    body: bytes
    is_packed: bool = False

    def send(self, port: int) -> int:
        packed = {"content_encoding": "gzip"} if self.is_packed else {}
        try:
            return wire.exchange(port, self.body, self.path, **packed).status
        except OSError:
            # Cut off in the middle of it: that costs little.
            return 0


def message(content) -> dict:
    return {"role": "user", "content": content}


def request(path: str, text, **more) -> bytes:
    is_list = FIELDS[path] in ("messages", "input") and path != "/v1/embeddings"
    head = {"model": "tiny", "max_tokens": 1, **more}
    return json.dumps({**head, FIELDS[path]: [message(text)] if is_list else text}, separators=(",", ":")).encode()


def with_field(path: str, name: bytes, value: bytes) -> bytes:
    """A small request with one more field, as it is spelled."""
    return b'{"' + name + b'":' + value + b"," + request(path, "hi")[1:]


def filled(size: int, piece: bytes, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    return opening + b",".join([piece] * max(1, size // (len(piece) + 1))) + closing


def nested(size: int) -> bytes:
    return b"[" * (size // 2) + b"]" * (size // 2)


def plain(path: str, size: int) -> bytes:
    """Words that no two requests share, so that no cache knows them."""
    chance = random.Random(size)
    return request(path, " ".join("".join(chance.choices("etaoinshrdlu", k=6)) for _ in range(size // 7)))


def messages(path: str, size: int, content=None) -> bytes:
    one = json.dumps(message("" if content is None else content), separators=(",", ":")).encode()
    listed = filled(size, one)
    return b'{"model":"tiny","max_tokens":1,"' + FIELDS[path].encode() + b'":' + listed + b"}"


TOOL = json.dumps({"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}).encode()
SHAPES: dict[str, Callable[[str, int], bytes]] = {
    "deep": lambda path, size: with_field(path, b"x", nested(size)),
    "deep template arguments": lambda path, size: with_field(path, b"chat_template_kwargs", b'{"a":' + nested(size) + b"}"),
    "template arguments": lambda path, size: with_field(path, b"chat_template_kwargs", filled(size, b"0", b'{"a":[', b"]}")),
    "empty arrays": lambda path, size: with_field(path, b"x", filled(size, b"[]")),
    "an escaped name": lambda path, size: with_field(path, b"\\u0061" + b"a" * size, b"1"),
    "a name of escapes": lambda path, size: with_field(path, b"\\u0061" * (size // 6), b"1"),
    "many escaped names": lambda path, size: filled(size, b'"\\u0061":1', b"{", b"," + request(path, "hi")[1:]),
    "many names": lambda path, size: filled(size, b'"a":1', b"{", b"," + request(path, "hi")[1:]),
    "a value of escapes": lambda path, size: with_field(path, b"x", b'"' + b"\\u0061" * (size // 6) + b'"'),
    "a model's name": lambda path, size: request(path, "hi", model="m" * size),
    "many messages": messages,
    "many parts": lambda path, size: request(path, [{"type": "text", "text": ""}] * (size // 25)),
    "many tools": lambda path, size: with_field(path, b"tools", filled(size, TOOL)),
    "a tool's schema": lambda path, size: with_field(path, b"tools", b"[" + TOOL.replace(b"{}", filled(size, b'"a":{}', b"{", b"}")) + b"]"),
    "many stops": lambda path, size: with_field(path, b"stop", filled(size, b'"a"')),
    "a repeated field": lambda path, size: filled(size, b'"model":"tiny"', b"{", b"," + request(path, "hi")[1:]),
    "text": plain,
}


@functools.cache
def packed(path: str, shape: str) -> bytes:
    """As much of a shape as N bytes of gzip hold."""
    size = INFLATED
    whole = gzip.compress(SHAPES[shape](path, size), 6)
    while len(whole) > BYTES:
        size = int(size * BYTES / len(whole) * 0.95)
        whole = gzip.compress(SHAPES[shape](path, size), 6)
    return whole


@functools.cache
def taken(path: str, shape: str) -> bytes:
    """A shape in gzip that is just less dense than what is refused: a field that nothing shortens fills it up to N bytes."""
    noise = base64.b64encode(random.Random(BYTES).randbytes(2 * BYTES))
    size, most = min(int(0.9 * max(DENSEST * BYTES, ANY_DENSITY)), 60 << 20), 2 * BYTES
    while True:
        whole = gzip.compress(SHAPES[shape](path, size)[:-1] + b',"noise":"' + noise[:most] + b'"}', 6)
        if len(whole) <= BYTES:
            return whole
        # First without the noise, then with less of the shape.
        most, size = (max(0, most - max(64, len(whole) - BYTES)), size) if most else (0, int(size * BYTES / len(whole) * 0.95))


@dataclass
class Cost:
    """Of one request, on the average: CPU seconds and bytes of peak memory; and the slowest probes."""

    cpu: float
    memory: float
    statuses: list[int]
    probe: float
    idle_probe: float


@dataclass
class Bench:
    """The process under test, and one that has nothing to do."""

    serve: Serve
    idle: Serve
    references: dict[str, Cost] = field(default_factory=dict)

    def cost(self, post: Post) -> Cost:
        proc = Path(f"/proc/{self.serve.process.pid}")
        assert self.serve.process.alive(), f"the process ended with {self.serve.process.child.returncode}:\n{self.serve.process.last_lines()}"
        # The peak is counted from here on.
        (proc / "clear_refs").write_text("5")
        before, cpu = self._memory(proc, "VmRSS"), self._cpu(proc)
        with self._probed() as (probes, idle), ThreadPoolExecutor(AT_ONCE) as senders:
            statuses = list(senders.map(lambda _: post.send(self.serve.port), range(AT_ONCE)))
        spent = self._cpu(proc) - cpu
        grown = max(0, self._memory(proc, "VmHWM") - before)
        return Cost(spent / AT_ONCE, grown / AT_ONCE, statuses, max(probes), max(idle))

    def reference(self, path: str) -> Cost:
        """What a plain body of N bytes costs: the dearest of three."""
        if path not in self.references:
            costs = [self.cost(Post(path, plain(path, BYTES + number))) for number in range(3)]
            self.references[path] = max(costs, key=lambda cost: cost.cpu)
        return self.references[path]

    @contextmanager
    def _probed(self) -> Iterator[tuple[list[float], list[float]]]:
        over, took = threading.Event(), ([], [])

        def probe(serve: Serve, times: list[float]) -> None:
            while not times or not over.is_set():
                begun = time.monotonic()
                try:
                    is_well = wire.ask(serve.operator_port, "GET", "/livez").status == 200
                except OSError:
                    is_well = False
                times.append(time.monotonic() - begun if is_well else float("inf"))
                over.wait(0.01)

        probers = [threading.Thread(target=probe, args=pair, daemon=True) for pair in zip((self.serve, self.idle), took)]
        for prober in probers:
            prober.start()
        yield took
        over.set()
        for prober in probers:
            prober.join(30)

    @staticmethod
    def _memory(proc: Path, name: str) -> int:
        lines = (proc / "status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) << 10

    @staticmethod
    def _cpu(proc: Path) -> float:
        fields = (proc / "stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def bench():
    worker, text = SimWorker("hybrid", "--speed-up", "50"), "models.tiny.tokenizer_dir=builtin"
    serve, idle = Serve([worker.url], settings=(text,)), Serve([], settings=(text,))
    for process, port in ((worker.process, worker.port), (serve.process, serve.operator_port), (idle.process, idle.operator_port)):
        process.wait_for_port(port, 120)
    serve.wait()
    yield Bench(serve, idle)
    serve.stop()
    idle.stop()
    worker.process.stop()


def judge(bench: Bench, post: Post, cpu_factor: int, memory_factor: int) -> Cost:
    plain_cost, cost = bench.reference(post.path), bench.cost(post)
    # As if all bodies had the plain one's length.
    share = len(plain(post.path, BYTES)) / len(post.body)
    most_cpu = cpu_factor * max(plain_cost.cpu, LEAST_CPU)
    most_memory = memory_factor * max(plain_cost.memory, LEAST_MEMORY / AT_ONCE)
    # Other work on the same cores adds to the CPU that is counted: the least of three counts. Only of refused bodies, which leave
    # nothing in a cache that makes the next one cheaper.
    for _ in range(2):
        if cost.cpu * min(share, 1) <= most_cpu or not all(400 <= status < 500 for status in cost.statuses):
            break
        cost = min(cost, bench.cost(post), key=lambda cost: cost.cpu)
    told = f"{len(post.body)} bytes were answered {cost.statuses}: {cost.cpu:.3f} s of CPU each, beside {plain_cost.cpu:.3f} s " \
           f"of a plain body; {cost.memory / 2**20:.1f} MiB, beside {plain_cost.memory / 2**20:.1f}; /livez {cost.probe:.3f} s, " \
           f"beside {cost.idle_probe:.3f} s of an idle process"
    print(told)
    assert cost.cpu * min(share, 1) <= most_cpu, told
    assert cost.memory * min(share, 1) <= most_memory, told
    assert cost.probe <= SLOWEST_PROBE + SCATTER * cost.idle_probe, told
    assert all(status == 0 or status < 500 or status == 503 for status in cost.statuses), told
    return cost


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "text"])
def test_no_body_costs_much_more_than_a_plain_one(bench, path, shape):
    judge(bench, Post(path, SHAPES[shape](path, BYTES)), CPU_PLAIN, MEMORY_PLAIN)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_packed_body_costs_much_more_than_a_plain_one_of_its_bytes(bench, path, shape):
    judge(bench, Post(path, packed(path, shape), is_packed=True), CPU_PACKED, MEMORY_PACKED)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_packed_body_that_is_taken_costs_much_more_than_a_plain_one_of_its_bytes(bench, path, shape):
    cost = judge(bench, Post(path, taken(path, shape), is_packed=True), CPU_PACKED, MEMORY_PACKED)
    assert TOO_DENSE not in cost.statuses, f"it was not read to its end: {cost.statuses}"
