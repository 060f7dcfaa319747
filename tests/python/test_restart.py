"""kill -9 of serve under load: what was said about a session before is said after, and it goes on at its owner."""

import threading
import time
import urllib.error

import pytest
from harness.cluster import Cluster, get_json
from harness.processes import until
from harness.talk import TEXT, Talk, prose, sealed_session

SESSIONS = 8


@pytest.fixture(scope="module")
def pair():
    with Cluster("hybrid", "hybrid", "hybrid", settings=(TEXT,), sim=("--speed-up", "20")) as cluster:
        yield cluster


def one_session(serve, key: str) -> dict:
    """The session as the operator reads it, once the commit of its last step has arrived."""
    url = f"{serve.operator}/ownerserve/v1/sessions/{sealed_session(serve, key)['id']}"

    def unchanged():
        first = get_json(url)["session"]
        time.sleep(0.3)
        second = get_json(url)["session"]
        return second if first["heads"] == second["heads"] and second["in_flight_steps"] == 0 else None

    return until(f"session {key} stands still", unchanged)


def order(epoch: dict) -> tuple[int, int, int]:
    return epoch["generation"], epoch["index"], epoch["position"]


def load(url: str, stop: threading.Event) -> list[threading.Thread]:
    def run(number: int) -> None:
        talk = Talk(url, f"load-{number}", prose(400, 5000 + number))
        while not stop.is_set():
            try:
                talk.say("and on", tokens=8)
            except (OSError, urllib.error.URLError, ValueError):
                return

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(6)]
    for thread in threads:
        thread.start()
    return threads


def test_sessions_survive_a_kill_under_load(pair):
    serve = pair.serve
    talks = [Talk(pair.url, f"kept-{number}", prose(600, number)) for number in range(SESSIONS)]
    for talk in talks:
        talk.say("first")
        talk.say("second")
    before = {talk.session: one_session(serve, talk.session) for talk in talks}
    stop = threading.Event()
    threads = load(pair.url, stop)
    until("load is running", lambda: serve.metric("requests_in_flight") >= 3)
    serve.process.kill()
    stop.set()
    for thread in threads:
        thread.join(30)

    serve.start()
    serve.wait()
    for key, was in before.items():
        now = get_json(f"{serve.operator}/ownerserve/v1/sessions/{was['id']}")["session"]
        assert {"worker": now["owner"]["worker"], "incarnation": now["owner"]["incarnation"], "rank": now["owner"]["rank"]} == {
            "worker": was["owner"]["worker"], "incarnation": was["owner"]["incarnation"], "rank": was["owner"]["rank"]}, key
        assert order(now["epoch"]) >= order(was["epoch"])
        assert now["heads"] == was["heads"]

    until("owners are live again", lambda: all(one_session(serve, key)["owner"]["live"] for key in before))
    for talk in talks:
        talk.say("third")
        after = one_session(serve, talk.session)
        assert after["owner"]["worker"] == before[talk.session]["owner"]["worker"], "it left its owner"
        assert order(after["epoch"]) >= order(before[talk.session]["epoch"])
        assert after["heads"][0]["blocks"] >= before[talk.session]["heads"][0]["blocks"]
    hits = serve.metric("owner_hits_total")
    assert hits >= SESSIONS, f"{hits} of {SESSIONS} steps were served at their owners"


def test_a_second_kill_right_after_the_start_loses_nothing(pair):
    serve = pair.serve
    talk = Talk(pair.url, "twice", prose(300, 77))
    talk.say("first")
    before = one_session(serve, "twice")
    for _ in range(2):
        serve.process.kill()
        serve.start()
        serve.process.wait_for_port(serve.operator_port)
    serve.wait()
    now = get_json(f"{serve.operator}/ownerserve/v1/sessions/{before['id']}")["session"]
    assert (now["owner"]["worker"], now["heads"]) == (before["owner"]["worker"], before["heads"])
