"""NIXL's bidirectional mode between real processes: what the target has computed comes back for the next step's prefill leg."""

import json
import os
import signal
import urllib.request

import pytest
from harness.cluster import Serve, SimWorker, metric
from harness.processes import until
from harness.talk import TEXT, Talk, asked_alone, busy, decisions, post, prose

SPEED = ("--speed-up", "4")
FATES = ("pulled", "failed", "prompt_mismatch", "unusable")


class Long(Talk):
    """A conversation whose answers are long enough to be fetched rather than computed."""

    def say(self, text: str, tokens: int = 90) -> str:
        self.messages.append({"role": "user", "content": text})
        body = {"model": "tiny", "messages": list(self.messages), "max_tokens": tokens, "min_tokens": tokens, "temperature": 0}
        answer = post(self.url, "/v1/chat/completions", body, self.session)["choices"][0]["message"]["content"]
        self.asked.append(("/v1/chat/completions", body, answer))
        self.messages.append({"role": "assistant", "content": answer})
        return answer


class Pair:
    """A prefill and a decode worker, which declare the mode unless told otherwise, with a serve in front."""

    def __init__(self, folder, declared: str = "nixl_bidirectional"):
        self.source, self.target = [SimWorker(role, "--kv-connector", "nixl_bidirectional", *SPEED).wait() for role in ("prefill", "decode")]
        config = folder / "ownerserve.toml"
        config.write_text("".join(
            f'[[workers]]\nurl = "{worker.url}#{worker.role}"\n[workers.profile.link]\nconnector = "{declared}"\n'
            for worker in (self.source, self.target)))
        # Who serves a step is to think much of those whose answers it would slow down: prompts are computed elsewhere.
        self.serve = Serve([], "--config", str(config), settings=(TEXT, "planner.interference_weight=50"))
        self.serve.workers = [self.source.url, self.target.url]
        self.serve.wait()

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_) -> None:
        self.serve.stop()
        for worker in (self.source, self.target):
            worker.process.stop()

    def fates(self) -> dict[str, float]:
        return {fate: self.serve.metric("reverse_pulls_total", outcome=fate) for fate in FATES}

    def fetched(self) -> float:
        return metric(self.source.metrics(), "vllm:prompt_tokens_by_source_total", source="external_kv_transfer")

    def begun(self, first: int) -> Talk:
        """A conversation whose first step was computed at one worker and answered by the other."""
        for seed in range(first, first + 30):
            talk = Long(self.serve.url, f"b-{seed}", prose(600, seed))
            talk.say("What next?")
            if decisions(self.serve, 1)[0]["decision"]["plan"]["action"] == "remote_prefill":
                return talk
        raise AssertionError("no prompt was computed elsewhere")

    def goes_on(self, talk: Talk) -> dict:
        talk.say(prose(600, 900), tokens=12)
        receipt = decisions(self.serve, 1)[0]
        assert receipt["decision"]["plan"]["action"] == "remote_prefill", receipt["decision"]
        return receipt


@pytest.fixture
def pair(tmp_path):
    with Pair(tmp_path) as one, busy(one.target, clients=8, words=20):
        until("the decoder answers others", lambda: one.target.running() >= 8)
        yield one


def test_the_next_steps_source_fetches_what_the_target_has_computed(pair):
    talk = pair.begun(1)
    assert pair.fetched() == 0
    receipt = pair.goes_on(talk)
    assert [attempt["events"] for attempt in receipt["attempts"]] == [[]]
    assert pair.fates()["pulled"] == 1
    assert pair.fetched() >= 64, "the answer was not computed again"
    assert all(answer == expected for answer, expected in asked_alone([talk], *SPEED))


def test_a_history_that_was_changed_is_computed(pair):
    talk = pair.begun(101)
    talk.messages[-1]["content"] = "Something else. " + talk.messages[-1]["content"]
    pair.goes_on(talk)
    assert (pair.fates()["prompt_mismatch"], pair.fetched()) == (1, 0)
    assert all(answer == expected for answer, expected in asked_alone([talk], *SPEED))


def test_what_is_handed_back_is_used_once(pair):
    talk = pair.begun(201)
    messages = list(talk.messages)
    pair.goes_on(talk)
    once = pair.fetched()
    # The same step again, which is another branch of the session now.
    talk.messages = [*messages, {"role": "user", "content": "Or rather " + prose(600, 950)}]
    body = {"model": "tiny", "messages": talk.messages, "max_tokens": 12, "temperature": 0}
    answer = post(pair.serve.url, "/v1/chat/completions", body, talk.session)["choices"][0]["message"]["content"]
    talk.asked.append(("/v1/chat/completions", body, answer))
    assert decisions(pair.serve, 1)[0]["decision"]["plan"]["action"] == "remote_prefill", "it could have been fetched"
    assert (pair.fates()["pulled"], pair.fetched()) == (1, once)
    assert all(answer == expected for answer, expected in asked_alone([talk], *SPEED))


@pytest.mark.parametrize("stream", [False, True])
def test_no_client_sees_parameters_or_ids_that_it_has_not_asked_for(pair, stream):
    begun = 0
    for seed in range(301, 330):
        body = {"model": "tiny", "prompt": prose(600, seed), "max_tokens": 8, "temperature": 0, "stream": stream}
        request = urllib.request.Request(
            pair.serve.url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read().decode()
        assert "remote_" not in text
        for line in [text] if not stream else [line[6:] for line in text.splitlines() if line.startswith("data: {")]:
            for choice in json.loads(line)["choices"]:
                assert (choice.get("token_ids"), choice.get("prompt_token_ids")) == (None, None)
        begun += decisions(pair.serve, 1)[0]["decision"]["plan"]["action"] == "remote_prefill"
        if begun == 2:
            return
    raise AssertionError("no prompt was computed elsewhere")


def test_ids_that_a_client_asks_for_come(pair):
    for seed in range(401, 430):
        body = {"model": "tiny", "prompt": prose(600, seed), "max_tokens": 8, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True}
        answer = post(pair.serve.url, "/v1/completions", body)
        assert len(answer["choices"][0]["token_ids"]) == 8 and answer.get("kv_transfer_params") is None
        if decisions(pair.serve, 1)[0]["decision"]["plan"]["action"] == "remote_prefill":
            return
    raise AssertionError("no prompt was computed elsewhere")


def test_a_target_that_is_gone_costs_the_computing(tmp_path):
    with Pair(tmp_path) as pair:
        with busy(pair.target, clients=8, words=20):
            until("the decoder answers others", lambda: pair.target.running() >= 8)
            talk = pair.begun(501)
        os.kill(pair.target.process.pid, signal.SIGKILL)
        pair.target.process.kill()
        pair.target.start()
        pair.target.wait()
        until("it is back", lambda: pair.serve.workers_up() == 2)
        with busy(pair.target, clients=8, words=20):
            until("the decoder answers others", lambda: pair.target.running() >= 8)
            talk.say(prose(600, 900), tokens=12)
        assert (pair.fates()["pulled"], pair.fetched()) == (0, 0)
        assert all(answer == expected for answer, expected in asked_alone([talk], *SPEED))


def test_workers_that_do_not_declare_the_mode_get_nothing_back(tmp_path):
    with Pair(tmp_path, declared="nixl") as pair, busy(pair.target, clients=8, words=20):
        until("the decoder answers others", lambda: pair.target.running() >= 8)
        talk = pair.begun(601)
        pair.goes_on(talk)
        assert (sum(pair.fates().values()), pair.fetched()) == (0, 0)
        assert all(answer == expected for answer, expected in asked_alone([talk], *SPEED))
