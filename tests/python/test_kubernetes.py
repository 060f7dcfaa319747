"""Workers that are the ready endpoints of a Kubernetes service.

No cluster runs here. What answers for its API server keeps EndpointSlices, lists and watches them as the API's reference has it
(versions, bookmarks, 410 for a version that is too old, a token, TLS), and refuses what a real one would refuse.
"""

import json
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
from harness.cluster import Serve, SimWorker, get_json
from harness.operator import ctl
from harness.processes import until
from harness.talk import TEXT
from harness.wire import chat, exchange

PATH = "/apis/discovery.k8s.io/v1/namespaces/inference/endpointslices"


class Quiet(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """A client that does not trust us, or has gone, is no news."""


class ApiServer:
    """EndpointSlices of one namespace, and everything that changed since some version."""

    def __init__(self, folder):
        self.changed = threading.Condition()
        self.slices: dict[str, dict] = {}
        self.changes: list[tuple[int, str, dict]] = []
        self.version, self.oldest, self.lists, self.watches = 1, 0, 0, 0
        self.token = "first-token"
        self.open = True
        self.ca, key = folder / "ca.crt", folder / "api.key"
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
                        "-subj", "/CN=kube-apiserver", "-addext", "basicConstraints=critical,CA:FALSE", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(self.ca)],
                       check=True, capture_output=True, timeout=30)
        self.server = Quiet(("127.0.0.1", 0), self.handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.ca, key)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.server.server_port}"

    def put(self, name: str, *endpoints: dict, port: int, service: str = "engines") -> None:
        with self.changed:
            self.version += 1
            kind = "MODIFIED" if name in self.slices else "ADDED"
            self.slices[name] = {
                "kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "addressType": "IPv4",
                "metadata": {"name": name, "namespace": "inference", "resourceVersion": str(self.version),
                             "labels": {"kubernetes.io/service-name": service}},
                "endpoints": list(endpoints), "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
            }
            self.told(kind, self.slices[name])

    def delete(self, name: str) -> None:
        with self.changed:
            self.version += 1
            gone = self.slices.pop(name)
            gone["metadata"]["resourceVersion"] = str(self.version)
            self.told("DELETED", gone)

    def told(self, kind: str, slice: dict) -> None:
        self.changes.append((self.version, kind, json.loads(json.dumps(slice))))
        self.changed.notify_all()

    def compact(self) -> None:
        """Forgets all versions so far, and ends the watches."""
        with self.changed:
            self.version += 1
            self.oldest, self.changes = self.version, []
            self.changed.notify_all()

    def shut(self) -> None:
        """Refuses everything from now on, and ends the watches."""
        with self.changed:
            self.open = False
            self.changed.notify_all()

    def handler(api):
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def refuse(self, code: int, message: str) -> None:
                body = json.dumps({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message}).encode()
                self.send_response(code)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self):
                parts = urlsplit(self.path)
                asked = {name: values[0] for name, values in parse_qs(parts.query).items()}
                if self.headers["authorization"] != f"Bearer {api.token}":
                    return self.refuse(401, "Unauthorized")
                if not api.open:
                    return self.refuse(503, "apiserver is shutting down")
                if parts.path != PATH:
                    return self.refuse(403, "endpointslices.discovery.k8s.io is forbidden")
                label, service = asked["labelSelector"].split("=")
                assert label == "kubernetes.io/service-name"
                self.send_ok = lambda slice: slice["metadata"]["labels"][label] == service
                return self.watch(asked) if asked.get("watch") else self.list()

            def list(self):
                with api.changed:
                    api.lists += 1
                    items = [slice for slice in api.slices.values() if self.send_ok(slice)]
                    body = json.dumps({"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1",
                                       "metadata": {"resourceVersion": str(api.version)}, "items": items}).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def watch(self, asked):
                at = int(asked["resourceVersion"])
                self.send_response(200)
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                with api.changed:
                    api.watches += 1
                while True:
                    with api.changed:
                        api.changed.wait_for(lambda: not api.open or at < api.oldest or any(version > at for version, _, _ in api.changes), 60)
                        if not api.open:
                            break
                        if at < api.oldest:
                            self.line("ERROR", {"kind": "Status", "code": 410, "message": "too old resource version"})
                            break
                        news = [change for change in api.changes if change[0] > at]
                    for at, kind, slice in news:
                        if self.send_ok(slice):
                            self.line(kind, slice)
                        else:
                            self.line("BOOKMARK", {"kind": "EndpointSlice", "metadata": {"resourceVersion": str(at)}})
                self.wfile.write(b"0\r\n\r\n")

            def line(self, kind: str, object: dict) -> None:
                line = json.dumps({"type": kind, "object": object}).encode() + b"\n"
                # In two pieces, as a line may come.
                for piece in (line[:20], line[20:]):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                    self.wfile.flush()

        return Handler


def ready(serve: Serve) -> set[str]:
    lines = get_json(f"{serve.operator}/ownerserve/v1/workers")["workers"]
    return {line["endpoint"] for line in lines if line["health"] == "ready"}


def endpoint(**conditions) -> dict:
    return {"addresses": ["127.0.0.1"], "conditions": conditions, "targetRef": {"kind": "Pod", "name": "engine"}}


def failing(serve: Serve) -> str:
    alarms = json.loads(ctl("--endpoint", serve.operator, "alarms", "list", "-o", "json").stdout)
    # Where nothing else is there, the router is not ready, and says why.
    told = [alarm["message"] for alarm in alarms if alarm["alarm"] in ("discovery_kubernetes", "not_ready")]
    return "".join(what for what in told if "look" in what or "stay" in what)


