"""The operator API of a real serve: reads, writes, tags, pages, roles, problems, the audit log."""

import json
import socket
import ssl
import subprocess
import urllib.error
import urllib.request

import pytest
from harness.cluster import Cluster, Serve, SimWorker, get_json
from harness.operator import Operator, ctl
from harness.processes import BINARY, until
from harness.talk import TEXT, Talk, prose, sealed_session, served_at
from harness.wire import connect, head
from openapi_spec_validator import OpenAPIV31SpecValidator

PROBLEM = "urn:ownerserve:problem:"
NOBODY = f"s-{1:032x}"


@pytest.fixture(scope="module")
def fleet():
    with Cluster("hybrid", "hybrid", settings=(TEXT,), sim=("--speed-up", "20")) as cluster:
        yield cluster


@pytest.fixture
def operator(fleet):
    return Operator(fleet.serve.operator)


def talked(fleet, key: str, seed: int) -> dict:
    talk = Talk(fleet.url, key, prose(400, seed))
    talk.say("hello")
    return sealed_session(fleet.serve, key)


def other_worker(fleet, line: dict) -> str:
    owners = {worker["endpoint"]: worker["id"] for worker in Operator(fleet.serve.operator).get("workers").json["workers"]}
    return next(id for endpoint, id in owners.items() if endpoint != line["owner"]["endpoint"])


def test_a_session_its_artifact_its_owner_and_its_lease_tell_the_same_story(fleet, operator):
    line = talked(fleet, "story", 1)
    session = operator.get(f"sessions/{line['id']}")
    head = session.json["session"]["heads"][-1]
    artifact = operator.get(f"artifacts/{head['artifact']}").json["artifact"]
    owners = operator.get(f"owners/{head['prefix']}").json["owners"]
    lease = operator.get(f"leases/{line['owner']['worker']}").json["lease"]
    assert artifact["owner"]["worker"] == owners[0]["owner"]["worker"] == lease["worker"] == line["owner"]["worker"]
    assert artifact["prefix"] == head["prefix"] and artifact["prefix_blocks"] == head["blocks"]
    assert lease["state"] == "held" and lease["incarnation"] == line["owner"]["incarnation"]
    assert any(found["id"] == head["artifact"] for found in operator.get(f"artifacts?session={line['id']}").json["artifacts"])
    tree = operator.get(f"sessions/{line['id']}/tree").json["branches"]
    assert [branch["id"] for branch in tree] == [line["id"]]
    for header in "ownerserve-revision", "ownerserve-term", "ownerserve-leader", "x-request-id":
        assert session.headers[header]
    assert int(session.headers["ownerserve-revision"]) == session.json["revision"]


def test_a_tag_answers_304_until_something_changes(fleet, operator):
    line = talked(fleet, "tagged", 2)
    path = f"sessions/{line['id']}"
    tag = operator.get(path).headers["etag"]
    again = operator.get(path, **{"If-None-Match": tag})
    assert (again.status, again.body) == (304, b"")
    operator.write("POST", f"{path}/release", {}, tag).ok()
    assert operator.get(path, **{"If-None-Match": tag}).status == 200


def test_migration_moves_the_blocks_first_and_the_next_step_finds_them_there(fleet, operator):
    talk = Talk(fleet.url, "moved", prose(400, 3))
    talk.say("hello")
    line = sealed_session(fleet.serve, "moved")
    target = other_worker(fleet, line)
    tag = operator.get(f"sessions/{line['id']}").headers["etag"]
    done = operator.write("POST", f"sessions/{line['id']}/migrate", {"target": {"worker": target}}, tag).ok()
    assert done["transfer"]["blocks"] == line["heads"][-1]["blocks"] and done["transfer"]["target"] == target
    assert operator.get(f"sessions/{line['id']}").json["session"]["owner"]["worker"] == target
    stale = operator.write("POST", f"sessions/{line['id']}/migrate", {"target": {"worker": line["owner"]["worker"]}}, tag)
    assert (stale.status, stale.json["type"]) == (412, PROBLEM + "precondition_failed")
    assert stale.json["epoch"] == done["epoch"]
    # The old worker's cache is as warm still: out of the way with it.
    operator.write("PUT", f"workers/{line['owner']['worker']}/drain", {"draining": True}).ok()
    try:
        talk.say("and on")
        decided = lambda: operator.get(f"decisions?session={line['id']}&limit=1").json["decisions"]
        latest = until("the step has its receipt", lambda: [it for it in decided() if it["lookup"]["owner"]["worker"] == target])[0]
    finally:
        operator.write("PUT", f"workers/{line['owner']['worker']}/drain", {"draining": False}).ok()
    assert served_at(latest["attempts"][-1]) == target
    assert latest["observed"]["cached_tokens"] >= line["heads"][-1]["tokens"] - 16


