"""A worker that answers its probes and fails what it is asked: it is left out, told of, and taken back when it is well."""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness.cluster import Serve, get_json
from harness.processes import BINARY, until
from harness.recorder import Recorder
from harness.wire import chat, events, exchange

QUICK = ("outliers.base_ejection_time=2s", "outliers.max_ejection_time=2s")


@pytest.fixture
def fleet():
    """Four recorders, and a serve in front of them."""
    recorders = [Recorder() for _ in range(4)]
    serve = Serve([recorder.url for recorder in recorders], settings=QUICK).wait()
    yield recorders, serve
    serve.stop()
    for recorder in recorders:
        recorder.stop()


def ejected(serve: Serve) -> list[str]:
    workers = get_json(f"{serve.operator}/ownerserve/v1/workers")["workers"]
    return [worker["endpoint"] for worker in workers if worker["ejection"]]


def ask(serve: Serve, count: int, **more) -> list:
    """Requests, eight at a time."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda number: exchange(serve.port, chat(f"question {number}", **more)), range(count)))


def alarms(serve: Serve) -> list[dict]:
    said = subprocess.run([BINARY, "ctl", "alarms", "list", "--endpoint", serve.operator, "-o", "json"],
                          capture_output=True, text=True, timeout=30)
    return json.loads(said.stdout)


@pytest.mark.parametrize("how", ["500", "breaks before", "breaks inside"])
def test_a_sick_worker_is_asked_a_few_times_and_then_only_by_trials(fleet, how):
    recorders, serve = fleet
    sick = recorders[0]
    if how == "500":
        sick.behaviour.status, sick.behaviour.answer = 500, {"error": {"message": "CUDA error: uncorrectable ECC error"}}
    elif how == "breaks before":
        sick.behaviour.break_before_answer = True
    else:
        sick.behaviour.break_after_events = 2
    stream = how == "breaks inside"
    until("it is ejected", lambda: ask(serve, 8, stream=stream) and ejected(serve) == [sick.url])
    before = len(sick.posts())
    answers = ask(serve, 200, stream=stream)
    assert [answer.status for answer in answers] == [200] * 200
    whole = [not stream or events(answer.body)[-1] == "[DONE]" for answer in answers]
    trials = len(sick.posts()) - before
    assert trials <= 1 + serve.metric("worker_ejections_total", reason="trial_failed"), "one trial at a time"
    assert whole.count(False) <= trials, "only a trial's client can notice"
    assert serve.metric("worker_ejected", worker=sick.url.split("//")[1]) == 1
    told = {alarm["alarm"]: alarm for alarm in alarms(serve)}
    assert told["worker_ejected"]["target"] == sick.url, told
    assert get_json(f"{serve.operator}/readyz")["degraded"][0]["reason"] == "ejected"

    sick.behaviour = type(sick.behaviour)()
    until("it is back", lambda: ask(serve, 8, stream=stream) and ejected(serve) == [])
    assert get_json(f"{serve.operator}/readyz")["degraded"] == []
    until("it takes its share", lambda: ask(serve, 8) and len(sick.posts()) > before + trials + 4)


def test_a_sick_fleet_is_asked_all_the_same(fleet):
    recorders, serve = fleet
    for recorder in recorders:
        recorder.behaviour.status, recorder.behaviour.answer = 500, {"error": {"message": "out of memory"}}
    ask(serve, 60)
    assert not ejected(serve), "what fails wherever it is asked is no worker's fault"
    for recorder in recorders[1:]:
        recorder.behaviour = type(recorder.behaviour)()
    assert [answer.status for answer in ask(serve, 40)] == [200] * 40, "whoever is ejected, nobody is refused"
