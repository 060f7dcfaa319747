"""`ownerserve simulate` on the committed trace: the page, the JSON and the CSV say what the printed table says."""

import csv
import json
import re
import statistics
import subprocess
from html.parser import HTMLParser

import pytest
from harness.processes import BINARY, ROOT

TRACE = ROOT / "configs/traces/weka_cc"
POLICIES = ["round_robin", "dynamo", "ownerserve", "oracle"]
LOADS = [2, 6]
SEEDS = [1, 2, 3]
SMALL = ["--workers", "2", "--max-steps", "12", "--policy", ",".join(POLICIES), "--load", ",".join(map(str, LOADS)),
         "--seeds", ",".join(map(str, SEEDS))]


def simulate(*words):
    return subprocess.run([BINARY, "simulate", TRACE, *words], capture_output=True, text=True, timeout=120, check=False)


class Page(HTMLParser):
    """Its tables by name, what it asks for from elsewhere, and tags that are still open."""

    # HTML knows tags that have no end; SVG closes those that hold nothing, not even a title.
    ALONE = {"meta", "input"}
    DRAWN = {"line", "path", "rect", "circle", "polyline"}

    def __init__(self, text):
        super().__init__()
        self.tables, self.foreign, self.open = {}, [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.foreign += [value for name, value in attrs.items() if name in ("src", "href") and not value.startswith("#")]
        if tag not in self.ALONE:
            self.open.append(tag)
        if attrs.get("role") == "region":
            self.rows = self.tables.setdefault(attrs["aria-label"], [])
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        assert tag in self.ALONE | self.DRAWN, tag

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    page = tmp_path_factory.mktemp("report") / "it.html"
    done = simulate(*SMALL, "--report", page)
    assert done.returncode == 0, done.stderr
    return done.stdout, page


def printed(text):
    """The first table of the output: a dictionary a row, means without their confidence."""
    head, *rows = text.split("\n\n")[0].splitlines()
    names = head.split()
    cells = [re.sub(r" ±[\d.]+", "", row).split() for row in rows]
    return {(row[0], float(row[1])): dict(zip(names, row, strict=True)) for row in cells}


def test_the_table_the_json_and_the_csv_agree(run):
    text, page = run
    table = printed(text)
    assert sorted(table) == sorted((policy, float(load)) for policy in POLICIES for load in LOADS)
    document = json.loads(page.with_suffix(".json").read_text())
    cells = {(cell["policy"], cell["load"]): cell for cell in document["cells"]}
    rows = list(csv.DictReader(page.with_suffix(".csv").open()))
    assert len(rows) == len(document["runs"]) == len(POLICIES) * len(LOADS) * len(SEEDS)
    for key, shown in table.items():
        seeds = [row for row in rows if (row["policy"], float(row["load"])) == key]
        assert [int(row["seed"]) for row in seeds] == SEEDS
        for name in list(shown)[2:]:
            digits = len(shown[name].partition(".")[2])
            half = 0.5 * 10**-digits
            said = cells[key]["figures"][name]
            if said is None:
                assert shown[name] == "-" and {row[name] for row in seeds} == {""}
                continue
            assert float(shown[name]) == pytest.approx(said["mean"], abs=1.01 * half), (key, name)
            mean = statistics.fmean(float(row[name]) for row in seeds)
            # Every row of the CSV is rounded as well.
            assert float(shown[name]) == pytest.approx(mean, abs=2.02 * half), (key, name)


def test_the_csv_is_the_runs_of_the_json(run):
    _, page = run
    runs = json.loads(page.with_suffix(".json").read_text())["runs"]
    for row, one in zip(csv.DictReader(page.with_suffix(".csv").open()), runs, strict=True):
        assert (row["policy"], float(row["load"]), int(row["seed"])) == (one["policy"], *one["traffic"].values())
        assert (int(row["measured"]), row["unserved"]) == (one["step"]["count"], "0")
        assert row["step_mean_s"] == f"{one['step']['mean']:.3f}"
        assert row["transferred_gb"] == f"{one['memory']['kv_transfer_bytes'] / 1e9:.1f}"


def test_verdicts_are_against_the_best_baseline_of_each_load_and_figure(run):
    text, page = run
    document = json.loads(page.with_suffix(".json").read_text())
    cells = {(cell["policy"], cell["load"]): cell["figures"] for cell in document["cells"]}
    bounds = {"step_mean_s": 1.03, "session_mean_s": 1.03, "ttft_p95_s": 1.10}
    assert [(one["load"], one["figure"]) for one in document["verdicts"]] == [(load, name) for load in LOADS for name in bounds]
    for one in document["verdicts"]:
        mean = lambda policy, one=one: cells[policy, one["load"]][one["figure"]]["mean"]
        assert one["best"] == min(["round_robin", "dynamo"], key=mean)
        assert one["ratio"]["mean"] == pytest.approx(mean("ownerserve") / mean(one["best"]))
        assert one["holds"] == (one["ratio"]["mean"] <= bounds[one["figure"]])
        word = "PASS" if one["holds"] else "SHORT"
        assert re.search(rf"^{one['load']:g} +{one['figure']} +{one['best']} .* {word}", text, re.M), one


def test_the_page_is_well_formed_asks_for_nothing_and_has_the_same_values(run):
    text, page = run
    parsed = Page(page.read_text())
    assert (parsed.open, parsed.foreign) == ([], [])
    head, *rows = parsed.tables["Every figure"]
    shown = printed(text)
    for row in rows:
        of = dict(zip(head, row, strict=True))
        expected = shown[of["policy"], float(of["load"])]
        assert {name: of[name].partition(" ±")[0] for name in expected} == expected


def test_equal_seeds_give_equal_runs(run):
    _, page = run
    again = simulate(*SMALL, "-o", "json")
    assert json.loads(again.stdout)["runs"] == json.loads(page.with_suffix(".json").read_text())["runs"]


@pytest.mark.parametrize(("words", "said"), [
    (["--max-steps", "1"], "accepted: a whole number, 3 or more"),
    (["--load", "-3"], "the load is -3; accepted: a whole number of sessions at once, 1 to the 35 that the trace has"),
    (["--load", "0"], "the load is 0; accepted"),
    (["--load", "nan"], "the load is NaN; accepted"),
    (["--load", "4,4"], "`--load` names 4 twice; accepted: each value once"),
    (["--policy", "fastest"], "there is no policy `fastest`; accepted: round_robin, "),
    (["--max-context-tokens", "5"], "accepted: a larger --max-context-tokens, or another trace"),
    (["--max-pause", "300"], "accepted is a duration with a unit"),
    (["--host-bandwidth", "20"], "accepted is a size per second with a unit"),
    (["--report", "/nowhere/a.html"], "cannot write the report /nowhere/a.html"),
    (["--report", "a.pdf"], "accepted: a file whose name ends in .html"),
])
def test_what_cannot_be_run_is_said_with_what_can(words, said):
    done = simulate(*words)
    assert done.returncode != 0 and said in done.stderr, done.stderr
    assert done.stdout == ""


def test_an_empty_trace_is_named(tmp_path):
    (empty := tmp_path / "empty.jsonl").write_text("")
    done = subprocess.run([BINARY, "simulate", empty], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode != 0
    assert f"{empty}:1: holds no request; accepted: at least one" in done.stderr


def test_ablations_are_told_by_the_whole(tmp_path):
    page = tmp_path / "page.html"
    done = simulate("--workers", "2", "--policy", "ablations", "--load", "8", "--report", page)
    assert done.returncode == 0, done.stderr
    told = done.stdout.split("by ownerserve whole:\n")[1].split("\n\n")[0].splitlines()
    report = json.loads(page.with_suffix(".json").read_text())
    runs = {run["policy"]: run for run in report["runs"]}
    assert len(told) - 1 == len(report["ablations"]) == len(runs) - 1 >= 9
    for worth in report["ablations"]:
        steps = [runs[policy]["step"]["mean"] for policy in (worth["policy"], "ownerserve")]
        assert worth["ratios"]["step_mean_s"]["mean"] == pytest.approx(steps[0] / steps[1])
    assert runs["ownerserve_no_fetch"]["service"]["actions"].get("state_migration", 0) == 0
    assert runs["ownerserve"]["service"]["actions"]["state_migration"] > 0
    tables = Page(page.read_text()).tables
    assert len(tables["Figures without a part, by the whole's"]) == len(told)
    predictions = tables["TTFT prediction, by action"]
    assert {row[2] for row in predictions[1:] if row[0] == "ownerserve"} >= {"all", "colocated_prefill", "state_migration"}


@pytest.mark.parametrize(("shape", "steps"), [("shared-prefix", 6 * 4), ("forked-rollouts", 6 * (3 * 4 + 2))])
def test_generated_traffic_is_a_trace(tmp_path, shape, steps):
    done = subprocess.run([BINARY, "trace", "generate", shape, "--sessions", "6", "--fanout", "3", "--steps", "4"],
                          capture_output=True, text=True, timeout=20, check=True)
    (trace := tmp_path / "made.jsonl").write_text(done.stdout)
    run = subprocess.run([BINARY, "simulate", trace, "--load", "6", "--workers", "2", "--policy", "ownerserve", "-o", "json"],
                         capture_output=True, text=True, timeout=60, check=True)
    assert [(one["steps"], one["unserved"]) for one in json.loads(run.stdout)["runs"]] == [(steps, 0)]
