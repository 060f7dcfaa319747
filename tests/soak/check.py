"""Three routers as one cluster under mixed traffic for long: memory, descriptors, threads, log and disk level off.

    tests/soak/run                  20 minutes
    tests/soak/run --seconds 120    so many
    --csv FILE                      where all samples go [default: target/test-logs/soak.csv]
"""

import argparse
import random
import sys
import time
from pathlib import Path

from fleet import Routers
from growth import MEASURES, Sample, levels_off, look, plot, rises, write
from harness.cluster import SimWorker
from harness.operator import Operator
from harness.processes import ROOT
from harness.redis import Redis
from mixture import Mixture

CLIENTS = 12
LOOK_EVERY = 3.0
# Workers that stay, and most of those that come and go.
STEADY, MOST_GUESTS = 2, 3
CHANGE_EVERY = (6.0, 20.0)
REGISTERED_FOR = 15.0
SPEED = ("--speed-up", "10")
# Whatever is kept on purpose is full well before the last quarter: the bounds of the caches are small here.
SETTINGS = ('prefix_cache.memory_limit="8MiB"', 'prefix_cache.body_memory_limit="8MiB"', 'shared_cache.memory_limit="4MiB"', 'decision_log.max_size="1MiB"', "discovery.max_registrations=32")


class Guests:
    """Workers that register, and leave with a word, without one, or by kill -9 under load."""

    def __init__(self, operators: list[Operator]):
        self.operators, self.chance = operators, random.Random(7)
        self.here: list[SimWorker] = []
        self.changes, self.next_change, self.next_beat = 0, 0.0, 0.0

    def tick(self, now: float) -> None:
        if now >= self.next_beat:
            self.next_beat = now + REGISTERED_FOR / 3
            for worker in self.here:
                self._register(worker)
        if now >= self.next_change:
            self.next_change = now + self.chance.uniform(*CHANGE_EVERY)
            self.changes += 1
            if len(self.here) < MOST_GUESTS and (not self.here or self.chance.random() < 0.6):
                self._come()
            else:
                self._go(self.here.pop(self.chance.randrange(len(self.here))))

    def _come(self) -> None:
        worker = SimWorker("hybrid", *SPEED)
        worker.process.wait_for_port(worker.port, 120)
        self.here.append(worker)
        self._register(worker)

    def _register(self, worker: SimWorker) -> list[str]:
        """Its id at each router."""
        body = {"url": worker.url, "ttl": f"{int(1_000 * REGISTERED_FOR)}ms"}
        return [operator.write("POST", "registrations", body).ok()["worker"] for operator in self.operators]

    def _go(self, worker: SimWorker) -> None:
        way = self.chance.choice(("withdraws", "stops", "is killed"))
        if way == "withdraws":
            for operator, name in zip(self.operators, self._register(worker)):
                operator.write("DELETE", f"registrations/{name}").ok()
        worker.process.kill() if way == "is killed" else worker.process.stop()

    def stop(self) -> None:
        for worker in self.here:
            worker.process.stop()


class Steady:
    """The workers that every router is configured with."""

    def __init__(self) -> None:
        self.all = [SimWorker("hybrid", *SPEED).wait() for _ in range(STEADY)]
        self.urls = [worker.url for worker in self.all]

    def stop(self) -> None:
        for worker in self.all:
            worker.process.stop()


# What moves up and down in a quarter however long a run is.
NOISE = {
    # An allocator's arenas breathe by some percent.
    "rss": 6 << 20,
    # Those of requests in flight and of pools, which hold at most one a client and router more at the end than in the middle.
    "descriptors": CLIENTS + 8,
    # Blocking threads come with a burst and go when idle for 10 s.
    "threads": 8,
    # A full one waits for the next snapshot, while the next one fills up.
    "chunks": 2,
    # The snapshot: its sessions are known, and what they have is bounded.
    "data": 1 << 20,
}