def test_a_copy_is_made_recorded_listed_and_forgotten(fleet, operator):
    line = talked(fleet, "copied", 4)
    target, artifact = other_worker(fleet, line), line["heads"][-1]["artifact"]
    done = operator.write("POST", f"artifacts/{artifact}/replicas", {"target": {"worker": target}, "ttl": "60s"}).ok()
    assert done["transfer"]["bytes"] > 0
    copies = operator.get(f"replicas?worker={target}&artifact={artifact}").json["replicas"]
    assert [copy["worker"]["worker"] for copy in copies] == [target]
    assert copies[0]["expires_in"] != "0s" and copies[0]["prefix_blocks"] == line["heads"][-1]["blocks"]
    operator.write("DELETE", f"artifacts/{artifact}/replicas/{target}").ok()
    assert operator.get(f"replicas?artifact={artifact}").json["replicas"] == []
    assert operator.write("DELETE", f"artifacts/{artifact}/replicas/{target}").status == 404


def test_blocks_that_nobody_can_move_are_not_recorded_as_moved(fleet, operator):
    line = talked(fleet, "unmovable", 5)
    operator.write("POST", f"sessions/{line['id']}/release", {}, "*").ok()
    head = line["heads"][-1]["artifact"]
    operator.write("POST", f"artifacts/{head}/release", {}, "*").ok()
    refused = operator.write("POST", f"sessions/{line['id']}/migrate", {"target": {"worker": other_worker(fleet, line)}}, "*")
    assert (refused.status, refused.json["reason"]) == (409, "transfer_not_possible")
    assert operator.get(f"sessions/{line['id']}").json["session"]["owner"] is None


def test_a_draining_worker_is_given_no_new_session_until_it_is_taken_back(fleet, operator):
    workers = operator.get("workers").json["workers"]
    drained = workers[0]
    operator.write("PUT", f"workers/{drained['id']}/drain", {"draining": True}).ok()
    try:
        assert operator.get(f"leases/{drained['id']}").json["lease"]["draining"] is True
        assert operator.get(f"workers/{drained['id']}").json["worker"]["health"] == "draining"
        for n in range(4):
            assert talked(fleet, f"while-draining-{n}", 60 + n)["owner"]["endpoint"] != drained["endpoint"]
        claimed = operator.write("POST", f"sessions/{talked(fleet, 'claimed', 70)['id']}/release", {}, "*").ok()
        assert claimed["result"]
    finally:
        operator.write("PUT", f"workers/{drained['id']}/drain", {"draining": False}).ok()
    assert operator.get(f"workers/{drained['id']}").json["worker"]["health"] == "ready"


def test_pinned_and_referenced_artifacts_are_not_evicted_and_idle_ones_are(fleet, operator):
    line = talked(fleet, "evicted", 6)
    artifact = line["heads"][-1]["artifact"]
    reasons = []
    reasons.append(operator.write("DELETE", f"artifacts/{artifact}").json["reason"])
    operator.write("PUT", f"artifacts/{artifact}/pin", {"pinned": True}).ok()
    operator.write("DELETE", f"sessions/{line['id']}").ok()
    reasons.append(operator.write("DELETE", f"artifacts/{artifact}").json["reason"])
    assert reasons == ["referenced", "pinned"]
    assert operator.get(f"artifacts/{artifact}").json["artifact"]["pinned"] is True
    operator.write("PUT", f"artifacts/{artifact}/pin", {"pinned": False}).ok()
    operator.write("DELETE", f"artifacts/{artifact}").ok()
    assert operator.get(f"artifacts/{artifact}").status == 404


