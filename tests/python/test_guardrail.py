"""An action that makes sessions slower than the bypass does is given up, whatever its price says, and told."""

import json

import pytest
from harness.cluster import Serve, SimWorker
from harness.operator import Operator, ctl
from harness.talk import TEXT, Talk, busy, decisions, prose

# KV comes in at a twelfth of what it usually does.
SLOW = "link_bandwidth = \"400MB\"\nnum_gpu_blocks = 16384\n"
# Prompts are to be computed elsewhere however slow the way is; half of the sessions are the control group.
SETTINGS = (TEXT, "planner.interference_weight=20", "guardrail.control_percent=50")


@pytest.fixture
def fleet(tmp_path):
    profile = tmp_path / "slow.toml"
    profile.write_text(SLOW)
    workers = [SimWorker(role, "--profile", str(profile)).wait() for role in ("prefill", "decode")]
    serve = Serve([f"{worker.url}#{worker.role}" for worker in workers], settings=SETTINGS).wait()
    yield serve, workers[1]
    serve.stop()
    for worker in workers:
        worker.process.stop()


def test_computing_prompts_elsewhere_over_a_slow_link_is_switched_off_and_told(fleet):
    serve, decoder = fleet
    operator, asked = Operator(serve.operator), 0

    def compared() -> dict:
        lines = operator.get("guardrail").ok()["actions"]
        return next(line for line in lines if line["action"] == "remote_prefill")

    def step() -> str:
        nonlocal asked
        asked += 1
        Talk(serve.url, f"s-{asked}", prose(1500, 500 + asked)).say("What next?", tokens=2)
        return decisions(serve, 1)[0]["decision"]["plan"]["action"]

    while not compared()["disabled"]:
        assert asked < 300, compared()
        # Those who are answered end; others come.
        with busy(decoder, clients=8, words=20):
            while decoder.running() >= 8 and not compared()["disabled"] and asked < 300:
                step()
    told = compared()
    assert told["ttft_ratio_lower"] > 1 and min(told["treatment_sessions"], told["control_sessions"]) >= 20, told
    alarms = json.loads(ctl("-o", "json", "--endpoint", serve.operator, "alarms", "list").stdout)
    assert "guardrail_action_disabled" in [alarm["alarm"] for alarm in alarms], alarms
    with busy(decoder, clients=8, words=20):
        assert "remote_prefill" not in [step() for _ in range(6)]
