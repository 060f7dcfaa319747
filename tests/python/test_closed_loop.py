"""`ownerserve closed-loop`: the live half really runs, and both halves serve the same steps."""

import json
import subprocess

import pytest
from harness.processes import BINARY, ROOT

TRACE = ROOT / "configs/traces/weka_cc"


def closed_loop(*words):
    return subprocess.run([BINARY, "closed-loop", *words], capture_output=True, text=True, timeout=180, check=False)


def test_both_halves_serve_the_same_steps(tmp_path):
    report = tmp_path / "report.json"
    done = closed_loop(TRACE, "--sessions", "5", "--load", "3", "--steps", "5", "--longest-pause", "0", "--orders", "2",
                       "--seed", "5", "--report", report)
    assert done.returncode == 0, done.stderr
    compared = json.loads(report.read_text())
    assert compared["steps"] >= compared["measured"] > 5
    assert f"{compared['steps']} live steps" in done.stdout
    for half in ("simulated", "live"):
        assert compared["first_token"][half] > 0 and compared["computed"][half] > 10_000
        assert sum(share[half] for share in compared["actions"].values()) == pytest.approx(1)
    assert list(compared["orders"]) == ["5", "6"] and "order of seed 6" in done.stdout
    for half in ("simulated", "live"):
        means = [order[half] for order in compared["orders"].values()]
        assert compared["first_token"][half] == pytest.approx(sum(means) / 2)
    # Live engines wait in queues as well; what is outside of them is a part of the whole.
    assert 0 < compared["outside"] < compared["first_token"]["live"]
    # Times are the machine's; what was computed is nearly all decided by the trace.
    assert compared["computed"]["live"] == pytest.approx(compared["computed"]["simulated"], rel=0.5)


@pytest.mark.parametrize(("words", "said"), [
    ([TRACE, "--load", "60"], "sessions with steps of at most 48000 tokens, and 60 are to run at once; accepted: a smaller --load"),
    ([TRACE, "--workers", "0"], "0 is not in 1..=16"),
    ([TRACE, "--slower", "0"], "0 is not in 1..=4"),
    ([TRACE, "--orders", "17"], "17 is not in 1..=16"),
    (["/nowhere"], "cannot read /nowhere"),
    ([TRACE, "--report", "/nowhere/a.json"], "cannot write /nowhere/a.json"),
])
def test_what_cannot_be_compared_is_said_with_what_can(words, said):
    done = closed_loop(*words)
    assert done.returncode != 0 and said in done.stderr, done.stderr