def test_groups_and_quotas_are_set_and_lifted(fleet, operator):
    artifact = talked(fleet, "grouped", 7)["heads"][-1]["artifact"]
    operator.write("PUT", f"artifacts/{artifact}/group", {"group": f"g-{42:032x}"}).ok()
    groups = operator.get("groups").json["groups"]
    assert [(group["artifacts"], int(group["id"][2:], 16)) for group in groups] == [(1, 42)]
    operator.write("PUT", f"artifacts/{artifact}/group", {"group": None}).ok()
    assert operator.get("groups").json["groups"] == []
    made = operator.write("POST", "groups", {"artifacts": [artifact]}).ok()
    assert [(group["id"], group["artifacts"]) for group in operator.get("groups").json["groups"]] == [(made["group"], 1)]
    assert operator.write("POST", "groups", {}).ok()["group"] != made["group"]
    operator.write("PUT", f"artifacts/{artifact}/group", {"group": None}).ok()
    operator.write("PUT", "tenants/t%2F1/quota", {"max_entries": 3}).ok()
    assert operator.get("tenants/t%2F1").json["tenant"]["max_entries"] == 3
    assert "t/1" in [line["tenant"] for line in operator.get("tenants?has_quota=true").json["tenants"]]
    operator.write("PUT", "tenants/t%2F1/quota", {"max_entries": None}).ok()
    assert operator.get("tenants/t%2F1").json["tenant"]["max_entries"] is None


def test_pages_together_are_the_list_and_a_foreign_cursor_is_refused(fleet, operator):
    for n in range(3):
        talked(fleet, f"page-{n}", 80 + n)
    everything = [line["id"] for line in operator.get("sessions?limit=1000").json["sessions"]]
    seen, query = [], "sessions?limit=2"
    while True:
        page = operator.get(query).json
        assert len(page["sessions"]) <= 2
        seen += [line["id"] for line in page["sessions"]]
        if page["next_cursor"] is None:
            break
        foreign = operator.get(f"artifacts?cursor={page['next_cursor']}")
        assert (foreign.status, foreign.json["type"]) == (400, PROBLEM + "invalid_cursor")
        query = f"sessions?limit=2&cursor={page['next_cursor']}"
    assert seen == everything == sorted(everything)


@pytest.mark.parametrize("query", ["", "consistency=local", "consistency=linearizable", "consistency=bounded&max_staleness=1s"])
def test_a_read_is_as_fresh_as_asked(fleet, operator, query):
    assert operator.get(f"cluster?{query}").json["stale"] is False


@pytest.mark.parametrize(("method", "path", "body", "status", "word"), [
    ("GET", "sessions/nonsense", None, 400, "invalid_id"),
    ("GET", "sessions/s-95b041be", None, 400, "invalid_id"),
    ("GET", "sessions/%FF", None, 400, "invalid_id"),
    ("GET", "sessions?limit=0", None, 400, "invalid_query"),
    ("GET", "sessions?tenat=a", None, 400, "invalid_query"),
    ("GET", "sessions?cursor=zzz", None, 400, "invalid_cursor"),
    ("GET", "sessions?consistency=most", None, 400, "invalid_query"),
    ("GET", "nothing", None, 404, "unknown_path"),
    ("PUT", "sessions", {}, 405, "method_not_allowed"),
    ("POST", f"sessions/{NOBODY}/claim", {"owner": {"worker": f"w-{1:016x}"}, "x": 1}, 400, "invalid_body"),
    ("POST", f"sessions/{NOBODY}/claim", {"owner": {"worker": "x"}}, 400, "invalid_body"),
    ("POST", f"sessions/{NOBODY}/claim", {"owner": {"worker": f"w-{1:016x}"}}, 409, "conflict"),
    ("POST", f"sessions/{NOBODY}/release", {}, 404, "not_found"),
    ("PUT", "cluster/feature-level", {"feature_level": 99}, 409, "conflict"),
    ("POST", "cluster/members/promote", {"nodes": []}, 400, "invalid_body"),
    ("POST", "cluster/members/promote", {"nodes": [77]}, 404, "not_found"),
    ("PUT", "tenants/a/quota", {}, 400, "invalid_body"),
])
def test_bad_input_is_a_problem_that_says_what_to_do_and_changes_nothing(fleet, operator, method, path, body, status, word):
    before = operator.get("cluster/state-hash?consistency=linearizable").json
    got = operator.get(path) if method == "GET" else operator.write(method, path, body)
    assert (got.status, got.json["type"], got.json["status"]) == (status, PROBLEM + word, status), got.json
    assert got.headers["content-type"] == "application/problem+json" and len(got.json["detail"]) > 15
    after = operator.get("cluster/state-hash?consistency=linearizable").json
    # Leases are renewed all the time; nothing else may have happened.
    if before["revision"] == after["revision"]:
        assert before["state_hash"] == after["state_hash"]


