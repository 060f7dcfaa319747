"""Many simulated workers in few processes, and several routers that are one cluster."""

import json
import tempfile
import urllib.request
from pathlib import Path

from harness.cluster import Serve, get_json
from harness.processes import BINARY, Process, free_ports, until
from harness.talk import TEXT

# Slow enough that a step's prefill is what its first token waits for.
PROFILE = """
prefill_tokens_per_second = {prefill}
step_overhead = "1ms"
decode_step = "8ms"
decode_step_per_request = "250us"
block_size = 16
num_gpu_blocks = 4_096
max_num_seqs = 32
max_queue = 1_024
max_num_batched_tokens = 2_048
max_model_len = 32_768
default_max_tokens = 96
kv_size_per_token = "128KiB"
link_bandwidth = "12.5GB"
link_latency = "3ms"
"""


class Fleet:
    """`count` hybrid workers, at most 16 in one process. A context: everything is stopped on the way out."""

    def __init__(self, count: int, prefill: int = 8_000, flags: tuple[str, ...] = ()):
        self.folder = tempfile.TemporaryDirectory(prefix="ownerserve-fleet-")
        profile = Path(self.folder.name) / "profile.toml"
        profile.write_text(PROFILE.format(prefill=prefill))
        self.ports = free_ports(count)
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.processes = []
        for first in range(0, count, 16):
            listen = [part for port in self.ports[first:first + 16] for part in ("--listen", f"127.0.0.1:{port}")]
            argv = [str(BINARY), "sim-worker", "--role", "hybrid", "--profile", str(profile), *listen, *flags]
            self.processes.append(Process(f"fleet-{first}", argv))
        for number, port in enumerate(self.ports):
            self.processes[number // 16].wait_for_port(port)

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes:
            process.stop()
        self.folder.cleanup()


class Routers:
    """`count` routers, the first of which founded the cluster. A context like the fleet."""

    def __init__(self, fleet: Fleet, count: int, voters: int = 1, settings: tuple[str, ...] = ()):
        self.fleet = fleet
        self.settings = (TEXT, *settings)
        self.all: list[Serve] = []
        self.nodes: list[str] = []
        for _ in range(count):
            self.add()
        if voters > 1:
            self.promote(voters)

    def add(self) -> Serve:
        """One more, which joins those that are there."""
        node = f"127.0.0.1:{free_ports(1)[0]}"
        join = ("--join", self.nodes[0]) if self.nodes else ()
        serve = Serve(self.fleet.urls, "--cluster-listen", node, *join, settings=self.settings)
        self.nodes.append(node)
        self.all.append(serve)
        return serve.wait()

    def promote(self, voters: int) -> None:
        """Makes the next learners voters, all at once."""
        members = get_json(f"{self.all[0].operator}/ownerserve/v1/cluster/members")["members"]
        learners = [member["node_id"] for member in members if member["role"] == "learner"]
        body = json.dumps({"nodes": learners[:voters - 1]}).encode()
        url = f"{self.all[0].operator}/ownerserve/v1/cluster/members/promote"
        request = urllib.request.Request(url, body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200, answer.status

    def hear_each_other(self) -> None:
        """Every router has heard of what all others have in flight, and knows that all workers may own sessions."""
        wanted = len(self.all) - 1

        def heard(serve: Serve) -> bool:
            ages = [line for line in serve.metrics().splitlines() if line.startswith("ownerserve_peer_load_report_age_seconds{")]
            return len(ages) == wanted

        for serve in self.all:
            until(f"{serve.url} hears {wanted} others", lambda serve=serve: heard(serve))
            leases = len(self.fleet.urls)
            until(f"{serve.url} sees {leases} leases", lambda serve=serve: serve.metric("ledger_leases", state="held") == leases)

    def set_mode(self, mode: str, routers: list[Serve] | None = None) -> None:
        for serve in routers or self.all:
            url = f"{serve.operator}/ownerserve/v1/routing"
            body = json.dumps({"mode": mode}).encode()
            request = urllib.request.Request(url, body, {"content-type": "application/json"}, method="PUT")
            with urllib.request.urlopen(request, timeout=10) as answer:
                assert json.load(answer)["mode"] == mode

    def __enter__(self) -> "Routers":
        return self

    def __exit__(self, *_) -> None:
        for serve in self.all:
            serve.stop()
