"""Every dialect in which engines hand KV over, between real processes: who computes, who fetches, and what a dead peer costs."""

import os
import signal
import threading
import time
import urllib.error

import pytest
from harness.cluster import Serve, SimWorker, metric
from harness.processes import until
from harness.talk import TEXT, Talk, asked_alone, busy, decisions, post, prose

SPEED = ("--speed-up", "4")
# Who serves a step is to think much of those whose answers it would slow down: long prompts are computed elsewhere.
SETTINGS = (TEXT, "planner.interference_weight=20")


class Fleet:
    """Simulated workers of one dialect with a serve in front."""

    def __init__(self, dialect: str, *workers: tuple[str, ...]):
        self.workers = [SimWorker(role, "--kv-connector", dialect, *(flags or SPEED)) for role, *flags in workers]
        for worker in self.workers:
            worker.wait()
        self.dialect = dialect

    def serve(self, *flags: str) -> Serve:
        urls = [f"{worker.url}#{worker.role}" for worker in self.workers]
        self.front = Serve([] if flags else urls, *flags, settings=SETTINGS)
        self.front.workers = urls
        return self.front.wait()

    def stop(self) -> None:
        self.front.stop()
        for worker in self.workers:
            worker.process.stop()


@pytest.fixture
def fleet():
    fleets = []

    def of(dialect: str, *workers: tuple[str, ...]) -> Fleet:
        fleets.append(Fleet(dialect, *workers))
        return fleets[-1]

    yield of
    for one in fleets:
        one.stop()


def computed(worker: SimWorker) -> float:
    return metric(worker.metrics(), "sglang:prefill_effective_tokens_total", mode="input")


def actions(serve: Serve, count: int) -> list[str]:
    return [line["decision"]["plan"]["action"] for line in decisions(serve, count)]


def test_sglang_pairs_answer_every_prompt_as_one_worker_would(fleet):
    pair = fleet("sglang", ("prefill",), ("decode",))
    serve, (source, target) = pair.serve(), pair.workers
    talks = [Talk(serve.url, f"s-{number}", prose(40 + 300 * number, number + 1)) for number in range(4)]
    for turn in range(3):
        for talk in talks:
            talk.say(f"And turn {turn}?", tokens=12)
    talks[0].complete(prose(30, 77), tokens=5)
    assert all(answer == expected for answer, expected in asked_alone(talks, *SPEED))
    # The target has computed nothing, the source everything.
    assert computed(target) == 0 and computed(source) > 1000
    assert set(actions(serve, 13)) == {"remote_prefill"}


def test_a_client_cannot_choose_the_room(fleet):
    serve = fleet("sglang", ("prefill",), ("decode",)).serve()
    body = {"model": "tiny", "prompt": prose(50, 5), "max_tokens": 3, "temperature": 0,
            "bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 7}
    assert post(serve.url, "/v1/completions", body)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_sglang_source_is_replaced_within_our_own_patience(fleet, blow):
    # A prompt of this length takes the slow source minutes.
    pair = fleet("sglang", ("prefill", "--speed-up", "0.01"), ("decode",))
    serve, (slow, _) = pair.serve(), pair.workers
    body = {"model": "tiny", "prompt": prose(1500, 5), "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    answers = []

    def ask():
        began = time.monotonic()
        try:
            answers.append((200, post(serve.url, "/v1/completions", body), time.monotonic() - began))
        except urllib.error.HTTPError as error:
            answers.append((error.code, None, time.monotonic() - began))

    client = threading.Thread(target=ask)
    client.start()
    until("the source computes", lambda: metric(slow.metrics(), "sglang:num_running_reqs") == 1)
    os.kill(slow.process.pid, blow)
    client.join(60)
    slow.process.kill()
    # SGLang's own patience is 300 s, the simulated one's 30 s.
    assert answers and answers[0][0] in (502, 503) and answers[0][2] < 25, answers
    # As soon as there is a source again, there are answers.
    slow.flags = ("--kv-connector", "sglang", *SPEED)
    slow.start()
    slow.wait()
    until("it is met again", lambda: post(serve.url, "/v1/completions", body, timeout=60)["usage"]["completion_tokens"] == 6)


def test_mooncake_is_declared_and_its_engines_are_asked_for_their_names(fleet, tmp_path):
    pair = fleet("mooncake", ("prefill",), ("decode",))
    config = tmp_path / "ownerserve.toml"
    config.write_text("".join(
        f'[[workers]]\nurl = "{worker.url}#{worker.role}"\n'
        f'[workers.profile.link]\nconnector = "mooncake"\nbootstrap_url = "http://127.0.0.1:{worker.bootstrap}"\n'
        for worker in pair.workers))
    serve, (_, target) = pair.serve("--config", str(config)), pair.workers
    with busy(target, clients=8, words=20):
        until("the decoder answers others", lambda: target.running() >= 8)
        talks = []
        # Until the router has seen how busy the decoder is, it computes there.
        while not talks or actions(serve, 1) != ["remote_prefill"]:
            assert len(talks) < 30, actions(serve, 30)
            talks.append(Talk(serve.url, f"m-{len(talks)}", prose(1500, len(talks) + 1)))
            talks[-1].say("What next?", tokens=6)
    assert all(answer == expected for answer, expected in asked_alone(talks, *SPEED))
    fetched = metric(target.metrics(), "vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
    assert fetched > 1000, fetched