@pytest.mark.parametrize(("method", "path", "body", "told"), [
    ("GET", "sessions?limit=many", None, "limit: accepted is a whole number"),
    ("GET", "workers?role=x", None, "role: unknown variant `x`, expected one of `prefill`, `decode`, `hybrid`"),
    ("PUT", "cluster/feature-level", {"feature_level": "2"}, "feature_level: invalid type: string \"2\", expected u32"),
    ("PUT", "cluster/feature-level", {}, "missing field `feature_level`"),
    ("PUT", "routing", {"mode": "fast"}, "mode: unknown variant `fast`, expected one of `shadow`, `bypass`, `active`"),
    ("POST", "registrations", {"url": "http://127.0.0.1:9", "ttl": 30}, "ttl: 30: accepted is a duration with its unit like \"500ms\""),
    ("POST", "registrations", {"url": "http://127.0.0.1:9", "ttl": "2h"}, "ttl: accepted is 1s to 1h"),
    ("GET", "cluster?consistency=bounded&max_staleness=500", None, "accepted is a duration with its unit"),
    ("GET", "decisions?since=1700000000000", None, "accepted is a time in UTC like \"2026-11-26T09:30:00Z\""),
])
def test_a_refusal_names_the_field_and_what_is_expected(fleet, operator, method, path, body, told):
    got = operator.get(path) if method == "GET" else operator.write(method, path, body)
    assert got.status == 400 and told in got.json["detail"], got.json


def test_a_form_of_a_web_page_changes_nothing(fleet, operator):
    got = operator.write("PUT", "routing", {"mode": "bypass"}, **{"content-type": "text/plain"})
    assert (got.status, got.json["type"]) == (415, PROBLEM + "unsupported_media_type")
    assert operator.get("routing").json["mode"] == "active"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    tokens = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    tokens.write_text('[tokens]\n"looks-at-everything" = { role = "read", name = "grafana" }\n"works-on-everything" = { role = "operator", name = "alice" }\n')
    worker = SimWorker("hybrid").wait()
    serve = Serve([worker.url], settings=(f'operator.tokens_file="{tokens}"',))
    serve.process.wait_for_port(serve.operator_port)
    yield serve, tokens
    serve.stop()
    worker.process.stop()


def degraded(serve) -> list[tuple[str, str]]:
    return [(line["component"], line["reason"]) for line in get_json(f"{serve.operator}/readyz")["degraded"]]


def test_roles_come_from_a_file_and_follow_it(guarded):
    serve, tokens = guarded
    nobody, reader, alice = (Operator(serve.operator, token) for token in (None, "looks-at-everything", "works-on-everything"))
    assert [who.get("sessions").status for who in (nobody, reader, alice)] == [401, 200, 200]
    assert [who.write("PUT", "routing", {"mode": "active"}).status for who in (nobody, reader, alice)] == [401, 403, 200]
    assert [who.get("cluster/snapshot").status for who in (nobody, reader, alice)] == [401, 403, 200]
    with Watched(serve, "kind=quota", authorization="Bearer looks-at-everything") as watch:
        tokens.write_text('[tokens]\n"new-one-of-letters" = "read"\n')
        new = Operator(serve.operator, "new-one-of-letters")
        until("the new token is known", lambda: new.get("sessions").status == 200, 20)
        assert alice.get("sessions").status == 401
        with pytest.raises(AssertionError, match="the watch ended"):
            watch.event()
    tokens.write_text("[tokens")
    until("it is said", lambda: degraded(serve) == [("files", "operator_tokens")], 20)
    assert new.get("sessions").status == 200
    tokens.write_text('[tokens]\n"looks-at-everything" = { role = "read", name = "grafana" }\n"works-on-everything" = { role = "operator", name = "alice" }\n')
    until("the old tokens are back", lambda: alice.get("sessions").status == 200, 20)
    until("nothing is wrong any more", lambda: degraded(serve) == [], 20)