def judge(samples: list[Sample], router: int, asked: int, changes: int) -> list[str]:
    """Prints the table of one router, and returns what did not level off."""
    broken = []
    for measure in MEASURES:
        first, last = getattr(samples[0], measure), getattr(samples[-1], measure)
        most, (before, rise) = max(getattr(sample, measure) for sample in samples), rises(samples, measure)
        # A log only grows. Requests are no lines of it; a worker that comes or goes is some lines at each router.
        noise = NOISE.get(measure, 4_096 * changes + 16 * asked)
        word = "" if levels_off(before if measure in NOISE else 0, rise, noise) else "GROWS"
        print(f"  {router:>6} {measure:<12} {first:>14,} {last:>14,} {most:>14,} {before:>14,.0f} {rise:>14,.0f} {noise:>14,.0f} {word}", flush=True)
        if word:
            broken.append(f"{measure} of router {router} rose by {rise:,.0f} in the last quarter and by {before:,.0f} in the one before; {noise:,.0f} is noise")
    return broken


def soak(seconds: float, csv: Path) -> list[str]:
    redis, steady = Redis(), Steady()
    samples: list[Sample] = []
    try:
        settings = (*SETTINGS, f'shared_cache.redis_url="{redis.url}"', "shared_cache.key_prefix=soak",
                    "shared_cache.encryption_secret=0123456789abcdef", 'shared_cache.timeout="200ms"')
        with Routers(steady, 3, voters=3, settings=settings) as routers:
            guests = Guests([Operator(serve.operator) for serve in routers.all])
            mixture = Mixture([serve.port for serve in routers.all], CLIENTS)
            try:
                begun, late = time.monotonic(), None
                while (at := time.monotonic() - begun) < seconds:
                    guests.tick(at)
                    for number, serve in enumerate(routers.all, 1):
                        assert serve.process.alive(), f"router {number} ended:\n{serve.process.last_lines()}"
                        samples.append(look(at, number, serve.process.pid, serve.process.log, serve.data))
                    if late is None and at >= 0.75 * seconds:
                        late = (mixture.count().total(), guests.changes)
                    time.sleep(LOOK_EVERY)
            finally:
                mixture.stop()
                guests.stop()
    finally:
        steady.stop()
        redis.stop()
        write(csv, samples)
        if samples:
            plot(csv.with_suffix(".svg"), samples)
    outcomes = mixture.count()
    for (way, outcome), count in sorted(outcomes.items()):
        print(f"  {way:<12} {outcome:<24} {count:>8}")
    late = late or (0, 0)
    asked, changes = outcomes.total() - late[0], guests.changes - late[1]
    print(f"  {outcomes.total()} requests, {guests.changes} workers came or went; {asked} and {changes} of them in the last quarter")
    print(f"  {'router':>6} {'what':<12} {'first':>14} {'last':>14} {'most':>14} {'third quarter':>14} {'fourth':>14} {'noise':>14}")
    broken = []
    for number in (1, 2, 3):
        broken += judge([sample for sample in samples if sample.router == number], number, asked, changes)
    # A worker that is killed in the middle of an answer breaks that one at most.
    odd = sum(count for (way, outcome), count in outcomes.items() if way != "bad" and not outcome.isdigit())
    if odd > 4 * guests.changes + 0.001 * outcomes.total():
        broken.append(f"{odd} answers broke off while {guests.changes} workers came or went")
    errors = sum(count for (_, outcome), count in outcomes.items() if outcome == "500")
    if errors:
        broken.append(f"{errors} answers of 500")
    return broken


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=1_200)
    parser.add_argument("--csv", type=Path, default=ROOT / "target/test-logs/soak.csv")
    options = parser.parse_args()
    broken = soak(options.seconds, options.csv)
    print(f"samples: {options.csv}, and a picture of them beside it")
    for what in broken:
        print(f"DOES NOT HOLD: {what}")
    print("all levels off" if not broken else f"{len(broken)} did not hold")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
