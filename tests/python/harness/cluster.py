"""Simulated workers and `ownerserve serve` as real processes, and the operator's view of them."""

import json
import os
import shutil
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from .processes import BINARY, Process, free_ports, until

MODEL = "tiny"


def get_json(url: str, timeout: float = 10.0):
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        return json.load(answer)


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def metric(page: str, name: str, **labels: str) -> float:
    """The sum over all series of `name` that carry these labels."""
    total = 0.0
    for line in page.splitlines():
        series, _, value = line.rpartition(" ")
        base, _, inside = series.partition("{")
        if base == name and all(f'{key}="{wanted}"' in inside for key, wanted in labels.items()):
            total += float(value)
    return total


class SimWorker:
    """`ownerserve sim-worker`."""

    def __init__(self, role: str = "hybrid", *flags: str):
        self.role = role
        self.flags = flags
        self.port, self.events, self.bootstrap = free_ports(3)
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        argv = [str(BINARY), "sim-worker", "--listen", f"127.0.0.1:{self.port}",
                "--kv-events-listen", f"127.0.0.1:{self.events}", "--bootstrap-listen", f"127.0.0.1:{self.bootstrap}",
                "--role", self.role, *self.flags]
        self.process = Process(f"sim-{self.role}-{self.port}", argv)

    def wait(self) -> "SimWorker":
        self.process.wait_for_port(self.port)
        return self

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            return answer.read().decode()

    def running(self) -> float:
        return metric(self.metrics(), "vllm:num_requests_running")


class Serve:
    """`ownerserve serve` in front of URLs; its folder of data outlives a kill."""

    def __init__(self, workers: list[str], *flags: str, settings: tuple[str, ...] = ()):
        self.workers = workers
        self.flags = [*flags, *(part for setting in settings for part in ("--set", setting))]
        self.port, self.operator_port = free_ports(2)
        self.url = f"http://127.0.0.1:{self.port}"
        self.operator = f"http://127.0.0.1:{self.operator_port}"
        self.data = Path(tempfile.mkdtemp(prefix="ownerserve-test-"))
        self.start()

    def start(self) -> None:
        workers = [part for worker in self.workers for part in ("--worker", worker)]
        argv = [str(BINARY), "serve", "--listen", f"127.0.0.1:{self.port}",
                "--operator-listen", f"127.0.0.1:{self.operator_port}", "--data-dir", str(self.data), *workers, *self.flags]
        self.process = Process(f"serve-{self.port}", argv, {"RUST_LOG": os.environ.get("RUST_LOG", "info")})

    def wait(self) -> "Serve":
        """Until every worker is known to be up."""
        self.process.wait_for_port(self.operator_port)
        until("serve is ready", lambda: status_of(f"{self.operator}/readyz") == 200)
        until("all workers are up", lambda: self.workers_up() == len(self.workers))
        return self

    def workers_up(self) -> int:
        return sum(worker["health"] == "ready" for worker in get_json(f"{self.operator}/ownerserve/v1/workers")["workers"])

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.operator}/metrics", timeout=10) as answer:
            return answer.read().decode()

    def metric(self, name: str, **labels: str) -> float:
        return metric(self.metrics(), f"ownerserve_{name}", **labels)

    def stop(self) -> None:
        self.process.stop()
        shutil.rmtree(self.data, ignore_errors=True)


class Cluster:
    """Simulated workers with one serve in front. A context: everything is stopped on the way out."""

    def __init__(self, *roles: str, settings: tuple[str, ...] = (), flags: tuple[str, ...] = (), sim: tuple[str, ...] = ()):
        self.workers = [SimWorker(role, *sim) for role in roles]
        for worker in self.workers:
            worker.wait()
        self.serve = Serve([f"{worker.url}#{worker.role}" for worker in self.workers], *flags, settings=settings).wait()
        self.url = self.serve.url

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_) -> None:
        self.serve.stop()
        for worker in self.workers:
            worker.process.stop()