def audited(serve, name: str = "audit") -> list[dict]:
    return [json.loads(line) for line in (serve.data / f"audit/{name}.jsonl").read_text().splitlines()]


def test_every_write_is_in_the_audit_log_and_no_token_anywhere(guarded):
    serve, _ = guarded
    alice = Operator(serve.operator, "works-on-everything")
    alice.write("PUT", "tenants/audited/quota", {"max_entries": 9}, **{"x-request-id": "ticket-7"}).ok()
    Operator(serve.operator, "looks-at-everything").write("PUT", "tenants/audited/quota", {"max_entries": 8})
    done, refused = (
        line for name in ("audit", "refused") for line in audited(serve, name) if line["path"].endswith("/tenants/audited/quota"))
    assert (done["actor"], done["role"], done["outcome"], done["request_id"]) == ("alice", "operator", "succeeded", "ticket-7")
    assert done["body"] == {"max_entries": 9} and done["remote_address"].startswith("127.0.0.1:")
    assert (refused["actor"], refused["outcome"], refused["status"]) == ("grafana", "forbidden", 403)
    logs = "".join(file.read_text() for file in (serve.data / "audit").iterdir()) + serve.process.log.read_text(errors="replace")
    assert "works-on-everything" not in logs
    assert "Bearer" not in logs


def test_the_log_of_the_process_does_not_repeat_the_audit_log(guarded):
    serve, _ = guarded
    alice = Operator(serve.operator, "works-on-everything")
    for n in range(50):
        alice.write("PUT", "tenants/often/quota", {"max_entries": n}).ok()
    assert (serve.data / "audit/audit.jsonl").read_text().count("/tenants/often/quota") == 50
    assert "tenants/often" not in serve.process.log.read_text(errors="replace")


def test_the_document_is_served_to_everybody_and_lists_what_there_is(guarded):
    serve, _ = guarded
    with urllib.request.urlopen(f"{serve.operator}/ownerserve/v1/openapi.json", timeout=10) as answer:
        document = json.load(answer)
    assert document["openapi"] == "3.1.0"
    assert {"/livez", "/readyz", "/ownerserve/v1/sessions/{id}/migrate"} <= set(document["paths"])
    wrong = [(list(error.path), error.message) for error in OpenAPIV31SpecValidator(document).iter_errors()]
    assert wrong == [], "it is OpenAPI 3.1 by a validator's word"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{serve.operator}/metrics", timeout=10)
    assert refused.value.code == 401


class Watched:
    """A watch on a raw connection: its events, as they come."""

    def __init__(self, serve, query: str, **headers: str):
        self.connection = connect(serve.operator_port, 15)
        self.connection.sendall(head("GET", f"/ownerserve/v1/watch?{query}", headers))
        self.stream = self.connection.makefile("rb")
        self.status = int(self.stream.readline().split()[1])
        while self.stream.readline() not in (b"\r\n", b""):
            pass

    def event(self) -> dict:
        """The next event's fields; comments, chunk sizes and empty lines are passed over."""
        fields = {}
        while "data" not in fields or "id" not in fields:
            line = self.stream.readline().decode()
            # The last chunk is an empty one.
            assert line not in ("", "0\r\n"), "the watch ended"
            name, colon, value = line.strip().partition(":")
            if colon and name in ("id", "event", "data"):
                fields[name] = value.strip()
        return {**fields, "data": json.loads(fields["data"])}

    def __enter__(self):
        return self

    def close(self) -> None:
        self.stream.close()
        self.connection.close()

    def __exit__(self, *_):
        self.close()


