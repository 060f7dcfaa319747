"""Full memory: a step waits rather than push out what somebody is using, and everything ends."""

import json
import subprocess
import threading
from datetime import datetime

import pytest
from harness.cluster import Serve, SimWorker
from harness.operator import Operator, ctl
from harness.processes import BINARY, until
from harness.talk import seconds
from harness.wire import connect, exchange, head

# Two sessions of 1,300 tokens do not fit beside each other: some 800 tokens would be pushed out, 80 ms of computing. What is in use costs
# 20 times that, what was left a moment ago about once.
PROFILE = "num_gpu_blocks = 128\nmax_model_len = 2048\nprefill_tokens_per_second = 10000.0\ndecode_step = \"20ms\"\n"
TOLERATED = 450_000
SETTINGS = ("models.tiny.tokenizer_dir=builtin", f"planner.admission.max_displaced_compute={TOLERATED}us")
PATH = "/v1/completions"


def body(word: str, answer: int, **fields) -> bytes:
    prompt = f"{word} " + "and a long history " * 215
    return json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": answer, "ignore_eos": True, **fields}).encode()


@pytest.fixture
def full(tmp_path):
    profile = tmp_path / "small.toml"
    profile.write_text(PROFILE)
    worker = SimWorker("hybrid", "--profile", str(profile)).wait()
    serve = Serve([worker.url], settings=SETTINGS).wait()
    operator = Operator(serve.operator)
    until("its blocks are known", lambda: operator.get("workers").ok()["workers"][0]["kv_index_state"] == "exact")
    yield serve, operator
    serve.stop()
    worker.process.stop()


class Step(threading.Thread):
    """A step whose answer is read by a thread of its own."""

    def __init__(self, serve: Serve, word: str, answer: int):
        super().__init__()
        self.serve, self.word, self.answer, self.got = serve, word, answer, None
        self.start()

    def run(self) -> None:
        self.got = exchange(self.serve.port, body(self.word, self.answer), PATH)

    def receipt(self, operator: Operator) -> dict:
        self.join(60)
        assert self.got is not None and self.got.status == 200, self.got
        return operator.get(f"decisions/{self.got.headers['x-request-id']}").ok()


def test_a_step_waits_for_another_ones_end_and_one_whose_client_leaves_is_gone(full):
    serve, operator = full
    waiting = lambda: serve.metric("admission_queue_depth")
    served = Step(serve, "first", 250)
    until("it is planned", lambda: serve.metric("pipeline_stage_duration_seconds_count", stage="plan") == 1)
    held = Step(serve, "second", 2)
    until("the second waits", lambda: waiting() == 1)
    leaves = body("third", 2)
    with connect(serve.port) as connection:
        fields = {"content-type": "application/json", "content-length": str(len(leaves))}
        connection.sendall(head("POST", PATH, fields) + leaves)
        until("the third waits, too", lambda: waiting() == 2)
        told = json.loads(ctl("-o", "json", "--endpoint", serve.operator, "cluster", "status").stdout)
        assert told[0]["answer"]["admission_queue_depth"] == 2, told
    until("the third is gone", lambda: waiting() == 1)
    assert served.is_alive() and held.is_alive(), "nothing ended meanwhile"

    first, second = served.receipt(operator), held.receipt(operator)
    assert "admission_wait" not in first and waiting() == 0
    wait, duration = second["admission_wait"], lambda receipt: seconds(receipt["observed"]["duration"])
    assert wait["outcome"] == "admitted" and seconds(wait["displaced_compute"]) > TOLERATED / 1e6, wait
    assert duration(second) > seconds(wait["duration"]) > 0
    began, ended = (datetime.fromisoformat(one["arrived_at"]).timestamp() for one in (second, first))
    assert began + seconds(wait["duration"]) + 0.05 > ended + duration(first)
    ended = [one for one in operator.get("decisions").ok()["decisions"] if one["observed"]["outcome"] == "client_disconnected"]
    assert [(one["attempts"], one["admission_wait"]["outcome"]) for one in ended] == [([], "abandoned")]
    for end, count in [("admitted", 1), ("abandoned", 1), ("max_wait_reached", 0), ("queue_full", 0)]:
        assert serve.metric("admission_wait_seconds_count", outcome=end) == count, end

    explained = ctl("--endpoint", serve.operator, "decision", "explain", second["request_id"]).stdout
    assert "until there was room; starting at once would have cost others" in explained, explained
    # What was decided in the end is what the log has, and what is planned of it again.
    again = lambda: json.loads(subprocess.run(
        [BINARY, "what-if", str(serve.data), "-o", "json"], capture_output=True, text=True, timeout=30).stdout)
    until("all are in the log", lambda: again()["active"] == 3)
    assert (again()["reproduced"], again()["unreproduced"]) == (2, 0), again()


def test_many_more_agents_than_memory_has_room_for_are_all_served(full):
    serve, operator = full

    def agent(number: int) -> None:
        for step in range(3):
            prompt = f"agent {number} " + "and a long history " * (150 + step)
            asked = json.dumps({"model": "tiny", "max_tokens": 10, "ignore_eos": True, "prompt": prompt})
            statuses.append(exchange(serve.port, asked.encode(), PATH, x_session_id=f"agent-{number}").status)

    statuses: list[int] = []
    agents = [threading.Thread(target=agent, args=(number,)) for number in range(8)]
    for thread in agents:
        thread.start()
    for thread in agents:
        thread.join(120)
    assert statuses == [200] * 24
    assert serve.metric("admission_queue_depth") == 0
    assert serve.metric("admission_wait_seconds_count", outcome="admitted") > 0
    assert operator.get("decisions").ok()["decisions"]
