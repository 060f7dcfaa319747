"""`tests/simulator/sweep` holds OwnerServe against the best baseline of each load."""

import csv
import runpy
import statistics
import subprocess

import pytest
from harness.processes import BINARY, ROOT

SWEEP = ROOT / "tests/simulator/sweep"


def sweep(*words):
    return subprocess.run([SWEEP, *words], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_the_committed_traces_have_a_row_a_load_and_kept_runs_are_not_run_again(tmp_path):
    done = sweep("--binary", BINARY, "--keep", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()[2:]]
    assert [(name, load) for name, load, *_ in rows] == [("weka", "4"), ("weka", "8"), ("tau", "32")]
    runs = list(csv.DictReader((tmp_path / "weka.csv").read_text(encoding="utf-8").splitlines()))
    ratio, best = rows[1][3].split()

    def mean(policy):
        return statistics.mean(float(run["step_mean_s"]) for run in runs if run["policy"] == policy and run["load"] == "8")

    assert float(ratio) == pytest.approx(mean("ownerserve") / mean(best), abs=6e-4)
    assert all(mean(best) <= mean(run["policy"]) for run in runs if run["policy"] not in ("ownerserve", "pooled_memory", "oracle"))
    again = sweep("--binary", "/nowhere", "--keep", tmp_path)
    assert (again.returncode, again.stdout) == (0, done.stdout), again.stderr


def test_who_left_steps_unserved_is_not_the_best():
    ratio = runpy.run_path(str(SWEEP))["ratio"]
    rows = [{"policy": policy, "step_mean_s": mean, "unserved": unserved} for policy, mean, unserved in (
        ("ownerserve", "2", "0"), ("fast", "1", "3"), ("slow", "4", "0"), ("oracle", "0.5", "0"))]
    assert ratio(rows, "step_mean_s") == (0.5, "slow")
    assert ratio(rows[:1], "step_mean_s") is None


def test_unknown_traffic_is_refused_with_what_there_is():
    done = sweep("nope")
    assert done.returncode == 2 and "accepted: weka, tau" in done.stderr