def test_a_watch_tells_every_revision_in_order_and_goes_on_where_it_broke(fleet, operator):
    def quota(n):
        return operator.write("PUT", "tenants/watched/quota", {"max_entries": n}).ok()["revision"]

    with Watched(fleet.serve, "kind=quota") as watch:
        wrote = [quota(n) for n in range(1, 4)]
        seen = [watch.event() for _ in wrote]
    assert [event["data"]["changes"] for event in seen] == [[{"op": "put", "kind": "quota", "key": "watched"}]] * 3
    ids = [int(event["id"]) for event in seen]
    assert ids == sorted(set(ids)) and all(event["data"]["revision"] == int(event["id"]) for event in seen)
    assert all(id <= revision for id, revision in zip(ids, wrote))
    missed = quota(4)
    with Watched(fleet.serve, "kind=quota", **{"Last-Event-ID": str(ids[0])}) as again:
        resumed = [int(again.event()["id"]) for _ in range(3)]
    assert resumed[:2] == ids[1:] and ids[2] < resumed[2] <= missed
    with Watched(fleet.serve, f"from_revision={ids[1]}&kind=quota,node") as behind:
        assert int(behind.event()["id"]) == ids[1]


def test_a_watch_that_has_nothing_to_tell_says_how_far_it_is(fleet, operator):
    with Watched(fleet.serve, "kind=node") as watch:
        wrote = operator.write("PUT", "tenants/unwatched/quota", {"max_entries": 1}).ok()["revision"]
        told = watch.event()
    assert (told["event"], int(told["id"])) == ("progress", told["data"]["revision"])
    assert told["data"]["revision"] >= wrote
    later = operator.write("PUT", "tenants/unwatched/quota", {"max_entries": 2}).ok()["revision"]
    with Watched(fleet.serve, "kind=quota", **{"Last-Event-ID": told["id"]}) as again:
        assert int(again.event()["id"]) <= later


@pytest.mark.parametrize(("query", "headers"), [
    ("from_revision=x", {}), ("from_revision=-1", {}), ("from=1", {}), ("kind=colour", {}), ("colour=red", {}), ("", {"Last-Event-ID": "x"})])
def test_a_watch_that_cannot_be_is_refused(fleet, operator, query, headers):
    assert operator.get(f"watch?{query}", **headers).status == 400


def test_revisions_that_were_compacted_answer_410_after_a_restart(tmp_path):
    worker = SimWorker("hybrid").wait()
    serve = Serve([worker.url]).wait()
    try:
        operator = Operator(serve.operator)
        operator.write("PUT", "tenants/a/quota", {"max_entries": 1}).ok()
        operator.write("POST", "cluster/snapshot", {}).ok()
        serve.process.stop()
        serve.start()
        serve.wait()
        gone = operator.get("watch?from_revision=1")
        assert (gone.status, gone.json["type"]) == (410, PROBLEM + "compacted")
        with Watched(serve, f"from_revision={gone.json['oldest_revision']}") as watch:
            assert watch.status == 200
    finally:
        serve.stop()
        worker.process.stop()


def test_there_are_only_so_many_watchers(fleet, operator):
    watches = [Watched(fleet.serve, "") for _ in range(64)]
    try:
        assert {watch.status for watch in watches} == {200}
        more = operator.get("watch")
        assert (more.status, more.json["type"]) == (429, PROBLEM + "too_many_requests")
    finally:
        for watch in watches:
            watch.close()

    def one_more():
        with Watched(fleet.serve, "") as watch:
            return watch.status == 200

    until("a place is free again", one_more, 40)


def test_a_write_under_a_key_is_done_once_and_another_one_under_it_is_refused(fleet, operator):
    def quota(n, key, fence=None):
        return operator.write("PUT", "tenants/keyed/quota", {"max_entries": n}, fence, **{"Idempotency-Key": key})

    first = quota(5, "k-1")
    assert first.status == 200 and "idempotency-replayed" not in first.headers
    operator.write("PUT", "tenants/keyed/quota", {"max_entries": 6}).ok()
    again = quota(5, "k-1")
    assert (again.status, again.body, again.headers["idempotency-replayed"]) == (200, first.body, "true")
    assert operator.get("tenants/keyed").json["tenant"]["max_entries"] == 6, "it was not done again"
    for other in quota(7, "k-1"), quota(5, "k-1", "*"):
        assert (other.status, other.json["reason"]) == (422, "idempotency_key_reused")
    assert operator.get("tenants/keyed").json["tenant"]["max_entries"] == 6
    assert quota(5, "x" * 200).status == 400
    assert quota(8, "k-2").status == 200
    def outcomes(name: str) -> list[str]:
        return [line["outcome"] for line in audited(fleet.serve, name) if line["path"].endswith("/tenants/keyed/quota")]

    assert outcomes("audit") == ["succeeded", "succeeded", "replayed", "unprocessable", "unprocessable", "succeeded"]
    assert outcomes("refused") == ["invalid_header"]


