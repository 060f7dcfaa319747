"""`ownerserve validate-sim`: the live half really runs, and both halves serve the same steps."""

import json
import subprocess

import pytest
from harness.processes import BINARY, ROOT

TRACE = ROOT / "configs/traces/weka_cc"


def validate_sim(*words):
    return subprocess.run([BINARY, "validate-sim", *words], capture_output=True, text=True, timeout=180, check=False)


def test_both_halves_serve_the_same_steps(tmp_path):
    report = tmp_path / "report.json"
    done = validate_sim(TRACE, "--sessions", "5", "--concurrency", "3", "--max-steps", "5", "--max-pause", "0s",
                        "--repetitions", "2", "--seed", "5", "--report", report)
    assert done.returncode == 0, done.stderr
    compared = json.loads(report.read_text())
    assert compared["steps"] >= compared["measured"] > 5
    assert f"{compared['steps']} live steps" in done.stdout
    for half in ("simulated", "live"):
        assert compared["ttft"][half] > 0 and compared["computed_prompt_tokens"][half] > 10_000
        assert sum(share[half] for share in compared["actions"].values()) == pytest.approx(1)
    assert list(compared["repetitions"]) == ["5", "6"] and "repetition with seed 6" in done.stdout
    for half in ("simulated", "live"):
        means = [repetition[half] for repetition in compared["repetitions"].values()]
        assert compared["ttft"][half] == pytest.approx(sum(means) / 2)
    # Live engines wait in queues as well; what is outside of them is a part of the whole.
    assert 0 < compared["outside_engines"] < compared["ttft"]["live"]
    # Times are the machine's; what was computed is nearly all decided by the trace.
    computed = compared["computed_prompt_tokens"]
    assert computed["live"] == pytest.approx(computed["simulated"], rel=0.5)


@pytest.mark.parametrize(("words", "said"), [
    ([TRACE, "--concurrency", "60"], "sessions with steps of at most 48000 tokens, fewer than the 60 concurrent ones; accepted: a smaller --concurrency"),
    ([TRACE, "--workers", "0"], "0 is not in 1..=16"),
    ([TRACE, "--slowdown", "0"], "0 is not in 1..=4"),
    ([TRACE, "--repetitions", "17"], "17 is not in 1..=16"),
    ([TRACE, "--max-pause", "3"], "accepted is a duration with a unit, 0s to 1m"),
    (["/nowhere"], "cannot read /nowhere"),
    ([TRACE, "--report", "/nowhere/a.json"], "cannot write /nowhere/a.json"),
])
def test_what_cannot_be_compared_is_said_with_what_can(words, said):
    done = validate_sim(*words)
    assert done.returncode != 0 and said in done.stderr, done.stderr
