"""What grows: samples of a process over time, and whether the second half of them still rises."""

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
    data: int


MEASURES = [each.name for each in fields(Sample) if each.name not in ("at", "router")]


def look(at: float, router: int, pid: int, log: Path, data: Path) -> Sample:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Sample(at=round(at, 1), router=router, rss=int(status["VmRSS"].split()[0]) << 10, descriptors=len(os.listdir(f"/proc/{pid}/fd")),
                  threads=int(status["Threads"]), log=log.stat().st_size, data=size_of(data))


def size_of(folder: Path) -> int:
    """Bytes of all files; one that goes meanwhile counts nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def slope(samples: list[Sample], measure: str) -> float:
    """Rise a second of the straight line that fits best."""
    times, values = [sample.at for sample in samples], [getattr(sample, measure) for sample in samples]
    middle, mean = sum(times) / len(times), sum(values) / len(values)
    spread = sum((time - middle) ** 2 for time in times)
    return sum((time - middle) * (value - mean) for time, value in zip(times, values)) / spread if spread else 0.0


def last_half(samples: list[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.at >= samples[-1].at / 2]


def write(path: Path, samples: list[Sample]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        rows = csv.DictWriter(file, [each.name for each in fields(Sample)])
        rows.writeheader()
        rows.writerows(asdict(sample) for sample in samples)
