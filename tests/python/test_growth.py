"""The soak's judgement: what fills up levels off, and a leak does not, however small it is beside what is there."""

import sys

import pytest
from harness.processes import ROOT

sys.path.insert(0, str(ROOT / "tests/soak"))
from growth import Sample, levels_off, plot, rises  # noqa: E402

MIB = 1 << 20


def run(rss) -> list[Sample]:
    return [Sample(at, 1, int(rss(at)), 0, 0, 0, 0, 0) for at in range(0, 1_200, 3)]


@pytest.mark.parametrize("what, rss, holds", [
    ("as it is", lambda at: 100 * MIB, True),
    ("breathes", lambda at: (100 + at // 3 % 5) * MIB, True),
    ("fills a cache", lambda at: (200 - 100 * 0.5 ** (at / 100)) * MIB, True),
    ("shrinks", lambda at: (200 - at / 20) * MIB, True),
    ("leaks a little of much", lambda at: 4_000 * MIB + at * MIB / 30, False),
    ("leaks ever more", lambda at: 100 * MIB + (at / 300) ** 2 * 10 * MIB, False),
])
def test_what_leaks_is_told_from_what_levels_off(what, rss, holds):
    assert levels_off(*rises(run(rss), "rss"), 6 * MIB) == holds, what


def test_a_run_has_a_picture(tmp_path):
    plot(tmp_path / "soak.svg", run(lambda at: at))
    assert (tmp_path / "soak.svg").read_text().count("<polyline") == 6
