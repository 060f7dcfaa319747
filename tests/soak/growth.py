"""What grows: samples of a process over time, and whether they still rise at the end."""

import csv
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Sample:
    """One look at one router, `at` seconds after the start."""

    at: float
    router: int
    rss: int
    descriptors: int
    threads: int
    log: int
    chunks: int
    data: int


MEASURES = [each.name for each in fields(Sample) if each.name not in ("at", "router")]


def look(at: float, router: int, pid: int, log: Path, data: Path) -> Sample:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Sample(at=round(at, 1), router=router, rss=int(status["VmRSS"].split()[0]) << 10, descriptors=len(os.listdir(f"/proc/{pid}/fd")),
                  threads=int(status["Threads"]), log=log.stat().st_size, **size_of(data))


def size_of(folder: Path) -> dict[str, int]:
    """Files of the ledger's log, which each fill up and then go as a whole, and bytes of all others; one that goes meanwhile counts nothing."""
    chunks = data = 0
    for path in folder.rglob("*"):
        try:
            size = path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
        is_chunk = path.suffix == ".wal"
        chunks, data = chunks + is_chunk, data + (0 if is_chunk else size)
    return {"chunks": chunks, "data": data}


def slope(samples: list[Sample], measure: str) -> float:
    """Rise a second of the straight line that fits best."""
    times, values = [sample.at for sample in samples], [getattr(sample, measure) for sample in samples]
    middle, mean = sum(times) / len(times), sum(values) / len(values)
    spread = sum((time - middle) ** 2 for time in times)
    return sum((time - middle) * (value - mean) for time, value in zip(times, values)) / spread if spread else 0.0


def quarter(samples: list[Sample], number: int) -> list[Sample]:
    """Those of the first, second, third or fourth quarter of the time."""
    length = samples[-1].at / 4
    return [sample for sample in samples if (number - 1) * length <= sample.at <= number * length]


def rises(samples: list[Sample], measure: str) -> tuple[float, float]:
    """By how much the straight lines through the third and the fourth quarter rise."""
    def rise(part: list[Sample]) -> float:
        return slope(part, measure) * (part[-1].at - part[0].at)
    return rise(quarter(samples, 3)), rise(quarter(samples, 4))


def levels_off(rise_before: float, rise: float, noise: float) -> bool:
    """What still fills up rises ever less; what leaks rises as before, however long it is looked at."""
    return rise <= noise or rise < rise_before / 2


COLOURS = ("#0072b2", "#d55e00", "#009e73")
WIDTH, HEIGHT, EDGE = 900, 150, 24


def plot(path: Path, samples: list[Sample]) -> None:
    """One picture a measure, below each other; one line a router."""
    parts = []
    for row, measure in enumerate(MEASURES):
        most, last = max(getattr(sample, measure) for sample in samples) or 1, samples[-1].at or 1
        top = row * (HEIGHT + EDGE) + EDGE
        parts.append(f'<text x="4" y="{top - 6}">{measure}, up to {most:,}</text><rect y="{top}" width="{WIDTH}" height="{HEIGHT}"/>')
        for router in sorted({sample.router for sample in samples}):
            own = [(sample.at, getattr(sample, measure)) for sample in samples if sample.router == router]
            line = " ".join(f"{WIDTH * at / last:.1f},{top + HEIGHT * (1 - value / most):.1f}" for at, value in own)
            parts.append(f'<polyline points="{line}" stroke="{COLOURS[router % len(COLOURS)]}"/>')
    style = "<style>text { font: 13px sans-serif } rect { fill: none; stroke: #ccc } polyline { fill: none }</style>"
    size = f'width="{WIDTH}" height="{len(MEASURES) * (HEIGHT + EDGE) + EDGE}"'
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{style}{"".join(parts)}</svg>\n')


def write(path: Path, samples: list[Sample]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        rows = csv.DictWriter(file, [each.name for each in fields(Sample)])
        rows.writeheader()
        rows.writerows(asdict(sample) for sample in samples)
