"""Starts workers, serve and Prometheus on loopback, makes every kind of traffic, and asks each query of the dashboard.

A query passes when it returns at least one series with a number. Only the standard library is used.
"""

import json
import math
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from harness.cluster import MODEL, Cluster, Serve
from harness.processes import ROOT, Process, free_ports, until

DASHBOARD = ROOT / "configs/grafana/ownerserve.json"
SECONDS_OF_TRAFFIC = 12
# What Grafana puts in for a range that is scraped every second.
VARIABLES = {"$__rate_interval": "30s", "$__interval": "1s", "$__range": "60s"}
ROLES = ("prefill", "decode", "decode", "hybrid", "hybrid")
SETTINGS = (f"models.{MODEL}.tokenizer_dir=builtin",)


def main() -> int:
    (node,) = free_ports(1)
    flags = ("--cluster-listen", f"127.0.0.1:{node}")
    with Cluster(*ROLES, settings=SETTINGS, flags=flags, sim=("--speed-up", "10")) as cluster, tempfile.TemporaryDirectory() as folder:
        other = second_router(cluster, node)
        prometheus = start_prometheus([cluster.serve.operator_port, other.operator_port], Path(folder))
        try:
            until("Prometheus scrapes", lambda: len(values(ask(prometheus.url, "up == 1"))) == 2)
            Traffic(cluster).run(SECONDS_OF_TRAFFIC)
            problems = lint(cluster.serve.metrics()) + unanswered(prometheus.url)
        finally:
            prometheus.process.stop()
            other.stop()
    for problem in problems:
        print(problem)
    return 1 if problems else 0


class Prometheus:
    """The process and where it answers."""

    def __init__(self, process: Process, url: str):
        self.process, self.url = process, url


def second_router(cluster: Cluster, node: int) -> Serve:
    """A learner beside the first: there are numbers of what routers tell each other."""
    (own,) = free_ports(1)
    flags = ("--cluster-listen", f"127.0.0.1:{own}", "--join", f"127.0.0.1:{node}")
    return Serve(cluster.serve.workers, *flags, settings=SETTINGS)


def start_prometheus(operator_ports: list[int], folder: Path) -> Prometheus:
    config = folder / "prometheus.yml"
    targets = ", ".join(f"'127.0.0.1:{port}'" for port in operator_ports)
    config.write_text(
        "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
        f"scrape_configs: [{{job_name: ownerserve, static_configs: [{{targets: [{targets}]}}]}}]\n")
    (port,) = free_ports(1)
    process = Process("prometheus", [
        "prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"])
    process.wait_for_port(port)
    return Prometheus(process, f"http://127.0.0.1:{port}")


def ask(url: str, query: str) -> dict:
    """Prometheus' answer to an instant query; its own words where it refuses the query."""
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}", timeout=10) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.load(error)


def values(answer: dict) -> list[float]:
    """The numbers of an answer; NaN, which is what dividing nothing by nothing gives, is none."""
    if answer["status"] != "success":
        return []
    return [value for series in answer["data"]["result"] if not math.isnan(value := float(series["value"][1]))]


def dashboard_queries() -> list[tuple[str, str]]:
    """Each panel's title with each of its queries, panels inside of rows included."""
    found = []

    def walk(panels: list) -> None:
        for panel in panels:
            found.extend((panel.get("title", "?"), target["expr"]) for target in panel.get("targets", []))
            walk(panel.get("panels", []))

    walk(json.loads(DASHBOARD.read_text())["panels"])
    return found


def unanswered(url: str) -> list[str]:
    """A line for each query of the dashboard that gives no number."""
    queries = dashboard_queries()
    assert queries, "the dashboard holds no query"
    problems = []
    for title, query in queries:
        for variable, value in VARIABLES.items():
            query = query.replace(variable, value)
        answer = ask(url, query)
        if not values(answer):
            problems.append(f"{title}: {query}: {answer.get('error', 'no data')}")
    print(f"{len(queries) - len(problems)} of {len(queries)} queries return data")
    return problems


def lint(page: str) -> list[str]:
    """What Prometheus' own tool says about the names, types and help texts of our metrics."""
    said = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, timeout=60)
    return [f"/metrics: {line}" for line in (said.stdout + said.stderr).splitlines() if line.strip()]


def spoken(stream: str) -> str:
    """The text of a streamed chat answer."""
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event).get("choices", [])]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


class Traffic:
    """Sessions that go well, and everything that does not: each family of metrics has something to count."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self.over = threading.Event()

    def run(self, seconds: float) -> None:
        jobs = [lambda number=number: self.converse(number) for number in range(6)] + [self.misbehave]
        threads = [threading.Thread(target=job, daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        time.sleep(seconds / 2)
        # A worker dies: its steps are tried again elsewhere, and its streams go on there.
        long = [threading.Thread(target=self.listen, args=(number,), daemon=True) for number in range(12)]
        threads += long
        for thread in long:
            thread.start()
        time.sleep(1)
        max(self.cluster.workers[1:], key=lambda worker: worker.running()).process.kill()
        time.sleep(seconds / 2)
        self.over.set()
        for thread in threads:
            thread.join(30)
        # The last numbers are scraped.
        time.sleep(2.5)

    def converse(self, number: int) -> None:
        """A session that grows step by step, and starts over when it is long."""
        messages = []
        while not self.over.is_set():
            messages.append({"role": "user", "content": f"session {number} wants to know more about flights " * 20})
            # Only a stream has a first token of its own.
            answer = self.post({"messages": messages, "max_tokens": 12, "stream": True}, f"prometheus-{number}")
            text = spoken(answer) or "nothing"
            messages.append({"role": "assistant", "content": text})
            if len(messages) > 30:
                messages.clear()
            self.over.wait(0.05)

    def listen(self, number: int) -> None:
        """A long answer."""
        text = f"tell me everything about flight {number}"
        self.post({"messages": [{"role": "user", "content": text}], "max_tokens": 2000, "ignore_eos": True, "stream": True})

    def misbehave(self) -> None:
        """Requests that are refused, or served with less knowledge."""
        hello = [{"role": "user", "content": "hello"}]
        picture = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
        while not self.over.is_set():
            self.post({"messages": hello, "model": "no-such-model"})
            self.post({"messages": "nonsense"})
            self.post({"messages": hello, "max_tokens": 4, "kv_transfer_params": {"do_remote_prefill": True}})
            self.post({"messages": [{"role": "user", "content": picture}], "max_tokens": 4})
            self.over.wait(0.3)

    def post(self, body: dict, session: str | None = None) -> str:
        """The answer's text, empty for an error."""
        headers = {"content-type": "application/json"} | ({"x-session-id": session} if session else {})
        data = json.dumps({"model": MODEL, **body}).encode()
        request = urllib.request.Request(f"{self.cluster.url}/v1/chat/completions", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.read().decode()
        except (urllib.error.URLError, OSError):
            return ""


if __name__ == "__main__":
    sys.exit(main())
