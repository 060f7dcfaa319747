"""One real vLLM server on CPU, with KV events and NIXL."""

import json
import os
import signal
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from harness.cluster import get_json, metric
from harness.processes import ROOT, Process, until

HOME = Path(os.environ.get("ENGINES_HOME", Path.home() / ".cache/ownerserve-engines"))
MODEL = ROOT / "target/engines/tiny"
BLOCK = 32
READY_WITHIN = 400.0


def children(pid: int) -> list[int]:
    """All that a process has started, and what those have."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            found += [*children(int(child)), int(child)]
    return found


class Engine:
    """Serves the tiny model as a hybrid, over NIXL: it computes for others and pulls from others. `connector`: what NIXL is told
    besides. With `mooncake` it has one of that connector's two roles; with `store` it shares that folder with others. `damaged`: from which
    engine KV comes wiped, and while which file exists."""

    def __init__(self, name: str, ports: list[int], *, context: int = 8192, cache_bytes: int = 128 << 20, mooncake: str = "",
                 store: Path | None = None, damaged: tuple["Engine", Path] | None = None, **connector):
        self.name = name
        self.port, events, replay, self.side_channel = ports
        self.url = f"http://127.0.0.1:{self.port}"
        transfer = {
            "kv_connector": "NixlConnector", "kv_connector_module_path": "patient_nixl", "kv_role": "kv_both",
            "kv_buffer_device": "cpu", "kv_connector_extra_config": {"num_threads": 0, **connector},
        }
        if damaged:
            transfer["kv_connector_module_path"] = "damaging_nixl"
        if mooncake:
            transfer = {
                "kv_connector": "MooncakeConnector", "kv_connector_module_path": "mooncake_on_cpu", "kv_role": mooncake,
                "kv_connector_extra_config": {"mooncake_protocol": "tcp", "num_workers": 2},
            }
        if store:
            transfer = {
                "kv_connector": "ExampleConnector", "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": str(store)},
            }
        publisher = {
            "enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv",
            "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://127.0.0.1:{replay}",
        }
        self.argv = [
            str(HOME / "venv/bin/python"), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(MODEL), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(self.port),
            "--dtype", "float32", "--enforce-eager", "--max-model-len", str(context), "--block-size", str(BLOCK),
            "--kv-cache-memory-bytes", str(cache_bytes), "--max-num-seqs", "16", "--distributed-executor-backend", "uni",
            "--enable-prefix-caching", "--enable-prompt-tokens-details",
            # Calls that a client forces are made by a grammar, whatever the weights would rather say.
            "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
            "--structured-outputs-config", json.dumps({"backend": "xgrammar", "disable_any_whitespace": True}),
            "--kv-transfer-config", json.dumps(transfer), "--kv-events-config", json.dumps(publisher),
        ]
        if store:
            # This connector writes what is computed at once, and takes it for the whole prompt.
            self.argv += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(context)]
        self.env = {
            "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
            "VLLM_HOST_IP": "127.0.0.1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
            # Compiled modules and what vLLM knows of a model's class are kept for the next engine.
            "PYTHONDONTWRITEBYTECODE": "", "VLLM_CACHE_ROOT": str(HOME / "vllm"),
            # Less memory.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # Forced calls as plain JSON of their schema: only that grammar can do without white space, which has no end.
            "VLLM_ENFORCE_STRICT_TOOL_CALLING": "0",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_channel),
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(self.side_channel),
            "UCX_TLS": "tcp,self", "PYTHONPATH": str(ROOT / "tests/engines/plugins"),
        }
        if damaged:
            by, path = damaged
            self.env |= {"DAMAGED_FROM": str(by.side_channel), "DAMAGED_WHILE": str(path)}
        self.start()

    def start(self) -> None:
        """Also after it has ended: at the same ports, and as a new process."""
        self.process = Process(f"vllm-{self.name}", self.argv, self.env)

    def signal(self, number: int) -> None:
        """To the server and to the engine's core, which is a process of its own."""
        for pid in [*children(self.process.pid), self.process.pid]:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def wait(self) -> None:
        def healthy():
            if not self.process.alive():
                raise RuntimeError(f"vLLM {self.name} ended:\n{self.process.last_lines(40)}")
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return answer.status == 200

        until(f"vLLM {self.name} is ready", healthy, READY_WITHIN, 0.5)

    def post(self, path: str, body: dict) -> dict:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def prompt_tokens_from(self, source: str) -> int:
        """How many prompt tokens came from `local_compute`, `local_cache_hit` or `external_kv_transfer`."""
        return int(metric(self.metrics(), "vllm:prompt_tokens_by_source_total", source=source))

    def running(self) -> float:
        return metric(self.metrics(), "vllm:num_requests_running")

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            return answer.read().decode()

    def stop(self) -> None:
        # One that was stopped in its midst hears nothing else.
        self.signal(signal.SIGCONT)
        self.process.stop(15)


@contextmanager
def started(*engines: Engine):
    """All are waited for together, and stopped."""
    try:
        for engine in engines:
            engine.wait()
        yield list(engines)
    finally:
        for engine in engines:
            engine.stop()


def listed(serve) -> list[dict]:
    """The engines as a router sees them."""
    return get_json(f"{serve.operator}/ownerserve/v1/workers")["workers"]


def known_exactly(serve) -> None:
    """Until a router knows each block that the engines hold."""
    def doubts():
        return [(line["endpoint"], line["kv_index_state"], line.get("kv_index_reason")) for line in listed(serve) if line["kv_index_state"] != "exact"]

    try:
        until("every block is known", lambda: listed(serve) and not doubts(), 60)
    except AssertionError as late:
        raise AssertionError(f"{late}: {doubts()}") from late


def load_of(serve, engine: Engine) -> dict:
    return next(line["load"] for line in listed(serve) if line["endpoint"] == engine.url)


def known_to_be_busy(serve, engine: Engine, clients: int) -> None:
    """Until a router knows that most of so many clients are answered there."""
    until("the load is known", lambda: load_of(serve, engine)["running"] >= clients - 2, 60)


def known_to_be_full(serve, engine: Engine, usage: float) -> None:
    """Until a router knows that so large a part of its KV cache is in use."""
    until("the KV cache fills", lambda: load_of(serve, engine)["kv_cache_usage"] >= usage, 60)


def known_to_be_idle(serve, engine: Engine) -> None:
    """Until a router knows that nobody is answered there."""
    until("the idle engine is known", lambda: load_of(serve, engine)["running"] == 0, 60)
