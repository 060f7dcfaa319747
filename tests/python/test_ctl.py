"""`ownerserve ctl` against real processes: tables for people, JSON for programs, exit codes, and bad input."""

import json
import subprocess

import pytest
from harness.cluster import Cluster
from harness.operator import Operator, ctl
from harness.talk import TEXT, Talk, prose, sealed_session


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
    (("owners",), "PREFIX"), (("leases",), "WORKER"), (("sessions",), "SESSION"), (("artifacts",), "ARTIFACT"),
    (("replicas",), "ARTIFACT"), (("intents",), "SESSION"), (("groups",), "GROUP"), (("tenants",), "TENANT"),
    (("workers",), "WORKER"), (("status",), "ENDPOINT"), (("hashkv",), "ENDPOINT"), (("member", "list"), "NODE"),
])
def test_every_list_is_a_table_for_people_and_json_for_programs(run, words, heading):
    table = run(*words)
    assert table.returncode == 0 and table.stdout.split()[0] == heading, (table.stdout, table.stderr)
    shown = run(*words, "-o", "json")
    assert shown.returncode == 0 and json.loads(shown.stdout) is not None


def test_one_of_a_list_is_shown_whole_with_its_tag(fleet, run):
    line = session_of(fleet)
    shown = run("sessions", line["id"])
    assert shown.returncode == 0 and "etag" in shown.stdout and line["heads"][0]["prefix"] in shown.stdout
    assert line["id"] in run("sessions", line["id"], "--tree").stdout
    assert json.loads(run("sessions", line["id"], "-o", "json").stdout)["session"]["id"] == line["id"]
    assert line["id"] in run("sessions", "--key", "shown", "--model", "tiny").stdout


def test_a_session_is_moved_by_url_of_its_worker_and_an_old_epoch_is_refused(fleet, run):
    line = session_of(fleet)
    other = next(worker.url for worker in fleet.workers if worker.url != line["owner"]["endpoint"])
    moved = run("migrate", line["id"], "--to", other)
    assert moved.returncode == 0 and "moved" in moved.stdout, (moved.stdout, moved.stderr)
    refused = run("migrate", line["id"], "--to", line["owner"]["endpoint"], "--epoch", "0.1.0")
    assert refused.returncode == 1 and "stale" in refused.stderr and "Read it again" in refused.stderr
    assert session_of(fleet)["owner"]["endpoint"] == other


def test_a_worker_is_drained_and_shows_as_an_alarm_until_it_is_taken_back(fleet, run):
    url = fleet.workers[0].url
    assert run("workers", "drain", url).returncode == 0
    alarms = json.loads(run("alarm", "-o", "json").stdout)
    assert [(alarm["of"], alarm["alarm"]) for alarm in alarms] == [(url, "worker_draining")]
    assert run("workers", "undrain", url).returncode == 0
    assert json.loads(run("alarm", "-o", "json").stdout) == []


def test_pages_are_followed_and_a_cut_list_says_so(fleet, run):
    for n in range(3):
        Talk(fleet.url, f"paged-{n}", prose(200, 20 + n)).say("hello")
        sealed_session(fleet.serve, f"paged-{n}")
    cut = run("sessions", "--limit", "2")
    assert len(cut.stdout.splitlines()) == 3 and "--cursor" in cut.stderr
    everything = run("sessions", "--limit", "2", "--all", "-o", "json")
    assert len(json.loads(everything.stdout)["sessions"]) == 4
    cursor = cut.stderr.split()[-1]
    assert len(run("sessions", "--limit", "2", "--cursor", cursor).stdout.splitlines()) == 3


def test_a_snapshot_is_saved_verified_and_restored(run, tmp_path):
    file, folder = tmp_path / "ledger.snapshot", tmp_path / "restored"
    saved = run("snapshot", "save", str(file))
    assert saved.returncode == 0 and "state hash" in saved.stdout, saved.stderr
    assert not list(tmp_path.glob("*.part"))
    again = run("snapshot", "save", str(file))
    assert again.returncode == 2 and "there already" in again.stderr
    assert ctl("snapshot", "verify", str(file)).returncode == 0
    restored = ctl("snapshot", "restore", str(file), "--data-dir", str(folder), "-o", "json")
    assert restored.returncode == 0 and json.loads(restored.stdout)["generation"] == 1, restored.stderr
    file.write_bytes(file.read_bytes()[:-5])
    torn = ctl("snapshot", "verify", str(file))
    assert torn.returncode == 1 and str(file) in torn.stderr