@pytest.fixture
def stage(tmp_path):
    """An API server, a way to start routers that ask it, and two workers."""
    api, running = ApiServer(tmp_path), []
    token = tmp_path / "token"
    token.write_text("first-token\n")

    def serving(**more: str) -> Serve:
        settings = {"service": "engines", "namespace": "inference", "port": "http", "api_server": api.url,
                    "token_file": str(token), "ca_file": str(api.ca), **more}
        table = ", ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
        serve = Serve([], settings=(TEXT, f"discovery.kubernetes=[{{{table}}}]"))
        running.append(serve)
        serve.process.wait_for_port(serve.operator_port)
        return serve

    workers = [SimWorker("hybrid", "--speed-up", "20") for _ in range(2)]
    try:
        yield api, token, serving, [worker.wait() for worker in workers]
    finally:
        for serve in running:
            serve.stop()
        for worker in workers:
            worker.process.stop()
        api.server.shutdown()


def test_the_ready_endpoints_of_a_service_are_workers_as_soon_as_they_change(stage):
    api, token, serving, (one, two) = stage
    api.put("engines-a", endpoint(ready=True), port=one.port)
    api.put("others-a", endpoint(ready=True), port=1, service="others")
    serve = serving(role="decode")
    until("the first was found", lambda: ready(serve) == {one.url})
    assert exchange(serve.port, chat("hello")).status == 200
    (line,) = get_json(f"{serve.operator}/ownerserve/v1/workers")["workers"]
    assert (line["source"], line["role"]) == ("kubernetes", "decode")
    api.put("engines-b", endpoint(ready=False), port=two.port)
    api.put("engines-b", endpoint(ready=True), port=two.port)
    until("the second came", lambda: ready(serve) == {one.url, two.url})
    api.put("engines-a", endpoint(ready=True, serving=True, terminating=True), port=one.port)
    until("the first stops", lambda: ready(serve) == {two.url})
    assert (api.lists, api.watches) == (1, 1), "it watches, and does not list again"
    # The token is renewed in place, as kubelets do. The next watch has the new one.
    api.token = "second-token"
    token.write_text("second-token\n")
    api.compact()
    until("it listed again, as what it had was too old", lambda: api.lists == 2)
    api.delete("engines-b")
    until("all are gone, and that is believed", lambda: ready(serve) == set() and serve.metric("discovery_workers", source="kubernetes") == 0)
    assert serve.metric("discovery_up", source="kubernetes") == 1
    api.put("engines-a", endpoint(ready=True), port=one.port)
    until("it came back", lambda: ready(serve) == {one.url})


def test_an_api_server_that_cannot_be_asked_changes_nothing_and_is_an_alarm(stage):
    api, token, serving, (one, _) = stage
    api.put("engines-a", endpoint(ready=True), port=one.port)
    serve = serving()
    until("it was found", lambda: ready(serve) == {one.url})
    api.shut()
    until("it is told", lambda: serve.metric("discovery_up", source="kubernetes") == 0)
    assert "503: apiserver is shutting down" in failing(serve)
    assert ready(serve) == {one.url} and exchange(serve.port, chat("hello")).status == 200
    api.open = True
    until("it is mended", lambda: serve.metric("discovery_up", source="kubernetes") == 1)
    token.write_text("forged")
    api.compact()
    until("a wrong token is told", lambda: "the token is not accepted" in failing(serve))
    assert ready(serve) == {one.url}


@pytest.mark.parametrize(("setting", "told"), [
    ({"namespace": "elsewhere"}, "needs the verbs list and watch on endpointslices"),
    ({"service": "absent"}, "service absent has no EndpointSlice in namespace inference"),
    ({"port": "grpc"}, "its ports are http ("),
    ({"token_file": "/no/such/token"}, "/no/such/token cannot be read"),
])
def test_what_keeps_workers_from_being_found_is_told_with_its_cause(stage, setting, told):
    api, _, serving, (one, _) = stage
    api.put("engines-a", endpoint(ready=True), port=one.port)
    serve = serving(**setting)
    until("it fails", lambda: failing(serve))
    assert told in failing(serve), failing(serve)


def test_a_certificate_of_somebody_else_is_not_trusted(stage, tmp_path):
    api, _, serving, (one, _) = stage
    api.put("engines-a", endpoint(ready=True), port=one.port)
    (tmp_path / "other").mkdir()
    other = ApiServer(tmp_path / "other")
    serve = serving(ca_file=str(other.ca))
    until("it is told", lambda: "cannot be asked" in failing(serve) and "certificate" in failing(serve))
    assert api.lists == 0


@pytest.mark.parametrize(("setting", "told"), [
    ({"service": "Engines"}, "discovery.kubernetes.service"),
    ({"namespace": "a/b"}, "discovery.kubernetes.namespace"),
    ({"api_server": "10.0.0.1:6443"}, "accepted is https://HOST:PORT"),
])
def test_settings_that_kubernetes_would_not_accept_are_refused(setting, told):
    settings = {"service": "engines", "namespace": "inference", **setting}
    table = ", ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
    serve = Serve([], settings=(f"discovery.kubernetes=[{{{table}}}]",))
    try:
        until("it ended", lambda: not serve.process.alive())
        assert told in serve.process.last_lines()
    finally:
        serve.stop()
