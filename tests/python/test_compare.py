"""`tests/simulator/compare` tells equal figures from figures of which one cell is off."""

import json
import runpy
import subprocess

import pytest
from harness.processes import ROOT

COMPARE = ROOT / "tests/simulator/compare"
TAG = "A fleet"


def put(figures, pointer, value):
    *path, last = pointer.strip("/").split("/")
    for part in path:
        figures = figures.setdefault(part, {})
    figures[last] = value


@pytest.fixture
def compare(tmp_path):
    """Compares the reference's table of two policies at two loads with ours, of which some values are others."""
    module = runpy.run_path(str(COMPARE))
    columns, names = module["COLUMNS"], {"rr": "round_robin", "dynamo": "dynamo"}

    def run(other=None, known=""):
        lines, runs = [], []
        for load in (16, 24):
            lines.append(f"## {TAG} - load {load}")
            for short, policy in names.items():
                cells = [short] + ["0"] * 18
                figures = {"policy": policy, "traffic": {"load": float(load), "seed": 1}}
                for column, (_, where, unit) in columns.items():
                    cells[column] = f"{load + column}.25"
                    put(figures, where, (load + column + 0.25) / unit)
                for where, value in (other or {}).get((policy, load), {}).items():
                    put(figures, where, value)
                lines.append("|" + "|".join(cells) + "|")
                runs.append(figures)
        (results := tmp_path / "results.md").write_text("\n".join(lines))
        (figures := tmp_path / "figures.json").write_text(json.dumps({"runs": runs}))
        return subprocess.run([COMPARE, results, TAG, figures, known], capture_output=True, text=True, timeout=20, check=False)

    return run


def test_equal_figures_are_equal(compare):
    done = compare()
    assert done.returncode == 0 and "4 cells compared, 4 equal to every digit" in done.stdout, done.stdout + done.stderr


def test_one_cell_off_fails(compare):
    done = compare({("dynamo", 24): {"/step/mean": 31.0}})
    assert done.returncode == 1 and "dynamo@24: is apart and not named" in done.stdout, done.stdout


def test_a_cell_that_is_known_to_part_is_named_and_must_part(compare):
    assert compare({("dynamo", 24): {"/step/mean": 31.0}}, "dynamo@24").returncode == 0
    done = compare({}, "dynamo@24")
    assert done.returncode == 1 and "dynamo@24: is named as apart and is not" in done.stdout


def test_what_requests_on_their_own_do_not_have_is_not_compared(compare):
    assert compare({("round_robin", 16): {"/session/mean": None}}).returncode == 0
