"""Web pages of an attacker against both listeners on loopback, in a real browser.

Each refusal has its control: the same page gets through where the configuration lets it, so that the test can fail."""

import json
import urllib.error
import urllib.request

import pytest
from harness.browser import EVIL, visit
from harness.cluster import Serve
from harness.operator import Operator
from harness.recorder import Recorder

CHAT = "/v1/chat/completions"
REGISTER = "/ownerserve/v1/registrations"
ASKED = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "somebody else pays"}]})
WORKER = json.dumps({"url": "http://127.0.0.1:9", "ttl": "60s"})
JSON = {"content-type": "application/json"}

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def served():
    """Starts a recorder and the serve in front of it, with these settings."""
    started = []

    def start(*settings: str) -> tuple[Recorder, Serve]:
        recorder = Recorder()
        started.append(recorder)
        serve = Serve([recorder.url], settings=settings).wait()
        started.append(serve)
        return recorder, serve

    yield start
    for one in reversed(started):
        one.stop()


def workers(serve: Serve, token: str | None = None) -> list[str]:
    return [worker["endpoint"] for worker in Operator(serve.operator, token).get("workers").ok()["workers"]]


REBOUND_CLIENT = {
    "models": {"url": "/v1/models"},
    "chat": {"url": CHAT, "method": "POST", "headers": {**JSON, "authorization": "Bearer stolen"}, "body": ASKED},
}
REBOUND_OPERATOR = {
    "workers": {"url": "/ownerserve/v1/workers"},
    "register": {"url": REGISTER, "method": "POST", "headers": JSON, "body": WORKER},
    "mode": {"url": "/ownerserve/v1/routing", "method": "PUT", "headers": JSON, "body": '{"mode": "bypass"}'},
}


def statuses(found: dict[str, dict]) -> dict[str, int]:
    return {name: answer["status"] for name, answer in found.items()}


def test_a_page_that_rebinds_its_name_to_loopback_is_refused_by_both_listeners(served):
    recorder, serve = served()
    clients = visit(REBOUND_CLIENT, serve.port, rebound_to=serve.port)
    assert statuses(clients) == {"models": 403, "chat": 403}, clients
    error = json.loads(clients["chat"]["text"])["error"]
    assert error["code"] == "host_not_allowed" and "server.allowed_hosts" in error["message"]
    operators = visit(REBOUND_OPERATOR, serve.operator_port, rebound_to=serve.operator_port)
    assert statuses(operators) == {"workers": 403, "register": 403, "mode": 403}, operators
    problem = json.loads(operators["register"]["text"])
    assert problem["type"] == "urn:ownerserve:problem:host_not_allowed" and "server.allowed_hosts" in problem["detail"]
    assert recorder.posts() == [] and workers(serve) == [recorder.url]
    assert Operator(serve.operator).get("routing").ok()["mode"] == "active"


def test_the_same_pages_get_through_where_their_name_is_allowed(served):
    recorder, serve = served(f'server.allowed_hosts=["{EVIL}"]')
    clients = visit(REBOUND_CLIENT, serve.port, rebound_to=serve.port)
    assert statuses(clients) == {"models": 200, "chat": 200}, clients
    assert [seen.headers.get("authorization") for seen in recorder.posts()] == ["Bearer stolen"]
    operators = visit(REBOUND_OPERATOR, serve.operator_port, rebound_to=serve.operator_port)
    assert statuses(operators) == {"workers": 200, "register": 200, "mode": 200}, operators
    assert len(workers(serve)) == 2 and Operator(serve.operator).get("routing").ok()["mode"] == "bypass"


def test_with_keys_and_tokens_a_rebound_page_lacks_them(served, tmp_path):
    keys, tokens = tmp_path / "keys.toml", tmp_path / "tokens.toml"
    keys.write_text('[keys]\n"sk-a" = "team-a"\n')
    tokens.write_text('[tokens]\n"boss-of-everything" = "operator"\n')
    for secret in (keys, tokens):
        secret.chmod(0o600)
    recorder = Recorder()
    serve = Serve([recorder.url], settings=(f"auth.keys_file={keys}", f"operator.tokens_file={tokens}"))
    try:
        serve.process.wait_for_port(serve.operator_port)
        clients = visit(REBOUND_CLIENT, serve.port, rebound_to=serve.port)
        assert statuses(clients) == {"models": 401, "chat": 401}, clients
        operators = visit(REBOUND_OPERATOR, serve.operator_port, rebound_to=serve.operator_port)
        assert statuses(operators) == {"workers": 401, "register": 401, "mode": 401}, operators
        assert recorder.posts() == [] and workers(serve, "boss-of-everything") == [recorder.url]
    finally:
        serve.stop()
        recorder.stop()


def cross_site(serve: Serve) -> dict[str, dict]:
    """What a page of another site may send without asking first, and what it has to ask for."""
    plain = {"method": "POST", "mode": "no-cors", "headers": {"content-type": "text/plain"}}
    asking = {"method": "POST", "headers": JSON}
    return {
        "plain": {"url": serve.url + CHAT, **plain, "body": ASKED},
        "plain_operator": {"url": serve.operator + REGISTER, **plain, "body": WORKER},
        "preflight": {"url": serve.url + CHAT, **asking, "body": ASKED},
        "preflight_operator": {"url": serve.operator + REGISTER, **asking, "body": WORKER},
        "read": {"url": f"{serve.operator}/ownerserve/v1/workers"},
    }


def refusals(serve: Serve) -> float:
    return serve.metric("request_errors_total", error_type="origin_not_allowed")


def test_a_page_of_another_site_makes_no_engine_work_and_registers_nothing(served):
    recorder, serve = served()
    found = visit(cross_site(serve))
    # The page itself is told nothing of an answer to what it sent without asking, whatever it was.
    assert found.pop("plain")["type"] == "opaque" and found.pop("plain_operator")["type"] == "opaque"
    assert {name: answer["type"] for name, answer in found.items()} == dict.fromkeys(found, "error"), found
    assert recorder.posts() == [] and workers(serve) == [recorder.url]
    assert refusals(serve) == 2, "the POST without asking, and the preflight of the other one"


def test_a_page_of_another_site_gets_through_where_its_origin_is_allowed(served):
    # The page's port is in its origin, and nobody listens there: the browser's own resolver leads to the site.
    recorder, serve = served(f'server.allowed_origins=["http://{EVIL}:4000"]')
    found = visit(cross_site(serve), name_port=4000)
    assert found["plain"]["type"] == "opaque"
    assert [seen.body for seen in recorder.posts()] == [ASKED.encode()]
    # What has to be asked for is not answered with CORS headers, and the operators' listener takes only JSON.
    assert {found[name]["type"] for name in ("preflight", "preflight_operator", "read")} == {"error"}, found
    assert workers(serve) == [recorder.url] and refusals(serve) == 0


@pytest.mark.parametrize("listener", ["url", "operator"])
def test_a_preflight_is_refused_and_carries_no_cors_headers(served, listener):
    _, serve = served()
    path = CHAT if listener == "url" else REGISTER
    asked = {"origin": f"http://{EVIL}", "access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    request = urllib.request.Request(getattr(serve, listener) + path, headers=asked, method="OPTIONS")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=10)
    assert refused.value.code == 403
    assert not [name for name in refused.value.headers if name.lower().startswith("access-control-")]
