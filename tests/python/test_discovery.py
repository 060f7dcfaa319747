"""Workers that come and go while clients are served: real processes, found by everything that lists workers."""

import json
import os
import shutil
import threading
from pathlib import Path

import pytest
from harness.cluster import Serve, SimWorker, get_json
from harness.operator import Operator, ctl
from harness.processes import ROOT, until
from harness.talk import TEXT, Talk, prose, sealed_session
from harness.wire import chat, events, exchange

# Slow enough that a stream is still going on when its worker leaves.
SLOW = ("--speed-up", "2")
FAST = ("--speed-up", "20")


@pytest.fixture
def started():
    """What is put in here is stopped, the last one first."""
    running = []
    yield running
    for one in reversed(running):
        one.stop() if isinstance(one, Serve) else one.process.stop()


def sims(started, count: int, *flags: str) -> list[SimWorker]:
    workers = [SimWorker("hybrid", *flags) for _ in range(count)]
    started.extend(workers)
    return [worker.wait() for worker in workers]


def serve_with(started, *settings: str, workers: tuple[str, ...] = ()) -> Serve:
    serve = Serve(list(workers), settings=(TEXT, *settings))
    started.append(serve)
    serve.process.wait_for_port(serve.operator_port)
    return serve


def put(path: Path, text: str) -> None:
    """Whole, as a reader may look at any time."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def listing(*workers: SimWorker) -> str:
    return json.dumps({"workers": [{"url": worker.url} for worker in workers]})


def ready(serve: Serve) -> set[str]:
    lines = get_json(f"{serve.operator}/ownerserve/v1/workers")["workers"]
    return {line["endpoint"] for line in lines if line["health"] == "ready"}


def served(worker: SimWorker) -> float:
    pages = [line for line in worker.metrics().splitlines() if line.startswith("vllm:request_success_total{")]
    return sum(float(line.split()[-1]) for line in pages)


class Stream(threading.Thread):
    """A long answer, to its end."""

    def __init__(self, serve: Serve, session: str):
        super().__init__(daemon=True)
        self.serve, self.session = serve, session
        self.body = chat(prose(50, 7), stream=True, max_tokens=300, ignore_eos=True)
        self.start()

    def run(self) -> None:
        self.answer = exchange(self.serve.port, self.body, x_session_id=self.session)

    def text(self) -> str:
        self.join(120)
        assert not self.is_alive(), "the stream hangs"
        return said(self.answer.body)


def said(body: bytes) -> str:
    """The text of a streamed answer that came to its end."""
    got = events(body)
    assert got[-1] == "[DONE]" and not any("error" in event for event in got[:-1]), got[-2:]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in got[:-1] if event["choices"])


def test_workers_of_a_file_come_and_go_and_no_stream_notices(started, tmp_path):
    one, two = sims(started, 2, *SLOW)
    path = tmp_path / "workers.json"
    put(path, listing(one))
    serve = serve_with(started, f"discovery.workers_file={path}")
    until("the first is there", lambda: ready(serve) == {one.url})
    stream = Stream(serve, "long")
    until("it streams", lambda: one.running() == 1)
    put(path, listing(two))
    until("the workers changed", lambda: ready(serve) == {two.url})
    before = served(one)
    Talk(serve.url, "after", prose(60, 3)).say("hello")
    assert sealed_session(serve, "after")["owner"]["endpoint"] == two.url
    assert (served(one), one.running()) == (before, 1), "nothing new went to who left, and what was there goes on"
    assert stream.text() == said(exchange(two.port, stream.body).body), "nothing is lost"
    put(path, listing(two, one))
    until("it came back", lambda: ready(serve) == {one.url, two.url})
    table = ctl("--endpoint", serve.operator, "worker", "list").stdout
    assert "SOURCE" in table.split("\n")[0] and table.count(" file ") == 2, table
    assert [serve.metric("worker_changes_total", change=change) for change in ("joined", "left")] == [3, 1]


def test_a_doubt_about_a_workers_prompts_goes_when_the_worker_leaves(started, tmp_path):
    theirs = shutil.copytree(ROOT / "configs/models/tiny", tmp_path / "theirs")
    template = theirs / "chat_template.jinja"
    template.write_text("{{- 'something before all of it' -}}" + template.read_text())
    (odd,) = sims(started, 1, *FAST, "--tokenizer-dir", str(theirs))
    (sound,) = sims(started, 1, *FAST)
    path = tmp_path / "workers.json"
    put(path, listing(odd))
    serve = serve_with(started, f"discovery.workers_file={path}")
    until("it is there", lambda: ready(serve) == {odd.url})
    alarms = lambda: {alarm["alarm"] for alarm in json.loads(ctl("--endpoint", serve.operator, "alarms", "list", "-o", "json").stdout)}
    for number in range(3):
        assert exchange(serve.port, chat(prose(30, number))).status == 200
    until("it is doubted", lambda: "prefix_cache_token_count_mismatch" in alarms())
    put(path, listing(sound))
    until("the workers changed", lambda: ready(serve) == {sound.url})
    until("nothing is doubted", lambda: "prefix_cache_token_count_mismatch" not in alarms())
    assert exchange(serve.port, chat("hello")).status == 200


def test_a_broken_file_of_workers_changes_nothing_and_is_an_alarm_until_it_is_mended(started, tmp_path):
    (one,) = sims(started, 1, *FAST)
    path = tmp_path / "workers.toml"
    put(path, f'[[workers]]\nurl = "{one.url}"\n')
    serve = serve_with(started, f"discovery.workers_file={path}")
    until("it is there", lambda: ready(serve) == {one.url})
    put(path, '[[workers]]\nurl = "nowhere"\n')
    until("it is noticed", lambda: serve.metric("discovery_up", source="file") == 0)
    alarms = json.loads(ctl("--endpoint", serve.operator, "alarms", "list", "-o", "json").stdout)
    (told,) = [alarm["message"] for alarm in alarms if alarm["alarm"] == "files_workers"]
    assert "workers[0].url" in told and "accepted is" in told, told
    assert ready(serve) == {one.url}
    assert exchange(serve.port, chat("hello")).status == 200
    put(path, f'[[workers]]\nurl = "{one.url}#decode"\n')
    until("it is mended", lambda: serve.metric("discovery_up", source="file") == 1)
    role = lambda: [line["role"] for line in get_json(f"{serve.operator}/ownerserve/v1/workers")["workers"]]
    until("its role is another", lambda: role() == ["decode"])


def test_a_file_of_workers_that_is_broken_at_the_start_is_refused(started, tmp_path):
    path = tmp_path / "workers.toml"
    path.write_text("")
    serve = Serve([], settings=(f"discovery.workers_file={path}",))
    started.append(serve)
    until("it ended", lambda: not serve.process.alive())
    assert "accepted is [[workers]]" in serve.process.last_lines()


def test_a_worker_registers_stays_as_long_as_it_says_so_and_withdraws(started, tmp_path):
    (one,) = sims(started, 1, *FAST)
    tokens = tmp_path / "tokens.toml"
    tokens.write_text('[tokens]\n"watcher-of-everything" = "read"\n"boss-of-everything" = "operator"\n')
    serve = serve_with(started, f"operator.tokens_file={tokens}")
    body = {"url": one.url, "ttl": "2s"}
    assert Operator(serve.operator, "watcher-of-everything").write("POST", "registrations", body).status == 403
    boss = Operator(serve.operator, "boss-of-everything")
    mine = boss.write("POST", "registrations", body).ok()["worker"]
    listed = lambda: [(line["id"], line["health"], line["source"]) for line in boss.get("workers").ok()["workers"]]
    beats, over = [], threading.Event()

    def beat():
        while not over.wait(0.3):
            beats.append(boss.write("POST", "registrations", body).status)

    heart = threading.Thread(target=beat, daemon=True)
    heart.start()
    until("it takes work", lambda: listed() == [(mine, "ready", "api")])
    assert exchange(serve.port, chat("hello")).status == 200
    until("it has lived longer than one registration", lambda: len(beats) > 12)
    assert listed() == [(mine, "ready", "api")] and set(beats) == {200}
    over.set()
    heart.join(30)
    until("its heart stopped", lambda: listed() == [])
    assert exchange(serve.port, chat("hello")).status == 503
    ours = ("--endpoint", serve.operator, "--token", "boss-of-everything", "worker")
    assert ctl(*ours, "register", one.url, "--ttl", "10m").returncode == 0
    until("it came back", lambda: [line[1] for line in listed()] == ["ready"])
    assert boss.get("registrations").ok()["registrations"][0]["expires_in"] != "0s"
    assert ctl(*ours, "deregister", one.url).returncode == 0
    until("it is gone", lambda: listed() == [])
    wrong = ctl(*ours, "register", "nowhere")
    assert wrong.returncode == 1 and "accepted is http://HOST:PORT" in wrong.stderr
    again = ctl(*ours, "deregister", one.url)
    assert again.returncode == 1 and "not registered" in again.stderr


def test_the_addresses_of_a_name_are_workers_and_a_name_that_nobody_knows_is_an_alarm(started):
    (one,) = sims(started, 1, *FAST)
    names = f'[{{address="localhost:{one.port}", refresh_interval="1s"}}, {{address="no-such-host.invalid:80", refresh_interval="1s"}}]'
    serve = serve_with(started, f"discovery.dns={names}")
    until("it was found", lambda: ready(serve) == {one.url})
    until("the other name fails", lambda: serve.metric("discovery_up", source="dns") == 0)
    alarms = json.loads(ctl("--endpoint", serve.operator, "alarms", "list", "-o", "json").stdout)
    (told,) = [alarm["message"] for alarm in alarms if alarm["alarm"] == "discovery_dns"]
    assert "no-such-host.invalid:80 cannot be resolved" in told, told
    assert exchange(serve.port, chat("hello")).status == 200
    assert {line["source"] for line in get_json(f"{serve.operator}/ownerserve/v1/workers")["workers"]} == {"dns"}


@pytest.mark.parametrize(("setting", "told"), [
    ('discovery.dns=[{address="engines.internal"}]', "accepted is HOST:PORT"),
    ('discovery.dns=[{address="engines.internal:8000", refresh_interval="1ms"}]', "accepted is 1s to 1h"),
    ("discovery.max_registrations=5000", "accepted is 0 to 1024"),
])
def test_settings_out_of_bounds_are_refused_with_what_is_accepted(started, setting, told):
    serve = Serve([], settings=(setting,))
    started.append(serve)
    until("it ended", lambda: not serve.process.alive())
    assert told in serve.process.last_lines()


# As many as fit into the workers' KV without pushing each other out.
SESSIONS = 6


def owners(serve: Serve) -> dict[str, str]:
    lines = get_json(f"{serve.operator}/ownerserve/v1/sessions")["sessions"]
    return {line["id"]: line["owner"]["endpoint"] for line in lines if line["owner"]}


def moves(serve: Serve) -> float:
    return serve.metric("drain_sessions_total", outcome="moved")


def with_sessions(started, workers: list[SimWorker], *settings: str) -> Serve:
    serve = serve_with(started, *settings, workers=tuple(worker.url for worker in workers))
    until("all are up", lambda: ready(serve) == {worker.url for worker in workers})
    for number in range(SESSIONS):
        Talk(serve.url, f"drained-{number}", prose(200, 40 + number)).say("hello")
        sealed_session(serve, f"drained-{number}")
    assert len(owners(serve)) == SESSIONS
    return serve


def test_a_drain_moves_sessions_with_their_blocks_before_the_worker_stops(started):
    workers = sims(started, 3, *FAST)
    serve = with_sessions(started, workers)
    full = max(workers, key=lambda worker: list(owners(serve).values()).count(worker.url))
    there = [session for session, owner in owners(serve).items() if owner == full.url]
    done = ctl("--endpoint", serve.operator, "worker", "drain", full.url)
    assert done.returncode == 0 and f"{len(there)} of {len(there)} sessions moved" in done.stdout, (done.stdout, done.stderr)
    assert full.url not in owners(serve).values() and len(owners(serve)) == SESSIONS
    assert moves(serve) == len(there) and serve.metric("drain_transfer_bytes_total") > 0
    (mine,) = [line["id"] for line in get_json(f"{serve.operator}/ownerserve/v1/workers")["workers"] if line["endpoint"] == full.url]
    shown = Operator(serve.operator).get(f"workers/{mine}/drain").ok()
    assert (shown["draining"], shown["progress"]["state"], shown["progress"]["owned_sessions"]) == (True, "done", 0)
    full.process.kill()
    before = serve.metric("input_tokens_total", source="computed")
    for number in range(SESSIONS):
        talk = Talk(serve.url, f"drained-{number}", prose(200, 40 + number))
        talk.say("hello")
    assert serve.metric("input_tokens_total", source="computed") - before < SESSIONS * 60, "they find what was moved"


def test_in_a_rolling_upgrade_no_session_moves_twice_or_to_who_is_drained_next(started):
    workers = sims(started, 3, *FAST)
    serve = with_sessions(started, workers)
    listed = [worker.url for worker in workers]
    running = {}

    def upgrade():
        running["done"] = ctl("--endpoint", serve.operator, "worker", "drain", "--rolling", "--deadline", "3m", *listed)

    ctl_runs = threading.Thread(target=upgrade, daemon=True)
    ctl_runs.start()
    operator, moved = Operator(serve.operator), {}
    ids = {line["endpoint"]: line["id"] for line in operator.get("workers").ok()["workers"]}
    for at, worker in enumerate(workers):
        path = f"workers/{ids[worker.url]}/drain"
        before = owners(serve)
        until("it is empty", lambda: operator.get(path).ok()["progress"]["state"] == "done", 120)
        for session, owner in owners(serve).items():
            if before.get(session, owner) != owner and before[session] == worker.url:
                assert session not in moved, "no session moves twice"
                moved[session] = owner
                assert owner in listed[:at] or owner == listed[-1], "nobody who is drained next gets any but the last"
        worker.process.stop()
        until("it is gone", lambda: worker.url not in ready(serve))
        worker.start()
        worker.wait()
        until("it is back", lambda: worker.url in ready(serve), 120)
    ctl_runs.join(180)
    done = running["done"]
    assert done.returncode == 0 and done.stdout.count("sessions moved") == 3, (done.stdout, done.stderr)
    assert moves(serve) >= len(moved) > 0


def test_a_drain_keeps_within_its_bandwidth_and_ends_when_the_worker_is_taken_back(started):
    workers = sims(started, 2, *FAST)
    serve = with_sessions(started, workers)
    full = max(workers, key=lambda worker: list(owners(serve).values()).count(worker.url))
    count = list(owners(serve).values()).count(full.url)
    assert count >= 2
    operator = Operator(serve.operator)
    (mine,) = [line["id"] for line in operator.get("workers").ok()["workers"] if line["endpoint"] == full.url]
    path = f"workers/{mine}/drain"
    operator.write("PUT", path, {"draining": True, "bandwidth": "1B"}).ok()
    until("one was moved", lambda: operator.get(path).ok()["progress"]["moved_sessions"] == 1)
    operator.write("PUT", path, {"draining": False}).ok()
    assert list(owners(serve).values()).count(full.url) == count - 1, "the next one would have to wait for years"
    operator.write("PUT", path, {"draining": True}).ok()
    until("the others follow", lambda: operator.get(path).ok()["progress"]["state"] == "done")
    assert full.url not in owners(serve).values()
    for body, told in [({"draining": True, "bandwidth": "0B"}, "1B and more"), ({"draining": True, "upgrade_id": ""}, "1 to 128")]:
        refused = operator.write("PUT", path, body)
        assert refused.status == 400 and told in refused.json["detail"], refused
    several = ctl("--endpoint", serve.operator, "worker", "drain", *[worker.url for worker in workers])
    assert several.returncode == 2 and "--rolling" in several.stderr


def test_workers_that_are_drained_at_once_both_give_their_sessions_to_who_stays(started):
    workers = sims(started, 3, *FAST)
    serve = with_sessions(started, workers)
    *leaving, stays = [worker.url for worker in workers]
    running = [threading.Thread(target=lambda url=url: done.append(ctl("--endpoint", serve.operator, "worker", "drain", url))) for url in leaving]
    done = []
    for one in running:
        one.start()
    for one in running:
        one.join(120)
    assert [one.returncode for one in done] == [0, 0], [(one.stdout, one.stderr) for one in done]
    assert set(owners(serve).values()) == {stays} and len(owners(serve)) == SESSIONS


def test_a_drain_that_leaves_sessions_behind_says_so_to_a_script(started):
    workers = sims(started, 1, *FAST)
    serve = with_sessions(started, workers)
    (alone,) = [worker.url for worker in workers]
    nobody = "http://127.0.0.1:1"
    for listed, code, told in [((alone, alone), 2, "given twice"), ((alone, nobody), 1, "not_found")]:
        refused = ctl("--endpoint", serve.operator, "worker", "drain", "--rolling", *listed)
        assert refused.returncode == code and told in refused.stderr, refused
        assert ready(serve) == {alone}, "nothing is drained before all of the list is known"
    done = ctl("--endpoint", serve.operator, "worker", "drain", f"{alone}#hybrid")
    assert f"{SESSIONS} unmovable" in done.stdout and done.returncode == 6, done
    assert f"{SESSIONS} at {alone} (" in done.stderr and "nobody can take it" in done.stderr, done.stderr
    assert ctl("--endpoint", serve.operator, "worker", "undrain", alone).returncode == 0
    assert ctl("--endpoint", serve.operator, "worker", "drain", "--keep-sessions", alone).returncode == 0, "nothing was to be moved"
