"""`ownerserve ctl` against real processes: tables for people, JSON for programs, exit codes, and bad input."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request

import pytest
from harness.cluster import Cluster, Serve, SimWorker, get_json
from harness.operator import Operator, ctl
from harness.processes import BINARY, until
from harness.talk import TEXT, Talk, prose, sealed_session, served_at


# Whole ids of things that are not there.
SESSION, ARTIFACT, WORKER = f"s-{1:032x}", f"a-{1:032x}", f"w-{1:016x}"


@pytest.fixture(scope="module")
def fleet():
    with Cluster("hybrid", "hybrid", settings=(TEXT,), sim=("--speed-up", "20")) as cluster:
        Talk(cluster.url, "shown", prose(400, 11)).say("hello")
        sealed_session(cluster.serve, "shown")
        yield cluster


@pytest.fixture
def run(fleet):
    def run(*words: str) -> subprocess.CompletedProcess:
        return ctl("--endpoint", fleet.serve.operator, *words)

    return run


def session_of(fleet) -> dict:
    return sealed_session(fleet.serve, "shown")


@pytest.mark.parametrize(("words", "heading"), [
    (("owner", "list"), "PREFIX"), (("lease", "list"), "WORKER"), (("session", "list"), "SESSION"), (("artifact", "list"), "ARTIFACT"),
    (("replica", "list"), "ARTIFACT"), (("intent", "list"), "SESSION"), (("group", "list"), "GROUP"), (("tenant", "list"), "TENANT"),
    (("worker", "list"), "WORKER"), (("decision", "list"), "REQUEST"), (("routing", "get"), "ENDPOINT"), (("link", "list"), "ENDPOINT"),
    (("cluster", "status"), "ENDPOINT"), (("cluster", "verify"), "ENDPOINT"), (("member", "list"), "NODE"),
])
def test_every_list_is_a_table_for_people_and_json_for_programs(run, words, heading):
    table = run(*words)
    assert table.returncode == 0 and table.stdout.split()[0] == heading, (table.stdout, table.stderr)
    shown = run(*words, "-o", "json")
    assert shown.returncode == 0 and json.loads(shown.stdout) is not None


def test_one_of_a_list_is_shown_whole_with_its_tag(fleet, run):
    line = session_of(fleet)
    shown = run("session", "get", line["id"])
    assert shown.returncode == 0 and "etag" in shown.stdout and line["heads"][0]["prefix"] in shown.stdout
    assert line["id"] in run("session", "tree", line["id"]).stdout
    assert json.loads(run("session", "get", line["id"], "-o", "json").stdout)["session"]["id"] == line["id"]
    assert line["id"] in run("session", "list", "--session-key", "shown", "--model", "tiny").stdout


def test_a_session_is_moved_by_url_of_its_worker_and_an_old_epoch_is_refused(fleet, run):
    line = session_of(fleet)
    other = next(worker.url for worker in fleet.workers if worker.url != line["owner"]["endpoint"])
    moved = run("session", "migrate", line["id"], "--to", other)
    assert moved.returncode == 0 and "moved" in moved.stdout, (moved.stdout, moved.stderr)
    refused = run("session", "migrate", line["id"], "--to", line["owner"]["endpoint"], "--epoch", "0.1.0")
    assert refused.returncode == 1 and "precondition_failed" in refused.stderr and "Read it again" in refused.stderr
    assert session_of(fleet)["owner"]["endpoint"] == other


def test_a_worker_is_drained_and_shows_as_an_alarm_until_it_is_taken_back(fleet, run):
    url = fleet.workers[0].url
    assert run("worker", "drain", url, "--no-wait").returncode == 0
    told = run("alarms", "list", "-o", "json")
    assert told.returncode == 5 and "there are alarms" in told.stderr, "a script need not read the list"
    assert [(alarm["target"], alarm["alarm"]) for alarm in json.loads(told.stdout)] == [(url, "worker_draining")]
    assert run("worker", "undrain", url).returncode == 0
    calm = run("alarms", "list", "-o", "json")
    assert (calm.returncode, json.loads(calm.stdout)) == (0, [])


def test_pages_are_followed_and_a_cut_list_says_so(fleet, run):
    for n in range(3):
        Talk(fleet.url, f"paged-{n}", prose(200, 20 + n)).say("hello")
        sealed_session(fleet.serve, f"paged-{n}")
    cut = run("session", "list", "--limit", "2")
    assert len(cut.stdout.splitlines()) == 3 and "--cursor" in cut.stderr
    everything = run("session", "list", "--limit", "2", "--all", "-o", "json")
    assert len(json.loads(everything.stdout)["sessions"]) == 4
    cursor = cut.stderr.split()[-1]
    assert len(run("session", "list", "--limit", "2", "--cursor", cursor).stdout.splitlines()) == 3


def test_a_snapshot_is_saved_verified_and_restored(run, tmp_path):
    file, folder = tmp_path / "ledger.snapshot", tmp_path / "restored"
    saved = run("snapshot", "save", str(file))
    assert saved.returncode == 0 and "state hash" in saved.stdout, saved.stderr
    assert not list(tmp_path.glob("*.part"))
    again = run("snapshot", "save", str(file))
    assert again.returncode == 2 and "exists already" in again.stderr
    assert ctl("snapshot", "verify", str(file)).returncode == 0
    restored = ctl("snapshot", "restore", str(file), "--data-dir", str(folder), "-o", "json")
    assert restored.returncode == 0 and json.loads(restored.stdout)["generation"] > 1_700_000_000, restored.stderr
    file.write_bytes(file.read_bytes()[:-5])
    torn = ctl("snapshot", "verify", str(file))
    assert torn.returncode == 1 and str(file) in torn.stderr


@pytest.mark.parametrize("words", [
    ("session", "get", "nonsense"), ("session", "list", "--limit", "0"), ("session", "list", "--limit", "1001"),
    ("owner", "claim", "x-1", "--to", WORKER), ("owner", "claim", SESSION), ("session", "migrate", SESSION, "--to", "nowhere"),
    ("owner", "release", SESSION, "--epoch", "7"), ("tenant", "set-quota", "a", "-1"), ("worker", "drain"), ("member", "promote"),
    ("member", "promote", "x"), ("member", "transfer-leader", "x"), ("colour",), ("completion", "cobol"),
    ("session", "list", "--worker", "w-"), ("replica", "create", ARTIFACT, "--to", WORKER, "--ttl", "0s"),
    ("replica", "create", ARTIFACT, "--to", WORKER, "--ttl", "600"), ("session", "get", "s-1"), ("artifact", "pin", "a-1"),
    ("worker", "drain", "w-1"), ("worker", "drain", WORKER, "--bandwidth", "1000000000"), ("worker", "drain", WORKER, "--deadline", "60"),
    ("worker", "drain", WORKER, "--rolling", "--no-wait"), ("session", "list", "--worker", "w-1"), ("owner", "get", "p-1"),
    ("session", "list", "--consistency", "bounded"), ("session", "list", "--max-staleness", "1s"),
    ("session", "list", "--timeout", "soon"), ("session", "list", "--timeout", "5"), ("session", "list", "--timeout", "0ms"),
    ("routing", "set"), ("routing", "set", "--mode", "automatic"), ("routing", "set", "--rollout-percent", "101"),
    ("routing", "set", "--mode", "bypass", "--rollout-percent", "5"), ("decision", "list", "--limit", "0"),
    ("decision", "list", "--mode", "own"), ("--cacert", "/nonexistent.pem", "cluster", "status"),
    ("--endpoint", "nowhere", "cluster", "status"), ("replica", "list", "--tenant", "a"), ("lease", "list", "--worker", WORKER),
    ("intent", "list", "--model", "m"), ("worker", "list", "--session-key", "k"), ("lease", "renew", "w-nope"),
    ("group", "create", "a-1"), ("group", "assign", ARTIFACT), ("cluster", "raise-feature-level", "0"),
    # Verbs of before.
    ("sessions",), ("workers", "drain", WORKER), ("mode",), ("status",), ("hashkv",), ("alarm",), ("watch",),
])
def test_what_cannot_be_understood_is_said_and_nothing_is_sent(fleet, run, words):
    before = Operator(fleet.serve.operator).get("decisions").json, (fleet.serve.data / "audit/audit.jsonl").read_bytes()
    done = run(*words)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr) > 20, (done.returncode, done.stderr)
    after = Operator(fleet.serve.operator).get("decisions").json, (fleet.serve.data / "audit/audit.jsonl").read_bytes()
    assert before == after


@pytest.mark.parametrize(("words", "told"), [
    (("session", "get", SESSION), "No session"), (("session", "close", SESSION), "No session"), (("artifact", "pin", ARTIFACT), "No artifact"),
    (("owner", "claim", SESSION, "--to", WORKER), "not registered"), (("worker", "retire", WORKER), "No worker"),
    (("decision", "get", f"req-{1:032x}"), "No decision"), (("cluster", "raise-feature-level", "99"), "level"),
    (("member", "remove", "99"), "not a member"), (("member", "promote", "1"), "voter"), (("member", "transfer-leader", "99"), "not a member"),
    (("member", "join-command"), "listen"), (("tenant", "list", "--cursor", "zzz"), "cursor"), (("lease", "renew", WORKER), "No worker"),
])
def test_what_is_refused_says_why_and_what_to_do_with_exit_code_1(run, words, told):
    done = run(*words)
    assert done.returncode == 1 and told in done.stderr and done.stdout == "", (done.returncode, done.stderr)


def test_nobody_there_is_exit_code_3_and_the_next_endpoint_is_asked(fleet):
    nobody = ctl("--endpoint", "http://127.0.0.1:9", "session", "list")
    assert nobody.returncode == 3 and "OWNERSERVE_ENDPOINT" in nobody.stderr
    worker = ctl("lease", "renew", "w-nope")
    assert worker.returncode == 2 and worker.stderr.count("accepted is") == 1, worker.stderr
    second = ctl("session", "list", env={"OWNERSERVE_ENDPOINT": f"http://127.0.0.1:9,{fleet.serve.operator}"})
    assert second.returncode == 0 and "SESSION" in second.stdout
    some = ctl("cluster", "status", env={"OWNERSERVE_ENDPOINT": f"http://127.0.0.1:9,{fleet.serve.operator}"})
    assert some.returncode == 3 and fleet.serve.operator in some.stdout
    for empty in "", " , ":
        unset = ctl("cluster", "status", env={"OWNERSERVE_ENDPOINT": empty})
        assert unset.returncode == 2 and "OWNERSERVE_ENDPOINT is given and empty" in unset.stderr, unset
    clients = ctl("--endpoint", fleet.url, "session", "list")
    assert clients.returncode == 1 and "does not speak the operator API" in clients.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_every_verb(shell):
    script = ctl("completion", shell)
    assert script.returncode == 0
    for verb in "owner", "lease", "migrate", "transfer-leader", "raise-feature-level", "snapshot":
        assert verb in script.stdout
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=script.stdout, text=True, timeout=30).returncode == 0


def test_a_watch_prints_what_changes(fleet, run):
    revision = Operator(fleet.serve.operator).get("cluster").json["revision"]
    assert run("tenant", "set-quota", "watched", "5").returncode == 0
    shown = run("cluster", "watch", "--from-revision", str(revision + 1), "--kind", "quota", "--max-revisions", "1")
    assert shown.returncode == 0 and shown.stdout.split()[1:] == ["put", "quota", "watched"], (shown.stdout, shown.stderr)
    told = run("cluster", "watch", "--from-revision", str(revision + 1), "--kind", "quota", "--max-revisions", "1", "-o", "json")
    assert json.loads(told.stdout)["changes"] == [{"op": "put", "kind": "quota", "key": "watched"}]
    wrong = run("cluster", "watch", "--kind", "colour")
    assert wrong.returncode == 1 and "accepted are" in wrong.stderr


def test_a_watch_ends_when_nobody_reads_it_any_more(fleet, run):
    revision = Operator(fleet.serve.operator).get("cluster").json["revision"]
    assert run("tenant", "set-quota", "read-once", "5").returncode == 0
    watch = f"{BINARY} ctl --endpoint {fleet.serve.operator} cluster watch --from-revision {revision + 1}; echo ended with $? >&2"
    done = subprocess.run(["bash", "-c", f"{{ {watch}; }} | head -1"], capture_output=True, text=True, timeout=30)
    assert done.stdout.split()[1:] == ["put", "quota", "read-once"] and done.stderr == "ended with 0\n", done


def test_a_hung_node_is_told_as_silent_and_makes_nobody_else_wait(fleet):
    hung = Serve([fleet.workers[0].url]).wait()
    try:
        os.kill(hung.process.pid, signal.SIGSTOP)
        both = ("--endpoint", f"{hung.operator},{fleet.serve.operator},")
        since = time.monotonic()
        status = ctl(*both, "cluster", "status")
        assert status.returncode == 3 and hung.operator in status.stderr and fleet.serve.operator in status.stdout, status
        sessions = ctl(*both, "session", "list")
        assert sessions.returncode == 0 and "SESSION" in sessions.stdout, sessions
        alarms = json.loads(ctl(*both, "alarms", "list", "-o", "json").stdout)
        assert [alarm["target"] for alarm in alarms if alarm["alarm"] == "endpoint_unreachable"] == [hung.operator], alarms
        assert time.monotonic() - since < 60, "each waits 5 s for the hung one, not minutes"
    finally:
        os.kill(hung.process.pid, signal.SIGCONT)
        hung.stop()


def test_a_read_is_as_fresh_as_asked_and_waits_as_long_as_asked(fleet, run):
    line = session_of(fleet)
    for fresh in ("--consistency", "bounded", "--max-staleness", "5s"), ("--consistency", "linearizable"), ("--timeout", "5s"):
        assert line["id"] in run("session", "list", *fresh).stdout
        assert run("session", "get", line["id"], *fresh).returncode == 0
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        read = ctl("--endpoint", url, "session", "list", "--timeout", "300ms")
        assert read.returncode == 3 and "only a read" in read.stderr and "write may" not in read.stderr
        assert line["id"] in ctl("--endpoint", url, "--endpoint", fleet.serve.operator, "session", "list", "--timeout", "300ms").stdout
        write = ctl("--endpoint", url, "tenant", "set-quota", "a", "5", "--timeout", "300ms")
        assert write.returncode == 4 and "may or may not have been done" in write.stderr


def test_decisions_are_listed_and_shown_whole(fleet, run):
    line = session_of(fleet)
    shown = json.loads(run("decision", "list", "--session", line["id"], "-o", "json").stdout)["decisions"]
    request = shown[-1]["request_id"]
    listed = run("decision", "list", "--session", line["id"])
    assert request in listed.stdout and line["id"] in listed.stdout
    one = run("decision", "get", request)
    assert one.returncode == 0 and "decision.candidates.0" in one.stdout
    assert json.loads(run("decision", "get", request, "-o", "json").stdout)["request_id"] == request


def test_a_decision_is_explained_to_a_person_and_to_the_client_that_asks(fleet, run):
    def said(**headers: str):
        body = {"model": "tiny", "messages": [{"role": "user", "content": prose(300, 5)}], "max_tokens": 4}
        headers = {"content-type": "application/json", "x-session-id": "explained", **headers}
        request = urllib.request.Request(f"{fleet.url}/v1/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=20) as answer:
            answer.read()
            return answer.headers

    assert "x-ownerserve-decision" not in said()
    answer = said(**{"x-ownerserve-explain": "1"})
    told = dict(part.split("=") for part in answer["x-ownerserve-decision"].split("; "))
    assert (told["mode"], told["identified_by"], told["kv_index_state"]) == ("active", "token_ids", "exact"), told
    request = answer["x-request-id"]
    until("the receipt is filed", lambda: run("decision", "get", request).returncode == 0)
    one = run("decision", "explain", request)
    assert one.returncode == 0, one.stderr
    lines = {line.split()[0]: line for line in one.stdout.splitlines() if line}
    assert request in lines["request"] and told["prompt_tokens"] + " tokens" in lines["prompt"]
    # The choice is marked, and workers are told by their URLs.
    assert told["action"] in lines["*"] and "http://127.0.0.1:" in lines["*"]
    assert {"chosen", "tried", "ended", "cached"} <= lines.keys()
    assert json.loads(run("decision", "explain", request, "-o", "json").stdout)["request_id"] == request
    assert run("decision", "explain", f"req-{1:032x}").returncode == 1


def test_decisions_are_found_by_what_they_are(fleet, run):
    def found(*words: str) -> list[dict]:
        shown = run("decision", "list", "-o", "json", *words)
        assert shown.returncode == 0, shown.stderr
        answer = json.loads(shown.stdout)
        assert answer["search_complete"] is True
        return answer["decisions"]

    everything = found("--limit", "1000")
    action = everything[0]["attempts"][-1]["action"]
    worker = served_at(everything[0]["attempts"][-1])
    by_action, by_worker = found("--action", action, "--limit", "1000"), found("--worker", worker, "--limit", "1000")
    assert [one["request_id"] for one in by_action] == [
        one["request_id"] for one in everything if one["attempts"][-1]["action"] == action
    ]
    assert by_worker and all(worker in (leg["worker"] for leg in one["attempts"][-1]["legs"]) for one in by_worker)
    assert found("--slower-than", "1h") == [] and found("--tenant", "nobody") == []
    assert len(found("--since", "1h", "--limit", "1000")) == len(everything)
    modes = {mode: len(found("--mode", mode, "--limit", "1000")) for mode in ("active", "shadow", "bypass")}
    assert sum(modes.values()) == len(everything) and modes["active"] > 0
    refused = run("decision", "list", "--action", "teleport")
    assert refused.returncode == 1 and "artifact_fetch" in refused.stderr


def test_a_log_is_asked_again_what_it_was_decided_on(tmp_path):
    with Cluster("hybrid", "hybrid", settings=(TEXT, "routing.mode=shadow"), sim=("--speed-up", "20")) as cluster:
        for n in range(6):
            talk = Talk(cluster.url, f"s{n}", prose(600, n))
            talk.say("hello")
            talk.say("go on")
        data = cluster.serve.data
        until("the log is written", lambda: len((data / "decisions/decisions.jsonl").read_text().splitlines()) == 13)

        def what_if(*words: str) -> subprocess.CompletedProcess:
            return subprocess.run([BINARY, "what-if", str(data), *words], capture_output=True, text=True, timeout=30)

        shown = json.loads(what_if("-o", "json").stdout)
        assert (shown["shadow"], shown["compared"], shown["sessions"], shown["reproduced"]) == (12, 12, 6, 12), shown
        assert shown["marked_as"] == "prediction" and shown["what_if"]["ttft_mean_ms"] <= shown["as_served"]["ttft_mean_ms"]
        assert "Prediction: the time to first token is" in what_if().stdout
        gone = json.loads(what_if("-o", "json", "--exclude-worker", cluster.workers[0].url, "--exclude-worker", cluster.workers[1].url).stdout)
        assert (gone["unservable"], gone["compared"]) == (12, 0)
        for words, problem in [
            (("--exclude-worker", "http://127.0.0.1:9"), cluster.workers[0].url), (("--set", "planner.lamda=1"), "lamda"), (("--set", "proxy.listen=1"), "planner."), (("--prefill-speedup", "0"), "0.01 to 100"),
        ]:
            refused = what_if(*words)
            assert refused.returncode != 0 and problem in refused.stderr, refused.stderr
    nothing = subprocess.run([BINARY, "what-if", str(tmp_path)], capture_output=True, text=True, timeout=30)
    assert nothing.returncode == 1 and "accepted: a router's data directory" in nothing.stderr


def test_the_mode_is_shown_and_turned_at_every_endpoint(fleet, run):
    try:
        turned = run("routing", "set", "--mode", "shadow", "--rollout-percent", "40")
        assert turned.returncode == 0 and turned.stdout.splitlines()[1].split()[1:] == ["shadow", "40", "0"], turned
        assert run("routing", "get").stdout == turned.stdout
        without = run("routing", "set", "--disabled-actions", "artifact_fetch,state_migration")
        assert without.stdout.splitlines()[1].split()[3:] == ["artifact_fetch,state_migration"], without
    finally:
        back = run("routing", "set", "--mode", "active", "--rollout-percent", "100", "--disabled-actions", "none", "-o", "json")
        answer = json.loads(back.stdout)[0]["answer"]
        assert (answer["mode"], answer["disabled_actions"]) == ("active", []), back


def test_a_mode_that_is_not_turned_everywhere_says_where_it_was(fleet, run):
    nobody = "http://127.0.0.1:9"
    try:
        partly = ctl("--endpoint", nobody, "--endpoint", fleet.serve.operator, "routing", "set", "--mode", "shadow")
        assert partly.returncode == 6 and fleet.serve.operator in partly.stderr and nobody in partly.stderr, partly
        assert "shadow" in run("routing", "get").stdout
        read = ctl("--endpoint", nobody, "--endpoint", fleet.serve.operator, "routing", "get")
        assert read.returncode == 3 and "shadow" in read.stdout
        assert ctl("--endpoint", nobody, "routing", "set", "--mode", "active").returncode == 3, "nothing was changed anywhere"
    finally:
        assert run("routing", "set", "--mode", "active", "--rollout-percent", "100").returncode == 0


@pytest.mark.parametrize(("words", "code", "word"), [
    (("session", "get", SESSION), 1, "not_found"), (("session", "get", "nonsense"), 2, "usage"), (("colour",), 2, "usage"),
    (("session", "list", "--timeout", "0ms"), 2, "usage"), (("--endpoint", "http://127.0.0.1:9", "session", "list"), 3, "unreachable"),
    (("--endpoint", "http://127.0.0.1:9", "cluster", "status"), 3, "unanswered"),
])
def test_programs_get_errors_as_json(fleet, words, code, word):
    for flags in ("-o", "json"), ("--output=json",):
        done = ctl("--endpoint", fleet.serve.operator, *words, *flags) if "--endpoint" not in words else ctl(*words, *flags)
        error = json.loads(done.stderr)["error"]
        assert (done.returncode, error["exit_code"], error["word"]) == (code, code, word), done.stderr
        assert len(error["detail"]) > 15 and error["reason"] is None


def test_programs_get_the_reason_of_a_refusal(run):
    error = json.loads(run("member", "promote", "1", "-o", "json").stderr)["error"]
    assert (error["word"], error["reason"], error["exit_code"]) == ("conflict", "already_voter", 1), error


def test_a_new_group_gets_an_id_and_what_is_put_into_it(fleet, run):
    artifact = session_of(fleet)["heads"][-1]["artifact"]
    empty, other = run("group", "create"), run("group", "create")
    assert empty.returncode == 0 and empty.stdout.startswith("g-") and len(empty.stdout.strip()) == 34
    assert empty.stdout != other.stdout
    made = run("group", "create", artifact)
    assert made.returncode == 0 and made.stdout.strip() in run("group", "list").stdout, (made.stdout, made.stderr)
    assert json.loads(run("group", "create", "-o", "json").stdout)["group"].startswith("g-")
    assert run("group", "create", ARTIFACT).returncode == 1
    assert run("group", "assign", artifact, other.stdout.strip()).returncode == 0
    assert other.stdout.strip() in run("group", "list").stdout
    assert run("group", "unassign", artifact).returncode == 0


def test_a_wrong_token_is_a_refusal_and_not_silence(fleet, tmp_path):
    tokens = tmp_path / "tokens.toml"
    tokens.write_text('[tokens]\n"right-of-letters" = "operator"\n')
    serve = Serve([fleet.workers[0].url], settings=(f'operator.tokens_file="{tokens}"',))
    try:
        serve.process.wait_for_port(serve.operator_port)
        for words in ("cluster", "status"), ("cluster", "verify"), ("session", "list"), ("routing", "get"):
            wrong = ctl("--endpoint", serve.operator, "--token", "wrong", *words)
            assert wrong.returncode == 1 and "OWNERSERVE_TOKEN" in wrong.stderr, (words, wrong.stderr)
        assert ctl("--endpoint", serve.operator, "--token", "right-of-letters", "cluster", "status").returncode == 0
    finally:
        serve.stop()


def test_a_worker_that_is_gone_is_retired_and_one_that_answers_is_not(fleet):
    worker = SimWorker("hybrid", "--speed-up", "20").wait()
    serve = Serve([worker.url]).wait()
    try:
        run = lambda *words: ctl("--endpoint", serve.operator, *words)  # noqa: E731
        refused = run("worker", "retire", worker.url)
        assert refused.returncode == 1 and "would be registered again" in refused.stderr
        worker.process.kill()
        until("it is missed", lambda: serve.workers_up() == 0)
        doubt = until("why is said", lambda: get_json(f"{serve.operator}/ownerserve/v1/workers")["workers"][0]["kv_index_reason"])
        assert "GET /health" in doubt and "events" not in doubt, doubt
        assert run("worker", "retire", worker.url).returncode == 0
        lease = json.loads(run("lease", "get", worker.url, "-o", "json").stdout)["lease"]
        assert lease["state"] == "retired"
    finally:
        serve.stop()
        worker.process.stop()