@pytest.mark.parametrize("words", [
    ("sessions", "nonsense"), ("sessions", "--limit", "0"), ("sessions", "--limit", "1001"), ("claim", "x-1", "--to", "w-1"),
    ("claim", "s-1"), ("migrate", "s-1", "--to", "nowhere"), ("release", "s-1", "--epoch", "7"), ("quota", "a", "-1"),
    ("workers", "drain"), ("member", "promote"), ("member", "promote", "x"), ("move-leader", "x"), ("colour",),
    ("completion", "cobol"), ("sessions", "--worker", "w-"), ("replicate", "a-1", "--to", "w-1", "--ttl", "0"),
    ("--endpoint", "nowhere", "status"),
])
def test_what_cannot_be_understood_is_said_and_nothing_is_sent(fleet, run, words):
    before = Operator(fleet.serve.operator).get("decisions").json, (fleet.serve.data / "audit/audit.jsonl").read_bytes()
    done = run(*words)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr) > 20, (done.returncode, done.stderr)
    after = Operator(fleet.serve.operator).get("decisions").json, (fleet.serve.data / "audit/audit.jsonl").read_bytes()
    assert before == after


@pytest.mark.parametrize(("words", "told"), [
    (("sessions", "s-1"), "No session"), (("close", "s-1"), "No session"), (("pin", "a-1"), "No artifact"),
    (("claim", "s-1", "--to", "w-1"), "not registered"), (("raise-level", "99"), "level"),
    (("member", "remove", "99"), "not a member"), (("member", "promote", "1"), "voter"), (("move-leader", "99"), "not a member"),
    (("member", "add"), "listen"), (("tenants", "--cursor", "zzz"), "cursor"), (("renew", "w-1"), "No worker"),
])
def test_what_is_refused_says_why_and_what_to_do_with_exit_code_1(run, words, told):
    done = run(*words)
    assert done.returncode == 1 and told in done.stderr and done.stdout == "", (done.returncode, done.stderr)


def test_nobody_there_is_exit_code_3_and_the_next_endpoint_is_asked(fleet):
    nobody = ctl("--endpoint", "http://127.0.0.1:9", "sessions")
    assert nobody.returncode == 3 and "OWNERSERVE_ENDPOINT" in nobody.stderr
    second = ctl("sessions", env={"OWNERSERVE_ENDPOINT": f"http://127.0.0.1:9,{fleet.serve.operator}"})
    assert second.returncode == 0 and "SESSION" in second.stdout
    some = ctl("status", env={"OWNERSERVE_ENDPOINT": f"http://127.0.0.1:9,{fleet.serve.operator}"})
    assert some.returncode == 3 and fleet.serve.operator in some.stdout
    clients = ctl("--endpoint", fleet.url, "sessions")
    assert clients.returncode == 1 and "does not speak the operator API" in clients.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_every_verb(shell):
    script = ctl("completion", shell)
    assert script.returncode == 0
    for verb in "owners", "leases", "migrate", "move-leader", "hashkv", "snapshot":
        assert verb in script.stdout
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=script.stdout, text=True, timeout=30).returncode == 0


def test_a_watch_prints_what_changes(fleet, run):
    revision = Operator(fleet.serve.operator).get("cluster").json["revision"]
    assert run("quota", "watched", "5").returncode == 0
    shown = run("watch", "--from", str(revision + 1), "--kind", "quota", "--count", "1")
    assert shown.returncode == 0 and shown.stdout.split()[1:] == ["put", "quota", "watched"], (shown.stdout, shown.stderr)
    told = run("watch", "--from", str(revision + 1), "--kind", "quota", "--count", "1", "-o", "json")
    assert json.loads(told.stdout)["changes"] == [{"op": "put", "kind": "quota", "key": "watched"}]
    wrong = run("watch", "--kind", "colour")
    assert wrong.returncode == 1 and "accepted are" in wrong.stderr