def test_an_artifact_is_as_large_as_its_tokens_are_at_the_workers(fleet, operator):
    with Cluster("hybrid", settings=('models.tiny.tokenizer_dir="builtin"',), sim=("--speed-up", "20")) as builtin:
        line = talked(builtin, "sized", 91)
        asked = Operator(builtin.serve.operator)
        artifact = asked.get(f"artifacts/{line['heads'][-1]['artifact']}").json["artifact"]
        (worker,) = asked.get("workers").json["workers"]
        assert artifact["bytes"] == artifact["prefix_tokens"] * worker["kv_bytes_per_token"]


def certificate(folder, name: str):
    """A certificate of its own for 127.0.0.1, and its key."""
    made, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
                    "-keyout", str(key), "-out", str(made), "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1",
                    "-addext", "basicConstraints=critical,CA:FALSE"],
                   check=True, capture_output=True, timeout=30)
    return made, key


def test_the_listener_speaks_tls_and_shows_a_new_certificate_without_a_restart(fleet, tmp_path):
    made, key = certificate(tmp_path, "first")
    tls = f'operator.tls={{certificate="{made}", key="{key}"}}'
    serve = Serve([fleet.workers[0].url], settings=(tls,))
    try:
        serve.process.wait_for_port(serve.operator_port)
        url = serve.operator.replace("http:", "https:")
        trusted = tmp_path / "trusted.pem"
        trusted.write_text(made.read_text())
        told = ctl("--endpoint", url, "--cacert", str(trusted), "cluster", "status")
        assert told.returncode == 0, told.stderr
        context = ssl.create_default_context(cafile=str(trusted))
        with urllib.request.urlopen(f"{url}/livez", context=context, timeout=10) as answer:
            assert answer.read() == b"ok\n"
        for refused in ctl("--endpoint", url, "cluster", "status"), ctl("--endpoint", serve.operator, "cluster", "status"):
            assert refused.returncode == 3, refused.stderr
        new, new_key = certificate(tmp_path, "second")
        key.write_text(new_key.read_text())
        made.write_text(new.read_text())
        until("the new one is shown", lambda: ctl("--endpoint", url, "--cacert", str(new), "cluster", "status").returncode == 0)
    finally:
        serve.stop()


def test_the_clients_listener_speaks_tls_and_nothing_else(fleet, tmp_path):
    made, key = certificate(tmp_path, "clients")
    serve = Serve([fleet.workers[0].url], settings=(f'proxy.tls={{certificate="{made}", key="{key}"}}',))
    try:
        serve.process.wait_for_port(serve.port)
        context = ssl.create_default_context(cafile=str(made))
        with urllib.request.urlopen(f"https://127.0.0.1:{serve.port}/livez", context=context, timeout=10) as answer:
            assert answer.status == 200
        with socket.create_connection(("127.0.0.1", serve.port), timeout=10) as plain:
            plain.sendall(b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
            assert not plain.makefile("rb").read().startswith(b"HTTP/"), "a key that is sent there goes in plain text"
    finally:
        serve.stop()


@pytest.mark.parametrize("wrong", ["listen", "operator-listen", "tokens", "certificate"])
def test_a_start_that_is_refused_founds_no_cluster(tmp_path, wrong):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        free = ["--listen", "127.0.0.1:0", "--operator-listen", "127.0.0.1:0"]
        (tmp_path / "empty").write_text("")
        given = {
            "listen": ["--listen", address, "--operator-listen", "127.0.0.1:0"],
            "operator-listen": ["--listen", "127.0.0.1:0", "--operator-listen", address],
            "tokens": [*free, "--set", f'operator.tokens_file="{tmp_path}/nothing"'],
            "certificate": [*free, "--set", f'operator.tls={{certificate="{tmp_path}/empty", key="{tmp_path}/empty"}}'],
        }[wrong]
        data = tmp_path / "data"
        done = subprocess.run([str(BINARY), "serve", "--data-dir", str(data), *given], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and len(done.stderr) > 20, done.stderr
    assert not data.exists() or not any(data.iterdir()), list(data.iterdir())
